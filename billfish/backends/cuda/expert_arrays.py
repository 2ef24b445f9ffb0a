"""Products with experts of torch, CuPy and NumPy arrays, on each library's own current stream."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import ExpertBlock, ExpertProduct
from billfish.backends.cuda import experts
from billfish.backends.cuda.array_products import DEFAULT_STREAM, can_be_read, row_stride
from billfish.backends.cuda.driver import copy_in, copy_out
from billfish.backends.cuda.expert_plans import Routing
from billfish.backends.cuda.experts import NOTHING, Numbers, Visits
from billfish.backends.cuda.memory import Memory, OurRoom, Room, TorchRoom, address
from billfish.core.arrays import Input
from billfish.core.routing import checked_ids, checked_routing


class Caller(ABC):
    """The library whose arrays a call has: it lends memory, and takes the result. It lives as long as the call."""

    room: Room

    def __init__(self, room: Room, dtype: str) -> None:
        self.room, self.dtype = room, dtype  # of x and y
        self._held: list[Any] = []  # until all is launched

    def current(self) -> AbstractContextManager[Any]:
        return self.room.current()

    def hold(self, array: Any) -> Any:
        self._held.append(array)
        return array

    @abstractmethod
    def rows(self, x: Input) -> Numbers:
        """x [..., K] as rows that kernels can read, copied if they must."""

    @abstractmethod
    def numbers(self, array: Input, *types: str) -> Numbers:
        """A contiguous array in one of these types; another type becomes the first of them."""

    @abstractmethod
    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        """Arrays [E, n], side by side."""

    @abstractmethod
    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        """Columns of an array [E, n]."""

    @abstractmethod
    def make(self, shape: tuple[int, ...]) -> int:
        """Memory for y; `taken` gives it to the caller."""

    @abstractmethod
    def taken(self) -> Any: ...


class TorchCaller(Caller):
    def __init__(self, x: Input) -> None:
        super().__init__(TorchRoom(x.source.device.index), x.dtype_name)
        self.torch, self.like = sys.modules["torch"], x.source

    def _type(self, name: str) -> Any:
        return getattr(self.torch, name)

    def rows(self, x: Input) -> Numbers:
        k = x.shape[-1]
        rows = x.source.reshape(-1, k)
        if rows.stride(1) != 1 or not can_be_read(len(rows), rows.stride(0), k, rows.data_ptr()):
            rows = self.torch.nn.functional.pad(rows, (0, row_stride(k) - k)).contiguous()
        stride = rows.stride(0) if len(rows) > 1 else row_stride(k)
        return Numbers(self.hold(rows).data_ptr(), self.dtype, stride)

    def _numbers(self, array: Any, types: Sequence[str]) -> Numbers:
        name = str(array.dtype).removeprefix("torch.")
        if name not in types:
            name = types[0]
            array = array.to(self._type(name))
        return Numbers(self.hold(array.to(self.like.device).contiguous()).data_ptr(), name)

    def numbers(self, array: Input, *types: str) -> Numbers:
        return self._numbers(array.source, types)

    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        return self._numbers(self.torch.cat([array.source for array in arrays], dim=1), types)

    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        return self._numbers(array.source[:, first:last], types)

    def make(self, shape: tuple[int, ...]) -> int:
        self.y = self.torch.empty(shape, dtype=self._type(self.dtype), device=self.like.device)
        return int(self.y.data_ptr())

    def taken(self) -> Any:
        return self.y


class CupyMemory:
    """Bytes of CuPy's, with an address as torch's have."""

    def __init__(self, nbytes: int) -> None:
        self.array = sys.modules["cupy"].empty(nbytes, np.uint8)

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)


class CupyRoom:
    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.cupy = ordinal, sys.modules["cupy"]

    @property
    def stream(self) -> int:
        return int(self.cupy.cuda.get_current_stream().ptr)

    def current(self) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self.cupy.cuda.Device(self.ordinal)
        return device

    def empty(self, nbytes: int) -> CupyMemory:
        return CupyMemory(nbytes)


class CupyCaller(Caller):
    """CuPy's arrays are float16: it has no bfloat16."""

    def __init__(self, x: Input) -> None:
        super().__init__(CupyRoom(x.source.device.id), x.dtype_name)
        self.cupy = sys.modules["cupy"]

    def rows(self, x: Input) -> Numbers:
        k = x.shape[-1]
        rows = self.cupy.ascontiguousarray(x.source.reshape(-1, k))
        if k % 8 or rows.data.ptr % 16:
            rows = self.cupy.ascontiguousarray(self.cupy.pad(rows, ((0, 0), (0, row_stride(k) - k))))
        return Numbers(int(self.hold(rows).data.ptr), self.dtype, row_stride(k))

    def _numbers(self, array: Any, types: Sequence[str]) -> Numbers:
        name = str(array.dtype) if str(array.dtype) in types else types[0]
        return Numbers(int(self.hold(self.cupy.ascontiguousarray(array, name)).data.ptr), name)

    def numbers(self, array: Input, *types: str) -> Numbers:
        return self._numbers(self.cupy.asarray(array.source), types)

    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        return self._numbers(self.cupy.concatenate([self.cupy.asarray(a.source) for a in arrays], axis=1), types)

    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        return self._numbers(self.cupy.asarray(array.source)[:, first:last], types)

    def make(self, shape: tuple[int, ...]) -> int:
        self.y = self.cupy.empty(shape, self.dtype)
        return int(self.y.data.ptr)

    def taken(self) -> Any:
        return self.y


