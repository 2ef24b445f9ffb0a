"""Which kernel multiplies, and how it is launched: one function, no state."""

from __future__ import annotations

from dataclasses import dataclass

# Threadgroups that keep a GPU at work. Apple's GPUs have 8 to 80 cores, and a core hides the latency of memory by going
# from one threadgroup to another: 128 are 16 for each of 8 cores, or 1.6 for each of 80. Estimated, not yet measured.
BUSY = 128

TILE_N, TILE_K, THREADS = 64, 32, 128
MATVEC_ROWS = 8
# Rows of each expert, on average, from which on tiles are better: matvec reads the weights of an expert for each row.
TILED_ROWS = 4


@dataclass(frozen=True)
class Dispatch:
    """A kernel by name, its template arguments, and its grid in threads."""

    kernel: str
    template: dict[str, int]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def choose(m: int, n: int, k: int, itemsize: int) -> str:
    """The kernel for x [m, k] of a type of so many bytes and W [n, k].

    gemv     up to 8 rows: the weights are the traffic, and it reads them once
    fused    float32: two buffers of float32 slabs would not fit, and it needs one
    striped  few tiles: several threadgroups share each, and a second kernel adds up
    gemm     everything else
    """
    if m <= MATVEC_ROWS:
        return "gemv"
    if itemsize == 4:
        return "fused"
    return "striped" if tiles(m, n) < BUSY and k >= 8 * TILE_K else "gemm"


def choose_experts(choices: int, experts: int, itemsize: int) -> str:
    """The kernel for so many choices of a row of x and an expert.

    gemv_experts   few rows for each expert
    fused_experts  float32, as above
    gemm_experts   everything else
    """
    if choices < TILED_ROWS * experts:
        return "gemv_experts"
    return "fused_experts" if itemsize == 4 else "gemm_experts"


def tile_rows(m: int, least: int = 16) -> int:
    """Rows of a tile: no more than there are rows of x, so that little is multiplied in vain."""
    return next((rows for rows in (16, 32) if rows >= least and m <= rows), 64)


def tiles(m: int, n: int) -> int:
    """How many tiles y has."""
    return up(m, tile_rows(m)) * up(n, TILE_N)


def launch(kernel: str, m: int, n: int, k: int) -> Dispatch:
    """How to launch it."""
    if kernel == "gemv":
        return _gemv(m, n, k)
    rows = tile_rows(m, least=32 if kernel == "fused" else 16)
    template = {"TILE_M": rows}
    columns = up(n, TILE_N)
    if kernel == "striped":
        count = up(m, rows) * columns
        # No fewer than four slabs of K for each slice: below that, partial sums are the traffic.
        slices = max(1, min(up(BUSY, count), k // (4 * TILE_K), 8))
        groups = min(count * slices, 4 * BUSY)
        return Dispatch(kernel, template | {"SLICES": slices}, (groups * THREADS, 1, 1), (THREADS, 1, 1))
    return Dispatch(kernel, template, (columns * THREADS, up(m, rows), 1), (THREADS, 1, 1))


def launch_experts(kernel: str, choices: int, experts: int, n: int, k: int) -> Dispatch:
    """How to launch it: matvec for each choice by itself, or tiles of about as many choices as an expert has."""
    if kernel == "gemv_experts":
        one = _gemv(1, n, k)
        template = {name: value for name, value in one.template.items() if name != "ROWS"}
        return Dispatch(kernel, template, (one.grid[0], choices, 1), one.threadgroup)
    rows = tile_rows(up(choices, experts), least=32 if kernel == "fused_experts" else 16)
    return Dispatch(kernel, {"TILE_M": rows}, (up(n, TILE_N) * THREADS, up(choices, rows), 1), (THREADS, 1, 1))


def _gemv(m: int, n: int, k: int) -> Dispatch:
    rows = next(rows for rows in (1, 2, 4, 8) if m <= rows)
    # Wide columns need fewer instructions for each weight, but leave fewer threadgroups; many rows fill the registers.
    columns = next(c for c in (4, 2, 1) if c == 1 or (n % c == 0 and n >= 32 * c * BUSY and c * rows <= 8))
    # Each simdgroup reads the scale of its columns anew, so its slice must be long enough that it does not count.
    simdgroups = next(s for s in (8, 4, 2, 1) if s == 1 or k >= 256 * s)
    template = {"ROWS": rows, "COLUMNS": columns, "SIMDGROUPS": simdgroups}
    return Dispatch("gemv", template, (up(n, 32 * columns) * 32 * simdgroups, 1, 1), (32 * simdgroups, 1, 1))
