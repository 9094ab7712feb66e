"""What the site is made from: the notebooks and texts of the project, copied and made ready for Sphinx.

The copies differ from the originals in what a notebook cannot say and a page should: figures with their alt texts and
captions, and links from the cells that are exported to the lines of the module. The originals are never changed.
"""

import ast
import html
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minivllm"
# What the reference leaves out: the tools of the chapters, the model's files, the command line.
NOT_IN_REFERENCE = {"course", "assets", "__main__.py"}
# What tells whether this is paged attention, and is no part of the engine.
AUDIT = {"audit", "audit_trace", "validate_model"}
TEXTS = ("CONTRIBUTING.md", "minivllm/assets/storyteller/README.md")
CAPTION = re.compile(r"\A\s*\*(?!\*)((?:[^*\n]|\*\*)+)\*(?=\s|\Z)\s*")
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<target>[^)\s:]+?)(?P<anchor>#[^)\s]*)?\)")
EXPORT = re.compile(r"\A#\| export (\S+)\n")
LONGEST_LINE = 120  # characters of a printed line, as in the house's code


# --- the package ---


def modules() -> dict[str, Path]:
    """The modules of the reference by dotted name: {"core.block_manager": path}; packages by their own, "core"."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if parts[0] not in NOT_IN_REFERENCE:
            found[".".join(parts).removesuffix(".py").removesuffix("__init__").rstrip(".")] = path
    return found


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """(dotted name, statement) of everything that is defined in a body, members of classes after their class."""
    for node in body:
        for name in names_of(node):
            yield prefix + name, node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")


def lines_of(module: str) -> dict[str, int]:
    """The line in which each name of a module is defined; the first, where there are more."""
    found: dict[str, int] = {}
    for name, node in definitions(ast.parse(modules()[module].read_text(encoding="utf-8")).body):
        found.setdefault(name, node.lineno)
    return found


# --- chapters ---


def chapters() -> list[Path]:
    """The notebooks of the course, in order."""
    return sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def exported_names(source: str) -> list[str]:
    """What an export cell defines: functions, constants, classes; of a class that it re-opens, the members."""
    names: list[str] = []
    for node in ast.parse(source).body:
        reopened = isinstance(node, ast.ClassDef) and node.name in map(ast.unparse, node.bases)
        names += [name for name, _ in definitions(node.body, f"{node.name}.")] if reopened else names_of(node)
    return names


def export_note(cell: NotebookNode, root: str) -> str | None:
    """A line below an export cell: which module it goes to, with links to the lines that define its names."""
    if cell.cell_type != "code" or not (directive := EXPORT.match(cell.source)):
        return None
    module = directive[1]
    page, lines = f"{root}{source_page(module)}", lines_of(module)
    names = [name for name in exported_names(cell.source) if name in lines]
    links = [f'<a href="{page}#L{lines[name]}"><code>{name}</code></a>' for name in names]
    path = f'<a href="{page}"><code>{modules()[module].relative_to(ROOT).as_posix()}</code></a>'
    return f'<p class="exported" id="{cell.id}">In the package: {path}{": " if links else ""}{", ".join(links)}</p>'


@cache
def places() -> dict[str, dict[str, str]]:
    """Where each class and function is built: {"minivllm.core.sequence.Sequence": {"03": "03_….html#cell", …}}."""
    found: dict[str, dict[str, str]] = {}
    for path in chapters():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code" and (directive := EXPORT.match(cell.source)):
                for name in exported_names(cell.source):
                    full = f"minivllm.{directive[1]}.{name.split('.')[0]}"
                    found.setdefault(full, {}).setdefault(path.name[:2], f"{path.stem}.html#{cell.id}")
    return found


def source_page(module: str) -> str:
    """The page that shows a module's source, from the root of the site."""
    return f"_modules/minivllm/{module.replace('.', '/')}.html"


def image_of(cell: NotebookNode) -> NotebookNode | None:
    """What a code cell's output says of its image, or None where there is no image."""
    for output in cell.get("outputs", []):
        if "image/png" in output.get("data", {}):
            return output.metadata.get("image/png", NotebookNode())
    return None


def make_figure(cell: NotebookNode, following: NotebookNode | None) -> None:
    """Give the image of a cell its alt text, and the caption that opens the next cell, which loses it."""
    image = image_of(cell)
    if image is None:
        return
    options = NotebookNode(image=NotebookNode(alt=image.get("alt", "")))
    if following is not None and following.cell_type == "markdown" and (caption := CAPTION.match(following.source)):
        options.figure = NotebookNode(caption=caption[1])
        following.source = following.source[caption.end() :]
    cell.metadata.mystnb = options


def wrap_long_lines(cell: NotebookNode) -> None:
    """Mark a cell that prints prose: its lines are broken, while those of a table are scrolled."""
    printed = "".join(output.get("text", "") for output in cell.get("outputs", []))
    if max(map(len, printed.splitlines()), default=0) > LONGEST_LINE:
        cell.metadata.tags = [*cell.metadata.get("tags", []), "wrapped"]


def chapter_page(path: Path) -> NotebookNode:
    """A notebook as the site shows it."""
    notebook = nbformat.read(path, as_version=4)
    cells: list[NotebookNode] = []
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        if cell.cell_type == "code":
            make_figure(cell, following)
            wrap_long_lines(cell)
        cells.append(cell)
        if note := export_note(cell, "../"):
            cells.append(nbformat.v4.new_markdown_cell(note, id=f"{cell.id}-exported"))
    notebook.cells = [cell for cell in cells if cell.source.strip()]
    return notebook


# --- links ---


def relink(text: str, page: Path, out: Path) -> str:
    """Make the links of a text work on the site; files that are not pages come along as downloads."""

    def replace(link: re.Match[str]) -> str:
        target = (page.parent / link["target"]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return link[0]  # Sphinx says that it leads nowhere
        if target.is_dir():
            return link["text"]
        return link_to_file(link, target, page, out)

    return LINK.sub(replace, text)


def link_to_file(link: re.Match[str], target: Path, page: Path, out: Path) -> str:
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    if target == ROOT / "README.md":
        return f"[{link['text']}]({up}index.md{link['anchor'] or ''})"
    for module, path in modules().items():
        if path == target:
            label = re.sub(r"`([^`]*)`", lambda code: f"<code>{html.escape(code[1])}</code>", link["text"])
            return f'<a href="{up}{source_page(module)}">{label}</a>'
    if target.suffix not in (".ipynb", ".md"):
        copy(target, out / target.relative_to(ROOT))
    return link[0]


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


# --- pages ---


def write_text(page: Path, out: Path, name: str | None = None, more: str = "") -> None:
    """A Markdown file of the project as a page; its images come along."""
    text = page.read_text(encoding="utf-8")
    for image in re.findall(r"!\[[^\]]*\]\(([^)\s:]+)\)", text):
        source = (page.parent / image).resolve()
        copy(source, out / source.relative_to(ROOT))
    target = out / (name or page.relative_to(ROOT))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(relink(text, page, out) + more, encoding="utf-8")


def write_chapter(path: Path, out: Path) -> None:
    notebook = chapter_page(path)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source, path, out)
    target = out / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


def toctree(caption: str, pages: list[str]) -> str:
    """A part of the table of contents, in MyST."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def reference_pages() -> dict[str, list[str]]:
    """The pages of the reference, and the modules on each: what is called first, the audit, then each package."""
    names = [name for name, path in modules().items() if path.name != "__init__.py"]
    pages: dict[str, list[str]] = {"minivllm": [], "audit": []}
    for name in sorted(names, key=lambda name: ("." in name, name != "llm", name)):
        package = name.rpartition(".")[0] or ("audit" if name in AUDIT else "minivllm")
        pages.setdefault(package, []).append(name)
    return pages


def reference_page(page: str, names: list[str]) -> str:
    """A page of the reference: the package's docstring, then each module with its public members."""
    package = page if page == "minivllm" else f"minivllm.{page}"
    title = "The audit" if page == "audit" else package
    parts = [title, "=" * len(title), ""]
    if page != "audit":
        parts += [f".. automodule:: {package}", "   :no-members:", ""]
    for name in names:
        parts += [f"minivllm.{name}", "-" * len(f"minivllm.{name}"), "", f".. automodule:: minivllm.{name}", ""]
    return "\n".join(parts)


def write_reference(out: Path) -> list[str]:
    """Write the pages of the reference; returns their names."""
    (out / "api").mkdir(parents=True)
    for page, names in reference_pages().items():
        (out / "api" / f"{page}.rst").write_text(reference_page(page, names), encoding="utf-8")
    return [f"api/{page}" for page in reference_pages()]


def stage(out: Path) -> None:
    """Write everything that Sphinx needs into a new folder."""
    beside = sorted((ROOT / "notebooks").glob("*.md"))
    texts = [ROOT / name for name in TEXTS if (ROOT / name).exists()]
    for path in chapters():
        write_chapter(path, out)
    for path in [*beside, *texts]:
        write_text(path, out)
    contents = [
        toctree("The course", [path.relative_to(ROOT).as_posix() for path in [*chapters(), *beside]]),
        toctree("The package", write_reference(out)),
        toctree("The project", [path.relative_to(ROOT).as_posix() for path in texts]),
    ]
    write_text(ROOT / "README.md", out, "index.md", "".join(contents))


def restore_downloads(site: Path) -> None:
    """The button that downloads a chapter gives the notebook itself, not the copy that was made ready."""
    for path in chapters():
        copy(path, site / "_sources" / path.relative_to(ROOT))
