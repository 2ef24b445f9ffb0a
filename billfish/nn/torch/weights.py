"""The weights of a torch layer: its storage tensors, and what backends made of them, which is never out of date.

    Weights   the `_buffers` of one layer, which knows what was taken out of it
    Made      the matrix of storage tensors, with its packed forms, as long as the contents are the same

What was made lies on the first storage tensor. So layers that share tensors share it, and a compiled graph, which
has nothing but the tensors, finds it.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from billfish.backends import BACKENDS, Backend, Problem, choose
from billfish.backends.base import Direct
from billfish.core.errors import BackendUnavailable
from billfish.core.format import Format
from billfish.core.format_tag import ABOUT, About
from billfish.core.quantized_experts import QuantizedExperts, check_stack
from billfish.core.storage import Storage
from billfish.core.tensor import QuantizedTensor
from billfish.nn.layer_base import check_order
from billfish.nn.torch.watch import Watch, lent, order_array, own, to_numpy, to_torch

ORDER = "permutation"
Matrix = QuantizedTensor | QuantizedExperts


class Made:
    """The matrix that storage tensors hold, and in it what backends make of it, for these contents of the tensors."""

    __slots__ = ("__weakref__", "copied", "settled", "states", "tensor")

    def __init__(self, format: Format, group_size: int, watches: list[Watch]) -> None:
        self.tensor = read(format, group_size, watches)
        self.copied = not all(isinstance(watch.array, np.ndarray) for watch in watches)  # from a device
        self.states = [watch.state for watch in watches]  # not the watches, of which one holds this
        self.settled = False  # whether `Weights.settle` has seen what backends made
        _all.add(self)

    def fits(self, format: Format, group_size: int, watches: list[Watch]) -> bool:
        """Whether it was made of these contents."""
        about = self.tensor.format, self.tensor.group_size
        return about == (format, group_size) and self.states == [watch.state for watch in watches]

    def drop_copy(self) -> None:
        """Storage that was copied from a device to be packed there goes: products read the packed weights alone."""
        if (
            self.copied
            and isinstance(self.tensor, QuantizedTensor)
            and any(key[0] in BACKENDS and BACKENDS[key[0]].packed_is_enough for key in self.tensor._made)
        ):
            about = self.tensor.format, self.tensor.shape, self.tensor.group_size
            self.tensor = QuantizedTensor.packed_only(*about, self.tensor._made)


def read(format: Format, group_size: int, watches: list[Watch]) -> Matrix:
    """The matrix, or the stack, in storage tensors: on the CPU their own memory, else a copy."""
    arrays = [a if isinstance(a, np.ndarray) else to_numpy(a) for a in (watch.array for watch in watches)]
    storage = dict(zip(format.storage_names, arrays, strict=True))
    kind = QuantizedExperts if is_stack(storage) else QuantizedTensor
    return kind.borrowing(format, storage, group_size, call="MarlinLinear")


def is_stack(storage: Mapping[str, Any]) -> bool:
    """Whether these arrays are of a stack of matrices: the first one has two axes for a matrix, in every format."""
    return len(next(iter(storage.values())).shape) == 3


def shape_of(call: str, format: Format, storage: Storage, group_size: int | None) -> tuple[tuple[int, ...], int]:
    """([N, K] or [E, N, K], group size) of storage; raises if its arrays are not the format's."""
    if is_stack(storage):
        return check_stack(call, format, storage, group_size)
    n, k, group_size = format.check_storage(call, storage, group_size)
    return (n, k), group_size


_all: weakref.WeakSet[Made] = weakref.WeakSet()


@atexit.register
def _drop_all() -> None:
    """torch.jit keeps tensors beyond the end of Python, and what was made of them needs our native core."""
    for made in _all:
        made.tensor._made.clear()


