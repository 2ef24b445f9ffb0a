"""`billfish serve`: what its options reach before it listens to anybody."""

from __future__ import annotations

import pytest
from llm_models import Small, write_model

from billfish.cli import serve
from billfish.cli.main import main
from billfish.llm.cpu import CpuDecoder
from billfish.serving.engine.engine import Engine

pytest.importorskip("starlette", reason="needs billfish[serve]")


@pytest.fixture
def path(tmp_path):
    write_model(tmp_path / "small.gguf", Small())
    return str(tmp_path / "small.gguf")


def test_the_cache_type_is_that_of_the_caches(path, monkeypatch, capsys):
    """It was dropped: caches had twice the bytes that were asked for."""
    monkeypatch.setattr("billfish.serving.http.server.Server.run", lambda self, sockets: self._announce())
    bounds = []
    monkeypatch.setattr(serve, "_who", lambda *_: "")
    close = Engine.close

    def remember(self, *, finish=True):
        bounds.append(self.counts().cache_bytes_bound)
        close(self, finish=finish)

    monkeypatch.setattr(Engine, "close", remember)
    for words in ([], ["--cache-type", "float16"]):
        assert main(["serve", path, "--device", "cpu", "--port", "0", *words]) == 0
    assert bounds[0] == 2 * bounds[1]


@pytest.mark.parametrize("words", [["--activations", "q4"], ["--cache-type", "int4"]])
def test_what_the_device_does_not_know_is_refused_before_weights_are_packed(path, words, monkeypatch, capsys):
    monkeypatch.setattr(CpuDecoder, "pack", lambda *_: pytest.fail("packed"))
    assert main(["serve", path, "--device", "cpu", "--port", "0", *words]) == 2
    error = capsys.readouterr().err
    assert words[0].removeprefix("--").replace("-", "_") in error
    assert repr(words[1]) in error
