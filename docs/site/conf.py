"""How Sphinx builds the site from docs/: `make site`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import stand_ins  # noqa: E402, F401  (before billfish)

from billfish.core.version import __version__  # noqa: E402

project = "billfish"
author = "the authors of billfish"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "reference", "sources", "bits_page"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["check", "site"]
smartquotes = False  # x [..., K] -> y stays as it is
highlight_language = "none"  # most blocks without a language are commands, tables and drawings

myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "billfish"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_search_summary = False  # would fetch pages, which a page of file:// may not
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e99", "color-brand-content": "#0b6e99"},
    "dark_css_variables": {"color-brand-primary": "#5cc3ef", "color-brand-content": "#5cc3ef"},
}
