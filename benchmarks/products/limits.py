"""What this machine could do at best: its read rate and arithmetic peaks, measured; and what machine it is."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from billfish.backends.cpu import _cpu
from billfish.cli.info import cpu_name, output

MEBIBYTE = 1 << 20
ATTEMPTS = 3  # a limit is the best that was seen: other programs can only make it look lower


@dataclass(frozen=True)
class Limits:
    """Of the whole machine, or of as many threads as were in use when it was measured."""

    read_bytes_per_second: float
    dot_operations_per_second: float  # int8; a multiplication and an addition are two operations
    fma_operations_per_second: float  # float32

    @classmethod
    def measure(cls, level: str, cold_bytes: int) -> Limits:
        """With the kernels' own instructions and the threads that are set now; memory beyond every cache."""
        megabytes = -(-cold_bytes // MEBIBYTE)
        return cls(
            max(_cpu.read_rate(level, megabytes) for _ in range(ATTEMPTS)),
            max(_cpu.dot_rate(level) for _ in range(ATTEMPTS)),
            max(_cpu.fma_rate(level) for _ in range(ATTEMPTS)),
        )

    def peak(self, activations: str) -> float:
        """Operations of the product, 2 * m * k * n, per second. q16 takes two dot products for each of q8."""
        if activations == "exact":
            return self.fma_operations_per_second
        return self.dot_operations_per_second / (2 if activations == "q16" else 1)

    def arithmetic(self, activations: str) -> str:
        """What the peak is a peak of, in words."""
        return {"q8": "int8", "q16": "int8, two products each,"}.get(activations, "float32")

    def least_seconds(self, activations: str, weight_bytes: int, operations: int) -> float:
        """No product that reads its weights from memory can take less: it is bound by the one or by the other."""
        return max(weight_bytes / self.read_bytes_per_second, operations / self.peak(activations))

    def __str__(self) -> str:
        read, dot, fma = (rate / 1e9 for rate in asdict(self).values())
        return f"limits: memory {read:.3g} GB/s, int8 {dot:.4g} GOP/s, float32 {fma:.4g} GOP/s"

    def as_json(self) -> dict[str, float]:
        return asdict(self)


# ---- the machine ------------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What a reader of the results needs to know of where they were taken."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "last_level_cache_bytes": last_level_cache(),
        "system": platform.platform(),
    }


def last_level_cache() -> int:
    """Bytes of the largest level, all its instances together; 0 if unknown."""
    if sys.platform == "darwin":
        sizes = [output("sysctl", "-n", name) for name in ("hw.l3cachesize", "hw.l2cachesize")]
        return next((int(size) for size in sizes if size.isdigit() and int(size)), 0)
    return sysfs_last_level_cache(Path("/sys/devices/system/cpu"))


def sysfs_last_level_cache(root: Path) -> int:
    """The same from Linux's files: cpu*/cache/index*/{level, size, shared_cpu_list}."""
    levels: dict[int, dict[str, int]] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size, cpus = ((index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            # Two cores that share a cache both list it, with the same set of cores.
            levels.setdefault(int(level), {})[cpus] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):  # containers hide some of it
            continue
    return sum(levels[max(levels)].values()) if levels else 0
