"""Weights as the kernels read them: panels of 16 columns, and the names of the axes in the .metal files.

A run is 32 k of one column. Planes, in this order, the last axis fastest:

    codes    uint32 [panels, runs, 16, words]   4 words for nibbles, 8 for bytes, 2 for two bits
    high     uint32 [panels, runs, 16, words]   the bits above these: 1 or 2 words
    scales   [panels, groups, 16]               float16, bfloat16, float32, or bytes (E8M0, E4M3)
    offsets  [panels, groups, 16]               zero points or minimums, of any type
    factor   float32 []                         of the whole tensor
    size     int32 [2]                          N, K

The k-quants have small integers in `scales`, as few bits as in their files, and the float16 numbers of their blocks in
`offsets` [panels, blocks, 16, 1 or 2]. What lies beyond N or K is zero.

Each plane is an array [numbers]; a stack of E experts has [E, numbers].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import E2M1, E2M1X2, E4M3, IQ4NL, Element, Integer, Signed
from billfish.core.format import Format, Planes
from billfish.core.formats.fp4 import Mxfp4, Nvfp4
from billfish.core.formats.ggml import Mxfp4Gguf, Nvfp4Gguf
from billfish.core.formats.kquants import TwoLevelMinimum, TwoLevelScaled
from billfish.core.formats.meaning import E4M3 as E4M3_SCALES
from billfish.core.formats.meaning import PLAIN, meaning
from billfish.core.tensor import QuantizedTensor

Array = NDArray[Any]
Words = NDArray[np.uint32]

PANEL, RUN = 16, 32
SLICE = 64 * PANEL  # columns that are packed at a time
# Of the codes of a panel, column 0 is followed by 4, 8 and 12: the columns that four lanes read with one load.
COLUMN_ORDER = [*range(0, 16, 4), *range(1, 16, 4), *range(2, 16, 4), *range(3, 16, 4)]
# Bits of a code that are in the plane `high`, by the bits that a code has; and where pair t of part i has the lowest of
# them in its half of the word.
HIGH_BITS = {3: 1, 5: 1, 6: 2}
HIGH_PLACES = {
    3: [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
    5: [[0, 4, 1, 5], [2, 6, 3, 7], [8, 12, 9, 13], [10, 14, 11, 15]],
    6: [[0, 4, 2, 6], [8, 12, 10, 14], [0, 4, 2, 6], [8, 12, 10, 14]],
}


def padded(array: Array, columns: int, multiple: int = 1) -> Array:
    """With zeros behind, so that the first axis is a multiple of `columns` and the second of `multiple`."""
    behind = [(0, -size % unit) for size, unit in zip(array.shape, (columns, multiple), strict=True)]
    return np.pad(array, behind)


def by_slices(make: Callable[[NDArray[np.uint8]], Words], codes: NDArray[np.uint8]) -> Words:
    """What `make` makes of codes [N, K], some columns at a time: on their way words are four times as large."""
    return np.concatenate([make(codes[start : start + SLICE]) for start in range(0, len(codes), SLICE)])


def panels(groups: Array, multiple: int = 1) -> Array:
    """One number for each group [N, groups] -> [panels, groups, 16], the number of groups a multiple of `multiple`."""
    array = padded(groups, PANEL, multiple)
    return array.reshape(-1, PANEL, array.shape[1]).transpose(0, 2, 1)


def pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Codes [N, K] -> [panels, runs, 16, t, i, 2], k = 8t + 2i + 0 or 1 of a run."""
    array = padded(codes, PANEL, RUN)
    runs = array.reshape(-1, PANEL, array.shape[1] // RUN, 4, 4, 2)
    return runs.transpose(0, 2, 1, 3, 4, 5).astype(np.uint32)


def halves(low_and_high: Words) -> Words:
    """[.., 2], 16 bits each -> words."""
    return low_and_high[..., 0] | low_and_high[..., 1] << np.uint32(16)


def in_places(values: Words, places: list[int]) -> Words:
    """[.., t, i, 2] -> [.., i, 2]: value t is shifted to its place."""
    return sum((values[..., t, :, :] << np.uint32(place) for t, place in enumerate(places)), np.uint32(0))


def code_words(codes: NDArray[np.uint8], element: Element) -> Words:
    """Codes [N, K] -> [panels, runs, 16, words], without the bits that :func:`high_words` takes."""
    if isinstance(element, Signed):
        codes = codes ^ np.uint8(0x80)
    if element is E2M1X2:
        codes = np.where(codes == 8, np.uint8(0), codes)  # it has one zero only
    each = pairs(codes)
    if element.bits == 8:  # part i has words 2i, of t = 0 and 1, and 2i + 1
        words = np.stack(
            [halves(in_places(each[..., :2, :, :], [0, 8])), halves(in_places(each[..., 2:, :, :], [0, 8]))], -1
        )
        words = words.reshape(*words.shape[:-2], 8)
    elif element.bits < 4:  # two parts share a word
        parts = in_places(each & np.uint32(3), [0, 2, 4, 6])
        words = halves(parts[..., ::2, :] | parts[..., 1::2, :] << np.uint32(8))
    elif type(element) is E2M1 or element is E2M1X2:
        signs, rest = each >> np.uint32(3), each & np.uint32(7)
        words = halves(in_places(signs, [15, 12, 13, 14]) | in_places(rest, [9, 6, 3, 0]))
    else:
        words = halves(in_places(each & np.uint32(15), [0, 4, 8, 12]))
    return words[:, :, COLUMN_ORDER]


def high_words(codes: NDArray[np.uint8], bits: int) -> Words:
    """Codes [N, K] -> [panels, runs, 16, words]: the bits above the lowest two or four."""
    each = pairs(codes >> np.uint8(2 if bits == 3 else 4))
    parts = [halves(in_places(each[..., i : i + 1, :], places))[..., 0] for i, places in enumerate(HIGH_PLACES[bits])]
    if bits == 6:  # two parts in each of two words
        return np.stack([parts[0] | parts[1], parts[2] | parts[3]], axis=-1)
    return (parts[0] | parts[1] | parts[2] | parts[3])[..., None]


def six_bit_pairs(first: Array, second: Array) -> NDArray[np.uint8]:
    """Two integers below 64 for each run [N, runs] -> [panels, runs, 24]: see scales.metal."""
    first, second = panels(first), panels(second)
    rest = second >> 2
    return np.concatenate([first | (second & 3) << 6, rest[..., ::2] | rest[..., 1::2] << 4], axis=-1).astype(np.uint8)


# ---- the arrays that kernels read ------------------------------------------------------------------------------------


# MLX hands arrays of fewer than 8 elements to kernels in the constant address space, which is another type of pointer.
LEAST_SIZE = 8


@dataclass(frozen=True)
class Axes:
    """One format in the words of decode.metal and scales.metal."""

    element: str
    scale: str


@dataclass(frozen=True, eq=False)
class MetalWeights:
    """W [N, K], or a stack of them [E, N, K], for the kernels. `group` is 0 where one scale serves all of K.

    The arrays are NumPy's or MLX's.
    """

    name: str  # of the format
    shape: tuple[int, ...]
    group: int
    axes: Axes
    arrays: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Of the planes that the format has; an absent one is an alias of the codes."""
        return sum({id(a): int(a.nbytes) for a in self.arrays.values()}.values())

    def converted(self, convert: Callable[[Array], Any]) -> MetalWeights:
        """The same with arrays of another library; what was one array stays one."""
        made = {id(a): convert(a) for a in self.arrays.values()}
        return replace(self, arrays={name: made[id(a)] for name, a in self.arrays.items()})

    def expert(self, index: int) -> MetalWeights:
        """One matrix of a stack, on the same memory."""
        size = self.arrays["size"]
        arrays = {id(a): a if a is size else a[index] for a in self.arrays.values()}
        return replace(self, shape=self.shape[1:], arrays={name: arrays[id(a)] for name, a in self.arrays.items()})


def element_axis(element: Element) -> str | None:
    """How codes are stored and what they mean; None if the kernels have no such element."""
    if type(element) is E2M1 or element is E2M1X2:
        return f"Element<Nibbles<0>, E2M1<{2 if element is E2M1X2 else 1}>>"
    if element is IQ4NL:
        return "Element<Nibbles<0>, Looked>"
    if type(element) is E4M3:
        return "Element<Bytes, Float8>"
    if type(element) is Signed:
        return "Element<Bytes, Integer<128>>"
    bits = {2: "Crumbs<0>", 3: "Crumbs<1>", 4: "Nibbles<0>", 5: "Nibbles<1>", 6: "Nibbles<2>", 8: "Bytes"}
    if type(element) is Integer and element.bits in bits:
        return f"Element<{bits[element.bits]}, Integer<{element.bias}>>"
    return None


# How a scale of one byte is decoded, by the method that says what it means.
BYTE_SCALES: dict[object, str] = {
    Mxfp4.group_values: "E8M0",
    Mxfp4Gguf.group_values: "E8M0Half",
    Nvfp4.group_values: "E4M3",
    Nvfp4Gguf.group_values: "UE4M3Half",
}


def lay_out(tensor: QuantizedTensor) -> MetalWeights:
    """A tensor of a format that :func:`element_axis` knows, as NumPy arrays."""
    format, (n, k) = tensor.format, tensor.shape
    element = element_axis(format.element)
    assert element is not None
    codes, planes = format.unpack_codes(tensor.storage), tensor.scale_planes
    group = 0 if tensor.group_size >= k else tensor.group_size
    axis, scales, offsets = _group_planes(format, planes, 2 if group == 16 else 1)
    arrays: dict[str, Array] = {
        "codes": by_slices(lambda some: code_words(some, format.element), codes),
        "scales": scales,
    }
    if format.element.bits in HIGH_BITS:
        arrays["high"] = by_slices(lambda some: high_words(some, format.element.bits), codes)
    if offsets is not None:
        arrays["offsets"] = offsets
    arrays = {name: np.ascontiguousarray(array).reshape(-1) for name, array in arrays.items()}
    for name in ("high", "offsets"):
        arrays.setdefault(name, arrays["codes"])  # never read
    arrays["factor"] = np.asarray(planes["global_scale"] if meaning(format) in E4M3_SCALES else 1, np.float32)
    arrays["size"] = np.array([n, k], np.int32)
    return MetalWeights(format.name, (n, k), group, Axes(element, axis), arrays)


def lay_out_experts(tensors: Sequence[QuantizedTensor]) -> MetalWeights:
    """A stack of matrices of one format and shape, each as :func:`lay_out` has it."""
    experts = [lay_out(tensor) for tensor in tensors]
    first, stacked = experts[0], dict[str, Array]()
    for name, array in first.arrays.items():
        alias = next((other for other in stacked if first.arrays[other] is array), None)
        stacked[name] = np.stack([one.arrays[name] for one in experts]) if alias is None else stacked[alias]
    stacked["factor"] = np.pad(stacked["factor"], (0, max(LEAST_SIZE - len(experts), 0)))
    stacked["size"] = first.arrays["size"]
    return replace(first, shape=(len(experts), *first.shape), arrays=stacked)


def _group_planes(format: Format, planes: Planes, multiple: int) -> tuple[str, Array, Array | None]:
    """How scales are stored, in the words of scales.metal, and the two planes, with a multiple of so many groups."""
    if meaning(format) in BYTE_SCALES:
        return f"OneLevel<{BYTE_SCALES[meaning(format)]}, Offset::none>", panels(planes["scale"], multiple), None
    if meaning(format) in PLAIN:
        kind = next((name for name in ("zero", "minimum") if name in planes), "none")
        return _plain(planes["scale"], kind, planes.get(kind), multiple)
    if isinstance(format, TwoLevelMinimum) and meaning(format) is TwoLevelMinimum.group_values:
        blocks = np.stack([panels(planes["scale"]), panels(planes["minimum"])], axis=-1)
        if format.group_sizes == (32,):
            return "SixBitMinimum", six_bit_pairs(planes["sub_scale"], planes["sub_minimum"]), blocks
        return "ByteOfBlock<true>", panels(planes["sub_scale"] | planes["sub_minimum"] << 4), blocks
    if (
        isinstance(format, TwoLevelScaled)
        and meaning(format) is TwoLevelScaled.group_values
        and format.group_sizes == (16,)
    ):
        blocks, integers = panels(planes["scale"]), planes["sub_scale"]
        if format.sub_bias:
            return "SixBitScale", six_bit_pairs(integers[:, ::2], integers[:, 1::2]), blocks
        return "ByteOfBlock<false>", panels(integers.view(np.uint8)), blocks
    with np.errstate(invalid="ignore", over="ignore"):  # two levels, multiplied out, or a meaning of its own
        scale, zero, minimum = format.group_values(planes)
        if zero is not None and minimum is not None:
            minimum = minimum - zero * scale
            zero = None
    offset = minimum if zero is None else zero
    return _plain(scale, "none" if offset is None else "minimum" if zero is None else "zero", offset, multiple)


def _plain(scale: Array, kind: str, offset: Array | None, multiple: int) -> tuple[str, Array, Array | None]:
    planes = [None if plane is None else panels(plane, multiple) for plane in (scale, offset)]
    assert planes[0] is not None
    return f"OneLevel<Plain, Offset::{kind}>", planes[0], planes[1]
