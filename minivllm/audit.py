"""Is this engine paged attention? An audit that reads definitions and calls, where grep reads words.

`python -m minivllm.audit PATH` prints the report as JSON. PATH is the package `minivllm`, or a folder that holds it.
Only the standard library is used, and nothing of the audited tree is imported: a half-built engine can be audited too.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

PACKAGE = "minivllm"
SKIPPED_FOLDERS = {"course", "assets", "tests", "notebooks", "__pycache__"}
KEYWORDS = {
    "paged_attention_core": ("block_size", "kvcache_block", "block_table", "block_tables", "slot_mapping"),
    "paged_kernel": ("triton",),
    "context_integration": ("set_context", "block_tables", "context_lens"),
}
FIELDS = ("block_tables", "slot_mapping", "context_lens")
BLOCKERS = {  # in the words and the order of the report that the course starts from
    "block_manager": "无 Block Manager（无 block 分配/释放逻辑）",
    "scheduler": "无调度器（无 batching/request 管理）",
    "set_context": "Context.set_context() 从未被调用（脚手架字段休眠）",
    "block_tables": "block_tables 字段仅存在于 Context 定义中，未在任何运行路径中被赋值",
}
QUESTIONS = {
    "block_manager": "Does a class allocate blocks from a free list, and free them to it?",
    "scheduler": "Does a class decide who runs, with a waiting and a running queue?",
    "set_context": "How many calls set the Context?",
    "block_tables": "Is block_tables filled, and read, outside its definition?",
    "paged_kernel": "Does a kernel that is launched load K and V through a block table?",
    "paged_buffer": "Is the cache cut into blocks?",
    "kv_cache": "Does the engine use its KV cache?",
    "brute_force": "Does a decode loop recompute the whole sequence?",
}
TAKING, GIVING_BACK = ("alloc",), ("free", "release", "dealloc")  # how the names of a block manager's methods begin
SETTERS = {"set_context", "forward_context"}
CACHE = re.compile(r"kv_?cache|^cache$")
TABLE = re.compile(r"block_table|(^|_)bt(_|$)")
Report = dict[str, Any]
Node = TypeVar("Node", bound=ast.AST)


class AuditError(ValueError):
    """The path holds no package, or a file of it cannot be read as Python."""


@dataclass(frozen=True)
class Module:
    """One parsed file of the audited package."""

    file: str  # with / on every system: "minivllm/core/kv_cache.py"
    text: str
    prose: str  # comments and docstrings
    tree: ast.Module
    imports: dict[str, str]  # local name -> where it comes from: {"tl": "triton.language"}


@dataclass(frozen=True)
class Row:
    """One question of the audit with its answer."""

    key: str
    question: str
    value: bool | int
    blocker: str  # what the report says while this row stands in the way, else ""


# --- reading the tree ---


def find_package(path: Path) -> Path:
    """The folder of the package. Raises AuditError when there is none."""
    for folder in (path / PACKAGE, path.resolve()):
        if folder.is_dir() and folder.name == PACKAGE:
            return folder
    raise AuditError(f"{path}: no package {PACKAGE!r} here; give its folder, or the folder that holds it")


def is_engine(file: Path) -> bool:
    """Tests call what they please, and a tool that looks for words contains them: neither is the engine."""
    hidden = any(part in SKIPPED_FOLDERS or part.startswith(".") for part in file.parts)
    return not (hidden or file.name in ("audit.py", "audit_trace.py") or file.name.startswith(("test_", "conftest")))


def read_modules(path: Path) -> list[Module]:
    """Every engine file of the package, parsed, in the order of their names."""
    package = find_package(path)
    files = sorted(file.relative_to(package) for file in package.rglob("*.py"))
    modules = [read_module(package, file) for file in files if is_engine(file)]
    if not modules:
        raise AuditError(f"{package}: no Python file here to audit")
    return modules


def read_module(package: Path, file: Path) -> Module:
    """Raises AuditError with the file and the line when it is not valid Python."""
    name = f"{PACKAGE}/{file.as_posix()}"
    try:
        with tokenize.open(package / file) as stream:
            text = stream.read()
        tree = ast.parse(text)
        return Module(name, text, prose_of(text, tree), tree, imports_of(tree, name))
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        raise AuditError(f"{name}:{getattr(error, 'lineno', None) or 1}: not valid Python: {error}") from error


def prose_of(text: str, tree: ast.Module) -> str:
    """Comments and docstrings of a file: words that do nothing."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    constants = [node.value.value for node in find(tree, ast.Expr) if isinstance(node.value, ast.Constant)]
    return "\n".join(comments + [value for value in constants if isinstance(value, str)])


