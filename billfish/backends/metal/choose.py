"""Which kernel multiplies, and how it is launched: one function, no state."""

from __future__ import annotations

from dataclasses import dataclass

# Threadgroups that keep a GPU at work. Apple's GPUs have 8 to 80 cores, and a core hides the latency of memory by going
# from one threadgroup to another: 256 are 32 for each of 8 cores, or 3.2 for each of 80. Estimated, not yet measured.
BUSY = 256

# Tiles have two panels of 16 columns, one for each simdgroup of their threadgroups.
PANEL, TILE_M, TILE_N, RUN, THREADS = 16, 64, 32, 32, 64
MATVEC_ROWS = 8
# Simdgroups of a matvec's threadgroup, which share K: at most so many, each with so many k at least.
MOST_PARTS, PART_K = 8, 2048
# Rows of each expert, on average, from which on tiles are better: matvec reads the weights of an expert for each row.
TILED_ROWS = 4


@dataclass(frozen=True)
class Dispatch:
    """A kernel by name and its grid in threads: nothing that is compiled depends on M, N or K."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def choose(m: int, n: int, k: int, itemsize: int) -> str:
    """The kernel for x [m, k] of a type of so many bytes and W [n, k].

    gemv     up to 8 rows: the weights are the traffic, and it reads them once
    fused    float32: two buffers of float32 slabs would leave room for one threadgroup less, and it needs one
    striped  few tiles: several threadgroups share each, and a second kernel adds up
    gemm     everything else
    """
    if m <= MATVEC_ROWS:
        return "gemv"
    if itemsize == 4:
        return "fused"
    return "striped" if slices(m, n, k) > 1 else "gemm"


def choose_experts(choices: int, experts: int, itemsize: int) -> str:
    """The kernel for so many choices of a row of x and an expert.

    gemv_experts   few rows for each expert
    fused_experts  float32, as above
    gemm_experts   everything else
    """
    if choices < TILED_ROWS * experts:
        return "gemv_experts"
    return "fused_experts" if itemsize == 4 else "gemm_experts"


def slices(m: int, n: int, k: int) -> int:
    """In how many slices of K there are enough tiles: at least four runs each, as partial sums are traffic too."""
    return max(1, min(up(BUSY, up(m, TILE_M) * up(n, TILE_N)), k // (4 * RUN), 8))


def launch(kernel: str, m: int, n: int, k: int) -> Dispatch:
    """How to launch it. Matvec has two kernels, for one row and for more."""
    if kernel == "gemv":
        return _matvec("gemv" if m == 1 else "gemv_rows", n, k, 1)
    return _tiles(kernel, n, up(m, TILE_M), slices(m, n, k) if kernel == "striped" else 1)


def launch_experts(kernel: str, choices: int, experts: int, n: int, k: int) -> Dispatch:
    """How to launch it: matvec for each choice by itself, or tiles of about as many choices as an expert has."""
    if kernel == "gemv_experts":
        return _matvec(kernel, n, k, choices)
    rows = next((rows for rows in (16, 32) if up(choices, experts) <= rows), TILE_M)
    return _tiles(kernel, n, up(choices, rows), 1)


def _tiles(kernel: str, n: int, down: int, deep: int) -> Dispatch:
    return Dispatch(kernel, (up(n, TILE_N) * THREADS, down, deep), (THREADS, 1, 1))


def _matvec(kernel: str, n: int, k: int, times: int) -> Dispatch:
    parts = max(1, min(k // PART_K, MOST_PARTS))
    return Dispatch(kernel, (up(n, PANEL) * 32 * parts, times, 1), (32 * parts, 1, 1))
