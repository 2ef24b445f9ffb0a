"""What the tests of the CUDA engine share: its decoding in NumPy, and a driver without a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from billfish.backends.cuda import driver
from billfish.backends.cuda.describe import Description
from billfish.backends.cuda.kind import Kind
from billfish.backends.cuda.layout import brick_shape, pack_codes, split, unpack_codes
from billfish.elements import FP4


def decode_bytes(codes: np.ndarray, kind: str) -> np.ndarray:
    """The upper bits of a float16 that is 2^7 times the scale: float32."""
    shift = {"ScaleE5M2": 8, "ScaleE5M3": 7}[kind]
    return (codes.astype(np.uint16) << shift).view(np.float16).astype(np.float32) * np.float32(2.0**-7)


def decoded(about: Description) -> np.ndarray:
    """W as dequantize.cu decodes it, from the description alone: float32 [N, K]."""
    kind, k = about.kind, about.codes.shape[1]
    if kind.element == "E2M1":
        w = FP4.values[about.codes] + np.float32(0) if kind.one_zero else FP4.values[about.codes]
    elif kind.element == "Table4":
        w = np.asarray(kind.table, np.float32)[about.codes] - 128
    else:
        assert kind.words == 2 or about.codes.max() < 16
        center = {"Int4": 8, "Int8": 128}[kind.element]
        w = about.codes.astype(np.float32) - center
    if kind.middle:  # adding 0 would lose the sign of -0
        w = w + np.float32(kind.middle)

    def spread(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, 128 // kind.groups, axis=1)[:, :k]

    with np.errstate(all="ignore"):
        byte = kind.scale in ("ScaleE5M2", "ScaleE5M3")
        scale = decode_bytes(about.scales, kind.scale) if byte else about.scales.astype(np.float32)
        row = about.row_scale[:, None]
        if kind.offset == "ZERO":
            w = w - spread(about.offsets.astype(np.float32))
        w = w * spread(scale * row)
        if kind.offset == "MINIMUM":
            w = w + spread(about.offsets.astype(np.float32) * row)
    return w.astype(np.float32)


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
