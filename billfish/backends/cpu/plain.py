"""PlainWeights: a matrix of floats, in the order in which the kernels of one ISA level read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.backends.cpu.packed import CODES, SCALES, check_stream, room_for_stream
from billfish.core.errors import DTypeError, complaint

# Types of plain weights, numbered behind CODES in the enum Codes of layout/problem.h.
PLAIN_TYPES = ("float32", "float16", "bfloat16")
NO_SCALES = len(SCALES)  # the last of the enum Scales
GROUP = 32  # any size does, as there are no scales


@dataclass(frozen=True, eq=False)
class PlainWeights:
    """W [N, K] as it is, without codes and scales. Products take it as they take PackedWeights, with x in float32."""

    dtype: str
    shape: tuple[int, int]
    level: str
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Raises unless `data` has all that the kernels will read."""
        if self.dtype not in PLAIN_TYPES:
            raise DTypeError(complaint("PlainWeights", "dtype", repr(self.dtype), ", ".join(PLAIN_TYPES)))
        check_stream("PlainWeights", self.level, self.shape, self.data, GROUP, lambda: self.description)

    @cached_property
    def description(self) -> Any:
        """What the native core takes."""
        return describe_plain(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def describe_plain(dtype: str, shape: tuple[int, int]) -> Any:
    """A native Description of a matrix of one of PLAIN_TYPES."""
    return _cpu.Description(*shape, len(CODES) + PLAIN_TYPES.index(dtype), NO_SCALES, 0, GROUP, 1.0, [])


def pack_plain(level: str, matrix: NDArray[Any]) -> PlainWeights:
    """W [N, K] of one of PLAIN_TYPES, packed. The numbers keep their type."""
    n, k = matrix.shape
    description = describe_plain(matrix.dtype.name, (n, k))
    data = room_for_stream(_cpu.packed_bytes(level, description))
    if data.size:
        _cpu.prepack_plain(level, description, np.ascontiguousarray(matrix).reshape(-1).view(np.uint8), data)
    return PlainWeights(matrix.dtype.name, (n, k), level, data)
