"""Write the package from the notebooks.

    python tools/export.py                         write minivllm/
    python tools/export.py --check                 write nothing; exit 1 and list what is stale, missing or orphaned
    python tools/export.py --through 05 --out DIR  write DIR/minivllm as the package stands after chapter 05

A code cell whose first line is `#| export core.block_manager` goes to `minivllm/core/block_manager.py`. It may hold
imports, functions, classes, constants (`NAME = value`), an `if TYPE_CHECKING:` of imports and, last, an
`if __name__ == "__main__":`. One cell of each module begins with a string, which is the module's docstring.
A module has its imports first (not those from itself, nor those that nothing uses any more), then the definitions in
the order of the notebooks. A comment travels with the statement below it.

`class BlockManager(BlockManager):` re-opens a class: new fields go below the fields, new methods to the end. What is
defined already can be replaced, and keeps its place, if the cell says so with `# replaces: allocate, free`: a member
of a re-opened class, or a function, a constant or `__main__` of an earlier notebook (`__doc__` is a docstring's name).
Whatever else is defined twice is an error. A comment above a re-opened class speaks to the reader of the notebook and
stays there.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
# What no notebook exports.
HANDWRITTEN = ("__init__.py", "__main__.py", "audit.py", "audit_trace.py", "course", "assets")
PACKAGES = {
    "core": "Bookkeeping in plain Python: sequences, blocks, batches, the scheduler; and the tensors of the KV cache.",
    "engine": "What ties the parts together: from a batch to logits, and the loop of steps.",
    "kernels": "Triton kernels, and a PyTorch reference for each.",
    "layers": "What the model is made of.",
    "layers.numpy": "The same layers in NumPy float64: the readable reference.",
    "model": "The models, put together from the layers.",
    "utils": "What layers and engine share: the context of a step, and the loading of weights.",
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class ExportError(ValueError):
    """The notebooks do not make a package; the message names the cells and says what to do."""


@dataclass
class Cell:
    """An export cell; of the names that it says it `replaces`, those that were are in `replaced`."""

    notebook: str
    where: str
    module: str
    source: str
    replaces: set[str]
    replaced: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return self.where


@dataclass
class Piece:
    """A statement as its cell has it, with the comments above; a re-opened class keeps its members apart."""

    name: str
    node: ast.stmt
    text: str
    cell: Cell
    members: dict[str, Piece] = field(default_factory=dict)

    def render(self) -> str:
        """The text, with the members of a re-opened class."""
        return "\n".join([self.text, *(member.text for member in self.members.values())])


# From notebooks to pieces


def chapters(folder: Path = ROOT / "notebooks", through: str | None = None) -> list[Path]:
    """The notebooks NN_*.ipynb in order: all of them, or up to the chapter `through` ("05")."""
    notebooks = sorted(path for path in folder.glob("*.ipynb") if re.match(r"\d\d_", path.name))
    numbers = [path.name[:2] for path in notebooks]
    if through is not None and through not in numbers:
        raise ExportError(f"there is no chapter {through!r} in {folder}: it has {', '.join(numbers) or 'none'}")
    return [path for path in notebooks if through is None or path.name[:2] <= through]


def export_cells(notebook: Path) -> Iterator[Cell]:
    """The cells of a notebook that go to a module."""
    for number, raw in enumerate(nbformat.read(notebook, as_version=4).cells, start=1):
        directive = re.search(r"^# *\| *export\b(.*)", raw.source, re.MULTILINE)
        if raw.cell_type != "code" or not directive:
            continue
        where = f"{notebook.name} cell {number} (id {raw.get('id')})"
        if directive.start() > 0:
            raise ExportError(f"{where}: `{directive[0]}` must be the first line of the cell")
        claims = re.findall(r"^ *# replaces:(.*)", raw.source, re.MULTILINE)
        replaces = {name.strip() for claim in claims for name in claim.split(",")}
        source = re.sub(r"^ *# replaces:.*\n?", "", raw.source, flags=re.MULTILINE)
        source = re.sub(r"\A(# *\|.*\n?)+", "", source)
        yield Cell(notebook.name, where, module_name(directive[1].strip(), where), source, replaces)


def module_name(name: str, where: str) -> str:
    """The name after `#| export`, if a notebook may write that module."""
    package, _, stem = name.rpartition(".")
    if not re.fullmatch(r"[a-z_]\w*(\.[a-z_]\w*)*", name):
        raise ExportError(f"{where}: {name!r} is no name for a module; write, say, `#| export core.sequence`")
    if stem.startswith("__") or name.split(".")[0] in [Path(path).stem for path in HANDWRITTEN]:
        raise ExportError(f"{where}: minivllm.{name} is written by hand; export to another module")
    if name in PACKAGES or package not in ["", *PACKAGES]:
        raise ExportError(f"{where}: minivllm.{name} is not a module in one of the packages {', '.join(PACKAGES)}")
    return name


def pieces_of(cell: Cell) -> list[Piece]:
    """The statements of a cell."""
    try:
        nodes = ast.parse(cell.source).body
    except SyntaxError as error:
        raise ExportError(f"{cell} is not plain Python: {error.msg}: `{(error.text or '').strip()}`") from error
    if not nodes:
        raise ExportError(f"{cell} exports nothing to minivllm.{cell.module}")
    if "__main__" in map(name_of, nodes[:-1]):
        raise ExportError(f'{cell}: `if __name__ == "__main__":` must be its last statement')
    return split(nodes, cell.source, cell)[1]


def split(nodes: Sequence[ast.stmt], text: str, cell: Cell) -> tuple[str, list[Piece]]:
    """Cut a text at its statements: what comes before the first, and a piece for each."""
    lines, starts, floor = text.split("\n"), [], 0
    for node in nodes:
        if lines[node.lineno - 1][: node.col_offset].strip():
            raise ExportError(f"{cell}: put `{first_line(node)}` on a line of its own")
        start = top(node) - 1
        # A comment of the same depth belongs to what is below it; a deeper one ends what is above it.
        while start > floor and re.match(rf"\s*$| {{{node.col_offset}}}#", lines[start - 1]):
            start -= 1
        starts.append(start)
        floor = node.end_lineno or start
    texts = ["\n".join(lines[a:b]).rstrip() for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    names = [name_of(node, first=node is nodes[0]) for node in nodes]
    return "\n".join(lines[: starts[0]]), [Piece(*each, cell) for each in zip(names, nodes, texts, strict=True)]


def body_of(piece: Piece) -> tuple[str, list[Piece]]:
    """The lines that open a class or an `if`, and the statements in it."""
    node = ast.parse(piece.text).body[0]
    assert isinstance(node, ast.ClassDef | ast.If)
    return split(node.body, piece.text, piece.cell)


def name_of(node: ast.stmt, first: bool = False) -> str:
    """What a statement defines; "" for an import, and for what an export cell may not hold."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.Expr(value=ast.Constant(value=str())) if first:
            return "__doc__"
        case ast.If(orelse=[]) if ast.unparse(node.test) == "__name__ == '__main__'":
            return "__main__"
    return ""


