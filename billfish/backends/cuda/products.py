"""Products of torch, CuPy and NumPy arrays, and weights decoded into them, on each library's own current stream."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import Backend, Direct, Product
from billfish.backends.cuda.device_weights import ROWS_AT_ONCE, DeviceWeights, native_parts
from billfish.backends.cuda.driver import Buffer, copy_in, copy_out, current, device, native
from billfish.backends.cuda.plans import BytePlan, Gemm, given_plan, why_not_given
from billfish.core.arrays import Input
from billfish.core.errors import BackendUnavailable, failure

if TYPE_CHECKING:
    from torch import Tensor


DEFAULT_STREAM = 0
STRIDES = 1 << 31  # kernels take a stride as an int


def row_stride(k: int) -> int:
    """The least stride of rows that begin at multiples of 16 bytes."""
    return -(-k // 8) * 8


def can_be_read(rows: int, stride: int, k: int, pointer: int) -> bool:
    """Whether a kernel can read x [rows, k] in place: rows begin at multiples of 16 bytes and do not overlap."""
    return pointer % 16 == 0 and (rows == 1 or (stride % 8 == 0 and k <= stride < STRIDES))


def linear_torch(
    x: Any,
    weights: DeviceWeights,
    bias: Any,
    batch_invariant: bool,
    activation: str | None = None,
    activations: str = "exact",
) -> Any:
    """x [..., K] -> [..., N]."""
    torch = sys.modules["torch"]
    n, k = weights.shape
    with torch.cuda.device(x.device):
        y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
        if y.numel() == 0:
            return y
        stream = _stream_with(weights)
        if bias is not None:
            bias = bias.to(device=x.device).contiguous()
        if x.dtype in (torch.float16, torch.bfloat16):
            rows = x.reshape(-1, k)
            if rows.stride(1) != 1 or not can_be_read(len(rows), rows.stride(0), k, rows.data_ptr()):
                rows = torch.nn.functional.pad(rows, (0, row_stride(k) - k)).contiguous()
            if bias is not None and bias.dtype not in (x.dtype, torch.float32):
                bias = bias.float()
            float_bias = bias is not None and bias.dtype == torch.float32
            bfloat16 = x.dtype == torch.bfloat16
            gemm = Gemm(weights.kind, len(rows), n, k, bfloat16, float_bias, activation, batch_invariant)
            gemm = replace(gemm, activations=activations)
            stride = rows.stride(0) if len(rows) > 1 else row_stride(k)
            bias_at = 0 if bias is None else bias.data_ptr()
            work = torch.empty(weights.work_bytes(gemm), dtype=torch.uint8, device=x.device)
            if weights.multiply(stream, gemm, rows.data_ptr(), stride, bias_at, y.data_ptr(), work.data_ptr()):
                return y
        w = torch.empty((n, k), dtype=x.dtype, device=x.device)
        weights.dequantize(stream, str(x.dtype).removeprefix("torch."), w.data_ptr())
        y = torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))
        return y if activation is None else getattr(torch.nn.functional, activation)(y)


def _stream_with(weights: DeviceWeights) -> int:
    """torch's current stream, which is to read weights."""
    stream = int(sys.modules["torch"].cuda.current_stream().cuda_stream)
    weights.note(stream)
    return stream


def linear_cupy(x: Any, weights: DeviceWeights, bias: Any, batch_invariant: bool, activations: str = "exact") -> Any:
    """The same for CuPy, whose arrays are float16 or float32."""
    cupy = sys.modules["cupy"]
    n, k = weights.shape
    with x.device:
        stream = cupy.cuda.get_current_stream().ptr
        y = cupy.empty((*x.shape[:-1], n), x.dtype)
        if y.size == 0:
            return y
        bias = None if bias is None else cupy.ascontiguousarray(cupy.asarray(bias), cupy.float32)
        if x.dtype == cupy.float16:
            rows = cupy.ascontiguousarray(x.reshape(-1, k))
            if k % 8 or rows.data.ptr % 16:
                rows = cupy.ascontiguousarray(cupy.pad(rows, ((0, 0), (0, row_stride(k) - k))))
            gemm = Gemm(weights.kind, len(rows), n, k, False, bias is not None, None, batch_invariant)
            gemm = replace(gemm, activations=activations)
            bias_at = 0 if bias is None else bias.data.ptr
            work = cupy.empty(weights.work_bytes(gemm), cupy.uint8)
            if weights.multiply(stream, gemm, rows.data.ptr, rows.shape[1], bias_at, y.data.ptr, work.data.ptr):
                return y
        w = cupy.empty((n, k), x.dtype)
        weights.dequantize(stream, str(x.dtype), w.data.ptr)
        y = x @ w.T
        return y if bias is None else (y + bias).astype(x.dtype)


