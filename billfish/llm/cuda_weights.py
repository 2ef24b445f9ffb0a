"""The matrices of a model on a GPU: those that share x are one matrix, where they are of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.axes import why_not
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.launcher import DeviceMatrix, sent
from billfish.core.errors import ModelError, failure
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_weights import CALL, ModelTensors, Tensor
from billfish.llm.stacked_weights import alike, neighbours, stacked
from billfish.models.description import Matrix, Vector
from billfish.ops.matmul import dequantize

EIGHT = 8  # rows of gate, then of up, that alternate; and numbers in 16 bytes


class GpuWeights:
    """Reads tensors, one place of a layer at a time, and packs them on a GPU."""

    def __init__(self, tensors: ModelTensors, ordinal: int) -> None:
        self.tensors, self.ordinal = tensors, ordinal
        self._orders: dict[bytes, Buffer] = {}  # matrices with one order share it, and x is put into it once for them
        self.nbytes = 0

    def send(self, array: NDArray[Any]) -> Buffer:
        """A copy of an array on the device."""
        return sent(array, self.ordinal)

    def vector(self, vector: Vector | None) -> Buffer | None:
        """Its numbers in float32; None for none."""
        return None if vector is None else self.send(self.tensors.vector(vector))

    def matrix(self, matrix: Matrix) -> DeviceMatrix:
        [made] = self.matrices([matrix])
        return made

    def table(self, table: Matrix) -> DeviceWeights:
        """A matrix with a row for each token."""
        tensor = self.tensors.table(table)
        if isinstance(tensor, QuantizedTensor) and tensor.permutation is not None:
            tensor = dequantize(tensor)
        return self._pack(tensor)

    def embedding_and_head(self) -> tuple[DeviceWeights, DeviceMatrix]:
        """The head is the embedding where the file has no other."""
        c = self.tensors.config
        embedding = self.table(c.embedding)
        if c.head == c.embedding:
            self.tensors.matrix(c.head)  # is the same; it counts as one of the kinds
            return embedding, DeviceMatrix(embedding)
        return embedding, self.matrix(c.head)

    def matrices(self, matrices: Sequence[Matrix]) -> tuple[DeviceMatrix, ...]:
        """Matrices, neighbours of one kind as one."""
        return tuple(self._matrix(*group) for group in neighbours(self.tensors, matrices))

    def alternating(self, *matrices: Matrix) -> tuple[DeviceMatrix, ...]:
        """Two matrices as one whose rows alternate by eights; or two, where that cannot be."""
        gate, up = (self.tensors.matrix(matrix) for matrix in matrices)
        rows = len(gate) if isinstance(gate, np.ndarray) else gate.shape[0]
        if not alike(gate, up) or rows % EIGHT:
            return tuple(self._matrix([matrix], [t]) for matrix, t in zip(matrices, (gate, up), strict=True))
        order = np.arange(2 * rows).reshape(2, -1, EIGHT).transpose(1, 0, 2).ravel()
        return (self._matrix(matrices, [gate, up], order),)

    def _matrix(self, matrices: Sequence[Matrix], tensors: Sequence[Tensor], rows: Array | None = None) -> DeviceMatrix:
        tensor = stacked(tensors, rows)
        if tensor.shape[1] % EIGHT:
            problem = (
                f"the GPU cannot run {matrices[0].name}.weight: rows of {tensor.shape[1]} numbers, no multiple of 8"
            )
            raise ModelError(failure(CALL, problem, "Use device cpu."))
        weights = self._pack(tensor)
        biases = [self.tensors.bias(matrix) for matrix in matrices]
        bias = None
        if any(b is not None for b in biases):
            parts = [np.zeros(t.shape[0], np.float32) if b is None else b for b, t in zip(biases, tensors, strict=True)]
            together = np.concatenate(parts)
            bias = sent(together if rows is None else together[rows], self.ordinal)
        order = tensor.permutation if isinstance(tensor, QuantizedTensor) and multiplied(tensor) else None
        if order is None:
            return DeviceMatrix(weights, bias)
        key = order.tobytes()
        if key not in self._orders:
            self._orders[key] = sent(order, self.ordinal)
        return DeviceMatrix(weights, bias, self._orders[key])

    def _pack(self, tensor: Tensor) -> DeviceWeights:
        place = f"cpu:{self.ordinal}"  # memory of ours, not torch's
        if isinstance(tensor, QuantizedTensor) and multiplied(tensor):
            weights = DeviceWeights.pack(tensor, place).without_planes()
        else:
            weights = DeviceWeights.pack_plain(
                dequantize(tensor) if isinstance(tensor, QuantizedTensor) else tensor, place
            )
        self.nbytes += weights.nbytes
        return weights


def multiplied(tensor: QuantizedTensor) -> bool:
    """Whether the kernels multiply with a tensor as it is. Others become plain weights."""
    return not why_not(tensor.format, tensor.group_size, tensor.shape[1])
