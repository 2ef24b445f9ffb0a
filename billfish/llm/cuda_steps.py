"""Steps on a GPU: one pass over all layers, for the next tokens of some sequences and for prompts of others.

What the host knows of a step is written into pinned memory and goes to the device in one copy. Tables of pages stay
there, a row for each sequence; only pages that are new are sent, those of all sequences together. Nothing waits for the
device: a sequence can be fed the token that the step before is still choosing.

Every step begins with the copy of its inputs, and its first kernel starts when that copy is done. So no kernel of a
step waits for another one before it reads inputs or tables of pages (rotate.cu and attend.cu do so before
griddepcontrol.wait): nothing writes them while a step runs. Pages that are new are sent before the inputs.

The number of rows is padded to one of a few sizes. The launches of a size are recorded once, as a program in native
code. Where all sequences decode, they are a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.decoder import DeviceDecoder, captured
from billfish.backends.cuda.driver import (
    Buffer,
    Event,
    Pinned,
    Stream,
    check,
    copy_out,
    current,
    driver,
    launcher,
    recorded,
    synchronize,
)
from billfish.backends.cuda.recurrent import Chunk, chunk_inputs
from billfish.backends.cuda.step_memory import (
    CHOICE,
    MOST_NEW_PAGES,
    NEW_PAGE,
    Batch,
    StepMemory,
    input_layout,
    input_views,
)
from billfish.llm.cuda_blocks import SequenceLayout
from billfish.llm.cuda_kv_cache import CudaCache
from billfish.llm.cuda_sampling import LateResult, LateRow, LateSampling, Staging, choices
from billfish.llm.decoder_base import PENDING
from billfish.llm.sampler import Sampler

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of steps where all sequences decode
LONG = 2048  # positions of a sequence from which on more CTAs share its keys,
FEW_ENOUGH = 8  # where the sequences are so few that there are CTAs left
SCORED = 64  # rows of logits that there is memory for, at least
PROGRAMS_KEPT = 256


class Fed(NamedTuple):
    """Tokens of a sequence that go into one step."""

    cache: CudaCache
    tokens: list[int]
    number: int  # of the passage they belong to
    last: bool  # of the passage
    ends: Sequence[int]  # positions behind messages that end in them


def padded(count: int) -> int:
    """The size of a step where so many sequences decode."""
    return next((size for size in DECODE_SIZES if size >= count), count)


def padded_rows(count: int) -> int:
    """The rows of a step with prompts: at most an eighth more."""
    step = 8 if count <= 64 else 16 if count <= 256 else 32 if count <= 512 else 64
    return -(-count // step) * step


def row_sizes(most: int) -> list[int]:
    """The rows that steps with prompts may have."""
    return sorted({min(padded_rows(count), most) for count in range(8, most + 1, 8)})


def scored_sizes(sequences: int) -> set[int]:
    """The scored rows that steps with prompts may have: of sequences that decode, padded, and of prompts that end."""
    most = max(padded(decoding) + sequences - decoding for decoding in range(1, sequences + 1))
    return {*(size for size in DECODE_SIZES if size <= most), padded(most)}


class TableRow:
    """A sequence's row in the tables of pages, and what the device has there. It is also the sequence's slot in
    `chosen`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.owner: weakref.ref[CudaCache] | None = None
        self.pages: dict[int, list[int]] = {}  # by table

    def belongs_to(self, cache: CudaCache) -> bool:
        return self.owner is not None and self.owner() is cache


class Change(NamedTuple):
    """The pages of a sequence. The device does not know those from index `first` on."""

    row: TableRow
    table: int
    first: int
    pages: list[int]


class ScratchPages(NamedTuple):
    pages: list[int]


