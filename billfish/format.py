"""What a format is, and the registry of all of them.

A format combines an element (elements.py), a scale per group of K, and an optional offset:

    value = (element[code] - zero) * scale + minimum          float32, each operation rounded once

and it maps those *planes* to the bytes that checkpoints store and back, losslessly. To add one, write a subclass,
give it the methods marked "the format's own" below, and put @register above it: the table that `billfish formats`
prints, the conformance tests and every backend find it in the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from billfish.elements import Element
from billfish.errors import DTypeError, FormatError, ShapeError, complaint
from billfish.floats import with_known_floats
from billfish.parallel import map_rows

Array = NDArray[Any]
# "codes" is uint8 [N, K]; every other plane is [N, number of groups], or a scalar that belongs to the whole tensor.
Planes = dict[str, Array]
# The arrays as checkpoints hold them; names and shapes are the format's.
Storage = dict[str, Array]

METHODS = ("rtn", "mse")


class GroupValues(NamedTuple):
    """What a group does to its elements, decoded to float32 [N, K / group_size]."""

    scale: NDArray[np.float32]
    zero: NDArray[np.float32] | None = None
    minimum: NDArray[np.float32] | None = None


class Format(ABC):
    """A way to store a matrix W [N, K] in few bits. Instances are stateless; get one with :func:`get_format`."""

    name: str
    element: Element
    scale: str  # for people: "f16", "e8m0", "6-bit * f16", ...
    offset: str = "none"
    group_sizes: tuple[int, ...]  # the allowed ones
    whole_row_groups: bool = False  # whether group_size=-1, one group for all of K, is allowed
    block_size: int  # K must be a multiple of this: the least run of K that the storage can hold
    layout: str  # the storage in one line, for people
    options: dict[str, tuple[str, ...]] = {}  # what else quantize() may be told; the first of each is the default

    # ---- the format's own -------------------------------------------------------------------------------------

    @abstractmethod
    def pack(self, planes: Planes) -> Storage:
        """Planes to the arrays that checkpoints store."""

    @abstractmethod
    def unpack_codes(self, storage: Storage) -> Array:
        """The codes, uint8 [N, K]. `storage` has passed :meth:`check_storage`."""

    @abstractmethod
    def unpack_scales(self, storage: Storage) -> Planes:
        """All planes but the codes."""

    @abstractmethod
    def check_storage(self, call: str, storage: Storage, group_size: int | None) -> tuple[int, int, int]:
        """The (N, K, group_size) that these arrays hold; raises if they are not this format's."""

    @abstractmethod
    def group_values(self, planes: Planes) -> GroupValues:
        """Scales and offsets of every group, decoded to float32. Needs all planes but the codes."""

    @abstractmethod
    def round_groups(self, w: NDArray[np.float32], **context: Any) -> Planes:
        """Quantize W [R, g], one group a row (one block where a block has several), by plain rounding.

        Returns planes of a matrix [R, g]. `context` holds the options and what :meth:`tensor_planes` returned.
        """

    @abstractmethod
    def search_groups(self, w: NDArray[np.float32], **context: Any) -> Planes:
        """As :meth:`round_groups`, but looks for the scale (and offset) with the least squared error.

        Where a group comes out worse all the same, the plain one will be kept.
        """

    @abstractmethod
    def bits_per_weight(self, group_size: int) -> float:
        """Stored bits, scales and offsets included, for each weight."""

    def tensor_planes(self, w: NDArray[np.float32]) -> Planes:
        """Planes that belong to the whole tensor and must be known before its groups are quantized."""
        return {}

    # ---- the same for all -------------------------------------------------------------------------------------

    def unpack(self, storage: Storage) -> Planes:
        """The inverse of :meth:`pack`."""
        return {"codes": self.unpack_codes(storage), **self.unpack_scales(storage)}

    @property
    def default_group_size(self) -> int:
        """32 where there is a choice."""
        return 32 if 32 in self.group_sizes else self.group_sizes[0]

    def quantization_run(self, group_size: int) -> int:
        """How many consecutive weights are quantized together: the unit of `round_groups`."""
        return group_size

    def check_group_size(self, call: str, group_size: int | None, k: int | None) -> int:
        """The group size to use for rows of `k` weights. None is the default, -1 the whole row."""
        if group_size is None:
            return self.default_group_size
        if isinstance(group_size, (int, np.integer)) and not isinstance(group_size, bool):
            if group_size in self.group_sizes:
                return int(group_size)
            if self.whole_row_groups and k is not None and group_size in (-1, k):
                return k
        allowed = ", ".join(map(str, self.group_sizes)) + (" or -1 (all of K)" if self.whole_row_groups else "")
        raise FormatError(complaint(call, "group_size", repr(group_size), f"{allowed} for {self.name}"))

    def check_k(self, call: str, k: int) -> None:
        """Raises unless a row of `k` weights can be stored."""
        if k % self.block_size or k == 0:
            takes = f"a positive multiple of {self.block_size} for {self.name}"
            raise ShapeError(complaint(call, "K", k, takes))

    def check_options(self, call: str, options: dict[str, str]) -> dict[str, str]:
        """The options with defaults filled in."""
        for name, value in options.items():
            if name not in self.options:
                known = ", ".join(self.options) or "no further options"
                raise FormatError(complaint(call, "options", repr(name), f"{known} for {self.name}"))
            if value not in self.options[name]:
                takes = " or ".join(map(repr, self.options[name]))
                raise FormatError(complaint(call, name, repr(value), f"{takes} for {self.name}"))
        return {name: options.get(name, allowed[0]) for name, allowed in self.options.items()}

    @with_known_floats
    def quantize(self, w: NDArray[np.float32], group_size: int, method: str, **options: str) -> Planes:
        """Quantize W [N, K], float32 and finite, to planes. Rows go in slices, several at a time on several cores."""
        n, k = w.shape
        run = self.quantization_run(group_size)
        whole = k // run * run  # a partial last group is quantized as a smaller group of its own
        spans = [(a, b, length) for a, b, length in ((0, whole, run), (whole, k, k - whole)) if a < b]
        tensor_planes = self.tensor_planes(w)
        context = {**tensor_planes, **options}

        def quantize_rows(start: int, stop: int) -> Planes:
            rows = np.ascontiguousarray(w[start:stop], np.float32)
            parts = [
                self._quantize_runs(rows[:, a:b].reshape(-1, length), group_size, method, context)
                for a, b, length in spans
            ]
            return {
                name: np.concatenate([part[name].reshape(stop - start, -1) for part in parts], axis=1)
                for name in parts[0]
            }

        slices = map_rows(quantize_rows, n, k)
        planes = {name: np.concatenate([part[name] for part in slices]) for name in slices[0]}
        planes.update(tensor_planes)
        return planes

    def _quantize_runs(self, w: NDArray[np.float32], group_size: int, method: str, context: dict[str, Any]) -> Planes:
        # Tiny weights underflow and huge ones overflow the stored scale: the one gives zeros, as it should, the
        # other is reported once the whole tensor is done.
        with np.errstate(all="ignore"):
            plain = self.round_groups(w, **context)
            if method == "rtn":
                return plain
            searched = self.search_groups(w, **context)

            def squared_error(planes: Planes) -> NDArray[np.float64]:
                difference = w.astype(np.float64) - self.decode({**context, **planes}, group_size)
                return np.einsum("rk,rk->r", difference, difference)

            better = (squared_error(searched) < squared_error(plain))[:, None]
        return {name: np.where(better, searched[name], plain[name]) for name in plain}

    def decode(self, planes: Planes, group_size: int) -> NDArray[np.float32]:
        """The oracle: planes of a matrix [N, K] to its values, in float32."""
        k = planes["codes"].shape[1]
        group = self.group_values(planes)

        def spread(x: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.repeat(x, group_size, axis=1)[:, :k]

        w = self.element.decode(planes["codes"])
        with np.errstate(invalid="ignore", over="ignore"):  # scales of a file may be NaN or infinite
            if group.zero is not None:
                w -= spread(group.zero)
            w *= spread(group.scale)
            if group.minimum is not None:
                w += spread(group.minimum)
        return w

    @with_known_floats
    def dequantize_into(self, planes: Planes, group_size: int, out: Array) -> None:
        """Decode planes into `out` [N, K], rounding once to its type. Rows go in slices, as in :meth:`quantize`."""

        def dequantize_rows(start: int, stop: int) -> None:
            rows = {name: p if p.ndim == 0 else p[start:stop] for name, p in planes.items()}
            with np.errstate(invalid="ignore", over="ignore"):
                out[start:stop] = self.decode(rows, group_size).astype(out.dtype)

        map_rows(dequantize_rows, *out.shape)

    def __repr__(self) -> str:
        return f"<format {self.name}>"


FORMATS: dict[str, Format] = {}

FormatClass = TypeVar("FormatClass", bound=type[Format])


def register(cls: FormatClass) -> FormatClass:
    """Class decorator: make a format known by its name."""
    if cls.name in FORMATS:
        raise FormatError(complaint("register", "name", repr(cls.name), "a name that no other format has"))
    FORMATS[cls.name] = cls()
    return cls


def get_format(name: str | Format, call: str = "get_format") -> Format:
    """The format of that name."""
    if isinstance(name, Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise FormatError(complaint(call, "format", repr(name), f"one of {', '.join(FORMATS)}"))
    return FORMATS[name]


def check_names(call: str, format: Format, storage: Storage, names: set[str]) -> None:
    """Raises unless `storage` has exactly the arrays that the format knows."""
    takes = f"{', '.join(sorted(names))} for {format.name}"
    if not isinstance(storage, dict):
        raise DTypeError(complaint(call, "storage", f"a {type(storage).__name__}", f"a dict with {takes}"))
    if storage.keys() != names:
        raise FormatError(complaint(call, "storage", f"arrays {sorted(storage)}", takes))


def check_array(call: str, argument: str, array: object, dtype: Any, ndim: int) -> Array:
    """Raises unless `array` is a NumPy array of that type and number of axes."""
    wanted = np.dtype(dtype)
    if not isinstance(array, np.ndarray):
        got = type(array).__name__
        raise DTypeError(complaint(call, argument, f"a {got}", f"a {wanted} array"))
    if array.dtype != wanted:
        raise DTypeError(complaint(call, argument, f"dtype {array.dtype}", f"{wanted}"))
    if array.ndim != ndim:
        raise ShapeError(complaint(call, argument, f"shape {array.shape}", f"an array of {ndim} axes"))
    return array
