"""The check of private words finds them, and leaves the field's own words alone."""

from __future__ import annotations

import pytest
from words import WORDS, Line, messages, pages, private


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the keys and values of a text", ["keys and values"]),
        ("8 streams together", ["8 streams"]),
        ("Plain weights, and what they are multiplied with.", ["Plain weights", "multiplied with"]),
        ("a dot product, of course", []),
        ("the option --streams and the file benchmarks.products", []),
        ("heads that share keys and values read them once", []),
        ("this product is a product of a scale and a code", ["product"]),
    ],
)
def test_words_are_found_in_their_private_sense(text, found):
    assert sorted(each.split(": ")[1].split(";")[0] for each in private(Line("page", text))) == sorted(map(repr, found))


def test_texts_are_read_and_code_is_not():
    assert any("not on PyPI yet" in line.text for line in pages())
    assert not any("pip install '.[serve]'" in line.text for line in pages())
    assert any("compiles the CPU kernels" in line.text for line in pages())  # the comment of a command
    assert len(list(messages())) > 500
    assert len(WORDS) > 15
