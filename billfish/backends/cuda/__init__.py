"""The CUDA engine: kernels in CUDA C++ that NVRTC compiles at first use, for torch, CuPy and NumPy arrays.

    format planes -> bricks on the GPU (layout.py) -> a plan for each product (plans.py) -> a launch (driver.py) -> y

Nothing here is imported from CUDA until a product is to run on it: without a GPU or without `billfish[cuda]` the
backend says no, with the reason.
"""

from __future__ import annotations

from copy import copy
from ctypes import c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.arrays import Input
from billfish.backends.base import Backend, Problem
from billfish.backends.cuda import arrays
from billfish.backends.cuda.driver import Buffer, Launch, device, no_tensor_map, tensor_map
from billfish.backends.cuda.layout import Kind, brick_shape, describe, group_parts
from billfish.backends.cuda.plans import Product, plan
from billfish.errors import BackendUnavailable
from billfish.tensor import QuantizedTensor

OUTPUTS = {"float32": "float", "float16": "Stored<F16>", "bfloat16": "Stored<BF16>"}
DEFAULT_STREAM = 0


class DeviceWeights:
    """Bricks in the memory of one device. `kind` says what kernels are compiled for."""

    def __init__(self, tensor: QuantizedTensor, ordinal: int) -> None:
        description = describe(tensor)
        self.kind: Kind = description.kind
        self.shape, self.ordinal = tensor.shape, ordinal
        n, k = tensor.shape
        down, along = brick_shape(n, k)
        codes, groups = (Buffer.of(a, ordinal) for a in (description.codes, group_parts(description)))
        self.row_scale = Buffer.of(description.row_scale, ordinal)
        self.bricks = Buffer(down * along * self.kind.brick_bytes, ordinal)
        launch = Launch("pack.cu", "marlin_pack", tuple(sorted(self.kind.macros().items())), (along, down), 128)
        launch(ordinal, DEFAULT_STREAM, *map(c_void_p, (codes.pointer, groups.pointer, self.bricks.pointer)), n, k)
        # The caller may use any stream next; and the codes must stay until the kernel has read them.
        self.bricks.to_numpy(np.empty(1, np.uint8))

    @property
    def nbytes(self) -> int:
        return self.bricks.nbytes + self.row_scale.nbytes

    def clone(self) -> DeviceWeights:
        """The same in other memory, on the same device."""
        other = copy(self)
        other.bricks, other.row_scale = self.bricks.clone(), self.row_scale.clone()
        return other

    def dequantize(self, stream: int, dtype: str, out: int) -> None:
        """W [N, K] to the memory at `out`."""
        n, k = self.shape
        down, along = brick_shape(n, k)
        macros = tuple(sorted((self.kind.macros() | {"OUTPUT": OUTPUTS[dtype]}).items()))
        launch = Launch("dequantize.cu", "marlin_dequantize", macros, (along, down), 32)
        launch(self.ordinal, stream, *map(c_void_p, (self.bricks.pointer, self.row_scale.pointer, out)), n, k)

    def multiply(self, stream: int, product: Product, x: int, x_stride: int, bias: int, y: int) -> bool:
        """y = x W.T + bias, all at these addresses; False if the product is one for a library (see plans.py)."""
        chosen = plan(product, device(self.ordinal))
        if chosen is None:
            return False
        m, n, k = product.m, product.n, product.k
        capable = device(self.ordinal).capability >= (9, 0)
        box = tensor_map(x, product.bfloat16, m, k, x_stride, chosen.box_rows) if capable else no_tensor_map()
        pointers = [self.bricks.pointer, self.row_scale.pointer]
        if chosen.launch.name == "marlin_gemm_small":
            pointers += [x, bias, y]
            chosen.launch(self.ordinal, stream, box, *map(c_void_p, pointers), m, n, k, x_stride)
        else:
            chosen.launch(self.ordinal, stream, box, *map(c_void_p, [*pointers, bias, y]), m, n, k)
        return True


