"""Memory of a device: tensors of torch where torch is in use, so that its operators and layers hold them; else ours.

Both are bytes with an address. A *room* is where memory is made: one device, and whose memory it is.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.driver import Buffer, adopt, copy_in, copy_out, current
from billfish.core.device_array import DeviceArray

Memory = Any  # a torch tensor uint8 [nbytes], or a Buffer; both have `nbytes`


class Room(Protocol):
    ordinal: int

    @property
    def stream(self) -> int: ...  # where kernels are launched
    def current(self) -> AbstractContextManager[Any]: ...  # the device, in this thread
    def empty(self, nbytes: int) -> Memory: ...


class OurRoom:
    """Buffers, used on the default stream."""

    stream = 0

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def current(self) -> AbstractContextManager[Any]:
        return current(self.ordinal)

    def empty(self, nbytes: int) -> Buffer:
        return Buffer(nbytes, self.ordinal)


class TorchRoom:
    """Tensors, used on torch's current stream."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.torch = ordinal, sys.modules["torch"]

    @property
    def stream(self) -> int:
        return int(self.torch.cuda.current_stream(self.ordinal).cuda_stream)

    def current(self) -> AbstractContextManager[Any]:
        adopt(self.ordinal)
        device: AbstractContextManager[Any] = self.torch.cuda.device(self.ordinal)
        return device

    def empty(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=f"cuda:{self.ordinal}")


def room_for(place: str) -> Room:
    """The room for weights beside x in a place: "cuda:1"; NumPy's "cpu" goes to device 0."""
    kind, _, number = place.partition(":")
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_available():
        return TorchRoom(int(number))
    return OurRoom(int(number or 0))


def room_of(memory: Memory) -> Room:
    """Where memory was made."""
    return OurRoom(memory.ordinal) if isinstance(memory, Buffer) else TorchRoom(memory.device.index)


def address(memory: Memory) -> int:
    return memory.pointer if isinstance(memory, Buffer) else int(memory.data_ptr())


def send(array: NDArray[Any] | DeviceArray, room: Room) -> Memory:
    """A copy of a NumPy array's bytes, or those of an array that is in the room already. The device is current."""
    if isinstance(array, DeviceArray):
        return array.bytes()
    memory = room.empty(array.nbytes)
    copy_in(address(memory), array, room.stream)
    return memory


def fetch(memory: Memory, room: Room, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """The bytes as a NumPy array, after all that was launched on the room's stream. The device is current."""
    array = np.empty(shape, dtype)
    copy_out(array, address(memory), room.stream)
    return array


def as_tensor(memory: Memory) -> Any:
    """The same memory as a torch tensor."""
    if isinstance(memory, Buffer):
        return sys.modules["torch"].as_tensor(memory, device=f"cuda:{memory.ordinal}")
    return memory
