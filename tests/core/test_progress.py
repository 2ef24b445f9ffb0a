"""The progress bar: what it says, and that it is silent where nobody watches."""

from __future__ import annotations

import io
import time

import pytest

from billfish.core import progress
from billfish.core.progress import Progress, clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (7261, "2:01:01")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_the_line_tells_amount_rate_and_time_left():
    bar = Progress(4, "layers", stream=Terminal())
    bar.done, bar.worked, bar.label = 1, 1, "up_proj"
    assert bar.line(2.0) == "######.................. 1/4 layers, 0.5 layers/s, 0:06 left  up_proj"
    bar = Progress(8e9, "B", stream=Terminal())
    bar.done = bar.worked = 2e9
    assert "2000/8000 MB, 1000.0 MB/s, 0:06 left" in bar.line(2.0)
    assert Progress(0, "layers", stream=Terminal()).line(0.0).startswith("#" * 24)


def test_the_time_left_is_that_of_the_work_and_not_of_a_fast_start():
    """An embedding is copied at once, then matrices are quantized: 100 MB in 0.1 s, and 1 MB a second."""
    bar = Progress(160e6, "B", stream=Terminal())
    bar.done = bar.worked = 100e6
    bar._recent.append((0.1, 100e6, 100e6))
    assert "left" not in bar.line(0.1)
    for second in range(1, 21):
        bar.done += 1e6
        bar.worked += 1e6
        bar._recent.append((float(second), bar.done, bar.worked))
    assert "120/160 MB, 1.0 MB/s, 0:40 left" in bar.line(20.0)
    assert "120/160 MB, 0.5 MB/s, 1:20 left" in bar.line(30.0)  # a long matrix: time goes on


def test_the_bar_and_the_time_left_go_by_work():
    """100 MB are copied at once; 6 MB that are quantized take a minute."""
    bar = Progress(106e6, "B", work=6100e6, stream=Terminal())
    bar.done = bar.worked = 2e6
    assert "left" not in bar.line(20.0)  # of a header that was copied
    bar.done = bar.worked = 0
    for second, (amount, work) in enumerate([(100e6, 100e6), (1e6, 1000e6), (1e6, 1000e6)]):
        bar.done += amount
        bar.worked += work
        bar._recent.append((10.0 * second, bar.done, bar.worked))
    line = bar.line(20.0)
    assert line.startswith("########................ 102/106 MB, ")  # a third
    assert "0:40 left" in line


def test_before_anything_is_done_there_is_the_time_that_it_took():
    assert "0/58 passes, 1:05 so far" in Progress(58, "passes", stream=Terminal()).line(65.0)


def test_a_pipe_gets_a_line_soon_and_then_one_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "PIPE_SECONDS", (0.02, 0.05))
    pipe = io.StringIO()
    with Progress(4, "layers", stream=pipe) as bar:
        bar.advance(1, "up_proj")
        deadline = time.monotonic() + 20
        while pipe.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)  # nothing advances, and yet it is told
    lines = pipe.getvalue().splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("1/4 layers, ") and line.endswith("up_proj") for line in lines)
    assert "\r" not in pipe.getvalue()


def test_it_ends_with_the_work(monkeypatch):
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.01)
    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(2, "layers", stream=terminal) as bar:
        raise KeyboardInterrupt
    assert not bar._clock.is_alive()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_it_is_silent_for_short_work_in_pipes_and_clears_up_in_terminals():
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