class NumpyCaller(Caller):
    """There and back, by way of buffers on device 0."""

    def __init__(self, x: Input) -> None:
        super().__init__(OurRoom(0), x.dtype_name)
        self.x = x

    def _sent(self, array: NDArray[Any]) -> int:
        memory = self.hold(self.room.empty(max(1, array.nbytes)))
        if array.nbytes:
            copy_in(address(memory), np.ascontiguousarray(array).view(np.uint8), DEFAULT_STREAM)
        return address(memory)

    def rows(self, x: Input) -> Numbers:
        k, source = x.shape[-1], x.numpy()
        rows = np.zeros((source.size // k, row_stride(k)), source.dtype)
        rows[:, :k] = source.reshape(-1, k)
        return Numbers(self._sent(rows), self.dtype, row_stride(k))

    def _numbers(self, array: NDArray[Any], types: Sequence[str]) -> Numbers:
        name = array.dtype.name if array.dtype.name in types else types[0]
        return Numbers(self._sent(array if array.dtype.name == name else array.astype(name)), name)

    def numbers(self, array: Input, *types: str) -> Numbers:
        return self._numbers(array.numpy(), types)

    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        return self._numbers(np.concatenate([array.numpy() for array in arrays], axis=1), types)

    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        return self._numbers(array.numpy()[:, first:last], types)

    def make(self, shape: tuple[int, ...]) -> int:
        self.y = np.empty(shape, self.x.numpy().dtype)
        self.there: Memory = self.room.empty(self.y.nbytes)
        return address(self.there)

    def taken(self) -> Any:
        copy_out(self.y.view(np.uint16), address(self.there), DEFAULT_STREAM)
        return self.x.like(self.y)


def caller_of(x: Input) -> Caller:
    if x.device == "cpu":
        return NumpyCaller(x)
    return CupyCaller(x) if x.kind == "cupy" else TorchCaller(x)


def _visits(caller: Caller, ids: Input, count: int, batch_invariant: bool) -> Visits:
    if ids.device == "cpu":
        checked_ids(ids, count)
    tokens, chosen = ids.shape
    routing = Routing(tokens, chosen, count, batch_invariant)
    return Visits(caller.room, routing, caller.numbers(ids, *experts.ID_TYPES), caller.dtype == "bfloat16")


def linear(product: ExpertProduct, batch_invariant: bool) -> Any:
    """y [T, k, n]."""
    x, weights = product.x, product.weights
    caller, (tokens, chosen) = caller_of(x), product.ids.shape
    with caller.current():
        visits = _visits(caller, product.ids, product.experts, batch_invariant)
        y = caller.make((tokens, chosen, product.n))
        if tokens:
            bias = NOTHING if product.biases is None else caller.numbers(product.biases, "float32", caller.dtype)
            experts.linear(visits, weights, caller.rows(x), chosen if len(x.shape) == 2 else 1, bias, y)
        return caller.taken()


def block(given: ExpertBlock, batch_invariant: bool) -> Any:
    """y [T, H]."""
    x, caller = given.x, caller_of(given.x)
    with caller.current():
        visits = _visits(caller, given.ids, given.experts, batch_invariant)
        if given.routing.device == "cpu":
            checked_routing(given.routing)
        y = caller.make(x.shape)
        if x.shape[0]:
            biases = _gate_up_biases(caller, given)
            down = given.down_biases
            last = NOTHING if down is None else caller.numbers(down, "float32", caller.dtype)
            weights = caller.numbers(given.routing, *experts.WEIGHT_TYPES)
            stacks = list(given.gate_up)
            experts.block(visits, caller.rows(x), stacks, given.down, given.activation, biases, last, weights, y)
        return caller.taken()


def _gate_up_biases(caller: Caller, given: ExpertBlock) -> list[Numbers]:
    """For each packed stack of gate_up, which need not be the stacks that the caller has."""
    biases, types, inner = given.gate_up_biases, ("float32", caller.dtype), given.inner
    some = [bias for bias in biases if bias is not None]
    if not some:
        return [NOTHING] * len(given.gate_up)
    if len(biases) == 1:
        if len(given.gate_up) == 1:
            return [caller.numbers(some[0], *types)]
        return [caller.columns(some[0], first, first + inner, *types) for first in (0, inner)]
    if len(given.gate_up) == 2:
        return [NOTHING if bias is None else caller.numbers(bias, *types) for bias in biases]
    zeros = sys.modules[some[0].adapter.module].zeros_like(some[0].source)
    pair = [some[0].with_source(zeros) if bias is None else bias for bias in biases]
    return [caller.joined(pair, *types)]
