"""Memory of a fake GPU as arrays, and what kernels written in NumPy share."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np


def view(pointer: int, dtype: Any, *shape: int) -> np.ndarray:
    """Memory as an array that can be written to."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype).reshape(shape)


def rows_at(pointer: int, dtype: Any, rows: int, columns: int, stride: int) -> np.ndarray:
    """[rows, columns], rows `stride` numbers apart."""
    size = np.dtype(dtype).itemsize
    whole = view(pointer, dtype, (rows - 1) * stride + columns)
    return np.lib.stride_tricks.as_strided(whole, (rows, columns), (stride * size, size))


def finite(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -65504, 65504).astype(np.float16)


def rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def gated(kind: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if kind == "CLAMPED_SILU":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    if kind == "GELU_TANH":
        return gate * sigmoid(1.59576912 * (gate + 0.044715 * gate**3)) * up
    return gate * sigmoid(gate) * up
