"""Experts on the device: their weights, the launches of a call in their order, and arrays of each library.

route     visits, the (token, expert) pairs, sorted by expert, and the table of tiles   (route.cu)
gather    rows of x in that order                              (gather.cu)
multiply  gate and up, with the activation as epilogue         (gemm_small.cu, gemm_large.cu)
multiply  down, rows back in the order of tokens
mix       the weighted sum of a token's experts                (mix.cu)

Nothing waits for the device.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import ExpertBlock, ExpertProduct
from billfish.backends.cuda.axes import COURSE, Codes, Description, Kind, describe
from billfish.backends.cuda.device_weights import (
    PLAIN,
    BrickInfo,
    as_halves,
    brick_kernel,
    pack_to,
    record,
    stored_codes,
)
from billfish.backends.cuda.driver import (
    BFLOAT16,
    FLOAT16,
    Device,
    KernelLaunch,
    copy_in,
    copy_out,
    device,
    no_tensor_map,
    synchronize,
    tensor_map,
)
from billfish.backends.cuda.layout import brick_shape, group_parts
from billfish.backends.cuda.memory import Memory, OurRoom, Room, TorchRoom, address, room_for, send
from billfish.backends.cuda.plans import GATE_COLUMNS, GATES, ExpertRouting, Gemm, gate_ctas, plan_experts
from billfish.backends.cuda.products import DEFAULT_STREAM, can_be_read, row_stride
from billfish.core.arrays import Input
from billfish.core.machine import map_rows
from billfish.core.mixture import checked_ids, checked_routing
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor

Made = TypeVar("Made")

GATE_ROWS = 8  # of gate, then as many of up, and so on: device.cuh's GATE


@dataclass(frozen=True, eq=False)
class DeviceExperts:
    """W [E, N, K] on one device. gated: rows are eight of gate, eight of up, and so on."""

    kind: Kind
    shape: tuple[int, int, int]
    bricks: Memory
    row_scale: Memory  # float32 [E, N]
    gated: bool = False
    streams: set[int] = field(default_factory=set, repr=False, init=False)  # of torch, that have read the weights

    @classmethod
    def pack(
        cls, stack: QuantizedExperts, place: str, gated: bool = False, rows: NDArray[np.int64] | None = None
    ) -> DeviceExperts:
        """Beside x in that place. Done when this returns, so that any stream may use the weights.

        rows: the order in which bricks have the rows of each matrix, where it is another one.
        """
        return cls.pack_together((stack,), place, gated, rows)

    @classmethod
    def pack_together(
        cls,
        stacks: Sequence[QuantizedExperts],
        place: str,
        gated: bool = False,
        rows: NDArray[np.int64] | None = None,
    ) -> DeviceExperts:
        """Stacks that are `alike`: each expert's matrices below each other, then their rows in this order. Some experts
        are packed at a time, so that little of the stacks is in memory twice."""
        room, (experts, _, k), pieces = room_for(place), stacks[0].shape, _pieces(stacks)
        n = sum(stack.shape[1] for stack in stacks) if rows is None else len(rows)
        found = _described(stacks, rows, pieces)
        kind = found[0].kind
        down, along = brick_shape(n, k)
        each = down * along * kind.brick_bytes

        def parts(i: int) -> tuple[Codes, dict[str, str], NDArray[np.uint8]]:
            description = found[i]
            codes, macros = _codes(_below_each_other(stacks, pieces[i], rows), description.shift)
            own = range(0, description.shape[0], n)
            whole = [_rows_of(description, first, n) for first in own] if n % COURSE else [description]
            return codes, macros, np.concatenate([group_parts(one) for one in whole])

        with room.current():
            bricks, done = room.empty(experts * each), 0
            for i, (codes, macros, groups) in enumerate(_ahead(parts, len(pieces))):
                count = found[i].shape[0] // n
                about = BrickInfo(kind, (n, k), found[i].shift)
                sent = send(codes, room), send(groups, room)
                launch = brick_kernel("pack", about, 128, **macros)
                for e in range(count):
                    there = (
                        address(sent[0]) + codes.nbytes // count * e,
                        address(sent[1]) + groups.nbytes // count * e,
                    )
                    launch(room.ordinal, room.stream, *there, address(bricks) + (done + e) * each, n, k)
                synchronize(room.stream)  # before what was sent goes
                done += count
            row_scale = send(np.concatenate([one.row_scale for one in found]), room)
        return cls(kind, (experts, n, k), bricks, row_scale, gated)

    @classmethod
    def pack_plain(
        cls, matrices: Iterable[NDArray[Any]], shape: tuple[int, int, int], place: str, gated: bool = False
    ) -> DeviceExperts:
        """Unquantized weights, a matrix [N, K] for each expert, as DeviceWeights has them."""
        room, (experts, n, k) = room_for(place), shape
        (down, along), about = brick_shape(n, k), BrickInfo(PLAIN, (n, k))
        each, scales = down * along * PLAIN.brick_bytes, []
        with room.current():
            bricks, ones = room.empty(experts * each), np.ones((down * along, COURSE), np.float16).view(np.uint8)
            for e, matrix in enumerate(matrices):
                codes, scale = as_halves(matrix)
                scales.append(scale)
                pack_to(address(bricks) + e * each, about, send(codes, room), ones, room, CODE="u16")
            row_scale = send(np.concatenate(scales), room)
        return cls(PLAIN, shape, bricks, row_scale, gated)

    @property
    def nbytes(self) -> int:
        return int(self.bricks.nbytes + self.row_scale.nbytes)

    def note(self, stream: int) -> None:
        """torch's current stream reads the weights from now on: as of DeviceWeights."""
        if stream not in self.streams:
            self.streams.add(stream)
            record(self.bricks, self.row_scale)


