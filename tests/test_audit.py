"""The audit: what it says of the inherited tree, and which change of a tree turns which row."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest
import torch

from minivllm import audit as tool
from minivllm.audit import AuditError, audit, main, rows

ROOT = Path(__file__).parents[1]
INHERITED = ROOT / "notebooks" / "inherited"
FIRST_REPORT = json.loads((INHERITED / "first_report.json").read_text(encoding="utf-8"))
DAY = date(2026, 6, 7)

# --- the inherited tree ---


@pytest.fixture(scope="module")
def inherited() -> tool.Report:
    return audit(INHERITED, DAY)


def by_file(report: tool.Report) -> dict[str, tool.Report]:
    return {entry["file"]: {key: entry[key] for key in ("hits", "found_any")} for entry in report["file_scan_results"]}


def test_inherited_scan_finds_the_words_that_grep_found(inherited: tool.Report) -> None:
    assert by_file(inherited) == by_file(FIRST_REPORT)
    comments = {entry["file"]: entry["hits_in_comments"] for entry in inherited["file_scan_results"]}
    assert comments.pop("minivllm/model/qwen3.py") == {"paged_kernel": {"triton": 1}}
    assert set(map(str, comments.values())) == {"{}"}


@pytest.mark.parametrize("key", ["audit_target", "timestamp", "context_paged_analysis", "结论", "实现状态", "阻塞项"])
def test_inherited_part_is_the_first_report(inherited: tool.Report, key: str) -> None:
    found, expected = inherited[key], FIRST_REPORT[key]
    if isinstance(expected, dict):  # ours may say more, never something else
        found = {name: found[name] for name in expected}
    assert found == expected


def test_inherited_status_differs_from_grep_in_the_kernel_only(inherited: tool.Report) -> None:
    found, expected = inherited["status"], FIRST_REPORT["status"]
    assert {key for key in expected if found[key] != expected[key]} == {"has_paged_kernel"}
    assert (expected["has_paged_kernel"], found["has_paged_kernel"]) == (True, False)


def test_inherited_buffer_is_what_is_allocated_not_what_is_checked(inherited: tool.Report) -> None:
    found, expected = inherited["kv_cache_paged_analysis"], FIRST_REPORT["kv_cache_paged_analysis"]
    assert {key for key in expected if found[key] != expected[key]} == {"buffer_shape"}
    assert found["buffer_shape"] == expected["buffer_shape"][:1]


def test_inherited_cache_is_dead_code_and_decode_is_brute_force(inherited: tool.Report) -> None:
    definitions = {"minivllm/core/kv_cache.py": ["KVCache"]}
    dead = {"definitions": definitions, "references": {}, "is_dead_code": True}
    assert inherited["kv_cache_reference_analysis"] == dead
    assert inherited["evidence"]["brute_force"] == ["minivllm/validate_model.py"]


def test_inherited_rows(inherited: tool.Report) -> None:
    values = {row.key: row.value for row in rows(inherited)}
    assert values.pop("brute_force") is True
    assert values.pop("set_context") == 0
    assert set(values.values()) == {False}
    assert [row.blocker for row in rows(inherited) if row.blocker] == FIRST_REPORT["阻塞项"]


def test_inherited_engine_runs() -> None:
    command = [sys.executable, "-m", "minivllm.validate_model"]
    done = subprocess.run(command, cwd=INHERITED, capture_output=True, text=True, check=True)
    agreement, tokens = done.stdout.splitlines()
    assert agreement.endswith("True")
    assert len(json.loads(tokens.removeprefix("tokens: "))) == 5 + 8


def load_inherited_cache() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inherited_kv_cache", INHERITED / "minivllm/core/kv_cache.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_inherited_cache_has_the_interface_of_the_second_report() -> None:
    cls = load_inherited_cache().KVCache
    names = list(inspect.signature(cls).parameters)
    assert names == ["num_layers", "max_seq_len", "num_kv_heads", "head_dim", "device", "dtype"]
    cache = cls(2, 8, 3, 4, dtype=torch.float64)
    k, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    cache.write(1, torch.tensor([5, 2]), k, v)
    cache.write(1, 0, k[:1], v[:1])
    keys, values = cache.read(1, 6)
    assert keys.shape == (6, 3, 4) and keys.dtype == torch.float64
    assert torch.equal(keys[[5, 2, 0]].float(), torch.stack((k[0], k[1], k[0])))
    assert torch.equal(values[[5, 2, 0]].float(), torch.stack((v[0], v[1], v[0])))
    assert not cache.read(0, 8)[0].any()
    assert cache.layer_cache(1)[0].shape == (8, 3, 4)
    cache.reset()
    assert not cache.k_cache.any() and not cache.v_cache.any()


@pytest.mark.parametrize(
    ("layer", "positions", "shape", "error"),
    [
        (2, 0, (1, 3, 4), IndexError),
        (-1, 0, (1, 3, 4), IndexError),
        (0, 8, (1, 3, 4), IndexError),
        (0, -1, (1, 3, 4), IndexError),
        (0, 0, (2, 3, 4), ValueError),
        (0, 0, (1, 4, 3), ValueError),
    ],
)
def test_inherited_cache_refuses(layer: int, positions: int, shape: tuple[int, ...], error: type[Exception]) -> None:
    cache = load_inherited_cache().KVCache(2, 8, 3, 4)
    with pytest.raises(error):
        cache.write(layer, positions, torch.ones(shape), torch.ones(shape))
    assert not cache.k_cache.any()


# --- a small tree with everything, and what each change of it does ---

Tree = dict[str, str]
WHOLE: Tree = {
    "core/block_manager.py": """