def made_of(tensors: Sequence[Tensor], format: Format, group_size: int) -> Made:
    """What was made of storage tensors, or is made of them now."""
    watches = [Watch.on(tensor) for tensor in tensors]
    for tensor, watch in zip(tensors, watches, strict=True):
        watch.look(tensor)
    made = watches[0].made
    if not isinstance(made, Made) or not made.fits(format, group_size, watches):
        made = watches[0].made = Made(format, group_size, watches)
    return made


@contextmanager
def matrix_of(
    tensors: Sequence[Tensor], format: Format, shape: tuple[int, int], group_size: int, form: str
) -> Iterator[Any]:
    """The matrix for an operator, which gets a layer's tensors: its storage, or its packed form as `form` says."""
    if not form:
        found = made_of(tensors, format, group_size)
        yield found.tensor
        found.drop_copy()
        return
    backend, _, about = form.partition(":")
    made = {(backend, place_name(tensors[0].device)): BACKENDS[backend].from_tensors(tensors, about)}
    yield QuantizedTensor.packed_only(format, shape, group_size, made)


class Packed(NamedTuple):
    """Weights that a layer holds in the place of storage."""

    form: str  # the backend's name, ":", and what it says about them
    tensors: list[Tensor]
    matrix: QuantizedTensor
    nbytes: int  # of the storage
    direct: Direct | None  # the product in few steps, where the backend has such


def packed_of(key: tuple[str, str], weights: Any, like: QuantizedTensor, nbytes: int) -> Packed | None:
    """What a layer holds of packed weights; None where their backend cannot give the storage back.

    key: the backend's name, and where the weights are. like: a matrix of their format and shape.
    """
    backend = BACKENDS[key[0]]
    kept = backend.to_tensors(weights)
    if kept is None:
        return None
    tensors, about = kept
    matrix = QuantizedTensor.packed_only(like.format, like.shape, like.group_size, {key: weights})
    return Packed(f"{key[0]}:{about}", tensors, matrix, nbytes, backend.direct(weights))


def packed_beside(tensor: QuantizedTensor, device: torch.device, activations: str) -> Packed | None:
    """A matrix packed for products on a device; None where no backend there keeps packed weights in storage's place."""
    backend = keeper(tensor.format, tensor.shape, tensor.group_size, device, activations)
    if backend is None:
        return None
    key = backend.name, place_name(device)
    weights = tensor._made.get(key)
    return packed_of(key, backend.pack(tensor, key[1]) if weights is None else weights, tensor, tensor.nbytes)


def keeper(
    format: Format, shape: tuple[int, ...], group_size: int, device: torch.device, activations: str
) -> Backend | None:
    """The backend that computes on a device, if it keeps packed weights in the place of storage."""
    if device.type == "meta" or len(shape) != 2:  # no backend does so for stacks
        return None
    float16 = np.dtype(np.float16)  # of x; weights are packed the same way for other types
    n, k = shape
    problem = Problem("matmul", format, group_size, 1, n, k, float16, "torch", device.type, activations)
    try:
        backend = choose("MarlinLinear", problem)
    except BackendUnavailable:
        return None
    return backend if backend.unpacks else None