def linear_numpy(
    x: NDArray[Any],
    weights: DeviceWeights,
    bias: NDArray[Any] | None,
    batch_invariant: bool,
    activations: str = "exact",
) -> NDArray[Any]:
    """The same for NumPy, there and back: x [..., K], float16 or bfloat16."""
    n, k = weights.shape
    y = np.empty((*x.shape[:-1], n), x.dtype)
    if y.size == 0:
        return y
    rows, ordinal = y.size // n, weights.room.ordinal
    padded = np.zeros((rows, row_stride(k)), x.dtype)
    padded[:, :k] = x.reshape(rows, k)
    gemm = Gemm(weights.kind, rows, n, k, x.dtype != np.float16, bias is not None, None, batch_invariant)
    gemm = replace(gemm, activations=activations)
    with current(ordinal):
        x_there, y_there = Buffer(padded.nbytes, ordinal), Buffer(y.nbytes, ordinal)
        work = Buffer(weights.work_bytes(gemm), ordinal)
        copy_in(x_there.pointer, padded.view(np.uint16), DEFAULT_STREAM)
        added, bias_at = None, 0
        if bias is not None:
            added = Buffer(4 * n, ordinal)
            copy_in(added.pointer, np.asarray(bias, np.float32), DEFAULT_STREAM)
            bias_at = added.pointer
        pointers = bias_at, y_there.pointer, work.pointer
        if not weights.multiply(DEFAULT_STREAM, gemm, x_there.pointer, padded.shape[1], *pointers):
            raise BackendUnavailable(f"cuda: {rows} rows on {device(ordinal).name} need torch or CuPy arrays.")
        copy_out(y.view(np.uint16), y_there.pointer, DEFAULT_STREAM)
    return y


def dequantize(weights: DeviceWeights, out: Input) -> None:
    """W into an array [N, K] of any library."""
    if out.device == "cpu":
        wanted = out.numpy()
        decoded = np.empty(wanted.shape, wanted.dtype)
        with current(weights.room.ordinal):
            there = Buffer(decoded.nbytes, weights.room.ordinal)
            weights.dequantize(DEFAULT_STREAM, out.dtype_name, there.pointer)
            copy_out(decoded.view(np.uint8), there.pointer, DEFAULT_STREAM)
        wanted[...] = decoded
        return
    source = out.source
    if out.kind == "torch":
        torch = sys.modules["torch"]
        target = source if source.is_contiguous() else out.adapter.empty_like(source)
        with torch.cuda.device(source.device):
            weights.dequantize(_stream_with(weights), out.dtype_name, target.data_ptr())
    else:
        cupy = sys.modules["cupy"]
        target = source if source.flags.c_contiguous else out.adapter.empty_like(source)
        with source.device:
            weights.dequantize(cupy.cuda.get_current_stream().ptr, out.dtype_name, target.data.ptr)
    if target is not source:
        source[...] = target


# ---- for a torch layer, in as few steps as Python can take -----------------------------------------------------------


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


# ---- x in blocks of q8_0 or q8_1 -------------------------------------------------------------------------------------


BLOCK = 32


def linear_blocks(product: Product) -> Any:
    """y [M, N] = x @ W.T: x uint8 [M, K / 32 blocks]; y float32 of x's library, in x's place."""
    x, weights = product.x, product.weights
    assert isinstance(x, Input)
    reason = why_not_given(weights.kind)
    if reason:  # scales of this tensor are of another kind than those of most
        raise BackendUnavailable(failure("cuda", reason))
    (n, k), (m, row_bytes) = weights.shape, x.shape
    plan = given_plan(Gemm(weights.kind, m, n, k), device(weights.room.ordinal), row_bytes // (k // BLOCK))
    if x.device == "cpu":
        return x.like(_blocks_numpy(x.numpy(), weights, plan))
    if x.kind == "cupy":
        cupy = sys.modules["cupy"]
        with x.source.device:
            blocks, y = cupy.ascontiguousarray(x.source), cupy.empty((m, n), cupy.float32)
            work = cupy.empty(plan.work_bytes, cupy.uint8)
            _launch_blocks(
                cupy.cuda.get_current_stream().ptr, weights, plan, blocks.data.ptr, y.data.ptr, work.data.ptr, m
            )
            return y
    torch = sys.modules["torch"]
    with torch.cuda.device(x.source.device):
        stream = int(torch.cuda.current_stream().cuda_stream)
        weights.note(stream)
        blocks = x.source.contiguous()
        y = torch.empty((m, n), dtype=torch.float32, device=blocks.device)
        work = torch.empty(plan.work_bytes, dtype=torch.uint8, device=blocks.device)
        _launch_blocks(stream, weights, plan, blocks.data_ptr(), y.data_ptr(), work.data_ptr(), m)
        return y


def _blocks_numpy(blocks: Any, weights: DeviceWeights, plan: BytePlan) -> Any:
    y, ordinal = np.empty((len(blocks), weights.shape[0]), np.float32), weights.room.ordinal
    with current(ordinal):
        sizes = blocks.nbytes, y.nbytes, plan.work_bytes
        x_there, y_there, work = (Buffer(size, ordinal) for size in sizes)
        copy_in(x_there.pointer, blocks, 0)
        _launch_blocks(0, weights, plan, x_there.pointer, y_there.pointer, work.pointer, len(blocks))
        copy_out(y, y_there.pointer, 0)
    return y


def _launch_blocks(stream: int, weights: DeviceWeights, plan: BytePlan, blocks: int, y: int, work: int, m: int) -> None:
    native(plan.quantize, weights.room.ordinal)(stream, blocks, work, weights.shape[1], plan.stride)
    for part in native_parts(plan, weights, m):
        part(stream, work, plan.stride, 0, y)