from collections import deque
class BlockManager:
    def __init__(self, num_blocks):
        self._free = deque(range(num_blocks))
        self._tables = {}
    def allocate(self, seq):
        self._tables[seq] = [self._take()]
    def _take(self):
        return self._free.popleft()
    def free(self, seq):
        for block in self._tables.pop(seq):
            self._free.append(block)
""",
    "core/scheduler.py": """
class Scheduler:
    def __init__(self, block_manager):
        self.block_manager, self.waiting, self.running = block_manager, [], []
    def add(self, seq):
        self.waiting.append(seq)
    def schedule(self):
        self._admit()
        return list(self.running)
    def _admit(self):
        while self.waiting:
            self.block_manager.allocate(self.waiting[0])
            self.running.append(self.waiting.pop(0))
""",
    "core/kv_cache.py": """
import torch
class PagedKVCache:
    def __init__(self, num_layers, num_blocks, block_size, head_dim):
        shape = (num_layers, num_blocks, block_size, head_dim)
        self.k_cache = torch.empty(shape)
    def layer_cache(self, i):
        return self.k_cache[i]
""",
    "utils/context.py": """
class Context:
    slot_mapping: object = None
    block_tables: object = None
    context_lens: object = None
def set_context(context): ...
def get_context(): ...
def reset_context(): set_context(None)
""",
    "engine/model_runner.py": """
from ..utils.context import Context, set_context
class ModelRunner:
    def __init__(self, model, kv_cache):
        self.views = kv_cache.layer_cache(0)
    def run(self, slots, tables, lens):
        set_context(Context(slot_mapping=slots, block_tables=tables, context_lens=lens))
""",
    "layers/attention.py": """
from minivllm.utils.context import get_context
from minivllm.kernels.paged import paged_decode
def forward(q, cache):
    context = get_context()
    return paged_decode(q, cache, context.block_tables, context.slot_mapping, context.context_lens)
""",
    "kernels/paged.py": """
import triton
import triton.language as tl
@triton.jit
def kernel(q, k_cache, block_tables, stride: tl.constexpr):
    table = block_tables + tl.program_id(0)
    page = tl.load(table)
    offset = page * stride
    k = tl.load(k_cache + offset)
def paged_decode(q, k_cache, block_tables, slot_mapping, lens):
    q[slot_mapping] = 0
    kernel[(1,)](q, k_cache, block_tables, 4)
