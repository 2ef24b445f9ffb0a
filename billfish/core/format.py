"""What a format is, and the registry of all of them.

A format combines an element (elements.py), a scale per group of K, and an optional offset:

    value = (element[code] - zero) * scale + minimum          float32, each operation rounded once

and it maps those *planes* to the bytes that checkpoints store and back, losslessly. `storage_spec` says which arrays
these bytes are. To add a format, write a subclass, give it the methods marked "the format's own" below, and put
@register above it: the table that `billfish formats` prints, the conformance tests and every backend find it in the
registry.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from billfish.core.device_array import DeviceArray, to_device
from billfish.core.elements import Element
from billfish.core.errors import DTypeError, FormatError, ShapeError, bad_argument, did_you_mean, failure, type_of
from billfish.core.machine import map_rows, with_known_floats
from billfish.core.search import Search, dot, kernels_for
from billfish.core.storage import Array, ArraySpec, Storage, StoragePart, check_array

# "codes" is uint8 [N, K]; every other plane is [N, number of groups], or a scalar that belongs to the whole tensor.
Planes = dict[str, Array]

Floats = NDArray[np.float32]

METHODS = ("rtn", "mse", "gptq")


class GroupValues(NamedTuple):
    """What a group does to its elements, decoded to float32 [N, K / group_size]."""

    scale: NDArray[np.float32]
    zero: NDArray[np.float32] | None = None
    minimum: NDArray[np.float32] | None = None


class Format(ABC):
    """A way to store a matrix W [N, K] in few bits. Instances are stateless; get one with :func:`get_format`.

    >>> format = bf.get_format("fp4")
    >>> format.name, format.bits_per_weight(32)
    ('fp4', 4.5)
    """

    name: str
    element: Element
    scale: str  # for people: "f16", "e8m0", "6-bit * f16", ...
    offset: str = "none"
    group_sizes: tuple[int, ...]  # the allowed ones
    whole_row_groups: bool = False  # whether group_size=-1, one group for all of K, is allowed
    block_size: int  # K must be a multiple of this: the least run of K that the storage can hold
    layout: str  # the storage in one line, for people
    options: dict[str, tuple[str, ...]] = {}  # what else quantize() may be told; the first of each is the default
    # These two are a format's own; subclasses do not inherit them.
    gguf: str  # ggml's name of the type, of a format that GGUF files hold
    aliases: tuple[str, ...] = ()  # names that other programs have for it

    # ---- the format's own -------------------------------------------------------------------------------------

    @abstractmethod
    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        """The arrays of the storage, in their order. The first has both axes and a `run`: its shape tells N and K."""

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
    def group_values(self, planes: Planes) -> GroupValues:
        """Scales and offsets of every group, decoded to float32. Needs all planes but the codes."""

    @abstractmethod
    def round_groups(self, w: NDArray[np.float32], **context: Any) -> Planes:
        """Quantize W [R, g], one group a row (one block where a block has several), by plain rounding.

        Returns planes of a matrix [R, g]. `context` holds the options and what :meth:`tensor_planes` returned.
        """

    @abstractmethod
    def search_groups(self, w: NDArray[np.float32], search: Search, **context: Any) -> list[Planes]:
        """As :meth:`round_groups`, but looks for the scale (and offset) with the least error.

        `search` knows what the error is and finds scales. Returns all that it finds: of that and of the plain result,
        each group will keep what is best.
        """

    def tensor_planes(self, w: NDArray[np.float32]) -> Planes:
        """Planes that belong to the whole tensor and must be known before its groups are quantized."""
        return {}

    # ---- the same for all -------------------------------------------------------------------------------------

    def unpack(self, storage: Storage) -> Planes:
        """The inverse of :meth:`pack`."""
        return {"codes": self.unpack_codes(storage), **self.unpack_scales(storage)}

    def storage_spec(
        self, n: int, k: int, group_size: int, options: Mapping[str, str] | None = None
    ) -> dict[str, ArraySpec]:
        """The arrays that hold a matrix [n, k], by name and in their order. `options` as in :meth:`check_options`."""
        return {part.name: part.spec(n, k, group_size) for part in self.parts(options or {})}

    @cached_property
    def storage_names(self) -> tuple[str, ...]:
        """The names of the arrays, in their order."""
        return tuple(part.name for part in self.parts({}))

    def bits_per_weight(self, group_size: int) -> float:
        """Stored bits, scales and offsets included, for each weight."""
        return sum(8 * p.dtypes[0].itemsize * p.items / (p.run or group_size) for p in self.parts({}) if p.axes)

    def check_storage(self, call: str, storage: Storage, group_size: int | None) -> tuple[int, int, int]:
        """The (N, K, group_size) that these arrays hold; raises if they are not this format's."""
        check_names(call, self, storage, set(self.storage_names))
        first, *others = self.parts({})
        n, k = self._matrix_shape(call, first, check_array(call, first.name, storage[first.name], first.dtypes, 2))
        self.check_k(call, k)
        group_size = self.check_group_size(call, group_size, k)
        for part in others:
            spec = part.spec(n, k, group_size)
            dtypes = (storage[part.like].dtype,) if part.like else part.dtypes
            array = check_array(call, part.name, storage[part.name], dtypes, len(spec.shape))
            if array.shape != spec.shape:
                axes = " x ".join({"n": "N", "k": f"ceil(K/{spec.run})"}[axis] for axis in part.axes)
                expected = f"{spec.shape}, {axes} for N={n}, K={k}"
                raise ShapeError(bad_argument(call, f"shape of {part.name}", array.shape, expected))
        return n, k, group_size

    def _matrix_shape(self, call: str, first: StoragePart, array: Array) -> tuple[int, int]:
        n, along_k = (array.shape[first.axes.index(axis)] for axis in "nk")
        if n == 0:
            raise ShapeError(bad_argument(call, f"shape of {first.name}", f"{array.shape}, with N = 0", "N > 0"))
        if first.items > 1 and (along_k % first.items or along_k == 0):
            expected = f"a positive multiple of {first.items} bytes for {self.name}"
            raise ShapeError(bad_argument(call, f"row size of {first.name}", f"{along_k} bytes", expected))
        return n, along_k // first.items * first.run

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
        allowed = ", ".join(map(str, self.group_sizes)) + (" or -1 (a whole row)" if self.whole_row_groups else "")
        raise FormatError(bad_argument(call, "group_size", repr(group_size), f"{allowed} for {self.name}"))

    def check_k(self, call: str, k: int) -> None:
        """Raises unless a row of `k` weights can be stored."""
        if k % self.block_size or k == 0:
            expected = f"a positive multiple of {self.block_size} for {self.name}"
            raise ShapeError(bad_argument(call, "K", k, expected))

    def check_options(self, call: str, options: dict[str, str]) -> dict[str, str]:
        """The options with defaults filled in."""
        for name, value in options.items():
            if name not in self.options:
                known = f"Its options are: {', '.join(self.options)}." if self.options else "It has no options."
                raise FormatError(failure(call, f"unknown option {name!r} of {self.name}", known))
            if value not in self.options[name]:
                expected = " or ".join(map(repr, self.options[name]))
                raise FormatError(bad_argument(call, name, repr(value), f"{expected} for {self.name}"))
        return {name: options.get(name, allowed[0]) for name, allowed in self.options.items()}

    def with_codes(self, planes: Planes, codes: Array) -> Planes:
        """The same planes with other codes [N, K]. A plane that depends on the codes is made again."""
        return {**planes, "codes": codes}

    @with_known_floats
    def quantize(
        self,
        w: NDArray[np.float32],
        group_size: int,
        method: str,
        importance: NDArray[np.floating[Any]] | None = None,
        **options: str,
    ) -> Planes:
        """Quantize W [N, K], float32 and finite, to planes. Rows go in slices, several at a time on several cores.

        W may be a DeviceArray, here and in all that this calls. The planes then are, too.

        method: "rtn" or "mse".
        importance: [K], finite and at least 0, of the squared error of each column.
        """
        n, k = w.shape
        run = self.quantization_run(group_size)
        whole = k // run * run  # a partial last group is quantized as a smaller group of its own
        spans = [(a, b, length) for a, b, length in ((0, whole, run), (whole, k, k - whole)) if a < b]
        tensor_planes = self.tensor_planes(w)
        context = {**tensor_planes, **options}
        thorough = method != "rtn"
        if importance is not None and not importance.any():
            importance = None

        def search(a: int, b: int, length: int, rows: int) -> Search | None:
            if importance is None:
                return Search() if thorough else None
            shares: Any = _shares(importance[a:b].reshape(-1, length)).reshape(1, -1)
            if isinstance(w, DeviceArray):
                shares = to_device(shares, w.tensor.device)
            return Search(np.repeat(shares, rows, axis=0).reshape(-1, length), thorough)

        def quantize_rows(start: int, stop: int) -> Planes:
            rows = w[start:stop].astype(np.float32, "C", copy=False)
            parts = [
                self._quantize_runs(
                    rows[:, a:b].reshape(-1, length), group_size, search(a, b, length, len(rows)), context
                )
                for a, b, length in spans
            ]
            return {
                name: np.concatenate([part[name].reshape(stop - start, -1) for part in parts], axis=1)
                for name in parts[0]
            }

        slices = map_rows(quantize_rows, n, k, on_device=isinstance(w, DeviceArray))
        planes = {name: np.concatenate([part[name] for part in slices]) for name in slices[0]}
        planes.update(tensor_planes)
        return planes

    def _quantize_runs(
        self, w: NDArray[np.float32], group_size: int, search: Search | None, context: dict[str, Any]
    ) -> Planes:
        # Tiny weights underflow and huge ones overflow the stored scale: the one gives zeros, as it should, the
        # other is reported once the whole tensor is done.
        with np.errstate(all="ignore"):
            best = self.round_groups(w, **context)
            if search is None:
                return best

            def error(planes: Planes) -> NDArray[np.float64]:
                return self._error(w, {**context, **planes}, group_size, search.importance)

            least = error(best)
            for found in self.search_groups(w, search=search, **context):
                its_error = error(found)
                better = its_error < least
                best = {name: np.where(better[:, None], found[name], best[name]) for name in best}
                least = np.where(better, its_error, least)
        return best

    def _error(self, w: Floats, planes: Planes, group_size: int, importance: Floats | None) -> NDArray[np.float64]:
        """The squared error of each row, weighted by an importance [R, K] if there is one."""
        kernels = kernels_for(w, planes["codes"])
        if kernels is not None and type(self).decode is Format.decode and type(self.element).decode is Element.decode:
            groups = self.group_values(planes)
            found = kernels.error(self.element.values, w, planes["codes"], group_size, groups, importance)
            if found is not None:
                return found
        wrong = w.astype(np.float64) - self.decode(planes, group_size)
        return cast("NDArray[np.float64]", dot(wrong, wrong if importance is None else wrong * importance))

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

    def __reduce__(self) -> Any:
        """A format pickles and copies by its name, which must be registered where it is read."""
        return (get_format, (self.name,)) if FORMATS.get(self.name) is self else super().__reduce__()


