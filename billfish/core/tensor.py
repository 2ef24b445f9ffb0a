"""QuantizedTensor: a matrix in some format, held as the bytes that checkpoints store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import BillfishError, DataError, FormatError, ShapeError, bad_argument, failure
from billfish.core.format import Format, Planes
from billfish.core.formats import get_format
from billfish.core.storage import Array, ArraySpec, Storage, check_array
from billfish.core.typing import FormatLike

Made = TypeVar("Made")


class LaterStorage(Mapping[str, Array]):
    """Storage arrays that are made when somebody asks for one of them, and kept then.

    specs: what the arrays will be.
    """

    def __init__(self, specs: dict[str, ArraySpec], make: Callable[[], Storage]) -> None:
        self.specs, self._make = specs, make
        self._arrays: Storage | None = None

    def __getitem__(self, name: str) -> Array:
        arrays = self._arrays
        if arrays is None:
            arrays = self._make()
            for array in arrays.values():
                for owner in owners(array):
                    owner.setflags(write=False)
            self._arrays = arrays
        return arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized matrix W [N, K]. Make one with :func:`billfish.quantize` or :meth:`from_storage`.

    It holds the storage arrays read-only: views of a memory-mapped file as they are, and a copy of an array that
    somebody could still write to. Planes, which take a byte for each code, are computed when asked for. Weights that
    were quantized on a GPU are there, packed, and their storage is made when it is asked for.

    format, shape, group_size: how to read `storage`, the arrays of the format by name; shape is (N, K).
    permutation: int32 [K] where the columns are stored in another order (act-order): stored column j is column
    permutation[j] of W. Products and `dequantize` undo it; `planes` are in stored order.

        >>> q = bf.quantize(np.eye(32, dtype=np.float32), "q8_0")
        >>> q.shape, q.group_size, q.nbytes, q.bits_per_weight
        ((32, 32), 32, 1088, 8.5)
        >>> q.planes["codes"].shape
        (32, 32)
    """

    format: Format
    shape: tuple[int, int]
    group_size: int
    storage: Storage
    permutation: NDArray[np.int32] | None = None
    # What was made of the weights, such as their packed form for a backend; it lives and dies with the tensor.
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, (int, np.integer)):
            raise FormatError(bad_argument("QuantizedTensor", "group_size", repr(self.group_size), "an integer"))
        whole_row = self.format.whole_row_groups and self.group_size == self.shape[1]
        group_size = -1 if whole_row else self.group_size
        n, k, _ = self.format.check_storage("QuantizedTensor", self.storage, group_size)
        if (n, k) != tuple(self.shape):
            raise ShapeError(bad_argument("QuantizedTensor", "shape", self.shape, f"{(n, k)}, as the storage has"))
        self._hold({name: read_only(self.storage[name]) for name in self.format.storage_names}, self.permutation)

    def _hold(self, storage: dict[str, Array] | LaterStorage, permutation: Any) -> None:
        order = None if permutation is None else check_permutation("QuantizedTensor", permutation, self.shape[1])
        held = MappingProxyType(storage) if isinstance(storage, dict) else storage
        object.__setattr__(self, "storage", held)
        object.__setattr__(self, "permutation", order)

    @classmethod
    def from_storage(
        cls,
        format: FormatLike,
        storage: Storage,
        group_size: int | None = None,
        *,
        permutation: Any = None,
        call: str = "from_storage",
    ) -> QuantizedTensor:
        """Wrap arrays in a format's own layout; nothing is re-quantized, and read-only arrays are not copied.

        `group_size` matters where the format leaves a choice; -1 means one group for all of K.
        """
        format = get_format(format, call)
        n, k, group_size = format.check_storage(call, storage, group_size)
        return cls(format, (n, k), group_size, storage, permutation)

    @classmethod
    def owning(
        cls, format: Format, shape: tuple[int, int], group_size: int, storage: Storage, permutation: Any = None
    ) -> QuantizedTensor:
        """Of arrays that nobody else holds: they become read-only and are not copied."""
        for array in storage.values():
            for owner in owners(array):
                owner.setflags(write=False)
        return cls(format, shape, group_size, storage, permutation)

    @classmethod
    def borrowing(
        cls, format: FormatLike, storage: Storage, group_size: int | None = None, *, call: str = "from_storage"
    ) -> QuantizedTensor:
        """Of arrays that their owner may change: for whoever notices and then makes another tensor."""
        format = get_format(format, call)
        n, k, group_size = format.check_storage(call, storage, group_size)
        tensor = cls.__new__(cls)
        for name, value in {"format": format, "shape": (n, k), "group_size": group_size, "_made": {}}.items():
            object.__setattr__(tensor, name, value)
        views = {name: storage[name].view() for name in format.storage_names}
        for view in views.values():
            view.setflags(write=False)
        tensor._hold(views, None)
        return tensor

    @classmethod
    def packed_only(
        cls,
        format: Format,
        shape: tuple[int, int],
        group_size: int,
        made: dict[Any, Any],
        storage: LaterStorage | None = None,
    ) -> QuantizedTensor:
        """Of weights that `made` has in packed form, by the keys of :meth:`made`, and nobody has in another.

        storage: the way back to it. Without one the tensor has none, and what `made` has is all there is.
        """
        tensor = cls.__new__(cls)
        fields = {"format": format, "shape": shape, "group_size": group_size, "_made": made}
        for name, value in fields.items():
            object.__setattr__(tensor, name, value)
        tensor._hold({} if storage is None else storage, None)
        return tensor

    @classmethod
    def from_planes(cls, format: FormatLike, planes: Planes, group_size: int | None = None) -> QuantizedTensor:
        """Pack planes. What the format cannot hold, such as a code too large, is an error: all must come back."""
        call = "from_planes"
        format = get_format(format, call)
        codes = check_array(call, "codes", planes.get("codes"), (np.uint8,), 2)
        format.check_k(call, codes.shape[1])
        try:
            tensor = cls.from_storage(format, format.pack(planes), group_size, call=call)
        except (KeyError, ValueError) as error:
            if isinstance(error, BillfishError):
                raise
            problem = f"the planes {sorted(planes)} are not a {format.name} tensor ({error})"
            raise DataError(failure(call, problem)) from None
        held = tensor.planes
        for name, plane in planes.items():
            other = held.get(name)
            if other is None or other.dtype != plane.dtype or other.tobytes() != plane.tobytes():
                problem = f"{format.name} cannot store the plane {name} ({plane.dtype}, values up to {plane.max()})"
                raise DataError(failure(call, problem, f"Its planes are {', '.join(sorted(held))}."))
        return tensor

    @property
    def planes(self) -> Planes:
        """Codes uint8 [N, K], scales and offsets [N, groups], unpacked anew at each call."""
        return self.format.unpack(self.storage)

    @property
    def scale_planes(self) -> Planes:
        """The same without the codes."""
        return self.format.unpack_scales(self.storage)

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        arrays = self.storage.specs if isinstance(self.storage, LaterStorage) else self.storage
        return sum(array.nbytes for array in arrays.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage for each weight."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def take_rows(self, rows: Any) -> QuantizedTensor:
        """W[rows], by moving storage: rows of a matrix never share a word, a block or a scale."""
        specs = self.format.storage_spec(*self.shape, self.group_size)
        taken = {name: specs[name].cut(array, np.asarray(rows)) for name, array in self.storage.items()}
        shape = (len(rows), self.shape[1])
        return QuantizedTensor(self.format, shape, self.group_size, taken, self.permutation)

    def made(self, key: Any, make: Callable[[], Made]) -> Made:
        """What `make` gives, made at the first call with this key and kept."""
        return made_once(self._made, key, make)

    def __repr__(self) -> str:
        n, k = self.shape
        order = "" if self.permutation is None else "act-order, "
        return (
            f"QuantizedTensor({self.format.name}, [{n}, {k}], group_size={self.group_size}, {order}{self.nbytes} bytes)"
        )

    def __reduce__(self) -> Any:
        """Pickles have the storage, and nothing that was made of it."""
        return QuantizedTensor.owning, (
            self.format,
            self.shape,
            self.group_size,
            dict(self.storage),
            self.permutation,
        )

    def __copy__(self) -> QuantizedTensor:
        """The same read-only arrays, and nothing that was made of them."""
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return replace(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise TypeError("a QuantizedTensor is not an array. Use billfish.dequantize(tensor, dtype=...).")


def made_once(held: dict[Any, Any], key: Any, make: Callable[[], Made]) -> Made:
    """`held[key]`, which `make` makes where it is missing. Safe in threads that remove entries: it is read once."""
    found: Any = held.get(key, held)
    if found is held:
        found = held[key] = make()
    value: Made = found
    return value


def why_not_joined(tensors: Sequence[QuantizedTensor]) -> str:
    """Why the rows of several matrices cannot be those of one, in words for the user, or nothing."""
    first = tensors[0]
    if len(tensors) > 1 and any(tensor.permutation is not None for tensor in tensors):
        return "they have columns in orders of their own (act-order)"
    if any((t.format, t.group_size, t.shape[1]) != (first.format, first.group_size, first.shape[1]) for t in tensors):
        return "they have different settings"
    specs = first.format.storage_spec(*first.shape, first.group_size)
    if len(tensors) > 1 and any(spec.n_axis is None for spec in specs.values()):
        return f"each of them has a scale for all of its weights, as {first.format.name} has"
    return ""


def join_rows(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """One matrix with the rows of several, which `why_not_joined` has nothing against."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    specs = first.format.storage_spec(*first.shape, first.group_size)
    storage = {
        name: np.concatenate([tensor.storage[name] for tensor in tensors], spec.n_axis)
        for name, spec in specs.items()
        if spec.n_axis is not None
    }
    shape = sum(tensor.shape[0] for tensor in tensors), first.shape[1]
    return QuantizedTensor.owning(first.format, shape, first.group_size, storage)


def check_permutation(call: str, permutation: Any, k: int) -> NDArray[np.int32]:
    """An order of k columns as a read-only array."""
    order = np.asarray(permutation)
    if order.shape != (k,) or order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.arange(k)):
        problem = f"{order.dtype} of shape {order.shape}" + (" with repeated indices" if order.shape == (k,) else "")
        raise ShapeError(bad_argument(call, "permutation", problem, f"each of 0 to {k - 1} once"))
    order = order.astype(np.int32)
    order.setflags(write=False)
    return order


def owners(array: Array) -> list[Array]:
    """The array, and the arrays whose memory it is a view of."""
    found = [array]
    while isinstance(found[-1].base, np.ndarray):
        found.append(found[-1].base)
    return found


def read_only(array: Array) -> Array:
    """The array if no NumPy array can write to its memory, else a copy."""
    if not any(owner.flags.writeable for owner in owners(array)):
        return array
    copied = np.array(array)
    copied.setflags(write=False)
    return copied
