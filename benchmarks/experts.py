"""Products with experts beside ggml's mul_mat_id, in one run on this machine's CPU, taking turns.

E = 32 experts of 768 x 2048 (gate, up) and 2048 x 768 (down), 4 for each token, x rounded to 8 bits by both. One token
chooses other experts each time, so that none is in a cache. `gate` and `down` are one product each, the native part of
bf.expert_linear and one mul_mat_id. `block` is that of bf.experts with its activation and its sum, and of ggml the
three products alone.
ggml's libraries: of llama-cpp-python, or of the folder that BILLFISH_GGML_LIB names. Errors are root mean squares
beside those of y, against float64 with x as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.peers.base import DISTINCT_ROWS, Floats, Prepared, copies_for
from benchmarks.peers.ggml import F32, I32, TYPES, Ggml, Library, OnGgml
from benchmarks.products.engines import CpuEngine
from benchmarks.timing import take_turns
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import set_threads
from billfish.core.activations import DIGITS
from billfish.core.mixture import GATES, open_gate

EXPERTS, CHOSEN, HIDDEN, INNER = 32, 4, 2048, 768
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
PARTS = {"gate": ("gate",), "down": ("down",), "block": ("gate", "up", "down")}


@dataclass(frozen=True)
class Case:
    """What is multiplied: the stacks of a part, in a format, with so many tokens."""

    part: str
    format: str
    tokens: int

    @cached_property
    def stacks(self) -> dict[str, Any]:
        """QuantizedExperts by name. Their rows are some random ones, repeated, in another order for each expert."""
        rng, made = np.random.default_rng(0), {}
        for name in PARTS[self.part]:
            n, k = SHAPES[name]
            rows = bf.quantize(rng.standard_normal((DISTINCT_ROWS, k), np.float32) / np.float32(k**0.5), self.format)
            order = [rng.integers(0, DISTINCT_ROWS, n) for _ in range(EXPERTS)]
            made[name] = bf.QuantizedExperts.from_tensors([rows.take_rows(rows_of) for rows_of in order])
        return made

    @cached_property
    def draws(self) -> list[NDArray[np.int32]]:
        """ids [tokens, CHOSEN] that choose every expert: of one token eight of them, of many one."""
        rng = np.random.default_rng(1)
        if self.tokens * CHOSEN <= EXPERTS:
            return list(rng.permutation(EXPERTS).astype(np.int32).reshape(-1, self.tokens, CHOSEN))
        return [np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(self.tokens)]).astype(np.int32)]

    @cached_property
    def routing(self) -> Floats:
        weights = np.random.default_rng(2).random((self.tokens, CHOSEN), np.float32)
        return weights / weights.sum(axis=1, keepdims=True)

    @cached_property
    def x(self) -> Floats:
        """[tokens, k], or [tokens, CHOSEN, k] for `down`, whose rows are made for each expert."""
        shape = (self.tokens, CHOSEN, INNER) if self.part == "down" else (self.tokens, HIDDEN)
        return np.random.default_rng(3).standard_normal(shape, np.float32)

    def expected(self) -> dict[str, NDArray[np.float64]]:
        """y of each stack for the first draw, and of the block, in float64."""
        ids, x = self.draws[0], self.x.astype(np.float64)

        def multiply(name: str, x: Any) -> NDArray[np.float64]:
            rows = x if x.ndim == 3 else np.repeat(x[:, None], CHOSEN, axis=1)
            y = np.empty((*ids.shape, SHAPES[name][0]))
            for e in np.unique(ids):
                at = ids == e
                y[at] = rows[at] @ bf.dequantize(self.stacks[name][int(e)]).T.astype(np.float64)
            return y

        if self.part != "block":
            return {self.part: multiply(self.part, x)}
        gate, up = multiply("gate", x), multiply("up", x)
        down = multiply("down", open_gate(gate, up, "silu"))
        return {"gate": gate, "up": up, "block": np.einsum("tk,tkn->tn", self.routing.astype(np.float64), down)}


class Ours(Prepared):
    """Every draw with every copy of the stacks: a native call for each, as a decoder makes it, with y that exists."""

    def __init__(self, case: Case, cold_bytes: int) -> None:
        self.case = case
        one = [bf.prepack(stack) for stack in case.stacks.values()]
        count = copies_for(sum(stack.nbytes for stack in one), cold_bytes)
        self._weights = [one] + [[replace(stack, data=stack.data.copy()) for stack in one] for _ in range(count - 1)]
        self.copies = count * len(case.draws)
        self._y: Any = None

    def bind(self, x: Floats) -> Callable[[], object]:
        case, digits = self.case, DIGITS["q8"]
        calls: list[tuple[Any, ...]] = []
        for ids in reversed(case.draws):  # the first one last, for `result`
            for stacks in self._weights:
                level, arrays = stacks[0].level, [stack.arrays() for stack in stacks]
                if case.part == "block":
                    self._y = np.empty_like(x)
                    silu = GATES.index("silu")
                    calls.append((_cpu.run_experts, level, x, ids, case.routing, *arrays, silu, digits, self._y))
                else:
                    self._y = np.empty((*ids.shape, stacks[0].shape[1]), np.float32)
                    calls.append((_cpu.multiply_experts, level, arrays[0], x, ids, digits, self._y))

        def run() -> None:
            for function, *arguments in calls:
                function(*arguments)

        return run

    def result(self) -> Floats:
        y: Floats = self._y
        return y


class Theirs(OnGgml):
    """The same in one graph of ggml. What a block has between its products is left out: `down` gets rows of its own."""

    def __init__(self, ggml: Library, case: Case, cold_bytes: int, buffer: Any) -> None:
        self.case, self._names = case, PARTS[case.part]
        blocks = [np.ascontiguousarray(case.stacks[name].storage["blocks"]) for name in self._names]
        count = copies_for(sum(array.nbytes for array in blocks), cold_bytes)
        self.copies = count * len(case.draws)
        shapes = [(*reversed(SHAPES[name]), EXPERTS) for name in self._names]
        super().__init__(ggml, TYPES[case.format], list(zip(shapes, blocks, strict=True)) * count, buffer)

    def bind(self, x: Floats) -> Callable[[], object]:
        ggml, case = self._ggml, self.case
        nodes = len(self._weights) * (len(case.draws) + 1) + len(case.draws) + 2  # leaves count too
        context = ggml.context(nodes, graph_nodes=nodes)
        rows = {1: np.ascontiguousarray(x.reshape(case.tokens, 1, -1)) if x.ndim == 2 else x}
        if case.part == "block":
            rows[CHOSEN] = np.random.default_rng(4).standard_normal((case.tokens, CHOSEN, INNER), np.float32)
        inputs = {key: ggml.new(context, F32, *reversed(array.shape)) for key, array in rows.items()}
        ids = [ggml.new(context, I32, CHOSEN, case.tokens) for _ in case.draws]
        graph, products = ggml.new_graph(context, nodes, False), []
        for chosen in ids:
            for tensor, name in zip(self._weights, itertools.cycle(self._names), strict=False):
                own = inputs[CHOSEN if case.part == "block" and name == "down" else 1]
                products.append(ggml.multiply_chosen(context, tensor, own, chosen))
                ggml.add_to_graph(graph, products[-1])
        self._y = products[0]
        given = [(inputs[key], array) for key, array in rows.items()]
        return self._compute(context, graph, given + list(zip(ids, case.draws, strict=True)))

    def result(self) -> Floats:
        """Of the first stack: the whole block of ggml's would need what was left out."""
        return self._read(self.case.tokens, CHOSEN, SHAPES[self._names[0]][0])


