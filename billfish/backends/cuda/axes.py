"""The few axes that a kernel is compiled for, and which of them a tensor is made of.

A :class:`Kind` says the axes in the words of decode.cuh. :func:`describe` finds them by how a format is made and never
by its name. A format qualifies if it decodes as format.py says, with an element whose table of values one of the
kernels' elements has too, and with groups that bricks can hold. Scales that the kernels know (core.formats.meaning)
stay bytes; all others are the float32 that `group_values` gives. Nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import FP4, FP8, Element
from billfish.core.errors import FormatError, bad_argument, failure
from billfish.core.format import Format, Planes
from billfish.core.formats.meaning import E4M3, E8M0, HALVED, decodes_plainly, meaning, offsets_of
from billfish.core.scales import decode_e4m3
from billfish.core.tensor import QuantizedTensor

COURSE, BRICK = 16, 128  # rows of a course (a row block of W), k of a brick
GROUPS = {128: 1, 64: 2, 32: 4, 16: 8}  # group size -> groups in a brick
ELEMENTS = ("Int4", "Int8", "E2M1", "E4M3", "Table4", "Half")  # Half: unquantized weights
SCALES = ("ScaleF16", "ScaleF32", "ScaleE5M2", "ScaleE5M3")
OFFSETS = ("NONE", "ZERO", "MINIMUM")


@dataclass(frozen=True)
class Kind:
    """Weights in the words of decode.cuh."""

    element: str  # of ELEMENTS
    scale: str  # of SCALES
    offset: str  # of OFFSETS
    groups: int  # of scales in a brick: 1, 2, 4 or 8
    middle: int = 0  # element = stored number + middle; other than 0 only with an offset
    table: tuple[int, ...] = ()  # of Table4: 16 bytes that mean byte - 128
    one_zero: bool = False  # code 8 of E2M1 is +0, as ggml has it, and not -0
    narrow: bool = False  # powers of two of ScaleE5M2 are close enough to each other for gemm_bytes.cu

    def __post_init__(self) -> None:
        """Raises unless decode.cuh has these words: files name them, and they become source text."""
        words = self.element in ELEMENTS and self.scale in SCALES and self.offset in OFFSETS
        table = len(self.table) in (0, 16) and all(type(byte) is int and 0 <= byte < 256 for byte in self.table)
        if not words or not table or self.groups not in GROUPS.values() or type(self.middle) is not int:
            expected = f"{', '.join(ELEMENTS)} with {', '.join(SCALES)} and {', '.join(OFFSETS)}"
            raise FormatError(bad_argument("Kind", "kind", repr(self), expected))

    @property
    def words(self) -> int:
        """32-bit words of codes for each lane and 16 x 16 fragment."""
        return {"Int8": 2, "E4M3": 2, "Half": 4}.get(self.element, 1)

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        return np.dtype({"ScaleF16": np.float16, "ScaleF32": np.float32}.get(self.scale, np.uint8))

    @property
    def code_bytes(self) -> int:
        """Of a brick."""
        return 1024 * self.words

    @property
    def group_bytes(self) -> int:
        """Of a brick's scales. Its offsets have the same type and take as many."""
        return COURSE * self.groups * self.scale_dtype.itemsize

    @property
    def brick_bytes(self) -> int:
        return self.code_bytes + self.group_bytes * (1 if self.offset == "NONE" else 2)

    def macros(self) -> dict[str, str]:
        """For the compiler. `one_zero` concerns dequantize.cu alone: products of +0 and -0 are the same; `narrow`
        concerns none."""
        names = {"ELEMENT": self.element, "SCALE": self.scale, "OFFSET": self.offset, "GROUPS": str(self.groups)}
        if self.middle:
            names["MIDDLE"] = f"({self.middle})"
        if self.table:
            words = np.asarray(self.table, np.uint8).view("<u4")
            names["TABLE"] = ",".join(f"{word:#x}u" for word in words)
        return names

    def spelled(self) -> str:
        """All of it as one word, for operators, which take strings and no objects."""
        numbers = f"{self.groups}:{self.middle}:{int(self.one_zero)}:{int(self.narrow)}"
        return f"{self.element}:{self.scale}:{self.offset}:{numbers}:{bytes(self.table).hex()}"


@lru_cache(maxsize=256)
def read_kind(word: str) -> Kind:
    """The kind that `Kind.spelled` spelled."""
    element, scale, offset, groups, middle, one_zero, narrow, table = word.split(":")
    sizes = int(groups), int(middle), tuple(bytes.fromhex(table))
    return Kind(element, scale, offset, *sizes, one_zero == "1", narrow == "1")


