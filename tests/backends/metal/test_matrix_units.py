"""The kernel for an M5's matrix units, on the emulator's reference of Metal 4's matmul2d; and who is given it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from common import assert_same_bits, gaussian
from metal_support import BFLOAT16, FLOAT16, FLOAT32, assert_within_contract, multiply, quantized

from billfish.backends import emulator
from billfish.backends.metal import Kernels, MetalBackend, kernels, lay_out, matrix_units

HEADER = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\nusing namespace mpp::tensor_ops;\n"


def run(source: str, threads: int, *arrays: np.ndarray, header: str = HEADER) -> np.ndarray:
    """Float [16, 16] of a kernel with inputs x and w."""
    kernel = emulator.metal_kernel("product", ["x", "w"], ["y"], source, header)
    (y,) = kernel(
        inputs=list(arrays),
        output_shapes=[(16, 16)],
        output_dtypes=[np.float32],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )
    return y


def product(*, left: str = "half", right: str = "half", simdgroups: int = 1, k: str = "16", sums: str = "") -> str:
    return f"""
        tensor<device {left}, dextents<int, 2>, tensor_inline> a((device {left}*)x, dextents<int, 2>({k}, 16));
        tensor<device {right}, dextents<int, 2>, tensor_inline> b((device {right}*)w, dextents<int, 2>(16, 16));
        matmul2d<matmul2d_descriptor(16, 16, int(dynamic_extent), false, true), execution_simdgroups<{simdgroups}>> op;
        auto c = op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
        op.run(a, b, c);
        for (int i = 0; i < c.get_capacity(); i++) {{
          {sums or "if (!c.is_valid_element(i)) continue;"}
          auto at = c.get_multidimensional_index(i);
          y[at[1] * 16 + at[0]] = c[i];
        }}
    """


def halves() -> tuple[np.ndarray, np.ndarray]:
    return gaussian((16, 16), 1).astype(np.float16), gaussian((16, 16), 2).astype(np.float16)


# ---- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("simdgroups", [1, 2, 4])
def test_a_product_of_any_number_of_simdgroups(simdgroups):
    x, w = halves()
    with emulator.options(check=True):
        y = run(product(simdgroups=simdgroups), 32 * simdgroups, x, w)
    np.testing.assert_allclose(y, x.astype(np.float32) @ w.astype(np.float32).T, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "threads", "kind"),
    [
        (product(simdgroups=2), 32, "non-uniform"),  # as many simdgroups as were said
        (product(k="8"), 32, "non-uniform"),  # another K to the left than to the right
        (f"if (thread_index_in_simdgroup < 16) {{ {product()} }}", 32, "divergent-simdgroup"),
        (product(sums=" "), 32, "out-of-bounds"),  # elements that are nobody's
    ],
)
def test_what_the_reference_reports(source, threads, kind):
    with emulator.options(check=True), pytest.raises(emulator.KernelFault) as raised:
        run(source, threads, *halves())
    assert raised.value.kind == kind


def test_half_and_bfloat_are_not_mixed():
    x, w = halves()
    with pytest.raises(emulator.CompileError, match="half and bfloat"):
        run(product(right="bfloat"), 32, x, w.astype(BFLOAT16))


def test_a_tile_of_eight_is_refused():
    """As by Apple's header since macOS 26.4."""
    with pytest.raises(emulator.CompileError, match="16"):
        run(product().replace("(16, 16, int", "(8, 8, int"), 32, *halves())


# ---- the kernel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["half", "bfloat"])
@pytest.mark.parametrize("slices", [1, 3, 8])
def test_slices_of_k(slices, dtype, monkeypatch):
    """Of 11 runs: of eight slices, two are empty."""

    def forced(kernel: str, m: int, n: int, k: int) -> kernels.Dispatch:
        return kernels.Dispatch(kernel, (kernels.up(n, 64) * 128, kernels.up(m, 64), slices), (128, 1, 1))

    monkeypatch.setattr(kernels, "launch", forced)
    q = quantized("u4", 70, 352)
    x, bias = gaussian((67, 352), 3).astype(dtype), gaussian((70,), 4).astype(dtype)
    y, *others = (multiply("tensor", x, q, bias, check=True, order=order) for order in ("forward", "reverse", "random"))
    assert_within_contract(y, x, q, bias)
    for other in others:
        assert_same_bits(other, y)


