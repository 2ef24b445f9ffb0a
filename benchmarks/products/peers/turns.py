"""Timing: contenders take turns, and none disturbs the next."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.products.peers.base import Floats, Prepared

MOST_ROUNDS, LEAST_ROUNDS = 50, 3
SHORTEST_SAMPLE = 0.004  # seconds: shorter passes are timed several at a time
SHORT_PASS = 0.02  # seconds: below this, waking up the threads would show, so a pass that does not count goes first
LONG_PASS = 2.0  # seconds: above this, once is enough


QUIET = 0.03  # seconds: kernels that count time in ticks of up to 10 ms would not show a shorter spin


def settle(longest: float = 0.5) -> None:
    """Wait until no thread of this process runs.

    Thread pools (onnxruntime's, OpenMP's, OpenBLAS's) spin for some milliseconds after a call and would take the cores
    of whoever comes next. Telling them not to would slow them down within their own turn, so they are waited for.
    """
    stop = time.perf_counter() + longest
    while time.perf_counter() < stop:
        used = time.process_time()
        time.sleep(QUIET)
        if time.process_time() - used < 0.002:
            return


@dataclass
class Turns:
    """One contender: its pass, the time of the first, and of those that count."""

    run: Callable[[], object]
    first: float
    samples: list[float] = field(default_factory=list)

    def take(self) -> None:
        settle()
        if self.first < SHORT_PASS:
            self.run()
        repeats = math.ceil(SHORTEST_SAMPLE / self.first)
        self.samples.append(timed(self.run, repeats))

    def wants_more(self, budget: float) -> bool:
        return self.first < LONG_PASS and (len(self.samples) < LEAST_ROUNDS or sum(self.samples) < budget)

    def median(self) -> float:
        return statistics.median(self.samples or [self.first])


def timed(run: Callable[[], object], repeats: int = 1) -> float:
    """Seconds for one pass."""
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def take_turns(prepared: dict[str, Prepared], x: Floats, budget: float) -> dict[str, float]:
    """Seconds for one product with x, of each contender."""
    contenders = {}
    for name, weights in prepared.items():
        run = weights.bind(x)
        settle()
        contenders[name] = Turns(run, timed(run))
    for _ in range(MOST_ROUNDS):
        turns = [turns for turns in contenders.values() if turns.wants_more(budget)]
        if not turns:
            break
        for turn in turns:
            turn.take()
    return {name: turns.median() / prepared[name].copies for name, turns in contenders.items()}