def imports_of(tree: ast.Module, file: str) -> dict[str, str]:
    """Every import of the file, also those inside functions; relative ones made absolute."""
    imports: dict[str, str] = {}
    for node in find(tree, ast.Import):
        for alias in node.names:
            top = alias.name.split(".")[0]
            imports[alias.asname or top] = alias.name if alias.asname else top
    for node in find(tree, ast.ImportFrom):
        parents = file.split("/")[: -node.level] if node.level else []
        origin = ".".join(parents + ([node.module] if node.module else []))
        imports |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
    return imports


# --- small questions about syntax ---


def find(root: ast.AST, *kind: type[Node]) -> Iterator[Node]:
    """All nodes of these kinds under `root`."""
    return (node for node in ast.walk(root) if isinstance(node, kind))


def names_in(root: ast.AST) -> set[str]:
    """Every variable that occurs under `root`: of `a.b`, only `a`."""
    return {node.id for node in find(root, ast.Name)}


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, `a` of `a`, else nothing."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def origin(node: ast.AST, module: Module) -> str:
    """Full name of an imported `a.b.c`; nothing for names that were not imported."""
    if isinstance(node, ast.Attribute):
        base = origin(node.value, module)
        return f"{base}.{node.attr}" if base else ""
    return module.imports.get(node.id, "") if isinstance(node, ast.Name) else ""


