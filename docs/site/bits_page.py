"""The directive `{bits}`: the programs of all formats, and the place where static/bits.js draws them."""

from __future__ import annotations

import json
from typing import Any

from bits_programs import programs
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PAGE = "bits"


class Bits(SphinxDirective):
    """The moving part of the page. The programs stand in the page itself: a page of file:// cannot fetch them."""

    def run(self) -> list[nodes.Node]:
        data = json.dumps(programs(), allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
        html = (
            '<div class="bits"><noscript><p>This page needs JavaScript: it runs the programs that are in it.</p>'
            f'</noscript></div>\n<script type="application/json" id="bits-programs">{data}</script>'
        )
        return [nodes.raw("", html, format="html")]


def add_files(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Style and scripts, on this page alone."""
    if page == PAGE:
        app.add_css_file("bits.css")
        app.add_js_file("bits-machine.js", loading_method="defer")
        app.add_js_file("bits.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.add_directive("bits", Bits)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
