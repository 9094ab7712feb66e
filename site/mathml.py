"""Formulas as MathML, which browsers draw themselves: no script and no fonts to load."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata
from sphinx.writers.html5 import HTML5Translator


def mathml(tex: str, display: str) -> str:
    r"""A formula as MathML. The converter does not know that `\_` is an underscore in `\text{head\_dim}`."""
    tex = re.sub(r"\\text\{([^}]*)\}", lambda text: text[0].replace(r"\_", "_"), tex)
    return convert(tex.strip(), display=display)


def visit_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_math_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> ExtensionMetadata:
    app.add_html_math_renderer("mathml", inline_renderers=(visit_math, None), block_renderers=(visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