OFFSET_LIMIT = 1024.0  # offsets up to this many times the largest scale of their row do not count for its exponent
BYTE_SCALE_RAW = 128  # ScaleE5M2::raw and ScaleE5M3::raw of decode.cuh
# A power of two so many times the mean of its row's others would cut off their terms in the tensor core.
STEEP_POWERS = 16
NARROW_OCTAVES = 16  # E5M2's smallest number is 2^-16, and a row's largest power of two goes to 2
MIDDLE_LIMIT = 256  # float16 and bfloat16 hold integers up to 256 exactly

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(eq=False)
class Description:
    """A tensor [N, K] in terms of the kernel axes: scales, offsets [N, groups]; row scales float32 [N]; its codes.

    unpack: gives the format's own codes. Bricks hold these plus `shift`, modulo 256.
    """

    kind: Kind
    shape: tuple[int, int]
    unpack: Callable[[], Codes]
    scales: NDArray[Any]
    offsets: NDArray[Any] | None
    row_scale: Floats
    shift: int = 0

    @cached_property
    def codes(self) -> Codes:
        """As bricks hold them, uint8 [N, K]: where they are not read from the tensor's storage."""
        codes = self.unpack()
        return codes + np.uint8(self.shift) if self.shift else codes

    def with_float32(self) -> Description:
        """The same numbers, scales and offsets being float32."""
        scales = self.scales.astype(np.float32)
        offsets = None if self.offsets is None else self.offsets.astype(np.float32)
        return replace(self, kind=replace(self.kind, scale="ScaleF32"), scales=scales, offsets=offsets)


class CodeAxis(NamedTuple):
    """How the codes of an element become those of a kernel's."""

    element: str
    shift: int = 0
    middle: int = 0
    table: tuple[int, ...] = ()


def why_not(format: Format, group_size: int, k: int) -> str:
    """Why the kernels cannot read a format, or ""."""
    if not decodes_plainly(format):
        return f"no kernels for {format.name}, which has a decoder of its own"
    zero, minimum = offsets_of(format)
    if zero and minimum:
        return f"{format.name} has both a zero point and a minimum; one of them is supported"
    if code_axis(format.element, zero or minimum) is None:
        return f"no kernels for the {format.element.name} codes of {format.name}"
    if group_size not in GROUPS and group_size % BRICK and group_size < k:
        sizes = ", ".join(map(str, sorted(GROUPS)))
        return f"group_size is {group_size}; supported are {sizes}, multiples of {BRICK}, or all of K"
    return ""


@cache
def code_axis(element: Element, offset: bool) -> CodeAxis | None:
    """The kernels' element that has this one's values, or None."""
    values = element.values
    if type(element).decode is not Element.decode:
        return None
    if np.array_equal(values.view(np.uint32), FP4.values.view(np.uint32)):
        return CodeAxis("E2M1")
    if np.array_equal(values, FP8.values, equal_nan=True):
        return CodeAxis("E4M3")
    negative_zero = (values == 0) & np.signbit(values)
    if not np.array_equal(values, np.rint(values)) or negative_zero.any():
        return None
    first, count = int(values[0]), len(values)
    if np.array_equal(values, np.arange(count) + values[0]):
        # Beside an offset, numbers are taken from the middle of their range: weights spread around it, so the number
        # that the kernels add for offset and middle together is small, and so is its rounding.
        middle = first + count // 2 if offset else 0
        low, high = first - middle, first + count - 1 - middle
        for name, center in (("Int4", 8), ("Int8", 128)):
            if low >= -center and high < center and abs(middle) <= MIDDLE_LIMIT:
                return CodeAxis(name, low + center, middle)
        return None
    if np.array_equal(values, np.arange(256, dtype=np.uint8).view(np.int8)):
        return CodeAxis("Int8", 128)
    if count <= 16 and values.min() >= -128 and values.max() <= 127:
        return CodeAxis("Table4", table=tuple(int(v) + 128 for v in np.resize(values, 16)))
    return None