class Scratch:
    """What rows write to that fill up a step: a sequence of one page of each table, with recurrent states."""

    def __init__(self, layout: SequenceLayout, ordinal: int) -> None:
        self._memory = [Buffer(table.page_bytes, ordinal) for table in layout.tables]
        self._states = Buffer(layout.state_bytes, ordinal) if layout.state_bytes else None
        self.lists: list[Any] = [ScratchPages([buffer.pointer]) for buffer in self._memory]
        self.state = 0 if self._states is None else self._states.pointer
        with current(ordinal):
            for buffer in (*self._memory, *([] if self._states is None else [self._states])):
                check(driver().cuMemsetD8(buffer.pointer, 0, max(16, buffer.nbytes)), "clearing")
            synchronize(0)  # no other stream waits for this one


class Result:
    """What a step chooses: tokens, in the order of its scored rows."""

    def __init__(self, count: int, ordinal: int) -> None:
        self._tokens, self._done = Pinned(4 * count, ordinal), Event(ordinal)
        self._logits: Pinned | None = None
        self.numbers: dict[int, range] = {}  # of passages: the places of each in `tokens`
        self.places: dict[int, int] = {}  # of drafts that want logits: the first place of each in these
        self.late: dict[int, LateRow] = {}  # of passages: rows that are sampled late
        self.late_result: LateResult | None = None  # their tokens, when that is under way
        self._hidden: Pinned | None = None
        self.kept: list[tuple[weakref.ref[CudaCache], int, int]] = []  # caches that keep hidden states: first and count
        self.count = count

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self._tokens.array.view(np.int32)

    def logits(self, number: int, vocabulary: int) -> NDArray[np.float32]:
        """[rows of the passage, vocabulary]"""
        assert self._logits is not None
        rows = len(self.numbers[number])
        first, nbytes = 4 * vocabulary * self.places[number], 4 * vocabulary * rows
        return self._logits.array[first : first + nbytes].view(np.float32).reshape(rows, vocabulary)

    def fetch(self, stream: Stream, step: StepMemory, rows: Mapping[int, range], vocabulary: int) -> None:
        """Copy, when the step is done. rows: of passages that want logits, the scored rows of each."""
        size, d = 4 * vocabulary, driver()
        if self.numbers:
            source, nbytes = step.at("picked"), 4 * max(places.stop for places in self.numbers.values())
            check(d.cuMemcpyDtoHAsync(self._tokens.pointer, source, nbytes, stream.pointer), "copying from the device")
        needed = size * sum(map(len, rows.values()))
        if needed and (self._logits is None or self._logits.array.nbytes < needed):
            self._logits = Pinned(needed, stream.ordinal)
        self.places, place = {}, 0
        for number, own in rows.items():
            assert self._logits is not None
            self.places[number] = place
            to, source = self._logits.pointer + size * place, step.at("logits") + size * own.start
            check(d.cuMemcpyDtoHAsync(to, source, size * len(own), stream.pointer), "copying from the device")
            place += len(own)
        self._done.record(stream.pointer)

    def fetch_hidden(
        self, stream: Stream, step: StepMemory, rows: Sequence[tuple[CudaCache, range]], width: int
    ) -> None:
        """Copy hidden states, before `fetch`. rows: of the step, for each cache that keeps them."""
        size, place = 4 * width, 0
        needed = size * sum(len(own) for _, own in rows)
        if self._hidden is None or self._hidden.array.nbytes < needed:
            self._hidden = Pinned(needed, stream.ordinal)
        for cache, own in rows:
            to, source = self._hidden.pointer + size * place, step.at("hidden") + size * own.start
            copied = driver().cuMemcpyDtoHAsync(to, source, size * len(own), stream.pointer)
            check(copied, "copying from the device")
            self.kept.append((weakref.ref(cache), len(cache.tokens), len(own)))
            place += len(own)

    def wait(self) -> None:
        self._done.wait()

    def keep_hidden(self, width: int) -> None:
        """Give caches the hidden states of their tokens. The step is done."""
        place = 0
        for found, first, count in self.kept:
            cache = found()
            if self._hidden is not None and cache is not None and cache.hidden is not None:
                rows = self._hidden.array[4 * width * place : 4 * width * (place + count)]
                cache.hidden.put(first, rows.view(np.float32).reshape(count, width))
            place += count
        self.kept = []

    def __del__(self) -> None:
        if hasattr(self, "_done"):
            with suppress(Exception):  # the driver may be gone
                self._done.wait()  # a copy may be under way