class CudaWeights:
    """A tensor's weights on as many devices as they were used on."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.tensor = tensor
        self._on: dict[int, DeviceWeights] = {}

    def on(self, ordinal: int) -> DeviceWeights:
        if ordinal not in self._on:
            self._on[ordinal] = DeviceWeights(self.tensor, ordinal)
        return self._on[ordinal]


class CudaBackend(Backend):
    """NVIDIA GPUs from sm_80 on. x is float16 or bfloat16; float32 goes through the library it came from.

    batch_invariant: set it on the instance, and a row of a batch gives the same bits as that row alone. Many rows are
    then slower.
    """

    name = "cuda"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device not in ("cuda", "cpu"):
            return False, f"it computes on NVIDIA GPUs, and x is on {problem.device}"
        if problem.activations != "exact":
            return False, f'it multiplies x as it is, activations="exact", not {problem.activations!r}'
        if problem.device == "cpu" and problem.operation == "matmul" and problem.dtype == np.float32:
            return False, "it multiplies float16 and bfloat16; float32 only for torch and CuPy arrays on the GPU"
        try:
            device()
        except BackendUnavailable as error:
            return False, str(error).removeprefix("[cuda] ")
        return True, ""

    def prepack(self, tensor: QuantizedTensor) -> CudaWeights:
        return CudaWeights(tensor)

    def linear(self, x: Input, weights: Any, n: int, bias: Input | None, activations: str) -> Any:
        if x.kind == "torch" and x.device == "cuda":
            from billfish.backends.cuda import torch_op

            return torch_op.linear(x.source, weights, None if bias is None else bias.source, self.batch_invariant)
        if x.kind == "cupy":
            return arrays.linear_cupy(x.source, weights, None if bias is None else bias.source, self.batch_invariant)
        return super().linear(x, weights, n, bias, activations)

    def matmul(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        """NumPy arrays: there and back."""
        n, k = weights.tensor.shape
        y = np.empty((len(x), n), x.dtype)
        if len(x) == 0:
            return y
        held = weights.on(0)
        stride = -(-k // 8) * 8  # rows must begin at multiples of 16 bytes
        padded = np.zeros((len(x), stride), x.dtype)
        padded[:, :k] = x
        x_there, y_there = Buffer.of(padded.view(np.uint16), 0), Buffer(y.nbytes, 0)
        added = None if bias is None else Buffer.of(np.asarray(bias, np.float32), 0)
        product = Product(held.kind, len(x), n, k, x.dtype != np.float16, bias is not None, None, self.batch_invariant)
        bias_at = 0 if added is None else added.pointer
        if not held.multiply(DEFAULT_STREAM, product, x_there.pointer, stride, bias_at, y_there.pointer):
            raise BackendUnavailable(f"[cuda] {len(x)} rows on {device().name}: only for torch and CuPy arrays")
        y_there.to_numpy(y.view(np.uint16))
        return y

    def matmul_codes(self, codes: NDArray[np.int8], scale: NDArray[np.float32], weights: Any) -> NDArray[np.float32]:
        raise BackendUnavailable("[cuda] x that is quantized already: it multiplies float16 and bfloat16 x")

    def dequantize(self, tensor: QuantizedTensor, out: NDArray[Any]) -> None:
        target = np.empty(out.shape, out.dtype)
        held = tensor.prepacked_for(self.name, self.prepack).on(0)
        there = Buffer(out.nbytes, 0)
        held.dequantize(DEFAULT_STREAM, out.dtype.name, there.pointer)
        there.to_numpy(target.view(np.uint8))
        out[...] = target

    def dequantize_there(self, tensor: QuantizedTensor, out: Input) -> None:
        arrays.dequantize(tensor.prepacked_for(self.name, self.prepack), out)


__all__ = ["CudaBackend", "CudaWeights", "DeviceWeights"]
