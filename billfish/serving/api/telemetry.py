"""The progress of a prefill and the speed of an answer, in the fields of llama-server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from billfish.serving.engine.requests import Progress


class Telemetry:
    """Of the answers to one request. tokens_of: how many tokens an answer has; set when the request is submitted."""

    def __init__(self, *, progress: bool, timings: bool) -> None:
        """progress: whether the client wants `prompt_progress`. timings: whether it wants `timings`."""
        self.timings, self._progress = timings, progress
        self.reads = progress or timings  # whether it needs the progress of the prefill
        self.tokens_of: Callable[[int], int] = lambda index: 0
        self._new: dict[int, list[Progress]] = {}  # not told yet
        self._read: dict[int, Progress] = {}
        self._first: dict[int, float] = {}  # when the first token came, and the last one
        self._last: dict[int, float] = {}

    @classmethod
    def wanted(cls, *, progress: bool, timings: bool) -> Telemetry | None:
        """None if nothing is wanted."""
        return cls(progress=progress, timings=timings) if progress or timings else None

    def read(self, index: int, progress: Progress) -> None:
        """The prefill went on."""
        self._read[index] = progress
        if self._progress:
            self._new.setdefault(index, []).append(progress)

    def token(self, index: int) -> None:
        """A token of an answer has come."""
        self._last[index] = time.perf_counter()
        self._first.setdefault(index, self._last[index])

    def times(self, index: int) -> tuple[float, float]:
        """When the first token of an answer came, and the last one; now, if none has."""
        now = time.perf_counter()
        return self._first.get(index, now), self._last.get(index, now)

    def prompt_progress(self, index: int) -> list[dict[str, Any]]:
        """What was not told yet."""
        return [
            {
                "total": each.total,
                "cache": each.cached,
                "processed": each.processed,
                "time_ms": round(1000 * each.seconds),
            }
            for each in self._new.pop(index, [])
        ]

    def fields(self, index: int) -> dict[str, Any]:
        """`timings` up to now, if they are wanted and there is a token."""
        if not self.timings or index not in self._read or index not in self._first:
            return {}
        read = self._read[index]
        prompt = _speed("prompt", read.total - read.cached, read.seconds)
        predicted = _speed("predicted", self.tokens_of(index), self._last[index] - self._first[index])
        return {"timings": {"cache_n": read.cached, **prompt, **predicted}}


def _speed(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    milliseconds = max(1000 * seconds, 0.001)  # the first token comes when the time begins
    return {
        f"{name}_n": tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(1, tokens),
        f"{name}_per_second": 1000 * tokens / milliseconds,
    }
