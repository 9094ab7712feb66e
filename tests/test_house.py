"""The house keeps its order: who may import whom, no torch in the bookkeeping, every function typed and described."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from chapters import ROOT
from count_house import is_compiled, is_typed

PACKAGE = ROOT / "minivllm"
EVERYTHING = {
    "config",
    "core",
    "engine",
    "errors",
    "kernels",
    "layers",
    "model",
    "utils",
    "outputs",
    "sampling_params",
    "llm",
}
MAY_IMPORT = {
    "config": set(),
    "sampling_params": set(),
    "outputs": set(),
    "core": {"core", "config"},
    "kernels": {"kernels"},
    "utils": {"utils"},
    "layers": {"layers", "kernels", "utils", "config", "core", "sampling_params"},
    "model": {"model", "layers", "utils", "config", "kernels"},
    "engine": EVERYTHING - {"llm"},
    "llm": EVERYTHING,
    "validate_model": EVERYTHING,
    "__main__": EVERYTHING,
    "__init__": set(),
    "audit": {"audit_trace"},
    "audit_trace": EVERYTHING,
}
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if not {"course", "assets"} & set(path.parts)]
modules = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


def room(name: str) -> str:
    """The part of the house that a dotted name of the package lies in: minivllm.core.sequence → core."""
    return name.split(".")[1] if "." in name else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not is_type_checking(node):
            yield node
            yield from walk(node)


def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports when it runs."""
    found = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "minivllm"}
    return found


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@modules
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    inside = path.relative_to(PACKAGE).with_suffix("").parts[0]
    rooms = {room(name) for name in imports(path) if name.split(".")[0] == "minivllm"} - {"__init__"}
    rooms -= {"STORYTELLER", "__version__"}  # names of minivllm/__init__.py itself
    assert rooms <= MAY_IMPORT[inside], f"{inside} may not import {rooms - MAY_IMPORT[inside]}"


@modules
def test_bookkeeping_needs_no_torch(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == "core" and path.name != "kv_cache.py":
        assert not {name.split(".")[0] for name in imports(path)} & {"torch", "triton", "numpy", "transformers"}


@modules
def test_every_function_is_typed(path: Path) -> None:
    # Triton reads annotations of kernels (tl.constexpr); its pointers and integers have no Python type.
    assert [each.name for each in functions(path) if not is_compiled(each) and not is_typed(each)] == []


@modules
def test_functions_are_short(path: Path) -> None:
    for function in functions(path):
        lines = function.end_lineno - function.body[0].lineno + 1
        assert lines <= 50, f"{function.name} has {lines} lines"


@modules
def test_public_things_are_described(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_the_engine_never_imports_the_course() -> None:
    for path in MODULES:
        assert not any(name.startswith("minivllm.course") for name in imports(path)), path
