"""One step of a layer's attention, its kernels on the CPU by fibers.h, beside the same launches in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from cuda_compiled import ADA, H200
from cuda_fibers import FiberLauncher, FiberStep, Matrix, Memory
from cuda_numpy import NumpyGpu

from billfish.backends.cuda.attention import DeviceAttention, HeadSizes, PagePlace, Rotation
from billfish.backends.cuda.step_memory import PAGE, Batch

# Before Hopper: no clusters, no bulk copies. With Hopper's shared memory, for heads of 512 numbers.
GPU = replace(ADA, shared_bytes=H200.shared_bytes)
EPSILON = 1e-5
OFFSET = 256  # of the layer in a page
PAGES = 4  # of a sequence, at most


@dataclass(frozen=True)
class Case:
    """starts: of sequences: the position of the token of each that decodes, then of the first of each prompt.
    lengths: of prompts."""

    size: int
    heads: int = 4
    kv_heads: int = 2
    pairs: int = 0
    adjacent: bool = False
    norms: str = ""  # "each" head, or all "together"
    v_norm: bool = False
    gated: bool = False
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    starts: tuple[int, ...] = (0, 140, 60)
    lengths: tuple[int, ...] = (9,)


class Launches(FiberLauncher):
    """q, k and v are there already, and nothing is made of the output."""

    def products(self, *_: Any, **__: Any) -> None:
        pass

    output = products


class NumpyLaunches(Launches):
    """The kernels in NumPy."""

    def launch(
        self, stream: int, name: str, macros: dict[str, Any], grid: tuple[int, ...], threads: int, *arguments: Any,
        **shape: int,
    ) -> None:  # fmt: skip
        self.launches.append(name)
        kernel = getattr(Kernels(), name)
        kernel({macro: str(value) for macro, value in macros.items()}, (*grid, 1, 1)[:3], *arguments)


class Kernels(NumpyGpu):
    """The functions of NumpyGpu, on any memory."""

    def __init__(self) -> None:
        pass

    def _room(self, pointer: int, nbytes: int) -> None:
        pass


class Step(FiberStep):
    """Of one layer."""

    pages_of_sequence = PAGES

    def pages(self, table: int) -> int:
        return self.at("pages")

    def put(self, name: str, array: np.ndarray) -> None:
        self._parts[name] = Memory(array)

    def get(self, name: str) -> np.ndarray:
        return self._parts[name].array


class Attention:
    """A case in memory, with random numbers. Positions before those of the step are in the KV cache; those behind are
    NaN."""

    def __init__(self, case: Case, fp8: bool) -> None:
        rng, self.sizes = np.random.default_rng(case.size), HeadSizes(case.heads, case.kv_heads, case.size, fp8)
        c, s, decoding = case, self.sizes, len(case.starts) - len(case.lengths)
        counts = [1] * decoding + list(c.lengths)
        rows = sum(counts)
        blocks, row = [], 0
        for i, (start, count) in enumerate(zip(c.starts, counts, strict=True)):
            if i < decoding:
                blocks.append((row, start, i, start))
            else:
                blocks += [
                    (row + j, min(s.query_block, count - j), i, start + j) for j in range(0, count, s.query_block)
                ]
            row += count
        self.batch = Batch(rows, decoding, prompts=len(c.lengths), blocks=len(blocks) - decoding)
        widths = [(1 + c.gated) * c.heads * c.size, c.kv_heads * c.size, c.kv_heads * c.size]
        self.qkv = (rng.standard_normal((rows, sum(widths))) * 2).astype(np.float16)
        self.pages = self._filled(c, rng)

        def vector(size: int, low: float, high: float) -> Memory:
            return Memory(rng.uniform(low, high, size).astype(np.float32))

        n = 1 if c.norms == "each" else c.heads
        counts_of = {"q_norm": n, "k_norm": min(n, c.kv_heads)}
        norms = {name: vector(count * c.size, 0.5, 1.5) for name, count in counts_of.items()}
        self.attention: Any = DeviceAttention(
            s,
            (Matrix(np.zeros((sum(widths), 8))),),
            Matrix(np.zeros((8, c.heads * c.size))),
            PagePlace(0, OFFSET),
            c.size**-0.5 / 2,
            Rotation(0, c.pairs, c.pairs, c.adjacent) if c.pairs else None,
            c.window,
            c.cap,
            **(norms if c.norms else {}),
            joint_norms=c.norms == "together",
            v_norm=c.v_norm,
            sinks=vector(c.heads, 0, 4) if c.sinks else None,
            gated=c.gated,
        )
        positions = np.concatenate([start + np.arange(n) for start, n in zip(c.starts, counts, strict=True)])
        angles = positions[:, None] * 10000.0 ** -(np.arange(c.pairs) / max(1, c.pairs))
        self._inputs = {
            "angles": np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32),
            "positions": positions.astype(np.int32),
            "sequences": np.repeat(np.arange(len(counts)), counts).astype(np.int32),
            "blocks": np.array(blocks, np.int32),
        }

    def _filled(self, c: Case, rng: np.random.Generator) -> np.ndarray:
        """All pages of all sequences: [sequences, PAGES, bytes]."""
        s, pages = self.sizes, np.full((len(c.starts), PAGES, OFFSET + self.sizes.page_bytes), 0xFF, np.uint8)
        tiles = self.tiles(pages)
        for sequence, start in enumerate(c.starts):
            for page in range(-(-start // PAGE)):
                count, shape = min(PAGE, start - page * PAGE), (2, s.kv_heads)
                tile, row_bytes = tiles[sequence, page], s.wide if s.fp8 else 2 * s.wide
                held = rng.standard_normal((*shape, count, s.wide)) * 2
                if s.fp8:
                    codes = np.clip(held * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
                    scales = np.exp2(rng.integers(-9, -5, (*shape, count))).astype(np.float32)
                    tile[..., PAGE * s.wide :][..., : 4 * count] = scales.view(np.uint8)
                else:
                    codes = held.astype(np.float16)
                tile[..., : count * row_bytes] = codes.view(np.uint8).reshape(*shape, -1)
        return pages

    def tiles(self, pages: np.ndarray) -> np.ndarray:
        """[sequences, PAGES, keys and values, kv_heads, bytes]."""
        return pages[:, :, OFFSET:].reshape(*pages.shape[:2], 2, self.sizes.kv_heads, self.sizes.tile_bytes)

    def codes(self, tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of a tile of E4M3: the numbers that codes stand for, each row as it lies, and the scales."""
        rows, scales = np.split(tile, [PAGE * self.sizes.wide])
        return rows.view(ml_dtypes.float8_e4m3fn).reshape(PAGE, -1).astype(np.float32), scales.view(np.float32)

    def run(self, launcher: Launches) -> dict[str, np.ndarray]:
        """q of all rows, the tiles of keys and values [..., bytes], and the outputs."""
        sizes = self.attention.memory(self.batch.rows) | {"x": 0}
        step: Any = Step(sizes)
        pages = Memory(self.pages.copy())
        addresses = pages.pointer + np.arange(self.pages.shape[0] * PAGES, dtype=np.uint64) * self.pages.shape[2]
        for name, array in (self._inputs | {"qkv": self.qkv.copy(), "pages": addresses}).items():
            step.put(name, array)
        self.attention.run(launcher, 0, step, self.batch)
        outputs = step.get("attended").view(np.float16).reshape(self.batch.rows, -1)
        return {"q": step.get("qkv"), "pages": pages.array, "outputs": outputs}

    def on_fibers(self) -> dict[str, np.ndarray]:
        return self.run(Launches(EPSILON, GPU))

    def in_numpy(self) -> dict[str, np.ndarray]:
        return self.run(NumpyLaunches(EPSILON, GPU))
