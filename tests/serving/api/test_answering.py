"""Server-sent events and JSON lines."""

from __future__ import annotations

import json

import pytest

from billfish.serving.api.answering import encode, event


@pytest.mark.parametrize(
    "text", ["\x85", "\u2028", "\u2029", "\v\f\x1c\x1d\x1e", "\u00e9\u2027\u202a\U0001f600", "\\u2028"]
)
def test_an_event_is_one_line_for_clients_that_split_as_python_does(text):
    value = {"text": f"a{text}b{text}"}
    assert len(encode(value).decode().splitlines()) == 1
    assert json.loads(event(value).decode().splitlines()[0].removeprefix("data: ")) == value
