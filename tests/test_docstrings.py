"""What is public says what it takes and gives: a docstring, the shape of its tensors, the errors that it raises."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from chapters import ROOT

PACKAGE = ROOT / "minivllm"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# A tensor, or some of them in a tuple or list; not a table of tensors by name, nor a function that takes them.
TENSOR = re.compile(r"^(?!dict|Mapping|Iterator|Iterable|Callable|collections).*\b(Tensor|ndarray)\b")
SHAPE = re.compile(r"\[(?:\.\.\.|[\w…⌈])[^\[\]]*\]")  # [num_tokens, num_heads, head_dim], [..., size], [4]


@dataclass(frozen=True)
class Definition:
    """A public function, method or class, with the text that describes it: its own, and for a member its class's."""

    where: str  # core/kv_cache.py: KVCache.write
    node: FUNCTION | ast.ClassDef
    owner: ast.ClassDef | None
    signature: str  # with its comments; empty for a class

    @property
    def docstring(self) -> str:
        """Its docstring; for `__init__` and the like, the docstring of its class."""
        described = self.owner if self.owner and self.node.name.startswith("__") else self.node
        return ast.get_docstring(described) or ""

    @property
    def tensors(self) -> list[str]:
        """The parameters that are tensors, and "return" where the result is one."""
        if isinstance(self.node, ast.ClassDef):
            return []
        arguments = [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]
        typed = {each.arg: each.annotation for each in arguments} | {"return": self.node.returns}
        return [name for name, annotation in typed.items() if annotation and TENSOR.search(ast.unparse(annotation))]

    @property
    def errors(self) -> set[str]:
        """The errors that its own body raises."""
        if isinstance(self.node, ast.ClassDef):
            return set()
        raised = (each.exc for each in ast.walk(self.node) if isinstance(each, ast.Raise) and each.exc)
        called = (each.func if isinstance(each, ast.Call) else each for each in raised)
        return {each.id for each in called if isinstance(each, ast.Name) and each.id[0].isupper()}


def members(body: list[ast.stmt], lines: list[str], module: str, owner: ast.ClassDef | None) -> Iterator[Definition]:
    """What is public in a module, or in one of its classes; `__init__` and `__post_init__` are."""
    for node in body:
        if not isinstance(node, FUNCTION | ast.ClassDef):
            continue
        is_maker = owner is not None and node.name in ("__init__", "__post_init__", "__call__")
        if not node.name[0].isalpha() and not is_maker:
            continue
        name = f"{owner.name}.{node.name}" if owner else node.name
        signature = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
        yield Definition(f"{module}: {name}", node, owner, signature if isinstance(node, FUNCTION) else "")
        if isinstance(node, ast.ClassDef):
            yield from members(node.body, lines, module, node)


def definitions() -> Iterator[Definition]:
    """Everything public in the modules that the notebooks export."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.startswith("# Generated") and path.name != "__init__.py":
            yield from members(ast.parse(text).body, text.splitlines(), path.relative_to(PACKAGE).as_posix(), None)


DEFINITIONS = list(definitions())


def each(chosen: list[Definition]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("found", chosen, ids=lambda found: found.where.replace(": ", "-"))


def test_there_is_something_to_look_at() -> None:
    assert len(DEFINITIONS) > 200 and sum(bool(found.errors) for found in DEFINITIONS) > 20


@each(DEFINITIONS)
def test_it_has_a_docstring(found: Definition) -> None:
    assert found.docstring


@each([found for found in DEFINITIONS if found.errors])
def test_it_names_the_errors_that_it_raises(found: Definition) -> None:
    assert {name for name in found.errors if not re.search(rf"\b{name}\b", found.docstring)} == set()


@each([found for found in DEFINITIONS if found.tensors])
def test_it_gives_the_shapes_of_its_tensors(found: Definition) -> None:
    comments = re.findall(r"#.*", found.signature)
    text = "\n".join([found.docstring, *comments])
    told = SHAPE.search(text) or "any shape" in text
    assert told, f"{', '.join(found.tensors)}: give the shape in brackets, or say `any shape`"
