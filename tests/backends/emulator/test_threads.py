"""Threads in the Metal emulator: simdgroups, their matrices, positions, orders, barriers, atomics."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from common import assert_same_bits
from emulator_support import FLOAT, HALF, ORDERS

from billfish.backends import emulator
from billfish.core.arrays import bfloat16


def lanes(expression: str, x: np.ndarray, dtype: Any = None, threads: int | None = None) -> np.ndarray:
    """One value for each thread of one threadgroup, checked, the same in every order."""
    source = "uint i = thread_index_in_threadgroup; uint lane = thread_index_in_simdgroup; auto v = x[i]; y[i] = "
    source += f"{expression};"
    kernel = emulator.metal_kernel("lanes", ["x"], ["y"], source)
    results = []
    for order in ORDERS:
        with emulator.options(check=True, order=order, seed=5):
            results += kernel(
                inputs=[x],
                grid=(threads or x.size, 1, 1),
                threadgroup=(1024, 1, 1),
                output_shapes=[x.shape],
                output_dtypes=[dtype or x.dtype],
            )
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()
    return results[0]


class TestSimdgroups:
    x = np.random.default_rng(7).standard_normal(96).astype(np.float32)

    def rows(self) -> np.ndarray:
        return self.x.reshape(-1, 32)

    @pytest.mark.parametrize(
        ("expression", "source"),
        [
            ("simd_shuffle(v, 5)", lambda lane: 5),
            ("simd_broadcast(v, 31)", lambda lane: 31),
            ("simd_broadcast_first(v)", lambda lane: 0),
            ("simd_shuffle(v, (lane * 7) % 32)", lambda lane: lane * 7 % 32),
            ("simd_shuffle_xor(v, 11)", lambda lane: lane ^ 11),
            ("simd_shuffle_down(v, 3)", lambda lane: lane + 3 if lane < 29 else lane),
            ("simd_shuffle_up(v, 3)", lambda lane: lane - 3 if lane >= 3 else lane),
            ("simd_shuffle_rotate_down(v, 3)", lambda lane: (lane + 3) % 32),
            ("simd_shuffle_rotate_up(v, 3)", lambda lane: (lane - 3) % 32),
            ("quad_broadcast(v, 2)", lambda lane: lane // 4 * 4 + 2),
            ("quad_shuffle_xor(v, 1)", lambda lane: lane ^ 1),
        ],
    )
    def test_shuffles(self, expression: str, source: Any) -> None:
        expected = self.rows()[:, [source(lane) for lane in range(32)]].reshape(-1)
        assert_same_bits(lanes(expression, self.x), expected)

    @pytest.mark.parametrize("name", ["sum", "max", "min", "product"])
    def test_reductions(self, name: str) -> None:
        numpy = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}[name]
        expected = np.repeat(numpy(self.rows(), axis=1), 32)
        np.testing.assert_allclose(lanes(f"simd_{name}(v)", self.x), expected, rtol=1e-5)
        quads = np.repeat(numpy(self.x.reshape(-1, 4), axis=1), 4)
        np.testing.assert_allclose(lanes(f"quad_{name}(v)", self.x), quads, rtol=1e-5)

    def test_bits_and_votes(self) -> None:
        x = np.random.default_rng(8).integers(0, 2**32, 64, dtype=np.uint32)
        for name, numpy in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
            expected = np.repeat(numpy.reduce(x.reshape(-1, 32), axis=1), 32)
            assert_same_bits(lanes(f"simd_{name}(v)", x), expected)
        bits = (x.reshape(-1, 32) & 1).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        assert_same_bits(lanes("uint(ulong(simd_ballot(v & 1)))", x), np.repeat(bits.sum(1), 32).astype(np.uint32))
        assert (lanes("simd_any(lane == 3) && !simd_all(lane == 3)", x) == 1).all()

    def test_prefixes(self) -> None:
        x = np.arange(64, dtype=np.int32)
        inclusive = np.cumsum(x.reshape(-1, 32), axis=1).reshape(-1).astype(np.int32)
        assert_same_bits(lanes("simd_prefix_inclusive_sum(v)", x), inclusive)
        assert_same_bits(lanes("simd_prefix_exclusive_sum(v)", x), inclusive - x)

    def test_a_simdgroup_can_be_partial(self) -> None:
        x = np.arange(40, dtype=np.int32)
        expected = np.where(x < 32, x[:32].sum(), x[32:].sum()).astype(np.int32)
        assert_same_bits(lanes("simd_sum(v)", x), expected)

    def test_lanes_that_have_returned_are_left_out(self) -> None:
        source = "uint i = thread_position_in_grid.x; if (i % 32 >= 20) return; y[i] = simd_sum(x[i]);"
        kernel = emulator.metal_kernel("early", ["x"], ["y"], source)
        x = np.arange(64, dtype=np.int32)
        for order in ORDERS:
            with emulator.options(check=True, order=order):
                (y,) = kernel(
                    inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)], output_dtypes=[np.int32]
                )
            assert (y.reshape(2, 32)[:, :20] == x.reshape(2, 32)[:, :20].sum(1, keepdims=True)).all()


class TestMatrices:
    @pytest.mark.parametrize("dtype", [HALF, bfloat16, FLOAT])
    @pytest.mark.parametrize("transpose", [False, True])
    def test_multiply(self, dtype: Any, transpose: bool) -> None:
        source = """
            simdgroup_matrix<T, 8, 8> p, q;
            simdgroup_load(p, a, 16, ulong2(3, 1), flip);
            simdgroup_load(q, b, 8);
            simdgroup_matrix<float, 8, 8> r = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
            simdgroup_multiply_accumulate(r, p, q, r);
            simdgroup_store(r, y, 8, ulong2(0, 0), flip);
        """
        rng = np.random.default_rng(9)
        a, b = rng.integers(-8, 8, (16, 16)).astype(dtype), rng.integers(-8, 8, (8, 8)).astype(dtype)
        kernel = emulator.metal_kernel("mma", ["a", "b"], ["y"], source)
        with emulator.options(check=True), emulator.launches() as log:
            (y,) = kernel(
                inputs=[a, b],
                template=[("T", dtype), ("flip", transpose)],
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(8, 8)],
                output_dtypes=[np.float32],
            )
        part = a[1:9, 3:11].astype(np.float32)
        expected = (part.T if transpose else part) @ b.astype(np.float32) + 1
        assert_same_bits(y, expected.T if transpose else expected)
        assert log[0].matrix_multiplies == 1

    def test_elements_and_diagonal(self) -> None:
        source = """
            simdgroup_float8x8 m(2.0f);
            y[2 * thread_index_in_simdgroup] = m.thread_elements()[0];
            y[2 * thread_index_in_simdgroup + 1] = m.thread_elements()[1];
            simdgroup_store(m, y + 64);
        """
        kernel = emulator.metal_kernel("diagonal", [], ["y"], source)
        (y,) = kernel(inputs=[], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(128,)], output_dtypes=[FLOAT])
        assert_same_bits(y[64:].reshape(8, 8), 2 * np.eye(8, dtype=np.float32))
        # The layout that MLX's kernels rely on (BaseMMAFrag in its steel/gemm/mma.h).
        for lane in range(32):
            row, column = (lane // 4 & 4) + lane // 2 % 4, (lane // 4 & 2) * 2 + lane % 2 * 2
            assert y[2 * lane] == y[64 + 8 * row + column]
            assert y[2 * lane + 1] == y[64 + 8 * row + column + 1]


class TestThreads:
    @pytest.mark.parametrize(
        ("grid", "threadgroup"), [((7, 5, 3), (4, 2, 2)), ((100, 1, 1), (64, 1, 1)), ((3, 3, 3), (8, 8, 8))]
    )
    @pytest.mark.parametrize("order", ORDERS)
    def test_positions_with_partial_threadgroups(self, grid: Any, threadgroup: Any, order: str) -> None:
        source = """
            uint3 p = thread_position_in_grid, l = thread_position_in_threadgroup, g = threadgroup_position_in_grid;
            uint3 s = threads_per_threadgroup, n = threads_per_grid, k = threadgroups_per_grid;
            uint at = 4 * (p.x + n.x * (p.y + n.y * p.z));
            y[at] = thread_index_in_threadgroup == l.x + s.x * (l.y + s.y * l.z);
            y[at + 1] = thread_index_in_simdgroup == thread_index_in_threadgroup % 32
                && simdgroup_index_in_threadgroup == thread_index_in_threadgroup / 32
                && simdgroups_per_threadgroup == (s.x * s.y * s.z + 31) / 32;
            y[at + 2] = g.x + k.x * (g.y + k.y * g.z);
            y[at + 3] = s.x * s.y * s.z;
        """
        kernel = emulator.metal_kernel("where", [], ["y"], source)
        count = grid[0] * grid[1] * grid[2]
        with emulator.options(check=True, order=order):
            (y,) = kernel(
                inputs=[], grid=grid, threadgroup=threadgroup, output_shapes=[(count, 4)], output_dtypes=[np.uint32]
            )
        most = np.minimum(threadgroup, grid)
        groups = -(-np.array(grid) // most)
        for i, (z, yy, x) in enumerate(itertools.product(*(range(n) for n in reversed(grid)))):
            at = np.array([x, yy, z]) // most
            size = np.minimum(most, np.array(grid) - at * most).prod()
            assert y[i].tolist() == [1, 1, at[0] + groups[0] * (at[1] + groups[1] * at[2]), size]

    def test_orders_differ_and_random_follows_its_seed(self) -> None:
        source = """
            device atomic_uint* turn = (device atomic_uint*)n;
            y[thread_position_in_grid.x] = atomic_fetch_add_explicit(turn, 1u, memory_order_relaxed);
        """
        kernel = emulator.metal_kernel("when", [], ["y", "n"], source)

        def turns(order: str, seed: int = 0) -> list[int]:
            with emulator.options(order=order, seed=seed):
                y, _ = kernel(
                    inputs=[],
                    grid=(128, 1, 1),
                    threadgroup=(64, 1, 1),
                    output_shapes=[(128,), (1,)],
                    output_dtypes=[np.uint32] * 2,
                    init_value=0,
                )
            return y.tolist()

        assert turns("forward") == list(range(128))
        assert turns("reverse") == list(range(127, -1, -1))
        assert turns("random", 1) == turns("random", 1) != turns("random", 2)
        assert sorted(turns("random", 1)) == list(range(128))

    def test_threadgroup_memory_and_barriers(self) -> None:
        source = """
            threadgroup float tile[4][64], sum;
            threadgroup unsigned int unused[2];
            uint i = thread_index_in_threadgroup;
            tile[i / 64][i % 64] = x[thread_position_in_grid.x];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (i == 0) {
                sum = 0;
                for (int j = 0; j < 256; j++) sum += tile[j / 64][j % 64];
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[thread_position_in_grid.x] = sum;
        """
        x = np.arange(1024, dtype=np.float32)
        kernel = emulator.metal_kernel("sum", ["x"], ["y"], source)
        for order in ORDERS:
            with emulator.options(check=True, order=order), emulator.launches() as log:
                (y,) = kernel(
                    inputs=[x],
                    grid=(1024, 1, 1),
                    threadgroup=(256, 1, 1),
                    output_shapes=[(1024,)],
                    output_dtypes=[FLOAT],
                )
            assert_same_bits(y, np.repeat(x.reshape(4, 256).sum(1), 256))
        (launch,) = log
        assert launch.threadgroup_variables == {"tile": 1024, "sum": 4, "unused": 8}
        assert launch.threadgroup_memory == 1056
        assert launch.threadgroup_barriers == 8
        assert launch.read == {"x": 4096, "y": 0}
        assert launch.written == {"x": 0, "y": 4096}
        assert launch.threadgroup_written["tile"] == 4096
        assert launch.threadgroup_read["tile"] == 4096

    def test_atomics(self) -> None:
        source = """
            float v = x[thread_position_in_grid.x];
            atomic_fetch_add_explicit(&y[0], v, memory_order_relaxed);
            atomic_fetch_max_explicit((device atomic_int*)&y[1], int(v), memory_order_relaxed);
            float seen = atomic_load_explicit(&y[2], memory_order_relaxed);
            while (!atomic_compare_exchange_weak_explicit(
                &y[2], &seen, seen + 1, memory_order_relaxed, memory_order_relaxed)) {}
        """
        x = np.arange(300, dtype=np.float32)
        kernel = emulator.metal_kernel("atomics", ["x"], ["y"], source, atomic_outputs=True)
        with emulator.options(check=True, order="random"):
            (y,) = kernel(
                inputs=[x],
                grid=(300, 1, 1),
                threadgroup=(64, 1, 1),
                output_shapes=[(3,)],
                output_dtypes=[FLOAT],
                init_value=0,
            )
        assert y[0] == x.sum()
        assert y[1].view(np.int32) == 299
        assert y[2] == 300