""",
}
ALL_ON = {
    "block_manager": True,
    "scheduler": True,
    "set_context": 1,
    "block_tables": True,
    "paged_kernel": True,
    "paged_buffer": True,
    "kv_cache": True,
    "brute_force": False,
}
MANAGER, SCHEDULER, CACHE = "core/block_manager.py", "core/scheduler.py", "core/kv_cache.py"
RUNNER, ATTENTION, KERNEL = "engine/model_runner.py", "layers/attention.py", "kernels/paged.py"


def write_tree(folder: Path, tree: Tree) -> Path:
    for name, text in tree.items():
        file = folder / "minivllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def values_of(folder: Path, tree: Tree) -> dict[str, bool | int]:
    return {row.key: row.value for row in rows(audit(write_tree(folder, tree), DAY))}


def mutated(file: str, old: str, new: str) -> Tree:
    assert WHOLE[file].count(old) == 1, f"{old!r} must stand once in {file}"
    return WHOLE | {file: WHOLE[file].replace(old, new)}


def test_whole_tree_is_paged_attention(tmp_path: Path) -> None:
    report = audit(write_tree(tmp_path, WHOLE), DAY)
    assert {row.key: row.value for row in rows(report)} == ALL_ON
    assert report["实现状态"] == report["status"]["verdict"] == "已实现 paged attention"
    assert report["阻塞项"] == report["status"]["details"] == []
    assert report["结论"] == "paged，是 paged attention。"
    assert report["context_paged_analysis"]["is_field_used"]
    assert report["evidence"]["set_context"] == {"minivllm/engine/model_runner.py": 1}
    assert report["evidence"]["paged_kernel"] == ["minivllm/kernels/paged.py:kernel"]
    cache = report["kv_cache_paged_analysis"]
    assert (cache["has_block_table"], cache["uses_slot_mapping"], cache["is_contiguous_buffer"]) == (True, True, False)


SET = "        set_context(Context(slot_mapping=slots, block_tables=tables, context_lens=lens))\n"
OFF = [
    ("allocate takes no block", MANAGER, "[self._take()]", "[0]", "block_manager"),
    ("free gives nothing back", MANAGER, "self._free.append(block)", "pass", "block_manager"),
    ("no method frees", MANAGER, "def free(", "def forget(", "block_manager"),
    ("manager of something else", MANAGER, WHOLE[MANAGER], WHOLE[MANAGER].replace("lock", "ook"), "block_manager"),
    (
        "manager without methods",
        MANAGER,
        WHOLE[MANAGER],
        "class BlockManager:\n    'allocate and free'",
        "block_manager",
    ),
    (
        "stubs",
        MANAGER,
        WHOLE[MANAGER],
        "class BlockManager:\n def allocate(s): ...\n def free(s): ...",
        "block_manager",
    ),
    ("no schedule", SCHEDULER, "def schedule(", "def plan(", "scheduler"),
    ("add does not queue", SCHEDULER, "self.waiting.append(seq)", "pass", "scheduler"),
    ("no running queue", SCHEDULER, WHOLE[SCHEDULER], WHOLE[SCHEDULER].replace("running", "busy"), "scheduler"),
    ("asks for no blocks", SCHEDULER, "self.block_manager.allocate(self.waiting[0])", "pass", "scheduler"),
    ("scheduler is a name", SCHEDULER, WHOLE[SCHEDULER], "class Scheduler:\n    waiting = running = ()", "scheduler"),
    ("kernel not launched", KERNEL, "kernel[(1,)](", "print(", "paged_kernel"),
    ("launch in a comment", KERNEL, "    kernel[(1,)]", "    # kernel[(1,)]", "paged_kernel"),
    ("not a jit function", KERNEL, "@triton.jit\n", "", "paged_kernel"),
    ("jit of another library", KERNEL, "import triton\n", "import numba as triton\n", "paged_kernel"),
    ("page number unused", KERNEL, "tl.load(k_cache + offset)", "tl.load(k_cache + stride)", "paged_kernel"),
    ("page number never loaded", KERNEL, "page = tl.load(table)", "page = table", "paged_kernel"),
    ("table is no block table", KERNEL, "k_cache, block_tables, stride", "k_cache, lens, stride", "paged_kernel"),
    (
        "buffer in one piece",
        CACHE,
        "num_blocks, block_size, head_dim)\n        self",
        "n, d)\n        self",
        "paged_buffer",
    ),
    ("cache is never used", RUNNER, "kv_cache.layer_cache(0)", "None", "kv_cache"),
    ("block_tables not read", ATTENTION, "context.block_tables", "None", "block_tables"),
    ("block_tables of self read", ATTENTION, "context.block_tables", "self.block_tables", "block_tables"),
    ("block_tables filled with None", RUNNER, "block_tables=tables", "block_tables=None", "block_tables"),
    ("block_tables not filled", RUNNER, "block_tables=tables, ", "", "block_tables"),
    ("block_tables of another class", RUNNER, "import Context, set", "import Context as C, set", "block_tables"),
    (
        "set_context imported, not called",
        RUNNER,
        "        set_context(Context(",
        "        print(Context(",
        "set_context",
    ),
    ("set_context of self", RUNNER, "        set_context(", "        self.set_context(", "set_context"),
    (
        "set_context of somebody else",
        RUNNER,
        "Context, set_context",
        "Context\nfrom x import set_context",
        "set_context",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "row"), [case[1:] for case in OFF], ids=[case[0] for case in OFF])
def test_one_change_turns_one_row_off(tmp_path: Path, file: str, old: str, new: str, row: str) -> None:
    found = values_of(tmp_path, mutated(file, old, new))
    assert {key for key in ALL_ON if found[key] != ALL_ON[key]} == {row}
    assert not found[row]


SET_ELSEWHERE = "from minivllm.utils.context import set_context\nset_context(None)\n"
NOT_THE_ENGINE = ["tests/test_run.py", "test_run.py", "course/show.py", "assets/make.py", "audit.py", "notebooks/a.py"]


@pytest.mark.parametrize("file", NOT_THE_ENGINE)
def test_calls_outside_the_engine_do_not_count(tmp_path: Path, file: str) -> None:
    assert values_of(tmp_path, WHOLE | {file: SET_ELSEWHERE}) == ALL_ON


QUIET = {
    "docstring": '"""Call set_context() first, then kernel[grid]() with triton."""\n',
    "comment": "# set_context(context); @triton.jit\n",
    "import alone": "from minivllm.utils.context import set_context\n",
    "own function of that name": "def set_context(): ...\nset_context()\n",
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET)
def test_words_are_not_calls(tmp_path: Path, text: str) -> None:
    assert values_of(tmp_path, WHOLE | {"llm.py": text}) == ALL_ON


CALLS = {
    "plain": SET_ELSEWHERE,
    "renamed": "from minivllm.utils.context import set_context as tell\ntell(None)\n",
    "relative": "from .utils.context import set_context\nset_context(None)\n",
    "relative module": "from .utils import context\ncontext.set_context(None)\n",
    "module": "import minivllm.utils.context\nminivllm.utils.context.set_context(None)\n",
    "module renamed": "import minivllm.utils.context as c\nc.set_context(None)\n",
    "with": "from minivllm.utils.context import forward_context\nwith forward_context(None):\n    pass\n",
    "inside a function": "def f():\n    from minivllm.utils.context import set_context\n    set_context(None)\n",
}


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS)
def test_every_way_to_call_set_context_counts(tmp_path: Path, text: str) -> None:
    report = audit(write_tree(tmp_path, WHOLE | {"llm.py": text}), DAY)
    calls = {"minivllm/engine/model_runner.py": 1, "minivllm/llm.py": 1}
    assert report["evidence"]["set_context"] == calls
    assert report["status"]["set_context_call_count"] == 2


@pytest.mark.parametrize("key", ["block_manager", "scheduler", "paged_kernel", "paged_buffer"])
def test_one_file_turns_its_row_on(tmp_path: Path, key: str) -> None:
    file = {"block_manager": MANAGER, "scheduler": SCHEDULER, "paged_kernel": KERNEL, "paged_buffer": CACHE}[key]
    found = values_of(tmp_path, {file: WHOLE[file]})
    assert [name for name, value in found.items() if value] == [key]


BLOCKS_ELSEWHERE = {
    "class name": "class BlockPool:\n    def __init__(self):\n        self.free_list = [0]\n",
    "attribute": "class Pool:\n    def __init__(self):\n        self.free_blocks = [0]\n",
    "parameter": "class Pool:\n    def __init__(self, num_blocks):\n        self.free_list = [*range(num_blocks)]\n",
}


@pytest.mark.parametrize("head", BLOCKS_ELSEWHERE.values(), ids=BLOCKS_ELSEWHERE)
def test_any_name_can_say_that_a_class_is_about_blocks(tmp_path: Path, head: str) -> None:
    data = re.search(r"self\.(\w+)", head)[1]
    methods = "    def alloc(self): return self.DATA.pop()\n    def release(self, n): self.DATA.append(n)\n"
    found = values_of(tmp_path, {MANAGER: head + methods.replace("DATA", data)})
    assert [name for name, value in found.items() if value] == ["block_manager"]


def test_context_rows_need_the_runner_and_the_layer(tmp_path: Path) -> None:
    """The block manager's chapter comes long before anyone sets block_tables."""
    without = {file: text for file, text in WHOLE.items() if file not in (RUNNER, ATTENTION)}
    report = audit(write_tree(tmp_path / "without", without), DAY)
    assert report["阻塞项"] == FIRST_REPORT["阻塞项"][2:]
    assert report["结论"].startswith("paged buffer，不是 paged attention。Context.set_context()")
    assert audit(write_tree(tmp_path / "with", WHOLE), DAY)["阻塞项"] == []