def first_line(node: ast.AST) -> str:
    """A statement as Python writes it, as far as its first line."""
    return ast.unparse(node).split("\n")[0]


def decorators(node: ast.stmt) -> list[str]:
    """The decorators of a definition as text, without the @."""
    return [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]


def top(node: ast.stmt) -> int:
    """The first line of a statement, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


# From pieces to modules


def add(scope: dict[str, Piece], piece: Piece, owner: str = "") -> None:
    """Put a piece where its name is, or at the end of `scope`: a module, or the members of the class `owner`."""
    old, cell = scope.get(piece.name), piece.cell
    if not piece.name:
        what = f"the re-opened class {owner}" if owner else "an export cell"
        raise ExportError(f"{cell}: {what} cannot hold `{first_line(piece.node)}`; tools/export.py says what it can")
    if old and goes_on(piece, old):
        piece.text = f"{old.text}\n{piece.text}"
    elif old:
        check_replacement(old, piece, owner)
        cell.replaced.add(piece.name)
    scope[piece.name] = piece


def goes_on(piece: Piece, old: Piece) -> bool:
    """Are the two one definition: a property with its setter, or the overloads of a function?"""
    accessors = {f"{piece.name}.{kind}" for kind in ("getter", "setter", "deleter")}
    overloaded = {"overload", "typing.overload"} & {*decorators(old.node)}
    return bool(overloaded or accessors & {*decorators(piece.node)})


def check_replacement(old: Piece, new: Piece, owner: str) -> None:
    """Raise unless `new` may take the place of `old`."""
    name = f"{owner}.{new.name}" if owner else new.name
    twice = f"{name} is defined in {old.cell} and again in {new.cell}"
    if not owner and isinstance(new.node, ast.ClassDef):
        raise ExportError(f"{twice}: re-open the class with `class {name}({name}):`, or rename one")
    if new.name not in new.cell.replaces or old.cell is new.cell:
        raise ExportError(f"{twice}: say `# replaces: {new.name}` in the second, or rename one")
    if not owner and old.cell.notebook == new.cell.notebook:
        raise ExportError(f"{twice}: only a later notebook can replace it; export one of the two")


def reopen(opened: Piece, piece: Piece) -> None:
    """Merge `class X(X):` into the first definition of X."""
    check_reopening(opened, piece)
    if not opened.members:
        opened.text, members = body_of(opened)
        add_members(opened, members)
    add_members(opened, body_of(piece)[1])
    methods = {name for name, member in opened.members.items() if isinstance(member.node, FUNCTION)}

    def rank(name: str) -> int:
        node = opened.members[name].node
        used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        is_field = isinstance(node, ast.Assign | ast.AnnAssign) and not used & methods  # not `__call__ = forward`
        return 0 if name == "__doc__" else 1 if is_field else 2

    opened.members = {name: opened.members[name] for name in sorted(opened.members, key=rank)}


def add_members(opened: Piece, members: list[Piece]) -> None:
    """Put statements of a class body into an opened class; what only fills an empty body is left out."""
    for member in members:
        if first_line(member.node) not in ("pass", "..."):
            add(opened.members, member, opened.name)


def check_reopening(opened: Piece, piece: Piece) -> None:
    """Raise if the merged class might not do in the package what the re-opened one does in the notebook."""
    name, mine = piece.name, decorators(piece.node)
    bases = [*getattr(piece.node, "bases", []), *getattr(piece.node, "keywords", [])]
    if len(bases) > 1:
        raise ExportError(f"{piece.cell}: a re-opened class keeps its bases: write `class {name}({name}):`")
    if mine and mine != decorators(opened.node):
        raise ExportError(f"{name} has other decorators in {piece.cell} than in {opened.cell}: repeat them, or none")
    if any(isinstance(each, ast.Name) and each.id == "super" for each in ast.walk(piece.node)):
        raise ExportError(
            f"{piece.cell}: super() in the re-opened {name} is the earlier {name} in the notebook, but the base class"
            " in the package; call the class that you mean by its name"
        )


@dataclass
class Module:
    """A module in the making; `typing` holds the imports of `if TYPE_CHECKING:`."""

    name: str
    notebooks: list[str] = field(default_factory=list)
    imports: dict[str, Piece] = field(default_factory=dict)
    typing: dict[str, Piece] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)

    def add(self, cell: Cell) -> None:
        """Add the statements of a cell."""
        self.notebooks += [cell.notebook] if cell.notebook not in self.notebooks else []
        pieces = pieces_of(cell)
        for first in [piece for piece in pieces if piece.name not in ("", "__doc__")][:1]:
            first.text = f"\n{first.text}"  # an empty line sets the cell apart from the one before it
        for piece in pieces:
            self.add_piece(piece)
        if unused := cell.replaces - cell.replaced:
            raise ExportError(f"{cell} says that it replaces {', '.join(sorted(unused))}, and does not")

    def add_piece(self, piece: Piece) -> None:
        """Put a statement where it belongs: among the imports, the imports for types, or the definitions."""
        match piece.node:
            case ast.Import() | ast.ImportFrom():
                self.add_import(piece, self.imports)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]):
                for each in body_of(piece)[1]:
                    self.add_import(each, self.typing)
            case ast.ClassDef(name=name, bases=bases) if name in map(ast.unparse, bases):
                opened = self.pieces.get(name)
                if opened is None or not isinstance(opened.node, ast.ClassDef):
                    raise ExportError(f"{piece.cell} re-opens {name}, but no cell before it defines it in {self.name}")
                reopen(opened, piece)
            case _:
                add(self.pieces, piece)

    def add_import(self, piece: Piece, scope: dict[str, Piece]) -> None:
        """Keep an import, as it is written, if it has something new (ruff removes what is there twice)."""
        if not isinstance(piece.node, ast.Import | ast.ImportFrom):
            raise ExportError(f"{piece.cell}: `if TYPE_CHECKING:` is for imports, not for `{first_line(piece.node)}`")
        new = [(name, text) for name, text in single_imports(piece.node) if self.is_new(name, text, piece.cell)]
        for index, (name, text) in enumerate(new):
            scope[name] = Piece(text, piece.node, "" if index else piece.text, piece.cell)

    def is_new(self, name: str, text: str, cell: Cell) -> bool:
        """Is an import neither one that the module has, nor from the module itself?"""
        if name == "*":
            raise ExportError(f"{cell}: `{text}` hides what it imports; name what the cell uses")
        known = self.imports.get(name) or self.typing.get(name)
        if known and known.name != text:
            raise ExportError(f"{name} is two things: `{known.name}` in {known.cell}, `{text}` in {cell}")
        package, _, stem = f"minivllm.{self.name}".rpartition(".")
        itself = (f"from {package}.{stem} import ", f"from {package} import {stem} ", f"import {package}.{stem} ")
        return name not in self.imports and not f"{text} ".startswith(itself)

    def render(self) -> str:
        """The text of the module, which ruff has yet to sort and to format."""
        imports = self.imports | self.typing
        for name in imports.keys() & self.pieces.keys():
            both = f"{imports[name].cell} and defined in {self.pieces[name].cell}"
            raise ExportError(f"{name} is imported in {both}: rename one")
        pieces = dict(sorted(self.pieces.items(), key=lambda item: item[0] == "__main__"))
        if (docstring := pieces.pop("__doc__", None)) is None:
            cell = next(iter((imports | self.pieces).values())).cell
            raise ExportError(f"minivllm.{self.name} has no docstring: begin a cell with one, say {cell}")
        typed = [f"    {piece.name}" for name, piece in self.typing.items() if name not in self.imports]
        texts = [
            header(self.notebooks),
            docstring.text.strip(),
            *(piece.text for piece in self.imports.values()),
            *(["if TYPE_CHECKING:", *typed] if typed else []),
            *(piece.render() for piece in pieces.values()),
        ]
        return "\n".join(texts) + "\n"

    def cell_at(self, text: str, row: int) -> Cell | str:
        """The cell that a row of the module's text came from."""
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
        names = [name_of(node) for node in nodes if top(node) <= row <= (node.end_lineno or 0)]
        if not names or names[0] not in self.pieces:
            return ", ".join(self.notebooks)
        piece = self.pieces[names[0]]
        return piece.members.get(names[min(1, len(names) - 1)], piece).cell