def test_who_is_given_the_kernel():
    sixteen, wide, few = (512, 4096, 4096, 2), (512, 4096, 4096, 4), (8, 4096, 4096, 2)
    assert kernels.choose_kernel(*sixteen, matrix_units=True) == "tensor"
    assert kernels.choose_kernel(*sixteen) == "gemm"
    assert kernels.choose_kernel(*wide, matrix_units=True) == "fused"
    assert kernels.choose_kernel(*few, matrix_units=True) == "gemv"
    assert kernels.launch("tensor", 512, 4096, 4096) == kernels.Dispatch("tensor", (64 * 128, 8, 1), (128, 1, 1))
    assert kernels.launch("tensor", 64, 4096, 4096).grid[2] == 4


def test_a_kernel_set_with_units_takes_them():
    chosen = []

    def recorded(**arguments):
        chosen.append(arguments["name"])
        return emulator.metal_kernel(**arguments)

    with_units = Kernels(recorded)
    with_units.without_units = ""
    q = quantized("q4_0", 40, 64)
    for dtype in (FLOAT16, FLOAT32):
        with_units.multiply(gaussian((9, 64)).astype(dtype), lay_out(q))
    assert chosen == ["marlin_gemm_q4_0_tensor", "marlin_gemm_fused_q4_0"]


# ---- whether there are units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "macos", "reason"),
    [
        ("applegpu_g17s", "26.2", ""),
        ("applegpu_g17d", "27.0.1", ""),
        ("applegpu_g18p", "26.3", ""),
        ("applegpu_g17p", "26.3", "g17p"),
        ("applegpu_g16s", "26.2", "g16s"),
        ("applegpu_g17s", "26.1", "26.1"),
        ("applegpu_g17s", "15.7", "15.7"),
        ("", "26.2", "older"),
        ("applegpu_g17s", "", "not found"),
    ],
)
def test_where_units_may_be(architecture, macos, reason):
    found = matrix_units.missing(architecture, macos)
    assert reason in found
    assert bool(reason) == bool(found)


def test_the_probe_passes_on_the_reference():
    with emulator.options(check=True):
        assert matrix_units.fault(Kernels(emulator.metal_kernel)) == ""


def test_a_compiler_that_does_not_know_them_is_no_fault_of_the_caller():
    """MLX asks its compiler for Metal 4.0 from macOS 26 on; older ones do not find the header."""

    def old(**arguments):
        raise RuntimeError("fatal error: 'metal_tensor' file not found\nmore")

    assert "'metal_tensor' file not found" in matrix_units.fault(Kernels(old))


@pytest.mark.parametrize("name", ["marlin_probe_units", "marlin_gemm_u8b128_tensor"])
def test_units_that_compute_nonsense_are_not_used(name):
    def wrong(**arguments):
        built = emulator.metal_kernel(**arguments)
        if arguments["name"] != name:
            return built
        return lambda **call: [y * y.dtype.type(1.01) for y in built(**call)]

    assert "wrong numbers" in matrix_units.fault(Kernels(wrong))


def test_a_backend_looks_for_them_once(monkeypatch):
    monkeypatch.setattr(mx.fast, "metal_kernel", emulator.metal_kernel)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "applegpu_g17s"})
    monkeypatch.setattr(matrix_units.platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    backend = MetalBackend()
    assert backend.kernels.without_units == ""
    x = mx.array(gaussian((9, 64)).astype(np.float16))
    y = backend.kernels.multiply(x, lay_out(quantized("q4_0", 40, 64)).converted(mx.array))
    assert_within_contract(np.array(y), np.array(x), quantized("q4_0", 40, 64), None)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "applegpu_g13s"})
    assert "g13s" in MetalBackend().kernels.without_units
