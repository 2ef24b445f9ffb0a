"""A driver of the CUDA engine that needs no GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from billfish.backends.cuda import driver
from billfish.backends.cuda.kind import Kind
from billfish.backends.cuda.layout import brick_shape, pack_codes, split, unpack_codes


class Names:
    """An enumeration of the driver: every name is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeDriver:
    """As much of cuda.bindings.driver as weights need, on memory of the CPU. pack.cu and unpack.cu run in NumPy.

    Kernels that multiply or decode write nothing. `live`: allocations that were not freed.
    """

    CUdevice_attribute = CUlaunchAttributeID = Names()
    CUlaunchConfig = CUlaunchAttributeValue = CUlaunchAttribute = CUtensorMap = SimpleNamespace
    ATTRIBUTES = {
        "COMPUTE_CAPABILITY_MAJOR": 8,
        "COMPUTE_CAPABILITY_MINOR": 9,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 101376,
        "MULTIPROCESSOR_COUNT": 58,
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live: dict[int, np.ndarray] = {}
        self.stack: list[str] = []
        self.launches: list[str] = []
        self._cached = (driver.device, driver._primary_context)
        monkeypatch.setattr(driver, "driver", lambda: self)
        monkeypatch.setattr(driver, "kernel", lambda source, name, macros, *_: (source, dict(macros)))
        self.forget()

    def forget(self) -> None:
        for function in self._cached:
            function.cache_clear()

    def cuInit(self, flags: int) -> tuple:
        return (0,)

    def cuDeviceGetCount(self) -> tuple:
        return 0, 1

    def cuDeviceGet(self, ordinal: int) -> tuple:
        return 0, f"device {ordinal}"

    def cuDeviceGetAttribute(self, which: str, device: str) -> tuple:
        return 0, self.ATTRIBUTES[which.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuDeviceGetName(self, length: int, device: str) -> tuple:
        return 0, b"fake\0"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple:
        return 0, f"context of {device}"

    def cuCtxGetCurrent(self) -> tuple:
        return 0, int(bool(self.stack))  # a handle, of which 0 is none

    def cuCtxSetCurrent(self, context: str) -> tuple:
        self.stack[-1:] = [context]
        return (0,)

    def cuCtxPushCurrent(self, context: str) -> tuple:
        self.stack.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple:
        return 0, self.stack.pop()

    def cuMemAlloc(self, nbytes: int) -> tuple:
        assert self.stack, "no device is current"
        memory = np.full(nbytes, 0xAA, np.uint8)
        self.live[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemFree(self, pointer: int) -> tuple:
        assert self.stack, "no device is current"
        del self.live[pointer]
        return (0,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        assert nbytes <= self.live[to].nbytes
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        assert nbytes <= self.live[source].nbytes
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def cuMemcpyDtoD(self, to: int, source: int, nbytes: int) -> tuple:
        assert nbytes <= min(self.live[to].nbytes, self.live[source].nbytes)
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple:
        return (0,)

    def cuLaunchKernelEx(
        self, config: Any, function: tuple[str, dict[str, str]], arguments: tuple, extra: int
    ) -> tuple:
        (source, macros), values = function, arguments[0]
        self.launches.append(source)
        assert config.gridDimX < 2**31
        assert config.gridDimY <= 65535
        if source in ("pack.cu", "unpack.cu"):
            kind = Kind(*(macros[name] for name in ("ELEMENT", "SCALE", "OFFSET")), int(macros["GROUPS"]))
            first, *others = values
            n, k = values[3:5] if source == "pack.cu" else values[2:4]
            assert config.gridDimX == np.prod(brick_shape(n, k))
            if source == "pack.cu":
                groups, bricks = (self.live[pointer] for pointer in others[:2])
                codes = pack_codes(kind, self.live[first][: n * k].reshape(n, k))
                parts = np.concatenate([codes, groups.reshape(*codes.shape[:2], -1)], axis=2)
                blocks = [parts[i : i + 8].transpose(1, 0, 2).ravel() for i in range(0, len(parts), 8)]
                bricks[:] = np.concatenate(blocks)
            else:
                parts = split(kind, self.live[first], n, k)[..., : kind.code_bytes]
                codes = unpack_codes(kind, parts, n, k) - np.uint8(values[4])
                self.live[others[0]][: n * k] = codes.ravel()
        return (0,)
