"""Whether the storage tensors of a layer are what they were. Nothing that was made of others may be multiplied with.

Version counters alone would not do: torch does not count a write through `.data`, through NumPy, or under
`inference_mode`. So whoever gets a storage tensor from a layer has it *lent*, and may write to it. A lent tensor is
read before each product, and its digest compared, until nobody but layers holds its memory. A layer that nobody
touched pays for a few comparisons.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from billfish.backends.cpu import _cpu
from billfish.core.arrays import TorchArrays

ARRAYS = TorchArrays()
ATTRIBUTE = "_billfish"  # of a storage tensor: its watch
TRUSTED = "_billfish"  # of memory: nobody writes to it but through tensors

# torch's own tools (pickle, DDP, gloo) do not take uint32, so layers hold the 32-bit words of storage as int32.


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """A storage tensor as an array, of the same memory where that is the CPU's."""
    array = ARRAYS.to_numpy(tensor.detach().cpu())
    return array.view(np.uint32) if array.dtype == np.int32 else array


def order_array(permutation: Tensor) -> NDArray[Any]:
    """A permutation as an array."""
    return ARRAYS.to_numpy(permutation.detach().cpu())


def to_torch(array: NDArray[Any], device: torch.device | str | None = None) -> Tensor:
    """A storage array as a layer holds it: in memory of torch's own."""
    held = np.array(array)  # a copy: it may be a read-only view of a file
    return ARRAYS.from_numpy(held.view(np.int32) if held.dtype == np.uint32 else held).to(device, copy=True)


class NotCopied:
    """What lies on a tensor, and stays behind when the tensor is pickled or copied: who loads it needs no billfish."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return set, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class Watch(NotCopied):
    """Notices other contents of a storage tensor. It lies on the tensor itself, so it lives and dies with it.

    The tensor that a layer holds is its own. Others get, or have, another tensor of the same memory: `out`. So the
    number of tensors of that memory tells whether somebody else has one, however many graphs hold the layer's.
    """

    __slots__ = (
        "__weakref__",
        "array",
        "digest",
        "foreign",
        "lent",
        "made",
        "out",
        "out_ref",
        "own_ref",
        "place",
        "shared",
        "state",
        "version",
    )

    array: Any  # of the same memory, so that no other tensor can come to lie there: NumPy's, or torch's on a device

    def __init__(self) -> None:
        self.state = object()  # stands for the contents: another object once they are others
        self.place: Any = None  # where the contents are, and how they are to be read
        self.version: int | None = None  # torch's count of writes; inference tensors have none
        self.lent = True  # whether somebody may have written, or may yet write
        self.digest: int | None = None  # of the contents that `state` stands for; only known while lent
        self.foreign = False  # whether the memory is not torch's own: somebody unknown may hold it
        self.shared = False  # whether several layers have the tensor
        self.own_ref: Callable[[], Tensor | None] = _nobody  # the tensor, if it is a layer's own
        self.out_ref: Callable[[], Tensor | None] = _nobody  # the tensor that others have,
        self.out: Tensor | None = None  # which is held until the next look at it
        self.made: Any = None  # of the matrix that begins with this tensor

    @staticmethod
    def on(tensor: Tensor) -> Watch:
        """The watch of a tensor."""
        found = Watch.known(tensor)
        if found is None:
            found = Watch()
            setattr(tensor, ATTRIBUTE, found)
        return found

    @staticmethod
    def known(tensor: Tensor) -> Watch | None:
        """The watch of a tensor that has one."""
        found = getattr(tensor, ATTRIBUTE, None)
        if isinstance(found, Out):
            return found.watch()
        return found if isinstance(found, Watch) else None

    def lend(self, out: Tensor) -> Tensor:
        """`out` is what others have from now on, and they may write to it."""
        if not self.lent:
            self.digest = digest_of(self.array)
        if self.out_ref() is not out:
            self.out_ref = weakref.ref(out)
            setattr(out, ATTRIBUTE, Out(self))
        self.out = out
        self.lent = True
        return out

    def look(self, tensor: Tensor) -> None:
        """Make `state` stand for the contents of the tensor."""
        self.out, out = None, self.out_ref()
        if out is not None and place_of(out) != place_of(tensor):  # somebody gave it other memory: out.data = ...
            tensor.data = out.data
        del out
        changed = self._note(tensor)
        if not changed and not self.lent:
            return
        self.lent = False  # first: whoever takes the tensor from here on sets it again
        if not self._is_alone(tensor):
            self.lent = True
        if changed and not self.lent:
            return
        digest = digest_of(self.array)
        if digest != self.digest and not changed:
            self.state = object()
        self.digest = digest

    def _note(self, tensor: Tensor) -> bool:
        """Whether the tensor is in another place than it was, or torch counted a write."""
        place, version = place_of(tensor), version_of(tensor)
        if place == self.place and version == self.version:
            return False
        if place != self.place:
            memory = tensor.untyped_storage()
            between_processes = tensor.is_cpu and tensor.is_shared()  # type: ignore[no-untyped-call]
            self.foreign = between_processes or not (memory.resizable() or hasattr(memory, TRUSTED))
            if not self.foreign:
                trust(tensor)
            self.array = view_of(tensor, tensor.is_cpu)
        self.place, self.version, self.state = place, version, object()
        return True

    def _is_alone(self, tensor: Tensor) -> bool:
        """Whether nobody but layers holds the memory."""
        if self.foreign or self.own_ref() is None or self.out_ref() is not None:
            return False
        return count_holders(tensor) == holders_when_alone(tensor.dtype, tensor.is_cpu)

    def forget(self, tensor: Tensor) -> None:
        """Take it that the contents are others, and that nobody writes to the memory but through tensors."""
        trust(tensor)
        self.place = self.made = None


class Out(NotCopied):
    """Lies on a tensor that others have. It does not keep the watch, which may hold the tensor."""

    __slots__ = ("watch",)

    def __init__(self, watch: Watch) -> None:
        self.watch = weakref.ref(watch)


def own(tensor: Tensor) -> Tensor:
    """The tensor that a layer holds for one that others have."""
    known = Watch.known(tensor)
    held = None if known is None else known.own_ref()
    if known is not None and held is not None:
        known.shared |= held is not tensor
        return held
    held = _alias(tensor)
    if held.untyped_storage().resizable():
        trust(held)  # here, as torch calls memory that NumPy has seen no longer resizable
    watch = Watch.on(held)
    watch.own_ref = weakref.ref(held)
    watch.lend(tensor)
    return held


def lent(held: Tensor) -> Tensor:
    """The tensor that others get for one that a layer holds."""
    watch = Watch.on(held)
    out = watch.out_ref()
    return watch.lend(_alias(held) if out is None else out)


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor of the same memory, a real one also where torch.export makes fakes of all that it computes."""
    with _disable_current_modes():
        return tensor.detach()


