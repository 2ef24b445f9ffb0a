"""Weights [K, N] straight to the packed arrays that kernels take, and back.

The layout is that of billfish.formats.words: nibble j of word r, least significant first, is k = 8r + j. These calls
return plain arrays, of the same library as their input; `billfish.quantize` returns them as one object.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from billfish.arrays import Input, float_input
from billfish.errors import ShapeError, complaint
from billfish.ops import dequantize, quantize_matrix
from billfish.tensor import QuantizedTensor


def pack_fp4_weights(w_kn: Any, group_size: int = 32, *, method: str = "mse") -> tuple[Any, Any]:
    """w [K, N] -> FP4 codes uint32 [K/8, N], scales float16 [K/g, N]."""
    packed, scales = _pack("pack_fp4_weights", w_kn, "fp4", group_size, method)
    return packed, scales


def unpack_fp4_weights(packed: Any, scales: Any, group_size: int = 32, *, dtype: DTypeLike = "float32") -> Any:
    """The inverse: w [K, N] as numbers."""
    return _unpack("unpack_fp4_weights", "fp4", {"packed": packed, "scales": scales}, group_size, dtype)


def pack_u4_weights(
    w_kn: Any, group_size: int = 32, *, method: str = "mse", zero_point: str = "integer"
) -> tuple[Any, Any, Any]:
    """w [K, N] -> codes uint32 [K/8, N], scales float16 [K/g, N], zeros uint8 (or float16, if fractional) [K/g, N]."""
    packed, scales, zeros = _pack("pack_u4_weights", w_kn, "u4", group_size, method, zero_point=zero_point)
    return packed, scales, zeros


def unpack_u4_weights(
    packed: Any, scales: Any, zeros: Any, group_size: int = 32, *, dtype: DTypeLike = "float32"
) -> Any:
    """The inverse: w [K, N] = (q - zero) * scale."""
    storage = {"packed": packed, "scales": scales, "zeros": zeros}
    return _unpack("unpack_u4_weights", "u4", storage, group_size, dtype)


def pack_s4_weights(w_kn: Any, group_size: int = 32, *, method: str = "mse") -> tuple[Any, Any]:
    """w [K, N] -> signed 4-bit codes, stored with 8 added, uint32 [K/8, N], and scales float16 [K/g, N]."""
    packed, scales = _pack("pack_s4_weights", w_kn, "u4b8", group_size, method)
    return packed, scales


def unpack_s4_weights(packed: Any, scales: Any, group_size: int = 32, *, dtype: DTypeLike = "float32") -> Any:
    """The inverse: w [K, N] = (q - 8) * scale."""
    return _unpack("unpack_s4_weights", "u4b8", {"packed": packed, "scales": scales}, group_size, dtype)


def _pack(call: str, w_kn: Any, format: str, group_size: int, method: str, **options: str) -> list[Any]:
    taken = float_input(call, "w_kn", w_kn)
    if len(taken.shape) != 2 or taken.shape[1] == 0:
        raise ShapeError(complaint(call, "w_kn", f"shape {taken.shape}", "a matrix [K, N] with N > 0"))
    tensor = quantize_matrix(call, "w_kn", taken.numpy().T, format, group_size, method, options)
    return [taken.like(np.array(array)) for array in tensor.storage.values()]  # the tensor's own are read-only


def _unpack(call: str, format: str, storage: dict[str, Any], group_size: int, dtype: DTypeLike) -> Any:
    inputs = {name: Input(call, name, array) for name, array in storage.items()}
    arrays = {name: taken.numpy() for name, taken in inputs.items()}
    tensor = QuantizedTensor.borrowing(format, arrays, group_size, call=call)
    return inputs["packed"].like(dequantize(tensor, dtype).T.copy())
