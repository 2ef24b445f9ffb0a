"""torch and CuPy arrays on the GPU, on their own library's current stream."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from billfish.arrays import Input
from billfish.backends.cuda.plans import Product
from billfish.errors import DTypeError, complaint

if TYPE_CHECKING:
    from billfish.backends.cuda import CudaWeights


def linear_torch(x: Any, weights: CudaWeights, bias: Any, batch_invariant: bool, activation: str | None = None) -> Any:
    """x [..., K] -> [..., N]."""
    torch = sys.modules["torch"]
    n, k = weights.tensor.shape
    with torch.cuda.device(x.device):
        held = weights.on(x.device.index)
        y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
        if y.numel() == 0:
            return y
        if bias is not None:
            bias = bias.to(device=x.device).contiguous()
        if x.dtype in (torch.float16, torch.bfloat16):
            rows = x.reshape(-1, k)
            # A kernel wants rows that are 16-byte pieces; almost all are.
            if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
                rows = torch.nn.functional.pad(rows, (0, -k % 8)).contiguous()
            if bias is not None and bias.dtype not in (x.dtype, torch.float32):
                bias = bias.float()
            float_bias = bias is not None and bias.dtype == torch.float32
            bfloat16 = x.dtype == torch.bfloat16
            product = Product(held.kind, len(rows), n, k, bfloat16, float_bias, activation, batch_invariant)
            stream = torch.cuda.current_stream().cuda_stream
            bias_at = 0 if bias is None else bias.data_ptr()
            if held.multiply(stream, product, rows.data_ptr(), rows.stride(0), bias_at, y.data_ptr()):
                return y
        w = torch.empty((n, k), dtype=x.dtype, device=x.device)
        held.dequantize(torch.cuda.current_stream().cuda_stream, str(x.dtype).removeprefix("torch."), w.data_ptr())
        y = torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))
        return y if activation is None else getattr(torch.nn.functional, activation)(y)


def linear_cupy(x: Any, weights: CudaWeights, bias: Any, batch_invariant: bool) -> Any:
    """The same for CuPy; its arrays are float16 or float32."""
    cupy = sys.modules["cupy"]
    n, k = weights.tensor.shape
    with x.device:
        held = weights.on(x.device.id)
        stream = cupy.cuda.get_current_stream().ptr
        y = cupy.empty((*x.shape[:-1], n), x.dtype)
        if y.size == 0:
            return y
        bias = None if bias is None else cupy.ascontiguousarray(cupy.asarray(bias), cupy.float32)
        if x.dtype == cupy.float16:
            rows = cupy.ascontiguousarray(x.reshape(-1, k))
            if k % 8 or rows.data.ptr % 16:
                rows = cupy.ascontiguousarray(cupy.pad(rows, ((0, 0), (0, -k % 8))))
            product = Product(held.kind, len(rows), n, k, False, bias is not None, None, batch_invariant)
            bias_at = 0 if bias is None else bias.data.ptr
            if held.multiply(stream, product, rows.data.ptr, rows.shape[1], bias_at, y.data.ptr):
                return y
        w = cupy.empty((n, k), x.dtype)
        held.dequantize(stream, str(x.dtype), w.data.ptr)
        y = x @ w.T
        return y if bias is None else (y + bias).astype(x.dtype)


def dequantize(weights: CudaWeights, out: Input) -> None:
    """W into a contiguous torch or CuPy array [N, K]."""
    source = out.source
    if out.kind == "torch":
        torch = sys.modules["torch"]
        contiguous = source.is_contiguous()
        with torch.cuda.device(source.device):
            held = weights.on(source.device.index)
            if contiguous:
                held.dequantize(torch.cuda.current_stream().cuda_stream, out.dtype_name, source.data_ptr())
    else:
        cupy = sys.modules["cupy"]
        contiguous = source.flags.c_contiguous
        with source.device:
            held = weights.on(source.device.id)
            if contiguous:
                held.dequantize(cupy.cuda.get_current_stream().ptr, out.dtype_name, source.data.ptr)
    if not contiguous:
        raise DTypeError(complaint(out.call, out.argument, "an array with gaps", "a contiguous one on the GPU"))
