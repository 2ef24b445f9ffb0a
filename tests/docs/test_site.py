"""The site: every public name is in it and documented, every link leads somewhere, and nothing comes from outside."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from site_support import ROOT, built_site

import billfish as bf

pytest.importorskip("sphinx", reason="needs billfish[docs]")

from bits_programs import floats_at, programs
from docstrings import to_rest
from public_names import FIRST, GROUPS, MODULES, ORDER, PublicName, field_comments, in_group, public_names

from billfish.core.scales import encode_e4m3, encode_e8m0

NAMES = public_names()
EACH_NAME = pytest.mark.parametrize("public", NAMES, ids=lambda public: public.path)

# Parameters that a docstring does not name yet. Names leave this table and never come back.
UNNAMED = {
    "billfish.llm.Cache": {"config", "capacity"},
}


class Page(HTMLParser):
    """The anchors of a page, where it leads, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "script", "img", "iframe", "object", "source"):
            self.loads += [values[name] for name in ("href", "src", "data") if name in values]


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(built_site().rglob("*.html"))}


# ---- public names -----------------------------------------------------------------------------------------------


def test_all_names_are_there_and_each_has_one_group():
    assert {public.name for public in NAMES if public.module == "billfish"} >= set(bf.__all__) - {"QuantizedLinear"}
    named = {f"{module}.{name}" for module in MODULES[1:] for name in __import__(module, fromlist=["x"]).__all__}
    assert named - {"billfish.nn.QuantizedLinear"} <= {alias for public in NAMES for alias in _aliases(public)}
    assert set(ORDER) == set(GROUPS)
    assert sum(len(in_group(group)) for group in ORDER) == len(NAMES)
    assert all(in_group(group) for group in ORDER)


def _aliases(public: PublicName) -> set[str]:
    """All paths under which users find it."""
    modules = [__import__(module, fromlist=["x"]) for module in MODULES]
    return {f"{m.__name__}.{public.name}" for m in modules if getattr(m, public.name, None) is public.value}


@EACH_NAME
def test_a_name_is_in_the_table_and_in_the_reference(pages, public):
    table = pages[built_site() / "api.html"]
    place = f"api/{public.group}.html"
    anchors = {public.path, f"module-{public.path}"} & pages[built_site() / place].anchors
    assert anchors
    assert {f"{place}#{anchor}" for anchor in anchors} & set(table.links)


def test_the_reference_starts_with_the_names_of_the_readme(pages):
    named = [link.split("#")[1] for link in pages[built_site() / "api.html"].links if "#billfish." in link]
    assert tuple(named[:10]) == FIRST
    readme = (ROOT / "README.md").read_text()
    for path in FIRST:
        assert path.replace("billfish.", "bf.", 1) in readme or path in readme, path


@EACH_NAME
def test_a_name_has_a_docstring_and_a_summary(public):
    assert public.documentation, f"{public.home} has no docstring (data: a string behind its definition)"
    assert 5 < len(public.summary) <= 200


@EACH_NAME
def test_a_docstring_names_all_parameters(public):
    said = {*re.findall(r"\w+", public.documentation), *field_comments(public.value)}
    unnamed = {name for name in public.parameters if name not in said and not name.startswith("_")}
    allowed = UNNAMED.get(public.path, set())
    assert unnamed <= allowed, "the docstring says nothing of these"
    assert allowed <= unnamed, "these are documented now: take them out of UNNAMED"


def test_names_that_are_gone_leave_the_table_of_exceptions():
    assert UNNAMED.keys() <= {public.path for public in NAMES}


def test_a_name_without_a_group_is_an_error():
    with pytest.raises(Exception, match="give it a place in GROUPS"):
        PublicName("pathlib", "Path", Path).group  # noqa: B018


# ---- docstrings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("Rounds x * y | z to `dtype`.", r"Rounds x \* y \| z to :py:obj:`dtype`."),
        ("As `bf.quantize`, or `a + b`.", "As :py:obj:`bf.quantize <billfish.quantize>`, or ``a + b``."),
        ("Many `word`s, and :func:`load`.", r"Many :py:obj:`word`\ s, and :func:`load`."),
        ("The **bold** one of name_ and **options.", r"The **bold** one of name\_ and \*\*options."),
        ("w: the weights,\non two lines.\nno: name", ":param w: the weights,\n   on two lines.\n   no: name"),
        ("Text.\nw: one\nx, y: two", "Text.\n\n:param w: one\n:param x: two\n:param y: two"),
        ("Code:\n\n    x *y*\n\n      z\n\nEnd.", "Code:\n\n::\n\n       x *y*\n   \n         z\n\nEnd."),
        ("Code:\n    x\nEnd.", "Code:\n\n::\n\n       x\n\nEnd."),
    ],
)
def test_our_docstrings_become_rest(text, rest):
    lines = to_rest(text.splitlines(), ["w", "x", "y", "z"])
    assert [line.rstrip() for line in lines[:-1]] == [line.rstrip() for line in rest.splitlines()]


def test_parameters_and_shapes_are_rendered(pages):
    text = _text(built_site() / "api" / "weights.html")
    assert "group_size -- how many consecutive weights along K share a scale; -1 for all of K" in text
    assert "Returns uint8 [..., K/32 * 18]" in text
    assert "data: NDArray[uint8]" in text
    assert "nbytes -- in the file, scales and all" in _text(built_site() / "api" / "checkpoints.html")


def _text(path: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", path.read_text()).replace("&gt;", ">").split())


# ---- links ------------------------------------------------------------------------------------------------------


def test_every_page_of_docs_is_in_the_site(pages):
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert {built_site() / source for source in sources} <= pages.keys()


def test_every_link_leads_to_a_page_and_a_place_in_it(pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "http", "mailto"), link
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            anchors = pages[target].anchors | {"", "top"} if target in pages else {""}
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                broken.append(f"{path.relative_to(built_site())}: {link}")
    assert broken == []


def test_links_to_the_code_lead_to_its_text(pages):
    assert "source/billfish/core/bits.py.html" in pages[built_site() / "bits.html"].links
    assert "dequant_fp4_pair" in (built_site() / "source" / "billfish" / "core" / "bits.py.html").read_text()


def test_pages_load_nothing_from_elsewhere(pages):
    for path, page in pages.items():
        for address in page.loads:
            assert not urlsplit(address).netloc, (path, address)
            assert (path.parent / unquote(urlsplit(address).path)).exists(), (path, address)
    for style in built_site().rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style


# ---- programs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "encode"), [("e8m0", encode_e8m0), ("e4m3", encode_e4m3)])
def test_the_staircase_of_a_byte_scale_is_its_encoding(encoding, encode):
    steps = programs()["bytes"][encoding]
    starts = np.array(steps["starts"])
    near = np.add.outer(starts, np.arange(-2, 3)).ravel()
    random = np.random.default_rng(0).integers(-0x7F800001, 0x7F800001, 10_000)
    places = np.unique(np.concatenate([near, random]).clip(-0x7F800001, 0x7F800000))
    at = np.searchsorted(starts, places, side="right") - 1
    assert (np.array(steps["bytes"])[at] == encode(floats_at(places))).all()
