"""The CUDA driver: devices, kernels, launches. Everything that touches a GPU goes through this file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.compile import SOURCES, compile_kernel, cuda_module
from billfish.core.errors import BackendUnavailable, BillfishError, DeviceLost

Macros = tuple[tuple[str, str], ...]

# Barriers of the kernels are static shared memory: up to 32 slots * 8 + 16 warps * 16 = 512 bytes. Dynamic shared
# memory begins at a multiple of 1024.
STATIC_BYTES = 1024
PORTABLE_CLUSTER = 8  # CTAs that a cluster may have on any GPU; a kernel must be allowed more
FLOAT16, BFLOAT16, BYTES = range(3)  # what x is made of, as launch/bind.cpp counts it


def driver() -> Any:
    """The driver's functions."""
    return cuda_module("cuda.bindings.driver")


OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# Errors behind which every later call of the process fails: DEINITIALIZED, ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE,
# CONTAINED, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED, ASSERT, HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION,
# MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC, LAUNCH_FAILED, TENSOR_MEMORY_LEAK, UNKNOWN.
STICKY = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})


class OutOfMemory(BillfishError, MemoryError):
    """A device has no room for an allocation."""


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver's call, which comes behind its error code."""
    error, *values = result
    if int(error) in STICKY:
        raise DeviceLost(
            f"cuda: {what} failed: {error.name}. This process cannot use the GPU any more: start it again."
        )
    if int(error) != 0:
        raise (OutOfMemory if int(error) == OUT_OF_MEMORY else BillfishError)(f"cuda: {what} failed: {error.name}.")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class Device:
    """A GPU, as far as kernels are chosen by it."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # the dynamic shared memory that a CTA may have

    @property
    def arch(self) -> str:
        """The architecture's name for the compiler. Only 90a has wgmma."""
        major, minor = self.capability
        return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@cache
def device(ordinal: int = 0) -> Device:
    """A device of this machine; raises BackendUnavailable where there is none that can run the kernels."""
    d = driver()
    try:
        error = d.cuInit(0)[0]
        count = 0 if int(error) else check(d.cuDeviceGetCount(), "cuDeviceGetCount")
    except RuntimeError as missing:  # no libcuda on this machine
        raise BackendUnavailable(f"cuda: no NVIDIA driver was found ({missing}).") from None
    if int(error) or ordinal >= count:
        found = error.name if int(error) else f"this machine has {count}"
        raise BackendUnavailable(f"cuda: there is no NVIDIA GPU {ordinal} ({found}).")
    handle = check(d.cuDeviceGet(ordinal), "cuDeviceGet")

    def attribute(name: str) -> int:
        which = getattr(d.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(d.cuDeviceGetAttribute(which, handle), name))

    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    name = check(d.cuDeviceGetName(100, handle), "cuDeviceGetName").split(b"\0")[0].decode()
    if capability < (8, 0):
        raise BackendUnavailable(f"cuda: {name} is sm_{capability[0]}{capability[1]}. The kernels need sm_80 or newer.")
    shared_bytes = attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - STATIC_BYTES
    return Device(ordinal, name, capability, attribute("MULTIPROCESSOR_COUNT"), shared_bytes)


_loading = Lock()


def kernel(source: str, name: str, macros: Macros, ordinal: int, shared_bytes: int) -> Any:
    """A kernel, compiled and loaded once, allowed that much dynamic shared memory."""
    with _loading:  # cuda.core must not be imported, nor one kernel compiled, by two threads at once
        return _kernel(source, name, macros, ordinal, shared_bytes)


@cache
def _kernel(source: str, name: str, macros: Macros, ordinal: int, shared_bytes: int) -> Any:
    d = driver()
    code = compile_kernel(source, dict(macros), device(ordinal).arch)
    library = check(d.cuLibraryLoadData(code, [], [], 0, [], [], 0), f"loading {name}")
    found = check(d.cuLibraryGetKernel(library, name.encode()), name)
    if shared_bytes:  # above 48 KiB, static ones included, a kernel must be allowed them
        which = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(d.cuKernelSetAttribute(which, shared_bytes, found, check(d.cuDeviceGet(ordinal), "device")), name)
    return d.CUfunction(int(found))


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel and the grid it is launched on: all but stream and arguments."""

    source: str
    name: str
    macros: Macros
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int = 0
    cluster: int = 1
    overlap: bool = False  # programmatic dependent launch: the kernel may start before the one ahead has ended

    def __call__(self, ordinal: int, stream: int, *arguments: Any) -> None:
        """Pointers and numbers as the kernel's signature has them; a tensor map is a `_cuda.TensorMap`."""
        native(self, ordinal)(stream, *arguments)


