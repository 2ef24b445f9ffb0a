"""Weights as the kernels read them: K-major planes, and the names of the three axes in the .metal files.

    codes    uint32 [K / word_k, N]   word_k codes along K, lowest first: 8 nibbles or 4 bytes
    high     uint32 [K / 32, N]       the fifth bits of five-bit codes
    scales   [groups, N]              float16, bfloat16, float32, or bytes (E8M0, E4M3)
    offsets  [groups, N]              zero points or minimums, of any type
    factor   float32 []               of the whole tensor

A stack of E experts has these planes one behind the other, [E, ...], in one array each.

This is the layout of `fp4`, `u4`, `u4b8` and `u8b128` already; the others are re-ordered, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.elements import E2M1, E2M1X2, E4M3, IQ4NL, Element, Integer, Signed
from billfish.format import Format, Planes
from billfish.formats.fp4 import Mxfp4, Nvfp4
from billfish.formats.ggml import Mxfp4Gguf, Nvfp4Gguf
from billfish.formats.meaning import E4M3 as E4M3_SCALES
from billfish.formats.meaning import PLAIN, meaning
from billfish.formats.words import WordFormat, pack_words
from billfish.tensor import QuantizedTensor

Array = NDArray[Any]

# MLX hands arrays of fewer than 8 elements to kernels in the constant address space, which is another type of pointer.
LEAST_SIZE = 8


@dataclass(frozen=True)
class Axes:
    """One format in the words of decode.metal and scales.metal."""

    element: str
    scale: str
    offset: str


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
        arrays = {id(a): a[index] for a in self.arrays.values()}
        return replace(self, shape=self.shape[1:], arrays={name: arrays[id(a)] for name, a in self.arrays.items()})


def element_axis(element: Element) -> str | None:
    """How codes are stored and what they mean; None if the kernels have no such element."""
    if type(element) is E2M1:
        return "Element<Packed<0>, E2M1>"
    if element is E2M1X2:
        return "Element<Packed<0>, E2M1X2>"
    if element is IQ4NL:
        return "Element<Packed<0>, Looked>"
    if type(element) is E4M3:
        return "Element<Whole, Float8>"
    if type(element) is Signed:
        return "Element<Whole, Integer<128>>"
    if type(element) is Integer and element.bits in (4, 5, 8):
        bits = {4: "Packed<0>", 5: "Packed<1>", 8: "Whole"}[element.bits]
        return f"Element<{bits}, Integer<{element.bias}>>"
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
    planes = tensor.scale_planes
    axis, scale, kind, offset = _group_planes(format, planes)
    arrays: dict[str, Array] = {"codes": _code_words(tensor)}
    arrays["scales"] = np.ascontiguousarray(scale.T)
    if format.element.bits == 5:
        arrays["high"] = pack_words(format.unpack_codes(tensor.storage).T >> np.uint8(4), 1)
    if offset is not None:
        arrays["offsets"] = np.ascontiguousarray(offset.T)
    arrays = {name: at_least(array) for name, array in arrays.items()}
    for name in ("high", "offsets"):
        arrays.setdefault(name, arrays["codes"])  # never read
    arrays["factor"] = np.asarray(planes["global_scale"] if meaning(format) in E4M3_SCALES else 1, np.float32)
    axes = Axes(element, axis, kind)
    return MetalWeights(format.name, (n, k), 0 if tensor.group_size >= k else tensor.group_size, axes, arrays)


def lay_out_experts(tensors: Sequence[QuantizedTensor]) -> MetalWeights:
    """A stack of matrices of one format and shape, each as :func:`lay_out` has it."""
    experts = [lay_out(tensor) for tensor in tensors]
    first, stacked = experts[0], dict[str, Array]()
    for name, array in first.arrays.items():
        alias = next((other for other in stacked if first.arrays[other] is array), None)
        stacked[name] = np.stack([one.arrays[name] for one in experts]) if alias is None else stacked[alias]
    stacked["factor"] = np.pad(stacked["factor"], (0, max(LEAST_SIZE - len(experts), 0)))
    return replace(first, shape=(len(experts), *first.shape), arrays=stacked)


def _group_planes(format: Format, planes: Planes) -> tuple[str, Array, str, Array | None]:
    """How scales are decoded, their plane, the kind of offset, and its plane."""
    if meaning(format) in BYTE_SCALES:
        return BYTE_SCALES[meaning(format)], planes["scale"], "none", None
    if meaning(format) in PLAIN:
        kind = next((name for name in ("zero", "minimum") if name in planes), "none")
        return "Plain", planes["scale"], kind, planes.get(kind)
    with np.errstate(invalid="ignore", over="ignore"):  # two levels, multiplied out, or a meaning of its own
        scale, zero, minimum = format.group_values(planes)
        if zero is not None and minimum is not None:
            minimum = minimum - zero * scale
            zero = None
    offset = minimum if zero is None else zero
    return "Plain", scale, "none" if offset is None else "minimum" if zero is None else "zero", offset


def _code_words(tensor: QuantizedTensor) -> NDArray[np.uint32]:
    format = tensor.format
    if isinstance(format, WordFormat) and type(format).unpack_codes is WordFormat.unpack_codes:
        return np.ascontiguousarray(tensor.storage["packed"])
    codes = format.unpack_codes(tensor.storage).T
    if isinstance(format.element, Signed):
        return pack_words(codes ^ np.uint8(0x80), 8)
    return pack_words(codes, 8) if format.element.bits == 8 else pack_words(codes & np.uint8(15), 4)


def at_least(array: Array) -> Array:
    """With rows of zeros behind, until there are 8 numbers; kernels know the real size."""
    if array.size >= LEAST_SIZE:
        return array
    missing = -(-(LEAST_SIZE - array.size) // array.shape[-1])
    return np.concatenate([array, np.zeros((missing, array.shape[-1]), array.dtype)])
