"""The Metal emulator: numbers, threads, simdgroups, memory, arguments."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import ALL_HALVES, assert_same_bits

from billfish.arrays import bfloat16
from billfish.backends.metal import emulator
from billfish.errors import BillfishError

HALF = np.dtype(np.float16)
FLOAT = np.dtype(np.float32)
ALL_BFLOATS = np.arange(65536, dtype=np.uint16).view(bfloat16)
ORDERS = ("forward", "reverse", "random")


def each(source: str, inputs: list[np.ndarray], dtype: Any, n: int | None = None, **others: Any) -> np.ndarray:
    """`y[i] = source`, for each element of the first input. Inputs are a, b, c."""
    n = inputs[0].size if n is None else n
    names = ["a", "b", "c"][: len(inputs)]
    kernel = emulator.metal_kernel("each", names, ["y"], f"uint i = thread_position_in_grid.x; {source}", **others)
    (y,) = kernel(inputs=inputs, grid=(n, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(n,)], output_dtypes=[dtype])
    return y


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


class TestNumbers:
    """Half and bfloat are rounded after each operation, to the bit."""

    @pytest.mark.parametrize("dtype", [HALF, bfloat16])
    @pytest.mark.parametrize("operation", ["+", "-", "*", "/"])
    def test_arithmetic(self, dtype: Any, operation: str) -> None:
        values = (ALL_HALVES if dtype == HALF else ALL_BFLOATS).astype(dtype)
        a, b = values, np.random.default_rng(1).permutation(values)
        with np.errstate(all="ignore"):
            # Exact to the last bit in spite of two roundings: float has more than twice the bits of either.
            wide = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[operation]
            expected = wide(a.astype(np.float32), b.astype(np.float32)).astype(dtype)
        assert_same_bits(each(f"y[i] = a[i] {operation} b[i];", [a, b], dtype), expected)

    @pytest.mark.parametrize("dtype", [HALF, bfloat16])
    def test_products_are_rounded_before_they_are_added(self, dtype: Any) -> None:
        rng = np.random.default_rng(2)
        a, b, c = rng.standard_normal((3, 10000)).astype(dtype)
        product = (a.astype(np.float32) * b.astype(np.float32)).astype(dtype)
        expected = (product.astype(np.float32) + c.astype(np.float32)).astype(dtype)
        assert_same_bits(each("y[i] = a[i] * b[i] + c[i];", [a, b, c], dtype), expected)

    def test_float_is_not_contracted(self) -> None:
        a, b, c = np.random.default_rng(3).standard_normal((3, 10000)).astype(np.float32)
        assert_same_bits(each("y[i] = a[i] * b[i] + c[i];", [a, b, c], FLOAT), a * b + c)

    @pytest.mark.parametrize("dtype", [HALF, bfloat16])
    def test_conversions(self, dtype: Any) -> None:
        values = (ALL_HALVES if dtype == HALF else ALL_BFLOATS).astype(dtype)
        with np.errstate(all="ignore"):
            assert_same_bits(each("y[i] = float(a[i]);", [values], FLOAT), values.astype(np.float32))
        floats = np.random.default_rng(4).integers(0, 2**32, 50000, dtype=np.uint32).view(np.float32)
        name = "half" if dtype == HALF else "bfloat"
        with np.errstate(all="ignore"):
            assert_same_bits(each(f"y[i] = {name}(a[i]);", [floats], dtype), floats.astype(dtype))

    def test_fma_rounds_once(self) -> None:
        rng = np.random.default_rng(5)
        a, b, c = rng.standard_normal((3, 20000)).astype(np.float16)
        exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        assert_same_bits(each("y[i] = fma(a[i], b[i], c[i]);", [a, b, c], HALF), exact.astype(np.float16))

    def test_literals_have_no_double(self) -> None:
        header = "template <class T> T third(T) { return 1.0 / 3.0; }\n"
        y = each(
            "y[i] = (sizeof(0.5) == 4) + (sizeof(1e-3) == 4) + (third(1.0f) == 1.0f / 3.0f) + (sizeof(1.5h) == 2);",
            [np.zeros(8, np.float32)],
            np.int32,
            header=header,
        )
        assert (y == 4).all()

    def test_functions(self) -> None:
        x = np.linspace(0.1, 3, 256, dtype=np.float32)
        for name in ("exp", "exp2", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "trunc", "rint"):
            np.testing.assert_allclose(each(f"y[i] = metal::{name}(a[i]);", [x], FLOAT), getattr(np, name)(x), 1e-6)
        np.testing.assert_allclose(each("y[i] = metal::precise::rsqrt(a[i]);", [x], FLOAT), 1 / np.sqrt(x), 1e-6)
        assert_same_bits(
            each("y[i] = clamp(a[i], 0.5f, 1.0f);", [x], FLOAT), np.clip(x, np.float32(0.5), np.float32(1))
        )

    def test_integers(self) -> None:
        x = np.random.default_rng(6).integers(0, 2**32, 1000, dtype=np.uint32)
        assert_same_bits(each("y[i] = popcount(a[i]);", [x], np.uint32), np.bitwise_count(x).astype(np.uint32))
        assert_same_bits(each("y[i] = extract_bits(a[i], 5, 7);", [x], np.uint32), x >> 5 & 127)
        assert_same_bits(
            each("y[i] = mulhi(a[i], 0x9E3779B9u);", [x], np.uint32),
            (x.astype(np.uint64) * 0x9E3779B9 >> 32).astype(np.uint32),
        )

    def test_vectors(self) -> None:
        x = np.arange(64, dtype=np.float16)
        source = """
            if (i >= 16) return;
            half4 v = ((const device half4*)a)[i];
            half4 w = half4(v.wz, v.y, half(float(v.x)));
            ((device half4*)y)[i] = w * half(2) + half4(1);
        """
        y = each(source, [x], HALF)
        assert_same_bits(y[:64], (x.reshape(-1, 4)[:, ::-1].reshape(-1) * np.float16(2) + np.float16(1)))


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


class TestArguments:
    def test_mlx_arrays_in_and_out(self) -> None:
        a = mx.random.normal(shape=(4, 16)).astype(mx.bfloat16)
        source = "uint elem = thread_position_in_grid.x;\nT tmp = inp[elem];\nout[elem] = metal::exp(tmp);\n"
        kernel = emulator.metal_kernel(name="myexp", input_names=["inp"], output_names=["out"], source=source)
        (b,) = kernel(
            inputs=[a],
            template=[("T", mx.bfloat16)],
            grid=(a.size, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[a.shape],
            output_dtypes=[a.dtype],
            stream=mx.gpu,
        )
        assert isinstance(b, mx.array)
        assert b.dtype == mx.bfloat16
        assert mx.allclose(b, mx.exp(a), rtol=2**-7).item()

    def test_it_can_stand_in_for_mlx(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mx.fast, "metal_kernel", emulator.metal_kernel)
        kernel = mx.fast.metal_kernel(
            name="twice",
            input_names=["x"],
            output_names=["y"],
            source="y[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];",
        )
        (y,) = kernel(
            inputs=[mx.arange(32)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[mx.int32],
        )
        assert y.tolist() == list(range(0, 64, 2))

    def test_strides(self) -> None:
        x = np.arange(48, dtype=np.float32).reshape(6, 8)[:, ::2].T
        source = """
            uint i = thread_position_in_grid.x;
            y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
        """
        for contiguous in (True, False):
            kernel = emulator.metal_kernel("strided", ["x"], ["y"], source, ensure_row_contiguous=contiguous)
            with emulator.options(check=True):
                (y,) = kernel(
                    inputs=[x], grid=(24, 1, 1), threadgroup=(24, 1, 1), output_shapes=[x.shape], output_dtypes=[FLOAT]
                )
            assert_same_bits(y, x)

    def test_small_and_scalar_inputs(self) -> None:
        y = each(
            "y[i] = a[i] * b + c[0];",
            [np.arange(9, dtype=np.float32), np.float32(3), np.asarray([2], np.float32)],
            FLOAT,
        )
        assert_same_bits(y, np.arange(9, dtype=np.float32) * 3 + 2)

    def test_python_numbers(self) -> None:
        kernel = emulator.metal_kernel("numbers", ["n", "f", "b"], ["y"], "y[0] = n + f + b;")
        (y,) = kernel(
            inputs=[3, 0.5, True], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[FLOAT]
        )
        assert y[0] == 4.5

    def test_outputs_without_init_value_are_not_numbers(self) -> None:
        kernel = emulator.metal_kernel("nothing", [], ["y", "z"], "")
        y, z = kernel(
            inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,), (4,)], output_dtypes=[FLOAT, HALF]
        )
        assert np.isnan(y).all()
        assert np.isnan(z).all()

    def test_init_value(self) -> None:
        kernel = emulator.metal_kernel("nothing", [], ["y"], "")
        (y,) = kernel(
            inputs=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(4,)],
            output_dtypes=[bfloat16],
            init_value=1.5,
        )
        assert (y == 1.5).all()

    def test_verbose(self, capsys: pytest.CaptureFixture[str]) -> None:
        kernel = emulator.metal_kernel("loud", [], ["y"], "y[0] = 1;")
        kernel(
            inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[FLOAT], verbose=True
        )
        assert capsys.readouterr().out.startswith(
            "Generated source code for `loud`:\n```\n[[kernel]] void custom_kernel_loud_float("
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"grid": (1, 1)}, r"grid: got \(1, 1\); takes three numbers"),
            ({"grid": (0, 1, 1)}, r"grid: got \(0, 1, 1\); takes three numbers, each 1 or more"),
            (
                {"grid": (64, 64, 1), "threadgroup": (64, 64, 1)},
                r"threadgroup: got \(64, 64, 1\); takes at most 1024 threads",
            ),
            ({"inputs": []}, "inputs: got 0; takes 1 for small"),
            ({"inputs": ["x"]}, r"inputs \(x\): got a str; takes NumPy or MLX arrays"),
            ({"output_shapes": [(1,), (1,)]}, "output_shapes: got 2; takes 1"),
            ({"output_dtypes": []}, "output_dtypes: got 0; takes 1"),
            ({"template": [("T", np.float64)]}, "template: got float64; takes one of"),
            ({"template": [("T", 0.5)]}, "template: got 0.5; takes one of"),
        ],
    )
    def test_bad_arguments(self, change: dict[str, Any], message: str) -> None:
        good = {
            "inputs": [np.zeros(8, np.float32)],
            "grid": (1, 1, 1),
            "threadgroup": (1, 1, 1),
            "output_shapes": [(1,)],
            "output_dtypes": [FLOAT],
        }
        kernel = emulator.metal_kernel("small", ["x"], ["y"], "y[0] = x[0];")
        with pytest.raises(BillfishError, match=message):
            kernel(**(good | change))

    def test_bad_options(self) -> None:
        with (
            pytest.raises(BillfishError, match="order: got 'sideways'; takes one of forward, reverse, random"),
            emulator.options(order="sideways"),
        ):
            pass

    def test_comments_are_comments(self) -> None:
        source = """
            // At first; threadgroup memory is not there;
            /* a comment; threadgroup float gone[4];
            threadgroup words that mean nothing; */
            threadgroup float tile[8]; // "half of a string
            tile[i % 8] = 0.5; // 1.5h
            y[i] = tile[i % 8] + /* vec<float, 2>( */ 1;
        """
        assert (each(source, [np.zeros(8, np.float32)], FLOAT) == 1.5).all()

    def test_a_declaration_that_is_not_understood(self) -> None:
        kernel = emulator.metal_kernel("odd", [], ["y"], "threadgroup float tile[2] = 1;")
        call: dict[str, Any] = {"inputs": [], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        with pytest.raises(
            emulator.CompileError, match=r"does not understand this declaration: threadgroup float tile"
        ):
            kernel(**call, output_shapes=[(1,)], output_dtypes=[FLOAT])

    def test_a_kernel_that_does_not_compile(self) -> None:
        kernel = emulator.metal_kernel("broken", ["x"], ["y"], "y[0] = x[0]\ny[1] = undeclared;")
        with pytest.raises(emulator.CompileError, match=r"broken does not compile:\nbroken:1:\d+: error: expected ';'"):
            kernel(
                inputs=[np.zeros(8, np.float32)],
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[(2,)],
                output_dtypes=[FLOAT],
            )


class TestHostile:
    """What a careless compiler could do."""

    def halves(self, source: str, x: np.ndarray, hostile: bool) -> np.ndarray:
        with emulator.options(hostile=hostile):
            return each(source, [x], HALF)

    def test_half_subnormals_are_flushed(self) -> None:
        x = ALL_HALVES[np.isfinite(ALL_HALVES)]
        small = np.abs(x) < 2.0**-14
        for source in (
            "y[i] = a[i] * 1024.0h;",
            "y[i] = half(float(a[i]) * 1024.0);",
            "y[i] = half4(a[i])[2] * 1024.0h;",
        ):
            with np.errstate(over="ignore"):
                plain = x * np.float16(1024)
            assert_same_bits(self.halves(source, x, False), plain)
            flushed = self.halves(source, x, True)
            assert (flushed[small] == 0).all()
            assert_same_bits(flushed[~small], plain[~small])

    def test_results_are_flushed_too(self) -> None:
        x = np.full(8, 2.0**-13, np.float16)
        assert (self.halves("y[i] = a[i] * 0.25h;", x, False) == 2.0**-15).all()
        assert (self.halves("y[i] = a[i] * 0.25h;", x, True) == 0).all()
        assert (self.halves("y[i] = half(float(a[i]) * 0.25);", x, True) == 0).all()

    def test_vectors_and_constants(self) -> None:
        x = ALL_HALVES[: 16 * 1024]  # positive, and not too large
        source = "if (i % 4 == 0) ((device half4*)y)[i / 4] = ((const device half4*)a)[i / 4] * half4(1, 2, 0.5, 1.5);"
        expected = x * np.tile(np.array([1, 2, 0.5, 1.5], np.float16), x.size // 4)
        assert_same_bits(self.halves(source, x, False), expected)
        small = (x < 2.0**-14) | (expected < 2.0**-14)
        assert_same_bits(self.halves(source, x, True), np.where(small, np.float16(0), expected))

    def test_comparisons_see_zero(self) -> None:
        x = np.full(8, 2.0**-15, np.float16)
        assert (self.halves("y[i] = a[i] > half(0);", x, False) == 1).all()
        assert (self.halves("y[i] = a[i] > half(0);", x, True) == 0).all()

    def test_moving_bits_does_not_flush(self) -> None:
        x = np.full(8, 2.0**-15, np.float16)
        assert (self.halves("y[i] = as_type<half>(ushort(as_type<ushort>(a[i]) + 1));", x, True) > 0).all()

    def test_sums_are_taken_in_another_order(self) -> None:
        # (a + b) - a is b for fast mathematics, and 0 for the tiny b of this test otherwise.
        a, b = np.full(8, 1e8, np.float32), np.full(8, 1, np.float32)
        source = "y[i] = (a[i] + b[i]) - a[i];"
        assert (each(source, [a, b], FLOAT) == 0).all()
        with emulator.options(hostile=True):
            assert (each(source, [a, b], FLOAT) == 1).all()
