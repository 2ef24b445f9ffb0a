"""The Metal engine: kernels for Apple GPUs, called through MLX, and the same kernels on any CPU in an emulator.

    format planes -> MetalWeights (layout.py) -> the kernel for the shape (choose.py) -> y (bridge.py)

`metal` takes MLX arrays and returns MLX arrays; nothing is copied to the host. `metal-emulator` runs the same text, to
test it: it is slow.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.arrays import Input, MlxArrays
from billfish.backends.base import Backend, Problem
from billfish.backends.metal.bridge import Kernels
from billfish.backends.metal.layout import MetalWeights, element_axis, lay_out
from billfish.tensor import QuantizedTensor

MLX = MlxArrays()

__all__ = ["MLX", "EmulatorBackend", "Kernels", "MetalBackend", "MetalProduct", "MetalWeights", "lay_out"]


def has_kernels(problem: Problem) -> tuple[bool, str]:
    """Whether there are kernels for a problem, whoever runs them."""
    if element_axis(problem.format.element) is None:
        return False, f"it has no kernels for the {problem.format.element.name} codes of {problem.format.name}"
    if problem.activations != "exact":
        return False, f"it multiplies x as it is, and activations are {problem.activations!r}"
    return True, ""


class MetalProduct:
    """x @ W.T + bias of MLX arrays, for one W, with a gradient for x and for the bias."""

    def __init__(self, kernels: Kernels, weights: MetalWeights) -> None:
        import mlx.core as mx

        self.weights = weights

        @mx.custom_function
        def product(x: Any, *bias: Any) -> Any:
            return kernels.multiply(x, weights, *bias)

        @product.vjp
        def gradient(primals: Any, cotangent: Any, output: Any) -> Any:
            x, *bias = primals if isinstance(primals, (tuple, list)) else [primals]
            with_x = cotangent @ kernels.dequantize(weights, x.dtype)
            return (with_x, *(cotangent.sum(axis=0).astype(b.dtype) for b in bias)) if bias else with_x

        self._product: Any = product

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def __call__(self, x: Any, bias: Any = None) -> Any:
        """x [..., K] -> [..., N]."""
        import mlx.core as mx

        rows, n = math.prod(x.shape[:-1]), self.weights.shape[0]
        if rows == 0:
            return mx.zeros((*x.shape[:-1], n), x.dtype)
        y = self._product(x.reshape(rows, x.shape[-1]), *([] if bias is None else [bias]))
        return y.reshape(*x.shape[:-1], n)


class KernelBackend(Backend):
    """What both have in common."""

    def matmul_codes(self, codes: NDArray[np.int8], scale: NDArray[np.float32], weights: Any) -> NDArray[np.float32]:
        x = codes.astype(np.float32).reshape(*scale.shape, 32) * scale[:, :, None]
        return self.matmul(x.reshape(codes.shape), weights, None)


class MetalBackend(KernelBackend):
    """Apple GPUs, through `mx.fast.metal_kernel`."""

    name = "metal"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.kind != "mlx":
            return False, f"it computes with MLX arrays, and x is a {problem.kind} array"
        import mlx.core as mx  # there, as x is one of its arrays

        if not mx.metal.is_available():
            return False, "MLX finds no Metal on this machine"
        if mx.default_device().type != mx.DeviceType.gpu:
            return False, "the default device of MLX is the CPU; mx.set_default_device(mx.gpu) changes that"
        return has_kernels(problem)

    @cached_property
    def kernels(self) -> Kernels:
        import mlx.core as mx

        return Kernels(mx.fast.metal_kernel)

    def prepack(self, tensor: QuantizedTensor) -> MetalProduct:
        return MetalProduct(self.kernels, lay_out(tensor).converted(MLX.from_numpy))

    def linear(self, x: Input, weights: Any, n: int, bias: Input | None, activations: str) -> Any:
        return weights(x.source, None if bias is None else bias.source if bias.kind == "mlx" else x.like(bias.numpy()))

    def matmul(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        return MLX.to_numpy(weights(MLX.from_numpy(x), None if bias is None else MLX.from_numpy(bias)))

    def dequantize(self, tensor: QuantizedTensor, out: NDArray[Any]) -> None:
        weights = tensor.prepacked_for(self.name, self.prepack).weights
        out[...] = MLX.to_numpy(self.kernels.dequantize(weights, MLX.from_numpy(out[:0]).dtype))


class EmulatorBackend(KernelBackend):
    """The same kernels on this machine's CPU, NumPy arrays in and out."""

    name = "metal-emulator"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device != "cpu":
            return False, f"it computes in CPU memory, and x is on {problem.device}"
        return has_kernels(problem)

    @cached_property
    def kernels(self) -> Kernels:
        from billfish.backends.metal import emulator  # here, because nobody else needs a compiler

        return Kernels(emulator.metal_kernel)

    def prepack(self, tensor: QuantizedTensor) -> MetalWeights:
        return lay_out(tensor)

    def matmul(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        if len(x) == 0:
            return np.empty((0, weights.shape[0]), x.dtype)
        return self.kernels.multiply(x, weights, bias)

    def dequantize(self, tensor: QuantizedTensor, out: NDArray[Any]) -> None:
        out[...] = self.kernels.dequantize(tensor.prepacked_for(self.name, self.prepack), out.dtype)
