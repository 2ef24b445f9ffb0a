"""docs/serving.md names the fields, statuses, metrics and files that the server has."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from pages import ROOT, page

pytest.importorskip("starlette", reason="needs billfish[serve]")

from billfish.serving import app, chat, completions, embeddings, metrics
from billfish.serving.fields import Fields
from billfish.serving.options import Limits
from billfish.serving.refusals import Refusal
from billfish.serving.requests import EngineCounts

TEXT = page("docs/serving.md")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def taken(read: Any, **body: Any) -> list[str]:
    """The fields that an endpoint takes: those that it names where one is refused."""
    service = SimpleNamespace(
        check_name=lambda call, name: None,
        prompts=lambda fields, name, special=True: fields.take(name),
        limits=Limits(1, 1, 1),
        model=SimpleNamespace(config=SimpleNamespace(hidden=1)),
    )
    fields = Fields("test", "", {**body, "no such field": 1})
    with pytest.raises(Refusal, match="no such field"):
        read(service, fields)
    return fields.known


def test_the_fields():
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in section("Fields").splitlines() if row[:3] == "| `"
    ]
    named = {place: [row[0].strip("`") for row in rows if row[place] == "yes"] for place in (1, 2)}
    assert sorted(named[1]) == sorted(taken(chat.read_chat, messages=[{"role": "user", "content": ""}]))
    assert sorted(named[2]) == sorted(taken(completions.read_completions))
    (sentence,) = re.findall(r"Embeddings take (.*?)\.\n", section("Fields"), re.DOTALL)
    assert set(taken(embeddings.read_embeddings)) <= set(re.findall(r"`(\w+)`", sentence))


def test_the_limits():
    assert f"{app.BODY_BYTES // 2**20} MiB" in section("What is refused")
    assert f"within {app.BODY_SECONDS:g} s" in section("What is refused")


def test_the_metrics():
    named = re.findall(r"^\| `billfish_(\w+)` \|", TEXT, re.MULTILINE)
    none = EngineCounts(**dict.fromkeys(metrics.ENGINE, 0) | {"finished": {}})
    assert named == re.findall(r"# TYPE billfish_(\w+)", metrics.Watch().text(none))
    assert metrics.ENGINE.keys() == EngineCounts.__dataclass_fields__.keys()


def test_the_paths_and_files():
    paths = {route.path for route in app.make_app(SimpleNamespace(), None).routes}
    assert set(re.findall(r"^\| `(/[\w/]*)` \|", TEXT, re.MULTILINE)) == {path for path in paths if "{" not in path}
    built = set(re.findall(r"`(\w+\.\w+)`", section("How it is built").split("The engine knows")[0]))
    there = {path.name for path in (ROOT / "billfish" / "serving").iterdir() if path.suffix in (".py", ".html")}
    assert built == there - {"__init__.py"}