KERNEL_FORMS = {
    "options": ("@triton.jit\n", "@triton.jit(do_not_specialize=['q'])\n"),
    "autotuned": ("@triton.jit\n", "@triton.autotune(configs=[], key=[])\n@triton.jit\n"),
    "imported jit": ("@triton.jit\n", "from triton import jit as compiled\n@compiled\n"),
    "short name": (WHOLE[KERNEL], WHOLE[KERNEL].replace("block_tables", "bt_ptr")),
    "one expression": ("tl.load(k_cache + offset)", "tl.load(k_cache + tl.load(table) * stride)"),
    "chosen kernel": ("kernel[(1,)](", "(kernel if q else None)[(1,)]("),
    "helper loads": (
        "tl.load(k_cache + offset)",
        "rows(k_cache, offset)\n@triton.jit\ndef rows(a, b): tl.load(a + b)\n",
    ),
}


@pytest.mark.parametrize(("old", "new"), KERNEL_FORMS.values(), ids=KERNEL_FORMS)
def test_forms_of_a_paged_kernel(tmp_path: Path, old: str, new: str) -> None:
    assert values_of(tmp_path, mutated(KERNEL, old, new)) == ALL_ON


def test_a_kernel_that_is_called_by_a_launched_one_counts(tmp_path: Path) -> None:
    outer = "@triton.jit\ndef outer(q, t):\n    kernel(q, q, t, 4)\n"
    text = WHOLE[KERNEL].replace("kernel[(1,)]", "outer[(1,)]").replace("def paged_decode", outer + "def paged_decode")
    assert values_of(tmp_path, WHOLE | {KERNEL: text}) == ALL_ON


