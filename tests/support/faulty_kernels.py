"""A kernel with a fault planted in it, and its sound twin.

A line that ends in `// HERE` is the one that must be named, `// THERE` the other party's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from emulator_support import ORDERS

from billfish.backends import emulator

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DEVICE_BARRIER = "threadgroup_barrier(mem_flags::mem_device);"
FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"


@dataclass(frozen=True)
class Case:
    """`PLANT` in the source stands for `sound` or for `faulty`."""

    kind: str
    buffer: str | None
    source: str
    sound: str
    faulty: str
    grid: tuple[int, int, int] = (64, 1, 1)
    threadgroup: tuple[int, int, int] = (64, 1, 1)
    inputs: dict[str, np.ndarray] = field(default_factory=lambda: {"x": np.arange(64, dtype=np.float32)})
    outputs: int = 64
    init_value: float | None = None
    orders: tuple[str, ...] = ORDERS  # in which it is found
    header: str = ""

    def run(self, plant: str) -> np.ndarray:
        source = self.source.replace("PLANT", plant)
        kernel = emulator.metal_kernel("planted", list(self.inputs), ["y"], source, self.header.replace("PLANT", plant))
        (y,) = kernel(
            inputs=list(self.inputs.values()),
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=[(self.outputs,)],
            output_dtypes=[np.float32],
            init_value=self.init_value,
        )
        return y

    def line(self, mark: str) -> int | None:
        lines = self.source.replace("PLANT", self.faulty).split("\n")
        return next((i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"// {mark}")), None)
