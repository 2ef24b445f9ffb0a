"""Tensors that follow from others: under other names, in another order of rows, stacked, or taken apart.

No bit of a quantized matrix changes. What is read is a view of the file where the storage allows it, and at most one
stack in memory where matrices that lie apart become one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Description, Entry, Span, Tensor, check_experts, check_span, cut_array
from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.core.format import Format
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor, join_rows, why_not_joined


class Renamed(Entry):
    """A tensor under another name, a matrix perhaps with rows and columns in another order, or with some rows only.

    rows, columns: which one of the entry's comes where. A quantized matrix whose blocks are larger than what moves
    together keeps its columns, and says their order.
    """

    def __init__(
        self,
        entry: Entry,
        name: str,
        rows: NDArray[np.int64] | None = None,
        columns: NDArray[np.int64] | None = None,
    ) -> None:
        about, self.entry, self.rows, self.columns = entry.description, entry, rows, columns
        if rows is not None and len(rows) != about.shape[0]:
            nbytes = about.nbytes * len(rows) // max(1, about.shape[0])
            about = replace(about, shape=(len(rows), *about.shape[1:]), nbytes=nbytes)
        if columns is not None and (len(about.shape) != 2 or about.shape[1] != len(columns)):
            raise CheckpointError(failure(CALL, f"{about.name} has the shape {about.shape}, not [N, {len(columns)}]"))
        self._whole = columns is None or about.format is None or self._moves_blocks(about, columns)
        if not self._whole:
            about = replace(about, act_order=True)
        super().__init__(replace(about, name=name), entry.parts)

    @staticmethod
    def _moves_blocks(about: Description, columns: NDArray[np.int64]) -> bool:
        assert about.format is not None
        assert about.group_size is not None
        specs = about.format.storage_spec(about.shape[0], about.shape[1], about.group_size)
        runs = {spec.run for spec in specs.values() if spec.k_axis is not None}
        return not about.act_order and all(_in_runs(columns, run) for run in runs)

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        if self.columns is not None:
            return self._cut(self._in_order(self._rows(rows, None)), columns)
        return self.entry.read(rows, columns, experts) if self.rows is None else self._rows(rows, columns)

    def _rows(self, rows: Span | None, columns: Span | None) -> Tensor:
        if self.rows is None:
            return self.entry.read(rows, columns)
        start, stop = check_span("rows", rows, len(self.rows))
        chosen = self.rows[start:stop]
        first = int(chosen.min())  # rows move inside of their head, so that whole heads cost no more than themselves
        part = self.entry.read((first, int(chosen.max()) + 1), columns)
        return part[chosen - first] if isinstance(part, np.ndarray) else part.take_rows(chosen - first)

    def _in_order(self, tensor: Tensor) -> Tensor:
        """With its columns in order."""
        assert self.columns is not None
        if isinstance(tensor, np.ndarray):
            return tensor[:, self.columns]
        assert isinstance(tensor, QuantizedTensor)
        if not self._whole:
            order = self._order(tensor.permutation)
            return QuantizedTensor.owning(tensor.format, tensor.shape, tensor.group_size, tensor.storage, order)
        specs, storage = tensor.format.storage_spec(*tensor.shape, tensor.group_size), dict(tensor.storage)
        for name, spec in specs.items():
            if spec.k_axis is not None:
                steps = self.columns[:: spec.run, None] // spec.run * spec.items + np.arange(spec.items)
                storage[name] = np.take(storage[name], steps.ravel(), axis=spec.k_axis)
        return QuantizedTensor.owning(tensor.format, tensor.shape, tensor.group_size, storage)

    def _order(self, stored: NDArray[Any] | None) -> NDArray[np.int64]:
        """Where stored columns belong, if `stored` says where they belong in the entry."""
        assert self.columns is not None
        new = np.argsort(self.columns)
        return new if stored is None else new[stored]

    def _cut(self, tensor: Tensor, columns: Span | None) -> Tensor:
        if columns is None or isinstance(tensor, np.ndarray):
            return tensor if columns is None else cut_array(np.asarray(tensor), None, columns)
        first, last = check_span("columns", columns, tensor.shape[-1])
        assert isinstance(tensor, QuantizedTensor)
        specs = tensor.format.storage_spec(*tensor.shape, tensor.group_size)
        some = {name: specs[name].cut(array, None, slice(first, last)) for name, array in tensor.storage.items()}
        return QuantizedTensor.owning(tensor.format, (tensor.shape[0], last - first), tensor.group_size, some)

    def permutation(self) -> NDArray[np.int64] | None:
        return self.entry.permutation() if self._whole else self._order(self.entry.permutation())


def _in_runs(order: NDArray[np.int64], run: int) -> bool:
    """Whether an order moves runs of so many columns as wholes."""
    if len(order) % run:
        return False
    starts = order[::run]
    return bool((starts % run == 0).all() and (order.reshape(-1, run) == starts[:, None] + np.arange(run)).all())


class Widened(Entry):
    """Plain numbers in float32, as llama.cpp wants norms, biases and routers, and perhaps a function of them.

    shape: of as many numbers, if not the shape that they have.
    """

    def __init__(
        self,
        entry: Entry,
        function: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        about = entry.description
        shape = about.shape if shape is None else shape
        super().__init__(replace(about, dtype="F32", nbytes=4 * math.prod(shape), shape=shape), entry.parts)
        self.entry, self.function = entry, function

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Array:
        numbers = self.entry.read()
        assert isinstance(numbers, np.ndarray)
        wide = numbers.astype(np.float32).reshape(self.description.shape)
        return cut_array(wide if self.function is None else self.function(wide), rows, columns, experts)


class Below(Entry):
    """Matrices [N, K] of one kind as one, the rows of each below those of the one before."""

    def __init__(self, name: str, matrices: Sequence[Entry]) -> None:
        first = matrices[0].description
        for about in (matrix.description for matrix in matrices):
            alike = (about.format, about.dtype, about.shape[1:], about.group_size)
            if alike != (first.format, first.dtype, first.shape[1:], first.group_size) or about.act_order:
                problem = f"{about.name} is {_kind(about)}, and {first.name}, with which it becomes one, {_kind(first)}"
                raise CheckpointError(failure(CALL, problem))
        nbytes = sum(matrix.description.nbytes for matrix in matrices)
        rows = sum(matrix.description.shape[0] for matrix in matrices)
        about = replace(first, name=name, shape=(rows, *first.shape[1:]), nbytes=nbytes)
        super().__init__(about, frozenset[str]().union(*(matrix.parts for matrix in matrices)))
        self.matrices = matrices

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        check_experts(self.description, experts)
        whole = [matrix.read(None, columns) for matrix in self.matrices]
        start, stop = check_span("rows", rows, self.description.shape[0])
        if self.description.format is None:
            return np.concatenate([np.asarray(part) for part in whole])[start:stop]
        tensors = [part for part in whole if isinstance(part, QuantizedTensor)]
        reason = why_not_joined(tensors)
        if reason:
            raise CheckpointError(failure(CALL, f"{self.description.name} cannot be made of its parts: {reason}"))
        joined = join_rows(tensors)
        return joined if rows is None else joined.take_rows(np.arange(start, stop))


class Computed(Entry):
    """A vector that no file has."""

    def __init__(self, name: str, layout: str, vector: NDArray[np.float32]) -> None:
        super().__init__(Description(name, layout, None, "F32", vector.shape, None, vector.nbytes), [])
        self.vector = vector

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Array:
        return cut_array(self.vector, rows, columns, experts)


class Stacked(Entry):
    """Matrices [N, K] of one kind, one for each expert, as a stack [E, N, K]; arrays [N] as [E, N]."""

    def __init__(self, name: str, matrices: Sequence[Entry]) -> None:
        abouts = [matrix.description for matrix in matrices]
        first = abouts[0]
        for about in abouts[1:]:
            if _kind(about) != _kind(first):
                raise CheckpointError(bad_argument(CALL, about.name, _kind(about), f"{_kind(first)}, as {first.name}"))
        stack = replace(
            first,
            name=name,
            shape=(len(matrices), *first.shape),
            nbytes=sum(about.nbytes for about in abouts),
            act_order=any(about.act_order for about in abouts),
            unsupported=next((about.unsupported for about in abouts if about.unsupported), ""),
        )
        super().__init__(stack, frozenset[str]().union(*(matrix.parts for matrix in matrices)))
        self.matrices = matrices

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        first, last = check_experts(self.description, experts)
        if len(self.description.shape) < 3:
            biases = stack_of(len(self.matrices), ((bias.description.name, bias.read()) for bias in self.matrices))
            assert isinstance(biases, np.ndarray)
            return cut_array(biases, rows, columns)
        chosen = self.matrices[first:last]
        return stack_of(len(chosen), ((matrix.description.name, matrix.read(rows, columns)) for matrix in chosen))

    def permutation(self) -> NDArray[np.int64] | None:
        return next((order for matrix in self.matrices if (order := matrix.permutation()) is not None), None)


def _kind(about: Description) -> str:
    """Describe what all matrices of a stack must share."""
    if about.format is None:
        return f"{about.dtype} {about.shape}"
    return f"{about.format.name} {about.shape}, group_size {about.group_size}"


def stack_of(experts: int, matrices: Iterable[tuple[str, Tensor]]) -> QuantizedExperts | Array:
    """A stack of so many matrices of one format, or of plain arrays, each with its name for errors. Each is let go of
    before the next is asked for."""
    arrays: dict[str, Array] = {}
    kind: tuple[Format, tuple[int, int], int] | None = None
    for e, (name, matrix) in enumerate(matrices):
        if isinstance(matrix, QuantizedTensor):
            kind = _same_kind(name, matrix, kind)
        storage = matrix.storage if isinstance(matrix, QuantizedTensor) else {"": np.asarray(matrix)}
        for part, array in storage.items():
            held = arrays[part] if part in arrays else np.zeros((experts, *array.shape), array.dtype)
            if held.dtype != array.dtype:  # scales that float16 holds in one matrix, and not in another
                held = held.astype(np.promote_types(held.dtype, array.dtype))
            held[e] = array
            arrays[part] = held
    if kind is None:
        return arrays[""]
    format, shape, group_size = kind
    return QuantizedExperts.owning(format, (experts, *shape), group_size, arrays)


def _same_kind(
    name: str, matrix: QuantizedTensor, kind: tuple[Format, tuple[int, int], int] | None
) -> tuple[Format, tuple[int, int], int]:
    """What a matrix is; raises unless it is what the experts before it are. Of GPTQ's files, zero points tell that."""
    if matrix.permutation is not None:
        problem = f"{name} has permuted columns (act-order), which a stack of experts cannot store"
        raise CheckpointError(failure(CALL, problem, "Quantize the experts without act-order."))
    own = (matrix.format, matrix.shape, matrix.group_size)
    if kind is not None and own != kind:
        found = f"{matrix.format.name} {matrix.shape}, group_size {matrix.group_size}"
        expected = f"{kind[0].name} {kind[1]}, group_size {kind[2]}, as the experts before it"
        raise CheckpointError(bad_argument(CALL, name, found, expected))
    return own


