"""The weights of a torch layer, in the one form that products on its device read. Storage is made when asked for.

Nobody can write to them: `Weights.storage` gives copies, and other weights come as another `Weights`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.backends import BACKENDS, Backend, Problem, choose
from billfish.backends.base import Direct
from billfish.backends.cpu.experts import PackedExperts
from billfish.backends.cpu.packed import PackedWeights
from billfish.core.arrays import TorchArrays
from billfish.core.errors import BackendUnavailable
from billfish.core.format import Format, get_format
from billfish.core.quantized_experts import QuantizedExperts, check_stack
from billfish.core.storage import Storage
from billfish.core.tensor import QuantizedTensor

ARRAYS = TorchArrays()
Quantized = QuantizedTensor | QuantizedExperts
Matrix = QuantizedTensor | QuantizedExperts | PackedWeights | PackedExperts  # what products take
HELD = "_billfish"  # of the first tensor that an operator gets: `Held`
META = torch.device("meta")

# torch's own tools (pickle, DDP, gloo) do not take uint32, so the 32-bit words of storage are int32 in tensors.


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """A storage tensor as an array, of the same memory where that is the CPU's."""
    array = ARRAYS.to_numpy(tensor.detach().cpu())
    return array.view(np.uint32) if array.dtype == np.int32 else array


def to_torch(array: NDArray[Any], device: torch.device | str | None = None) -> Tensor:
    """A copy of a storage array as a tensor."""
    held = np.array(array)
    return ARRAYS.from_numpy(held.view(np.int32) if held.dtype == np.uint32 else held).to(device)


