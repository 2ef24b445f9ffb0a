"""Arrays of NumPy, MLX and torch, where the three differ in what the kernels' calls need of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from billfish.backends.metal.choose import up
from billfish.backends.metal.layout import LEAST_SIZE


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def library(array: Any) -> Any:
    """NumPy, mlx.core or torch, whose array it is. Names that are not in this module are the same in all."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch" if is_torch(array) else "mlx.core"]


def count(array: Any) -> int:
    """How many numbers an array has."""
    return math.prod(array.shape)


def cast(array: Any, dtype: Any) -> Any:
    return array.to(dtype) if is_torch(array) else array.astype(dtype)


def zeros(shape: tuple[int, ...], dtype: Any, beside: Any) -> Any:
    """Of the library, and in the place, of another array."""
    return beside.new_zeros(shape, dtype=dtype) if is_torch(beside) else library(beside).zeros(shape, dtype)


def constants(numbers: Sequence[int], beside: Any) -> Any:
    """A few int32. Kernels get so small an array as constants: torch's stays in CPU memory."""
    xp = library(beside)
    return xp.tensor(numbers, dtype=xp.int32) if is_torch(beside) else xp.array(numbers, xp.int32)


def more_rows(x: Any) -> Any:
    """With rows of zeros behind, until there are 8 numbers; see layout.LEAST_SIZE."""
    if count(x) >= LEAST_SIZE:
        return x
    width = x.shape[-1]
    return library(x).concatenate([x, zeros((up(LEAST_SIZE - count(x), width), width), x.dtype, x)])


def more_numbers(v: Any) -> Any:
    """As `more_rows`, of a vector."""
    return more_rows(v.reshape(1, -1)).reshape(-1)


def keys(ids: Any) -> Any:
    """Integers to sort by: 32 bits wide, and without a sign where the library can sort such."""
    xp = library(ids)
    if not is_torch(ids):
        return ids.astype(xp.uint32)
    return ids.view(xp.int32) if ids.dtype is xp.uint32 else ids.to(xp.int32)


def words(integers: Any) -> Any:
    """At least 8 integers as uint32, with which torch cannot compute."""
    padded = more_numbers(keys(integers))
    return padded.view(library(padded).uint32) if is_torch(padded) else padded