class SomeRows(Entry):
    """Some rows of every matrix of a stack [E, N, K], or some numbers of every bias [E, N]. rows: a slice of N."""

    def __init__(self, entry: Entry, name: str, rows: slice) -> None:
        about = entry.description
        chosen = range(about.shape[1])[rows]
        shape = (about.shape[0], len(chosen), *about.shape[2:])
        nbytes = about.nbytes * len(chosen) // max(1, about.shape[1])
        super().__init__(replace(about, name=name, shape=shape, nbytes=nbytes), entry.parts)
        self.entry, self.chosen = entry, chosen

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        if self.description.format is None:
            array = self.entry.read()
            assert isinstance(array, np.ndarray)
            return cut_array(array[:, _slice(self.chosen)], rows, columns, experts)
        chosen = self.chosen[slice(*check_span("rows", rows, len(self.chosen)))]
        whole = self.entry.read(None, columns, experts)
        assert isinstance(whole, QuantizedExperts)
        count, n, k = whole.shape
        specs = whole.format.storage_spec(n, k, whole.group_size)
        some = {part: specs[part].cut(array, _slice(chosen)) for part, array in whole.storage.items()}
        return QuantizedExperts.owning(whole.format, (count, len(chosen), k), whole.group_size, some)


def _slice(chosen: range) -> slice:
    return slice(chosen.start, chosen.stop, chosen.step)