def usual_kind(format: Format, group_size: int) -> Kind:
    """The kind of most tensors of a format that `why_not` does not refuse: scales of some need more."""
    zero, minimum = offsets_of(format)
    axis, groups = code_axis(format.element, zero or minimum), GROUPS.get(group_size, 1)
    assert axis is not None
    powers = meaning(format) in E8M0 and groups == 4 and not (zero or minimum)
    element = "E2M1" if powers and axis.table == DOUBLED_E2M1 else axis.element
    offset = "ZERO" if zero else "MINIMUM" if minimum else "NONE"
    scale, table = "ScaleE5M2" if powers else "ScaleF16", axis.table if element == "Table4" else ()
    return Kind(element, scale, offset, groups, axis.middle, table, narrow=powers)


DOUBLED_E2M1 = tuple(int(2 * v) + 128 for v in FP4.values)  # ggml's, a table with one zero


def describe(tensor: QuantizedTensor, byte_scales: bool = True) -> Description:
    """Which kernel axes a tensor is made of. `dequantize` gives the same bits from these.

    byte_scales: whether scales may stay bytes.
    """
    format, unpack = tensor.format, partial(tensor.format.unpack_codes, tensor.storage)

    def codes_of(rows: NDArray[np.bool_]) -> Codes:
        return format.unpack_codes(tensor.take_rows(np.flatnonzero(rows)).storage)

    return _describe(format, tensor.shape, tensor.group_size, tensor.scale_planes, unpack, codes_of, byte_scales)


def describe_planes(format: Format, planes: Planes, group_size: int) -> Description:
    """The same of planes. Those of a device (billfish.core.device_array) give a description whose arrays are there."""
    codes = planes["codes"]
    shape = codes.shape[0], codes.shape[1]
    return _describe(format, shape, group_size, planes, lambda: codes, lambda rows: codes[rows])


