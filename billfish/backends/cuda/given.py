"""`gemm_w4a8` on a GPU: x is blocks of q8_0 or q8_1, wherever they are, and y float32 beside them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from billfish.backends.base import Product
from billfish.backends.cuda.byte_plans import BytePlan, given_plan, why_not_given
from billfish.backends.cuda.driver import Buffer, copy_in, copy_out, current, device, native
from billfish.backends.cuda.plans import Gemm
from billfish.backends.cuda.weights import DeviceWeights, native_parts
from billfish.core.arrays import Input
from billfish.core.errors import BackendUnavailable

BLOCK = 32


def linear(product: Product) -> Any:
    """y [M, N] = x @ W.T: x uint8 [M, K / 32 blocks]; y float32 of x's library, in x's place."""
    x, weights = product.x, product.weights
    assert isinstance(x, Input)
    reason = why_not_given(weights.kind)
    if reason:  # scales of this tensor are of another kind than those of most
        raise BackendUnavailable(f"[cuda] {reason}")
    (n, k), (m, row_bytes) = weights.shape, x.shape
    plan = given_plan(Gemm(weights.kind, m, n, k), device(weights.room.ordinal), row_bytes // (k // BLOCK))
    if x.device == "cpu":
        return x.like(_numpy(x.numpy(), weights, plan))
    if x.kind == "cupy":
        cupy = sys.modules["cupy"]
        with x.source.device:
            blocks, y = cupy.ascontiguousarray(x.source), cupy.empty((m, n), cupy.float32)
            work = cupy.empty(plan.work_bytes, cupy.uint8)
            _launch(cupy.cuda.get_current_stream().ptr, weights, plan, blocks.data.ptr, y.data.ptr, work.data.ptr, m)
            return y
    torch = sys.modules["torch"]
    with torch.cuda.device(x.source.device):
        stream = int(torch.cuda.current_stream().cuda_stream)
        weights.note(stream)
        blocks = x.source.contiguous()
        y = torch.empty((m, n), dtype=torch.float32, device=blocks.device)
        work = torch.empty(plan.work_bytes, dtype=torch.uint8, device=blocks.device)
        _launch(stream, weights, plan, blocks.data_ptr(), y.data_ptr(), work.data_ptr(), m)
        return y


def _numpy(blocks: Any, weights: DeviceWeights, plan: BytePlan) -> Any:
    y, ordinal = np.empty((len(blocks), weights.shape[0]), np.float32), weights.room.ordinal
    with current(ordinal):
        sizes = blocks.nbytes, y.nbytes, plan.work_bytes
        x_there, y_there, work = (Buffer(size, ordinal) for size in sizes)
        copy_in(x_there.pointer, blocks, 0)
        _launch(0, weights, plan, x_there.pointer, y_there.pointer, work.pointer, len(blocks))
        copy_out(y, y_there.pointer, 0)
    return y


def _launch(stream: int, weights: DeviceWeights, plan: BytePlan, blocks: int, y: int, work: int, m: int) -> None:
    native(plan.quantize, weights.room.ordinal)(stream, blocks, work, weights.shape[1], plan.stride)
    for part in native_parts(plan, weights, m):
        part(stream, work, plan.stride, 0, y)
