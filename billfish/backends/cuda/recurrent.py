"""Token mixers with a state of fixed size instead of a KV cache, on a GPU: gated delta net, Mamba-2, short convolution.

The states of a sequence are one piece of memory, whose address is in the step's `states`; those of sequences that
decode come first. From number `state_at` on a layer has float32 [heads][values / 8][keys][8] there, then the last
inputs of its convolution, [taps - 1][channels].

A decode step reads and writes each state once:

    products, recurrence_inputs (convolution, SiLU, gates), recurrence, gated_norm, product

where a delta net's norm is in the recurrence. Drafted rows of a sequence go through it one after the other, in one
launch, and each leaves the states behind it in memory of its own. Prompts come in chunks of up to 64 tokens of one
sequence, which end at multiples of 64 positions. GPUs with the shared memory for it take the chunkwise form on tensor
cores:

    products, recurrence_inputs, keep_inputs, chunk_products, chunk_scan, gated_norm, product

A sequence gets the same bits in any batch, as a CTA has one sequence. How a prompt is cut at multiples of 64 changes no
bits either. Token by token, the same numbers are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.driver import Buffer, Device
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher
from billfish.backends.cuda.step_memory import Batch, StepMemory

CHUNK = 64  # tokens; convolution.cuh and chunks.cuh have the same number
PARTS = 4  # CTAs that share the convolutions of a chunk
CHANNELS = 256  # of a CTA of keep_inputs.cu and short_convolution.cu
SCAN_WARPS = 4  # of chunk_scan.cu
PRODUCT_THREADS = 256  # of chunk_products.cu
FEW_COLUMNS = 16  # of a CTA of recurrence.cu, in prompts
MOST_THREADS, MOST_VALUES = 1024, 256  # of a CTA; of a delta net's head, whose columns are all in one CTA


class Chunk(NamedTuple):
    """Rows of one sequence that go together. save: where the states behind them go as well; 0: nowhere."""

    rows: int
    save: int = 0


def chunks_between(start: int, end: int, saves: dict[int, int]) -> list[Chunk]:
    """The chunks of positions [start, end). saves: by position, the address where the states behind it go."""
    bounds = {*range(start - start % CHUNK + CHUNK, end, CHUNK), *(p for p in saves if start < p < end), end}
    chunks = []
    for position in sorted(bounds):
        chunks.append(Chunk(position - start, saves.get(position, 0)))
        start = position
    return chunks


def chunk_inputs(row: int, prompts: Sequence[Sequence[Chunk]]) -> dict[str, NDArray[Any]]:
    """The inputs of a step that tell the chunks of its prompts, whose rows follow each other from `row` on.

    chunks: the first row of a chunk, how many it has, the number of its prompt, and the prompt's first row.
    """
    table, saves, ranges = list[tuple[int, ...]](), list[int](), list[tuple[int, int]]()
    for prompt, chunks in enumerate(prompts):
        ranges.append((len(table), len(chunks)))
        first = row
        for chunk in chunks:
            table.append((row, chunk.rows, prompt, first))
            saves.append(chunk.save)
            row += chunk.rows
    return {
        "chunks": np.array(table, np.int32).reshape(-1, 4),
        "chunk_saves": np.array(saves, np.uint64),
        "chunk_ranges": np.array(ranges, np.int32).reshape(-1, 2),
    }


Places = dict[str, tuple[int, int]]  # of what products made: where it begins, and how many numbers its rows are apart


def tables_of(step: StepMemory, batch: Batch, *, few: bool) -> tuple[int, int]:
    """Where the addresses of the states of sequences that decode are and the counts of their rows, or those of prompts
    and their chunks."""
    return (step.at("states"), step.at("counts")) if few else (states_of(step, batch), step.at("chunks"))


def states_of(step: StepMemory, batch: Batch) -> int:
    """Where the addresses of the states of prompts are."""
    return step.at("states") + 8 * batch.decoding


@dataclass(frozen=True)
class DeviceConvolution:
    """A causal convolution, each channel for itself: float32 weight [taps, channels], bias [channels]."""

    weight: Buffer
    bias: Buffer | None
    channels: int
    taps: int

    @property
    def bias_pointer(self) -> int:
        return 0 if self.bias is None else self.bias.pointer


@dataclass(frozen=True)
class DeviceShortConvolution:
    """out(c * convolution(b * x)), with b, c and x rows of one product."""

    projection: DeviceMatrix
    convolution: DeviceConvolution
    output: DeviceMatrix
    state_at: int

    @property
    def key(self) -> Hashable:
        return "short convolution", self.convolution.taps, *(matrix.weights.kind for matrix in self.matrices)

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return self.projection, self.output

    def memory(self, rows: int) -> dict[str, int]:
        size = 2 * rows * self.convolution.channels
        return {"mixer_inputs": 3 * size, "mixer_output": size}

    def run(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch) -> None:
        at, c = step.at, self.convolution
        launcher.products(stream, step, (self.projection,), at("x"), at("mixer_inputs"), batch.rows)
        if batch.decoding:
            self._convolve(launcher, stream, step, batch, few=True)
        if batch.chunks:
            self._convolve(launcher, stream, step, batch, few=False)
            b = at("mixer_inputs")
            _keep(launcher, stream, step, batch, c, b, b + 4 * c.channels, 3 * c.channels, self.state_at)
        launcher.products(stream, step, (self.output,), at("mixer_output"), at("added"), batch.rows)

    def _convolve(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, *, few: bool) -> None:
        at, c = step.at, self.convolution
        macros = {"TYPE": launcher.type, "TAPS": c.taps, "FEW": int(few)}
        grid = -(-c.channels // CHANNELS), batch.decoding if few else PARTS * batch.chunks
        tables = tables_of(step, batch, few=few)
        pointers = at("mixer_inputs"), c.weight.pointer, c.bias_pointer, *tables, at("mixer_output")
        launcher.launch(stream, "short_convolution", macros, grid, CHANNELS, *pointers, c.channels, self.state_at)


@dataclass(frozen=True)
class DeviceRecurrence:
    """A gated delta net (`delta`) or a Mamba-2 scan. Vectors are float32.

    key_heads of `keys` numbers: of q and k, or of b and c, which a group shares. heads of `values` numbers: of v, or x.
    inputs: for a delta net qkv, z, beta and alpha, or neighbours of these in one; for Mamba-2 z, x, b, c and the steps
    in one. group: numbers of the last norm.
    """

    delta: bool
    key_heads: int
    heads: int
    keys: int
    values: int
    tiled: bool  # value head i goes with key head i % key_heads; else neighbours share a key head
    inputs: tuple[DeviceMatrix, ...]
    output: DeviceMatrix
    convolution: DeviceConvolution
    decay: Buffer
    step: Buffer
    skip: Buffer | None
    norm: Buffer
    group: int
    state_at: int

    @property
    def key(self) -> Hashable:
        sizes = self.delta, self.key_heads, self.heads, self.keys, self.values, self.tiled, self.convolution.taps
        return "recurrence", sizes, *(matrix.weights.kind for matrix in self.matrices)

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return *self.inputs, self.output

    @property
    def width(self) -> int:
        return self.heads * self.values

    @property
    def tail_at(self) -> int:
        """Where the inputs of the convolution begin in a sequence's memory."""
        return self.state_at + self.width * self.keys

    def memory(self, rows: int) -> dict[str, int]:
        return {
            "mixer_inputs": 2 * rows * sum(matrix.weights.shape[0] for matrix in self.inputs),
            "mixer_output": 2 * rows * self.width,
            "mixer_kq": 4 * rows * self.key_heads * 2 * self.keys,
            "mixer_overlap": 4 * rows * self.key_heads,
            "mixer_v": 4 * rows * self.width,
            "mixer_gates": 8 * rows * self.heads,
            "mixer_sums": 4 * rows * self.width,
            "chunk_w": 2 * rows * self.heads * self.keys * self.delta,
            "chunk_attention": 4 * rows * self.heads * CHUNK,
        }

    def run(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch) -> None:
        at = step.at
        launcher.products(stream, step, self.inputs, at("x"), at("mixer_inputs"), batch.rows)
        places = self._places(at("mixer_inputs"), batch.rows)
        if batch.decoding:
            self._decode(launcher, stream, step, batch, places)
        if batch.chunks:  # in the memory of what decodes, which is done
            self._prefill(launcher, stream, step, batch, places)
        launcher.products(stream, step, (self.output,), at("mixer_output"), at("added"), batch.rows)

    def _decode(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, places: Places) -> None:
        self._prepare(launcher, stream, step, batch, places, few=True, half=False)
        self._run_tokens(launcher, stream, step, batch, places["z"], few=True)
        if not self.delta:
            self._normalize(launcher, stream, step, places["z"], 0, batch.decoding)

    def _prefill(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, places: Places) -> None:
        (convolved, stride), chunked = places["convolved"], self.is_chunked(launcher.device)
        self._prepare(launcher, stream, step, batch, places, few=False, half=chunked)
        _keep(launcher, stream, step, batch, self.convolution, convolved, 0, stride, self.tail_at)
        if chunked:
            self._run_chunks(launcher, stream, step, batch)
        else:
            self._run_tokens(launcher, stream, step, batch, places["z"], few=False)
        self._normalize(launcher, stream, step, places["z"], batch.decoding, batch.rows - batch.decoding)

    def is_chunked(self, device: Device) -> bool:
        """Whether prompts take the chunkwise form."""
        return max(self._product_bytes, self._scan_bytes(32, 1)) <= device.shared_bytes

    def _places(self, at: int, rows: int) -> Places:
        """Where what the products made begins, and how many numbers its rows are apart."""
        channels = self.convolution.channels
        delta = {"convolved": channels, "z": self.width, "beta": self.heads, "alpha": self.heads}
        sizes = delta if self.delta else {"z": self.width, "convolved": channels, "alpha": self.heads}
        places, names = {"beta": (0, 0)}, iter(sizes.items())
        for matrix in self.inputs:
            n, column = matrix.weights.shape[0], 0
            while column < n:
                name, size = next(names)
                places[name] = at + 2 * column, n
                column += size
            at += 2 * rows * n
        return places

    def _prepare(
        self,
        launcher: Launcher,
        stream: int,
        step: StepMemory,
        batch: Batch,
        places: Places,
        *,
        few: bool,
        half: bool,
    ) -> None:
        at, c = step.at, self.convolution
        all_keys, threads = self.key_heads * self.keys, -(-max(self.keys, self.values) // 32) * 32
        macros = {"TYPE": launcher.type, "TAPS": c.taps, "KEYS": self.keys, "VALUES": self.values, "THREADS": threads}
        macros |= {"DELTA": int(self.delta), "FEW": int(few), "HALF": int(half)}
        # q, k, v; or x, b, c
        k_at, q_at, v_at = (all_keys, 0, 2 * all_keys) if self.delta else (self.width, self.width + all_keys, 0)
        (convolved, stride), (beta, beta_stride), (alpha, alpha_stride) = (
            places[name] for name in ("convolved", "beta", "alpha")
        )
        vectors = c.weight.pointer, c.bias_pointer, self.decay.pointer, self.step.pointer
        made = at("mixer_kq"), at("mixer_overlap"), at("mixer_v"), at("mixer_gates")
        pointers = convolved, beta, alpha, *vectors, *tables_of(step, batch, few=few), *made
        numbers = stride, beta_stride, alpha_stride, c.channels, k_at, q_at, v_at, self.tail_at
        grid = self.key_heads + self.heads, batch.decoding if few else PARTS * batch.chunks
        heads = self.key_heads, self.heads
        launcher.launch(stream, "recurrence_inputs", macros, grid, threads, *pointers, *numbers, *heads)

    def _macros(self) -> dict[str, int]:
        return {"KEYS": self.keys, "VALUES": self.values, "DELTA": int(self.delta), "TILED": int(self.tiled)}

    def _run_tokens(
        self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, z: tuple[int, int], *, few: bool
    ) -> None:
        at = step.at
        columns = self.values if few and self.delta else min(FEW_COLUMNS, self.values)
        macros = {"TYPE": launcher.type, "WARPS": columns // 8, "FEW": int(few)} | self._macros()
        read = at("mixer_kq"), at("mixer_overlap"), at("mixer_v"), at("mixer_gates"), self._skip
        states = *tables_of(step, batch, few=few), at("chunk_ranges"), at("chunk_saves")
        written = at("mixer_sums"), z[0], self.norm.pointer, at("mixer_output"), launcher.epsilon
        grid = self.values // columns, self.heads, batch.decoding if few else batch.prompts
        numbers = z[1], self.state_at, self.key_heads, self.heads
        launcher.launch(stream, "recurrence", macros, grid, columns * 4, *read, *states, *written, *numbers)

    @property
    def _skip(self) -> int:
        return 0 if self.skip is None else self.skip.pointer

    @property
    def _product_bytes(self) -> int:
        rows, columns = 2 * CHUNK * (2 * self.keys + 16), PRODUCT_THREADS // 2
        return rows + (CHUNK * (CHUNK + 8 + 24 + columns + 4) * 4 if self.delta else 0)

    def _scan_bytes(self, wide: int, stages: int) -> int:
        stage = (3 if self.delta else 2) * CHUNK * (2 * self.keys + 16) + CHUNK * (CHUNK + 8) * 4
        return stages * stage + (self.keys + 2 * CHUNK) * (wide + 4) * 4

    def _scan_shape(self, device: Device, texts: int) -> tuple[int, int]:
        """Columns of a state that a CTA of chunk_scan.cu has, and chunks in its shared memory: such that all
        multiprocessors have a CTA, or those that have one CTA wait little. No bits depend on it."""
        wide = 32 if self.values % 32 == 0 else 16
        if self.heads * (self.values // 16) * texts <= device.multiprocessors:
            wide = 16
        alone = self.heads * (self.values // wide) * texts <= device.multiprocessors
        return wide, 2 if alone and self._scan_bytes(wide, 2) <= device.shared_bytes else 1

    def _run_chunks(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch) -> None:
        at, heads = step.at, (self.key_heads, self.heads)
        wide, stages = self._scan_shape(launcher.device, batch.prompts)
        made = at("chunks"), at("chunk_attention"), at("chunk_w")
        launcher.launch(
            stream,
            "chunk_products",
            self._macros(),
            (self.heads, batch.chunks),
            PRODUCT_THREADS,
            *(at("mixer_kq"), at("mixer_v"), at("mixer_gates"), *made, *heads),
            shared_bytes=self._product_bytes,
        )
        read = at("mixer_kq"), at("chunk_w"), at("mixer_v"), at("chunk_attention"), at("mixer_gates"), self._skip
        tables = at("chunks"), at("chunk_ranges"), at("chunk_saves")
        states = states_of(step, batch), *tables, at("mixer_sums")
        launcher.launch(
            stream,
            "chunk_scan",
            self._macros() | {"WIDE": wide, "STAGES": stages},
            (self.values // wide, self.heads, batch.prompts),
            SCAN_WARPS * 32,
            *(*read, *states, self.state_at, *heads),
            shared_bytes=self._scan_bytes(wide, stages),
        )

    def _normalize(
        self, launcher: Launcher, stream: int, step: StepMemory, z: tuple[int, int], first: int, rows: int
    ) -> None:
        """So many rows from the first one on."""
        team = min(MOST_THREADS, -(-self.group // 4 // 32) * 32)
        teams = 8 if team == 32 else 1
        macros = {"TYPE": launcher.type, "GROUP": self.group, "GATE_FIRST": int(not self.delta), "TEAM": team}
        groups = self.width // self.group
        sums, output = step.at("mixer_sums") + 4 * first * self.width, step.at("mixer_output") + 2 * first * self.width
        pointers = sums, z[0] + 2 * first * z[1], self.norm.pointer, output, launcher.epsilon
        numbers = rows, groups, z[1], 0 if self.delta else self.group
        grid = (-(-rows * groups // teams),)
        launcher.launch(stream, "gated_norm", macros | {"TEAMS": teams}, grid, team * teams, *pointers, *numbers)


def _keep(
    launcher: Launcher,
    stream: int,
    step: StepMemory,
    batch: Batch,
    convolution: DeviceConvolution,
    inputs: int,
    others: int,
    stride: int,
    tail_at: int,
) -> None:
    """Each sequence and its checkpoints keep the last inputs of a convolution. others: what inputs are multiplied with;
    0: nothing."""
    at, channels = step.at, convolution.channels
    macros = {"TYPE": launcher.type, "TAPS": convolution.taps, "PAIRS": int(others != 0)}
    tables = *tables_of(step, batch, few=False), at("chunk_ranges"), at("chunk_saves")
    grid = -(-channels // CHANNELS), batch.prompts
    launcher.launch(stream, "keep_inputs", macros, grid, CHANNELS, inputs, others, *tables, stride, channels, tail_at)
