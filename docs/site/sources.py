"""Links that lead out of docs/: pages of the root are in docs/project, and a source file becomes a page."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.highlighting import PygmentsBridge

ROOT = Path(__file__).parent.parent.parent
_NAVIGATION: dict[str, Callable[..., str]] = {}  # by folder of the site
LEXERS = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cuh": "cuda", ".cu": "cuda", ".metal": "cpp", ".toml": "toml"}


def rebased(text: str, folder: Path, page: Path, docs: Path) -> str:
    """Markdown whose links are relative to `folder`, for a page in the folder `page`."""

    def link(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        project = docs / "project" / target.name.lower()
        if target.parent == ROOT and project.is_file():
            target = project
        elif folder == page or not target.exists():
            return found[0]
        return f"]({os.path.relpath(target, page)}{found[2] or ''})"

    return re.sub(r"\]\(([^)#:]+)(#[^)]*)?\)", link, text)


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Sphinx's event: a page was read."""
    page = Path(app.srcdir, docname).parent
    source[0] = rebased(source[0], page, page, Path(app.srcdir))


def read_included(app: Sphinx, path: Path, parent: str, source: list[str]) -> None:
    """Sphinx's event: a file that a page includes was read."""
    folder = (Path(app.srcdir) / path).resolve().parent
    source[0] = rebased(source[0], folder, Path(app.srcdir, app.env.docname).parent, Path(app.srcdir))


def link_sources(app: Sphinx, doctree: nodes.document) -> None:
    """A link to a file of the repository leads to a page with its text; MyST would offer the file as a download."""
    docname = app.env.docname
    for link in list(doctree.findall(addnodes.download_reference)):
        path = (Path(app.srcdir, docname).parent / link["reftarget"]).resolve()
        if not path.is_file() or ROOT not in path.parents:
            continue
        name = path.relative_to(ROOT).as_posix()
        app.env.note_dependency(str(path))
        _linked(app.env).setdefault(docname, set()).add(name)
        uri = "../" * docname.count("/") + f"source/{name}.html"
        link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Pages of all files that something links to."""
    highlight = PygmentsBridge("html", "sphinx").highlight_block
    for name in sorted(set().union(*_linked(app.env).values())):
        path = ROOT / name
        lexer = LEXERS.get(path.suffix, "text")
        title = f"<h1><code>{name}</code></h1>"
        yield f"source/{name}", {"title": name, "body": title + highlight(path.read_text(), lexer)}, "page.html"


def share_navigation(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """Sphinx's event: a page is written. Source files of a folder share their navigation, which takes 80 ms."""
    folder, _, _ = pagename.rpartition("/")
    if pagename.startswith(("source/", "_modules/")) and "toctree" in context:
        context["toctree"] = _NAVIGATION.setdefault(folder, cache(context["toctree"]))


def _linked(env: BuildEnvironment) -> dict[str, set[str]]:
    """The files that pages link to, by page."""
    if not hasattr(env, "linked_sources"):
        env.linked_sources = {}  # type: ignore[attr-defined]
    return env.linked_sources  # type: ignore[attr-defined,no-any-return]


def forget(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """A page is read anew."""
    _linked(env).pop(docname, None)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("doctree-read", link_sources, priority=100)  # before Sphinx collects downloads
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", share_navigation, priority=100)  # before the theme asks for it
    app.connect("env-purge-doc", forget)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
