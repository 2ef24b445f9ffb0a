"""A model's matrices for an Apple GPU: packed for our kernels, or plain for MLX's where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from billfish.backends.base import Problem
from billfish.backends.metal import MLX, experts, has_kernels
from billfish.backends.metal.experts import open_gate
from billfish.backends.metal.kernels import MATVEC_ROWS, Kernels
from billfish.backends.metal.layout import MetalWeights, lay_out, lay_out_experts
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_weights import ExpertTensor, ModelTensors, Tensor
from billfish.llm.stacked_weights import alike, neighbours, stacked
from billfish.models.description import Matrix, Stack
from billfish.ops.matmul import dequantize

Weights = MetalWeights | mx.array
EIGHT = 8  # rows of gate, then of up: a panel of the kernels has both
LARGEST = 65504.0  # of float16


@dataclass(frozen=True)
class Linear:
    """y [rows, N] = x [rows, K] W^T + bias, of x's type."""

    kernels: Kernels
    weights: Weights
    bias: mx.array | None = None
    order: mx.array | None = None  # of the columns of x

    def __call__(self, x: mx.array, gate: str | None = None) -> mx.array:
        """gate: see `Kernels.multiply`."""
        if self.order is not None:
            x = mx.take(x, self.order, axis=-1)
        if isinstance(self.weights, MetalWeights):
            return self.kernels.multiply(x, self.weights, self.bias, gate=gate)
        y = x @ self.weights.T
        return (y if self.bias is None else y + self.bias).astype(x.dtype)


