"""The progress bar: what it says, and that it is silent where nobody watches."""

from __future__ import annotations

import io

import pytest

from billfish.core.progress import Progress, clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (7261, "2:01:01")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_the_line_tells_amount_rate_and_time_left():
    bar = Progress(4, "layers", stream=Terminal())
    bar.done, bar.label = 1, "up_proj"
    assert bar.line(2.0) == "######.................. 1/4 layers, 0.5/s, 0:06 left  up_proj"
    bar = Progress(8e9, "B", stream=Terminal())
    bar.done = 2e9
    assert "2000/8000 MB, 1000.0/s, 0:06 left" in bar.line(2.0)
    assert Progress(0, "layers", stream=Terminal()).line(0.0).startswith("#" * 24)


def test_it_draws_on_terminals_only_and_clears_up(monkeypatch):
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with Progress(2, "layers", stream=stream) as bar:
            bar.advance(1, "first")
    assert "1/2 layers" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert pipe.getvalue() == ""
    with Progress(2, "layers", stream=terminal, enabled=False) as bar:
        terminal.seek(0)
        terminal.truncate()
        bar.advance(1)
    assert terminal.getvalue() == ""


def test_it_never_breaks_the_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    bar = Progress(4, "layers", stream=Terminal())
    bar.label = "a.very.long.path" * 10
    assert len(bar.line(1.0)) == 39
