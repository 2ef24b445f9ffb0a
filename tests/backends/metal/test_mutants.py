"""Our own kernels with one line taken out or changed: what is said of them when they are whole is not said of these."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import diagonal
from common import gaussian
from emulator_support import ORDERS
from metal_support import quantized

from billfish.backends import emulator
from billfish.backends.metal import Kernels, decoder, lay_out
from billfish.backends.metal import kernels as sources
from billfish.backends.metal.layout import lay_out_experts

BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^)]*\);")
# Each file with barriers, and a kernel that comes to all of them.
BARRIERS = {
    "matvec.metal": "gemv",
    "tiles.metal": "fused",
    "gemm_experts.metal": "gemm_experts",
    "gemm_tensor.metal": "tensor",
    "add_norm.metal": "add_norm",
    "rotate.metal": "rotate",
}
# Each test of a bound: what becomes of it.
BOUNDS = [
    ("gemv", "matvec.metal", "(run + 1) * RUN <= w.k", "true"),
    ("gemv", "matvec.metal", "if (k >= w.k) break;", ""),
    ("gemv", "matvec.metal", "group * group_runs < w.runs()", "group * group_runs < w.runs() + 64"),
    ("gemv", "matvec.metal", "i < m * PANEL; i", "i < 8 * PANEL; i"),
    ("gemv", "matvec.metal", "if (column < n)", "if (true)"),
    ("gemv", "matvec.metal", "x + min(r, m - 1) * k", "x + r * k"),
    ("gemm", "tiles.metal", "return row < m;", "return true;"),
    ("fused", "tiles.metal", "full && left >= 8", "full"),
    ("gemm", "tiles.metal", "source >= 0 && skipped < left", "skipped < left"),
    ("gemm", "tiles.metal", "source >= 0 && skipped < left", "source >= 0"),
    ("gemm", "tiles.metal", "panel < w.panels()", "true"),
    ("gemm", "tiles.metal", "if (column >= n) continue;", ""),
    ("striped", "reduce.metal", "if (i < count)", ""),
    ("striped", "gemm_striped.metal", "min(begin + length, w.runs())", "begin + length"),
    ("gemv_experts", "gemv_experts.metal", "expert < uint(codes_shape[0])", "true"),
    ("gemv_experts", "gemv_experts.metal", "panel * PANEL + lane < n", "true"),
    ("gemm_experts", "gemm_experts.metal", "expert < uint(codes_shape[0])", "true"),
    ("gemm_experts", "gemm_experts.metal", "min(row0 + share, choices[0])", "row0 + share"),
    ("gemm_experts", "experts.metal", "at >= begin && at < end", "at >= begin"),
    ("tensor", "gemm_tensor.metal", "min(k - run * RUN, RUN)", "RUN"),
    ("tensor", "gemm_tensor.metal", "min(m - row0, UNIT_TILE)", "UNIT_TILE"),
    ("tensor", "gemm_tensor.metal", "min(UNIT_PANELS, w.panels() - panel0)", "UNIT_PANELS"),
    ("tensor", "gemm_tensor.metal", "row >= m || ", ""),
    ("tensor", "gemm_tensor.metal", "min(begin + length, w.runs())", "begin + length"),
    ("dequantize", "dequantize.metal", "run < w.runs() && column < n", "column < n"),
    ("dequantize", "dequantize.metal", "run < w.runs() && column < n", "run < w.runs()"),
    ("dequantize", "dequantize.metal", "if (at < k)", ""),
]


def barriers(file: str) -> list[re.Match[str]]:
    return list(BARRIER.finditer((sources.FOLDER / file).read_text()))


def faults(kernel: str, file: str, text: str, monkeypatch: pytest.MonkeyPatch) -> list[emulator.KernelFault]:
    """What checked launches in the three orders report when `file` has this text."""
    whole = sources.source
    for module in (sources, decoder):
        monkeypatch.setattr(module, "source", lambda name: text if name == file else whole(name))
    if file == "reduce.metal":
        monkeypatch.setitem(sources.REDUCE, "source", text)
    kernels = Kernels(emulator.metal_kernel)
    w = lay_out(quantized("u4", 70, 520, 32))
    x = gaussian(({"gemv": 7, "fused": 64}.get(kernel, 66), 520)).astype(np.float16)
    found = []

    def run() -> None:
        around = decoder.DecoderKernels(kernels)
        if kernel == "add_norm":
            rows = x[:3].astype(np.float32)
            around.add_norm(rows, x[:3], rows[0], rows[1], epsilon=1e-6, scale=1.0, dtype=x.dtype)
        elif kernel == "rotate":
            heads = decoder.Heads(5, 1, 64, np.ones(16, np.float32), q_norm=np.ones(64, np.float32))
            around.rotate(x[:3, :448], heads, np.arange(3, dtype=np.int32), 1e-6)
            around.rotate(x[:3, :384], heads, np.arange(3, dtype=np.int32), 1e-6, x[:3, 384:448])
        elif kernel == "dequantize":
            kernels.dequantize(w, x.dtype)
        elif kernel in sources.EXPERT_PRODUCTS:  # 70 choices, of 3 experts and of one that is not in the stack
            stack = lay_out_experts([quantized("u4", 70, 520, 32, seed) for seed in range(3)])
            kernels.multiply_experts(x[:35], stack, np.arange(70) * 7 % 4, None, kernel=kernel)
        else:
            kernels.multiply(x, w, None, kernel)

    for order in ORDERS:
        with emulator.options(check=True, order=order):
            try:
                run()
            except emulator.KernelFault as fault:
                found.append(fault)
    return found


def test_all_barriers_are_here() -> None:
    files = {path.name for path in sources.FOLDER.glob("*.metal")}
    assert {file for file in files if barriers(file)} == set(BARRIERS)


@pytest.mark.parametrize("kernel", sorted(set(BARRIERS.values())))
def test_whole_kernels_report_nothing(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(kernel, "", "", monkeypatch) == []


@pytest.mark.parametrize(
    ("file", "which"), diagonal(2, [(file, i) for file in BARRIERS for i in range(len(barriers(file)))])
)
def test_a_barrier_that_is_missing_is_found(file: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = barriers(file)[which]
    text = barrier.string[: barrier.start()] + barrier.string[barrier.end() :]
    found = faults(BARRIERS[file], file, text, monkeypatch)
    assert {fault.kind for fault in found} & {"race", "uninitialised"}
    assert all(fault.site is not None and fault.buffer is not None for fault in found)


@pytest.mark.parametrize(("kernel", "file", "bound", "instead"), diagonal(8, BOUNDS))
def test_a_bound_that_is_missing_is_found(
    kernel: str, file: str, bound: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (sources.FOLDER / file).read_text()
    assert text.count(bound) == 1
    found = faults(kernel, file, text.replace(bound, instead), monkeypatch)
    assert found
    assert {fault.kind for fault in found} <= {"out-of-bounds", "cross-threadgroup", "race", "uninitialised"}
