"""One tensor of a checkpoint: what it is, from headers alone, and how to read it or a part of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.core.errors import BillfishError, CheckpointError, bad_argument, failure
from billfish.core.format import Format, get_format
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array, ArraySpec, Storage
from billfish.core.tensor import QuantizedTensor

Span = tuple[int, int]  # from, up to
Tensor = QuantizedTensor | QuantizedExperts | Array  # a matrix, a stack of matrices, or a plain array of any shape


@dataclass(frozen=True)
class Description:
    """What the headers say about a tensor: `Checkpoint.describe` returns one.

    name: of the tensor in the checkpoint.
    layout: "gguf", "gptq", "awq", "compressed-tensors", "modelopt", "fp8", "gpt-oss", "bitsandbytes", "mlx",
    "billfish", "plain" or "memory".

        >>> about = bf.open_checkpoint("model.gguf").describe("blk.0.attn_q.weight")
        >>> about.format.name, about.shape, about.bits_per_weight
        ('q8_0', (128, 64), 8.5)
    """

    name: str
    layout: str
    format: Format | None  # None for arrays that are not quantized
    dtype: str  # of plain arrays, as the container calls it; of quantized ones, of their codes
    shape: tuple[int, ...]  # logical: [N, K], or [experts, N, K]
    group_size: int | None  # None for arrays that are not quantized
    nbytes: int  # in the file, scales and all
    act_order: bool = False  # whether `permutation` may give one
    column_step: int = 1  # `read` cuts columns at multiples of this
    unsupported: str = ""  # why it cannot be read

    @property
    def bits_per_weight(self) -> float:
        """Bits in the file for each weight."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))

    @property
    def kind(self) -> str:
        """The format, or the type of a plain array, with what is special about it."""
        if self.unsupported:
            return f"not supported: {self.unsupported}"
        kind = self.dtype.lower() if self.format is None else self.format.name
        return f"{kind}, act-order" if self.act_order else kind


class NamedArray(Protocol):
    """What is known about an array before it is read: :class:`Stored` in a file, or one in memory."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Entry(ABC):
    """A tensor that can be read."""

    def __init__(self, description: Description, parts: Iterable[str]) -> None:
        self.description = description
        self.parts = frozenset(parts)  # names of the arrays that it takes from the container

    @abstractmethod
    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        """The tensor, or a part of it. Of a stack [E, N, K], `experts` are of E, `rows` of N and `columns` of K."""

    def permutation(self) -> NDArray[np.int64] | None:
        """Where the columns came from, if they were sorted."""
        return None


class Plain(Entry):
    """An array as it is."""

    def __init__(self, stored: Stored, layout: str = "plain") -> None:
        self.stored = stored
        unsupported = "" if stored.dtype is not None else f"NumPy has no type {stored.kind}"
        about = Description(
            stored.name, layout, None, stored.kind, stored.shape, None, stored.nbytes, unsupported=unsupported
        )
        super().__init__(about, [stored.name])

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Array:
        return cut_array(self.stored.array(), rows, columns, experts)


SUPPORTED = "docs/checkpoints.md lists what can be read."


class Unsupported(Entry):
    """A tensor that is there and whole, but of a kind that we do not read."""

    def __init__(self, name: str, layout: str, reason: str, parts: Iterable[Stored], shape: tuple[int, ...]) -> None:
        stored = list(parts)
        nbytes = sum(part.nbytes for part in stored)
        about = Description(name, layout, None, stored[0].kind, shape, None, nbytes, unsupported=reason)
        super().__init__(about, [part.name for part in stored])

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Tensor:
        about = self.description
        raise CheckpointError(failure(CALL, f"{about.name} is not supported: {about.unsupported}", SUPPORTED))


class MatrixEntry(Entry):
    """A quantized matrix [N, K], or a stack [E, N, K] of them.

    A tensor knows the order of its columns, but for some columns of one: those are in stored order.
    """

    layout: str

    def __init__(
        self,
        name: str,
        format: str,
        shape: tuple[int, ...],
        group_size: int,
        parts: Iterable[NamedArray],
        act_order: bool = False,
        stored_group: int | None = None,  # where the file has larger groups than we
    ) -> None:
        self.format = get_format(format, CALL)
        self.n, self.k = math.prod(shape[:-1]), shape[-1]  # of a stack, n are the rows of all its matrices
        stored, group = list(parts), stored_group or group_size
        nbytes = sum(part.nbytes for part in stored)
        kind, step = stored[0].kind, math.lcm(self.format.block_size, 1 if group >= self.k else group)
        about = Description(name, self.layout, self.format, kind, shape, group_size, nbytes, act_order, step)
        super().__init__(about, [part.name for part in stored])
        if self.k == 0 or self.k % self.format.block_size or self.n == 0 or len(shape) > 3:
            block = f"{self.format.block_size}, the block size of {self.format.name}"
            expected = f"[N, K] or [E, N, K], with K a multiple of {block}"
            raise CheckpointError(bad_argument(CALL, f"shape of {name}", shape, expected))

    @abstractmethod
    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        """That part in a format's own layout, and its group size; of a stack, as if it were one matrix [E * N, K]."""

    def stack(self, experts: slice, columns: slice) -> tuple[Format, Storage, int]:
        """These experts of a stack: the format's arrays, each [E, ...], and the group size."""
        count, n = experts.stop - experts.start, self.description.shape[1]
        format, storage, group_size = self.storage(slice(experts.start * n, experts.stop * n), columns)
        specs = format.storage_spec(*format.check_storage(CALL, storage, group_size))
        return format, {part: apart(specs[part], array, count) for part, array in storage.items()}, group_size

    def read(
        self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None
    ) -> QuantizedTensor | QuantizedExperts:
        about = self.description
        stacked = len(about.shape) == 3
        n = about.shape[1] if stacked else self.n
        a, b = check_span("rows", rows, n)
        c, d = check_span("columns", columns, self.k)
        first, last = check_experts(about, experts)
        if c % about.column_step or (d % about.column_step and d != self.k):
            expected = f"multiples of {about.column_step}, or the end, for {about.name}"
            raise CheckpointError(bad_argument("read", "columns", f"({c}, {d})", expected))
        try:
            if stacked:
                format, storage, group_size = self.stack(slice(first, last), slice(c, d))
                one = {name: array[0, ...] for name, array in storage.items()}
                n, k, group_size = format.check_storage(CALL, one, group_size)
                specs = format.storage_spec(n, k, group_size)
                some = {name: specs[name].cut(array, slice(a, b)) for name, array in storage.items()}
                return QuantizedExperts.owning(format, (last - first, b - a, k), group_size, some)
            format, storage, group_size = self.storage(slice(a, b), slice(c, d))
            order = self.permutation() if columns is None else None
            n, k, group_size = format.check_storage(CALL, storage, group_size)
            return QuantizedTensor.owning(format, (n, k), group_size, dict(storage), order)
        except CheckpointError:
            raise
        except BillfishError as error:
            raise CheckpointError(failure(CALL, f"{about.name}: {str(error).removeprefix(f'{CALL}: ')}")) from None


