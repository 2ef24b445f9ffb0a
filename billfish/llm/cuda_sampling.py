"""Late sampling: rows of a step whose next token depends on more than logits, temperature, top_k, top_p and min_p.

These are rows with penalties, biases, a grammar, or log probabilities. Penalties and grammars depend on the token of
the step before, which the host knows only while the step runs. So such a row takes part in every step like the others,
and is sampled by launches behind the step, before the next one: the host reads the tokens of the step before, and then
sends the row's adjustments and its mask. Others do not wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.decoder import DeviceDecoder
from billfish.backends.cuda.driver import Buffer, Event, Pinned, Stream, check, driver, synchronize
from billfish.backends.cuda.late_rows import LATE_ROW, MOST_SCORED, SCORED_TOKEN, LateMemory
from billfish.backends.cuda.step_memory import ALIGNED, CHOICE, StepMemory
from billfish.llm.sampler import ADJUSTMENT, Sampler, Scored

FEWEST_ROWS, FEWEST_BYTES = 16, 1 << 16  # that there is memory for
SCORED_BYTES = MOST_SCORED * SCORED_TOKEN.itemsize  # of a row


class LateRow(NamedTuple):
    """row: of the step's logits. slot: in `chosen`."""

    row: int
    slot: int


class Staging:
    """Pinned memory that one step is sent from, and the end of its copies."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal, self.sent = ordinal, Event(ordinal)
        self._memory = Pinned(1 << 12, ordinal)

    def take(self, nbytes: int) -> Pinned:
        """Memory that no copy reads any more."""
        self.sent.wait()
        if self._memory.array.nbytes < nbytes:
            self._memory = Pinned(2 * nbytes, self._ordinal)
        return self._memory


class LateResult:
    """Tokens of late rows and their log probabilities."""

    def __init__(self, capacity: int, ordinal: int) -> None:
        """capacity: rows."""
        self.capacity = capacity
        self._memory, self._done = Pinned((4 + SCORED_BYTES) * capacity, ordinal), Event(ordinal)
        self._alternatives: list[int | None] = []

    def fetch(self, source: int, samplers: Sequence[Sampler], stream: int) -> None:
        """Copy from `source`, when the rows are sampled."""
        self._alternatives = [sampler.alternatives for sampler in samplers]
        nbytes = 4 * len(samplers)
        if any(count is not None for count in self._alternatives):
            nbytes = 4 * self.capacity + SCORED_BYTES * len(samplers)
        check(driver().cuMemcpyDtoHAsync(self._memory.pointer, source, nbytes, stream), "copying from the device")
        self._done.record(stream)

    def read(self) -> list[tuple[int, list[Scored]]]:
        """Wait for the rows: the token of each, and what its sampler wants to know of log probabilities."""
        self._done.wait()
        tokens = self._memory.array[: 4 * self.capacity].view(np.int32)
        scored = self._memory.array[4 * self.capacity :].view(SCORED_TOKEN).reshape(self.capacity, MOST_SCORED)
        found = list[tuple[int, list[Scored]]]()
        for token, row, count in zip(tokens, scored, self._alternatives, strict=False):
            best = [] if count is None else row[: 1 + count].tolist()
            found.append((int(token), best))
        return found

    def __del__(self) -> None:
        if hasattr(self, "_done"):
            with suppress(Exception):  # the driver may be gone
                self._done.wait()  # a copy may be under way


class LateSampling:
    """Samples late rows on one stream. Methods are for whoever holds the decoder's lock; the device is current."""

    STAGINGS = 2

    def __init__(self, layers: DeviceDecoder, stream: Stream) -> None:
        self._layers, self._stream = layers, stream
        self._stagings = [Staging(stream.ordinal) for _ in range(self.STAGINGS)]
        self._rows = self._count = 0
        self._inputs: Buffer | None = None
        self._outputs: Buffer | None = None
        self._logits: Buffer | None = None
        self._results: list[LateResult] = []  # that nobody reads

    def launch(self, step: StepMemory, late: Mapping[int, LateRow], samplers: Sequence[Sampler]) -> LateResult:
        """Sample the rows, in their order; under way when this returns. late: by the number of the sampler."""
        asked, rows = [samplers[number] for number in late], len(late)
        masks = [sampler.mask() for sampler in asked]
        adjustments = [None if s.adjustments is None else s.adjustments.entries for s in asked]
        nbytes = (CHOICE.itemsize + LATE_ROW.itemsize) * rows
        nbytes += sum(_aligned(0 if each is None else each.nbytes) for each in (*masks, *adjustments))
        self._grow(rows, nbytes)
        assert self._inputs is not None
        assert self._outputs is not None
        assert self._logits is not None
        self._count += 1
        staging = self._stagings[self._count % self.STAGINGS]
        memory, at = staging.take(nbytes), self._inputs.pointer
        how = memory.array[: CHOICE.itemsize * rows].view(CHOICE)
        how[:] = choices(asked)
        how["slot"] = [row.slot for row in late.values()]
        end = (CHOICE.itemsize + LATE_ROW.itemsize) * rows
        told = memory.array[CHOICE.itemsize * rows : end].view(LATE_ROW)
        told[:] = np.zeros((), LATE_ROW)
        told["row"] = [row.row for row in late.values()]
        told["alternatives"] = [-1 if sampler.alternatives is None else sampler.alternatives for sampler in asked]
        for i, (sampler, mask, entries) in enumerate(zip(asked, masks, adjustments, strict=True)):
            if mask is not None:
                told["mask"][i] = at + end
                memory.array[end : end + mask.nbytes] = mask
                end += _aligned(mask.nbytes)
            if entries is not None and sampler.adjustments is not None:
                told["adjustments"][i], told["count"][i] = at + end, len(entries)
                told["above"][i], told["below"][i] = sampler.adjustments.above, sampler.adjustments.below
                memory.array[end : end + entries.nbytes].view(ADJUSTMENT)[:] = entries
                end += _aligned(entries.nbytes)
        stream = self._stream.pointer
        check(driver().cuMemcpyHtoDAsync(at, memory.pointer, end, stream), "copying to the device")
        staging.sent.record(stream)
        picked, first = self._outputs.pointer, at + CHOICE.itemsize * rows
        about = LateMemory(first, at, self._logits.pointer, picked, picked + 4 * self._rows)
        scored = any(sampler.alternatives is not None for sampler in asked)
        self._layers.choose_late(stream, step, about, rows, scored=scored)
        result = self._results.pop() if self._results else LateResult(self._rows, self._stream.ordinal)
        result.fetch(picked, asked, stream)
        return result

    def give_back(self, result: LateResult) -> None:
        """Nobody reads it any more."""
        if result.capacity == self._rows:
            self._results.append(result)

    def _grow(self, rows: int, nbytes: int) -> None:
        """Memory for so many rows, and inputs of so many bytes."""
        ordinal = self._stream.ordinal
        if self._inputs is None or nbytes > self._inputs.nbytes:
            synchronize(self._stream.pointer)
            self._inputs = None
            self._inputs = Buffer(max(FEWEST_BYTES, 1 << nbytes.bit_length()), ordinal)
        if rows > self._rows:
            synchronize(self._stream.pointer)
            self._rows, self._outputs, self._logits, self._results = 0, None, None, []
            most = max(FEWEST_ROWS, 1 << (rows - 1).bit_length())
            self._outputs = Buffer((4 + SCORED_BYTES) * most, ordinal)
            self._logits = Buffer(4 * most * self._layers.vocabulary, ordinal)
            self._rows = most


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


COLDEST = 1e-30  # of temperatures: below it, all but the best token have no chance, and float32 no inverse


def choices(samplers: Sequence[Sampler], counts: Sequence[int] | None = None) -> NDArray[Any]:
    """How the next tokens are chosen, as the GPU takes it. counts: of each sampler; None: one token of each."""
    rows = list[tuple[float, float, float, int, int, int, float]]()
    for sampler, count in zip(samplers, [1] * len(samplers) if counts is None else counts, strict=True):
        how = sampler.how
        temperature = how.temperature if how.temperature > COLDEST else 0.0
        limits = temperature, how.top_p, how.min_p, min(how.top_k, 2**31 - 1), 0, 0
        rows += [(*limits, random) for random in sampler.upcoming(count)]
    return np.array(rows, CHOICE)