def relative_error(y: Floats, expected: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((y - expected) ** 2) / np.mean(expected**2)))


def measure(ggml: Library, case: Case, cold_bytes: int, budget: float) -> dict[str, Any]:
    contenders: dict[str, Prepared] = {
        "billfish": Ours(case, cold_bytes),
        "ggml": Theirs(ggml, case, cold_bytes, ggml.plain),
    }
    if all(ggml.repacks(TYPES[case.format], *SHAPES[name], EXPERTS, CHOSEN) for name in PARTS[case.part]):
        contenders["ggml-repack"] = Theirs(ggml, case, cold_bytes, ggml.repack)
    try:
        seconds = take_turns(contenders, case.x, budget)
        expected = case.expected()
        first, last = next(iter(expected.values())), expected[case.part]
        errors = {
            name: relative_error(c.result(), last if name == "billfish" else first) for name, c in contenders.items()
        }
    finally:
        for contender in contenders.values():
            contender.close()
    best = min(value for name, value in seconds.items() if name != "billfish")
    about = {"part": case.part, "format": case.format, "tokens": case.tokens}
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    return about | {"milliseconds": milliseconds, "error": errors, "times_as_fast": best / seconds["billfish"]}


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2)
    parser.listed("--tokens", "tokens", "1,64", command.positives)
    parser.listed("--formats", "formats", "mxfp4_gguf,q4_k")
    parser.listed("--parts", "parts", ",".join(PARTS))
    parser.option("--seconds", "seconds for each contender of a row", 4.0, float, "S")
    flags = parser.parse_args()
    set_threads(flags.threads)
    peer = Ggml(repack=False)
    peer.load()
    peer.library.set_threads(peer.library.backend, flags.threads)
    cold_bytes = CpuEngine().cold_bytes()
    found = []
    print(f"{'':24}{'tokens':>7}{'ms, best':>10}{'ms of ggml, repacked':>24}{'times':>7}   errors")
    for format, tokens, part in itertools.product(flags.formats, flags.tokens, flags.parts):
        row = measure(peer.library, Case(part, format, tokens), cold_bytes, flags.seconds)
        found.append(row)
        ms = row["milliseconds"]
        theirs = f"{ms['ggml']:.3f}, " + (f"{ms['ggml-repack']:.3f}" if "ggml-repack" in ms else "none")
        errors = ", ".join(f"{name} {value:.2e}" for name, value in row["error"].items())
        times = f"{ms['billfish']:>10.3f}{theirs:>24}{row['times_as_fast']:>7.2f}"
        print(f"{format + ' ' + part:24}{tokens:>7}{times}   {errors}", flush=True)
    about = {"machine": machine.machine(), "ggml": peer.version(), "threads": flags.threads}
    records.write(flags.json, about | {"rows": found})


if __name__ == "__main__":
    main()
