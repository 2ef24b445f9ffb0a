"""docs/serving.md names the fields, statuses, metrics and files that the server has."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from pages import ROOT, page

pytest.importorskip("starlette", reason="needs billfish[serve]")

from billfish.llm.detokenizer import LONGEST_STOP, MOST_STOPS
from billfish.serving.api.chat import ChatBody
from billfish.serving.api.completions import CompletionBody
from billfish.serving.api.embeddings import MOST_TEXTS, EmbeddingBody
from billfish.serving.engine.requests import EngineCounts
from billfish.serving.http import app, metrics

TEXT = page("docs/serving.md")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_fields():
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in section("Fields").splitlines() if row[:3] == "| `"
    ]
    named = {place: [row[0].strip("`") for row in rows if row[place] == "yes"] for place in (1, 2)}
    assert sorted(named[1]) == sorted(ChatBody.__struct_fields__)
    assert sorted(named[2]) == sorted(CompletionBody.__struct_fields__)
    (sentence,) = re.findall(r"Embeddings take (.*?)\.\n", section("Fields"), re.DOTALL)
    assert set(EmbeddingBody.__struct_fields__) <= set(re.findall(r"`(\w+)`", sentence))
    assert f"at most {MOST_TEXTS} texts" in sentence


def test_the_limits():
    assert f"{app.BODY_BYTES // 2**20} MiB" in section("What is refused")
    assert f"within {app.BODY_SECONDS:g} s" in section("What is refused")
    assert f"up to {MOST_STOPS} of at most {LONGEST_STOP:,} characters" in section("Fields")


def test_the_metrics():
    named = re.findall(r"^\| `billfish_(\w+)` \|", TEXT, re.MULTILINE)
    none = EngineCounts(**dict.fromkeys(metrics.ENGINE, 0) | {"finished": {}})
    service = SimpleNamespace(engine=SimpleNamespace(counts=lambda: none), first_tokens=0, first_token_seconds=0.0)
    assert named == re.findall(r"# TYPE billfish_(\w+)", metrics.Metrics(service).text().decode())
    assert metrics.ENGINE.keys() == EngineCounts.__dataclass_fields__.keys()


def test_the_paths_and_files():
    paths = {route.path for route in app.make_app(SimpleNamespace(), None).routes}
    assert set(re.findall(r"^\| `(/[\w/]*)` \|", TEXT, re.MULTILINE)) == {path for path in paths if "{" not in path}
    built = set(re.findall(r"`(\w+/\w+\.\w+)`", section("How it is built").split("The engine knows")[0]))
    folder = ROOT / "billfish" / "serving"
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in (".py", ".html")}
    assert built == {path for path in there if not path.endswith("__init__.py")}
