"""ggml blocks as plain bytes: quantize_q4_0(x) -> blocks and dequantize_q4_0(blocks) -> float32, for each type.

x [..., K] becomes uint8 [..., K/32 * bytes of a block]; arrays of any library, the same kind out. The method is
"rtn" here, unlike in billfish.quantize: plain rounding writes the very bits that ggml writes.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, cast, overload

import numpy as np
from numpy.typing import NDArray

from billfish.core.arrays import Input, float_input
from billfish.core.errors import ShapeError, bad_argument
from billfish.core.format import get_format
from billfish.core.storage import check_array
from billfish.core.tensor import QuantizedTensor
from billfish.core.typing import ArrayT, Method
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import check_method, quantize_matrix


class QuantizeBlocks(Protocol):
    """x [..., K] -> blocks, uint8 [..., bytes]; method "rtn" or "mse", as in billfish.quantize."""

    @overload
    def __call__(self, x: NDArray[Any], method: Method = "rtn") -> NDArray[np.uint8]: ...
    @overload
    def __call__(self, x: ArrayT, method: Method = "rtn") -> ArrayT: ...


class DequantizeBlocks(Protocol):
    """Blocks uint8 [..., bytes] -> float32 [..., K]."""

    @overload
    def __call__(self, blocks: NDArray[Any]) -> NDArray[np.float32]: ...
    @overload
    def __call__(self, blocks: ArrayT) -> ArrayT: ...


def _pair(name: str) -> tuple[QuantizeBlocks, DequantizeBlocks]:
    def quantize_blocks(x: Any, method: Method = "rtn") -> Any:
        call = f"quantize_{name}"
        taken = float_input(call, "x", x)
        format = get_format(name)
        if not taken.shape:
            raise ShapeError(bad_argument(call, "x.shape", taken.shape, "[..., K]"))
        *leading, k = taken.shape
        format.check_k(call, k)
        check_method(call, method, takes_hessian=False)
        row_bytes = format.storage_spec(1, k, format.default_group_size)["blocks"].nbytes
        rows = taken.numpy().reshape(math.prod(leading), k)
        if len(rows) == 0:
            return taken.like(np.zeros((*leading, row_bytes), np.uint8))
        tensor = quantize_matrix(call, "x", rows, format, None, method, {})
        return taken.like(np.array(tensor.storage["blocks"]).reshape(*leading, row_bytes))

    def dequantize_blocks(blocks: Any) -> Any:
        call = f"dequantize_{name}"
        taken = Input(call, "blocks", blocks)
        if not taken.shape:
            raise ShapeError(bad_argument(call, "blocks.shape", taken.shape, "[..., bytes]"))
        *leading, row_bytes = taken.shape
        blocks = check_array(call, "blocks", taken.numpy(), (np.uint8,), len(taken.shape))
        rows = blocks.reshape(math.prod(leading), row_bytes)
        if len(rows) == 0:  # how long a row is can be told all the same
            spare = QuantizedTensor.from_storage(name, {"blocks": np.zeros((1, row_bytes), np.uint8)}, call=call)
            return taken.like(np.zeros((*leading, spare.shape[1]), np.float32))
        tensor = QuantizedTensor.borrowing(name, {"blocks": rows}, call=call)
        return taken.like(dequantize(tensor).reshape(*leading, tensor.shape[1]))

    bytes_of_block = get_format(name).storage_spec(1, 32, 32)["blocks"].nbytes
    quantize_blocks.__doc__ = f"""Quantize to ggml's {name} blocks.

    x: [..., K], K a multiple of 32. method: "rtn" (the default) gives ggml's bits, "mse" less error.

    Returns uint8 [..., K/32 * {bytes_of_block}], of x's library. Raises ShapeError for another K.

        >>> bf.quantize_{name}(np.ones((2, 32), np.float32)).shape
        (2, {bytes_of_block})
    """
    dequantize_blocks.__doc__ = f"""Decode ggml's {name} blocks.

    blocks: uint8 [..., K/32 * {bytes_of_block}].

    Returns float32 [..., K], of the library of `blocks`.

        >>> bf.dequantize_{name}(bf.quantize_{name}(np.ones((2, 32), np.float32))).shape
        (2, 32)
    """
    for function in (quantize_blocks, dequantize_blocks):
        function.__name__ = function.__qualname__ = function.__name__.replace("blocks", name)
    return cast(QuantizeBlocks, quantize_blocks), cast(DequantizeBlocks, dequantize_blocks)


quantize_q4_0, dequantize_q4_0 = _pair("q4_0")
quantize_q4_1, dequantize_q4_1 = _pair("q4_1")
quantize_q5_0, dequantize_q5_0 = _pair("q5_0")
quantize_q5_1, dequantize_q5_1 = _pair("q5_1")
quantize_q8_0, dequantize_q8_0 = _pair("q8_0")
quantize_q8_1, dequantize_q8_1 = _pair("q8_1")