class CudaSteps:
    """Launches steps on one stream. Methods are for whoever holds the decoder's lock; the device is current.

    sequences: there is memory for steps of so many; it grows when it must.
    """

    memory: StepMemory
    STAGINGS = 3  # a step that runs, one that waits behind it, and one that is being written

    def __init__(
        self, layers: DeviceDecoder, stream: Stream, scratch: Scratch, *, chunk: int, most_rows: int, pages: int
    ) -> None:
        """most_rows: of a step. pages: of a sequence, at most."""
        self._layers, self._stream, self._scratch = layers, stream, scratch
        self._chunk, self.most_rows, self._pages = chunk, most_rows, pages
        self.sequences = self.captures = 0
        self._late = LateSampling(layers, stream)
        self._stagings = [Staging(stream.ordinal) for _ in range(self.STAGINGS)]
        self._results: list[Result] = []  # that nobody reads
        self._programs: OrderedDict[Any, Any] = OrderedDict()
        self._graphs: dict[Any, Any] = {}
        self._count = 0

    # ---- memory ---------------------------------------------------------------------------------------------------

    def grow(self, sequences: int) -> StepMemory:
        """Memory for steps of up to so many sequences."""
        if sequences > self.sequences:
            if self.sequences:
                synchronize(self._stream.pointer)
                self.destroy_graphs()
                self._programs.clear()
                del self.memory
            self.sequences = padded(sequences)
            scored, rows = max(SCORED, self.sequences * 3 // 2), min(self.most_rows, self._chunk + self.sequences)
            # Rows of the last two steps stay: the next one may feed tokens that are chosen there.
            numbers = 3 * self.sequences
            self.memory = self._layers.step(rows, numbers + 1, self._pages, scored)
            self._rows = OrderedDict((i, TableRow(i)) for i in range(numbers))  # the one used longest ago first
            self._scratch_row = TableRow(numbers)
            self._results = []
        return self.memory

    def destroy_graphs(self) -> None:
        for graph in self._graphs.values():
            check(driver().cuGraphExecDestroy(graph), "a graph")
        self._graphs.clear()

    def _row_of(self, cache: CudaCache) -> TableRow:
        """The row of a cache; that of another one which was used longest ago, if it has none."""
        row: TableRow = cache.row
        if not self.knows(cache):
            row = next(iter(self._rows.values()))
            row.owner, row.pages = weakref.ref(cache), {}
            cache.row = row
        self._rows.move_to_end(row.number)
        return row

    def knows(self, cache: CudaCache) -> bool:
        """Whether the token that was chosen last for a cache is on the device."""
        row: TableRow | None = cache.row
        return row is not None and row.belongs_to(cache) and self._rows.get(row.number) is row

    # ---- a step -----------------------------------------------------------------------------------------------------

    def launch(
        self,
        decoding: Sequence[Fed],
        prompts: Sequence[Fed],
        samplers: Mapping[int, Sampler],
        activations: str = "exact",
    ) -> Result:
        """One step; it is under way when this returns. Each of `decoding` has one token, and behind it those that were
        drafted: a row each, with the sums of a sequence that decodes alone. samplers: of passages whose next token is
        asked for, by number; `sample_late` chooses some of them. Of `prompts`, those end with this step."""
        step = self.memory
        self._count += 1
        fed = (*decoding, *prompts)
        for each in fed:
            each.cache.expect(len(each.tokens))
        chunks = self._prepare_states(decoding, prompts)
        batch = self._batch(decoding, prompts, samplers, chunks[len(decoding) :])
        staging, views, slots, changes = self._stage(batch, fed)
        places = self._fill(views, batch, decoding, prompts, slots, samplers)
        for name, values in chunk_inputs(batch.decoding, chunks[len(decoding) :]).items() if chunks else ():
            views[name][:] = values
        self._send(staging, batch, changes)
        self._issue(batch, activations)
        for each, made in zip(decoding, chunks, strict=False):
            if each.cache.states is not None:
                each.cache.states.save(made)
        result = self._results.pop() if self._results else Result(step.scored, self._stream.ordinal)
        asked = {number: rows for number, rows in places.items() if number in samplers}
        with_scores = {number: rows for number, rows in asked.items() if samplers[number].needs_scores}
        late = {number: rows.start for number, rows in with_scores.items() if len(rows) == 1}
        # Whether a row behind a draft counts, and its penalties and mask, depend on the rows before it: the host looks.
        drafted = {number: rows for number, rows in with_scores.items() if number not in late}
        slot_of = {each.number: slot for each, slot in zip(fed, slots, strict=True) if each.number in late}
        result.late = {number: LateRow(row, slot_of[number]) for number, row in late.items()}
        result.numbers = {number: rows for number, rows in asked.items() if number not in late}
        if any(each.cache.hidden is not None for each in fed):
            kept = [(cache, rows) for cache, rows in rows_in(batch, decoding, prompts) if cache.hidden is not None]
            self._layers.finish(self._stream.pointer, step, max(rows.stop for _, rows in kept))  # adds the last product
            result.fetch_hidden(self._stream, step, kept, self._layers.hidden)
        result.fetch(self._stream, step, drafted, self._layers.vocabulary)
        return result

    def sample_late(self, result: Result, samplers: Sequence[Sampler]) -> None:
        """Sample the late rows of the last step: when the tokens before them are known, and before the next step."""
        result.late_result = self._late.launch(self.memory, result.late, samplers)

    def give_back(self, result: Result) -> None:
        """Nobody reads it any more."""
        if result.late_result is not None:
            self._late.give_back(result.late_result)
            result.late_result = None
        result.kept = []
        if result.count == self.memory.scored:
            self._results.append(result)

    def hidden(self, fed: Sequence[Fed], activations: str) -> NDArray[np.float32]:
        """One step for passages of any length: hidden states [all rows], before the last norm."""
        self._count += 1
        for each in fed:
            each.cache.expect(len(each.tokens))
        chunks = self._prepare_states([], fed)
        batch = self._batch([], fed, {}, chunks)
        staging, views, slots, changes = self._stage(batch, fed)
        self._fill(views, batch, [], fed, slots, {})
        for name, values in chunk_inputs(0, chunks).items() if chunks else ():
            views[name][:] = values
        self._send(staging, batch, changes)
        self._issue(batch, activations)
        rows = sum(len(each.tokens) for each in fed)
        self._layers.finish(self._stream.pointer, self.memory, rows)  # adds the last product
        hidden = np.empty((rows, self._layers.hidden), np.float32)
        copy_out(hidden, self.memory.at("hidden"), self._stream.pointer)
        return hidden

    def _prepare_states(self, decoding: Sequence[Fed], prompts: Sequence[Fed]) -> list[list[Chunk]]:
        """Bring recurrent states to where the tokens begin: the chunks of each sequence; none for other models. Behind
        drafted tokens the states are in other memory."""
        chunks = list[list[Chunk]]()
        for cache, tokens, _, _, ends in (*decoding, *prompts):
            if cache.states is not None:
                rows = 1 if len(chunks) < len(decoding) else len(tokens)
                chunks.append(cache.states.prepare(len(cache.tokens), rows, ends))
        return chunks

    def _batch(
        self,
        decoding: Sequence[Fed],
        prompts: Sequence[Fed],
        samplers: Mapping[int, Sampler],
        chunks: Sequence[Sequence[Chunk]],
    ) -> Batch:
        """What fits, of the sizes that there are programs for."""
        decodes = min(padded(rows_of(decoding)), self.memory.rows) if decoding else 0
        long = len(decoding) <= FEW_ENOUGH and any(len(each.cache.tokens) >= LONG for each in decoding)
        batch = Batch(decodes, decodes, scored=decodes, long=long and not self._layers.batch_invariant)
        if not prompts:
            return batch
        rows = decodes + sum(len(each.tokens) for each in prompts)
        size = self._layers.query_block
        blocks = sum(-(-len(each.tokens) // size) for each in prompts)
        scored = decodes + sum(each.number in samplers for each in prompts)
        return replace(
            batch,
            rows=min(padded_rows(rows), self.memory.rows),
            prompts=len(prompts) if chunks else 0,
            blocks=-(-blocks // 8) * 8 if blocks <= 64 else -(-blocks // 32) * 32,
            chunks=sum(map(len, chunks)),
            scored=min(padded(scored), self.memory.scored) if scored else 0,
        )

    def _stage(
        self, batch: Batch, fed: Sequence[Fed]
    ) -> tuple[Staging, dict[str, NDArray[Any]], list[int], list[Change]]:
        """Pinned memory for the inputs of the step, views of its parts, the slots of the sequences, and the pages that
        the device does not know."""
        rows, changes = [self._row_of(each.cache) for each in fed], list[Change]()
        caches: list[CudaCache | Scratch] = [*(each.cache for each in fed), self._scratch]
        for row, cache in zip((*rows, self._scratch_row), caches, strict=True):
            for table, each in enumerate(cache.lists):
                known, pages = row.pages.get(table, []), each.pages[: self._pages]
                if pages != known:
                    first = next((i for i, (a, b) in enumerate(zip(pages, known, strict=False)) if a != b), len(known))
                    changes.append(Change(row, table, min(first, len(pages)), pages))
        new_pages = sum(len(change.pages) - change.first for change in changes)
        staging = self._stagings[self._count % self.STAGINGS]
        memory = staging.take(input_layout(batch)[1] + NEW_PAGE.itemsize * new_pages)
        return staging, input_views(batch, memory.array), [row.number for row in rows], changes

    def _fill(
        self,
        views: dict[str, NDArray[Any]],
        batch: Batch,
        decoding: Sequence[Fed],
        prompts: Sequence[Fed],
        slots: Sequence[int],
        samplers: Mapping[int, Sampler],
    ) -> dict[int, range]:
        """Write the inputs of a step: the scored rows of each passage that has some. slots: of the sequences. Rows
        without a token, up to the size of the step, are tokens of the scratch sequence at position 0."""
        scratch, count = self._scratch_row.number, rows_of(decoding)
        tokens, positions, sequences, blocks = (views[name] for name in ("tokens", "positions", "sequences", "blocks"))
        tokens[:], positions[:], sequences[:] = 0, 0, scratch
        lengths = np.array([len(each.tokens) for each in decoding], np.int32)
        starts, whose = np.cumsum(lengths) - lengths, np.repeat(np.arange(len(decoding)), lengths)
        before = np.array([len(each.cache.tokens) for each in decoding], np.int32)
        fed = np.array([token for each in decoding for token in each.tokens], np.int32)
        sequences[:count] = np.array(slots[: len(decoding)], np.int32)[whose]
        positions[:count] = (before - starts)[whose] + np.arange(count)
        tokens[:count] = np.where(fed == PENDING, ~sequences[:count], fed)
        blocks[:] = 0, 0, scratch, 0
        decodes = blocks[: batch.decoding].T
        decodes[0], decodes[2] = np.arange(batch.decoding), sequences[: batch.decoding]
        decodes[1, :count], decodes[3] = before[whose], positions[: batch.decoding]
        views["states"][:] = self._scratch.state
        if self._scratch.state:
            views["states"][:count] = [state for each in decoding for state in each.cache.row_states(len(each.tokens))]
        views["counts"][:] = 1
        views["counts"][:count] = 0
        views["counts"][starts] = lengths
        row, of_prompts, ends = batch.decoding, list[tuple[int, int, int, int]](), list[tuple[int, int]]()
        size = self._layers.query_block
        for i, (cache, part, number, *_) in enumerate(prompts):
            first, end, sequence = len(cache.tokens), len(cache.tokens) + len(part), slots[len(decoding) + i]
            tokens[row : row + len(part)] = part
            positions[row : row + len(part)] = np.arange(first, end)
            sequences[row : row + len(part)] = sequence
            of_prompts += [(row + p - first, min(size, end - p), sequence, p) for p in range(first, end, size)]
            if batch.prompts:
                views["states"][batch.decoding + i] = cache.state
            row += len(part)
            if number in samplers:
                ends.append((number, row - 1))
        of_prompts.sort(key=lambda block: -block[3])  # those with the most keys start first
        blocks[batch.decoding : batch.decoding + len(of_prompts)] = of_prompts or np.empty((0, 4))
        return self._fill_choices(views, batch, decoding, ends, prompts, slots, samplers)

    def _fill_choices(
        self,
        views: dict[str, NDArray[Any]],
        batch: Batch,
        decoding: Sequence[Fed],
        ends: Sequence[tuple[int, int]],
        prompts: Sequence[Fed],
        slots: Sequence[int],
        samplers: Mapping[int, Sampler],
    ) -> dict[int, range]:
        """A sequence with a draft has its tokens chosen in no slot: the next one to feed is known when all are read."""
        scored, how = views["scored"], views["choices"]
        scored[:] = 0
        scored[: batch.decoding] = np.arange(batch.decoding)
        scored[batch.decoding : batch.decoding + len(ends)] = [row for _, row in ends]
        how[:] = np.zeros((), CHOICE)
        how["slot"] = self._scratch_row.number
        places, row = dict[int, range](), 0
        for each in decoding:
            places[each.number] = range(row, row + len(each.tokens))
            row += len(each.tokens)
        places |= {number: range(batch.decoding + i, batch.decoding + i + 1) for i, (number, _) in enumerate(ends)}
        now = {number for number, sampler in samplers.items() if not sampler.needs_scores}
        both = zip((*decoding, *prompts), slots, strict=True)
        chosen = [(samplers[each.number], places[each.number], slot) for each, slot in both if each.number in now]
        which = [place for _, own, _ in chosen for place in own]
        how[which] = choices([sampler for sampler, *_ in chosen], [len(own) for _, own, _ in chosen])
        alone = [(own.start, slot) for _, own, slot in chosen if len(own) == 1]
        how["slot"][[place for place, _ in alone]] = [slot for _, slot in alone]
        return places

    def _send(self, staging: Staging, batch: Batch, changes: Sequence[Change]) -> None:
        """Send new pages, then the inputs in one copy. Kernels of the step start after that copy."""
        nbytes, stream = input_layout(batch)[1], self._stream.pointer
        memory = staging.take(nbytes)
        if changes:
            self._send_pages(memory, nbytes, changes)
        sent = driver().cuMemcpyHtoDAsync(self.memory.at("inputs"), memory.pointer, nbytes, stream)
        check(sent, "copying to the device")
        staging.sent.record(stream)

    def _send_pages(self, memory: Pinned, start: int, changes: Sequence[Change]) -> None:
        """Send the new pages of all sequences: one copy and one launch for up to MOST_NEW_PAGES. start: the first free
        byte of `memory`."""
        step, stream, size = self.memory, self._stream.pointer, NEW_PAGE.itemsize
        new = list[tuple[int, int]]()
        for row, table, first, pages in changes:
            row.pages.pop(table, None)  # if this is interrupted
            place = step.page_place(table, row.number)
            new += [(place + i, pages[i]) for i in range(first, len(pages))]
        memory.array[start : start + size * len(new)].view(NEW_PAGE)[:] = new
        for done in range(0, len(new), MOST_NEW_PAGES):
            count = min(MOST_NEW_PAGES, len(new) - done)
            source = memory.pointer + start + size * done
            sent = driver().cuMemcpyHtoDAsync(step.at("new_pages"), source, size * count, stream)
            check(sent, "copying to the device")
            self._layers.set_pages(stream, step, count)
        for row, table, _, pages in changes:
            row.pages[table] = pages

    # ---- programs and graphs ----------------------------------------------------------------------------------------

    def _issue(self, batch: Batch, activations: str) -> None:
        key = batch, activations, self._layers.batch_invariant
        if batch.rows > batch.decoding:
            self._program(key)(self._stream.pointer)
        elif key in self._graphs:
            check(driver().cuGraphLaunch(self._graphs[key], self._stream.pointer), "a graph")
        else:
            program = self._program(key)
            program(self._stream.pointer)  # loads what it takes, which a capture does not allow
            self._graphs[key] = captured(program, self._stream.pointer)
            self.captures += 1
            del self._programs[key]

    def _program(self, key: tuple[Batch, str, bool]) -> Any:
        """The launches of a step of such a size, recorded when it first comes."""
        batch, activations, _ = key
        program = self._programs.pop(key, None)
        if program is None:
            self._layers.prepare(self.memory, batch, activations=activations)
            program = launcher().Program()
            with recorded(program):
                self._layers.run(self._stream.pointer, self.memory, batch, activations=activations)
                if batch.scored:
                    self._layers.choose(self._stream.pointer, self.memory, batch.scored)
            while len(self._programs) >= PROGRAMS_KEPT:
                self._programs.popitem(last=False)
        self._programs[key] = program  # the last one
        return program

    def warm(self, sequences: int, activations: str) -> None:
        """Make ready what steps of up to so many sequences take: graphs of all sizes, and the kernels of prompts."""
        self.grow(sequences)
        sequences, invariant = padded(sequences), self._layers.batch_invariant
        for size in [size for size in DECODE_SIZES if size <= sequences]:
            for long in (False, True)[: 1 + (size <= FEW_ENOUGH and not invariant)]:
                batch = Batch(size, size, scored=size, long=long)
                if (batch, activations, invariant) not in self._graphs:
                    self._count += 1
                    staging, views, slots, changes = self._stage(batch, [])
                    self._fill(views, batch, [], [], slots, {})
                    self._send(staging, batch, changes)
                    self._issue(batch, activations)
        rows = self.memory.rows
        batches = [Batch(count, 0, blocks=8, scored=1) for count in row_sizes(rows)]
        # Padded rows that decode and prompts that end are scored together: more rows than in any graph.
        scored = {min(size, self.memory.scored, rows) for size in scored_sizes(sequences)}
        batches += [Batch(rows, 0, blocks=8, scored=size) for size in sorted(scored) if size > sequences]
        if not self._scratch.state:  # a model without recurrent layers
            for batch in batches:
                self._program((batch, activations, invariant))
        self._layers.prepare_late(self.memory)
        synchronize(self._stream.pointer)


def rows_of(decoding: Sequence[Fed]) -> int:
    """One for each token."""
    return sum(len(each.tokens) for each in decoding)


def rows_in(batch: Batch, decoding: Sequence[Fed], prompts: Sequence[Fed]) -> list[tuple[CudaCache, range]]:
    """Which rows of a step each sequence has."""
    found, row = list[tuple[CudaCache, range]](), 0
    for i, each in enumerate((*decoding, *prompts)):
        row = batch.decoding if i == len(decoding) else row
        found.append((each.cache, range(row, row + len(each.tokens))))
        row += len(each.tokens)
    return found
