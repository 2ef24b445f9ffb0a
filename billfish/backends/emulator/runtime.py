"""Runs a compiled kernel: buffers in, counters or a fault out. The structures are those of runtime/*.h."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.emulator.compiler import load, runtime_library

ORDERS = ("forward", "reverse", "random")
# Of memory before and behind each buffer, so that a wrong index does not reach another one.
MARGIN = 65536
WIDTHS = (1, 2, 4, 8, 16)  # bytes of an access
_REDZONE = 65536


class Party(ctypes.Structure):
    _fields_ = [
        ("known", ctypes.c_int),
        ("thread", ctypes.c_uint),
        ("threadgroup", ctypes.c_uint),
        ("writes", ctypes.c_int),
        ("site", ctypes.c_void_p),
        ("operation", ctypes.c_char_p),
    ]


class Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("range", ctypes.c_int),
        ("offset", ctypes.c_long),
        ("size", ctypes.c_uint),
        ("first", Party),
        ("second", Party),
        ("detail", ctypes.c_char * 128),
    ]


class _Range(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_ulong),
        ("size", ctypes.c_ulong),
        ("margin", ctypes.c_ulong),
        ("space", ctypes.c_int),
        ("initialised", ctypes.c_bool),
        ("writable", ctypes.c_bool),
        ("bytes_read", ctypes.c_ulong),
        ("bytes_written", ctypes.c_ulong),
        ("reads", ctypes.c_ulong * len(WIDTHS)),
        ("writes", ctypes.c_ulong * len(WIDTHS)),
        ("cells", ctypes.c_void_p),
    ]


class _Variable(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("address", ctypes.c_void_p), ("size", ctypes.c_ulong)]


class Counters(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_ulong)
        for name in (
            "threadgroup_barriers",
            "simdgroup_barriers",
            "matrix_multiplies",
            "atomics",
        )
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_uint),
        ("grid", ctypes.c_uint * 3),
        ("threadgroup", ctypes.c_uint * 3),
        ("order", ctypes.c_uint),
        ("seed", ctypes.c_uint),
        ("checked", ctypes.c_uint),
        ("flush", ctypes.c_uint),
        ("most", ctypes.c_uint),
    ]


@dataclass
class KernelBuffer:
    """A copy of an array, or room for one, with nothing else near it."""

    name: str
    block: NDArray[np.uint8]
    nbytes: int
    initialised: bool
    writable: bool

    @classmethod
    def of(cls, name: str, nbytes: int, *, initialised: bool, writable: bool, offset: int = 0) -> KernelBuffer:
        """offset: of its address, from a multiple of 64 bytes."""
        block = np.empty(nbytes + 2 * MARGIN + 128, np.uint8)
        skip = MARGIN + -(block.ctypes.data + MARGIN) % 64 + offset % 64
        return cls(name, block[skip:], nbytes, initialised, writable)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        return self.block[: self.nbytes]

    @property
    def address(self) -> int:
        return self.block.ctypes.data


@dataclass(frozen=True)
class Outcome:
    """What came of a launch."""

    fault: Fault | None
    names: tuple[str, ...]  # of the fault's ranges: buffers, then threadgroup variables
    counters: Counters
    read: dict[str, int]
    written: dict[str, int]
    threadgroup_read: dict[str, int]
    threadgroup_written: dict[str, int]
    loads: dict[str, dict[int, int]]  # by space, then by width in bytes
    stores: dict[str, dict[int, int]]


# The runtime has one set of fibers.
_LOCK = threading.Lock()


@cache
def _runtime() -> ctypes.CDLL:
    library = load(runtime_library())
    library.emulator_fault.restype = ctypes.POINTER(Fault)
    library.emulator_counters.restype = ctypes.POINTER(Counters)
    return library


def totals(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """By name; two variables of one name, in different scopes, are added up."""
    out: dict[str, int] = {}
    for name, count in pairs:
        out[name] = out.get(name, 0) + count
    return out


def variables(library: ctypes.CDLL) -> list[_Variable]:
    """The kernel's variables in threadgroup memory, in the order in which they lie there."""
    library.emulator_variables.restype = ctypes.POINTER(_Variable)
    count = ctypes.c_ulong()
    first = library.emulator_variables(ctypes.byref(count))
    return [first[i] for i in range(count.value)]


def launch(
    library: ctypes.CDLL,
    buffers: Sequence[KernelBuffer],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    order: str,
    seed: int,
    check: bool,
    hostile: bool,
    most: int = 0,
) -> Outcome:
    """Runs the grid, one threadgroup after another: all of them, or `most` that are spread over it."""
    shared = variables(library)
    ranges = (_Range * (len(buffers) + len(shared)))()
    for i, buffer in enumerate(buffers):
        ranges[i] = _Range(buffer.address, buffer.nbytes, MARGIN, 0, buffer.initialised, buffer.writable)
    for i, variable in enumerate(shared, len(buffers)):
        ranges[i] = _Range(variable.address, variable.size, _REDZONE if check else 0, 1, False, True)
    pointers = (ctypes.c_void_p * max(len(buffers), 1))(*(buffer.address for buffer in buffers))
    request = _Request(
        ctypes.cast(library.emulator_kernel, ctypes.c_void_p),
        ctypes.addressof(pointers),
        ctypes.addressof(ranges),
        len(ranges),
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*threadgroup),
        ORDERS.index(order),
        seed & 0xFFFFFFFF,
        check,
        hostile,
        most,
    )
    runtime = _runtime()
    with _LOCK:
        status = runtime.emulator_launch(ctypes.byref(request))
        if status < 0:
            raise MemoryError("out of memory for the threads of the Metal emulator")
        fault, counters = Fault(), Counters()
        ctypes.memmove(ctypes.byref(fault), runtime.emulator_fault(), ctypes.sizeof(fault))
        ctypes.memmove(ctypes.byref(counters), runtime.emulator_counters(), ctypes.sizeof(counters))
    device = list(zip(buffers, ranges, strict=False))
    local = [(v.name.decode(), r) for v, r in zip(shared, ranges[len(buffers) :], strict=True)]
    return Outcome(
        fault if status else None,
        (*(buffer.name for buffer in buffers), *(name for name, _ in local)),
        counters,
        {buffer.name: r.bytes_read for buffer, r in device},
        {buffer.name: r.bytes_written for buffer, r in device},
        totals((name, r.bytes_read) for name, r in local),
        totals((name, r.bytes_written) for name, r in local),
        _by_width({"device": [r.reads for _, r in device], "threadgroup": [r.reads for _, r in local]}),
        _by_width({"device": [r.writes for _, r in device], "threadgroup": [r.writes for _, r in local]}),
    )


def _by_width(spaces: dict[str, list[ctypes.Array[ctypes.c_ulong]]]) -> dict[str, dict[int, int]]:
    """Accesses by WIDTHS, of all ranges of a space together."""
    return {
        space: {width: sum(int(each[i]) for each in counts) for i, width in enumerate(WIDTHS)}
        for space, counts in spaces.items()
    }


def threadgroup_memory(library: Any) -> int:
    """Bytes of all variables in threadgroup memory, each at a multiple of 16."""
    return sum(-(-variable.size // 16) * 16 for variable in variables(library))
