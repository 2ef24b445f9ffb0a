"""A progress bar on standard error: how much is done, how fast it goes, and how long it will take."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

from billfish.core.errors import printable

OnProgress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done
Advance = Callable[[int, str], None]  # so many bytes more, and of what

WIDTH = 24
SECONDS_BETWEEN = 0.1


class Progress:
    """``with Progress(total, "layers") as bar: bar.advance(1, "what is being done")``. Drawn on terminals only.

    With unit "B" amounts are bytes and shown in MB.
    """

    def __init__(self, total: float, unit: str, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.total, self.done, self.label = total, 0.0, ""
        self.unit, self.divisor = ("MB", 1e6) if unit == "B" else (unit, 1.0)
        self.stream = stream or sys.stderr
        self.enabled = enabled and self.stream.isatty()
        self.start = time.monotonic()
        self._drawn = -SECONDS_BETWEEN

    def advance(self, amount: float, label: str = "") -> None:
        """So much more is done; `label` says what is being done now."""
        self.done += amount
        self.label = label or self.label
        elapsed = time.monotonic() - self.start
        if self.enabled and elapsed - self._drawn >= SECONDS_BETWEEN:
            self._drawn = elapsed
            self.stream.write("\r" + self.line(elapsed) + "\x1b[K")
            self.stream.flush()

    def line(self, elapsed: float) -> str:
        """The bar after so many seconds, cut to the terminal's width."""
        fraction = min(1.0, self.done / self.total) if self.total else 1.0
        rate = self.done / elapsed if elapsed > 0 else 0.0
        left = f"{clock((self.total - self.done) / rate)} left" if rate > 0 else ""
        filled = round(fraction * WIDTH)
        numbers = f"{self.done / self.divisor:.0f}/{self.total / self.divisor:.0f} {self.unit}"
        done = f"{'#' * filled}{'.' * (WIDTH - filled)} {numbers}"
        text = f"{done}, {rate / self.divisor:.1f}/s, {left}  {printable(self.label)}"
        return text[: shutil.get_terminal_size().columns - 1]

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self.stream.write("\r\x1b[K")  # the line is only of interest while work goes on
            self.stream.flush()


@contextlib.contextmanager
def follow(progress: bool | OnProgress, total: int) -> Iterator[Advance]:
    """What is to be told of each step of `total` bytes. True draws the bar, False nothing, a callable is called."""
    if callable(progress):
        done, tell = 0, progress

        def advance(amount: int, label: str = "") -> None:
            nonlocal done
            done += amount
            tell(done, total, label)

        yield advance
        return
    with Progress(total, "B", enabled=progress) as bar:
        yield bar.advance


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours: "1:05", "2:00:00"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
