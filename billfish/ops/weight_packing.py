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

    pack.__doc__ = f"""Quantize weights [K, N] to {codes}.

    w_kn: [K, N], K first. group_size: how many consecutive weights along K share a scale, the g of the shapes.
    method: "mse" or "rtn", as in `bf.quantize`.

    Returns codes uint32 [K/8, N] and scales float16 [K/g, N]. Raises as `bf.quantize` does.

        >>> packed, scales = bf.pack_{name}_weights(np.ones((64, 8), np.float32), group_size=32)
        >>> x = np.ones((2, 64), np.float32)
        >>> bf.quantized_linear(x, packed, scales, format="{format}", group_size=32).shape
        (2, 8)
    """
    unpack.__doc__ = f"""Decode what `bf.pack_{name}_weights` made.

    packed, scales, group_size: as `bf.pack_{name}_weights` made them. dtype: as in `bf.dequantize`.

    Returns w [K, N], of the library of `packed`.

        >>> arrays = bf.pack_{name}_weights(np.ones((64, 8), np.float32))
        >>> bf.unpack_{name}_weights(*arrays).shape
        (64, 8)
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
    """Quantize weights [K, N] to unsigned 4-bit codes with zero points.

    w_kn: [K, N], K first. group_size: how many consecutive weights along K share a scale, the g of the shapes.
    method: "mse" or "rtn", as in :func:`quantize`. zero_point: "integer" makes zeros uint8, "fractional" float16.

    Returns codes uint32 [K/8, N], scales float16 [K/g, N] and zeros [K/g, N]: w = (code - zero) * scale. Raises as
    :func:`quantize` does.

        >>> packed, scales, zeros = bf.pack_u4_weights(np.ones((64, 8), np.float32))
        >>> packed.shape, scales.shape, zeros.dtype.name
        ((8, 8), (2, 8), 'uint8')
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
    """Decode what :func:`pack_u4_weights` made: w [K, N] = (code - zero) * scale.

    packed, scales, zeros, group_size: as :func:`pack_u4_weights` made them. dtype: as in :func:`dequantize`.

    Returns w [K, N], of the library of `packed`.

        >>> arrays = bf.pack_u4_weights(np.ones((64, 8), np.float32))
        >>> bf.unpack_u4_weights(*arrays).shape
        (64, 8)
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
