"""Weights [K, N] straight to the packed arrays that kernels take, and back.

The layout is that of core.formats.word_packing: nibble j of word r, least significant first, is k = 8r + j. These calls
return plain arrays, of the same library as their input; `billfish.quantize` returns them as one object.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, cast, overload

import numpy as np
from numpy.typing import NDArray

from billfish.core.arrays import Input, float_dtype, float_input
from billfish.core.errors import ShapeError, bad_argument
from billfish.core.tensor import QuantizedTensor
from billfish.core.typing import ArrayT, FloatType, Method
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import check_method, quantize_matrix

Words = NDArray[np.uint32]
Halves = NDArray[np.float16]
ZeroPoint = Literal["integer", "fractional"]


class PackWeights(Protocol):
    """w_kn [K, N] -> codes uint32 [K/8, N], scales float16 [K/g, N]."""

    @overload
    def __call__(self, w_kn: NDArray[Any], group_size: int = 32, *, method: Method = "mse") -> tuple[Words, Halves]: ...
    @overload
    def __call__(self, w_kn: ArrayT, group_size: int = 32, *, method: Method = "mse") -> tuple[ArrayT, ArrayT]: ...


class UnpackWeights(Protocol):
    """codes uint32 [K/8, N], scales float16 [K/g, N] -> w [K, N] in `dtype`."""

    @overload
    def __call__(
        self, packed: NDArray[Any], scales: NDArray[Any], group_size: int = 32, *, dtype: FloatType = "float32"
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self, packed: ArrayT, scales: ArrayT, group_size: int = 32, *, dtype: FloatType = "float32"
    ) -> ArrayT: ...


def _pair(name: str, format: str, codes: str) -> tuple[PackWeights, UnpackWeights]:
    def pack(w_kn: Any, group_size: int = 32, *, method: Method = "mse") -> Any:
        return _pack(f"pack_{name}_weights", w_kn, format, group_size, method)

    def unpack(packed: Any, scales: Any, group_size: int = 32, *, dtype: FloatType = "float32") -> Any:
        storage = {"packed": packed, "scales": scales}
        return _unpack(f"unpack_{name}_weights", format, storage, group_size, dtype)

    pack.__doc__ = f"""w_kn [K, N] -> {codes}, uint32 [K/8, N], and scales float16 [K/g, N].

    group_size: how many consecutive weights along K share a scale, the g of the shapes.
    method: "mse" or "rtn", as in `bf.quantize`.

        packed, scales = bf.pack_{name}_weights(w_kn, group_size=128)
        y = bf.quantized_linear(x, packed, scales, format="{format}", group_size=128)
    """
    unpack.__doc__ = f"""The inverse of `bf.pack_{name}_weights`: w [K, N] as numbers, in `dtype`.

    packed, scales, group_size: as `bf.pack_{name}_weights` made them.
    """
    for function in (pack, unpack):
        function.__name__ = function.__qualname__ = f"{function.__name__}_{name}_weights"
    return cast(PackWeights, pack), cast(UnpackWeights, unpack)


pack_fp4_weights, unpack_fp4_weights = _pair("fp4", "fp4", "FP4 codes")
pack_s4_weights, unpack_s4_weights = _pair("s4", "u4b8", "signed 4-bit codes, stored with 8 added")


@overload
def pack_u4_weights(
    w_kn: NDArray[Any], group_size: int = 32, *, method: Method = "mse", zero_point: ZeroPoint = "integer"
) -> tuple[Words, Halves, NDArray[Any]]: ...
@overload
def pack_u4_weights(
    w_kn: ArrayT, group_size: int = 32, *, method: Method = "mse", zero_point: ZeroPoint = "integer"
) -> tuple[ArrayT, ArrayT, ArrayT]: ...


def pack_u4_weights(
    w_kn: Any, group_size: int = 32, *, method: Method = "mse", zero_point: ZeroPoint = "integer"
) -> Any:
    """w_kn [K, N] -> codes uint32 [K/8, N], scales float16 [K/g, N], zeros [K/g, N].

    group_size, method: as in `bf.pack_fp4_weights`.
    zero_point: "integer" makes zeros uint8, "fractional" float16.
    """
    return _pack("pack_u4_weights", w_kn, "u4", group_size, method, zero_point=zero_point)


@overload
def unpack_u4_weights(
    packed: NDArray[Any],
    scales: NDArray[Any],
    zeros: NDArray[Any],
    group_size: int = 32,
    *,
    dtype: FloatType = "float32",
) -> NDArray[Any]: ...
@overload
def unpack_u4_weights(
    packed: ArrayT, scales: ArrayT, zeros: ArrayT, group_size: int = 32, *, dtype: FloatType = "float32"
) -> ArrayT: ...


def unpack_u4_weights(
    packed: Any, scales: Any, zeros: Any, group_size: int = 32, *, dtype: FloatType = "float32"
) -> Any:
    """The inverse of `bf.pack_u4_weights`: w [K, N] = (q - zero) * scale, in `dtype`.

    packed, scales, zeros, group_size: as `bf.pack_u4_weights` made them.
    """
    storage = {"packed": packed, "scales": scales, "zeros": zeros}
    return _unpack("unpack_u4_weights", "u4", storage, group_size, dtype)


def _pack(call: str, w_kn: Any, format: str, group_size: int, method: str, **options: str) -> tuple[Any, ...]:
    taken = float_input(call, "w_kn", w_kn)
    if len(taken.shape) != 2 or taken.shape[1] == 0:
        raise ShapeError(bad_argument(call, "w_kn.shape", taken.shape, "a matrix [K, N] with N > 0"))
    check_method(call, method, takes_hessian=False)
    tensor = quantize_matrix(call, "w_kn", taken.numpy().T, format, group_size, method, options)
    return tuple(taken.like(np.array(array)) for array in tensor.storage.values())  # the tensor's own are read-only


def _unpack(call: str, format: str, storage: dict[str, Any], group_size: int, dtype: FloatType) -> Any:
    inputs = {name: Input(call, name, array) for name, array in storage.items()}
    arrays = {name: taken.numpy() for name, taken in inputs.items()}
    tensor = QuantizedTensor.borrowing(format, arrays, group_size, call=call)
    return inputs["packed"].like(dequantize(tensor, float_dtype(call, dtype)).T.copy())
