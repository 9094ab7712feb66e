"""Sphinx's settings for the site; `site/build.py` calls Sphinx with them."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

project = "minivllm"
author = "the minivllm authors"
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "mathml", "reference"]
smartquotes = False  # the texts have the quotes that they want, and docstrings have code
html_theme = "sphinx_book_theme"
html_title = "minivllm"
html_static_path = ["static"]
html_css_files = ["course.css"]
html_favicon = "static/favicon.svg"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
html_show_sphinx = False
html_use_index = False  # the search knows every name
html_domain_indices = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_fullscreen_button": False,
    "search_bar_text": "Search",
    "navbar_persistent": [],  # the field for searching is in the sidebar
}

# The notebooks are shown as they were committed. Widgets would load their scripts from a server, and none is used.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

# Triton has packages for Linux only; the reference needs its names, not its compiler.
autodoc_mock_imports = ["triton"]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
viewcode_line_numbers = True
viewcode_follow_imported_members = False