_compiled: set[tuple[str, Macros, str]] = set()  # by `compile_together`


def compile_together(launches: Iterable[KernelLaunch], ordinal: int) -> None:
    """Compiles what was never compiled, in threads, as each kernel takes a second or more."""
    arch = device(ordinal).arch
    missing = {(launch.source, launch.macros, arch) for launch in launches} - _compiled
    if len(missing) > 1:
        with _loading:
            cuda_module("cuda.core")
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda kernel: compile_kernel(kernel[0], dict(kernel[1]), arch), missing))
    _compiled.update(missing)


@lru_cache(maxsize=4096)
def native(launch: KernelLaunch, ordinal: int) -> Any:
    """The same in native code, for one device: a `_cuda.NativeLaunch`."""
    function = kernel(launch.source, launch.name, launch.macros, ordinal, launch.shared_bytes)
    if launch.cluster > PORTABLE_CLUSTER:
        d = driver()
        which = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        place = check(d.cuDeviceGet(ordinal), "device")
        check(d.cuKernelSetAttribute(which, 1, d.CUkernel(int(function)), place), launch.name)
    x, y, z = (*launch.grid, 1, 1)[:3]
    shape = (x, y, z), launch.threads, launch.shared_bytes, launch.cluster, launch.overlap
    context = int(_primary_context(ordinal))
    return launcher().NativeLaunch(int(function), context, *shape, signature(launch.source, launch.name))


def launcher() -> Any:
    """The native module."""
    from billfish.backends.cuda import _cuda

    return _cuda


@cache
def signature(source: str, name: str) -> str:
    """What a kernel takes, a letter for each argument: p a pointer, i an int, f a float, m a tensor map by value."""
    text = (SOURCES / source).read_text()
    arguments = text[text.index(f"{name}(") + len(name) + 1 :].partition(") {")[0].split(",")
    letters = {"*": "p", "TensorMap": "m", "float": "f", "int": "i"}  # a pointer to floats is a pointer
    return "".join(next(letter for word, letter in letters.items() if word in argument) for argument in arguments)


@cache
def _primary_context(ordinal: int) -> Any:
    device(ordinal)  # initializes the driver, or says that there is none
    d = driver()
    try:
        return check(d.cuDevicePrimaryCtxRetain(check(d.cuDeviceGet(ordinal), "device")), "context")
    except BillfishError as error:  # its memory is full, or it is somebody else's alone
        raise BackendUnavailable(str(error)) from None


def adopt(ordinal: int) -> None:
    """A context for a thread that has none: autograd's threads get one with their first call of CUDA's runtime only."""
    d = driver()
    if not int(check(d.cuCtxGetCurrent(), "context")):
        check(d.cuCtxSetCurrent(_primary_context(ordinal)), "context")


@contextmanager
def current(ordinal: int) -> Iterator[None]:
    """A device that is current in this thread, by the context that torch and CuPy use too; then the one before."""
    d = driver()
    check(d.cuCtxPushCurrent(_primary_context(ordinal)), "context")
    try:
        yield
    finally:
        check(d.cuCtxPopCurrent(), "context")


class Buffer:
    """Memory of a device, freed with the object. Nothing else may free it, so a copy is other memory."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        self.nbytes, self.ordinal = nbytes, ordinal
        self._driver, self._context = driver(), _primary_context(ordinal)  # at exit, nothing can be imported any more
        with current(ordinal):
            self.pointer = int(check(driver().cuMemAlloc(max(nbytes, 16)), f"allocating {nbytes} bytes"))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes, for torch and CuPy to see without a copy."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}

    def __copy__(self) -> Buffer:
        other = Buffer(self.nbytes, self.ordinal)
        with current(self.ordinal):
            check(driver().cuMemcpyDtoD(other.pointer, self.pointer, self.nbytes), "copying on the device")
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise TypeError("GPU memory cannot be pickled. Pickle the QuantizedTensor instead.")

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._driver.cuCtxPushCurrent(self._context)
            self._driver.cuMemFree(self.pointer)
            self._driver.cuCtxPopCurrent()


class Stream:
    """A stream that waits for no other, destroyed with the last object that launches on it."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver, self._context = driver(), _primary_context(ordinal)
        with current(ordinal):
            self.pointer = int(check(driver().cuStreamCreate(1), "a stream"))

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._driver.cuCtxPushCurrent(self._context)
            self._driver.cuStreamDestroy(self.pointer)
            self._driver.cuCtxPopCurrent()


