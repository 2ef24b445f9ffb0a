"""The Metal engine: kernels for Apple GPUs, called through MLX, and the same kernels on any CPU in an emulator.

    format planes -> MetalWeights (layout.py) -> the kernel for the shape and the call (kernels.py) -> y

`metal` takes MLX arrays and returns MLX arrays; nothing is copied to the host. `metal-emulator` runs the same text, to
test it: it is slow.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import Backend, ExpertBlock, ExpertProduct, NumpyBackend, Problem, Product
from billfish.backends.metal import experts
from billfish.backends.metal.experts import MetalExperts
from billfish.backends.metal.kernels import Kernels
from billfish.backends.metal.layout import MetalWeights, element_axis, lay_out, lay_out_experts
from billfish.backends.metal.matrix_units import without_matrix_units
from billfish.core.activations import IntegerActivations
from billfish.core.arrays import Input, MlxArrays
from billfish.core.errors import BackendUnavailable
from billfish.core.extras import how_to_install
from billfish.core.formats.meaning import decodes_plainly
from billfish.core.mixture import checked_ids, checked_routing, open_gate
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor

MLX = MlxArrays()
GROUPS = (16, 32, 64, 128, 256)
NO_METAL = "MLX finds no Metal on this machine"

__all__ = ["MLX", "EmulatorBackend", "Kernels", "MetalBackend", "MetalProduct", "MetalWeights", "lay_out"]


def has_kernels(problem: Problem) -> tuple[bool, str]:
    """Whether there are kernels for a problem, whoever runs them."""
    if element_axis(problem.format.element) is None:
        return False, f"no kernels for the {problem.format.element.name} codes of {problem.format.name}"
    if not decodes_plainly(problem.format):
        return False, f"no kernels for {problem.format.name}, which has a decoder of its own"
    if problem.group_size not in GROUPS and problem.group_size < problem.k:
        return False, f"group_size is {problem.group_size}; supported are {', '.join(map(str, GROUPS))}, or all of K"
    if problem.activations not in ("exact", "given"):
        return False, f"supports activations 'exact', not {problem.activations!r}"
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
            """In float32, on weights decoded to it, as on the CPU."""
            x, *bias = primals if isinstance(primals, (tuple, list)) else [primals]
            wide = cotangent.astype(mx.float32)
            with_x = (wide @ kernels.dequantize(weights, mx.float32)).astype(x.dtype)
            return (with_x, *(wide.sum(axis=0).astype(b.dtype) for b in bias)) if bias else with_x

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


class MetalBackend(Backend):
    """Apple GPUs, through `mx.fast.metal_kernel`."""

    name = "metal"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.kind != "mlx":
            return False, f"runs on MLX arrays; x is a {problem.kind} array"
        import mlx.core as mx  # there, as x is one of its arrays

        if not mx.metal.is_available():
            return False, NO_METAL
        if mx.default_device().type != mx.DeviceType.gpu:
            return False, "the default device of MLX is the CPU. Call mx.set_default_device(mx.gpu)."
        return has_kernels(problem)

    def usable(self) -> tuple[bool, str]:
        if sys.platform != "darwin":
            return False, "Metal needs macOS"
        if importlib.util.find_spec("mlx") is None:
            return False, f"mlx is not installed. Run: {how_to_install('metal')}"
        import mlx.core as mx

        return (True, "Apple GPU, for MLX arrays") if mx.metal.is_available() else (False, NO_METAL)

    @cached_property
    def kernels(self) -> Kernels:
        import mlx.core as mx

        kernels = Kernels(mx.fast.metal_kernel)
        kernels.without_units = without_matrix_units(kernels)
        return kernels

    def pack(self, tensor: QuantizedTensor, place: str = "cpu") -> MetalProduct:
        return MetalProduct(self.kernels, lay_out(tensor).converted(MLX.from_numpy))

    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        return [self._linear(product) for product in products]

    def _linear(self, product: Product) -> Any:
        assert isinstance(product.x, Input)
        return product.weights(product.x.source, self._beside(product.bias))

    def pack_experts(self, stack: QuantizedExperts, place: str = "cpu") -> MetalExperts:
        return MetalExperts(self.kernels, lay_out_experts(list(stack)).converted(MLX.from_numpy))

    def expert_linear(self, product: ExpertProduct, activations: str) -> Any:
        x = product.x
        return product.weights(x.source, self._beside(product.ids), self._beside(product.biases))

    def experts(self, block: ExpertBlock, activations: str) -> Any:
        return experts.block(
            lambda x, weights, ids, biases, dtype: weights(x, ids, biases, dtype),
            experts.open_gate,
            block.x.source,
            self._beside(block.ids),
            self._beside(block.routing),
            block.gate_up,
            [self._beside(biases) for biases in block.gate_up_biases],
            block.down,
            self._beside(block.down_biases),
            block.activation,
        )

    @staticmethod
    def _beside(array: Input | None) -> Any:
        """An argument as an MLX array."""
        return None if array is None else array.source if array.kind == "mlx" else MLX.from_numpy(array.numpy())

    def dequantize(self, tensor: QuantizedTensor, out: Input) -> None:
        target, weights = out.numpy(), tensor.made((self.name, out.place), lambda: self.pack(tensor)).weights
        target[...] = MLX.to_numpy(self.kernels.dequantize(weights, MLX.from_numpy(target[:0]).dtype))


class EmulatorBackend(NumpyBackend):
    """The same kernels on this machine's CPU, NumPy arrays in and out."""

    name = "metal-emulator"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device != "cpu":
            return False, f"runs on arrays in CPU memory; x is on {problem.device}"
        return has_kernels(problem)

    def usable(self) -> tuple[bool, str]:
        try:
            from billfish.backends.emulator.compiler import find_compiler
        except ImportError:  # wheels leave it out
            return False, "is part of a checkout only. Run there: pip install --editable '.[metal-emulator]'"
        try:
            return True, f"kernels compiled by {find_compiler().version}; slow"
        except BackendUnavailable as error:
            return False, str(error).removeprefix("metal_kernel: ")

    @cached_property
    def kernels(self) -> Kernels:
        from billfish.backends import emulator
        # here, because nobody else needs a compiler

        return Kernels(emulator.metal_kernel)

    def pack(self, tensor: QuantizedTensor, place: str = "cpu") -> MetalWeights:
        return lay_out(tensor).converted(np.array)  # copies: packed weights do not keep the tensor's arrays

    def multiply(
        self, x: NDArray[Any] | IntegerActivations, weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        rows = x.values(weights.shape[1]).astype(np.float32) if isinstance(x, IntegerActivations) else x
        if len(rows) == 0:
            return np.empty((0, weights.shape[0]), rows.dtype)
        return self.kernels.multiply(rows, weights, bias)

    def pack_experts(self, stack: QuantizedExperts, place: str = "cpu") -> MetalWeights:
        return lay_out_experts(list(stack))

    def expert_linear(self, product: ExpertProduct, activations: str) -> Any:
        x, ids = product.x.numpy(), checked_ids(product.ids, product.experts)
        biases = None if product.biases is None else product.biases.numpy()
        return product.x.like(experts.multiply(self.kernels, x, product.weights, ids, biases, x.dtype))

    def experts(self, block: ExpertBlock, activations: str) -> Any:
        y = experts.block(
            partial(experts.multiply, self.kernels),
            open_gate,
            block.x.numpy(),
            checked_ids(block.ids, block.experts),
            checked_routing(block.routing),
            block.gate_up,
            [None if biases is None else biases.numpy() for biases in block.gate_up_biases],
            block.down,
            None if block.down_biases is None else block.down_biases.numpy(),
            block.activation,
        )
        return block.x.like(y)

    def dequantize(self, tensor: QuantizedTensor, out: Input) -> None:
        target, weights = out.numpy(), tensor.made((self.name, out.place), lambda: self.pack(tensor))
        target[...] = self.kernels.dequantize(weights, target.dtype)
