"""Timing: contenders take turns, medians count, and none disturbs the next."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.base import Floats, Prepared

MOST_ROUNDS, LEAST_ROUNDS = 50, 3
SHORTEST_SAMPLE = 0.004  # seconds: shorter passes are timed several at a time
SHORT_PASS = 0.02  # seconds: below this, waking up the threads would show, so a pass that does not count goes first
LONG_PASS = 2.0  # seconds: above this, once is enough
QUIET = 0.03  # seconds: kernels that count time in ticks of up to 10 ms would not show a shorter spin
GRAPH_ROUNDS = 7


def timed(run: Callable[[], object], calls: int = 1) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


def best(run: Callable[[], object], attempts: int, calls: int = 1) -> float:
    """Seconds of one call in the fastest of several attempts, after one that does not count."""
    run()
    return min(timed(run, calls) for _ in range(attempts))


def medians(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    wait: Callable[[], object] = lambda: None,
    waits: bool = True,
) -> dict[str, float]:
    """Seconds of one call of each contender: they take turns of `calls`, and the first round does not count.

    `wait` returns when the device is idle. Unless `waits` is False, that belongs to the turn.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            wait()
            started = time.perf_counter()
            for _ in range(calls):
                run()
            if waits:
                wait()
            samples[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(found[1:]) for name, found in samples.items()}


# ---- products with cold weights ---------------------------------------------------------------------------------


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
        self.samples.append(timed(self.run, math.ceil(SHORTEST_SAMPLE / self.first)))

    def wants_more(self, budget: float) -> bool:
        return self.first < LONG_PASS and (len(self.samples) < LEAST_ROUNDS or sum(self.samples) < budget)

    def median(self) -> float:
        return statistics.median(self.samples or [self.first])


def take_turns(prepared: dict[str, Prepared], x: Floats, budget: float) -> dict[str, float]:
    """Seconds of one product with x, of each contender; `budget`: seconds for all samples of a contender."""
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


# ---- CUDA graphs ------------------------------------------------------------------------------------------------


def captured(calls: int, run: Callable[[int], object]) -> Any:
    """A CUDA graph of run(0), run(1), ... after three calls that compile and make room. It knows addresses only: what
    they are of has to stay."""
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for i in range(3):
            run(i)
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    return graph


def graph_medians(graphs: dict[str, Any], calls: int) -> dict[str, float]:
    """Seconds of one of a graph's calls, by the GPU's own clock; the graphs take turns."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(GRAPH_ROUNDS + 1):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / 1e3 / calls)
    return {name: statistics.median(found[1:]) for name, found in samples.items()}
