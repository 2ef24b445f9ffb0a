"""What tests of products share with others."""

from __future__ import annotations

import numpy as np
import pytest

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend

LEVELS = pytest.mark.parametrize("level", _cpu.levels())


FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)


def backend_at(level: str) -> CpuBackend:
    backend = CpuBackend()
    backend.level = level
    return backend


def magnitude(q: bf.QuantizedTensor) -> np.ndarray:
    """The size of what kernels add up for each weight: code * scale, and the minimum (or zero point) apart."""
    planes, k = q.planes, q.shape[1]
    group = q.format.group_values(planes)
    size = np.abs(q.format.element.decode(planes["codes"]) * np.repeat(group.scale, q.group_size, axis=1)[:, :k])
    if group.minimum is not None:
        size += np.repeat(np.abs(group.minimum), q.group_size, axis=1)[:, :k]
    if group.zero is not None:
        size += np.repeat(np.abs(group.zero * group.scale), q.group_size, axis=1)[:, :k]
    return size
