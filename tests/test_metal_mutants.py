"""Our own kernels with one line taken out or changed: what is said of them when they are whole is not said of these."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from emulator_support import ORDERS
from metal_support import quantized
from support import gaussian

from billfish.backends.metal import Kernels, bridge, choose, emulator, lay_out
from billfish.backends.metal.layout import lay_out_experts

BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^)]*\);")
# Each file with barriers, and a kernel that comes to all of them.
BARRIERS = {
    "matvec.metal": "gemv",
    "tiles.metal": "gemm",
    "gemm.metal": "gemm",
    "fused.metal": "fused",
    "gemm_fused.metal": "fused",
    "gemm_striped.metal": "striped",
    "gemm_experts.metal": "gemm_experts",
    "gemm_fused_experts.metal": "fused_experts",
    "dequantize.metal": "dequantize",
}
# Each test of a bound: what becomes of it.
BOUNDS = [
    ("gemv", "matvec.metal", "column < w.n", "true"),
    ("gemv", "matvec.metal", "k0 + i * word_k < k_end", "true"),
    ("gemv", "matvec.metal", "r < m && k0 + lane < k_end", "k0 + lane < k_end"),
    ("gemv", "matvec.metal", "r < m && k0 + lane < k_end", "r < m"),
    ("gemv", "matvec.metal", "r < m && column0 + i < n", "column0 + i < n"),
    ("gemv", "matvec.metal", "r < m && column0 + i < n", "r < m"),
    ("gemm", "tiles.metal", "return row < m;", "return true;"),
    ("gemm", "tiles.metal", "sources[i] >= 0 && at < k", "at < k"),
    ("gemm", "tiles.metal", "sources[i] >= 0 && at < k", "sources[i] >= 0"),
    ("gemm", "tiles.metal", "column < w.n && at < w.k", "at < w.k"),
    ("gemm", "tiles.metal", "inside && at + i * W::word_k < w.k", "inside"),
    ("gemm", "tiles.metal", "rows.has(row) && column < n", "column < n"),
    ("gemm", "tiles.metal", "rows.has(row) && column < n", "rows.has(row)"),
    ("striped", "reduce.metal", "if (i < count)", ""),
    ("gemv_experts", "gemv_experts.metal", "expert < uint(codes_shape[0])", "true"),
    ("gemm_experts", "gemm_experts.metal", "expert < uint(codes_shape[0])", "true"),
    ("gemm_experts", "gemm_experts.metal", "min(row0 + TILE_M, size[0])", "row0 + TILE_M"),
    ("gemm_experts", "experts.metal", "at >= begin && at < end", "at >= begin"),
    ("fused_experts", "gemm_fused_experts.metal", "expert < uint(codes_shape[0])", "true"),
    ("fused_experts", "gemm_fused_experts.metal", "min(row0 + TILE_M, size[0])", "row0 + TILE_M"),
    ("dequantize", "tiles.metal", "column < w.n && at < w.k", "at < w.k"),
    ("dequantize", "tiles.metal", "column < w.n && at < w.k", "column < w.n"),
    ("dequantize", "dequantize.metal", "k0 + lane < k", "true"),
    ("dequantize", "dequantize.metal", "row < 32 && column0 + row < n", "row < 32"),
]


def barriers(file: str) -> list[re.Match[str]]:
    return list(BARRIER.finditer((bridge.FOLDER / file).read_text()))


def faults(kernel: str, file: str, text: str, monkeypatch: pytest.MonkeyPatch) -> list[emulator.KernelFault]:
    """What checked launches in the three orders report when `file` has this text."""
    whole = bridge.source
    monkeypatch.setattr(bridge, "source", lambda name: text if name == file else whole(name))
    if file == "reduce.metal":
        monkeypatch.setitem(bridge.REDUCE, "source", text)
    if kernel == "striped":  # one threadgroup for the whole list
        monkeypatch.setattr(bridge, "launch", lambda *problem: replace(choose.launch(*problem), grid=(128, 1, 1)))
    kernels = Kernels(emulator.metal_kernel)
    w = lay_out(quantized("u4", 70, 520, 32))
    x = gaussian((7 if kernel == "gemv" else 66, 520)).astype(np.float16)
    found = []

    def run() -> None:
        if kernel == "dequantize":
            kernels.dequantize(w, x.dtype)
        elif kernel in bridge.EXPERT_PRODUCTS:  # 70 choices, of 3 experts and of one that is not in the stack
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
    files = {path.name for path in bridge.FOLDER.glob("*.metal")}
    assert {file for file in files if barriers(file)} == set(BARRIERS)


@pytest.mark.parametrize("kernel", sorted(set(BARRIERS.values())))
def test_whole_kernels_report_nothing(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(kernel, "", "", monkeypatch) == []


@pytest.mark.parametrize(("file", "which"), [(file, i) for file in BARRIERS for i in range(len(barriers(file)))])
def test_every_barrier_is_missed(file: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = barriers(file)[which]
    text = barrier.string[: barrier.start()] + barrier.string[barrier.end() :]
    found = faults(BARRIERS[file], file, text, monkeypatch)
    assert {fault.kind for fault in found} & {"race", "uninitialised"}
    assert all(fault.site is not None and fault.buffer is not None for fault in found)


@pytest.mark.parametrize(("kernel", "file", "bound", "instead"), BOUNDS)
def test_every_bound_is_missed(
    kernel: str, file: str, bound: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (bridge.FOLDER / file).read_text()
    assert text.count(bound) == 1
    found = faults(kernel, file, text.replace(bound, instead), monkeypatch)
    assert found
    assert {fault.kind for fault in found} <= {"out-of-bounds", "cross-threadgroup", "race", "uninitialised"}
