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

BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^)]*\);")
# Each file with barriers, and a kernel that comes to all of them.
BARRIERS = {
    "matvec.metal": "gemv",
    "gemv.metal": "gemv",
    "tiles.metal": "gemm",
    "gemm.metal": "gemm",
    "fused.metal": "fused",
    "gemm_fused.metal": "fused",
    "gemm_striped.metal": "striped",
    "dequantize.metal": "dequantize",
}
# Each test of a bound: what becomes of it.
BOUNDS = [
    ("gemv", "matvec.metal", "column < w.n", "true"),
    ("gemv", "matvec.metal", "k0 + i * word_k < k_end", "true"),
    ("gemv", "matvec.metal", "r < m && k0 + lane < k_end", "k0 + lane < k_end"),
    ("gemv", "matvec.metal", "r < m && k0 + lane < k_end", "r < m"),
    ("gemv", "gemv.metal", "r < m && column0 + i < n", "column0 + i < n"),
    ("gemv", "gemv.metal", "r < m && column0 + i < n", "r < m"),
    ("gemm", "tiles.metal", "row < m && at < k", "at < k"),
    ("gemm", "tiles.metal", "row < m && at < k", "row < m"),
    ("gemm", "tiles.metal", "column < w.n && at < w.k", "at < w.k"),
    ("gemm", "tiles.metal", "inside && at + i * W::word_k < w.k", "inside"),
    ("gemm", "tiles.metal", "row < m && column < n", "column < n"),
    ("gemm", "tiles.metal", "row < m && column < n", "row < m"),
    ("striped", "reduce.metal", "if (i < count)", ""),
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
    for order in ORDERS:
        with emulator.options(check=True, order=order):
            try:
                kernels.dequantize(w, x.dtype) if kernel == "dequantize" else kernels.multiply(x, w, None, kernel)
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
