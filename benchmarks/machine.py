"""Where a record was taken: the machine, its GPU, versions, and the limits of memory and arithmetic, measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import billfish
from billfish.backends.cpu import _cpu

MEBIBYTE = 1 << 20
ATTEMPTS = 3  # a limit is the best that was seen: other programs can only make it look lower


def today() -> dict[str, str]:
    return {"date": time.strftime("%Y-%m-%d")}


def machine() -> dict[str, object]:
    """The CPU and its system."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "last_level_cache_bytes": last_level_cache(),
        "system": platform.platform(),
    }


def gpu() -> dict[str, object]:
    """The NVIDIA GPU, and the day."""
    from billfish.backends.cuda.driver import device

    found = device()
    return {"gpu": found.name, "arch": found.arch, "multiprocessors": found.multiprocessors} | today()


def versions(*packages: str) -> dict[str, str]:
    """Of billfish, and of those packages that are installed."""
    found = {"billfish": billfish.__version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The model, such as "Neoverse-N1"; the architecture if nobody knows more."""
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    # /proc/cpuinfo has numbers instead of names on ARM; lscpu has the table that goes with them.
    lines = (line for line in output("lscpu").splitlines() if line.lower().startswith("model name:"))
    return next((line.split(":", 1)[1].strip() for line in lines), platform.processor() or platform.machine())


def output(*command: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


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


@dataclass(frozen=True)
class GpuLimits(Limits):
    """Of a GPU: the arithmetic peak is that of a large float16 product."""

    def arithmetic(self, activations: str) -> str:
        return "float16"

    def __str__(self) -> str:
        read, peak = self.read_bytes_per_second / 1e9, self.fma_operations_per_second / 1e9
        return f"limits: memory {read:.3g} GB/s, float16 {peak:.4g} GOP/s"
