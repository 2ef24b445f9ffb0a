"""DeviceExperts: the bricks of all experts of a stack in the memory of one device, one matrix after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.describe import describe_alike
from billfish.backends.cuda.kind import Kind
from billfish.backends.cuda.layout import brick_shape, group_parts
from billfish.backends.cuda.memory import Memory, address, room_for, send
from billfish.backends.cuda.weights import About, pack_to, record, stored_codes
from billfish.core.quantized_experts import QuantizedExperts

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
    def pack(cls, stack: QuantizedExperts, place: str, gated: bool = False) -> DeviceExperts:
        """Beside x in that place. Done when this returns, so that any stream may use the weights."""
        room, (experts, n, k) = room_for(place), stack.shape
        found = describe_alike(stack)
        kind, (down, along) = found[0].kind, brick_shape(n, k)
        each = down * along * kind.brick_bytes
        with room.current():
            bricks = room.empty(experts * each)
            for e, (matrix, description) in enumerate(zip(stack, found, strict=True)):
                about = About(kind, (n, k), description.shift)
                stored = stored_codes(matrix, description.shift)
                codes, macros = (description.codes, {}) if stored is None else stored
                pack_to(address(bricks) + e * each, about, send(codes, room), group_parts(description), room, **macros)
            row_scale = send(np.stack([one.row_scale for one in found]), room)
        return cls(kind, stack.shape, bricks, row_scale, gated)

    @property
    def nbytes(self) -> int:
        return int(self.bricks.nbytes + self.row_scale.nbytes)

    def note(self, stream: int) -> None:
        """torch's current stream reads the weights from now on: as of DeviceWeights."""
        if stream not in self.streams:
            self.streams.add(stream)
            record(self.bricks, self.row_scale)


def pack_gate_up(stacks: Sequence[QuantizedExperts], place: str) -> list[DeviceExperts]:
    """One stack whose rows are gate and up by turns, where they can be; else gate, and up."""
    inner = stacks[0].shape[1] // (1 if len(stacks) == 2 else 2)
    whole = stacks[0] if len(stacks) == 1 else joined(*stacks)
    if whole is not None and inner % GATE_ROWS == 0:
        return [DeviceExperts.pack(whole.take_rows(by_turns(inner)), place, gated=True)]
    if len(stacks) == 1:
        stacks = [stacks[0].take_rows(np.arange(first, first + inner)) for first in (0, inner)]
    return [DeviceExperts.pack(stack, place) for stack in stacks]


def by_turns(inner: int) -> NDArray[np.int64]:
    """Rows of [gate; up], each with `inner` rows: eight of gate, eight of up, and so on."""
    rows: NDArray[np.int64] = np.arange(2 * inner).reshape(2, -1, GATE_ROWS).transpose(1, 0, 2).ravel()
    return rows


def joined(gate: QuantizedExperts, up: QuantizedExperts) -> QuantizedExperts | None:
    """Rows of gate, then rows of up, in one stack; None if they are of two kinds, or have scales of all of W."""
    if (gate.format, gate.group_size) != (up.format, up.group_size):
        return None
    specs, storage = gate.format.storage_spec(*gate.shape[1:], gate.group_size), {}
    for name, array in gate.storage.items():
        axis, other = specs[name].n_axis, up.storage[name]
        if axis is None and not np.array_equal(array, other):
            return None
        storage[name] = array if axis is None else np.concatenate([array, other], axis=1 + axis)
    experts, n, k = gate.shape
    return QuantizedExperts.owning(gate.format, (experts, 2 * n, k), gate.group_size, storage)