def _nobody() -> None:
    return None


def place_of(tensor: Tensor) -> Any:
    """Where the contents of a tensor are, and how they are to be read."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def version_of(tensor: Tensor) -> int | None:
    """How often torch says that the tensor was written to."""
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return None


def trust(tensor: Tensor) -> None:
    """Nobody writes to the memory of the tensor but through tensors."""
    setattr(tensor.untyped_storage(), TRUSTED, True)  # torch keeps one object for the memory, whoever has it


def count_holders(tensor: Tensor) -> tuple[int, int]:
    """How many hold the memory of a tensor, and how many torch's object for it."""
    memory = tensor.untyped_storage()
    return torch._C._storage_Use_Count(memory._cdata), sys.getrefcount(memory)


@cache
def holders_when_alone(dtype: torch.dtype, on_cpu: bool) -> tuple[int, int]:
    """What `count_holders` counts if one tensor with a watch has the memory. Counted, not assumed."""
    tensor = torch.empty(1, dtype=dtype)
    array = view_of(tensor, on_cpu)
    counts = count_holders(tensor)
    del array
    return counts


def view_of(tensor: Tensor, on_cpu: bool) -> Any:
    """The memory of a tensor, as `Watch.array` has it."""
    return to_numpy(tensor) if on_cpu else tensor.detach()


def digest_of(array: Any) -> int:
    """64 bits that tell other contents apart, at the speed of memory."""
    if not isinstance(array, np.ndarray) and not array.is_cuda:  # such as mps, which lacks some of what is below
        array = to_numpy(array)
    if isinstance(array, np.ndarray):
        return int(_cpu.digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
    total = 0
    for part in array.reshape(-1).view(torch.uint8).split(1 << 27):
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        # Each word has an odd factor of its own: no other word in its place has the same product.
        factors = torch.arange(1, len(words) + 1, device=words.device) * -0x61C8864680B583EB
        factors = (factors ^ (factors >> 31)) * -0x40A7B892E31B1A47 | 1
        total = hash((total, int((words * factors).sum())))
    return total
