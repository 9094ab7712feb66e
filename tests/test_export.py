"""tools/export.py, rule by rule, on small notebooks. Nothing here reads the notebooks of the course."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nbformat import v4

ROOT = Path(__file__).resolve().parents[1]
HEADER_03 = "# Generated from notebooks/03_blocks.ipynb by tools/export.py; edit there.\n"


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Project:
    """A folder with the real exporter, the real settings of ruff, and notebooks of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "tools").mkdir(parents=True)
        (root / "notebooks").mkdir()
        shutil.copy(ROOT / "tools" / "export.py", root / "tools")
        shutil.copy(ROOT / "pyproject.toml", root)
        self.tool = load(root / "tools" / "export.py", "exporter_under_test")

    def chapter(self, name: str, *cells: str) -> None:
        """Write notebooks/NAME.ipynb: a title, then the code cells with ids name-1, name-2 …"""
        code = [v4.new_code_cell(source, id=f"{name[:2]}-{number}") for number, source in enumerate(cells, start=1)]
        nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell(f"# {name}"), *code]), self.notebook(name))

    def core(self, name: str, *cells: str) -> None:
        """A chapter whose cells all go to core.blocks; the first begins with the docstring."""
        self.chapter(name, *(f"#| export core.blocks\n{cell}" for cell in cells))

    def notebook(self, name: str) -> Path:
        return self.root / "notebooks" / f"{name}.ipynb"

    def build(self) -> dict[str, str]:
        return self.tool.build(self.tool.chapters())

    def text(self, path: str = "core/blocks.py") -> str:
        """A module without its header."""
        return re.sub(r"\A(# .*\n)+", "", self.build()[path])

    def load(self, module: str = "core/blocks.py") -> ModuleType:
        self.tool.export(self.tool.chapters())
        return load(self.root / "minivllm" / module, "exported_module")

    def error(self) -> str:
        with pytest.raises(self.tool.ExportError) as caught:
            self.build()
        return str(caught.value)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


BLOCKS = '''"""Blocks."""
class Blocks:
    """Counts blocks."""

    def take(self) -> int:
        return 1

    # Freed last, used last.
    def free(self) -> int:
        return 2
'''


# ---- what a module looks like


def test_a_module_reads_like_written_by_hand(project: Project) -> None:
    project.core(
        "03_blocks",
        '"""Which block holds what."""\nfrom collections import deque\n\nBLOCK_SIZE = 4\nLIMIT = 8',
        "import os\nfrom collections import Counter\n\n# Rounded up.\ndef cdiv(n: int, d: int) -> int:\n"
        "    return -(-n // d)  # no floats\n    # so it is exact\nclass Queue:\n    def items(self):\n"
        "        return deque(), Counter(), os.sep",
    )
    assert project.build()["core/blocks.py"] == HEADER_03 + (
        '"""Which block holds what."""\n\nimport os\nfrom collections import Counter, deque\n\n'
        "BLOCK_SIZE = 4\nLIMIT = 8\n\n\n# Rounded up.\ndef cdiv(n: int, d: int) -> int:\n"
        "    return -(-n // d)  # no floats\n    # so it is exact\n\n\nclass Queue:\n    def items(self):\n"
        "        return deque(), Counter(), os.sep\n"
    )


def test_definitions_follow_the_order_of_notebooks_and_cells(project: Project) -> None:
    project.core("10_late", "D = 4")
    project.core("03_blocks", '"""Doc."""\nA = 1', "B = 2")
    project.core("04_more", "C = 3")
    assert project.text() == '"""Doc."""\n\nA = 1\n\nB = 2\n\nC = 3\n\nD = 4\n'