def _describe(
    format: Format,
    shape: tuple[int, int],
    group_size: int,
    planes: Planes,
    unpack: Callable[[], Codes],
    codes_of: Callable[[NDArray[np.bool_]], Codes],
    byte_scales: bool = True,
) -> Description:
    """planes: all but the codes, which `unpack` gives; codes_of: those of some rows."""
    k = shape[1]
    reason = why_not(format, group_size, k)
    if reason:
        raise FormatError(failure("cuda", reason))
    has_zero, has_minimum = offsets_of(format)
    offset = "ZERO" if has_zero else "MINIMUM" if has_minimum else "NONE"
    axis = code_axis(format.element, offset != "NONE")
    assert axis is not None
    groups = GROUPS.get(group_size, 1)
    bytewise = _byte_scales(format, planes, codes_of, axis, groups) if offset == "NONE" and byte_scales else None
    if bytewise is not None:
        name, stored, row_scale, narrow = bytewise
        kind = Kind("E2M1", name, "NONE", groups, one_zero=axis.element != "E2M1", narrow=narrow)
        return Description(kind, shape, unpack, stored, None, row_scale)
    with np.errstate(invalid="ignore", over="ignore"):  # scales of a file may be NaN or infinite
        scale, zero, minimum = format.group_values(planes)
    added = zero if zero is not None else minimum
    if group_size not in GROUPS:  # a scale for several bricks: once for each
        index = np.arange(-(-k // BRICK)) * BRICK // group_size
        scale, added = scale[:, index], None if added is None else added[:, index]
    name, stored, offsets, row_scale = _float_scales(scale, added, offset)
    kind = Kind(axis.element, name, offset, groups, axis.middle, axis.table)
    return Description(kind, shape, unpack, stored, offsets, row_scale, axis.shift)


def _byte_scales(
    format: Format, planes: Planes, codes_of: Callable[[NDArray[np.bool_]], Codes], axis: CodeAxis, groups: int
) -> tuple[str, NDArray[np.uint8], Floats, bool] | None:
    """Scales that stay one byte, if this format's do and all of them are in range; and whether they are `Kind.narrow`.

    ScaleE5M2: powers of two relative to the largest of their row. ScaleE5M3: E4M3 as it is. ggml's scales are half of
    these, and its elements twice E2M1.
    """
    means, codes, narrow = meaning(format), planes["scale"], False
    doubled = axis.element == "Table4" and axis.table == DOUBLED_E2M1
    fits = doubled if means in HALVED else axis.element == "E2M1"
    if not fits or codes.dtype != np.uint8:
        return None
    if means in E8M0 and groups == 4:
        if codes.max() == 255:
            return None
        # Groups of zeros often have the smallest scale there is. Theirs may be any. To find them takes long, so only
        # rows are looked at whose scales differ much.
        empty = np.zeros_like(codes, bool)
        largest = codes.max(axis=1, keepdims=True).astype(np.int32)
        exponent = codes - largest
        doubtful = (exponent.min(axis=1) < -NARROW_OCTAVES) | _are_steep(exponent, empty)
        if doubtful.any():
            empty[doubtful] = _empty_groups(codes_of(doubtful), BRICK // groups)
            largest = np.where(empty, 0, codes).max(axis=1, keepdims=True).astype(np.int32)
            exponent = np.where(empty, 0, codes - largest)
        if exponent.min() < -31:
            return None
        name, dropped = "ScaleE5M2", 8
        narrow = bool(exponent.min() >= -NARROW_OCTAVES) and not _are_steep(exponent, empty).any()
        scale = np.ldexp(np.float32(1), exponent + 8)
        row_scale = np.ldexp(np.float32(1), largest[:, 0] - 127 - 8)
    elif means in E4M3 and groups == 8:
        if codes.max() >= 0x7F:
            return None
        scale, row_scale = decode_e4m3(codes), np.full_like(codes[:, 0], planes["global_scale"], np.float32)
        name, dropped = "ScaleE5M3", 7
    else:
        return None
    raised = scale * np.float32(BYTE_SCALE_RAW)
    half = raised.astype(np.float16)
    bits = half.view(np.uint16)
    if (half != raised).any() or (bits & np.uint16((1 << dropped) - 1)).any():
        return None
    return name, (bits >> np.uint16(dropped)).astype(np.uint8), row_scale, narrow


def _are_steep(exponent: NDArray[np.int32], empty: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """In which rows of powers of two [N, groups] the largest is STEEP_POWERS times the mean of the others.

    Empty groups do not count.
    """
    powers = np.where(empty, np.float32(0), np.ldexp(np.float32(1), exponent))
    others, count = powers.sum(axis=1) - powers.max(axis=1), np.where(empty, 0, 1).sum(axis=1) - 1
    steep: NDArray[np.bool_] = others * np.float32(STEEP_POWERS) < count
    return steep


def _empty_groups(codes: Codes, group_size: int) -> NDArray[np.bool_]:
    """Which groups of E2M1 have zeros alone, of either sign: bool [N, groups]. The last group may be partial."""
    (n, k), groups = codes.shape, -(-codes.shape[1] // group_size)
    padded = np.zeros_like(codes, shape=(n, groups * group_size))
    padded[:, :k] = codes
    return (padded & np.uint8(7)).reshape(n, groups, group_size).max(axis=2) == 0


def _float_scales(
    scale: Floats, added: Floats | None, offset: str
) -> tuple[str, NDArray[Any], NDArray[Any] | None, Floats]:
    """Scales (and offsets) relative to a power of two for each row; float16 where that is exact.

    The largest of a row is from 1 to below 2. So the product of a code and a scale is a good float16, whatever the size
    of the weights.
    """
    finite = np.isfinite(scale).all() and (added is None or np.isfinite(added).all())
    row_scale = np.ones_like(scale[:, 0])
    with np.errstate(over="ignore", invalid="ignore"):
        if finite:
            largest = np.abs(scale).max(axis=1)
            if added is not None:
                by_offset = np.abs(added * scale if offset == "ZERO" else added).max(axis=1)
                largest = np.maximum(largest, by_offset / np.float32(OFFSET_LIMIT))
            exponent = np.clip(np.frexp(largest)[1] - 1, -126, 127)
            row_scale = np.ldexp(row_scale, np.where(largest > 0, exponent, 0)).astype(np.float32)
            # A row that spans more powers of two than float32 has below its largest stays as it is.
            back = scale / row_scale[:, None] * row_scale[:, None]
            row_scale = np.where((back == scale).all(axis=1), row_scale, np.float32(1))
            if offset == "MINIMUM" and added is not None:
                back = added / row_scale[:, None] * row_scale[:, None]
                row_scale = np.where((back == added).all(axis=1), row_scale, np.float32(1))
        scale = scale / row_scale[:, None]
        if offset == "MINIMUM" and added is not None:
            added = added / row_scale[:, None]
        half = scale.astype(np.float16)
        exact = np.array_equal(half, scale)
        half_added = None
        if added is not None:
            half_added = added.astype(np.float16)
            exact = exact and np.array_equal(half_added, added)
    if finite and exact:
        return "ScaleF16", half, half_added, row_scale
    return "ScaleF32", scale, added, row_scale