AT_ONCE = 1 << 24  # bytes of experts that are packed at a time
AHEAD = 8  # times as many are made ready for that, by as many threads


def _pieces(stacks: Sequence[QuantizedExperts]) -> list[slice]:
    """Some experts each; one, where the format keeps rows apart from each other by another axis than the first."""
    first, experts = stacks[0], len(stacks[0])
    specs = first.format.storage_spec(*first.shape[1:], first.group_size)
    tall = all(spec.n_axis == 0 for spec in specs.values())
    count = max(1, AT_ONCE * experts // sum(stack.nbytes for stack in stacks)) if tall else 1
    return [slice(start, min(start + count, experts)) for start in range(0, experts, count)]


def _ahead(make: Callable[[int], Made], count: int) -> Iterator[Made]:
    """make(0), make(1), ..., some at a time on several threads."""
    for first in range(0, count, AHEAD):

        def make_one(i: int, _: int, first: int = first) -> Made:
            return make(first + i)

        yield from map_rows(make_one, min(AHEAD, count - first), 1, step=1)


def _flat(stack: QuantizedExperts) -> QuantizedTensor:
    """The matrices of a piece below each other."""
    if len(stack) == 1:
        return stack[0]
    experts, n, k = stack.shape
    storage = {name: array.reshape(experts * n, *array.shape[2:]) for name, array in stack.storage.items()}
    return QuantizedTensor(stack.format, (experts * n, k), stack.group_size, storage)


def _described(
    stacks: Sequence[QuantizedExperts], rows: NDArray[np.int64] | None, pieces: Sequence[slice]
) -> list[Description]:
    """Descriptions of the pieces, of one kind, and without the codes: so these are not kept."""

    def described(byte_scales: bool) -> list[list[Description]]:
        def describe_piece(i: int) -> list[Description]:
            parts = [_flat(stack.take_experts(pieces[i])) for stack in stacks]
            return [replace(describe(part, byte_scales), unpack=_no_codes) for part in parts]

        found = list(_ahead(describe_piece, len(pieces)))
        narrow = all(one.kind.narrow for parts in found for one in parts)
        return [[replace(one, kind=replace(one.kind, narrow=narrow)) for one in parts] for parts in found]

    def agree(found: list[list[Description]]) -> bool:
        return len({one.kind for parts in found for one in parts}) == 1

    found = described(byte_scales=True)
    if not agree(found):
        found = described(byte_scales=False)
    if not agree(found):
        found = [[one.with_float32() for one in parts] for parts in found]
    sizes = [piece.stop - piece.start for piece in pieces]
    return [_one_description(parts, count, rows) for parts, count in zip(found, sizes, strict=True)]


def _one_description(parts: list[Description], experts: int, rows: NDArray[np.int64] | None) -> Description:
    """Of the matrices of each expert below each other, then their rows in this order."""
    if len(parts) == 1 and rows is None:
        return parts[0]

    def together(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        whole = np.concatenate([array.reshape(experts, -1, *array.shape[1:]) for array in arrays], axis=1)
        whole = whole if rows is None else whole[:, rows]
        return whole.reshape(-1, *whole.shape[2:])

    offsets = [part.offsets for part in parts if part.offsets is not None]
    scales, row_scale = together([part.scales for part in parts]), together([part.row_scale for part in parts])
    shape = len(scales), parts[0].shape[1]
    added = together(offsets) if offsets else None
    return replace(parts[0], shape=shape, scales=scales, offsets=added, row_scale=row_scale)


def _below_each_other(
    stacks: Sequence[QuantizedExperts], piece: slice, rows: NDArray[np.int64] | None
) -> QuantizedTensor:
    """The matrices of each expert of a piece below each other, then their rows in this order."""
    parts = [stack.take_experts(piece) for stack in stacks]
    whole = parts[0] if len(parts) == 1 else joined(*parts)
    assert whole is not None  # they are alike
    return _flat(whole if rows is None else whole.take_rows(rows))


def _codes(tensor: QuantizedTensor, shift: int) -> tuple[Codes, dict[str, str]]:
    """The codes of a tensor, and how pack.cu reads them."""
    stored = stored_codes(tensor, shift)
    return (tensor.format.unpack_codes(tensor.storage) + np.uint8(shift), {}) if stored is None else stored


def _no_codes() -> Codes:
    raise AssertionError("the codes of this description are not kept")


def _rows_of(description: Description, first: int, count: int) -> Description:
    taken, offsets = slice(first, first + count), description.offsets
    return replace(
        description,
        shape=(count, description.shape[1]),
        scales=description.scales[taken],
        offsets=None if offsets is None else offsets[taken],
        row_scale=description.row_scale[taken],
    )


def pack_gate_up(stacks: Sequence[QuantizedExperts], place: str) -> list[DeviceExperts]:
    """One stack whose rows alternate between gate and up, where that is possible; else two stacks, gate and up."""
    inner = stacks[0].shape[1] // (1 if len(stacks) == 2 else 2)
    if alike(*stacks) and inner % GATE_ROWS == 0:
        return [DeviceExperts.pack_together(stacks, place, True, by_turns(inner))]
    if len(stacks) == 1:
        return [DeviceExperts.pack(stacks[0], place, rows=np.arange(first, first + inner)) for first in (0, inner)]
    return [DeviceExperts.pack(stack, place) for stack in stacks]


def alike(first: QuantizedExperts, *others: QuantizedExperts) -> bool:
    """Whether the matrices of an expert can be rows of one: of one format, without different scales of all of W."""
    specs = first.format.storage_spec(*first.shape[1:], first.group_size)
    return all(
        (first.format, first.group_size) == (other.format, other.group_size)
        and all(
            spec.n_axis is not None or np.array_equal(first.storage[name], other.storage[name])
            for name, spec in specs.items()
        )
        for other in others
    )


def by_turns(inner: int) -> NDArray[np.int64]:
    """Rows of [gate; up], each with `inner` rows: eight of gate, eight of up, and so on."""
    rows: NDArray[np.int64] = np.arange(2 * inner).reshape(2, -1, GATE_ROWS).transpose(1, 0, 2).ravel()
    return rows


def joined(gate: QuantizedExperts, up: QuantizedExperts) -> QuantizedExperts | None:
    """Rows of gate, then rows of up, in one stack; None if they are not `alike`."""
    if not alike(gate, up):
        return None
    specs, storage = gate.format.storage_spec(*gate.shape[1:], gate.group_size), {}
    for name, array in gate.storage.items():
        axis, other = specs[name].n_axis, up.storage[name]
        storage[name] = array if axis is None else np.concatenate([array, other], axis=1 + axis)
    experts, n, k = gate.shape
    return QuantizedExperts.owning(gate.format, (experts, n + up.shape[1], k), gate.group_size, storage)


# ---- launches --------------------------------------------------------------------------------------------------------


ID_TYPES = {"int32": "int", "uint32": "unsigned", "int64": "long long"}  # in route.cu and mix.cu
WEIGHT_TYPES = {"float32": "Float", "float16": "Halves<F16>", "bfloat16": "Halves<BF16>"}  # in mix.cu
THREADS = 256  # of a CTA of gather.cu and mix.cu
FEW_MIXED, FEW_THREADS = 256, 32  # tokens for which mix.cu has more, smaller CTAs
MOST_CTAS = 4096  # of gather.cu, which go on with further rows
ENTRY_BYTES = 16


@dataclass(frozen=True)
class Numbers:
    """An array of a call at an address: a matrix whose rows are `stride` numbers apart, or a contiguous array."""

    at: int
    dtype: str
    stride: int = 0


NOTHING = Numbers(0, "float32")


@dataclass(frozen=True, eq=False)
class Visits:
    """The (token, expert) pairs of one call, sorted. Only the device knows how many rows of x each expert has.

    bfloat16: the type of x; else it is float16. The device is current.
    """

    room: Room
    routing: ExpertRouting
    ids: Numbers
    bfloat16: bool

    @cached_property
    def device(self) -> Device:
        return device(self.room.ordinal)

    @cached_property
    def _sorted(self) -> tuple[Memory, Memory]:
        """The table and the order of pairs, as rows.cuh has them: launches route.cu."""
        routing, width = self.routing, self.routing.width(self.device)
        table, order = self.room.empty(ENTRY_BYTES * (1 + routing.entries(width))), self.room.empty(4 * routing.visits)
        warps, shared = route_shape(routing, self.device)
        macros = {"ID": ID_TYPES[self.ids.dtype], "WARPS": warps}
        numbers = routing.visits, routing.experts, width
        pointers = self.ids.at, address(table), address(order)
        self._launch("route", macros, 1, warps * 32, *pointers, *numbers, shared_bytes=shared)
        return table, order

    def gathered(self, x: Numbers, k: int, together: int, y: int = 0, n: int = 0) -> tuple[Memory, Numbers]:
        """Rows of x in the order of experts; `together` pairs share one. y [visits, n]: rows of bad ids become NaN."""
        (table, order), stride, visits = self._sorted, row_stride(k), self.routing.visits
        out = self.room.empty(2 * visits * stride)
        pointers = x.at, address(table), address(order), address(out), y
        numbers = visits, k, x.stride, stride, together, n
        self._launch("gather", {}, min(visits, MOST_CTAS), THREADS, *pointers, *numbers)
        return out, Numbers(address(out), x.dtype, stride)

    def multiply(
        self, weights: DeviceExperts, x: Numbers, bias: Numbers, y: int, *, gate: str | None = None, sorted: bool
    ) -> None:
        """y [visits, n] of sorted rows of x. sorted: those of y are sorted, too; else in the order of tokens."""
        (table, order) = self._sorted
        if isinstance(self.room, TorchRoom):
            weights.note(self.room.stream)
        routed = address(table), 0 if sorted else address(order)
        launch, arguments = grouped_product(
            weights, self.routing, self.device, self.bfloat16, x, bias, y, *routed, gate=gate
        )
        launch(self.room.ordinal, self.room.stream, *arguments)

    def open_gate(self, gate: int, up: int, activation: str, inner: int) -> tuple[Memory, Numbers]:
        """activation(gate) * up, of two products [visits, inner]."""
        stride, visits = row_stride(inner), self.routing.visits
        out = self.room.empty(2 * visits * stride)
        macros = {"TYPE": self._type, "GATE": GATES[activation]}
        ctas = gate_ctas(visits, inner)
        self._launch("gate", macros, ctas, GATE_COLUMNS, gate, up, address(out), visits, inner, stride)
        return out, Numbers(address(out), "", stride)

    def mix(self, x: int, weights: Numbers, y: int, n: int) -> None:
        """y [tokens, n]: the weighted sums of x [tokens, chosen, n]."""
        macros = {"TYPE": self._type, "ID": ID_TYPES[self.ids.dtype], "WEIGHT": WEIGHT_TYPES[weights.dtype]}
        numbers = self.routing.experts, self.routing.chosen, self.routing.chosen, n
        shape = mix_shape(self.routing.tokens, n)
        self._launch("mix", macros, *shape, x, self.ids.at, weights.at, 0, y, *numbers)

    @property
    def _type(self) -> str:
        return "BF16" if self.bfloat16 else "F16"

    def _launch(
        self, name: str, macros: dict[str, Any], ctas: int, threads: int, *arguments: int, shared_bytes: int = 0
    ) -> None:
        defined = tuple(sorted((macro, str(value)) for macro, value in macros.items()))
        overlap = self.device.capability >= (9, 0)
        launch = KernelLaunch(f"{name}.cu", f"marlin_{name}", defined, (ctas,), threads, shared_bytes, 1, overlap)
        launch(self.room.ordinal, self.room.stream, *arguments)


def grouped_product(
    weights: DeviceExperts,
    routing: ExpertRouting,
    device: Device,
    bfloat16: bool,
    x: Numbers,
    bias: Numbers,
    y: int,
    table: int,
    order: int,
    *,
    gate: str | None = None,
) -> tuple[KernelLaunch, tuple[Any, ...]]:
    """The launch of y [visits, n] from rows of x that are sorted by expert, and its arguments.

    order: where rows of y are to be in the order of tokens; 0: they are sorted, too.
    """
    (_, n, k), visits = weights.shape, routing.visits
    float_bias = bias.at != 0 and bias.dtype == "float32"
    gemm = Gemm(weights.kind, visits, n, k, bfloat16, float_bias, None, routing.batch_invariant, gate)
    plan = plan_experts(gemm, routing, device)
    map_of_x = x.at, BFLOAT16 if bfloat16 else FLOAT16, visits, k, x.stride, plan.box_rows
    box = tensor_map(*map_of_x) if device.capability >= (9, 0) else no_tensor_map()
    held = address(weights.bricks), address(weights.row_scale)
    return plan.launch, (box, *held, x.at, bias.at, y, table, order, visits, n, k, x.stride)


def mix_shape(tokens: int, n: int) -> tuple[int, int]:
    """CTAs of mix.cu, and their threads, which have eight columns of a token each: of few tokens small CTAs."""
    threads = FEW_THREADS if tokens <= FEW_MIXED else THREADS
    return tokens * -(-n // (8 * threads)), threads


def route_shape(routing: ExpertRouting, device: Device) -> tuple[int, int]:
    """Warps of route.cu, and its shared memory: a count for each warp and expert, and what is before each expert."""
    columns, warps = routing.experts + 1, 32

    def shared(warps: int) -> int:
        return 4 * (warps * columns + 2 * (columns + 1))

    while warps > 2 and (warps * 16 >= routing.visits or shared(warps) > device.shared_bytes):
        warps //= 2
    return warps, shared(warps)


def launch_linear(visits: Visits, weights: DeviceExperts, x: Numbers, together: int, bias: Numbers, y: int) -> None:
    """y [visits, n], in the order of tokens; `together` pairs share a row of x."""
    _, n, k = weights.shape
    _held, rows = visits.gathered(x, k, together, y, n)
    visits.multiply(weights, rows, bias, y, sorted=False)


def launch_block(
    visits: Visits,
    x: Numbers,
    gate_up: list[DeviceExperts],
    down: DeviceExperts,
    activation: str,
    gate_up_biases: list[Numbers],
    down_biases: Numbers,
    weights: Numbers,
    y: int,
) -> None:
    """y [tokens, H]. gate_up: one gated stack, or gate and up."""
    (_, hidden, inner), room, count = down.shape, visits.room, visits.routing.visits
    _rows, rows = visits.gathered(x, hidden, visits.routing.chosen)
    if gate_up[0].gated:
        opened_at = room.empty(2 * count * inner)
        opened = Numbers(address(opened_at), "", inner)
        visits.multiply(gate_up[0], rows, gate_up_biases[0], opened.at, gate=activation, sorted=True)
    else:
        parts = [room.empty(2 * count * inner) for _ in gate_up]
        for part, stack, bias in zip(parts, gate_up, gate_up_biases, strict=True):
            visits.multiply(stack, rows, bias, address(part), sorted=True)
        opened_at, opened = visits.open_gate(address(parts[0]), address(parts[1]), activation, inner)
    given = room.empty(2 * count * hidden)
    visits.multiply(down, opened, down_biases, address(given), sorted=False)
    visits.mix(address(given), weights, y, hidden)


# ---- arrays of torch, CuPy and NumPy ---------------------------------------------------------------------------------


class Caller(ABC):
    """The library whose arrays a call has: it allocates memory and takes the result. It lives as long as the call."""

    room: Room

    def __init__(self, room: Room, dtype: str) -> None:
        self.room, self.dtype = room, dtype  # of x and y
        self._held: list[Any] = []  # until all is launched

    def current(self) -> AbstractContextManager[Any]:
        return self.room.current()

    def hold(self, array: Any) -> Any:
        self._held.append(array)
        return array

    @abstractmethod
    def rows(self, x: Input) -> Numbers:
        """x [..., K] as rows that kernels can read, copied if they must."""

    @abstractmethod
    def numbers(self, array: Input, *types: str) -> Numbers:
        """A contiguous array in one of these types; another type becomes the first of them."""

    @abstractmethod
    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        """Arrays [E, n], side by side."""

    @abstractmethod
    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        """Columns of an array [E, n]."""

    @abstractmethod
    def make(self, shape: tuple[int, ...]) -> int:
        """Memory for y; `taken` gives it to the caller."""

    @abstractmethod
    def taken(self) -> Any: ...


class TorchCaller(Caller):
    def __init__(self, x: Input) -> None:
        super().__init__(TorchRoom(x.source.device.index), x.dtype_name)
        self.torch, self.like = sys.modules["torch"], x.source

    def _type(self, name: str) -> Any:
        return getattr(self.torch, name)

    def rows(self, x: Input) -> Numbers:
        k = x.shape[-1]
        rows = x.source.reshape(-1, k)
        if rows.stride(1) != 1 or not can_be_read(len(rows), rows.stride(0), k, rows.data_ptr()):
            rows = self.torch.nn.functional.pad(rows, (0, row_stride(k) - k)).contiguous()
        stride = rows.stride(0) if len(rows) > 1 else row_stride(k)
        return Numbers(self.hold(rows).data_ptr(), self.dtype, stride)

    def _numbers(self, array: Any, types: Sequence[str]) -> Numbers:
        name = str(array.dtype).removeprefix("torch.")
        if name not in types:
            name = types[0]
            array = array.to(self._type(name))
        return Numbers(self.hold(array.to(self.like.device).contiguous()).data_ptr(), name)

    def numbers(self, array: Input, *types: str) -> Numbers:
        return self._numbers(array.source, types)

    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        return self._numbers(self.torch.cat([array.source for array in arrays], dim=1), types)

    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        return self._numbers(array.source[:, first:last], types)

    def make(self, shape: tuple[int, ...]) -> int:
        self.y = self.torch.empty(shape, dtype=self._type(self.dtype), device=self.like.device)
        return int(self.y.data_ptr())

    def taken(self) -> Any:
        return self.y


class CupyMemory:
    """Bytes of CuPy's, with an address as torch's have."""

    def __init__(self, nbytes: int) -> None:
        self.array = sys.modules["cupy"].empty(nbytes, np.uint8)

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)


class CupyRoom:
    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.cupy = ordinal, sys.modules["cupy"]

    @property
    def stream(self) -> int:
        return int(self.cupy.cuda.get_current_stream().ptr)

    def current(self) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self.cupy.cuda.Device(self.ordinal)
        return device

    def empty(self, nbytes: int) -> CupyMemory:
        return CupyMemory(nbytes)


class CupyCaller(Caller):
    """CuPy's arrays are float16: it has no bfloat16."""

    def __init__(self, x: Input) -> None:
        super().__init__(CupyRoom(x.source.device.id), x.dtype_name)
        self.cupy = sys.modules["cupy"]

    def rows(self, x: Input) -> Numbers:
        k = x.shape[-1]
        rows = self.cupy.ascontiguousarray(x.source.reshape(-1, k))
        if k % 8 or rows.data.ptr % 16:
            rows = self.cupy.ascontiguousarray(self.cupy.pad(rows, ((0, 0), (0, row_stride(k) - k))))
        return Numbers(int(self.hold(rows).data.ptr), self.dtype, row_stride(k))

    def _numbers(self, array: Any, types: Sequence[str]) -> Numbers:
        name = str(array.dtype) if str(array.dtype) in types else types[0]
        return Numbers(int(self.hold(self.cupy.ascontiguousarray(array, name)).data.ptr), name)

    def numbers(self, array: Input, *types: str) -> Numbers:
        return self._numbers(self.cupy.asarray(array.source), types)

    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        return self._numbers(self.cupy.concatenate([self.cupy.asarray(a.source) for a in arrays], axis=1), types)

    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        return self._numbers(self.cupy.asarray(array.source)[:, first:last], types)

    def make(self, shape: tuple[int, ...]) -> int:
        self.y = self.cupy.empty(shape, self.dtype)
        return int(self.y.data.ptr)

    def taken(self) -> Any:
        return self.y


class NumpyCaller(Caller):
    """There and back, by way of buffers on device 0."""

    def __init__(self, x: Input) -> None:
        super().__init__(OurRoom(0), x.dtype_name)
        self.x = x

    def _sent(self, array: NDArray[Any]) -> int:
        memory = self.hold(self.room.empty(max(1, array.nbytes)))
        if array.nbytes:
            copy_in(address(memory), np.ascontiguousarray(array).view(np.uint8), DEFAULT_STREAM)
        return address(memory)

    def rows(self, x: Input) -> Numbers:
        k, source = x.shape[-1], x.numpy()
        rows = np.zeros((source.size // k, row_stride(k)), source.dtype)
        rows[:, :k] = source.reshape(-1, k)
        return Numbers(self._sent(rows), self.dtype, row_stride(k))

    def _numbers(self, array: NDArray[Any], types: Sequence[str]) -> Numbers:
        name = array.dtype.name if array.dtype.name in types else types[0]
        return Numbers(self._sent(array if array.dtype.name == name else array.astype(name)), name)

    def numbers(self, array: Input, *types: str) -> Numbers:
        return self._numbers(array.numpy(), types)

    def joined(self, arrays: Sequence[Input], *types: str) -> Numbers:
        return self._numbers(np.concatenate([array.numpy() for array in arrays], axis=1), types)

    def columns(self, array: Input, first: int, last: int, *types: str) -> Numbers:
        return self._numbers(array.numpy()[:, first:last], types)

    def make(self, shape: tuple[int, ...]) -> int:
        self.y = np.empty(shape, self.x.numpy().dtype)
        self.there: Memory = self.room.empty(self.y.nbytes)
        return address(self.there)

    def taken(self) -> Any:
        copy_out(self.y.view(np.uint16), address(self.there), DEFAULT_STREAM)
        return self.x.like(self.y)


def caller_of(x: Input) -> Caller:
    if x.device == "cpu":
        return NumpyCaller(x)
    return CupyCaller(x) if x.kind == "cupy" else TorchCaller(x)


def _visits(caller: Caller, ids: Input, count: int, batch_invariant: bool) -> Visits:
    if ids.device == "cpu":
        checked_ids(ids, count)
    tokens, chosen = ids.shape
    routing = ExpertRouting(tokens, chosen, count, batch_invariant)
    return Visits(caller.room, routing, caller.numbers(ids, *ID_TYPES), caller.dtype == "bfloat16")


def linear(product: ExpertProduct, batch_invariant: bool) -> Any:
    """y [T, k, n]."""
    x, weights = product.x, product.weights
    caller, (tokens, chosen) = caller_of(x), product.ids.shape
    with caller.current():
        visits = _visits(caller, product.ids, product.experts, batch_invariant)
        y = caller.make((tokens, chosen, product.n))
        if tokens:
            bias = NOTHING if product.biases is None else caller.numbers(product.biases, "float32", caller.dtype)
            launch_linear(visits, weights, caller.rows(x), chosen if len(x.shape) == 2 else 1, bias, y)
        return caller.taken()


def block(given: ExpertBlock, batch_invariant: bool) -> Any:
    """y [T, H]."""
    x, caller = given.x, caller_of(given.x)
    with caller.current():
        visits = _visits(caller, given.ids, given.experts, batch_invariant)
        if given.routing.device == "cpu":
            checked_routing(given.routing)
        y = caller.make(x.shape)
        if x.shape[0]:
            biases = _gate_up_biases(caller, given)
            down = given.down_biases
            last = NOTHING if down is None else caller.numbers(down, "float32", caller.dtype)
            weights = caller.numbers(given.routing, *WEIGHT_TYPES)
            stacks = list(given.gate_up)
            launch_block(visits, caller.rows(x), stacks, given.down, given.activation, biases, last, weights, y)
        return caller.taken()


def _gate_up_biases(caller: Caller, given: ExpertBlock) -> list[Numbers]:
    """For each packed stack of gate_up, which need not be the stacks that the caller has."""
    biases, types, inner = given.gate_up_biases, ("float32", caller.dtype), given.inner
    some = [bias for bias in biases if bias is not None]
    if not some:
        return [NOTHING] * len(given.gate_up)
    if len(biases) == 1:
        if len(given.gate_up) == 1:
            return [caller.numbers(some[0], *types)]
        return [caller.columns(some[0], first, first + inner, *types) for first in (0, inner)]
    if len(given.gate_up) == 2:
        return [NOTHING if bias is None else caller.numbers(bias, *types) for bias in biases]
    zeros = sys.modules[some[0].adapter.module].zeros_like(some[0].source)
    pair = [some[0].with_source(zeros) if bias is None else bias for bias in biases]
    return [caller.joined(pair, *types)]