def _shares(importance: NDArray[Any]) -> NDArray[np.float32]:
    """Importances [runs, length] times a power of two, so that the largest of a run is from 1/2 to 1.

    They are all 1 in a run that has none at all.
    """
    largest = importance.max(axis=1, keepdims=True)
    shares = np.ldexp(importance, -np.frexp(largest)[1])
    return np.where(largest > 0, shares, 1).astype(np.float32)


FORMATS: dict[str, Format] = {}
"""Every format by its name, in the order in which they were registered."""

FormatClass = TypeVar("FormatClass", bound=type[Format])


# llama.cpp's names for a choice of types, one for each tensor of a model.
MIX = re.compile(r"(q\dk)(xs|s|m|l|xl)")


def register(cls: FormatClass) -> FormatClass:
    """Make a format known by its name and its aliases. A class decorator.

    cls: a subclass of :class:`Format`. Returns it. Raises FormatError for a name that another format has.

        >>> bf.register(type(bf.get_format("q4_0")))
        Traceback (most recent call last):
        billfish.core.errors.FormatError: ...'q4_0'...
    """
    taken = _names()
    for name in (cls.name, *vars(cls).get("aliases", ())):
        if _letters(name) in taken:
            raise FormatError(failure("register", f"another format has the name {name!r}", "Choose another name."))
    FORMATS[cls.name] = cls()
    return cls