class Joined(Entry):
    """Two stacks [E, N, K] as one [E, 2 N, K], or biases [E, N] as [E, 2 N]: the rows of the first above those of the
    second, or in turn."""

    def __init__(self, name: str, first: Entry, second: Entry, in_turn: bool) -> None:
        about, other = first.description, second.description
        if _kind(about) != _kind(other):
            raise CheckpointError(bad_argument(CALL, other.name, _kind(other), f"{_kind(about)}, as {about.name}"))
        experts, n, *columns = about.shape
        joined = replace(about, name=name, shape=(experts, 2 * n, *columns), nbytes=about.nbytes + other.nbytes)
        super().__init__(joined, first.parts | second.parts)
        self.halves, self.in_turn = (first, second), in_turn

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        if self.description.format is None:
            plain = [np.asarray(half.read()) for half in self.halves]
            return cut_array(self._join(plain[0], plain[1], 1), rows, columns, experts)
        first, second = (half.read(None, columns, experts) for half in self.halves)
        assert isinstance(first, QuantizedExperts)
        assert isinstance(second, QuantizedExperts)
        count, n, k = first.shape
        specs, joined = first.format.storage_spec(n, k, first.group_size), dict[str, Array]()
        for part, array in first.storage.items():
            axis = specs[part].n_axis
            if axis is None and array.tobytes() != second.storage[part].tobytes():
                one, other = (half.description.name for half in self.halves)
                raise CheckpointError(failure(CALL, f"{one} and {other} cannot be joined: their {part} differs"))
            joined[part] = array if axis is None else self._join(array, second.storage[part], 1 + axis)
        whole = QuantizedExperts.owning(first.format, (count, 2 * n, k), first.group_size, joined)
        return whole if rows is None else whole.take_rows(np.arange(*check_span("rows", rows, 2 * n)))

    def _join(self, first: Array, second: Array, axis: int) -> Array:
        if not self.in_turn:
            return np.concatenate((first, second), axis)
        shape = (*first.shape[:axis], 2 * first.shape[axis], *first.shape[axis + 1 :])
        return np.stack((first, second), axis + 1).reshape(shape)


class Turned(Entry):
    """A plain stack [E, K, N] as [E, N, K], or the other way around."""

    def __init__(self, entry: Entry) -> None:
        about = entry.description
        experts, k, n = about.shape
        super().__init__(replace(about, shape=(experts, n, k)), entry.parts)
        self.entry = entry

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Array:
        array = self.entry.read()
        assert isinstance(array, np.ndarray)
        return cut_array(array.swapaxes(1, 2), rows, columns, experts)


class OneExpert(Entry):
    """One matrix [N, K] of a stack [E, N, K], or one bias [N] of [E, N]."""

    def __init__(self, entry: Entry, name: str, expert: int) -> None:
        about = entry.description
        nbytes = about.nbytes // about.shape[0]
        super().__init__(replace(about, name=name, shape=about.shape[1:], nbytes=nbytes), entry.parts)
        self.entry, self.expert = entry, expert

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        check_experts(self.description, experts)
        one = (self.expert, self.expert + 1)
        if len(self.description.shape) == 1:
            bias = self.entry.read(one)
            assert isinstance(bias, np.ndarray)
            return cut_array(bias[0], rows, columns)
        stack = self.entry.read(rows, columns, one)
        assert not isinstance(stack, QuantizedTensor)
        return stack[0]