def place_name(device: torch.device) -> str:
    """As billfish.core.arrays calls it: "cpu", "cuda:0"."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def in_order(direct: Direct, order: Tensor, features: int, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """As `direct`, for x [..., features] and columns that are stored in another order."""
    if x.shape[-1:] != (features,) or x.get_device() != order.get_device():
        return None
    y: Tensor | None = direct(x.index_select(-1, order), bias)
    return y


class Weights(dict[str, Any]):
    """The buffers of a layer: storage tensors by name, `permutation`, and `about`, which cannot be that of others.

    Where a backend's packed form can be unpacked (`Backend.to_tensors`), the layer holds only that once it has
    computed. Storage comes back when somebody asks for it.
    """

    def __init__(self, format: Format, shape: tuple[int, ...], group_size: int) -> None:
        self.format, self.shape, self.group_size = format, shape, group_size
        self.names = format.storage_names
        self.watched = (*self.names, ORDER)
        self.features: int | None = None  # of x, where W is some columns of a larger matrix
        self.made: Made | None = None  # of storage
        self.watches: list[Watch] = []  # of storage, and of `permutation` where there is one,
        self.states: list[object] = []  # which was checked in this state
        self.packed: Packed | None = None  # in the place of storage, whose names then stand for None
        self.direct: Direct | None = None  # the packed form's, for x in the order of its features
        self._lock = threading.RLock()  # for changing from one to the other

    # ---- a mapping that knows what was taken out of it. Compilers look at all of it, and write to nothing. -----------

    if not TYPE_CHECKING:  # the other methods of a mapping, in terms of these
        get, items, values = MutableMapping.get, MutableMapping.items, MutableMapping.values
        pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear
        update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __getitem__(self, name: str) -> Any:
        if torch.compiler.is_compiling():
            return dict.__getitem__(self, name)
        with self._lock:
            self.made = None
            if name in self.names or (name == ORDER and self.own(ORDER) is not None):
                self.restore()  # `permutation` may be written to, and is checked before weights are packed
            held = dict.__getitem__(self, name)
            return lent(held) if name in self.watched and isinstance(held, Tensor) else held

    def __setitem__(self, name: str, value: Any) -> None:
        with self._lock:  # a product of another thread must not remember the former tensor after this forgets it
            self.made = None
            if name in self.watched and not torch.compiler.is_compiling():
                self.restore()
                held = self.own(name)
                if isinstance(held, Tensor) and Watch.on(held).out_ref() is value:
                    return
                if isinstance(value, Tensor):
                    value = own(value)
            if name == ABOUT and isinstance(value, Tensor):
                self.check_about("MarlinLinear", value)
            dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        with self._lock:
            self.made = None
            self.restore()
            dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        """As a dict's own; but dict(weights) copies a dict without asking it, unless it has an `__iter__`."""
        return dict.__iter__(self)

    def copy(self) -> Weights:
        other = Weights(self.format, self.shape, self.group_size)
        other.features = self.features
        other.update(self)
        return other

    def __reduce__(self) -> Any:
        about = self.format, self.shape, self.group_size
        return Weights, about, {"features": self.features}, None, iter(list(self.items()))

    # ---- for the layer -----------------------------------------------------------------------------------------------

    def own(self, name: str) -> Any:
        """The layer's own tensor, which nobody else gets."""
        return dict.get(self, name)

    def check_about(self, call: str, about: Tensor) -> None:
        """Raises if these bytes say that weights are in another format. Those of a placeholder say nothing."""
        traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        if type(about) in (Tensor, torch.nn.Parameter) and not about.is_meta and not traced:
            About(self.format.name, self.group_size).check(call, to_numpy(about))

    def set_about(self) -> None:
        """`about` anew, beside the storage."""
        about = About(self.format.name, self.group_size).array()
        dict.__setitem__(self, ABOUT, to_torch(about, self.for_operator()[0][0].device))

    def for_operator(self) -> tuple[list[Tensor], str]:
        """(The storage tensors, ""), or (the packed ones, their form). Nobody may write to them."""
        packed = self.packed
        if packed is not None:
            return packed.tensors, packed.form
        storage = [self.own(name) for name in self.names]
        # Another thread may have packed them just now.
        return self.for_operator() if any(tensor is None for tensor in storage) else (storage, "")

    def matrix_beside(self, x: Tensor) -> QuantizedTensor:
        """The matrix for a product with x."""
        packed = self.packed
        if packed is not None and x.device == packed.tensors[0].device:
            return packed.matrix
        tensor = self.current().tensor
        assert isinstance(tensor, QuantizedTensor)
        known = tensor.storage or any(key[1] == place_name(x.device) for key in tensor._made)
        return tensor if known else self.matrix()

    def matrix(self) -> QuantizedTensor:
        """The matrix with its storage."""
        tensor = self.current().tensor
        matrix = tensor if tensor.storage else read(self.format, self.group_size, self.watches[: len(self.names)])
        assert isinstance(matrix, QuantizedTensor)
        return matrix

    def stack(self) -> QuantizedExperts:
        """The stack of matrices."""
        stack = self.current().tensor
        assert isinstance(stack, QuantizedExperts)
        return stack

    @property
    def nbytes(self) -> int:
        """Of storage, whether it is here or packed."""
        packed = self.packed
        return packed.nbytes if packed is not None else sum(tensor.nbytes for tensor in self.for_operator()[0])

    def current(self) -> Made:
        """What was made of the storage as it is now."""
        made = self.made
        if made is not None:
            # There are none to ask if another thread has just packed these very contents.
            for name, watch, state in zip(self.watched, self.watches, self.states, strict=False):
                tensor = self.own(name)
                if tensor is None or watch.lent or watch.state is not state:
                    break
                if watch.version is not None and tensor._version != watch.version:
                    break
            else:
                return made
        with self._lock:
            self.restore()
            tensors, _ = self.for_operator()
            made = made_of(tensors, self.format, self.group_size)
            watches, order = [Watch.on(tensor) for tensor in tensors], self.own(ORDER)
            if order is not None:
                watches.append(Watch.on(order))
                watches[-1].look(order)
                check_order("MarlinLinear", order_array(order), self.shape[1], self.features)
            self.watches, self.states, self.made = watches, [watch.state for watch in watches], made
            return made

    def settle(self) -> None:
        """After a product: hold a packed form alone if it can be unpacked, and nobody else has the storage."""
        made = self.made
        if made is None or made.settled or not isinstance(made.tensor, QuantizedTensor):
            return
        if any(watch.lent or watch.shared for watch in self.watches):
            made.drop_copy()
            return
        made.settled = True
        for key, weights in list(made.tensor._made.items()):
            packed = packed_of(key, weights, made.tensor, self.nbytes) if key[0] in BACKENDS else None
            if packed is not None:
                self._hold(made, packed)
                return
        made.drop_copy()

    def pack(self, activations: str) -> None:
        """Hold a packed form alone before any product, where a backend does so on the storage's device."""
        storage = [self.own(name) for name in self.names]
        if any(tensor is None for tensor in storage):
            return
        device = storage[0].device
        if keeper(self.format, self.shape, self.group_size, device, activations) is None:
            return
        made = self.current()
        assert isinstance(made.tensor, QuantizedTensor)
        if not any(watch.lent or watch.shared for watch in self.watches):
            packed = packed_beside(made.tensor, device, activations)
            if packed is not None:
                self._hold(made, packed)

    def _hold(self, made: Made, packed: Packed) -> None:
        """These packed weights in the place of storage, unless somebody has changed or taken it meanwhile."""
        with self._lock:
            if self.made is made and not any(watch.lent for watch in self.watches):
                self.hold(packed)

    def hold(self, packed: Packed) -> None:
        """These packed weights in the place of storage, whatever it is."""
        self.packed, self.made, self.watches = packed, None, []
        order, direct = self.own(ORDER), packed.direct
        features = self.shape[1] if self.features is None else self.features
        self.direct = direct if order is None or direct is None else partial(in_order, direct, order, features)
        for name in self.names:
            dict.__setitem__(self, name, None)

    def restore(self) -> None:
        """Storage in the place of the packed form."""
        if self.packed is None:
            return
        with self._lock:
            if self.packed is not None:
                form, tensors = self.packed.form, self.packed.tensors
                name, _, about = form.partition(":")
                weights = BACKENDS[name].from_tensors(tensors, about)
                n, k = self.shape
                storage = BACKENDS[name].unpack(weights, self.format, (n, k), self.group_size)
                for part in self.names:
                    dict.__setitem__(self, part, own(to_torch(storage[part], tensors[0].device)))
                self.packed = self.direct = None

    def repack(self) -> None:
        """Forget what was made, and take it that nobody writes to the memory of storage but through tensors."""
        with self._lock:
            self.restore()
            self.made = None
            for tensor in self.for_operator()[0]:
                Watch.on(tensor).forget(tensor)