def test_only_numbered_notebooks_and_only_code_cells_that_say_so(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = 1')
    project.core("scratch", "B = 2")
    notebook = nbformat.read(project.notebook("03_blocks"), as_version=4)
    notebook.cells += [v4.new_markdown_cell("#| export core.blocks\nC = 3"), v4.new_code_cell("D = 4")]
    nbformat.write(notebook, project.notebook("03_blocks"))
    assert project.text() == '"""Doc."""\n\nA = 1\n'


def test_the_header_names_every_notebook_and_wraps_where_it_must(project: Project) -> None:
    names = [f"{number:02d}_a_chapter_with_a_name" for number in range(1, 6)]
    for name in names:
        project.core(name, f'"""Doc."""\nA{name[:2]} = 1' if name == names[0] else f"A{name[:2]} = 1")
    header, _ = project.build()["core/blocks.py"].split('"""Doc."""')
    assert all(f"{name}.ipynb" in header for name in names)
    assert all(line.startswith("# ") and len(line) <= 120 for line in header.splitlines())
    project.tool.export(project.tool.chapters())
    assert project.tool.differences({}, project.root / "minivllm")["core/blocks.py"] == "orphan"  # known as generated


def test_packages_get_one_line_and_only_where_a_module_is(project: Project) -> None:
    project.chapter(
        "01_model", '#| export layers.numpy.norm\n"""Norm."""\nA = 1', '#| export config\n"""Config."""\nB = 1'
    )
    files = project.build()
    assert [*files] == ["config.py", "layers/__init__.py", "layers/numpy/__init__.py", "layers/numpy/norm.py"]
    line = project.tool.PACKAGES["layers.numpy"]
    assert files["layers/numpy/__init__.py"] == f'# Generated by tools/export.py; edit there.\n"""{line}"""\n'


def test_directives_are_not_exported_and_other_comments_are(project: Project) -> None:
    project.core("03_blocks", '#| eval: false\n"""Doc."""\n# | a table | of two |\nA = 1\n# the end')
    assert project.text() == '"""Doc."""\n\n# | a table | of two |\nA = 1\n# the end\n'


def test_the_end_of_a_string_that_looks_like_a_comment_stays_where_it_is(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = """a\n# b"""\nB = 1')
    project.core("04_more", "# replaces: B\nB = 2")
    assert project.text() == '"""Doc."""\n\nA = """a\n# b"""\n\nB = 2\n'


def test_the_result_is_clean_formatted_and_the_same_each_time(project: Project) -> None:
    project.core("03_blocks", BLOCKS + "x = {  'a':1 }\nimport sys, os\nprint_it = (os, sys)")
    project.core("04_more", "class Blocks(Blocks):\n    def more(self): return 3")
    assert project.build() == project.build()
    project.tool.export(project.tool.chapters())
    for arguments in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "minivllm"]
        assert subprocess.run(command, cwd=project.root).returncode == 0
    assert project.tool.export(project.tool.chapters()) == {}


# ---- docstrings


def test_a_module_needs_a_docstring(project: Project) -> None:
    project.core("03_blocks", "A = 1")
    assert "minivllm.core.blocks has no docstring" in (message := project.error())
    assert "03_blocks.ipynb cell 2 (id 03-1)" in message


def test_a_second_docstring_is_an_error_that_names_both_cells(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = 1')
    project.core("04_more", '"""Other."""\nB = 1')
    message = project.error()
    assert (
        "__doc__ is defined in 03_blocks.ipynb cell 2 (id 03-1) and again in 04_more.ipynb cell 2 (id 04-1)" in message
    )


def test_a_later_notebook_replaces_the_docstring_if_it_says_so(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = 1')
    project.core("04_more", '# replaces: __doc__\n"""Other."""\nB = 1')
    assert project.text() == '"""Other."""\n\nA = 1\n\nB = 1\n'


# ---- imports


def test_imports_are_hoisted_sorted_and_kept_once_with_future_first(project: Project) -> None:
    project.core(
        "03_blocks",
        '"""Doc."""\nimport zlib\nimport torch\nA = zlib, torch',
        "from __future__ import annotations\nimport zlib\nfrom minivllm.config import Config\n"
        "import os\ndef f(c: Config): return zlib, os",
    )
    assert project.text().startswith(
        '"""Doc."""\n\nfrom __future__ import annotations\n\nimport os\nimport zlib\n\nimport torch\n\n'
        "from minivllm.config import Config\n\nA = zlib, torch\n"
    )


@pytest.mark.parametrize(
    "line", ["from minivllm.core.blocks import A", "from minivllm.core import blocks", "import minivllm.core.blocks"]
)
def test_imports_from_the_module_itself_are_dropped(project: Project, line: str) -> None:
    project.core("03_blocks", '"""Doc."""\nA = 1')
    project.core("04_more", f"{line}\nB = A")
    assert project.text() == '"""Doc."""\n\nA = 1\n\nB = A\n'


def test_an_import_of_which_a_part_is_there_already_loses_nothing(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nfrom math import cos, sin\nA = cos, sin')
    project.core("04_more", "from math import cos, tan\nB = cos, tan")
    assert project.text().startswith('"""Doc."""\n\nfrom math import cos, sin, tan\n\nA = ')


def test_imports_of_neighbours_with_a_similar_name_are_kept(project: Project) -> None:
    project.core(
        "03_blocks",
        '"""Doc."""\nfrom minivllm.core.blocks2 import A\nfrom minivllm.core import blocks3\nB = A, blocks3',
    )
    assert "from minivllm.core import blocks3\nfrom minivllm.core.blocks2 import A\n" in project.text()


def test_imports_keep_their_comments(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\n# fast enough\nimport zlib  # in the stdlib\nA = zlib')
    assert "# fast enough\nimport zlib  # in the stdlib\n" in project.text()


def test_an_import_that_a_replacement_left_unused_goes(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nimport zlib\ndef f(): return zlib')
    project.core("04_more", "# replaces: f\ndef f(): return 1")
    assert project.text() == '"""Doc."""\n\n\ndef f():\n    return 1\n'


def test_imports_for_types_go_into_one_block(project: Project) -> None:
    project.core(
        "03_blocks",
        '"""Doc."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zlib import a\n'
        '    from minivllm.core.blocks import B\n    import array\nA: "a | array.array"',
        'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from queue import q\n    import array\nB: "q"',
        "import array\nC = array",
    )
    assert project.text() == (
        '"""Doc."""\n\nimport array\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n'
        '    from queue import q\n    from zlib import a\n\nA: "a | array.array"\n\nB: "q"\n\nC = array\n'
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from math import log", "from cmath import log"),
        ("import numpy as np", "import numpy.random as np"),
        ("if TYPE_CHECKING:\n    from math import log", "from cmath import log"),
    ],
)
def test_conflicting_imports_name_both_cells(project: Project, first: str, second: str) -> None:
    project.core("03_blocks", f'"""Doc."""\n{first}\nA = 1', f"{second}\nB = 1")
    assert "03_blocks.ipynb cell 2 (id 03-1)" in (message := project.error())
    assert "03_blocks.ipynb cell 3 (id 03-2)" in message


def test_a_name_that_is_imported_and_defined_names_both_cells(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nfrom math import log\nA = log', "def log(): return 1")
    assert (
        "log is imported in 03_blocks.ipynb cell 2 (id 03-1) and defined in 03_blocks.ipynb cell 3" in project.error()
    )


def test_star_imports_are_refused(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nfrom math import *\nA = 1')
    assert "`from math import *` hides what it imports" in project.error()


# ---- re-opened classes


def test_a_class_grows_over_notebooks_into_one(project: Project) -> None:
    project.core("03_blocks", BLOCKS)
    project.core(
        "04_more",
        "# this remark is for the reader of the notebook\nclass Blocks(Blocks):\n    # replaces: take\n"
        "    # Now with hits.\n    def take(self) -> int:\n        return 10\n    # Shared.\n"
        "    def fork(self) -> int:\n        return self.take() + self.free()",
    )
    assert project.text() == (
        '"""Blocks."""\n\n\nclass Blocks:\n    """Counts blocks."""\n\n'
        "    # Now with hits.\n    def take(self) -> int:\n        return 10\n\n"
        "    # Freed last, used last.\n    def free(self) -> int:\n        return 2\n\n"
        "    # Shared.\n    def fork(self) -> int:\n        return self.take() + self.free()\n"
    )
    assert project.load().Blocks().fork() == 12


def test_a_method_defined_again_names_both_cells(project: Project) -> None:
    project.core("03_blocks", BLOCKS)
    project.core("04_more", "class Blocks(Blocks):\n    def take(self): return 3")
    assert "Blocks.take is defined in 03_blocks.ipynb cell 2 (id 03-1) and again in 04_more.ipynb cell 2 (id 04-1)" in (
        message := project.error()
    )
    assert "# replaces: take" in message


def test_the_error_names_the_cell_of_the_method_not_of_the_class(project: Project) -> None:
    project.core("03_blocks", BLOCKS)
    project.core("04_more", "class Blocks(Blocks):\n    def fork(self): return 3")
    project.core("05_yet", "class Blocks(Blocks):\n    def fork(self): return 4")
    assert "Blocks.fork is defined in 04_more.ipynb cell 2 (id 04-1) and again in 05_yet.ipynb" in project.error()


def test_a_method_is_replaced_again_and_within_one_notebook(project: Project) -> None:
    reopened = "# replaces: take\nclass Blocks(Blocks):\n    def take(self): return {}"
    project.core("03_blocks", BLOCKS, reopened.format(20), reopened.format(30))
    assert project.load().Blocks().take() == 30


def test_a_method_twice_in_one_class_is_an_error_whatever_is_claimed(project: Project) -> None:
    project.core("03_blocks", BLOCKS, "# replaces: take\nclass Blocks(Blocks):" + 2 * "\n    def take(self): pass")
    assert "Blocks.take is defined in 03_blocks.ipynb cell 3 (id 03-2) and again in" in project.error()


@pytest.mark.parametrize("claim", ["take", "fork", "nothing"])
def test_a_claim_that_replaces_nothing_is_an_error(project: Project, claim: str) -> None:
    project.core("03_blocks", BLOCKS)
    project.core(
        "04_more",
        f"# replaces: {claim}, free\nclass Blocks(Blocks):\n    def free(self): pass\n    def fork(self): pass",
    )
    assert project.error() == f"04_more.ipynb cell 2 (id 04-1) says that it replaces {claim}, and does not"


def test_a_class_docstring_is_replaced_only_if_the_cell_says_so(project: Project) -> None:
    project.core("03_blocks", BLOCKS)
    project.core("04_more", '# replaces: __doc__\nclass Blocks(Blocks):\n    """Shares blocks."""')
    assert '    """Shares blocks."""\n\n    def take' in project.text()
    project.core("04_more", 'class Blocks(Blocks):\n    """Shares blocks."""')
    assert "Blocks.__doc__ is defined in 03_blocks.ipynb cell 2 (id 03-1) and again in 04_more.ipynb" in project.error()


def test_a_docstring_given_late_still_comes_first(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nclass A:\n    x: int = 1')
    project.core("04_more", 'class A(A):\n    """Late."""')
    assert project.load().A.__doc__ == "Late."


def test_a_dataclass_gets_fields_below_its_fields_and_methods_at_the_end(project: Project) -> None:
    project.core(
        "08_config",
        '"""Doc."""\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n'
        "    size: int = 4  # tokens\n\n    def double(self) -> int:\n        return 2 * self.size",
    )
    project.core(
        "09_engine",
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config(Config):\n"
        "    # of the memory\n    share: float = 0.9\n    def half(self) -> float:\n        return self.share / 2",
        "class Config(Config):\n    seed: int = 0",
    )
    assert project.text().split("@dataclass(frozen=True)\n")[1] == (
        "class Config:\n    size: int = 4  # tokens\n    # of the memory\n    share: float = 0.9\n    seed: int = 0\n\n"
        "    def double(self) -> int:\n        return 2 * self.size\n\n"
        "    def half(self) -> float:\n        return self.share / 2\n"
    )
    assert project.load().Config(8, 0.5, 7).half() == 0.25


def test_an_alias_of_a_method_stays_below_the_method(project: Project) -> None:
    project.core("03_blocks", BLOCKS)
    project.core(
        "04_more", "class Blocks(Blocks):\n    limit = 3\n    def fork(self): return self.limit\n    __call__ = fork"
    )
    text = project.text()
    assert text.index("limit = 3") < text.index("def take") < text.index("__call__ = fork")
    assert project.load().Blocks()() == 3


def test_properties_overloads_async_and_decorators(project: Project) -> None:
    project.core(
        "03_blocks",
        '"""Doc."""\nfrom functools import cache\nfrom typing import overload\n@overload\ndef f(x: int) -> int: ...\n'
        "@overload\ndef f(x: str) -> str: ...\ndef f(x): return x\n"
        "class A:\n    async def run(self): return 1\n    @property\n    def x(self) -> int:\n        return 1\n"
        "    @x.setter\n    def x(self, value: int) -> None:\n        self.y = value\n"
        "    @staticmethod\n    @cache\n    def two() -> int:\n        return 2",
    )
    project.core(
        "04_more",
        "# replaces: x\nclass A(A):\n    @property\n    def x(self) -> int:\n        return self.y\n"
        "    @x.setter\n    def x(self, value: int) -> None:\n        self.y = value * self.two()\n"
        "    @classmethod\n    async def make(cls): return cls()",
    )
    module = project.load()
    one = module.A()
    one.x = 21
    assert one.x == 42 and module.f("a") == "a"
    text = project.text()
    assert text.count("def x(") == 2 and text.count("def f(") == 3
    assert text.index("async def run") < text.index("@property") < text.index("@x.setter") < text.index("@staticmethod")


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (
            ["class A(A):\n    x = 1", "class A:\n    y = 1"],
            "cell 3 (id 03-2) re-opens A, but no cell before it defines it",
        ),
        (["def A(): pass", "class A(A):\n    x = 1"], "re-opens A, but no cell before it defines it"),
        (["class A:\n    x = 1", "class A(A, dict):\n    y = 1"], "a re-opened class keeps its bases"),
        (["class A:\n    x = 1", "class A(A, metaclass=type):\n    y = 1"], "a re-opened class keeps its bases"),
        (["class A:\n    x = 1", "@sorted\nclass A(A):\n    y = 1"], "A has other decorators in"),
        (["class A:\n    x = 1", "class A(A):\n    def f(self): super().f()"], "super() in the re-opened A is"),
        (
            ["class A:\n    x = 1", "class A(A):\n    for i in []: pass"],
            "the re-opened class A cannot hold `for i in []:`",
        ),
        (["class A: ...", "class A(A):\n    x = 1"], "put `...` on a line of its own"),
        (["class A:\n    x = 1", "class A:\n    y = 1"], "re-open the class with `class A(A):`"),
    ],
)
def test_re_openings_that_cannot_be_merged(project: Project, cells: list[str], says: str) -> None:
    project.core("03_blocks", '"""Doc."""', *cells)
    assert says in project.error()


def test_a_placeholder_body_goes_when_the_class_grows(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nclass A:\n    pass', "class A(A):\n    x = 1")
    assert project.text() == '"""Doc."""\n\n\nclass A:\n    x = 1\n'


MEMBERS = [
    "    size: int = 4  # tokens\n",
    "    seed: int = 0\n",
    "    # Why it is a property.\n    @property\n    def half(self) -> float:\n        return self.size / 2\n",
    '    def text(self) -> str:\n        return """\n# not a comment\n"""\n',
    "    def last(self) -> int:\n        return 1\n        # and below\n",
]
WHOLE = (
    '"""Doc."""\n\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass A:\n    """A class."""\n\n'
    + "".join(MEMBERS[:2]) + "\n" + "\n".join(MEMBERS[2:])
)  # fmt: skip


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, len(MEMBERS) - 1)))
def test_however_a_class_is_cut_into_cells_the_module_is_the_same(tmp_path: Path, cuts: set[int]) -> None:
    shutil.rmtree(tmp_path / "project", ignore_errors=True)
    project, edges = Project(tmp_path / "project"), [0, *sorted(cuts), len(MEMBERS)]
    parts = ["".join(MEMBERS[a:b]) for a, b in itertools.pairwise(edges)]
    opening = '"""Doc."""\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    """A class."""\n'
    project.core("03_blocks", opening + parts[0], *(f"class A(A):\n{part}" for part in parts[1:]))
    assert project.text() == WHOLE


# ---- what is defined twice, or not at all


@pytest.mark.parametrize("definition", ["def f(): return {}", "F = {}", "F: int = {}", "async def f(): return {}"])
def test_functions_and_constants_are_replaced_by_a_later_notebook_that_says_so(
    project: Project, definition: str
) -> None:
    name = "f" if "def" in definition else "F"
    project.core("03_blocks", '"""Doc."""\n' + definition.format(1), "G = 2")
    project.core("04_more", definition.format(3))
    assert f"{name} is defined in 03_blocks.ipynb cell 2 (id 03-1) and again in 04_more.ipynb cell 2" in project.error()
    project.core("04_more", f"# replaces: {name}\n{definition.format(3)}")
    text = project.text()
    assert "1" not in text and text.index("3") < text.index("G = 2")


def test_a_notebook_does_not_replace_what_is_its_own(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = 1', "# replaces: A\nA = 2")
    assert "A is defined in 03_blocks.ipynb cell 2 (id 03-1) and again in 03_blocks.ipynb cell 3 (id 03-2)" in (
        message := project.error()
    )
    assert "only a later notebook" in message


def test_twice_in_one_cell_is_twice(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = 1\nA = 2')
    assert "A is defined in 03_blocks.ipynb cell 2 (id 03-1) and again in 03_blocks.ipynb cell 2" in project.error()


@pytest.mark.parametrize(
    ("cell", "cell_id"),
    [
        ("def f(): return gone", "04-1"),
        ("class Blocks(Blocks):\n    def fork(self): return gone", "04-1"),
        ("class Blocks(Blocks):\n    def fork(self, x: 'gone'): return x", "04-1"),
        ("@gone\ndef f(): return 1", "04-1"),
        ("A = gone\ngone = 1", "04-1"),  # defined, but below
    ],
)
def test_an_undefined_name_is_named_with_its_cell(project: Project, cell: str, cell_id: str) -> None:
    project.core("03_blocks", BLOCKS)
    project.core("04_more", cell)
    message = project.error()
    assert f"04_more.ipynb cell 2 (id {cell_id})" in message
    assert "Undefined name `gone` in minivllm/core/blocks.py" in message


def test_an_import_outside_the_export_cells_does_not_count(project: Project) -> None:
    project.chapter("03_blocks", "import zlib", '#| export core.blocks\n"""Doc."""\nA = zlib')
    assert "03_blocks.ipynb cell 3 (id 03-2): Undefined name `zlib`" in project.error()


def test_builtins_and_module_names_are_defined(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = len(__file__), __name__, NotImplemented')
    assert "A = len(__file__)" in project.text()


# ---- cells that are refused


@pytest.mark.parametrize(
    "statement",
    [
        "print(1)",
        "for i in []:\n    pass",
        "x[0] = 1",
        "a, b = x",
        "a = b = 1",
        "a += 1",
        "if True:\n    a = 1",
        "try:\n    import os\nexcept ImportError:\n    pass",
        "assert True",
        "'a string that is not the first statement'",
        "if TYPE_CHECKING:\n    import os\nelse:\n    os = None",
    ],
)
def test_statements_that_an_export_cell_cannot_hold(project: Project, statement: str) -> None:
    project.core("03_blocks", f'"""Doc."""\nA = 1\n{statement}')
    message = project.error()
    assert message.startswith("03_blocks.ipynb cell 2 (id 03-1): an export cell cannot hold `")
    assert statement.split("\n")[0].strip("'") in message


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("#| export core.blocks\nA = 1; B = 2", "put `B = 2` on a line of its own"),
        ("#| export core.blocks\n%timeit 1", "is not plain Python"),
        ("#| export core.blocks\n# nothing", "exports nothing to minivllm.core.blocks"),
        ("A = 1\n#| export core.blocks\nB = 1", "`#| export core.blocks` must be the first line"),
        ("#| export\nA = 1", "'' is no name for a module"),
        ("#| export core.Blocks\nA = 1", "'core.Blocks' is no name for a module"),
        ("#| export core/blocks.py\nA = 1", "'core/blocks.py' is no name for a module"),
        ("#| export core.blocks now\nA = 1", "'core.blocks now' is no name for a module"),
        ("#| export cores.blocks\nA = 1", "minivllm.cores.blocks is not a module in one of the packages core, engine"),
        ("#| export core\nA = 1", "minivllm.core is not a module in one of the packages"),
        ("#| export __init__\nA = 1", "minivllm.__init__ is written by hand"),
        ("#| export core.__init__\nA = 1", "minivllm.core.__init__ is written by hand"),
        ("#| export __main__\nA = 1", "minivllm.__main__ is written by hand"),
        ("#| export audit\nA = 1", "minivllm.audit is written by hand"),
        ("#| export course.drawing\nA = 1", "minivllm.course.drawing is written by hand"),
    ],
)
def test_cells_and_directives_that_are_refused(project: Project, cell: str, says: str) -> None:
    project.chapter("03_blocks", cell)
    assert "03_blocks.ipynb cell 2 (id 03-1)" in (message := project.error())
    assert says in message


def test_a_main_block_comes_last_and_once(project: Project) -> None:
    main = 'if __name__ == "__main__":\n    print(A)'
    project.core("03_blocks", f'"""Doc."""\nA = 1\n\n{main}', "B = 2")
    assert project.text() == f'"""Doc."""\n\nA = 1\n\nB = 2\n\n{main}\n'
    project.core("04_more", main)
    assert "__main__ is defined in 03_blocks.ipynb cell 2 (id 03-1) and again in 04_more.ipynb" in project.error()
    project.core("04_more", f"{main}\nC = 3")
    assert "must be its last statement" in project.error()


def test_a_block_for_types_holds_imports_only(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    A = 1')
    assert "`if TYPE_CHECKING:` is for imports, not for `A = 1`" in project.error()


# ---- the command


def test_export_writes_what_changed_and_removes_orphans_only(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    package = project.root / "minivllm"
    project.core("03_blocks", '"""Doc."""\nA = 1')
    project.chapter("04_more", '#| export utils.old\n"""Old."""\nB = 1')
    assert project.tool.main([]) == 0
    (package / "mine.py").write_text("MINE = 1\n")
    (package / "core" / "blocks.py").write_text("edited = True\n")
    project.notebook("04_more").unlink()
    capsys.readouterr()
    assert project.tool.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stale: minivllm/core/blocks.py",
        "orphan: minivllm/utils/__init__.py",
        "orphan: minivllm/utils/old.py",
    ]
    assert sorted(path.name for path in package.rglob("*.py")) == ["__init__.py", "blocks.py", "mine.py"]
    assert "A = 1" in (package / "core" / "blocks.py").read_text()


def test_check_lists_what_is_off_and_writes_nothing(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    package = project.root / "minivllm"
    project.core("03_blocks", '"""Doc."""\nA = 1')
    project.chapter("04_more", '#| export utils.old\n"""Old."""\nB = 1')
    project.tool.main([])
    assert project.tool.main(["--check"]) == 0
    (package / "core" / "blocks.py").write_text("edited = True\n")
    (package / "core" / "__init__.py").unlink()
    project.notebook("04_more").unlink()
    capsys.readouterr()
    assert project.tool.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "missing: minivllm/core/__init__.py",
        "stale: minivllm/core/blocks.py",
        "orphan: minivllm/utils/__init__.py",
        "orphan: minivllm/utils/old.py",
    ]
    assert (package / "core" / "blocks.py").read_text() == "edited = True\n"
    assert (package / "utils" / "old.py").exists()


def test_what_ruff_complains_of_is_passed_on(project: Project) -> None:
    project.core("03_blocks", '"""Doc."""\nA = 1')
    (project.root / "pyproject.toml").write_text("[tool.ruff]\nline-length = 'long'\n")
    assert "ruff check failed" in (message := project.error())
    assert "line-length" in message


def test_an_error_is_one_sentence_and_a_status(project: Project) -> None:
    project.core("03_blocks", "A = 1")
    with pytest.raises(SystemExit) as caught:
        project.tool.main(["--check"])
    assert str(caught.value).startswith("export: minivllm.core.blocks has no docstring")


@pytest.mark.parametrize(
    "arguments", [["--through", "03"], ["--out", "x"], ["--check", "--through", "03", "--out", "x"]]
)
def test_options_that_do_not_go_together(project: Project, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        project.tool.main(arguments)
    assert caught.value.code == 2


@pytest.fixture
def staged(project: Project) -> Project:
    """A project of three chapters, with files that are written by hand."""
    for path, text in {
        "__init__.py": "HERE = __file__\n",
        "__main__.py": "print('main')\n",
        "audit.py": "AUDIT = 1\n",
        "course/__init__.py": "COURSE = 1\n",
        "assets/model/config.json": "{}",
        "core/generated_by_no_one.py": "X = 1\n",
    }.items():
        (project.root / "minivllm" / path).parent.mkdir(parents=True, exist_ok=True)
        (project.root / "minivllm" / path).write_text(text)
    project.chapter("00_start", "1 + 1")
    project.core("03_blocks", BLOCKS)
    project.core("05_more", "# replaces: take\nclass Blocks(Blocks):\n    def take(self): return 5")
    project.tool.main([])
    return project


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if "course" not in path.parts)


def test_through_00_gives_what_is_written_by_hand(staged: Project, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert staged.tool.main(["--through", "00", "--out", str(out)]) == 0
    assert files_in(out) == ["minivllm/__init__.py", "minivllm/__main__.py", "minivllm/audit.py"]
    assert (out / "minivllm" / "assets" / "model" / "config.json").read_text() == "{}"


@pytest.mark.parametrize(("through", "taken"), [("03", "1"), ("05", "5")])
def test_through_gives_a_usable_package_of_that_chapter(
    staged: Project, tmp_path: Path, through: str, taken: str
) -> None:
    package = staged.tool.export_through(through, tmp_path / "out", staged.root)
    assert package == tmp_path / "out" / "minivllm"
    code = (
        "import minivllm, minivllm.audit, minivllm.course; from minivllm.core.blocks import Blocks;"
        "print(minivllm.HERE); print(Blocks().take())"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "out")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [str(package / "__init__.py"), taken], done.stderr


def test_through_an_earlier_chapter_takes_back_a_later_one(staged: Project, tmp_path: Path) -> None:
    for through in ("05", "00"):
        staged.tool.export_through(through, tmp_path / "out", staged.root)
    assert files_in(tmp_path / "out") == ["minivllm/__init__.py", "minivllm/__main__.py", "minivllm/audit.py"]


def test_through_copies_the_folders_where_links_cannot_be_made(
    staged: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    for _ in range(2):
        package = staged.tool.export_through("03", tmp_path / "out", staged.root)
    assert not (package / "assets").is_symlink()
    assert (package / "assets" / "model" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("chapter", ["04", "5", "3", ""])
def test_through_a_chapter_that_does_not_exist(staged: Project, tmp_path: Path, chapter: str) -> None:
    with pytest.raises(staged.tool.ExportError, match=rf"no chapter '{chapter}' in .*: it has 00, 03, 05"):
        staged.tool.export_through(chapter, tmp_path / "out", staged.root)


def test_through_never_writes_into_the_project(staged: Project) -> None:
    with pytest.raises(staged.tool.ExportError, match="is the project itself"):
        staged.tool.export_through("03", staged.root, staged.root)
