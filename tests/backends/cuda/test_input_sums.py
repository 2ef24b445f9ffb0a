"""Sums over inputs, the kernels on the CPU (fibers.h), against float64; and that they compile."""

from __future__ import annotations

import numpy as np
import pytest
from cases import first
from cuda_compiled import ADA, resources
from cuda_fibers import FiberLauncher, Memory

from billfish.backends.cuda.driver import signature
from billfish.backends.cuda.input_sums import OUTER_THREADS, OUTER_TILE, SQUARES_COLUMNS, SQUARES_THREADS


def numbers(rows: int, k: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float16)


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 8, 8), (33, 136, 264), (70, 128, 40)])
def test_outer_products_are_added(rows, k, n):
    x, y = Memory(numbers(rows, k, 1)), Memory(numbers(rows, n, 2))
    before = np.random.default_rng(3).standard_normal((k, n)).astype(np.float32)
    sums = Memory(before.copy())
    grid = -(-n // OUTER_TILE), -(-k // OUTER_TILE)
    arguments = x.pointer, y.pointer, sums.pointer, rows, k, n
    FiberLauncher(1e-5, ADA).launch(0, "add_outer", {"TYPE": "F16"}, grid, OUTER_THREADS, *arguments)
    expected = before + x.array.astype(np.float64).T @ y.array
    np.testing.assert_allclose(sums.array, expected, rtol=0, atol=1e-5 * rows)


def test_an_outer_product_with_itself_is_symmetric():
    x, sums = Memory(numbers(50, 200, 4)), Memory(np.zeros((200, 200), np.float32))
    arguments = x.pointer, x.pointer, sums.pointer, 50, 200, 200
    FiberLauncher(1e-5, ADA).launch(0, "add_outer", {"TYPE": "F16"}, (2, 2), OUTER_THREADS, *arguments)
    assert np.array_equal(sums.array, sums.array.T)


@pytest.mark.parametrize(("rows", "k"), [(1, 8), (37, 136)])
def test_squares_are_added(rows, k):
    x, sums = Memory(numbers(rows, k, 5)), Memory(np.arange(k, dtype=np.float64))
    arguments = x.pointer, sums.pointer, rows, k
    grid = (-(-k // SQUARES_COLUMNS),)
    FiberLauncher(1e-5, ADA).launch(0, "add_squares", {"TYPE": "F16"}, grid, SQUARES_THREADS, *arguments)
    np.testing.assert_allclose(sums.array, np.arange(k) + np.square(x.array, dtype=np.float64).sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("arch", first(1, ["sm_90a", "sm_80"]))
def test_they_compile_without_spills(arch):
    for type in ("F16", "BF16"):
        assert resources("add_outer.cu", {"TYPE": type}, arch) <= 128  # two CTAs of a multiprocessor
        resources("add_squares.cu", {"TYPE": type}, arch)


def test_a_launch_takes_what_the_kernel_takes():
    assert signature("add_outer.cu", "marlin_add_outer") == "pppiii"
    assert signature("add_squares.cu", "marlin_add_squares") == "ppii"
