"""Attention on a GPU: q, k, v; norms and RoPE; softmax over the paged KV cache; output."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.launcher import UNFOLDED, DeviceMatrix, FoldedNorms, Launcher
from billfish.backends.cuda.step_memory import PAGE, Batch, StepMemory

FEW_WARPS, MANY_WARPS, STAGES = 4, 8, 2  # of attend.cu
MOST_PARTS, MOST_LONG_PARTS = 8, 16  # CTAs of a cluster that share keys of a sequence, and of one with many positions
IN_REGISTERS = 256  # numbers of a head, at most: more are halved, with fewer warps and queries in shared memory
ROTATED_ROWS = 8  # of a CTA of rotate.cu, where there are many and heads have 64 numbers
SCALE_THREADS = 256  # of head_scales.cu


@dataclass(frozen=True)
class Rotation:
    """A layer's RoPE table. The angles of all tables lie behind each other, `stride` pairs for each row."""

    first: int
    pairs: int
    stride: int
    adjacent: bool = False  # a pair is 2i and 2i + 1, not i and i + pairs


@dataclass(frozen=True)
class PagePlace:
    """Where keys and values of a layer are: the number of the table of pages, and the bytes before them in a page."""

    table: int
    offset: int


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a layer's attention. fp8: the KV cache holds E4M3 codes with scales instead of float16."""

    heads: int
    kv_heads: int
    size: int
    fp8: bool = False

    @property
    def group(self) -> int:
        """Heads that share keys and values."""
        return self.heads // self.kv_heads

    @property
    def wide(self) -> int:
        """Numbers of a head in a page, as pages.cuh has them."""
        return -(-self.size // 64) * 64

    @property
    def halves(self) -> int:
        """CTAs that share the numbers of a head."""
        return 1 if self.wide <= IN_REGISTERS else 2

    @property
    def tile_bytes(self) -> int:
        """Keys or values of a head and PAGE positions, as pages.cuh has them."""
        return PAGE * (self.wide + 4 if self.fp8 else 2 * self.wide)

    @property
    def least_bytes(self) -> int:
        """Of shared memory: a tile of keys and of values, and queries that are not in registers; or, later in a decode
        step, the sums of all warps."""
        return max(2 * self.tile_bytes + self.query_bytes(FEW_WARPS), self.sum_bytes)

    @property
    def sum_bytes(self) -> int:
        """Of shared memory: outputs, maxima and sums of the rows of all warps of a decode step."""
        return FEW_WARPS * 16 * (self.wide // self.halves + 2) * 4

    def query_bytes(self, warps: int) -> int:
        """Of shared memory: queries that are not in registers."""
        return 0 if self.halves == 1 else warps * 16 * self.wide * 2

    @property
    def query_block(self) -> int:
        """Positions of a block of queries."""
        return MANY_WARPS // self.halves * 16 // self.group

    @property
    def page_bytes(self) -> int:
        """Of keys and values of PAGE positions."""
        return 2 * self.kv_heads * self.tile_bytes


@dataclass(frozen=True)
class DeviceAttention:
    """Attention(...) of models/description.py.

    qkv: q, k and v, or neighbours of these in one. Without k: keys and values are those of another layer, whose
    `place` this is. Without v: values are keys before their norm and rotation. joint_norms: q_norm and k_norm are of
    all heads together.
    """

    sizes: HeadSizes
    qkv: tuple[DeviceMatrix, ...]
    output: DeviceMatrix
    place: PagePlace
    scale: float
    rotation: Rotation | None = None
    window: int = 0
    cap: float = 0.0
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None
    joint_norms: bool = False
    v_norm: bool = False
    sinks: Buffer | None = None
    temperature: tuple[float, int] | None = None
    gated: bool = False
    has_keys: bool = True
    has_values: bool = True

    @property
    def key(self) -> Hashable:
        kinds = (matrix.weights.kind for matrix in self.matrices)
        pairs = self.rotation and (self.rotation.pairs, self.rotation.adjacent)
        norms = self.q_norm is None, self.joint_norms, self.v_norm
        return self.sizes, pairs, *norms, self.window > 0, self.cap > 0, self.gated, self.has_keys, *kinds

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return *self.qkv, self.output

    @property
    def ends(self) -> tuple[tuple[DeviceMatrix, ...], DeviceMatrix]:
        return self.qkv, self.output

    def memory(self, rows: int) -> dict[str, int]:
        s = self.sizes
        return {
            "qkv": 2 * rows * sum(matrix.weights.shape[0] for matrix in self.qkv),
            "attended": 2 * rows * s.heads * s.size,
            "head_scales": 8 * rows * self.joint_norms,
        }

    def run(
        self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, folded: FoldedNorms = UNFOLDED
    ) -> None:
        at, rows = step.at, batch.rows
        launcher.products(stream, step, self.qkv, at("x"), at("qkv"), rows, normed=folded.before)
        if self.joint_norms:
            self._scale_heads(launcher, stream, step, rows)
        self._rotate(launcher, stream, step, rows)
        if batch.decoding:
            self._attend(launcher, stream, step, batch, few=True)
        if batch.blocks:
            self._attend(launcher, stream, step, batch, few=False)
        launcher.output(stream, step, self.output, at("attended"), rows, folded.after)

    def parts_for(self, launcher: Launcher, batch: Batch) -> int:
        """CTAs that share the keys of each sequence that decodes: as many as keep all multiprocessors at work.

        The order of additions depends on it.
        """
        if launcher.device.capability < (9, 0):
            return 1
        if launcher.batch_invariant:
            return 2
        ctas = batch.decoding * self.sizes.kv_heads * self.sizes.halves * -(-self.sizes.group // 16)
        most = MOST_LONG_PARTS if batch.long and not self.window else MOST_PARTS
        return power_of_two(launcher.device.multiprocessors // ctas, most)

    def _heads_at(self, step: StepMemory, rows: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Where q, k and v of the first row are, and how many numbers further on those of the next one."""
        s, places, strides, at = self.sizes, list[int](), list[int](), step.at("qkv")
        kv = s.kv_heads * s.size
        sizes = [(1 + self.gated) * s.heads * s.size, *[kv] * (self.has_keys + self.has_values)]
        for matrix in self.qkv:
            n, column = matrix.weights.shape[0], 0
            while column < n:
                places.append(at + 2 * column)
                strides.append(n)
                column += sizes[len(places) - 1]
            at += 2 * rows * n
        while len(places) < 3:  # values that are keys; where there are no keys, nobody looks
            places.append(places[-1])
            strides.append(strides[-1])
        (q, k, v), (q_stride, k_stride, v_stride) = places, strides
        return (q, k, v), (q_stride, k_stride, v_stride)

    def _scale_heads(self, launcher: Launcher, stream: int, step: StepMemory, rows: int) -> None:
        """The factors of norms over all heads of q, and of k."""
        s, ((q, k, _), (q_stride, k_stride, _)) = self.sizes, self._heads_at(step, rows)
        sizes = s.heads * s.size, s.kv_heads * s.size
        arguments = q, k, step.at("head_scales"), q_stride, k_stride, *sizes, launcher.epsilon
        launcher.launch(stream, "head_scales", {"TYPE": launcher.type}, (rows, 2), SCALE_THREADS, *arguments)

    def _rotate(self, launcher: Launcher, stream: int, step: StepMemory, rows: int) -> None:
        """Norms and RoPE of queries and keys; keys and values go to their pages of the KV cache."""
        s, at, rotation = self.sizes, step.at, self.rotation or Rotation(0, 0, 0)
        together = 1 if rows < ROTATED_ROWS else max(1, ROTATED_ROWS * 64 // s.wide)
        macros = {
            "TYPE": launcher.type,
            "HEAD": s.size,
            "PAIRS": rotation.pairs,
            "ADJACENT": int(rotation.adjacent),
            "NORMED": 0 if self.q_norm is None else 1 + self.joint_norms,
            "VALUES_NORMED": int(self.v_norm),
            "OUTPUT_GATE": int(self.gated),
            "FP8": int(s.fp8),
            "ROWS": together,
        }
        norms = [0 if norm is None else norm.pointer for norm in (self.q_norm, self.k_norm)]
        scales = at("head_scales") if self.joint_norms else 0
        places, strides = self._heads_at(step, rows)
        angles = at("angles") + 8 * rotation.first
        pointers = angles, at("positions"), at("sequences"), step.pages(self.place.table), *norms, scales
        grid = s.heads + 2 * s.kv_heads * self.has_keys, -(-rows // together)
        growth, length = self.temperature or (0.0, 1)
        numbers = launcher.epsilon, self.scale * math.log2(math.e), float(growth), length
        sizes = rotation.stride, s.heads, s.kv_heads, self.place.offset, step.pages_of_sequence, rows
        threads = s.wide // 2 * together
        launcher.launch(stream, "rotate", macros, grid, threads, *places, *strides, *pointers, *numbers, *sizes)

    def _attend(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, *, few: bool) -> None:
        """few: the rows of sequences that decode, a position each; else the blocks of prompts."""
        s, at = self.sizes, step.at
        parts = (batch.parts or self.parts_for(launcher, batch)) if few else 1
        warps, tiles = FEW_WARPS if few else MANY_WARPS // s.halves, 2 * s.tile_bytes  # of keys and of values
        queries = s.query_bytes(warps)
        stages = STAGES if STAGES * tiles + queries <= launcher.device.shared_bytes else 1
        macros = {
            "TYPE": launcher.type,
            "HEAD": s.size,
            "GROUP": s.group,
            "WARPS": warps,
            "STAGES": stages,
            "FEW": int(few),
            "MOST_PARTS": MOST_LONG_PARTS if parts > MOST_PARTS else MOST_PARTS,
            "WINDOWED": int(self.window > 0),
            "CAPPED": int(self.cap > 0),
            "OUTPUT_GATE": int(self.gated),
            "FP8": int(s.fp8),
        }
        shared_bytes = stages * tiles + queries
        if few:
            shared_bytes = max(shared_bytes, s.sum_bytes)  # the sums take the tiles' place
        heads = s.kv_heads * s.halves
        grid = (parts, heads * -(-s.group // 16), batch.decoding) if few else (batch.blocks, heads)
        (q, _, _), (q_stride, _, _) = self._heads_at(step, batch.rows)
        blocks = at("blocks") + (0 if few else 16 * batch.decoding)
        pointers = q, blocks, step.pages(self.place.table), at("attended")
        sinks = 0 if self.sinks is None else self.sinks.pointer
        numbers = q_stride, s.heads, s.kv_heads, self.place.offset, step.pages_of_sequence, self.window
        shape = {"shared_bytes": shared_bytes, "cluster": parts if few else 1}
        cap = self.cap * math.log2(math.e)
        launcher.launch(stream, "attend", macros, grid, warps * 32, *pointers, sinks, *numbers, cap, **shape)


def power_of_two(number: int, most: int) -> int:
    """The largest that is not above either, and at least 1."""
    return 1 << max(0, min(number, most).bit_length() - 1)