class Pinned:
    """Memory of the host that a device copies from and to while Python goes on: bytes."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        self._driver, self._context = driver(), _primary_context(ordinal)
        with current(ordinal):
            self.pointer = int(check(driver().cuMemHostAlloc(nbytes, 0), "allocating on the host"))
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pointer))

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._driver.cuCtxPushCurrent(self._context)
            self._driver.cuMemFreeHost(self.pointer)
            self._driver.cuCtxPopCurrent()


def check_device(ordinal: int) -> None:
    """Wait for all that was launched. Raises DeviceLost if the device cannot be used any more."""
    with current(ordinal):
        check(driver().cuCtxSynchronize(), "waiting for the device")


class Event:
    """A place in a stream that the host can wait for."""

    def __init__(self, ordinal: int) -> None:
        self._driver, self._context = driver(), _primary_context(ordinal)
        with current(ordinal):
            self._event = driver().CUevent(int(check(driver().cuEventCreate(2), "an event")))  # 2: without a time

    def record(self, stream: int) -> None:
        """Behind all that was launched on a stream. The device is current."""
        check(driver().cuEventRecord(self._event, stream), "an event")

    def wait(self) -> None:
        """Until the device is there. An event that was never recorded is."""
        check(driver().cuEventSynchronize(self._event), "waiting for the device")

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self._driver.cuCtxPushCurrent(self._context)
            self._driver.cuEventDestroy(self._event)
            self._driver.cuCtxPopCurrent()


@contextmanager
def recorded(program: Any) -> Iterator[None]:
    """Launches become part of a `_cuda.Program`, and are not made."""
    program.begin()
    try:
        yield
    finally:
        program.end()


def free_bytes(ordinal: int) -> int:
    """Memory of a device that nobody has taken."""
    with current(ordinal):
        return int(check(driver().cuMemGetInfo(), "asking for free memory")[0])


def total_bytes(ordinal: int) -> int:
    """All memory of a device. It needs no context, which would take some of it."""
    device(ordinal)
    handle = check(driver().cuDeviceGet(ordinal), "cuDeviceGet")
    return int(check(driver().cuDeviceTotalMem(handle), "cuDeviceTotalMem"))


def copy_in(to: int, array: NDArray[Any], stream: int) -> None:
    """A NumPy array to the memory at `to`; done when this returns. The device is current."""
    array = np.ascontiguousarray(array)
    check(driver().cuMemcpyHtoDAsync(to, array.ctypes.data, array.nbytes, stream), "copying to the device")
    synchronize(stream)


def copy_out(array: NDArray[Any], source: int, stream: int) -> None:
    """The memory at `source` into a contiguous NumPy array, after all that was launched on the stream."""
    check(driver().cuMemcpyDtoHAsync(array.ctypes.data, source, array.nbytes, stream), "copying from the device")
    synchronize(stream)


def copy_there(to: int, source: int, nbytes: int, stream: int) -> None:
    """From one memory of the device to another, after all that was launched on the stream."""
    check(driver().cuMemcpyDtoDAsync(to, source, nbytes, stream), "copying on the device")


def synchronize(stream: int) -> None:
    """Wait for all that was launched on a stream."""
    check(driver().cuStreamSynchronize(stream), "waiting for the device")


@lru_cache(maxsize=256)
def tensor_map(pointer: int, numbers: int, rows: int, k: int, stride: int, box_rows: int) -> Any:
    """x [rows, k] in boxes of `box_rows` by 128 bytes, or 1 by 256; outside of x are zeros.

    numbers: what x is made of, FLOAT16, BFLOAT16 or BYTES. stride: numbers from row to row. Rows must not overlap, and
    begin at multiples of 16 bytes; stride >= k.
    """
    return launcher().tensor_map(pointer, numbers, rows, k, stride, box_rows)


def no_tensor_map() -> Any:
    """For kernels of GPUs before Hopper, which read none."""
    return launcher().TensorMap()