class Spec(NamedTuple):
    """Shape and type of a storage array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Held:
    """What an operator multiplies with. It lies on a tensor, and stays behind when that is pickled or copied."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def __reduce__(self) -> Any:
        return set, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class Weights:
    """W [N, K], or a stack [E, N, K], on one device.

    matrix: what products take: weights that a backend packed, where it can unpack them, else (on mps, and stacks on
    cuda) a tensor whose storage is in CPU memory, and which keeps what was packed of it. None on "meta".
    tensors, form: the same for an operator. Those of packed weights are all that there is of them; `form` says how to
    read them (`Backend.from_tensors`). Else there is one tensor, which is empty and carries the matrix.
    direct: the product in few steps, where the backend has such (`Backend.direct`).
    specs: of the storage.
    """

    def __init__(
        self,
        format: Format,
        shape: tuple[int, ...],
        group_size: int,
        specs: Mapping[str, Spec],
        device: torch.device,
        matrix: Matrix | None = None,
        tensors: Sequence[Tensor] = (),
        form: str = "",
    ) -> None:
        self.format, self.shape, self.group_size, self.specs = format, shape, group_size, dict(specs)
        self.device, self.matrix, self.form, self.direct = device, matrix, form, None
        self.tensors = list(tensors) or [torch.empty(0, dtype=torch.uint8, device=device)]
        self._moved: Callable[[], Weights | None] = _nobody
        if matrix is not None:
            setattr(self.tensors[0], HELD, Held(matrix))
            name = form.partition(":")[0]
            if name and len(shape) == 2:
                packed = matrix._made[name, place_name(device)] if isinstance(matrix, QuantizedTensor) else matrix
                self.direct = BACKENDS[name].direct(packed)

    direct: Direct | None

    @classmethod
    def on_meta(cls, format: Format, shape: tuple[int, ...], group_size: int, specs: Mapping[str, Spec]) -> Weights:
        """Weights that are yet to come."""
        return cls(format, shape, group_size, specs, META)

    @classmethod
    def pack(cls, matrix: Quantized, device: torch.device, activations: str) -> Weights:
        """For products on a device."""
        format, shape, group_size = matrix.format, matrix.shape, matrix.group_size
        specs = specs_of(matrix.storage)
        if device.type == "meta":
            return cls.on_meta(format, shape, group_size, specs)
        backend = unpacking_backend(format, shape, group_size, device, activations)
        if backend is not None:
            key = backend.name, place_name(device)
            packed = matrix._made.get(key)
            kept = None if packed is None else backend.to_tensors(packed)
            if kept is None:
                if isinstance(matrix, QuantizedExperts):
                    packed = backend.pack_experts(matrix, key[1])
                else:
                    packed = backend.pack(matrix, key[1])
                kept = backend.to_tensors(packed)
            if kept is not None:
                tensors, about = kept
                held = _matrix(format, shape, group_size, key, packed)
                return cls(format, shape, group_size, specs, device, held, tensors, f"{backend.name}:{about}")
        return cls(format, shape, group_size, specs, device, _owned(matrix))

    @classmethod
    def from_storage(
        cls, format: Format, storage: Storage, group_size: int, device: torch.device, activations: str
    ) -> Weights:
        """Of arrays that passed `shape_of`."""
        kind = QuantizedExperts if is_stack(storage) else QuantizedTensor
        return cls.pack(kind.borrowing(format, storage, group_size, call="MarlinLinear"), device, activations)

    @property
    def nbytes(self) -> int:
        """Of storage."""
        return sum(spec.nbytes for spec in self.specs.values())

    def storage(self) -> Storage:
        """The storage, made anew or read-only."""
        if not self.form:
            assert isinstance(self.matrix, (QuantizedTensor, QuantizedExperts))
            return self.matrix.storage
        name, _, about = self.form.partition(":")
        weights = BACKENDS[name].from_tensors(self.tensors, about)
        return BACKENDS[name].unpack(weights, self.format, self.shape, self.group_size)

    def storage_tensors(self) -> dict[str, Tensor]:
        """The storage as new tensors, on the device of the weights."""
        if self.matrix is None:
            kinds = {name: to_torch(np.empty(0, spec.dtype)).dtype for name, spec in self.specs.items()}
            return {n: torch.empty(spec.shape, dtype=kinds[n], device=META) for n, spec in self.specs.items()}
        storage = self.storage()
        return {name: to_torch(storage[name], self.device) for name in self.specs}

    def quantized(self) -> Quantized:
        """The weights as a tensor or a stack, with storage of its own."""
        storage = {name: np.array(array) for name, array in self.storage().items()}
        if len(self.shape) == 3:
            return QuantizedExperts.owning(self.format, self.shape, self.group_size, storage)
        return QuantizedTensor.owning(self.format, self.shape, self.group_size, storage)  # type: ignore[arg-type]

    def moved(self, device: torch.device, activations: str) -> Weights:
        """The same weights on another device. Layers that share them share the result."""
        known = self._moved()
        if known is not None and known.device == device:
            return known
        if device.type == "meta":
            moved = Weights.on_meta(self.format, self.shape, self.group_size, self.specs)
        elif self.matrix is None:
            zeros = {name: np.zeros(spec.shape, spec.dtype) for name, spec in self.specs.items()}
            moved = Weights.from_storage(self.format, zeros, self._group(), device, activations)
        else:
            moved = Weights.from_storage(self.format, self.storage(), self._group(), device, activations)
        self._moved = weakref.ref(moved)
        return moved

    def applied(self, fn: Callable[[Tensor], Tensor]) -> Weights:
        """The same weights, with `fn` applied to their memory: `share_memory_`, `pin_memory` and the like."""
        if not self.form:
            return self
        return self._of_tensors([fn(tensor) for tensor in self.tensors])

    def _of_tensors(self, tensors: list[Tensor]) -> Weights:
        name, _, about = self.form.partition(":")
        key = name, place_name(self.device)
        held = _matrix(self.format, self.shape, self.group_size, key, BACKENDS[name].from_tensors(tensors, about))
        return Weights(self.format, self.shape, self.group_size, self.specs, self.device, held, tensors, self.form)

    def _group(self) -> int:
        whole_row = self.format.whole_row_groups and self.group_size == self.shape[-1]
        return -1 if whole_row else self.group_size

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        return self.applied(torch.clone)

    def __reduce__(self) -> Any:
        """Pickles have the storage: another machine packs it in another way."""
        return _restored, (self.format.name, self.shape, self.group_size, self.storage_tensors())


