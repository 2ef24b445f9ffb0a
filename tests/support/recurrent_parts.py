"""Recurrent mixers with random weights, in float64 and as parts of a CUDA decoder, on fibers of the CPU or a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda_compiled import H200
from cuda_fibers import FiberLauncher, FiberStep, Matrix, Memory, numbers

from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer, Device, check, copy_in, copy_out, current, device, driver, synchronize
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher, sent
from billfish.backends.cuda.recurrent import (
    Chunk,
    DeviceConvolution,
    DeviceRecurrence,
    DeviceShortConvolution,
    chunk_inputs,
    chunks_between,
)
from billfish.backends.cuda.step_memory import Batch, StepMemory

EPSILON = 1e-6
AT = 64  # where the layer's states begin in a sequence's memory: others are before them


@dataclass(frozen=True)
class Sizes:
    """kind: "delta", "mamba" or "short", whose channels are `hidden`."""

    kind: str
    key_heads: int = 1
    heads: int = 1
    keys: int = 16
    values: int = 16
    taps: int = 4
    hidden: int = 64
    tiled: bool = True
    bias: bool = False

    @property
    def width(self) -> int:
        return self.hidden if self.kind == "short" else self.heads * self.values

    @property
    def channels(self) -> int:
        return self.hidden if self.kind == "short" else self.width + 2 * self.key_heads * self.keys

    @property
    def projections(self) -> tuple[int, ...]:
        """Rows of the matrices that multiply x."""
        if self.kind == "delta":
            return self.channels, self.width, self.heads, self.heads
        return (3 * self.hidden,) if self.kind == "short" else (self.width + self.channels + self.heads,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (0,) if self.kind == "short" else (self.heads, self.keys, self.values)

    @property
    def numbers(self) -> int:
        """Of a sequence's memory."""
        return AT + int(np.prod(self.state_shape)) + (self.taps - 1) * self.channels


TINY = Sizes("delta", key_heads=1, heads=2)
SMALL = {
    "delta": Sizes("delta", key_heads=2, heads=4, keys=32, values=32),
    "delta-neighbours": Sizes("delta", key_heads=2, heads=4, keys=16, values=48, tiled=False),
    "mamba": Sizes("mamba", key_heads=2, heads=8, keys=32, values=16, tiled=False, bias=True),
    "short": Sizes("short", taps=3),
}
LARGE = {
    "qwen3.5-0.8b": Sizes("delta", key_heads=16, heads=16, keys=128, values=128, hidden=1024),
    "qwen3.5-27b": Sizes("delta", key_heads=16, heads=48, keys=128, values=128, hidden=1024),
    "granite-4-tiny": Sizes("mamba", key_heads=1, heads=48, keys=128, values=64, hidden=1536, tiled=False, bias=True),
    "lfm2": Sizes("short", taps=3, hidden=2048),
}


