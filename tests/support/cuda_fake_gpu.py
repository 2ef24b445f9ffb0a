"""The fake driver with streams, events and graphs: what a decoder of a GPU asks for.

Kernels compute nothing. `choose` takes the token after the one that was fed, so that every answer counts up, and each
step must be fed the right token at the right position of the right pages.

A stream does nothing before somebody waits for it, or for an event behind it. So a copy from pinned memory that is
written again too early copies the wrong numbers, and so does a host that reads before it has waited.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda_fake import FakeDriver, Names

from billfish.backends.cuda import decoder, input_sums, step_memory
from billfish.backends.cuda.late_rows import LATE_ROW, MOST_SCORED, SCORED_TOKEN
from billfish.llm import cuda, cuda_kv_cache, cuda_sampling, cuda_states, cuda_steps
from billfish.llm.sampler import ADJUSTMENT, Sampling, choose_token, with_best

VOCABULARY = 261


def numbers(pointer: int, count: int, type: Any = ctypes.c_int32) -> np.ndarray:
    return np.ctypeslib.as_array((type * count).from_address(pointer))


class FakeGpu(FakeDriver):
    """Streams, events and graphs as well. `fed`: the tokens and positions of each step, and the pages they lie in."""

    CUstreamCaptureMode = Names()
    ATTRIBUTES = {**FakeDriver.ATTRIBUTES, "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        for module in (decoder, input_sums, step_memory, cuda, cuda_kv_cache, cuda_sampling, cuda_states, cuda_steps):
            monkeypatch.setattr(module, "driver", lambda: self)
        monkeypatch.setattr(decoder, "compile_together", lambda *_: None)
        self.capture: list[Any] | None = None
        self.graphs: dict[int, list[Any]] = {}
        self.objects: set[int] = set()  # streams and events
        self.made = 0  # so many of them, ever
        self.host: dict[int, np.ndarray] = {}
        self.fed: list[list[tuple[int, int, int]]] = []
        self.fail_at: str = ""
        self.queue: list[Callable[[], object]] = []  # what is launched and not done
        self.events: dict[int, int] = {}  # how much was launched before each
        self.done = 0
        self._adjusted = 0  # where adjusted logits are

    def _new(self) -> int:
        self.made += 1
        self.objects.add(self.made)
        return self.made

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

    def later(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def run_until(self, count: int) -> None:
        """The device does what was launched, up to that."""
        while self.done < count:
            work, self.queue = self.queue[0], self.queue[1:]
            self.done += 1
            work()

    def cuCtxSynchronize(self) -> tuple:
        self.run_until(self.done + len(self.queue))
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple:
        return self.cuCtxSynchronize()

    def cuEventRecord(self, event: int, stream: int) -> tuple:
        self.events[event] = self.done + len(self.queue)
        return (0,)

    def cuEventSynchronize(self, event: int) -> tuple:
        self.run_until(self.events.get(event, 0))
        return (0,)

    def cuMemGetInfo(self) -> tuple:
        return 0, 10**10, 10**10

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple:
        memory = np.zeros(nbytes, np.uint8)
        self.host[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemFreeHost(self, pointer: int) -> tuple:
        self.cuCtxSynchronize()
        del self.host[pointer]
        return (0,)

    def cuMemFree(self, pointer: int) -> tuple:
        self.cuCtxSynchronize()
        return super().cuMemFree(pointer)

    def cuMemAlloc(self, nbytes: int) -> tuple:
        error, pointer = super().cuMemAlloc(nbytes)
        return error, pointer

    def pinned(self, pointer: int) -> bool:
        return any(start <= pointer < start + memory.nbytes for start, memory in self.host.items())

    def cuMemsetD8(self, pointer: int, value: int, count: int) -> tuple:
        self._room(pointer, count)
        ctypes.memset(pointer, value, count)
        return (0,)

    def cuMemsetD8Async(self, pointer: int, value: int, count: int, stream: int) -> tuple:
        self.later(lambda: self.cuMemsetD8(pointer, value, count))
        return (0,)

    def _room(self, pointer: int, nbytes: int) -> None:
        """Fails unless memory from there on is of one allocation."""
        found = [p for p, memory in self.live.items() if p <= pointer and pointer + nbytes <= p + memory.nbytes]
        assert found, "outside of all memory"

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        self._room(to, nbytes)
        if self.pinned(source):
            self.later(lambda: ctypes.memmove(to, source, nbytes))
        else:  # it was read when the call returns
            data = ctypes.string_at(source, nbytes)
            self.later(lambda: ctypes.memmove(to, data, nbytes))
        return (0,)

    def cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        self._room(source, nbytes)
        self.later(lambda: ctypes.memmove(to, source, nbytes))
        if not self.pinned(to):
            self.cuCtxSynchronize()
        return (0,)

    def cuMemcpyDtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple:
        self._room(to, nbytes)
        self._room(source, nbytes)
        self.later(lambda: ctypes.memmove(to, source, nbytes))
        return (0,)

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
        self.cuCtxSynchronize()
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
        if self._kernels[function][0] == self.fail_at:
            self.fail_at = ""
            raise KeyboardInterrupt
        self.later(lambda: self.compute(function, grid, values))

    def compute(self, function: int, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        source, macros = self._kernels[function]
        rows = grid[1]
        if source == "embed.cu":
            self._now = chosen_tokens(values[2], values[3], rows), numbers(values[4], rows).copy()
        elif source == "rotate.cu" and values[20] == 0:  # the first layer
            tokens, positions = self._now
            sequences, width = numbers(values[8], len(tokens)), values[21]
            table = numbers(values[9], (int(sequences.max()) + 1) * width, ctypes.c_uint64).reshape(-1, width)
            pages = table[sequences, positions // step_memory.PAGE]
            for page in pages:
                self._room(int(page), 1)
            self.fed.append([(int(t), int(p), int(page)) for t, p, page in zip(tokens, positions, pages, strict=True)])
            self._written = list(zip(sequences.tolist(), positions.tolist(), strict=True))
        elif source == "attend.cu" and macros["FEW"] == "1":
            for _, before, sequence, position in numbers(values[1], 4 * grid[2]).reshape(-1, 4).tolist():
                # Keys before that one are read while rotate.cu may still write those of this step.
                assert before <= min(at for whose, at in self._written if whose == sequence) <= position
        elif source == "normalize.cu" and values[3]:
            self._scored = numbers(values[3], grid[0]).copy()
        elif source == "set_pages.cu":
            set_pages(*values)
        elif source == "adjust.cu":
            adjust_rows(grid, *values)
            self._adjusted = values[3]
        elif source == "log_probabilities.cu":
            log_probabilities(grid, *values)
        elif source == "choose.cu" and values[0] == self._adjusted:
            logits = numbers(values[0], rows * VOCABULARY, ctypes.c_float).reshape(rows, VOCABULARY)
            self.put_chosen(drawn_tokens(logits, values[2]), *values[2:])
        elif source == "choose.cu":
            tokens = (self._now[0][self._scored[:rows]] + 1) % VOCABULARY
            logits = numbers(values[0], rows * VOCABULARY, ctypes.c_float).reshape(rows, VOCABULARY)
            logits[:] = np.arange(VOCABULARY) == tokens[:, None]
            self.put_chosen(tokens, *values[2:])
        else:
            super().launch(function, grid, values)

    @staticmethod
    def put_chosen(tokens: np.ndarray, choices: int, picked: int, chosen: int) -> None:
        """As choose.cu does."""
        how = numbers(choices, len(tokens) * step_memory.CHOICE.itemsize, ctypes.c_uint8).view(step_memory.CHOICE)
        numbers(picked, len(tokens))[:] = tokens
        numbers(chosen, int(how["slot"].max()) + 1)[how["slot"]] = tokens


def set_pages(new_pages: int, tables: int, count: int) -> None:
    """As set_pages.cu does."""
    new = numbers(new_pages, count * step_memory.NEW_PAGE.itemsize, ctypes.c_uint8).view(step_memory.NEW_PAGE)
    numbers(tables, int(new["place"].max()) + 1, ctypes.c_uint64)[new["place"]] = new["page"]


def drawn_tokens(logits: np.ndarray, choices: int) -> np.ndarray:
    """As choose.cu has them."""
    how = numbers(choices, len(logits) * step_memory.CHOICE.itemsize, ctypes.c_uint8).view(step_memory.CHOICE)
    tokens = logits.argmax(axis=1)
    for i, (row, each) in enumerate(zip(logits, how, strict=True)):
        if each["temperature"] > 0:
            limits = {name: each[name].item() for name in ("temperature", "top_k", "top_p", "min_p")}
            tokens[i] = choose_token(row, Sampling(**limits), each["random"])
    return tokens


def late_rows(rows: int, pointer: int) -> np.ndarray:
    return numbers(pointer, rows * LATE_ROW.itemsize, ctypes.c_uint8).view(LATE_ROW)


def adjust_rows(grid: tuple[int, ...], logits: int, vocabulary: int, rows: int, out: int) -> None:
    """As adjust.cu does."""
    for i, row in enumerate(late_rows(grid[1], rows)):
        before = numbers(logits + 4 * vocabulary * int(row["row"]), vocabulary, ctypes.c_float)
        after = numbers(out + 4 * vocabulary * i, vocabulary, ctypes.c_float)
        after[:] = before
        if row["count"]:
            nbytes = int(row["count"]) * ADJUSTMENT.itemsize
            for token, seen, minus, plus in numbers(int(row["adjustments"]), nbytes, ctypes.c_uint8).view(ADJUSTMENT):
                logit = before[token]
                if seen:
                    logit = logit * (row["above"] if logit > 0 else row["below"])
                after[token] = logit - minus + plus
        if row["mask"]:
            bits = numbers(int(row["mask"]), -(-vocabulary // 8), ctypes.c_uint8)
            after[np.unpackbits(bits, bitorder="little", count=vocabulary) == 0] = -np.inf


def log_probabilities(grid: tuple[int, ...], logits: int, vocabulary: int, rows: int, picked: int, out: int) -> None:
    """As log_probabilities.cu does."""
    tokens = numbers(picked, grid[0])
    scored = numbers(out, grid[0] * MOST_SCORED * SCORED_TOKEN.itemsize, ctypes.c_uint8).view(SCORED_TOKEN)
    for i, row in enumerate(late_rows(grid[0], rows)):
        if row["alternatives"] >= 0:
            scores = numbers(logits + 4 * vocabulary * int(row["row"]), vocabulary, ctypes.c_float)
            found = with_best(scores, int(tokens[i]), int(row["alternatives"]))
            scored[i * MOST_SCORED : i * MOST_SCORED + len(found)] = found


def chosen_tokens(tokens: int, chosen: int, rows: int) -> np.ndarray:
    """What embed.cu is fed: tokens, or ~slot."""
    given = numbers(tokens, rows).copy()
    slots = np.flatnonzero(given < 0)
    if len(slots):
        given[slots] = numbers(chosen, int((~given).max()) + 1)[~given[slots]]
    return given
