"""Products with experts beside ggml's mul_mat_id, in one run on this machine's CPU, taking turns.

    python -m benchmarks.experts [--tokens 1,64] [--formats mxfp4_gguf,q4_k] [--threads 2] [--seconds 4] [--json FILE]

E = 32 experts of 768 x 2048 (gate, up) and 2048 x 768 (down), 4 for each token, x rounded to 8 bits by both. One token
chooses other experts each time, so that none is in a cache. `gate` and `down` are one product each, the native part of
bf.expert_linear and one mul_mat_id. `block` is that of bf.experts with its activation and its sum, and of ggml the
three products alone.
ggml's libraries: of llama-cpp-python, or of the folder that BILLFISH_GGML_LIB names. Errors are root mean squares
beside those of y, against float64 with x as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import billfish as bf
from benchmarks.products.engines import CpuEngine
from benchmarks.products.limits import machine
from benchmarks.products.peers.base import DISTINCT_ROWS, Floats, Prepared, copies_for
from benchmarks.products.peers.ggml import F32, I32, TYPES, Ggml, Library
from benchmarks.products.peers.turns import take_turns
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import set_threads
from billfish.core.activations import DIGITS
from billfish.core.files import write_atomically
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


class Theirs(Prepared):
    """The same in one graph of ggml. What a block has between its products is left out: `down` gets rows of its own."""

    def __init__(self, ggml: Library, case: Case, cold_bytes: int, buffer: int) -> None:
        self._ggml, self.case = ggml, case
        blocks = {name: stack.storage["blocks"] for name, stack in case.stacks.items()}
        count = copies_for(sum(array.nbytes for array in blocks.values()), cold_bytes)
        self.copies = count * len(case.draws)
        self._context = ggml.context(count * len(blocks))
        self._weights = [{name: self._new_stack(name) for name in blocks} for _ in range(count)]
        self._buffer = ggml.allocate(self._context, buffer)
        for copy in self._weights:
            for name, tensor in copy.items():
                ggml.write(tensor, np.ascontiguousarray(blocks[name]).ctypes.data, 0, blocks[name].nbytes)
        self._bound: tuple[Any, Any] | None = None
        self._y: Any = None

    def _new_stack(self, name: str) -> Any:
        n, k = SHAPES[name]
        return self._ggml.new_stack(self._context, TYPES[self.case.format], k, n, EXPERTS)

    def bind(self, x: Floats) -> Callable[[], object]:
        ggml, case = self._ggml, self.case
        nodes = self.copies * len(PARTS[case.part])
        leaves = len(self._weights) * len(PARTS[case.part]) + len(case.draws) + 2
        context = ggml.context(nodes + leaves, graph_nodes=nodes + leaves)
        rows = {1: np.ascontiguousarray(x.reshape(case.tokens, 1, -1)) if x.ndim == 2 else x}
        if case.part == "block":
            rows[CHOSEN] = np.random.default_rng(4).standard_normal((case.tokens, CHOSEN, INNER), np.float32)
        inputs = {key: ggml.new_stack(context, F32, a.shape[2], a.shape[1], a.shape[0]) for key, a in rows.items()}
        ids = [ggml.new_matrix(context, I32, CHOSEN, case.tokens) for _ in case.draws]
        graph = ggml.new_graph(context, nodes + leaves, False)
        for i, chosen in enumerate(ids):
            for copy in self._weights:
                for name, tensor in copy.items():
                    own = inputs[CHOSEN if case.part == "block" and name == "down" else 1]
                    product = ggml.multiply_chosen(context, tensor, own, chosen)
                    ggml.add_to_graph(graph, product)
                    if i == 0 and copy is self._weights[0] and self._y is None:
                        self._y = product
        self._bound = (context, ggml.allocate(context, ggml.plain))
        for key, array in rows.items():
            ggml.write(inputs[key], array.ctypes.data, 0, array.nbytes)
        for tensor, draw in zip(ids, case.draws, strict=True):
            ggml.write(tensor, draw.ctypes.data, 0, draw.nbytes)
        return lambda: ggml.compute(ggml.backend, graph)

    def result(self) -> Floats:
        """Of the first stack: the whole block of ggml's would need what was left out."""
        name = PARTS[self.case.part][0]
        y = np.empty((self.case.tokens, CHOSEN, SHAPES[name][0]), np.float32)
        self._ggml.read(self._y, y.ctypes.data, 0, y.nbytes)
        return y

    def close(self) -> None:
        if self._bound is not None:
            self._ggml.free_buffer(self._bound[1])
            self._ggml.free(self._bound[0])
        self._ggml.free_buffer(self._buffer)
        self._ggml.free(self._context)


def can_repack(ggml: Library, case: Case) -> bool:
    """Whether ggml has kernels for mul_mat_id with all stacks in its CPU_REPACK buffer."""
    if ggml.repack is None:
        return False
    able = True
    for name in PARTS[case.part]:
        n, k = SHAPES[name]
        contexts = [ggml.context(1), ggml.context(3)]
        stack = ggml.new_stack(contexts[0], TYPES[case.format], k, n, EXPERTS)
        buffer = ggml.allocate(contexts[0], ggml.repack)
        x, ids = ggml.new_stack(contexts[1], F32, k, 1, 1), ggml.new_matrix(contexts[1], I32, CHOSEN, 1)
        able &= bool(ggml.supports(ggml.device, ggml.multiply_chosen(contexts[1], stack, x, ids)))
        ggml.free_buffer(buffer)
        for context in contexts:
            ggml.free(context)
    return able


def relative_error(y: Floats, expected: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((y - expected) ** 2) / np.mean(expected**2)))


def measure(ggml: Library, case: Case, cold_bytes: int, budget: float) -> dict[str, Any]:
    contenders: dict[str, Prepared] = {
        "billfish": Ours(case, cold_bytes),
        "ggml": Theirs(ggml, case, cold_bytes, ggml.plain),
    }
    if can_repack(ggml, case) and ggml.repack is not None:
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
    return {
        "part": case.part,
        "format": case.format,
        "tokens": case.tokens,
        "milliseconds": {name: 1e3 * value for name, value in seconds.items()},
        "error": errors,
        "times_as_fast": best / seconds["billfish"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,64")
    parser.add_argument("--formats", default="mxfp4_gguf,q4_k")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each contender of a row")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    peer = Ggml(repack=False)
    peer.load()
    peer.library.set_threads(peer.library.backend, arguments.threads)
    cold_bytes = CpuEngine().cold_bytes()
    found = []
    print(f"{'':24}{'tokens':>7}{'ms, best':>10}{'ms of ggml, repacked':>24}{'times':>7}   errors")
    for format in arguments.formats.split(","):
        for tokens in map(int, arguments.tokens.split(",")):
            for part in arguments.parts.split(","):
                row = measure(peer.library, Case(part, format, tokens), cold_bytes, arguments.seconds)
                found.append(row)
                ms = row["milliseconds"]
                theirs = f"{ms['ggml']:.3f}, " + (f"{ms['ggml-repack']:.3f}" if "ggml-repack" in ms else "none")
                errors = ", ".join(f"{name} {value:.2e}" for name, value in row["error"].items())
                times = f"{ms['billfish']:>10.3f}{theirs:>24}{row['times_as_fast']:>7.2f}"
                print(f"{format + ' ' + part:24}{tokens:>7}{times}   {errors}", flush=True)
    if arguments.json is not None:
        about = {"machine": machine(), "ggml": peer.version(), "threads": arguments.threads, "rows": found}
        write_atomically(arguments.json, json.dumps(about, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
