"""An RMSNorm folded into the products around it, on the CPU (fibers.h), against float64; and that they compile."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pytest
from cases import diagonal, first
from cuda_compiled import ADA, H200, resources
from cuda_fibers import compiled

import billfish as bf
from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.packed import PackedBricks
from billfish.backends.cuda.plans import CTA_BYTES, Gemm, plan

HIDDEN, INNER, EPSILON, SCALE = 192, 320, 1e-5, 0.5


def launched(
    gemm: Gemm, bricks: PackedBricks, x: np.ndarray, y: np.ndarray, norm: tuple[np.ndarray | None, ...]
) -> None:
    """A product on the CPU, as it is planned for a GPU before Hopper."""
    chosen = plan(gemm, ADA)
    assert chosen is not None
    launch = chosen.launch
    pointers = bricks.bricks, bricks.row_scale, x, None, y
    slots = np.zeros(128, np.uint64)
    slots = slots[-slots.ctypes.data % 64 // 8 :]  # the first argument is a tensor map, which is at a multiple of 64
    slots[1:6] = [0 if array is None else array.ctypes.data for array in pointers]
    sizes = slots[6:10].view(np.int32)[::2]
    sizes[:] = gemm.m, gemm.n, gemm.k, gemm.k
    slots[10:14] = [0 if array is None else array.ctypes.data for array in norm]
    slots[14:16].view(np.float32)[::2] = EPSILON, SCALE
    run = compiled("gemm_small", dict(launch.macros), launch.name).run
    grid = np.array((*launch.grid, 1), np.int32)
    run(ctypes.c_void_p(grid.ctypes.data), launch.threads, ctypes.c_void_p(slots.ctypes.data))


def packed(n: int, k: int, seed: int) -> tuple[PackedBricks, np.ndarray]:
    w = np.random.default_rng(seed).standard_normal((n, k)) / np.sqrt(k)
    tensor = bf.quantize(w.astype(np.float32), "q4_0", method="rtn")
    return PackedBricks.of(tensor), bf.dequantize(tensor).astype(np.float64)


class Folded:
    """Two products, and the norm between them, of rows whose size is `size`."""

    def __init__(self, rows: int, size: float, invariant: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.first, self.first_w = packed(HIDDEN, INNER, 1)
        self.second, self.second_w = packed(96, HIDDEN, 2)
        self.x = rng.standard_normal((rows, INNER)).astype(np.float16)
        self.hidden = (rng.standard_normal((rows, HIDDEN)) * size).astype(np.float32)
        self.weight = (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)
        self.invariant = invariant

    def run(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """The residual stream, and the output of the second product, of some rows."""
        x, hidden = np.ascontiguousarray(self.x[rows]), self.hidden[rows].copy()
        m = len(x)
        squares = np.full((m, HIDDEN // 16), np.nan, np.float32)
        factors = np.full((m, 2), np.nan, np.float32)
        factors[:, 0] = 1 / np.sqrt((hidden**2).mean(axis=1) + EPSILON)
        between, y = np.full((m, HIDDEN), np.nan, np.float16), np.full((m, 96), np.nan, np.float16)
        about = {"batch_invariant": self.invariant}
        norm = hidden, self.weight, squares, factors
        launched(Gemm(self.first.kind, m, HIDDEN, INNER, norm="first", **about), self.first, x, between, norm)
        norm = None, None, squares, factors
        launched(Gemm(self.second.kind, m, 96, HIDDEN, norm="second", **about), self.second, between, y, norm)
        np.testing.assert_allclose(factors[:, 0], 1 / np.sqrt((hidden**2).mean(axis=1) + EPSILON), rtol=1e-6)
        return hidden, y

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        hidden = self.hidden + SCALE * self.x.astype(np.float64) @ self.first_w.T
        normalized = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + EPSILON) * self.weight
        return hidden, normalized @ self.second_w.T


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < 1e-3


@pytest.mark.parametrize(("rows", "size"), first(1, [(33, 1e5), (1, 1e-3), (3, 1e5), (9, 1e-3)]))
def test_two_products_do_the_norm_between_them(rows, size):
    """Rows may be far larger than a float16 number, and small ones may grow by a thousand times."""
    both = Folded(rows, size)
    for found, expected in zip(both.run(slice(None)), both.expected(), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("cuts", first(1, [((0, 1),), ((0, 4, 11),)]), ids=str)
def test_a_row_has_the_same_bits_in_any_batch(cuts):
    """Small numbers, which may grow by a thousand times."""
    both = Folded(11, 1e-3, invariant=True)
    together = both.run(slice(None))
    for found, expected in zip(together, both.expected(), strict=True):
        assert_close(found, expected)
    for start, stop in pairwise(cuts):
        for some, all in zip(both.run(slice(start, stop)), together, strict=True):
            assert np.array_equal(some, all[start:stop])


KINDS = {"q4_0": Kind("Int4", "ScaleF16", "NONE", 4), "q4_1": Kind("Int4", "ScaleF16", "MINIMUM", 4, 8)}


@pytest.mark.parametrize(("m", "kind"), diagonal(2, [1, 2, 8], KINDS))
def test_folded_products_compile_without_spills(m, kind):
    for n, k, more in ((4096, 14336, {"norm": "first"}), (28672, 4096, {"norm": "second", "gate": "silu"})):
        chosen = plan(Gemm(KINDS[kind], m, n, k, **more), H200)
        assert chosen is not None
        resources(chosen.launch.source, dict(chosen.launch.macros), "sm_90a")


def test_q_k_v_have_room_beside_the_product_before():
    """So that their weights are on the way when that ends."""
    kind = Kind("Int4", "ScaleF16", "NONE", 4)
    down, qkv = (
        plan(Gemm(kind, 1, n, k, norm=norm), H200) for n, k, norm in ((4096, 14336, "first"), (6144, 4096, "second"))
    )
    assert down is not None
    assert qkv is not None
    assert down.launch.shared_bytes + qkv.launch.shared_bytes + CTA_BYTES <= H200.shared_bytes
    registers = [
        resources("gemm_small.cu", dict(one.launch.macros), "sm_90a") * one.launch.threads for one in (down, qkv)
    ]
    assert sum(registers) <= 65536
