"""A driver of the CUDA engine that needs no GPU."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from billfish.backends.cuda import device_weights, driver
from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.layout import brick_shape, pack_codes, split, unpack_codes
from billfish.llm import cuda_steps


class Names:
    """An enumeration of the driver: every name is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeDriver:
    """As much of cuda.bindings.driver as weights need, on memory of the CPU. pack.cu and unpack.cu run in NumPy,
    but for unquantized weights.

    Kernels that multiply or decode write nothing. `live`: allocations that were not freed. `foreign`: memory of others.
    """

    CUdevice_attribute = CUfunction_attribute = CUlaunchAttributeID = Names()
    ATTRIBUTES = {
        "COMPUTE_CAPABILITY_MAJOR": 8,
        "COMPUTE_CAPABILITY_MINOR": 9,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 101376,
        "MULTIPROCESSOR_COUNT": 58,
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live: dict[int, np.ndarray] = {}
        self.foreign: dict[int, np.ndarray] = {}
        self.stack: list[int] = []
        self.launches: list[str] = []
        self.products: list[tuple[int, ...]] = []  # stream, x, stride of x, bias, y
        self._cached = (driver.device, driver._primary_context, driver.native)
        self._kernels: list[tuple[str, dict[str, str]]] = []  # their handle is their place
        native = SimpleNamespace(
            NativeLaunch=partial(NativeLaunch, self),
            NativeProduct=NativeProduct,
            tensor_map=lambda *_: None,
            TensorMap=lambda: None,
            Program=partial(Program, self),
        )
        self.recording: Program | None = None
        for module in (driver, device_weights, cuda_steps):
            monkeypatch.setattr(module, "launcher", lambda: native)
        monkeypatch.setattr(driver, "driver", lambda: self)
        monkeypatch.setattr(driver, "kernel", self.kernel)
        self.forget()

    def forget(self) -> None:
        for function in self._cached:
            function.cache_clear()

    def kernel(self, source: str, name: str, macros: driver.Macros, *rest: int) -> int:
        self._kernels.append((source, dict(macros)))
        return len(self._kernels) - 1

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
        return 0, 1 + int(device.removeprefix("device "))  # a handle

    def CUkernel(self, handle: int) -> int:
        return handle

    def cuKernelSetAttribute(self, which: str, value: int, kernel: int, device: str) -> tuple:
        return (0,)

    def cuCtxGetCurrent(self) -> tuple:
        return 0, int(bool(self.stack))  # a handle, of which 0 is none

    def cuCtxSetCurrent(self, context: int) -> tuple:
        self.stack[-1:] = [context]
        return (0,)

    def cuCtxPushCurrent(self, context: int) -> tuple:
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

    def at(self, pointer: int) -> np.ndarray:
        """The bytes from an address on, to the end of the memory that it lies in."""
        memories = self.live | self.foreign
        start = max(first for first in memories if first <= pointer)
        assert pointer < start + memories[start].nbytes
        return memories[start][pointer - start :]

    def cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        assert nbytes <= self.at(source).nbytes
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def cuMemcpyDtoD(self, to: int, source: int, nbytes: int) -> tuple:
        assert nbytes <= min(self.live[to].nbytes, self.live[source].nbytes)
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple:
        return (0,)

    def launch(self, function: int, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        source, macros = self._kernels[function]
        self.launches.append(source)
        assert grid[0] < 2**31
        assert grid[1] <= 65535
        if source in ("pack.cu", "unpack.cu") and "CODE" not in macros:
            kind = Kind(*(macros[name] for name in ("ELEMENT", "SCALE", "OFFSET")), int(macros["GROUPS"]))
            first, *others = values
            n, k = values[3:5] if source == "pack.cu" else values[2:4]
            assert grid[0] == np.prod(brick_shape(n, k))
            if source == "pack.cu":
                groups, bricks = map(self.at, others[:2])
                codes = pack_codes(kind, read_codes(self.at(first), macros, n, k))
                each = kind.brick_bytes - kind.code_bytes
                own = groups[: codes.shape[0] * codes.shape[1] * each].reshape(*codes.shape[:2], each)
                parts = np.concatenate([codes, own], axis=2)
                blocks = [parts[i : i + 8].transpose(1, 0, 2).ravel() for i in range(0, len(parts), 8)]
                packed = np.concatenate(blocks)
                bricks[: len(packed)] = packed
            else:
                parts = split(kind, self.live[first], n, k)[..., : kind.code_bytes]
                codes = unpack_codes(kind, parts, n, k) - np.uint8(values[4])
                self.live[others[0]][: n * k] = codes.ravel()


def read_codes(data: np.ndarray, macros: dict[str, str], n: int, k: int) -> np.ndarray:
    """Codes [n, k] as pack.cu finds them."""
    column = np.arange(k)
    if "WORD_BITS" in macros:
        bits = int(macros["WORD_BITS"])
        words = data[: n * k * bits // 8].view(np.uint32).reshape(-1, n)[column // (32 // bits)].T
        codes = words >> (column % (32 // bits) * bits).astype(np.uint32) & np.uint32(2**bits - 1)
    elif "BLOCK" in macros:
        block, block_bytes = int(macros["BLOCK"]), int(macros["BLOCK_BYTES"])
        rows = data[: n * k // block * block_bytes].reshape(n, -1)
        codes, at, i = np.zeros((n, k), np.uint8), 0, column % block
        for field in macros["FIELDS"].strip("{}").split("}, {"):
            offset, run, bits = map(int, field.split(","))
            together = run * (8 // bits)
            read = rows[:, column // block * block_bytes + offset + i // together * run + i % run]
            codes |= (read >> (i % together // run * bits).astype(np.uint8) & np.uint8(2**bits - 1)) << np.uint8(at)
            at += bits
    else:
        return data[: n * k].reshape(n, k)
    return (codes + int(macros["SHIFT"]) & 255).astype(np.uint8)


class TorchMemory:
    """A room of tensors, as torch would have it on a GPU: in memory of the CPU, whose number is torch's for it, -1."""

    ordinal, stream = -1, 0

    def __init__(self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = fake
        for name in ("room_for", "room_of"):
            monkeypatch.setattr(device_weights, name, lambda _: self)

    def current(self) -> AbstractContextManager[None]:
        return driver.current(self.ordinal)

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        pointer = memory.data_ptr()
        self.fake.live[pointer] = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), np.uint8)
        weakref.finalize(memory.untyped_storage(), self.fake.live.pop, pointer)
        return memory


class NativeLaunch:
    """As _cuda.NativeLaunch."""

    def __init__(
        self, fake: FakeDriver, function: int, context: int, grid: tuple[int, int, int], *shape: int | str
    ) -> None:
        self.fake, self.function, self.grid, self.layout = fake, function, grid, shape[-1]

    def __call__(self, stream: int, *values: Any) -> None:
        assert len(values) == len(str(self.layout))
        for value, letter in zip(values, str(self.layout), strict=True):
            assert isinstance(value, float) == (letter == "f")
            assert letter != "i" or -(2**31) <= value < 2**31
        if self.fake.recording is None:
            self.fake.launch(self.function, self.grid, values)
        else:
            self.fake.recording.launches.append((self.function, self.grid, values))


class Program:
    """As _cuda.Program."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.launches: list[Any] = []

    def begin(self) -> None:
        assert self.fake.recording is None
        self.fake.recording = self

    def end(self) -> None:
        self.fake.recording = None

    def __len__(self) -> int:
        return len(self.launches)

    def __call__(self, stream: int) -> None:
        for launch in self.launches:
            self.fake.launch(*launch)


class NativeProduct:
    """As _cuda.NativeProduct."""

    def __init__(
        self, launch: NativeLaunch, bricks: int, row_scale: int, m: int, n: int, k: int, *rest: int, **part: int
    ) -> None:
        self.launch, self.memory, self.sizes, self.part = launch, (bricks, row_scale), (m, n, k), part.values()

    def __call__(self, stream: int, x: int, x_stride: int, bias: int, y: int, *norm: int | float) -> None:
        self.launch.fake.products.append((stream, x, x_stride, bias, y))
        self.launch(stream, None, *self.memory, x, bias, y, *self.sizes, x_stride, *self.part, *norm)