def get_format(name: str | Format, call: str = "get_format") -> Format:
    """Return a format by its name.

    name: in any case and with any separators: "Q4_K", "q4-k" and "q4k" are q4_k. Aliases, which `billfish formats`
    lists, work too. A Format is returned as it is.
    call: the name that errors begin with.

    Raises FormatError for an unknown name.

        >>> bf.get_format("Q4-K").name
        'q4_k'
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise FormatError(bad_argument(call, "format", repr(name), "a name such as 'q4_0' (bf.FORMATS lists all)"))
    if name in FORMATS:
        return FORMATS[name]
    names, letters = _names(), _letters(name)
    if letters in names:
        return FORMATS[names[letters]]
    mix = MIX.fullmatch(letters)
    if mix and mix[1] in names:
        problem = f"{name!r} is a mix, which gives each tensor of a model its own format"
        fix = f"For one array use a format such as {names[mix[1]]!r}; for a model use bf.quantize_checkpoint or"
        raise FormatError(failure(call, problem, f"{fix} `billfish quantize`."))
    spelled = [name for format in FORMATS.values() for name in (format.name, *aliases_of(format))]
    hint = f"{did_you_mean(name, spelled)} bf.FORMATS or `billfish formats` lists all.".lstrip()
    raise FormatError(failure(call, f"unknown format {name!r}", hint))


def parse_format(text: str | Format, call: str, group_size: int | None = None) -> tuple[Format, int | None]:
    """The format and the group size that a user wrote: "fp4", or "fp4:64"; "fp4:-1" has one group for each row.

    group_size: one that was given beside the name. None is returned where neither has one: the format's own.
    """
    name, colon, written = text.partition(":") if isinstance(text, str) else (text, "", "")
    format = get_format(name, call)
    if colon:
        if re.fullmatch(r"-?[0-9]{1,9}", written) is None:
            fix = f"Write it as in {format.name}:{format.default_group_size}."
            raise FormatError(failure(call, f"format {text!r} has no valid group size", fix))
        if group_size not in (None, int(written)):
            raise FormatError(failure(call, f"format is {text!r} and group_size is {group_size}", "Pass one."))
        group_size = int(written)
    if group_size is not None and not (group_size == -1 and format.whole_row_groups):
        format.check_group_size(call, group_size, None)
    return format, group_size


def aliases_of(format: Format) -> tuple[str, ...]:
    """The names that a format has beside its own."""
    return tuple(vars(type(format)).get("aliases", ()))


def _names() -> dict[str, str]:
    """Every name of every format, in letters and digits alone: the name in FORMATS."""
    return {_letters(name): key for key, format in FORMATS.items() for name in (key, *aliases_of(format))}


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def check_names(call: str, format: Format, storage: Storage, names: set[str]) -> None:
    """Raises unless `storage` has exactly the arrays that the format knows."""
    expected = f"{', '.join(sorted(names))} for {format.name}"
    if not isinstance(storage, Mapping):
        raise DTypeError(bad_argument(call, "storage", type_of(storage), f"a dict with {expected}"))
    if storage.keys() != names:
        raise FormatError(bad_argument(call, "storage", f"a dict with {sorted(storage)}", f"a dict with {expected}"))