LOOP = """
def decode(model, tokens):
    generated = list(tokens)
    ids = torch.tensor(generated)
    for _ in range(8):
        generated.append(model(ids).argmax())
        ids = torch.tensor({fed})
"""


@pytest.mark.parametrize(("fed", "brute"), [("generated", True), ("[generated[-1]]", False), ("generated[-1:]", False)])
def test_brute_force_is_feeding_everything_again(tmp_path: Path, fed: str, brute: bool) -> None:
    found = values_of(tmp_path, WHOLE | {"llm.py": LOOP.format(fed=fed)})
    assert found == ALL_ON | {"brute_force": brute}


# --- command line, bad input, the tool itself ---


@pytest.mark.parametrize("path", [INHERITED, INHERITED / "minivllm"], ids=["folder that holds it", "package"])
def test_command_line_prints_the_report(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path), "--date", "2026-06-07"]) == 0
    assert json.loads(capsys.readouterr().out) == audit(INHERITED, DAY)


def test_date_is_today_unless_given() -> None:
    assert audit(INHERITED)["timestamp"] == date.today().isoformat()


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, ["no package 'minivllm'"]),
        ({"readme.txt": "nothing"}, ["no Python file"]),
        ({"core/a.py": "x = 1\ndef broken(:\n"}, ["minivllm/core/a.py:2", "not valid Python"]),
        ({"core/a.py": "x = '\0'\n"}, ["minivllm/core/a.py:", "not valid Python"]),
    ],
    ids=["no package", "no code", "syntax error", "null byte"],
)
def test_bad_trees_are_named(tmp_path: Path, tree: Tree, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AuditError):
        audit(write_tree(tmp_path, tree))
    assert main([str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words)


def test_missing_path_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (write_tree(tmp_path, {"a.py": ""}) / "minivllm/a.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(AuditError, match=r"minivllm/a\.py"):
        audit(tmp_path)


def test_bad_date_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(INHERITED), "--date", "yesterday"])
    assert "'yesterday' is not a day" in capsys.readouterr().err


def test_only_the_standard_library() -> None:
    """Reading needs nothing but Python; the traced half is imported when it is asked for."""
    tree = ast.parse(Path(tool.__file__).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") != "main"]
    imports = tool.imports_of(tree, "minivllm/audit.py").values()
    assert {name.split(".")[0] for name in imports} <= sys.stdlib_module_names
