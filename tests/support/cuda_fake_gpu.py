"""The fake driver with streams, events and graphs: what a decoder of a GPU asks for.

Kernels compute nothing. `choose` takes the token after the one that was fed, so that every answer counts up, and each
step must be fed the right token at the right position of the right pages.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_fake import FakeDriver, Names

from billfish.backends.cuda import decoder, step_memory
from billfish.llm import cuda, cuda_kv_cache, cuda_states

VOCABULARY = 261


def numbers(pointer: int, count: int, type: Any = ctypes.c_int32) -> np.ndarray:
    return np.ctypeslib.as_array((type * count).from_address(pointer))


class FakeGpu(FakeDriver):
    """Streams, events and graphs as well. `fed`: the tokens and positions of each step, and the pages they lie in."""

    CUstreamCaptureMode = Names()
    ATTRIBUTES = {**FakeDriver.ATTRIBUTES, "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        for module in (decoder, step_memory, cuda, cuda_kv_cache, cuda_states):
            monkeypatch.setattr(module, "driver", lambda: self)
        monkeypatch.setattr(decoder, "compile_together", lambda *_: None)
        self.capture: list[Any] | None = None
        self.graphs: dict[int, list[Any]] = {}
        self.objects: set[int] = set()
        self.host: dict[int, np.ndarray] = {}
        self.fed: list[list[tuple[int, int, int]]] = []
        self.fail_at: str = ""

    def _new(self) -> int:
        self.objects.add(1 + len(self.objects) + len(self.graphs))
        return max(self.objects)

    def CUevent(self, handle: int) -> int:
        return handle

    def cuStreamCreate(self, flags: int) -> tuple:
        return 0, self._new()

    def cuEventCreate(self, flags: int) -> tuple:
        return 0, self._new()

    def cuStreamDestroy(self, handle: int) -> tuple:
        self.objects.remove(handle)
        return (0,)

    cuEventDestroy = cuStreamDestroy

    def cuCtxSynchronize(self) -> tuple:
        return (0,)

    def cuEventRecord(self, event: int, stream: int) -> tuple:
        return (0,)

    def cuEventSynchronize(self, event: int) -> tuple:
        return (0,)

    def cuMemGetInfo(self) -> tuple:
        return 0, 10**10, 10**10

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple:
        memory = np.zeros(nbytes, np.uint8)
        self.host[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemFreeHost(self, pointer: int) -> tuple:
        del self.host[pointer]
        return (0,)

    def cuMemsetD8(self, pointer: int, value: int, count: int) -> tuple:
        self._room(pointer, count)
        ctypes.memset(pointer, value, count)
        return (0,)

    def cuMemsetD8Async(self, pointer: int, value: int, count: int, stream: int) -> tuple:
        return self.cuMemsetD8(pointer, value, count)

    def _room(self, pointer: int, nbytes: int) -> None:
        """Fails unless memory from there on is of one allocation."""
        found = [p for p, memory in self.live.items() if p <= pointer and pointer + nbytes <= p + memory.nbytes]
        assert found, "outside of all memory"

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        self._room(to, nbytes)
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        self._room(source, nbytes)
        ctypes.memmove(to, source, nbytes)
        return (0,)

    def cuMemcpyDtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        self._room(to, nbytes)
        return self.cuMemcpyDtoHAsync(to, source, nbytes, stream)

    def cuStreamBeginCapture(self, stream: int, mode: str) -> tuple:
        assert not gc.isenabled()
        self.capture = []
        return (0,)

    def cuStreamEndCapture(self, stream: int) -> tuple:
        recorded, self.capture = self.capture, None
        return 0, recorded

    def cuGraphInstantiate(self, graph: list[Any], flags: int) -> tuple:
        self.graphs[len(self.graphs) + 1000] = graph
        return 0, len(self.graphs) + 999

    def cuGraphDestroy(self, graph: list[Any]) -> tuple:
        return (0,)

    def cuGraphExecDestroy(self, graph: int) -> tuple:
        self.graphs[graph] = []
        return (0,)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple:
        for launch in self.graphs[graph]:
            self.launch(*launch)
        return (0,)

    def launch(self, function: int, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        if self.capture is not None:
            self.capture.append((function, grid, values))
            return
        source, _ = self._kernels[function]
        if source == self.fail_at:
            self.fail_at = ""
            raise KeyboardInterrupt
        rows = grid[1]
        if source == "embed.cu":
            tokens, positions = (numbers(values[i], rows).copy() for i in (2, 3))
            self._now = tokens, positions
            self._scored = np.arange(rows)
        elif source == "rotate.cu" and values[20] == 0:  # the first layer
            tokens, positions = self._now
            texts, pages_of_text = numbers(values[8], len(tokens)), values[21]
            table = numbers(values[9], (int(texts.max()) + 1) * pages_of_text, ctypes.c_uint64).reshape(
                -1, pages_of_text
            )
            pages = table[texts, positions // step_memory.PAGE]
            for page in pages:
                self._room(int(page), 1)
            self.fed.append([(int(t), int(p), int(page)) for t, p, page in zip(tokens, positions, pages, strict=True)])
        elif source == "normalize.cu" and values[3]:
            self._scored = numbers(values[3], grid[0]).copy()
        elif source == "choose.cu":
            tokens, positions = (numbers(values[i], rows) for i in (3, 4))
            tokens[:] = (self._now[0][self._scored[:rows]] + 1) % VOCABULARY
            positions += 1
        else:
            super().launch(function, grid, values)
