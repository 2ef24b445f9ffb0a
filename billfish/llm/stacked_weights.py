"""Matrices that multiply the same input, as one matrix: one launch of a GPU instead of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_weights import ModelTensors, Tensor
from billfish.models.description import Matrix


def neighbours(tensors: ModelTensors, matrices: Sequence[Matrix]) -> list[tuple[list[Matrix], list[Tensor]]]:
    """Matrices with what the file has of them, those next to each other that are `alike` together."""
    groups: list[tuple[list[Matrix], list[Tensor]]] = []
    for matrix in matrices:
        tensor = tensors.matrix(matrix)
        if not groups or not alike(groups[-1][1][-1], tensor):
            groups.append(([], []))
        groups[-1][0].append(matrix)
        groups[-1][1].append(tensor)
    return groups


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices can be rows of one."""
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype
    specs = a.format.storage_spec(*a.shape, a.group_size)
    return (
        (a.format, a.group_size) == (b.format, b.group_size)
        and same(a.permutation, b.permutation)
        and all(a.storage[name].dtype == b.storage[name].dtype for name in specs)
        and all(np.array_equal(a.storage[name], b.storage[name]) for name, spec in specs.items() if spec.n_axis is None)
    )


def same(a: Array | None, b: Array | None) -> bool:
    """Whether two orders are one."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def stacked(tensors: Sequence[Tensor], rows: Array | None) -> Tensor:
    """Matrices that are `alike` below each other, their rows in another order if there is one."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if isinstance(first, np.ndarray):
        together = np.concatenate([tensor for tensor in tensors if isinstance(tensor, np.ndarray)])
        return together if rows is None else together[rows]
    quantized = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    storage = {}
    for name, spec in first.format.storage_spec(*first.shape, first.group_size).items():
        arrays = [tensor.storage[name] for tensor in quantized]
        whole = arrays[0] if spec.n_axis is None else np.concatenate(arrays, axis=spec.n_axis)
        storage[name] = whole if rows is None else spec.cut(whole, rows)
    shape = sum(tensor.shape[0] for tensor in quantized), first.shape[1]
    return QuantizedTensor.owning(first.format, shape, first.group_size, storage, first.permutation)
