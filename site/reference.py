"""The reference: docstrings as they are written, comments beside fields, and source pages whose lines have anchors.

The docstrings of the package are plain text: `code` between single backticks, and indented lines that are set as they
stand. Sphinx reads reStructuredText, so they are translated here.
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import ExtensionMetadata
from staging import definitions, modules, places

NAME = re.compile(r"[A-Za-z_][\w.]*")


def inline(text: str) -> str:
    """A piece of prose: code is set as code, and what reStructuredText would take for markup is escaped."""
    parts = text.split("`")
    for index, part in enumerate(parts):
        if index % 2 == 0 or len(parts) % 2 == 0:
            parts[index] = re.sub(r"([\\*_|`])", r"\\\1", part)
        elif NAME.fullmatch(part):
            parts[index] = rf"\ :py:obj:`{part}`\ "  # a link, if it is a name of the package
        else:
            parts[index] = rf"\ ``{part}``\ "
    return "".join(parts)


def translate(lines: list[str]) -> Iterator[str]:
    """A docstring's lines in reStructuredText."""
    in_list = False
    for is_block, group in groupby(lines, key=lambda line: line.startswith(" ")):
        block = list(group)
        if is_block and not in_list:
            yield from ["", ".. code-block:: none", "", *(f"   {line}" for line in block), ""]
            continue
        yield from prose(block)
        in_list = (in_list and is_block) or block[-1].startswith("- ")


def prose(lines: list[str]) -> Iterator[str]:
    """Paragraphs, whose code may go on over the end of a line."""
    for is_empty, group in groupby(lines, key=lambda line: not line.strip()):
        yield from [""] if is_empty else inline("\n".join(group)).split("\n")


def comments(path: Path) -> dict[str, str]:
    """The comment that stands behind each field and constant of a module."""
    source = path.read_text(encoding="utf-8")
    rows = source.splitlines()
    found = {}
    for name, node in definitions(ast.parse(source).body):
        rest = rows[(node.end_lineno or 1) - 1].encode()[node.end_col_offset :].decode()
        if isinstance(node, ast.Assign | ast.AnnAssign) and (comment := re.fullmatch(r"\s*#\s*(.+)", rest)):
            found[name] = comment[1]
    return found


def know_comments(app: Sphinx) -> None:
    """Let the comment beside a field or a constant be its description."""
    for module, path in modules().items():
        name = f"minivllm.{module}".rstrip(".")
        analyzer = ModuleAnalyzer.for_file(path, name)
        analyzer.analyze()
        for field, comment in comments(path).items():
            scope, _, last = field.rpartition(".")
            analyzer.attr_docs.setdefault((scope, last), [comment, ""])
        ModuleAnalyzer.cache["module", name] = analyzer  # where Sphinx looks when it comes to the module


def describe(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Translate a docstring, and say which chapters build what it describes."""
    lines[:] = translate(lines)
    if built := places().get(name):
        links = [f'<a href="../notebooks/{place}">{chapter}</a>' for chapter, place in built.items()]
        lines += ["", ".. raw:: html", "", f'   <p class="built">Chapter {", ".join(links)}</p>', ""]


def shorten(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Triton's types by the name that the code has for them; `<factory>` as dots, which Sphinx can read."""
    shorter = re.sub(r"<\w[^>]*>", "...", signature or "").replace("triton.language.", "tl.")
    return shorter or signature, returns


def anchor_lines(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """In a page of source: an anchor for each line, and links from the header to the chapters."""
    if not page.startswith("_modules/minivllm"):
        return
    up = "../" * page.count("/")
    # Sphinx puts each block that can be linked to on lines of its own, which would be shown as empty lines.
    body = re.sub(r'(<div class="viewcode-block" id="[^"]*">)\n(.*</a>)\n', r"\1\2", context["body"])
    body = re.sub(r"</div>\n+", "</div>", body)
    body = re.sub(r'<span class="linenos">( *(\d+))</span>', r'<span class="linenos" id="L\2">\1</span>', body)
    context["body"] = re.sub(r"\b(\d\d_\w+)\.ipynb", rf'<a href="{up}notebooks/\1.html">\g<0></a>', body)


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("builder-inited", know_comments)
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", shorten)
    app.connect("html-page-context", anchor_lines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