def our_callee(call: ast.Call, module: Module) -> str:
    """Bare name of the called function when it is imported from the package itself."""
    package, _, name = origin(call.func, module).partition(".")
    return name.split(".")[-1] if package == PACKAGE else ""


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of all parameters of a function."""
    return [arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def assignments(root: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Names on the left, expression on the right, for each assignment."""
    for node in find(root, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None:
            yield set().union(*map(names_in, targets)), node.value


def flow(root: ast.AST, seeds: set[str]) -> set[str]:
    """The seeds, and every name whose value is computed from one of them."""
    names, before = set(seeds), -1
    while len(names) > before:
        before = len(names)
        for targets, value in assignments(root):
            names |= targets if names & names_in(value) else set()
    return names


# --- classes: block manager, scheduler ---


def methods_of(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """The methods of a class, by name."""
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def reach(methods: dict[str, ast.FunctionDef], start: str) -> tuple[set[str], list[ast.Call]]:
    """Data attributes of self that a method touches, and its calls, through the methods of self that it uses."""
    touched, calls, todo = set(), [], [start]
    for name in todo:  # grows while we walk it
        calls += find(methods[name], ast.Call)
        touched |= {node.attr for node in find(methods[name], ast.Attribute) if last_name(node.value) == "self"}
        todo += sorted(touched & methods.keys() - set(todo))
    return touched - methods.keys(), calls


def touches(methods: dict[str, ast.FunctionDef], starts: tuple[str, ...], word: str) -> bool:
    """Does a method whose name starts so touch data of self whose name contains the word?"""
    found = [reach(methods, name)[0] for name in methods if name.startswith(starts)]
    return any(word in attribute for attributes in found for attribute in attributes)


def is_about_blocks(cls: ast.ClassDef) -> bool:
    """Whether a name in the class says so: its own, a variable's, or an attribute's."""
    names = {cls.name.lower(), *names_in(cls), *(node.attr for node in find(cls, ast.Attribute))}
    return any("block" in name for name in names)


def is_block_manager(cls: ast.ClassDef) -> bool:
    """Blocks are taken from a free list in one method and given back to it in another.

    Nobody has to use it yet: who calls it is the scheduler's row.
    """
    methods = methods_of(cls)
    return is_about_blocks(cls) and all(touches(methods, verbs, "free") for verbs in (TAKING, GIVING_BACK))


def is_scheduler(cls: ast.ClassDef) -> bool:
    """Requests are added to a waiting queue; schedule() moves them to a running one and asks for blocks."""
    methods = methods_of(cls)
    if "schedule" not in methods or not touches(methods, ("add",), "waiting"):
        return False
    calls = reach(methods, "schedule")[1]
    queues = all(touches(methods, ("schedule",), word) for word in ("waiting", "running"))
    return queues and any(last_name(call.func).startswith("alloc") for call in calls)


# --- kernels ---


def jit_functions(modules: list[Module]) -> dict[str, tuple[Module, ast.FunctionDef]]:
    """Functions compiled by Triton, with the module that holds each."""
    return {
        function.name: (module, function)
        for module in modules
        for function in find(module.tree, ast.FunctionDef)
        if any(is_jit(decorator, module) for decorator in function.decorator_list)
    }


def is_jit(decorator: ast.expr, module: Module) -> bool:
    """Whether a decorator is triton.jit, under whatever name it was imported."""
    return origin(decorator.func if isinstance(decorator, ast.Call) else decorator, module) == "triton.jit"


def loads_in(root: ast.AST, loaders: set[str]) -> Iterator[ast.Call]:
    """Calls of tl.load, or of a jit function that loads."""
    return (c for c in find(root, ast.Call) if getattr(c.func, "attr", "") == "load" or last_name(c.func) in loaders)


def follows_block_table(kernel: ast.FunctionDef, loaders: set[str]) -> bool:
    """Is a number that was loaded from a block table part of the address of another load?"""
    tables = flow(kernel, {name for name in parameters(kernel) if TABLE.search(name)})

    def reads_table(node: ast.AST) -> bool:
        return any(tables & names_in(call) for call in loads_in(node, loaders))

    found = [targets for targets, value in assignments(kernel) if reads_table(value)]
    numbers = flow(kernel, set().union(*found))
    addresses = [arg for call in loads_in(kernel, loaders) for arg in call.args]
    return any(numbers & names_in(address) or reads_table(address) for address in addresses)


def launched(modules: list[Module], kernels: dict[str, tuple[Module, ast.FunctionDef]]) -> set[str]:
    """Kernels with a `kernel[grid](...)` somewhere, and the jit functions that those call."""
    calls = [call for module in modules for call in find(module.tree, ast.Call)]
    heads = [call.func.value for call in calls if isinstance(call.func, ast.Subscript)]
    names = {last_name(node) for head in heads for node in ast.walk(head)} & kernels.keys()
    todo = sorted(names)
    for name in todo:  # grows while we walk it
        called = {last_name(call.func) for call in find(kernels[name][1], ast.Call)} & kernels.keys()
        todo += sorted(called - set(todo))
    return set(todo)


def paged_kernels(modules: list[Module]) -> list[str]:
    """Names of the kernels that are launched and load through a block table."""
    kernels = jit_functions(modules)
    loaders = {name for name, (_, function) in kernels.items() if any(loads_in(function, set()))}
    return [
        f"{kernels[name][0].file}:{name}"
        for name in sorted(launched(modules, kernels))
        if follows_block_table(kernels[name][1], loaders)
    ]


# --- cache and Context ---


def cache_classes(modules: list[Module]) -> list[tuple[Module, ast.ClassDef]]:
    """Classes whose name ends in KVCache."""
    found = [(module, cls) for module in modules for cls in find(module.tree, ast.ClassDef)]
    return [(module, cls) for module, cls in found if cls.name.endswith("KVCache")]


def buffer_shapes(method: ast.FunctionDef) -> list[str]:
    """Shapes that reach torch.empty, torch.zeros …; a tuple that only checks an argument does not."""
    named = {name: value for targets, value in assignments(method) for name in targets}
    calls = [call for call in find(method, ast.Call) if last_name(call.func) in {"empty", "zeros", "ones", "full"}]
    sizes = [ast.Tuple(call.args) if len(call.args) > 2 else call.args[0] for call in calls if call.args]
    shapes = [named.get(last_name(size), size) for size in sizes]
    return [f"shape = {ast.unparse(shape)}" for shape in shapes if isinstance(shape, ast.Tuple)]


def indexes_cache_by(word: str, modules: list[Module]) -> bool:
    """Is there a function that is handed both a cache and such a tensor, and uses both?"""
    functions = [function for module in modules for function in find(module.tree, ast.FunctionDef)]
    used = [set(parameters(function)) & set().union(*map(names_in, function.body)) for function in functions]
    return any(all(any(part in name for name in names) for part in (word, "cache")) for names in used)


def cache_analysis(modules: list[Module]) -> Report:
    """What the cache's buffers look like: in one piece, or cut into blocks."""
    methods = [method for _, cls in cache_classes(modules) for method in methods_of(cls).values()]
    shapes = list(dict.fromkeys(shape for method in methods for shape in buffer_shapes(method)))
    paged = [shape for shape in shapes if "block" in shape]
    kind = "Paged buffer" if paged else "Contiguous buffer" if shapes else "No buffer"
    shown = f": {(paged or shapes)[0].replace(' = ', '=')}" if shapes else ""
    return {
        "has_block_table": indexes_cache_by("block_table", modules),
        "has_paged": bool(paged),
        "uses_slot_mapping": indexes_cache_by("slot_mapping", modules),
        "buffer_shape": shapes,
        "is_contiguous_buffer": bool(shapes) and not paged,
        "note": f"{kind}{shown}. {'Block-level' if paged else 'No block-level'} indirection.",
    }


def cache_references(modules: list[Module]) -> Report:
    """Who names a cache class in code, or calls a method of one. An import alone is no use."""
    classes = cache_classes(modules)
    names = {cls.name for _, cls in classes}
    methods = {name for _, cls in classes for name in methods_of(cls) if not name.startswith("_")}
    homes = {module.file: [c.name for m, c in classes if m is module] for module, _ in classes}
    counts = {m.file: count_references(m, names, methods) for m in modules if m.file not in homes}
    references = {file: count for file, count in counts.items() if count}
    return {"definitions": homes, "references": references, "is_dead_code": bool(homes) and not references}


def count_references(module: Module, names: set[str], methods: set[str]) -> int:
    """How often a module uses these names, or these methods on something called a cache."""
    named = [node for node in ast.walk(module.tree) if last_name(node) in names]
    called = [node for node in find(module.tree, ast.Attribute) if node.attr in methods]
    return len(named) + sum(CACHE.search(last_name(node.value)) is not None for node in called)


def context_fields(modules: list[Module]) -> set[str]:
    """Fields that the classes named Context define."""
    classes = [cls for module in modules for cls in find(module.tree, ast.ClassDef) if cls.name == "Context"]
    return {last_name(node.target) for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)}


def fills(call: ast.Call, module: Module, field: str) -> bool:
    """Is the field given by name, and not as None, to what makes or sets a Context?"""
    given = [word.value for word in call.keywords if word.arg == field]
    is_none = any(isinstance(value, ast.Constant) and value.value is None for value in given)
    return bool(given) and not is_none and our_callee(call, module) in {"Context", *SETTERS}


def has_attribute(module: Module, field: str, kind: type[ast.expr_context]) -> bool:
    """Is `x.field` read (Load) or set (Store) where the Context is imported? `self.field` is somebody else's."""
    known = {name.split(".")[-1] for name in module.imports.values() if name.startswith(f"{PACKAGE}.")}
    found = [node for node in find(module.tree, ast.Attribute) if node.attr == field and isinstance(node.ctx, kind)]
    return bool(known & {"Context", "get_context"}) and any(ast.unparse(node.value) != "self" for node in found)


def field_use(field: str, modules: list[Module]) -> dict[str, list[str]]:
    """Files that fill a field of the Context, and files that read it."""
    passed = {m.file for m in modules if any(fills(call, m, field) for call in find(m.tree, ast.Call))}
    stored = {m.file for m in modules if has_attribute(m, field, ast.Store)}
    read = [m.file for m in modules if has_attribute(m, field, ast.Load)]
    return {"assigned_in": sorted(passed | stored), "read_in": read}


def context_analysis(modules: list[Module]) -> Report:
    """Which fields the Context has, and whether anything fills and reads them."""
    use = {field: field_use(field, modules) for field in FIELDS}
    exists = {f"{field}_field": field in context_fields(modules) for field in FIELDS}
    return exists | {"is_field_used": all(u["assigned_in"] and u["read_in"] for u in use.values()), "fields": use}


def context_calls(modules: list[Module]) -> dict[str, int]:
    """Calls of set_context and forward_context per file. Only an imported one counts, not one in its own module."""
    counts = {m.file: sum(our_callee(c, m) in SETTERS for c in find(m.tree, ast.Call)) for m in modules}
    return {file: count for file, count in counts.items() if count}


# --- decode loops, words ---


def recomputes_everything(loop: ast.For | ast.While) -> bool:
    """A list grows by a token, becomes a tensor whole, and goes into a call again."""
    calls = list(find(loop, ast.Call))
    grown = {last_name(c.func.value) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "append"}
    whole = set()
    for targets, value in assignments(loop):
        if isinstance(value, ast.Call) and last_name(value.func) in {"tensor", "as_tensor", "array", "asarray"}:
            whole |= targets if value.args and last_name(value.args[0]) in grown else set()
    return any(last_name(arg) in whole for call in calls for arg in call.args)


def brute_force_loops(modules: list[Module]) -> list[str]:
    """Where a decode loop hands the whole sequence to the model again."""
    loops = [(m, loop) for m in modules for loop in find(m.tree, ast.For, ast.While)]
    return list(dict.fromkeys(module.file for module, loop in loops if recomputes_everything(loop)))


def count_words(text: str) -> dict[str, dict[str, int]]:
    """Occurrences as grep finds them: block_table is found inside block_tables too."""
    counts = {group: {word: text.count(word) for word in words} for group, words in KEYWORDS.items()}
    found = {group: {word: n for word, n in words.items() if n} for group, words in counts.items()}
    return {group: words for group, words in found.items() if words}


def scan(modules: list[Module]) -> list[Report]:
    """The words that grep would find, file by file, and how many of them are only in comments and docstrings."""
    entries = [{"file": m.file, "hits": count_words(m.text), "hits_in_comments": count_words(m.prose)} for m in modules]
    return [entry | {"found_any": True} for entry in entries if entry["hits"]]


# --- the report ---


def evidence_in(modules: list[Module]) -> Report:
    """What each row rests on, by file."""
    classes = [(module.file, cls) for module in modules for cls in find(module.tree, ast.ClassDef)]
    return {
        "block_manager": [f"{file}:{cls.name}" for file, cls in classes if is_block_manager(cls)],
        "scheduler": [f"{file}:{cls.name}" for file, cls in classes if is_scheduler(cls)],
        "paged_kernel": paged_kernels(modules),
        "set_context": context_calls(modules),
        "brute_force": brute_force_loops(modules),
    }


def status_of(files: list[Report], context: Report, evidence: Report) -> Report:
    """The verdict, the blockers in words, and the counts behind them."""
    core = [entry["hits"].get("paged_attention_core", {}) for entry in files]
    tables = context["fields"]["block_tables"]
    present = {key: bool(evidence.get(key)) for key in BLOCKERS}
    present["block_tables"] = bool(tables["assigned_in"] and tables["read_in"])
    blockers = [text for key, text in BLOCKERS.items() if not present[key]]
    return {
        "verdict": f"{'未实现' if blockers else '已实现'} paged attention",
        "details": blockers,
        "total_paged_keyword_hits": sum(sum(words.values()) for words in core),
        "block_table_hits": sum(words.get("block_table", 0) + words.get("block_tables", 0) for words in core),
        "has_block_manager": present["block_manager"],
        "has_paged_kernel": bool(evidence["paged_kernel"]),
        "has_scheduler": present["scheduler"],
        "context_scaffolding_exists": any(context[f"{field}_field"] for field in FIELDS),
        "set_context_ever_called": present["set_context"],
        "set_context_call_count": sum(evidence["set_context"].values()),
        "has_brute_force_decode": bool(evidence["brute_force"]),
    }


def conclusion(cache: Report, blockers: list[str]) -> str:
    """The report's last sentence."""
    if not blockers:
        return "paged，是 paged attention。"
    kind = "paged buffer" if cache["has_paged"] else "contiguous" if cache["is_contiguous_buffer"] else "无 KV cache"
    return f"{kind}，不是 paged attention。{'; '.join(blockers)}"


def audit(path: Path | str, day: date | None = None) -> Report:
    """Read the package under `path` and answer, in the form of the report that the course starts from.

    `day` is the report's timestamp (default: today). Raises AuditError: no package there, or a file that is not Python.
    """
    modules = read_modules(Path(path))
    files, cache, context = scan(modules), cache_analysis(modules), context_analysis(modules)
    evidence = evidence_in(modules)
    status = status_of(files, context, evidence)
    return {
        "audit_target": "Paged Attention implementation status",
        "timestamp": (day or date.today()).isoformat(),
        "file_scan_results": files,
        "kv_cache_paged_analysis": cache,
        "kv_cache_reference_analysis": cache_references(modules),
        "context_paged_analysis": context,
        "evidence": evidence,
        "status": status,
        "结论": conclusion(cache, status["details"]),
        "实现状态": status["verdict"],
        "阻塞项": status["details"],
    }


def rows(report: Report) -> list[Row]:
    """The report as questions with answers, for a table of before and after."""
    status, references = report["status"], report["kv_cache_reference_analysis"]
    values: dict[str, bool | int] = {
        "block_manager": status["has_block_manager"],
        "scheduler": status["has_scheduler"],
        "set_context": status["set_context_call_count"],
        "block_tables": BLOCKERS["block_tables"] not in report["阻塞项"],
        "paged_kernel": status["has_paged_kernel"],
        "paged_buffer": report["kv_cache_paged_analysis"]["has_paged"],
        "kv_cache": bool(references["references"]),
        "brute_force": status["has_brute_force_decode"],
    }
    standing = {key: text for key, text in BLOCKERS.items() if text in report["阻塞项"]}
    return [Row(key, QUESTIONS[key], value, standing.get(key, "")) for key, value in values.items()]


def parse_day(text: str) -> date:
    """A day like 2026-06-07, for the command line."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day like 2026-06-07") from None


def main(argv: list[str] | None = None) -> int:
    """Print the report. Exit code 0 whatever the verdict, 2 when there is nothing to audit."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.audit", description="Is this engine paged attention?")
    parser.add_argument(
        "path", type=Path, nargs="?", help=f"package {PACKAGE} or the folder that holds it; else this one"
    )
    parser.add_argument("--date", type=parse_day, help="day to print in the report (default: today)")
    parser.add_argument(
        "--trace", action="store_true", help="also generate with this package, and report what was called"
    )
    options = parser.parse_args(argv)
    if options.trace and options.path:
        parser.error("--trace runs this package, so it takes no path")
    try:
        report = audit(options.path or Path(__file__).parent, options.date)
    except AuditError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    if options.trace:
        from minivllm.audit_trace import trace_generation  # needs torch, which the reading half does not

        report["trace"] = trace_generation()
    print(json.dumps(report, ensure_ascii=False, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
