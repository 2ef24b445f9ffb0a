"""docs/words.md: the names that it gives are in the code, and a name stands for one thing."""

from __future__ import annotations

import re
from functools import cache

import pytest
from pages import ROOT, page

SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".metal"}


@cache
def sources() -> dict[str, str]:
    """The text of every source file of the package, by path."""
    files = (path for path in (ROOT / "billfish").rglob("*") if path.suffix in SUFFIXES)
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def names_in_code() -> list[str]:
    rows = re.findall(r"^\| [^|]+ \| .* \| (`[^|]*`) \|$", page("docs/words.md"), re.MULTILINE)
    return sorted({name for row in rows for name in re.findall(r"`(\w+)`", row)})


def test_the_names_of_the_dictionary_are_in_the_code():
    words = {word for text in sources().values() for word in re.findall(r"\w+", text)}
    assert len(names_in_code()) > 50
    assert [name for name in names_in_code() if name not in words] == []


@pytest.mark.parametrize("name", ["Launch", "Problem", "Product", "Tile", "planes_of"])
def test_a_name_stands_for_one_thing(name):
    defined = re.compile(rf"^\s*(?:(?:class|struct|def) {name}\b(?!;)|{name} = )", re.MULTILINE)
    assert sum(len(defined.findall(text)) for text in sources().values()) == 1


def test_a_tile_is_a_part_of_y():
    """And no courses, fragments, slabs or matrices, which had this name, too."""
    for path, text in sources().items():
        if "/cuda/" in path:
            assert not re.search(r"\bTILES?\b|group_tiles", text), path
        if path.endswith(".metal"):
            assert not re.search(r"\b[xw]_tiles?\b|ROW_TILES|COLUMN_TILES", text), path


def test_digits_and_code_fields_are_no_planes():
    for path, text in sources().items():
        if path.endswith((".h", ".cpp", ".pyi")) and "/cpu/" in path:
            assert not re.search("plane", text, re.IGNORECASE), path
