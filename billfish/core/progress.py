"""Progress on standard error: how much is done, how fast, and how long the rest takes.

In a terminal it is a bar. In a pipe or a file it is a line: at once, after 5 seconds, and then every half minute.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from threading import Event, RLock, Thread
from types import TracebackType
from typing import TextIO

from billfish.core.errors import printable

OnProgress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done
Advance = Callable[..., None]  # so many bytes more, of what, and the work that they took

WIDTH = 24
SECONDS_BETWEEN = 0.1  # two drawings of a bar, at least
BAR_SECONDS = 1.0  # between two drawings of a bar that nothing moves
PIPE_SECONDS = (0.5, 5.0, 30.0)  # before the first line, the second, and each further one
RECENT_SECONDS = 10.0  # that the rate is of: tensors that are copied go by faster than those that are quantized
ESTIMATE_SECONDS, ESTIMATE_SHARE = 2.0, 0.01  # of the work: before both, a rate says little


class Progress:
    """``with Progress(total, "layers") as bar: bar.advance(1, "what is being done")``.

    With unit "B" amounts are bytes and shown in MB. The bar and the time left go by `work`, which is the total where
    equal amounts take equal times.
    """

    def __init__(
        self,
        total: float,
        unit: str,
        *,
        work: float | None = None,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.done, self.label = total, 0.0, ""
        self.work, self.worked = total if work is None else work, 0.0
        self.unit, self.divisor = ("MB", 1e6) if unit == "B" else (unit, 1.0)
        self.stream = stream or sys.stderr
        self.enabled, self.bar = enabled, self.stream.isatty()
        self.start = time.monotonic()
        self._recent = [(0.0, 0.0, 0.0)]  # seconds, what was done then, and the work of it
        self._drawn = -SECONDS_BETWEEN
        self._lock, self._ended = RLock(), Event()
        self._clock = Thread(target=self._tick, name="billfish progress", daemon=True)

    def advance(self, amount: float, label: str = "", work: float | None = None) -> None:
        """So much more is done, by so much work; `label` says what is being done now."""
        with self._lock:
            seconds = time.monotonic() - self.start
            self.done += amount
            self.worked += amount if work is None else work
            self.label = label or self.label
            if amount:
                self._recent.append((seconds, self.done, self.worked))
            if self.enabled and self.bar and seconds - self._drawn >= SECONDS_BETWEEN:
                self._show(seconds)

    def _tick(self) -> None:
        """Time goes on while nothing advances."""
        pauses = [BAR_SECONDS] if self.bar else list(PIPE_SECONDS)
        while not self._ended.wait(pauses[0]):
            with self._lock:
                self._show(time.monotonic() - self.start)
            pauses = pauses[1:] or pauses

    def _show(self, seconds: float) -> None:
        self._drawn = seconds
        with contextlib.suppress(OSError, ValueError):  # nobody listens
            self.stream.write(f"\r{self.line(seconds)}\x1b[K" if self.bar else f"{self.line(seconds)}\n")
            self.stream.flush()

    def line(self, seconds: float) -> str:
        """What is shown after so many seconds; a bar is cut to the terminal's width."""
        while len(self._recent) > 2 and self._recent[1][0] <= self._recent[-1][0] - RECENT_SECONDS:
            self._recent.pop(0)
        since, before, worked = self._recent[0]
        elapsed = seconds - since
        facts = [f"{self.done / self.divisor:.0f}/{self.total / self.divisor:.0f} {self.unit}"]
        if elapsed > 0 and self.done > before:
            rate = (self.done - before) / elapsed / self.divisor
            facts.append(f"{rate:{'.1f' if rate >= 1 else '.2g'}} {self.unit}/s")
        enough = seconds >= ESTIMATE_SECONDS and self.worked >= ESTIMATE_SHARE * self.work
        if enough and elapsed > 0 and self.worked > worked:
            facts.append(f"{clock((self.work - self.worked) * elapsed / (self.worked - worked))} left")
        else:
            facts.append(f"{clock(seconds)} so far")
        text = f"{', '.join(facts)}  {printable(self.label)}".rstrip()
        if not self.bar:
            return text
        filled = round(min(1.0, self.worked / self.work) * WIDTH) if self.work else WIDTH
        return f"{'#' * filled}{'.' * (WIDTH - filled)} {text}"[: shutil.get_terminal_size().columns - 1]

    def __enter__(self) -> Progress:
        if self.enabled:
            self._clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._ended.set()
        self._clock.join()
        if self.bar:
            self.stream.write("\r\x1b[K")  # the line is only of interest while work goes on
            self.stream.flush()


@contextlib.contextmanager
def follow(progress: bool | OnProgress, total: int, work: float | None = None) -> Iterator[Advance]:
    """What is to be told of each step of `total` bytes. True shows it, False nothing, a callable is called."""
    if callable(progress):
        done, tell = 0, progress

        def advance(amount: int, label: str = "", work: float | None = None) -> None:
            nonlocal done
            done += amount
            tell(done, total, label)

        yield advance
        return
    with Progress(total, "B", work=work, enabled=progress) as bar:
        yield bar.advance


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours: "1:05", "2:00:00"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
