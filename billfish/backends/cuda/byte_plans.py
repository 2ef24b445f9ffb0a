"""Which products multiply x in bytes, and in which shape of gemm_bytes.cu: docs/cuda.md has the figures.

`activations="fp8"` rounds x to E4M3, "q8" to int8, with one scale for each row of x. Weights stay exact, so only some
kinds can: `why_exact` says why others cannot. Up to FEW_ROWS rows of x the kernels of 16 bits are the faster ones, and
`byte_plan` gives None: x is multiplied as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from billfish.backends.cuda.driver import Device, KernelLaunch
from billfish.backends.cuda.kind import BRICK, Kind
from billfish.backends.cuda.plans import (
    COURSES_IN_STRIP,
    LETTER_BYTES,
    OUT_BYTES,
    STRIP,
    Gemm,
    wgmma_macros,
)

FEW_ROWS = 64
MORE_ROWS = 256  # whose scales gemm_bytes.cu may read, as it reads those of whole tiles
SIXTEEN = 16  # k that quantize_rows.cu writes at a time


def why_exact(kind: Kind, activations: str) -> str:
    """Why weights of a kind are not multiplied with x in bytes, or ""."""
    if kind.offset != "NONE":
        return "weights with a zero point or a minimum"
    if kind.element == "E2M1" and activations == "fp8":
        if kind.scale == "ScaleE5M2":
            return "" if kind.narrow else "a row whose powers of two span more than 16 octaves"
    elif kind.element != "Int4":
        takes = "4-bit integers and E2M1" if activations == "fp8" else "4-bit integers"
        return f"weights of {kind.element}; {activations} takes {takes}"
    if kind.groups > 1:
        return f"groups of {BRICK // kind.groups} with scales of their own: scaling sums that often takes longer than x in 16 bits"
    return ""


@dataclass(frozen=True)
class ByteShape:
    """A shape of gemm_bytes. Its fields are macros of gemm_bytes.cu, as those of gemm_large.cu."""

    width: int
    teams: int = 1
    split: int = 1
    stages: int = 8

    warpgroups = 2

    @property
    def strips(self) -> int:
        return self.warpgroups // self.teams

    @property
    def partners(self) -> int:
        return self.split * self.teams

    def ctas(self, m: int, n: int) -> int:
        return -(-n // (STRIP * self.strips)) * -(-m // self.width) * self.split


@dataclass(frozen=True)
class BytePlan:
    """Two launches, and the memory between them: x in bytes, rows `stride` bytes apart, and its scales behind them."""

    quantize: KernelLaunch
    launch: KernelLaunch
    box_rows: int
    stride: int
    work_bytes: int


def ring(shape: ByteShape, kind: Kind, device: Device) -> tuple[int, int]:
    """Stages of the ring, and all dynamic shared memory as gemm_bytes.cu lays it out."""
    stage = shape.width * (BRICK + 4) + shape.strips * COURSES_IN_STRIP * kind.brick_bytes
    owned = -(-shape.width // 8 // shape.partners)
    letters = shape.teams * (shape.partners - 1) * shape.strips * owned * LETTER_BYTES
    rest = shape.warpgroups * (OUT_BYTES + 32 * owned * shape.partners) + letters
    stages = min(shape.stages, (device.shared_bytes - rest) // stage) // shape.teams * shape.teams
    return stages, stages * stage + rest


def launch_bytes(gemm: Gemm, device: Device, shape: ByteShape) -> BytePlan:
    integers = gemm.activations == "q8"
    stages, shared_bytes = ring(shape, gemm.kind, device)
    macros = gemm.macros(
        BYTES="INT8" if integers else "FP8",
        GIVEN=0,
        WARPGROUPS=shape.warpgroups,
        TEAMS=shape.teams,
        TALL=1,
        WIDTH=shape.width,
        STAGES=stages,
        SPLIT=shape.split,
        PAIRED=0,
        **wgmma_macros("WGMMA", shape.width, "r" if integers else "f"),
    )
    ctas = shape.ctas(gemm.m, gemm.n)
    if shape.partners == 1:
        ctas = min(ctas, device.multiprocessors)
    threads = 128 * (shape.warpgroups + 1)
    launch = KernelLaunch(
        "gemm_bytes.cu", "marlin_gemm_bytes", macros, (ctas, 1), threads, shared_bytes, shape.split, True
    )
    stride = -(-gemm.k // SIXTEEN) * SIXTEEN
    scales = 4 * (gemm.m + MORE_ROWS)
    return BytePlan(quantize(gemm, stride, integers), launch, shape.width, stride, gemm.m * stride + scales)


def quantize(gemm: Gemm, stride: int, integers: bool) -> KernelLaunch:
    """One CTA a row, whose threads hold all of it up to 1024 * 4 * 16 k."""
    blocks = stride // SIXTEEN
    threads = min(256, -(-blocks // 32) * 32) if blocks <= 1024 else 1024
    held = min(4, -(-blocks // threads))
    macros = {
        "TYPE": "BF16" if gemm.bfloat16 else "F16",
        "INTEGERS": str(int(integers)),
        "THREADS": str(threads),
        "HELD": str(held),
    }
    defined = tuple(sorted(macros.items()))
    return KernelLaunch("quantize_rows.cu", "marlin_quantize_rows", defined, (gemm.m,), threads, overlap=True)
