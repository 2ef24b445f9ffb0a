"""How long a launch should take on an Apple GPU: the longest of five things that it needs, each taken by itself.

Estimates, not times. docs/notes/2026-11-17-metal-cost-model.md says where each figure comes from, what is assumed, and
how far the model is from what others have measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from billfish.backends.emulator import Launch

LANES = 128  # of a core
SIMD_WIDTH = 32
THREADGROUP_MEMORY = 65536  # bytes of a core
MOST_SIMDGROUPS = 96  # on a core at once
DATA_RATE = 64  # bytes in a clock, of a core: to and from threadgroup memory and the first cache
# Simdgroups on a core that keep all lanes busy, each with four independent instructions: 8 take 1.6 cycles for one.
BUSY_SIMDGROUPS = 12.8


@dataclass(frozen=True)
class Chip:
    """A GPU: its cores, their clock in GHz, and GB/s of its memory."""

    name: str
    cores: int
    clock: float
    bandwidth: float


CHIPS = (
    Chip("M1", 8, 1.278, 68),
    Chip("M1 Max", 32, 1.296, 400),
    Chip("M2", 10, 1.398, 100),
    Chip("M2 Max", 38, 1.398, 400),
)


@dataclass(frozen=True)
class Estimate:
    """Microseconds that each of five things takes; the longest is the time."""

    bounds: dict[str, float]

    @property
    def us(self) -> float:
        return max(self.bounds.values())

    @property
    def bound_by(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)


def device_bytes(launch: Launch) -> int:
    """Of memory: each byte of a buffer that threads touch comes once, and then from a cache."""
    moved = [(launch.read, launch.sizes), (launch.written, launch.sizes)]
    return sum(min(asked.get(name, 0), size) for asked, sizes in moved for name, size in sizes.items())


def threadgroups_on_a_core(launch: Launch, cores: int) -> int:
    """How many run at once: as many as there are, as memory holds, and as simdgroups fit.

    Registers are left out: whatever a kernel takes, they have room for 24 simdgroups, more than BUSY_SIMDGROUPS.
    """
    by_memory = THREADGROUP_MEMORY // max(launch.threadgroup_memory, 1)
    by_simdgroups = MOST_SIMDGROUPS // _simdgroups(launch)
    return max(min(by_memory, by_simdgroups, _most_for_a_core(launch, cores)), 1)


def estimate(launch: Launch, chip: Chip) -> Estimate:
    """Of a launch whose instructions were counted."""
    assert launch.instructions is not None
    core_clocks = chip.cores * chip.clock * 1e3  # in a microsecond
    # The core with the most threadgroups is the last.
    uneven = _most_for_a_core(launch, chip.cores) * chip.cores / launch.threadgroups
    there = threadgroups_on_a_core(launch, chip.cores) * _simdgroups(launch)
    busy = core_clocks * LANES * min(there / BUSY_SIMDGROUPS, 1.0) / uneven
    asked = (launch.read, launch.written, launch.threadgroup_read, launch.threadgroup_written)
    moved = sum(sum(by_name.values()) for by_name in asked)
    counted = launch.instructions
    return Estimate(
        {
            "instructions": counted.slots / busy,
            "complex": counted.pipe / busy,
            "matrices": counted.issue["matrix"] / busy,
            "core data": moved * uneven / (core_clocks * DATA_RATE),
            "memory": device_bytes(launch) / (chip.bandwidth * 1e3),
        }
    )


def estimate_all(launches: Sequence[Launch], chip: Chip) -> tuple[float, str]:
    """Launches one after the other: microseconds, and what bounds the longest."""
    estimates = [estimate(launch, chip) for launch in launches]
    return sum(each.us for each in estimates), max(estimates, key=lambda each: each.us).bound_by


def _simdgroups(launch: Launch) -> int:
    return -(-launch.threads // SIMD_WIDTH)


def _most_for_a_core(launch: Launch, cores: int) -> int:
    return -(-launch.threadgroups // cores)
