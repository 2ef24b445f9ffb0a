"""PackedExperts: the matrices of experts, one after the other in one stream that the kernels of one ISA level read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.backends.cpu.axes import Layout, layout_of, layout_of_blocks
from billfish.backends.cpu.packed import (
    GROUP,
    PLAIN_TYPES,
    Axes,
    PackedWeights,
    Rest,
    check_stream,
    describe_plain,
    room_for_stream,
)
from billfish.backends.cpu.source import codes_of, prepack_fields
from billfish.backends.cpu.unpack import rest_of, rest_of_blocks
from billfish.core.errors import BackendUnavailable, DTypeError, ShapeError, bad_argument, failure
from billfish.core.format import get_format
from billfish.core.formats.ggml import BlockFormat
from billfish.core.formats.structure import structure_of
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """Experts W [E, N, K] packed for the CPU's kernels. :func:`billfish.prepack` makes one of a stack.

    kind: the name of the format, or of one of PLAIN_TYPES. shape: (E, N, K). data: the stream of all experts, each
    padded to whole tiles.
    level, axes: as of PackedWeights, and the same for all experts; None for unquantized weights.
    factors: float32 [E], where experts have factors of their own in the place of that of `axes`.
    group_size, rest: as of PackedWeights; planes that are kept are [E, ...]. Unquantized weights have neither.

        >>> bf.prepack(bf.quantize(np.ones((4, 8, 32), np.float32), "q8_0")).shape
        (4, 8, 32)
    """

    kind: str
    shape: tuple[int, int, int]
    level: str
    axes: Axes | None
    data: NDArray[np.uint8]
    factors: NDArray[np.float32] | None = None
    group_size: int = 0
    rest: Rest | None = None

    def __post_init__(self) -> None:
        """Raises unless `data` and `factors` have all that the kernels will read: they believe what they are told."""
        call, levels = "PackedExperts", _cpu.levels()
        if self.level not in levels:
            problem = f"the weights are packed for {self.level}, and this machine has {', '.join(levels)}"
            raise BackendUnavailable(failure(call, problem, "Pack them again: bf.prepack."))
        if len(self.shape) != 3 or not all(type(size) is int and size > 0 for size in self.shape):
            raise ShapeError(bad_argument(call, "shape", self.shape, "(E, N, K), integers above 0"))
        if self.axes is None and self.kind not in PLAIN_TYPES:
            raise DTypeError(bad_argument(call, "kind", f"{self.kind!r} without axes", ", ".join(PLAIN_TYPES)))
        experts, n, k = self.shape
        group = GROUP if self.axes is None else self.axes.group
        check_stream(call, self.level, (n, k), self.data, group, lambda: self.description, experts)
        own = self.factors
        if own is not None and (own.dtype != np.float32 or own.shape != (experts,) or not own.flags.c_contiguous):
            expected = f"contiguous float32 of shape {(experts,)}"
            raise ShapeError(bad_argument(call, "factors", f"{own.dtype} of shape {own.shape}", expected))

    @cached_property
    def description(self) -> _cpu.Description:
        """What the native core takes for one expert."""
        n, k = self.shape[1:]
        return describe_plain(self.kind, (n, k)) if self.axes is None else self.axes.describe((n, k))

    def arrays(self, biases: NDArray[np.float32] | None = None) -> _cpu.ExpertArrays:
        """What the native core takes for all. biases: [E, N]."""
        return self.description, self.data, len(self), self.factors, biases

    def part(self, expert: int) -> NDArray[np.uint8]:
        """The stream of one expert."""
        size = self.nbytes // len(self)
        return self.data[expert * size : (expert + 1) * size]

    def matrix(self, expert: int) -> PackedWeights:
        """One expert, on the same memory."""
        assert self.axes is not None
        axes = self.axes if self.factors is None else replace(self.axes, factor=float(self.factors[expert]))
        rest = self.rest and {n: p if isinstance(p, np.dtype) else p[expert, ...] for n, p in self.rest.items()}
        n, k = self.shape[1:]
        about = get_format(self.kind), (n, k), self.group_size, self.level, axes
        return PackedWeights(*about, self.part(expert), rest=rest)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"PackedExperts({self.kind}, [{sizes}], {self.level}, {self.nbytes} bytes)"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "description"}


def pack_experts(level: str, stack: QuantizedExperts | Array) -> PackedExperts:
    """A stack [E, N, K], quantized or an array of PLAIN_TYPES, as the kernels of a level read it."""
    if not isinstance(stack, QuantizedExperts):
        return _pack_plain(level, stack)
    structure = structure_of(stack.format)
    if structure is not None and structure.scales_inside:
        assert isinstance(stack.format, BlockFormat)
        packed = _room_for(level, stack, [layout_of_blocks(stack.format)])
        sources = [codes_of(matrix) for matrix in stack]
        blocks = [(packed.description, s.data, s.about, packed.part(e)) for e, s in enumerate(sources)]
        assert packed.axes is not None
        if all(_cpu.prepack_blocks(level, blocks)):
            rests = [rest_of_blocks(stack.format, matrix.storage, packed.axes.scales) for matrix in stack]
            return replace(packed, rest=_rest_of_all(stack, rests))
        # else scales that are not finite go as float32: see axes.py
    layouts = [layout_of(matrix) for matrix in stack]
    if any(layout.kind != layouts[0].kind for layout in layouts):  # scales that only some experts' bytes can hold
        layouts = [layout_of(matrix, in_floats=True) for matrix in stack]
    packed = _room_for(level, stack, layouts)
    for e, (matrix, layout) in enumerate(zip(stack, layouts, strict=True)):
        prepack_fields(level, packed.description, matrix, layout, packed.part(e))
    k = stack.shape[2]
    parts = zip(stack, layouts, strict=True)
    rests = [rest_of(stack.format, matrix.scale_planes, layout, stack.group_size, k) for matrix, layout in parts]
    return replace(packed, rest=_rest_of_all(stack, rests))


def _rest_of_all(stack: QuantizedExperts, rests: Sequence[Rest | None]) -> Rest | None:
    """A plane that the stream of one expert does not tell is kept for all, [E, ...]."""
    known = [rest for rest in rests if rest is not None]
    if len(known) < len(rests):
        return None
    types = {name: part if isinstance(part, np.dtype) else part.dtype for name, part in known[0].items()}
    kept = [name for name in types if not all(isinstance(rest[name], np.dtype) for rest in known)]
    planes = [matrix.scale_planes for matrix in stack] if kept else []
    return {**types, **{name: np.stack([own[name] for own in planes]) for name in kept}}


def _room_for(level: str, stack: QuantizedExperts, layouts: Sequence[Layout]) -> PackedExperts:
    """PackedExperts whose stream is not written yet. layouts: one for all experts, or one for each."""
    axes = Axes(*layouts[0].kind[:4], layouts[0].factor, layouts[0].table)
    factors = np.array([layout.factor for layout in layouts], np.float32)
    room = len(stack) * _cpu.packed_bytes(level, axes.describe(stack.shape[1:]))
    own = factors if (factors != factors[0]).any() else None
    return PackedExperts(stack.format.name, stack.shape, level, axes, room_for_stream(room), own, stack.group_size)


def _pack_plain(level: str, stack: Array) -> PackedExperts:
    if stack.dtype.name not in PLAIN_TYPES or stack.ndim != 3:
        expected = f"[E, N, K] of {', '.join(PLAIN_TYPES)}"
        raise DTypeError(bad_argument("pack_experts", "stack", f"{stack.dtype} of shape {stack.shape}", expected))
    experts, n, k = stack.shape
    description = describe_plain(stack.dtype.name, (n, k))
    data = room_for_stream(experts * _cpu.packed_bytes(level, description))
    packed = PackedExperts(stack.dtype.name, (experts, n, k), level, None, data)
    for e, matrix in enumerate(np.ascontiguousarray(stack)):
        _cpu.prepack_plain(level, description, matrix.reshape(-1).view(np.uint8), packed.part(e))
    return packed