def _nobody() -> None:
    return None


def _restored(format: str, shape: tuple[int, ...], group_size: int, tensors: dict[str, Tensor]) -> Weights:
    storage = {name: to_numpy(torch.empty(0, dtype=t.dtype) if t.is_meta else t) for name, t in tensors.items()}
    device = next(iter(tensors.values())).device
    known = get_format(format)
    if device.type == "meta":
        specs = {name: Spec(tuple(tensors[name].shape), array.dtype) for name, array in storage.items()}
        return Weights.on_meta(known, shape, group_size, specs)
    whole_row = known.whole_row_groups and group_size == shape[-1]
    return Weights.from_storage(known, storage, -1 if whole_row else group_size, device, "exact")


def _matrix(
    format: Format, shape: tuple[int, ...], group_size: int, key: tuple[str, str], packed: Any
) -> QuantizedTensor | PackedWeights | PackedExperts:
    if isinstance(packed, PackedWeights):  # x comes in stored order: layers have orders that a tensor has not
        return packed if packed.permutation is None else replace(packed, permutation=None)
    if isinstance(packed, PackedExperts):
        return packed
    n, k = shape
    return QuantizedTensor.packed_only(format, (n, k), group_size, {key: packed})


def _owned(matrix: Quantized) -> Quantized:
    """The matrix, with arrays that nobody writes to: the tensor may borrow those that it has."""
    storage = {name: np.array(array) for name, array in matrix.storage.items()}
    return type(matrix).owning(matrix.format, matrix.shape, matrix.group_size, storage)  # type: ignore[arg-type]


def specs_of(storage: Mapping[str, Any]) -> dict[str, Spec]:
    """Shapes and types of storage arrays, or of what says them."""
    known = getattr(storage, "specs", storage)  # of storage that is not made yet
    return {name: Spec(tuple(array.shape), np.dtype(array.dtype)) for name, array in known.items()}


def is_stack(storage: Mapping[str, Any]) -> bool:
    """Whether these arrays are of a stack of matrices: the first one has two axes for a matrix, in every format."""
    return len(next(iter(storage.values())).shape) == 3


def shape_of(call: str, format: Format, storage: Storage, group_size: int | None) -> tuple[tuple[int, ...], int]:
    """([N, K] or [E, N, K], group size) of storage; raises if its arrays are not the format's."""
    if is_stack(storage):
        return check_stack(call, format, storage, group_size)
    n, k, group_size = format.check_storage(call, storage, group_size)
    return (n, k), group_size


def matrix_of(tensors: Sequence[Tensor], format: str, shape: tuple[int, ...], group_size: int, form: str) -> Any:
    """The matrix for an operator, which gets `Weights.tensors` and `Weights.form`."""
    held = getattr(tensors[0], HELD, None)
    if isinstance(held, Held):
        return held.matrix
    name, _, about = form.partition(":")
    if not name:
        raise BackendUnavailable(
            "MarlinLinear: the saved graph does not contain the weights of this layer. Save it on the CPU or cuda."
        )
    key = name, place_name(tensors[0].device)
    matrix = _matrix(get_format(format), shape, group_size, key, BACKENDS[name].from_tensors(tensors, about))
    setattr(tensors[0], HELD, Held(matrix))
    return matrix


def unpacking_backend(
    format: Format, shape: tuple[int, ...], group_size: int, device: torch.device, activations: str
) -> Backend | None:
    """The backend that computes on a device, if storage can be made of what it packs."""
    float16 = np.dtype(np.float16)  # of x; weights are packed the same way for other types
    *experts, n, k = shape
    count = experts[0] if experts else 0
    problem = Problem(
        "matmul", format, group_size, 1, n, k, float16, "torch", device.type, activations, count, min(count, 1)
    )
    try:
        backend = choose("MarlinLinear", problem)
    except BackendUnavailable:
        return None
    return backend if (backend.unpacks_experts if experts else backend.unpacks) else None


def place_name(device: torch.device) -> str:
    """As billfish.core.arrays calls it: "cpu", "cuda:0"."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