def single_imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, with the import of that name alone."""
    for alias in node.names:
        one = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], node.level)
        yield alias.asname or alias.name, ast.unparse(one)


def header(notebooks: Sequence[str] = ()) -> str:
    """The first line of a generated file (more than one where many notebooks are named)."""
    origin = f"from notebooks/{', '.join(notebooks)} " if notebooks else ""
    return textwrap.fill(f"# Generated {origin}by tools/export.py; edit there.", width=120, subsequent_indent="# ")


# From modules to files


def build(notebooks: Iterable[Path]) -> dict[str, str]:
    """The package that the notebooks make, as {"core/sequence.py": text}; writes nothing. Raises ExportError."""
    modules: dict[str, Module] = {}
    for notebook in notebooks:
        for cell in export_cells(notebook):
            modules.setdefault(cell.module, Module(cell.module)).add(cell)
    files = tidy({module_path(name): module for name, module in modules.items()})
    packages = {parent.as_posix() for path in files for parent in Path(path).parents} - {"."}
    inits = {f"{package}/__init__.py": PACKAGES[package.replace("/", ".")] for package in packages}
    return dict(sorted((files | {path: f'{header()}\n"""{line}"""\n' for path, line in inits.items()}).items()))


def module_path(name: str) -> str:
    """core.block_manager → core/block_manager.py"""
    return name.replace(".", "/") + ".py"


def tidy(modules: dict[str, Module]) -> dict[str, str]:
    """The text of each module, sorted and formatted by ruff, which must not find an undefined name."""
    files = {path: module.render() for path, module in modules.items()}
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder).resolve() / "minivllm"
        write(files, package)
        for error in json.loads(ruff(package, "check", "--select=F821", "--output-format=json", "--exit-zero")):
            path = Path(error["filename"]).relative_to(package).as_posix()
            cell = modules[path].cell_at(files[path], error["location"]["row"])
            raise ExportError(f"{cell}: {error['message']} in minivllm/{path}; import or define it in an export cell")
        ruff(package, "check", "--select=I,F401", "--fix")
        ruff(package, "format")
        return {path: (package / path).read_text(encoding="utf-8") for path in files}


def ruff(package: Path, command: str, *options: str) -> str:
    """Run ruff over a package with the project's settings."""
    settings = [*options, "--config", str(ROOT / "pyproject.toml"), "--no-cache", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "ruff", command, *settings, package], capture_output=True, text=True)
    if done.returncode:
        raise ExportError(f"ruff {command} failed: {done.stdout}{done.stderr}")
    return done.stdout


