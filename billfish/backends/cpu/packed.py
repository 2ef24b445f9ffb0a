"""Weights in the order in which the kernels of one ISA level read them: PackedWeights, and PlainWeights of floats."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.core.errors import (
    BackendUnavailable,
    CheckpointError,
    DTypeError,
    ShapeError,
    bad_argument,
    failure,
    type_of,
)
from billfish.core.files import path_of, read_arrays, replacing
from billfish.core.format import Format, get_format
from billfish.core.tensor import check_permutation

# The order of the enums in layout/problem.h; PLAIN_TYPES follow CODES there.
CODES = ("u2", "u3", "u4", "u5", "u6", "s8", "table", "e4m3", "floats")
FLOAT_CODES = ("e4m3", "floats")  # these are multiplied with x in float32, whatever was asked for
SCALES = (
    "f16",
    "f16_minimum",
    "f16_zero8",
    "f16_zero16",
    "e8m0",
    "e4m3",
    "sub",
    "sub_minimum",
    "sub_nibbles",
    "f32",
    "f32_minimum",
)
GROUPS = (16, 32, 64, 128, 256)
LAYOUT = 3  # changes with the order of bytes in the stream
# Levels that read what the others pack, best first.
ONE_STREAM = (("neon_i8mm", "neon_dotprod"), ("amx", "avx512_vnni"))

LINE = 64  # bytes of a cache line
Rest = Mapping[str, "NDArray[Any] | np.dtype[Any]"]  # by names of planes: a plane, or the type of one (unpack.py)


def room_for_stream(count: int) -> NDArray[np.uint8]:
    """So many bytes from the beginning of a cache line on, where NumPy's own room begins 16 or 48 bytes behind it.

    A vector that crosses the end of a line takes two loads.
    """
    return rooms_for_streams([count])[0]


def rooms_for_streams(counts: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The same for several streams, in one piece of memory: NumPy asks for large pages from 4 MiB on."""
    lines = [-(-count // LINE) * LINE for count in counts]
    room = np.empty(sum(lines) + LINE - 1, np.uint8)
    starts = accumulate(lines, initial=-room.ctypes.data % LINE)
    return [room[start:][:count] for start, count in zip(starts, counts, strict=False)]


@dataclass(frozen=True)
class Axes:
    """Which kernel axes weights are made of; see layout/problem.h."""

    codes: str
    scales: str
    group: int
    bias: int = 0
    factor: float = 1.0
    table: tuple[int, ...] = ()

    def describe(self, shape: tuple[int, int]) -> _cpu.Description:
        """Weights [N, K] of this kind, as the native core takes them."""
        codes, scales = CODES.index(self.codes), SCALES.index(self.scales)
        return _cpu.Description(*shape, codes, scales, self.bias, self.group, self.factor, list(self.table))


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """A matrix W [N, K] packed for the CPU's kernels. :func:`billfish.prepack` makes one.

    :func:`billfish.quantized_linear` takes it, and nothing else has to be kept. `data` is one sequential stream; the
    other fields say how to read it.

    format, shape, group_size, permutation: as of QuantizedTensor.
    level, axes: the instruction set that `data` was packed for, and the kind of weights in it.
    rest: what `unpack` needs beside `data`; None of weights that were loaded or packed without it.

        >>> packed = bf.prepack(bf.quantize(np.eye(32, dtype=np.float32), "q8_0"))
        >>> packed.save("weights.packed")
        >>> bf.PackedWeights.load("weights.packed").shape
        (32, 32)
    """

    format: Format
    shape: tuple[int, int]
    group_size: int
    level: str
    axes: Axes
    data: NDArray[np.uint8]
    permutation: NDArray[np.int32] | None = None
    rest: Rest | None = None

    def __post_init__(self) -> None:
        """Raises unless `data` has all that the kernels will read: they believe what they are told."""
        call, levels = "PackedWeights", _cpu.levels()
        if self.level not in levels:
            problem = f"the weights are packed for {self.level}, and this machine has {', '.join(levels)}"
            raise BackendUnavailable(failure(call, problem, "Pack them again: bf.prepack."))
        whole = len(self.shape) == 2 and all(type(size) is int for size in (*self.shape, self.group_size))
        if not whole or not isinstance(self.format, Format):
            found = f"{self.shape} with format {self.format} and group_size {self.group_size!r}"
            raise ShapeError(bad_argument(call, "shape", found, "(N, K), a Format and an integer"))
        check_stream(call, self.level, self.shape, self.data, self.axes.group, lambda: self.description)
        if self.permutation is not None:
            object.__setattr__(self, "permutation", check_permutation(call, self.permutation, self.shape[1]))

    @cached_property
    def description(self) -> _cpu.Description:
        """What the native core takes."""
        return self.axes.describe(self.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __repr__(self) -> str:
        n, k = self.shape
        return f"PackedWeights({self.format.name}, [{n}, {k}], {self.level}, {self.nbytes} bytes)"

    def made(self, key: Any, make: Callable[[], Any]) -> Any:
        """As of QuantizedTensor."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("description", "_made")}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, an .npz of NumPy, complete or not at all."""
        axes = self.axes.__dict__ | {"table": list(self.axes.table)}
        about = {"format": self.format.name, "shape": self.shape, "group_size": self.group_size, "level": self.level}
        with replacing(path_of("PackedWeights.save", path)) as file:
            arrays: dict[str, Any] = {"about": np.array(json.dumps(about | {"axes": axes, "layout": LAYOUT}))}
            if self.permutation is not None:
                arrays["permutation"] = self.permutation
            np.savez(file, **arrays, data=self.data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedWeights:
        """What `save` wrote, for the best ISA level here that reads it; for others, prepack the tensor again."""
        call = "PackedWeights.load"
        file = path_of(call, path)
        try:
            arrays = read_arrays(file)
            about = json.loads(str(arrays["about"]))
            if about.get("layout") != LAYOUT:
                problem = f"{file} was packed by another version of billfish"
                raise BackendUnavailable(failure(call, problem, "Pack the weights again: bf.prepack."))
            axes = Axes(**about["axes"] | {"table": tuple(about["axes"]["table"])})
            readers = next((levels for levels in ONE_STREAM if about["level"] in levels), (about["level"],))
            level = next((level for level in readers if level in _cpu.levels()), about["level"])
            format, shape = get_format(str(about["format"]), call), tuple(about["shape"])
            data = arrays["data"]
            if data.dtype == np.uint8 and data.ndim == 1:  # else it is refused
                data = room_for_stream(data.size)
                data[:] = arrays["data"]
            return cls(format, shape, about["group_size"], level, axes, data, arrays.get("permutation"))
        except BackendUnavailable:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            problem = f"{file} is not a file of PackedWeights.save, or damaged ({error})"
            raise CheckpointError(failure(call, problem)) from None


def check_stream(
    call: str,
    level: str,
    shape: tuple[int, int],
    data: Any,
    group: int,
    description: Callable[[], _cpu.Description],
    experts: int = 1,
) -> None:
    """Raises unless `data` is the stream of weights [N, K], or of so many of them one after the other."""
    n, k = shape
    one = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous
    # A weight takes 2 bits at least: beyond that, the native core's own numbers could overflow.
    if one and group in GROUPS and n >= 0 and k >= 0 and experts * n * k <= 4 * data.size:
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # axes that the core has no number for
            if max(n, k) < 2**40 and data.size == experts * _cpu.packed_bytes(level, description()):
                return
    found = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type_of(data)
    several = "" if experts == 1 else f"{experts} times "
    raise ShapeError(bad_argument(call, "data", found, f"{several}the packed bytes of [{n}, {k}]"))


# ---- weights that are not quantized ----------------------------------------------------------------------------------


# Types of unquantized weights, numbered behind CODES in the enum Codes of layout/problem.h.
PLAIN_TYPES = ("float32", "float16", "bfloat16")
NO_SCALES = len(SCALES)  # the last of the enum Scales
GROUP = 32  # any size does, as there are no scales


@dataclass(frozen=True, eq=False)
class PlainWeights:
    """W [N, K] as it is, without codes and scales. Products take it as they take PackedWeights, with x in float32."""

    dtype: str
    shape: tuple[int, int]
    level: str
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Raises unless `data` has all that the kernels will read."""
        if self.dtype not in PLAIN_TYPES:
            raise DTypeError(bad_argument("PlainWeights", "dtype", repr(self.dtype), ", ".join(PLAIN_TYPES)))
        check_stream("PlainWeights", self.level, self.shape, self.data, GROUP, lambda: self.description)

    @cached_property
    def description(self) -> Any:
        """What the native core takes."""
        return describe_plain(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def describe_plain(dtype: str, shape: tuple[int, int]) -> Any:
    """A native Description of a matrix of one of PLAIN_TYPES."""
    return _cpu.Description(*shape, len(CODES) + PLAIN_TYPES.index(dtype), NO_SCALES, 0, GROUP, 1.0, [])


def pack_plain(level: str, matrix: NDArray[Any]) -> PlainWeights:
    """W [N, K] of one of PLAIN_TYPES, packed. The numbers keep their type."""
    n, k = matrix.shape
    description = describe_plain(matrix.dtype.name, (n, k))
    data = room_for_stream(_cpu.packed_bytes(level, description))
    if data.size:
        _cpu.prepack_plain(level, description, np.ascontiguousarray(matrix).reshape(-1).view(np.uint8), data)
    return PlainWeights(matrix.dtype.name, (n, k), level, data)
