"""Products in the emulator, counted: what our kernels and MLX's execute, read, write, wait for and multiply."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.metal_profile.cost import CHIPS, estimate_all
from benchmarks.metal_profile.mlx_kernels import MLX_FORMATS, run_mlx
from billfish.backends import emulator
from billfish.backends.emulator import Launch
from billfish.backends.emulator.runtime import totals
from billfish.backends.metal import Kernels, lay_out
from billfish.core.tensor import QuantizedTensor

OURS, MLX = "billfish", "mlx"
# A larger problem is counted on PART threadgroups and scaled.
LARGEST_WHOLE, PART = 2**25, 4


@dataclass(frozen=True)
class Count:
    """One product, all of its launches together. Bytes are those that threads ask for, cached or not."""

    kernel: str
    owner: str
    format: str
    m: int
    k: int
    n: int
    cycles_per_weight: float  # of lanes, see docs/notes/2026-11-17-metal-cost-model.md
    device_bytes: int  # read and written
    estimated_us: dict[str, float]  # by chip
    bound_by: dict[str, str]  # by chip
    issue: dict[str, float]  # slots for each weight, by class of instruction
    pipe: float  # cycles of the complex pipe for each weight
    loads: dict[str, dict[str, int]]  # by memory, then by width in bytes
    stores: dict[str, dict[str, int]]
    read: dict[str, int]  # device bytes, by buffer
    least: dict[str, int]  # the size of each that is read
    written: int
    threadgroup_bytes: int  # read and written
    threadgroup_memory: int  # the most that a launch has
    threadgroup_barriers: int
    simdgroup_barriers: int
    matrix_multiplies: int

    def ratio(self) -> float:
        """How often the buffers are read."""
        least = sum(self.least.values())
        return sum(self.read.values()) / least if least else 0.0


def count_launches(owner: str, launches: Sequence[Launch], q: QuantizedTensor, m: int) -> Count:
    """Of one product, x [m, K] with `q` [N, K]. Small inputs are in constant memory and are not counted."""
    n, k = q.shape
    read = totals((name, each.read[name]) for each in launches for name in each.sizes if each.read[name])
    written = sum(each.written[name] for each in launches for name in each.sizes)
    counted = [each.instructions for each in launches if each.instructions is not None]
    estimates = {chip.name: estimate_all(launches, chip) for chip in CHIPS}
    moved = [(each.threadgroup_read, each.threadgroup_written) for each in launches]
    return Count(
        " + ".join(each.name for each in launches),
        owner,
        q.format.name,
        m,
        k,
        n,
        sum(each.cycles for each in counted) / (k * n),
        sum(read.values()) + written,
        {name: us for name, (us, _) in estimates.items()},
        {name: bound for name, (_, bound) in estimates.items()},
        {kind: sum(each.issue[kind] for each in counted) / (k * n) for kind in counted[0].issue},
        sum(each.pipe for each in counted) / (k * n),
        _by_width([each.loads for each in launches]),
        _by_width([each.stores for each in launches]),
        read,
        {name: size for each in launches for name, size in each.sizes.items() if name in read},
        written,
        sum(sum(by.values()) for pair in moved for by in pair),
        max(each.threadgroup_memory for each in launches),
        sum(each.threadgroup_barriers for each in launches),
        sum(each.simdgroup_barriers for each in launches),
        sum(each.matrix_multiplies for each in launches),
    )


def _by_width(counts: list[dict[str, dict[int, int]]]) -> dict[str, dict[str, int]]:
    return {
        space: {str(width): sum(each[space][width] for each in counts) for width in counts[0][space]}
        for space in counts[0]
    }


def count_product(kernels: Kernels, q: QuantizedTensor, x: np.ndarray[Any, Any]) -> list[Count]:
    """MLX's kernel, where MLX is installed and has one for the format, and ours."""
    theirs = q.format.name in MLX_FORMATS and importlib.util.find_spec("mlx") is not None
    return [*([count_mlx(q, x)] if theirs else []), count_ours(kernels, q, x)]


def count_ours(kernels: Kernels, q: QuantizedTensor, x: np.ndarray[Any, Any]) -> Count:
    """Our product: two launches for striped."""
    with _counting(q, len(x)) as log:
        kernels.multiply(x, q.made("profile", lambda: lay_out(q)), None)
    return count_launches(OURS, log, q, len(x))


def count_mlx(q: QuantizedTensor, x: np.ndarray[Any, Any]) -> Count:
    """MLX's for the same problem: two launches where it cuts K."""
    with _counting(q, len(x)) as log:
        run_mlx(q, x)
    return count_launches(MLX, log, q, len(x))


def _counting(q: QuantizedTensor, m: int) -> Any:
    n, k = q.shape
    return emulator.launches(instructions=True, most=0 if m * n * k <= LARGEST_WHOLE else PART)