@dataclass
class State:
    """Of a sequence: S of all heads, and the last inputs of the convolution."""

    heads: np.ndarray
    tail: np.ndarray

    @classmethod
    def empty(cls, sizes: Sizes) -> State:
        return cls(np.zeros(sizes.state_shape), np.zeros((sizes.taps - 1, sizes.channels)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)


class Part:
    """Random weights of a mixer."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, rng = sizes, np.random.default_rng(seed)

        def matrix(n: int, k: int) -> np.ndarray:
            return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float16)

        self.inputs = [matrix(n, sizes.hidden) for n in sizes.projections]
        self.output = matrix(sizes.hidden, sizes.width)
        self.taps = rng.standard_normal((sizes.taps, sizes.channels)).astype(np.float32) / 2
        self.bias = rng.standard_normal(sizes.channels).astype(np.float32) / 4 if sizes.bias else None
        self.decay = -np.exp(rng.uniform(-3, 1, sizes.heads)).astype(np.float32)
        self.step = rng.uniform(-4, 1, sizes.heads).astype(np.float32)
        self.skip = rng.standard_normal(sizes.heads).astype(np.float32)
        size = sizes.values if sizes.kind == "delta" else sizes.width
        self.norm = rng.uniform(0.5, 1.5, size).astype(np.float32)

    def run(self, x: np.ndarray, state: State) -> np.ndarray:
        """In float64, but for products, which are rounded to float16: the outputs of x [rows, hidden]."""
        made = [
            (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float16).astype(np.float64) for w in self.inputs
        ]
        y = getattr(self, f"_{self.sizes.kind}")(made, state).astype(np.float16).astype(np.float64)
        return y @ self.output.astype(np.float64).T

    def _convolve(self, x: np.ndarray, state: State) -> np.ndarray:
        taps, whole = self.sizes.taps, np.concatenate([state.tail, x])
        state.tail = whole[len(whole) - taps + 1 :]
        sums = sum(whole[i : i + len(x)] * self.taps[i].astype(np.float64) for i in range(taps))
        return sums if self.bias is None else sums + self.bias

    def _short(self, made: list[np.ndarray], state: State) -> np.ndarray:
        b, c, x = np.split(made[0], 3, axis=1)
        return c * self._convolve(b * x, state)

    def _delta(self, made: list[np.ndarray], state: State) -> np.ndarray:
        s, (qkv, z, beta, alpha) = self.sizes, made
        keys = s.key_heads * s.keys
        q, k, v = np.split(silu(self._convolve(qkv, state)), [keys, 2 * keys], axis=1)
        q, k = (each.reshape(len(z), s.key_heads, s.keys) for each in (q, k))
        q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
        which = np.arange(s.heads) % s.key_heads if s.tiled else np.arange(s.heads) // (s.heads // s.key_heads)
        q, k, v = q[:, which] / np.sqrt(s.keys), k[:, which], v.reshape(len(z), s.heads, s.values)
        decay, beta = np.exp(self.decay * np.logaddexp(0, alpha + self.step)), 1 / (1 + np.exp(-beta))
        out = np.empty_like(v)
        for i in range(len(z)):
            state.heads *= decay[i][:, None, None]
            d = beta[i][:, None] * (v[i] - (k[i][:, None] @ state.heads)[:, 0])
            state.heads += k[i][:, :, None] * d[:, None]
            out[i] = (q[i][:, None] @ state.heads)[:, 0]
        return (rms(out) * self.norm).reshape(len(z), -1) * silu(z)

    def _mamba(self, made: list[np.ndarray], state: State) -> np.ndarray:
        s = self.sizes
        z, xbc, steps = np.split(made[0], [s.width, s.width + s.channels], axis=1)
        x, b, c = np.split(silu(self._convolve(xbc, state)), np.cumsum([s.width, s.key_heads * s.keys]), axis=1)
        which = np.arange(s.heads) // (s.heads // s.key_heads)
        x, b, c = x.reshape(len(z), s.heads, s.values), *(e.reshape(len(z), -1, s.keys)[:, which] for e in (b, c))
        t = np.logaddexp(0, steps + self.step)
        out = np.empty_like(x)
        for i in range(len(z)):
            state.heads *= np.exp(self.decay * t[i])[:, None, None]
            state.heads += b[i][:, :, None] * (t[i][:, None] * x[i])[:, None]
            out[i] = (c[i][:, None] @ state.heads)[:, 0] + self.skip[:, None] * x[i]
        gated = (out.reshape(len(z), -1) * silu(z)).reshape(len(z), s.key_heads, -1)
        return rms(gated).reshape(len(z), -1) * self.norm

    def on(self, vector: Callable[[np.ndarray], Any], matrix: Callable[[np.ndarray], Any]) -> Any:
        """As the decoder has it, by `vector` and `matrix` of a device."""
        s = self.sizes
        bias = None if self.bias is None else vector(self.bias)
        convolution = DeviceConvolution(vector(self.taps), bias, s.channels, s.taps)
        inputs, output = [matrix(each) for each in self.inputs], matrix(self.output)
        if s.kind == "short":
            return DeviceShortConvolution(inputs[0], convolution, output, AT)
        return DeviceRecurrence(
            delta=s.kind == "delta",
            key_heads=s.key_heads,
            heads=s.heads,
            keys=s.keys,
            values=s.values,
            tiled=s.tiled,
            inputs=tuple(inputs),
            output=output,
            convolution=convolution,
            decay=vector(self.decay),
            step=vector(self.step),
            skip=None if s.kind == "delta" else vector(self.skip),
            norm=vector(self.norm),
            group=s.values if s.kind == "delta" else s.width // s.key_heads,
            state_at=AT,
        )


def of_chunks(texts: Sequence[Sequence[Chunk]] | None) -> dict[str, np.ndarray]:
    """The inputs of a step that tell its chunks. A decode step's kernels get memory of none."""
    return chunk_inputs(0, [[]] if texts is None else texts)


def batch_of(rows: int, sequences: int, texts: Sequence[Sequence[Chunk]] | None) -> Batch:
    if texts is None:
        return Batch(rows, rows)
    return Batch(rows, 0, prompts=sequences, chunks=sum(map(len, texts)))


class OnFibers:
    """A mixer on the CPU. device: whose shared memory it is to have."""

    def __init__(self, part: Part, device: Device = H200) -> None:
        self.sizes, self.part = part.sizes, part.on(Memory, Matrix)
        self.launcher = FiberLauncher(EPSILON, device)

    def state(self, values: np.ndarray | None = None) -> Memory:
        """Memory of a sequence's states."""
        return Memory(np.zeros(self.sizes.numbers, np.float32) if values is None else values.copy())

    def read(self, state: Memory) -> np.ndarray:
        return state.array

    def run(
        self,
        x: np.ndarray,
        states: Sequence[Memory],
        texts: Sequence[Sequence[Chunk]] | None,
        counts: Sequence[int] | None = None,
    ) -> np.ndarray:
        """One step. texts: the chunks of each; None: a decode step. counts: of that, where rows are drafted."""
        rows, part = len(x), self.part
        inputs = {"states": np.array([state.pointer for state in states], np.uint64)} | of_chunks(texts)
        inputs["counts"] = np.array(counts or [1] * rows, np.int32)
        sizes = {"x": x.nbytes, "added": 2 * rows * self.sizes.hidden}
        step = FiberStep(sizes | {name: array.nbytes for name, array in inputs.items()} | part.memory(rows))
        numbers(step.at("x"), x.shape)[:] = x
        for name, array in inputs.items():
            ctypes.memmove(step.at(name), array.ctypes.data, array.nbytes)
        part.run(self.launcher, 0, step, batch_of(rows, len(states), texts))
        return numbers(step.at("added"), (rows, self.sizes.hidden)).copy()


class OnDevice:
    """A mixer on a GPU."""

    def __init__(self, part: Part) -> None:
        def matrix(values: np.ndarray) -> DeviceMatrix:
            return DeviceMatrix(DeviceWeights.pack_plain(values, "cpu:0"))

        self.sizes, self.part = part.sizes, part.on(lambda array: sent(array, 0), matrix)
        self.launcher = Launcher(part.sizes.hidden, EPSILON)
        self._steps: dict[tuple[int, int], StepMemory] = {}

    def state(self, values: np.ndarray | None = None) -> Buffer:
        return sent(np.zeros(self.sizes.numbers, np.float32) if values is None else values, 0)

    def read(self, state: Buffer) -> np.ndarray:
        values = np.empty(self.sizes.numbers, np.float32)
        with current(0):
            copy_out(values, state.pointer, 0)
        return values

    def step(self, rows: int, texts: int) -> StepMemory:
        if (rows, texts) not in self._steps:
            hidden = self.sizes.hidden
            own = {
                "x": 2 * rows * hidden,
                "added": 2 * rows * hidden,
                "hidden": 4 * rows * hidden,
                "work": 1 << 20,
                "ordered": 16,
            }
            sizes = own | self.part.memory(rows)
            self._steps = {
                (rows, texts): StepMemory(sizes, 0, rows=rows, sequences=texts, pages_of_sequence=1, tables=1, scored=1)
            }
        return self._steps[rows, texts]

    def fed(
        self,
        x: np.ndarray,
        states: Sequence[Buffer],
        texts: Sequence[Sequence[Chunk]] | None,
        counts: Sequence[int] | None = None,
    ) -> tuple[StepMemory, Batch]:
        step = self.step(len(x), len(states))
        copy_in(step.at("x"), x, 0)
        batch = batch_of(len(x), len(states), texts)
        step.use(batch)
        copy_in(step.at("states"), np.array([state.pointer for state in states], np.uint64), 0)
        for name, array in of_chunks(texts).items() if texts is not None else ():
            copy_in(step.at(name), array, 0)
        if texts is None:
            copy_in(step.at("counts"), np.array(counts or [1] * len(x), np.int32), 0)
        check(driver().cuMemsetD8(step.at("added"), 0xFF, 2 * len(x) * self.sizes.hidden), "clearing")
        return step, batch

    def run(
        self,
        x: np.ndarray,
        states: Sequence[Buffer],
        texts: Sequence[Sequence[Chunk]] | None,
        counts: Sequence[int] | None = None,
    ) -> np.ndarray:
        with current(0):
            step, batch = self.fed(x, states, texts, counts)
            self.part.run(self.launcher, 0, step, batch)
            made = np.empty((len(x), self.sizes.hidden), np.float16)
            copy_out(made, step.at("added"), 0)
        return made


@dataclass
class Sequences:
    """Sequences on a device and in float64, fed together."""

    part: Part
    place: Any
    count: int
    seed: int = 1
    errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.states = [self.place.state() for _ in range(self.count)]
        self.expected = [State.empty(self.part.sizes) for _ in range(self.count)]
        self.positions = [0] * self.count

    def inputs(self, rows: int) -> np.ndarray:
        return self.rng.standard_normal((rows, self.part.sizes.hidden)).astype(np.float16)

    def feed(self, lengths: Sequence[int], saves: dict[int, int] | None = None, decode: bool = False) -> np.ndarray:
        """Rows for each sequence, compared with float64. saves: of the first sequence."""
        xs = [self.inputs(length) for length in lengths]
        chunks = [
            chunks_between(p, p + n, (saves or {}) if i == 0 else {})
            for i, (p, n) in enumerate(zip(self.positions, lengths, strict=True))
        ]
        made = self.place.run(np.concatenate(xs), self.states, None if decode else chunks)
        expected = np.concatenate([self.part.run(x, state) for x, state in zip(xs, self.expected, strict=True)])
        self.errors.append(error(made, expected))
        self.positions = [p + n for p, n in zip(self.positions, lengths, strict=True)]
        return made

    def drafted_rows(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Rows of two sequences, 3 and 1, in one decode step, and one at a time: what comes out, and the states behind
        each row."""
        x, place = self.inputs(4), self.place
        first, second = ([place.state(place.read(state)) for state in self.states] for _ in range(2))
        rows = [first[0], place.state(), place.state(), first[1]]
        made = place.run(x, rows, None, [3, 0, 0, 1])
        alone, behind = [place.run(x[[0, 3]], second, None)], [place.read(second[0]).copy()]
        for row in (1, 2):
            alone.append(place.run(x[[row]], second[:1], None))
            behind.append(place.read(second[0]).copy())
        one_by_one = np.concatenate([alone[0][:1], alone[1], alone[2], alone[0][1:]])
        return [made, *map(place.read, rows)], [one_by_one, *behind, place.read(second[1])]

    def state_errors(self) -> list[float]:
        found = []
        for state, expected in zip(self.states, self.expected, strict=True):
            values = self.place.read(state)
            assert not values[:AT].any()  # others' memory
            heads = expected.heads
            if heads.size:  # [heads][values / 8][keys][8]
                heads = heads.reshape(*heads.shape[:2], -1, 8).transpose(0, 2, 1, 3)
            whole = np.concatenate([heads.ravel(), expected.tail.ravel()])
            found.append(error(values[AT:], whole))
        return found


def error(made: np.ndarray, expected: np.ndarray) -> float:
    """The relative error; of NaN, NaN."""
    return float(np.linalg.norm(made.astype(np.float64) - expected) / np.linalg.norm(expected))


__all__ = [
    "AT",
    "LARGE",
    "SMALL",
    "Chunk",
    "OnDevice",
    "OnFibers",
    "Part",
    "Sequences",
    "Sizes",
    "chunks_between",
    "device",
    "synchronize",
]