def write(files: dict[str, str], package: Path) -> None:
    """Write the texts of files below a folder, which is made where it is missing."""
    package.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text, encoding="utf-8")


def differences(files: dict[str, str], package: Path) -> dict[str, str]:
    """What a package has otherwise than `files`: {"core/sequence.py": "stale"}, or "missing", or "orphan"."""
    present = {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    changed = {path: "stale" if path in present else "missing" for path in files if present.get(path) != files[path]}
    ours = [path for path, text in present.items() if re.match(r"# Generated (from notebooks|by tools)/", text)]
    return changed | {path: "orphan" for path in sorted(ours) if path not in files}


def export(notebooks: Iterable[Path], out: Path = ROOT) -> dict[str, str]:
    """Make out/minivllm what the notebooks say, and remove orphans; returns the differences that there were."""
    files, package = build(notebooks), out / "minivllm"
    changed = differences(files, package)
    write({path: text for path, text in files.items() if path in changed}, package)
    for path in changed.keys() - files.keys():
        (package / path).unlink()
    return changed


def export_through(chapter: str, out: Path, root: Path = ROOT) -> Path:
    """Write and return out/minivllm as it stands after a chapter ("05"), with the files that are written by hand."""
    if out.resolve() == root.resolve():
        raise ExportError(f"{out} is the project itself, with the package of the last chapter; choose another folder")
    export(chapters(root / "notebooks", chapter), out)
    for name in HANDWRITTEN:
        bring(root / "minivllm" / name, out / "minivllm" / name)
    return out / "minivllm"


def bring(source: Path, target: Path) -> None:
    """Copy a file; link a folder (the assets are large), or copy it where links cannot be made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, target)
    elif source.is_dir() and not target.is_symlink():
        try:
            target.symlink_to(source.resolve(), target_is_directory=True)
        except OSError:
            shutil.copytree(source, target, dirs_exist_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the package minivllm from the notebooks.")
    parser.add_argument("--check", action="store_true", help="write nothing; list what is stale, missing or orphaned")
    parser.add_argument("--through", metavar="NN", help="the package as it stands after this chapter (with --out)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write DIR/minivllm (with --through)")
    options = parser.parse_args(arguments)
    if (options.through is None) != (options.out is None) or (options.check and options.out):
        parser.error("--through NN and --out DIR go together, and not with --check")
    try:
        if options.out:
            export_through(options.through, options.out)
            return 0
        changed = differences(build(chapters()), ROOT / "minivllm") if options.check else export(chapters())
    except ExportError as error:
        sys.exit(f"export: {error}")
    for path, what in changed.items():
        print(f"{what}: minivllm/{path}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