def apart(spec: ArraySpec, array: Array, experts: int) -> Array:
    """An array of a matrix [E * N, K] as one of a stack, [E, ...]: a view."""
    if spec.n_axis is None:
        return np.broadcast_to(array, (experts, *array.shape))
    axis = spec.n_axis
    split = array.reshape(*array.shape[:axis], experts, array.shape[axis] // experts, *array.shape[axis + 1 :])
    return np.moveaxis(split, axis, 0)


def cut_array(array: Array, rows: Span | None, columns: Span | None, experts: Span | None = None) -> Array:
    """A part of a plain array. Rows are its first axis and columns its last; of three axes or more, the first are the
    experts, and rows the second."""
    stacked = array.ndim > 2
    if experts is not None:
        a, b = check_span("experts", experts, array.shape[0] if stacked else 0)
        array = array[a:b]
    if rows is not None:
        a, b = check_span("rows", rows, array.shape[int(stacked)] if array.ndim else 0)
        array = array[:, a:b] if stacked else array[a:b]
    if columns is not None:
        c, d = check_span("columns", columns, array.shape[-1] if array.ndim > 1 else 0)
        array = array[..., c:d]
    return array


def check_experts(about: Description, experts: Span | None) -> Span:
    """Matrices of a stack; (0, 1) for a tensor that is no stack, which has none to choose from."""
    if len(about.shape) > 2:
        return check_span("experts", experts, about.shape[0])
    if experts is not None:
        raise CheckpointError(failure("read", f"{about.name} is not a stack of experts", "Leave experts= out."))
    return 0, 1


def check_span(argument: str, span: Span | None, size: int) -> Span:
    """A part of an axis; all of it if there is none."""
    if span is None:
        return 0, size
    start, stop = span
    if not 0 <= start < stop <= size:
        raise CheckpointError(bad_argument("read", argument, f"({start}, {stop})", f"0 <= start < stop <= {size}"))
    return int(start), int(stop)


def check_part(stored: Stored, kinds: tuple[str, ...], shape: tuple[int, ...]) -> Stored:
    """Raise CheckpointError unless an array has one of these types, and this shape."""
    if stored.kind not in kinds:
        raise CheckpointError(bad_argument(CALL, f"dtype of {stored.name}", stored.kind, " or ".join(kinds)))
    if stored.shape != shape:
        raise CheckpointError(bad_argument(CALL, f"shape of {stored.name}", stored.shape, f"{shape}"))
    return stored
