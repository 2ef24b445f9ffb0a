"""Products for a torch layer, from Python to the launch in as few steps as Python can take."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from billfish.backends.cuda.array_products import row_stride
from billfish.backends.cuda.plans import Gemm
from billfish.backends.cuda.weights import ROWS_AT_ONCE, DeviceWeights

if TYPE_CHECKING:
    from torch import Tensor

    from billfish.backends.base import Backend, Direct

KEPT = 1024  # shapes of x, each with its launch


def direct(weights: DeviceWeights, backend: Backend) -> Direct:
    """See `Backend.direct`. x is float16 or bfloat16, on the weights' device, and as the kernel can read it in place.

    A launch is kept for each shape of x. No device is made current: the launch takes its own.
    """
    torch = sys.modules["torch"]
    halves, ordinal = (torch.float16, torch.bfloat16), weights.room.ordinal
    stream_of = torch._C._cuda_getCurrentRawStream
    kept: dict[Any, tuple[Any, int, tuple[int, ...]]] = {}

    def plan(x: Tensor, bias: Tensor | None, invariant: bool) -> tuple[Any, int, tuple[int, ...]] | None:
        """(the launch, numbers from row to row of x, the shape of y)"""
        n, k = weights.shape
        rows = x.numel() // k
        if x.dtype not in halves or x.shape[-1:] != (k,) or not 0 < rows <= ROWS_AT_ONCE or (rows > 1 and k % 8):
            return None
        float_bias = bias is not None and bias.dtype == torch.float32
        if bias is not None and (bias.shape != (n,) or not (float_bias or bias.dtype == x.dtype)):
            return None
        bfloat16 = x.dtype == torch.bfloat16
        product = weights.product(Gemm(weights.kind, rows, n, k, bfloat16, float_bias, None, invariant))
        return (product, row_stride(k), (*x.shape[:-1], n)) if product is not None else None

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor | None:
        at = x.data_ptr()
        if x.get_device() != ordinal or at & 15 or not x.is_contiguous():
            return None
        bias_at, bias_like = 0, None
        if bias is not None:
            if bias.get_device() != ordinal or not bias.is_contiguous():
                return None
            bias_at, bias_like = bias.data_ptr(), (bias.shape, bias.dtype)
        key = x.shape, x.dtype, bias_like, backend.batch_invariant
        found = kept.get(key)
        if found is None:
            found = plan(x, bias, backend.batch_invariant)
            if found is None:
                return None
            if len(kept) >= KEPT:
                kept.clear()
            kept[key] = found
        launch, stride, shape = found
        y = x.new_empty(shape)
        stream = stream_of(ordinal)
        if stream not in weights.streams:
            weights.note(stream)
        launch(stream, at, stride, bias_at, y.data_ptr())
        return y

    return multiply