@dataclass(frozen=True)
class Joined:
    """Several products with the same x, as few launches as their formats allow."""

    parts: tuple[Linear, ...]
    sizes: tuple[int, ...]  # rows of the matrices that went in

    def __call__(self, x: mx.array) -> list[mx.array]:
        """y of each matrix."""
        return list(mx.split(self.together(x), np.cumsum(self.sizes)[:-1].tolist(), axis=-1))

    def together(self, x: mx.array) -> mx.array:
        """All y, side by side."""
        return _side_by_side([part(x) for part in self.parts])

    def with_last_apart(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """All outputs side by side, and the last one apart if its matrix has another format than its neighbour."""
        *made, last = [part(x) for part in self.parts]
        if made and last.shape[-1] == self.sizes[-1]:
            return _side_by_side(made), last
        return _side_by_side([*made, last]), None


def _side_by_side(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class GateUp:
    """activation(gate x) * up x. `weights` has eight rows of gate, eight of up, and so on; or `apart` has both."""

    activation: str
    weights: Linear | None
    apart: tuple[Linear, ...] = ()

    def __call__(self, x: mx.array) -> mx.array:
        if self.weights is not None and len(x) <= MATVEC_ROWS and isinstance(self.weights.weights, MetalWeights):
            return self.weights(x, self.activation)
        if self.weights is not None:
            both = self.weights(x).reshape(len(x), -1, 2, EIGHT)
            gate, up = both[:, :, 0].reshape(len(x), -1), both[:, :, 1].reshape(len(x), -1)
        else:
            gate, up = (part(x) for part in self.apart)
        return rounded(open_gate(gate.astype(mx.float32), up.astype(mx.float32), self.activation), x.dtype)


def rounded(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """As an activation: in float16 no number becomes infinite."""
    return mx.clip(x, -LARGEST, LARGEST).astype(dtype) if dtype == mx.float16 else x.astype(dtype)


@dataclass(frozen=True)
class ExpertLinear:
    """y [T, k, N] = W[ids] times x [T, K] or [T, k, K], + bias[ids]."""

    kernels: Kernels
    weights: Weights  # MLX's: [E, N, K]
    bias: mx.array | None = None

    def __call__(self, x: mx.array, ids: mx.array, dtype: Any) -> mx.array:
        if isinstance(self.weights, MetalWeights):
            return experts.multiply(self.kernels, x, self.weights, ids, self.bias, dtype)
        # MLX has this product on the CPU, where the emulator runs, for float32 alone.
        inner = x.dtype if mx.default_device() == mx.gpu else mx.float32
        rows = (x[:, None, None] if x.ndim == 2 else x[:, :, None]).astype(inner)
        y = mx.gather_mm(rows, self.weights.astype(inner).swapaxes(1, 2), rhs_indices=ids)[:, :, 0].astype(dtype)
        return y if self.bias is None else y + self.bias[ids].astype(dtype)


class MetalPacker:
    """Reads matrices and lays them out for the kernels, one at a time."""

    def __init__(self, tensors: ModelTensors, kernels: Kernels) -> None:
        self._tensors, self._kernels = tensors, kernels
        self.nbytes = 0
        self.all_packed = True  # every matrix is quantized, except those of experts

    def linear(self, matrix: Matrix) -> Linear:
        return self._linear([matrix], [self._tensors.matrix(matrix)])

    def joined(self, matrices: Sequence[Matrix]) -> Joined:
        """Neighbours of one format become one matrix."""
        parts = tuple(self._linear(*group) for group in neighbours(self._tensors, matrices))
        self._tensors.source.tensors.release()
        return Joined(parts, tuple(matrix.rows for matrix in matrices))

    def gate_up(self, gate: Matrix, up: Matrix, activation: str) -> GateUp:
        """As one matrix whose rows alternate by eights, where the two have one format."""
        tensors = [self._tensors.matrix(matrix) for matrix in (gate, up)]
        if alike(*tensors) and gate.rows % EIGHT == 0:
            order = np.arange(2 * gate.rows).reshape(2, -1, EIGHT).transpose(1, 0, 2).ravel()
            return GateUp(activation, self._linear([gate, up], tensors, order))
        apart = tuple(self._linear([m], [t]) for m, t in zip((gate, up), tensors, strict=True))
        return GateUp(activation, None, apart)

    def experts(self, stack: Stack) -> ExpertLinear:
        tensor = self._tensors.stack(stack)
        bias = self._tensors.bias(stack)
        made = ExpertLinear(self._kernels, self._packed(tensor), None if bias is None else mx.array(bias))
        self._tensors.source.tensors.release()
        return made

    def table(self, matrix: Matrix) -> Weights:
        """A matrix whose rows are looked up."""
        tensor = self._tensors.table(matrix)
        if isinstance(tensor, QuantizedTensor) and tensor.permutation is not None:
            tensor = dequantize(tensor)
        return self._packed(tensor)

    def rows(self, table: Weights, tokens: mx.array) -> mx.array:
        """Rows of a table in float32."""
        if isinstance(table, MetalWeights):
            return self._kernels.embed(table, tokens, mx.float32)
        return table[tokens].astype(mx.float32)

    def _linear(self, matrices: Sequence[Matrix], tensors: Sequence[Tensor], rows: Any = None) -> Linear:
        tensor = stacked(tensors, rows)
        biases = [self._tensors.bias(matrix) for matrix in matrices]
        bias = None
        if any(each is not None for each in biases):
            parts = [np.zeros(m.rows, np.float32) if b is None else b for b, m in zip(biases, matrices, strict=True)]
            together = np.concatenate(parts)
            bias = mx.array(together if rows is None else together[rows])
        order = tensor.permutation if isinstance(tensor, QuantizedTensor) else None
        weights = self._packed(tensor)
        self.all_packed &= isinstance(weights, MetalWeights)
        return Linear(self._kernels, weights, bias, None if order is None else mx.array(order))

    def _packed(self, tensor: Tensor | ExpertTensor) -> Weights:
        if isinstance(tensor, (QuantizedTensor, QuantizedExperts)):
            *_, n, k = tensor.shape
            problem = Problem("matmul", tensor.format, tensor.group_size, 1, n, k, np.dtype(np.float16), "mlx")
            if has_kernels(problem)[0]:
                laid_out = lay_out(tensor) if isinstance(tensor, QuantizedTensor) else lay_out_experts(list(tensor))
                weights: Weights = laid_out.converted(MLX.from_numpy)
                self.nbytes += weights.nbytes
                return weights
            every = [tensor] if isinstance(tensor, QuantizedTensor) else list(tensor)
            decoded = np.stack([dequantize(each).astype(np.float16) for each in every])
            tensor = decoded[0] if isinstance(tensor, QuantizedTensor) else decoded
        weights = mx.array(tensor.astype(np.float32 if tensor.dtype == np.float32 else np.float16))
        self.nbytes += int(weights.nbytes)
        return weights
