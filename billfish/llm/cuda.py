"""The decoder on a GPU: a model's matrices in bricks, its texts in pages, and a token's launches in one graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple, cast

import numpy as np

from billfish.backends import BACKENDS
from billfish.backends.cuda.backend import CudaBackend
from billfish.backends.cuda.compile import check_compiler
from billfish.backends.cuda.decoder import DeviceDecoder, captured
from billfish.backends.cuda.driver import (
    OutOfMemory,
    Pinned,
    Stream,
    check,
    check_device,
    copy_in,
    copy_out,
    current,
    device,
    driver,
    free_bytes,
    synchronize,
)
from billfish.backends.cuda.embedding import DeviceEmbedding
from billfish.backends.cuda.recurrent import feed_chunks
from billfish.backends.cuda.step_memory import CHOICE, PAGE, Batch, StepMemory
from billfish.core.errors import BackendUnavailable, DataError, ModelError, bad_argument, failure
from billfish.core.typing import Activations
from billfish.llm.cuda_blocks import BlockMaker
from billfish.llm.cuda_kv_cache import CudaCache, SequencePool
from billfish.llm.cuda_weights import GpuWeights
from billfish.llm.decoder_base import Decoder, Passage
from billfish.llm.kv_cache import Floats
from billfish.llm.model_weights import CALL, ModelTensors
from billfish.llm.sampler import Sampler

TOGETHER = 256  # texts that go on together, at most
LONG = 2048  # positions of a text from which on more CTAs share its keys
COLDEST = 1e-30  # of temperatures: below it, all but the best token have no chance, and float32 no inverse
SCORED = 64  # rows whose scores are in memory beside a prompt
EIGHT_BITS = ("fp8", "q8")  # x in products of prompts, where matrices have formats that can; Hopper's
CHUNK, FEW_CHUNK = 2048, 64  # rows of a prompt at once; on GPUs that are not Hopper the kernels take no more than 64


class Piece(NamedTuple):
    """Tokens of a text that are fed at once."""

    cache: CudaCache
    tokens: list[int]
    of: int  # the number of its passage
    last: bool  # of its passage, whose next token is asked for


class Ahead(NamedTuple):
    """A step that was launched before anybody asked for it: what has to be asked for."""

    cache: weakref.ref[CudaCache]
    position: int
    token: int
    choice: bytes
    batch_invariant: bool


class CudaDecoder(Decoder):
    """All layers on one GPU. x is float16, keys and values too."""

    usual = exact = None
    cache_types, cache_type = ("float16",), "float16"

    def __init__(self, tensors: ModelTensors, ordinal: int) -> None:
        super().__init__(tensors)
        self.device, self._ordinal, self._gpu = f"cuda:{ordinal}", ordinal, device(ordinal)
        check_compiler()
        self._hopper = self._gpu.capability == (9, 0)
        self.chunk = CHUNK if self._hopper else FEW_CHUNK
        needed, free = tensors.packed_bytes(), free_bytes(ordinal)
        if needed > free and not tensors.converted:  # whose sizes nobody knows before
            problem = f"the model needs {needed / 1e9:.1f} GB, and {self._gpu.name} has {free / 1e9:.1f} GB left"
            raise BackendUnavailable(failure(CALL, problem, "Use device='cpu', or a smaller model."))
        self._lock = RLock()  # the stream and the memory of steps are for one call at a time
        self._ahead: Ahead | None = None

    def pack(self, under_way: Callable[[], object]) -> None:
        under_way()
        weights = GpuWeights(self.tensors, self._ordinal)
        try:
            maker = BlockMaker(self.config, weights)
            blocks = [maker.block(i) for i in range(self.config.layers)]
            per_layer = self.config.per_layer_embedding
            layer_inputs = None if per_layer is None else maker.layer_inputs(per_layer)
            table, head = weights.embedding_and_head()
        except OutOfMemory:
            problem = f"{self._gpu.name} is out of memory after {weights.nbytes / 1e9:.1f} GB of the model"
            raise BackendUnavailable(failure(CALL, problem, "Use device='cpu', or a smaller model.")) from None
        self.nbytes = weights.nbytes
        self._layers = DeviceDecoder(
            blocks,
            DeviceEmbedding(table, maker.ropes(), float(np.float32(self.config.embedding_scale))),
            head,
            weights.send(self.last_norm / np.float32(self.config.logit_scale)),
            epsilon=self.config.norm_epsilon,
            layer_inputs=layer_inputs,
            logit_cap=self.config.logit_cap,
            tables=len(maker.layout.tables),
            ordinal=self._ordinal,
        )
        self._pages_of_text = -(-self.config.context // PAGE)
        stream = Stream(self._ordinal)
        self._stream = stream.pointer
        with current(self._ordinal):
            self._read = driver().CUevent(int(check(driver().cuEventCreate(2), "an event")))  # 2: without a time
        self._pool = SequencePool(maker.layout, stream, self._lock)
        self._chosen = Pinned(TOGETHER, self._ordinal)
        self._prompts: StepMemory | None = None
        self._tokens: TokenSteps | None = None

    @property
    def kernels(self) -> str:
        return f"{self._gpu.name} ({', '.join(sorted(self.tensors.kinds))})"

    def cache(self, capacity: int = 256) -> CudaCache:
        return CudaCache(self.config, self._pool, capacity)

    def check_activations(self, call: str, activations: str | None, usual: Activations | None) -> Activations | None:
        if activations is None or (activations in EIGHT_BITS and self._hopper):
            return cast("Activations | None", activations)
        expected = (
            " or ".join(map(repr, EIGHT_BITS)) + ", or none for x in float16" if self._hopper else "none: x is float16"
        )
        raise DataError(bad_argument(call, "activations", repr(activations), f"{expected}, on {self._gpu.name}"))

    @property
    def pages(self) -> SequencePool:
        return self._pool

    def check_device(self) -> None:
        check_device(self._ordinal)

    def prefill_budget(self, decoding: int) -> int:
        return self.chunk

    def __del__(self) -> None:
        """Waits for a step that is under way; then memory may go. Its stream may be gone already, where the decoder is
        collected as a part of a cycle."""
        if not hasattr(self, "_stream") or not hasattr(self, "_tokens"):
            return
        try:
            with current(self._ordinal):
                check(driver().cuCtxSynchronize(), "waiting for the device")
                if self._tokens is not None:
                    self._tokens.destroy_graphs()
                check(driver().cuEventDestroy(self._read), "an event")
        except Exception:  # the interpreter ends, and the driver may be gone
            return

    # ---- computing ----------------------------------------------------------------------------------------------

    def run(self, passages: Sequence[Passage], activations: Activations | None) -> Floats:
        pieces = self._pieces(passages)
        out = np.empty((sum(len(tokens) for _, tokens in passages), self.config.hidden), np.float32)
        starts = np.cumsum([0, *(len(tokens) for _, tokens in passages)])
        with self._working(passages):
            for group in self._groups(pieces):
                step, rows = self._prompt_step(), self._launch(group, activations)
                self._layers.finish(self._stream, step, rows)  # adds the last product
                hidden = np.empty((rows, self.config.hidden), np.float32)
                copy_out(hidden, step.at("hidden"), self._stream)
                row = 0
                for piece in group:
                    start = starts[piece.of]
                    out[start : start + len(piece.tokens)] = hidden[row : row + len(piece.tokens)]
                    starts[piece.of] += len(piece.tokens)
                    row += len(piece.tokens)
                self._taken(group)
        return out

    def logits(self, hidden: Floats, activations: Activations | None) -> Floats:
        self.check_hidden(hidden)
        out = np.empty((len(hidden), self.config.vocabulary), np.float32)
        with self._working([]):
            step = self._prompt_step()
            for start in range(0, len(hidden), SCORED):
                rows = np.ascontiguousarray(hidden[start : start + SCORED])
                copy_in(step.at("hidden"), rows, self._stream)
                self._layers.finish(self._stream, step, len(rows), added=False)
                self._layers.score(self._stream, step, len(rows))
                copy_out(out[start : start + SCORED], step.at("scores"), self._stream)
        return out

    def choose(
        self, passages: Sequence[Passage], samplers: Sequence[Sampler], activations: Activations | None
    ) -> list[int]:
        chosen = [0] * len(samplers)
        on_host = [i for i, sampler in enumerate(samplers) if sampler.needs_scores]
        here = [i for i in range(len(passages)) if i not in on_host]
        singles = [i for i in here if len(passages[i][1]) == 1 and i < len(samplers)]
        longer = [i for i in here if i not in singles]
        with self._working(passages):
            for start in range(0, len(singles), self._together):
                group = singles[start : start + self._together]
                tokens = self._go_on([passages[i] for i in group], [samplers[i] for i in group])
                for i, token in zip(group, tokens, strict=True):
                    chosen[i] = token
            pieces = self._pieces([passages[i] for i in longer], sum(i < len(samplers) for i in longer))
            for pieces_together in self._groups(pieces):
                scored = [longer[piece.of] for piece in pieces_together if piece.last]
                self._launch(pieces_together, activations, choices([samplers[i] for i in scored]))
                for i, token in zip(scored, self._choose_prompts(len(scored)), strict=True):
                    chosen[i] = token
                    samplers[i].move_on()
                self._taken(pieces_together)
            if on_host:
                ends = np.cumsum([len(passages[i][1]) for i in on_host])
                scores = self.logits(self.run([passages[i] for i in on_host], activations)[ends - 1], activations)
                for i, row in zip(on_host, scores, strict=True):
                    chosen[i] = samplers[i].choose(row)
        return chosen

    @contextmanager
    def _working(self, passages: Sequence[Passage]) -> Iterator[None]:
        """The device is current, and the decoder and all caches are this thread's."""
        for _, tokens in passages:
            self.check_tokens("llm.run", "tokens", tokens)
        with self._locked(passages), self._lock, current(self._ordinal):
            backend = BACKENDS["cuda"]
            assert isinstance(backend, CudaBackend)
            self._layers.batch_invariant = bool(backend.batch_invariant)
            for cache, tokens in passages:
                positions, context = len(cache.tokens) + len(tokens), self.config.context
                if positions > context:
                    problem = f"tokens and cache hold {positions} tokens; the model's context is {context}"
                    raise ModelError(failure("llm.run", problem))
                assert isinstance(cache, CudaCache)
                cache.check_state()
                cache.reserve(positions)
            yield

    # ---- passages of several tokens -----------------------------------------------------------------------------

    def _pieces(self, passages: Sequence[Passage], scored: int = 0) -> list[Piece]:
        """Where a text is cut does not depend on the texts beside it. The first pieces of all texts come first.
        scored: so many passages, the first ones, end with a row that gets scores."""
        pieces = []
        for of, (cache, tokens) in enumerate(passages):
            assert isinstance(cache, CudaCache)
            for start in range(0, len(tokens), self.chunk):
                part = tokens[start : start + self.chunk]
                pieces.append((start, Piece(cache, part, of, of < scored and start + len(part) == len(tokens))))
        return [piece for _, piece in sorted(pieces, key=lambda each: each[0])]

    def _groups(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Pieces that are fed together: as many as the memory of a step has rows for, and of a text one."""
        group, rows, texts = list[Piece](), 0, set[int]()
        for piece in pieces:
            if rows + len(piece.tokens) > self.chunk or len(group) == SCORED or piece.of in texts:
                yield group
                group, rows, texts = [], 0, set()
            group.append(piece)
            rows += len(piece.tokens)
            texts.add(piece.of)
        if group:
            yield group

    def _prompt_step(self) -> StepMemory:
        if self._prompts is None:
            self._prompts = self._layers.step(self.chunk, SCORED, self._pages_of_text, SCORED)
        return self._prompts

    def _launch(
        self, pieces: Sequence[Piece], activations: Activations | None, how: np.ndarray[Any, Any] | None = None
    ) -> int:
        """All layers for pieces of texts, and scores for the last row of each that is the last one: how many rows."""
        self._ahead = None  # its text may be another one now
        step, stream, size = self._prompt_step(), self._stream, self._layers.query_block
        blocks, spans, last, rows = list[tuple[int, int, int, int]](), list[tuple[int, int]](), [], 0
        for text, piece in enumerate(pieces):
            piece.cache.expect(len(piece.tokens))
            first, end = len(piece.cache.tokens), len(piece.cache.tokens) + len(piece.tokens)
            blocks += [(rows + p - first, min(size, end - p), text, p) for p in range(first, end, size)]
            spans.append((rows, len(piece.tokens)))
            rows += len(piece.tokens)
            if piece.last:
                last.append(rows - 1)
        blocks.sort(key=lambda block: -block[3])  # those with the most keys start first
        lengths = [len(piece.tokens) for piece in pieces]
        starts = [len(piece.cache.tokens) for piece in pieces]
        parts = {
            "tokens": [token for piece in pieces for token in piece.tokens],
            "positions": np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
            "texts": np.repeat(np.arange(len(pieces)), lengths),
            "spans": spans,
            "blocks": blocks,
            "scored": last,
        }
        for name, values in parts.items():
            copy_in(step.at(name), np.asarray(values, np.int32), stream)
        for text, piece in enumerate(pieces):
            for table, pages in enumerate(piece.cache.lists):
                copy_in(step.pages(table, text), self._pages(pages.pages), stream)
        copy_in(step.at("states"), np.array([piece.cache.state for piece in pieces], np.uint64), stream)
        if how is not None:
            copy_in(step.at("choices"), how, stream)
        chunks = self._feed_states(step, pieces)
        batch, x = Batch(rows, len(pieces), len(blocks), chunks=chunks), activations or "exact"
        self._layers.prepare(step, batch, scored=len(last), activations=x)
        self._layers.run(stream, step, batch, scored=len(last), activations=x)
        return rows

    def _feed_states(self, step: StepMemory, pieces: Sequence[Piece]) -> int:
        """Bring recurrent states to where the pieces begin, and tell the step of their chunks: how many there are."""
        chunks = []
        for cache, tokens, *_ in pieces:
            if cache.states is not None:
                start = len(cache.tokens)
                chunks.append(cache.states.prepare(start, len(tokens), self.ends_in(start, tokens)))
        return feed_chunks(self._stream, step, chunks) if chunks else 0

    def _choose_prompts(self, scored: int) -> list[int]:
        step = self._prompt_step()
        if scored:
            self._layers.choose(self._stream, step, scored)
        tokens = np.empty(scored, np.int32)
        copy_out(tokens, step.at("tokens"), self._stream)
        return [int(token) for token in tokens]

    def _pages(self, pages: list[int]) -> np.ndarray[Any, Any]:
        """As many as a row of the table has room for."""
        return np.array(pages[: self._pages_of_text], np.uint64)

    def _taken(self, pieces: Sequence[Piece]) -> None:
        """Keys and values are there."""
        for piece in pieces:
            piece.cache.tokens.extend(piece.tokens)
            if piece.cache.states is not None:
                piece.cache.states.done(len(piece.cache.tokens))

    # ---- a token of each text -----------------------------------------------------------------------------------

    @property
    def _together(self) -> int:
        return TOGETHER if self._hopper else FEW_CHUNK

    def _go_on(self, passages: Sequence[Passage], samplers: Sequence[Sampler]) -> list[int]:
        """The next token of texts that each got one token more."""
        ahead, self._ahead = self._ahead, None  # whatever happens below
        caches = [cache for cache, _ in passages if isinstance(cache, CudaCache)]
        tokens, positions = [fed[0] for _, fed in passages], [len(cache.tokens) for cache in caches]
        how = choices(samplers)
        if self._tokens is None or self._tokens.rows < len(passages):
            rows = 1 << (len(passages) - 1).bit_length()
            if self._tokens is not None:
                self._tokens.close()
                self._tokens = None  # before there is another
            self._tokens = TokenSteps(self._layers, rows, self._pages_of_text, self._stream)
        steps, alone = self._tokens, len(passages) == 1
        goes_on = alone and positions[0] + 1 < min(self.config.context, caches[0].capacity)
        for cache in caches:
            cache.expect(1 + goes_on)
        invariant = self._layers.batch_invariant
        asked = Ahead(weakref.ref(caches[0]), positions[0], tokens[0], how.tobytes(), invariant) if alone else None
        if asked is None or asked != ahead:
            steps.feed(tokens, positions, how, caches)
            with states_of(caches, positions, [self.ends_in(p, [t]) for p, t in zip(positions, tokens, strict=True)]):
                steps.launch(len(passages), long=max(positions) >= LONG)
        d = driver()
        source, count = steps.step.at("tokens"), len(passages)
        check(d.cuMemcpyDtoHAsync(self._chosen.pointer, source, 4 * count, self._stream), "copying from the device")
        check(d.cuEventRecord(self._read, self._stream), "an event")
        for sampler in samplers:
            sampler.move_on()
        if goes_on and caches[0].states is not None:
            goes_on = caches[0].states.keep()  # if nobody asks for the step, it has to be undone
        if goes_on:  # the next step begins while Python looks at this one's token
            how = choices(samplers)
            steps.feed(None, None, how, caches)
            with states_of(caches, [positions[0] + 1]):
                steps.launch(1, long=positions[0] + 1 >= LONG)
        check(d.cuEventSynchronize(self._read), "waiting for the device")
        chosen = [int(token) for token in self._chosen.array[:count]]
        if goes_on:
            self._ahead = Ahead(weakref.ref(caches[0]), positions[0] + 1, chosen[0], how.tobytes(), invariant)
        for cache, (_, fed) in zip(caches, passages, strict=True):
            cache.tokens.extend(fed)
        return chosen


@contextmanager
def states_of(
    caches: Sequence[CudaCache], positions: Sequence[int], ends: Sequence[Sequence[int]] = ((),)
) -> Iterator[None]:
    """Recurrent states are behind these positions when a decode step is launched, and one further after it. ends: of
    each cache, the positions where a message ends."""
    states = [cache.states for cache in caches if cache.states is not None]
    chunks = [each.prepare(start, 1, end) for each, start, end in zip(states, positions, ends, strict=bool(states))]
    yield
    for each, made, start in zip(states, chunks, positions, strict=bool(states)):
        each.save(made)
        each.done(start + 1)


class TokenSteps:
    """Steps of one token for each text: their memory, which keeps what it was fed; a graph for each number of texts,
    and another where one is long."""

    def __init__(self, layers: DeviceDecoder, rows: int, pages_of_text: int, stream: int) -> None:
        self.rows, self.step = rows, layers.step(rows, rows, pages_of_text, rows)
        self._layers, self._stream, self._pages_of_text = layers, stream, pages_of_text
        self._graphs: dict[Any, Any] = {}
        self._pages: dict[tuple[int, int], list[int]] = {}  # by row and table
        self._states: list[int] = []
        self._how = b""
        numbers = np.arange(rows, dtype=np.int32)
        copy_in(self.step.at("texts"), numbers, stream)
        copy_in(self.step.at("spans"), np.stack([numbers, np.ones_like(numbers)], axis=1), stream)

    def close(self) -> None:
        """Wait for what is under way, and let the graphs go."""
        synchronize(self._stream)
        self.destroy_graphs()

    def destroy_graphs(self) -> None:
        for graph in self._graphs.values():
            check(driver().cuGraphExecDestroy(graph), "a graph")
        self._graphs.clear()

    def feed(
        self,
        tokens: Sequence[int] | None,
        positions: Sequence[int] | None,
        how: np.ndarray[Any, Any],
        caches: Sequence[CudaCache],
    ) -> None:
        """None: the token that the step before chose, at the next position."""
        at = self.step.at
        for name, values in (("tokens", tokens), ("positions", positions)):
            if values is not None:
                self._copy(at(name), np.asarray(values, np.int32))
        if how.tobytes() != self._how:
            self._how = b""  # if this is interrupted
            self._copy(at("choices"), how)
            self._how = how.tobytes()
        for row, cache in enumerate(caches):
            for table, each in enumerate(cache.lists):
                pages = each.pages[: self._pages_of_text]
                if pages != self._pages.get((row, table)):
                    self._pages.pop((row, table), None)
                    self._copy(self.step.pages(table, row), np.array(pages, np.uint64))
                    self._pages[row, table] = pages
        states = [cache.state for cache in caches]
        if states != self._states:
            self._states = []
            self._copy(at("states"), np.array(states, np.uint64))
            self._states = states

    def _copy(self, to: int, array: np.ndarray[Any, Any]) -> None:
        """Returns when the array was read, which is before the device has it: nothing waits for steps under way."""
        check(driver().cuMemcpyHtoDAsync(to, array.ctypes.data, array.nbytes, self._stream), "copying to the device")

    def launch(self, rows: int, *, long: bool) -> None:
        """One step for the first `rows` texts. long: one of them has many positions."""
        batch = Batch(rows, rows, long=long)
        key = batch, self._layers.batch_invariant
        if key in self._graphs:
            check(driver().cuGraphLaunch(self._graphs[key], self._stream), "a graph")
            return

        def work(stream: int) -> None:
            self._layers.run(stream, self.step, batch, scored=rows)
            self._layers.choose(stream, self.step, rows)

        self._layers.prepare(self.step, batch, scored=rows)
        work(self._stream)  # loads what it takes, which a capture does not allow
        self._graphs[key] = captured(work, self._stream)


def choices(samplers: Sequence[Sampler]) -> np.ndarray[Any, Any]:
    """How the next tokens are chosen, as the GPU takes it."""

    def row(s: Sampler) -> tuple[float, float, int, int, float]:
        temperature = s.how.temperature if s.how.temperature > COLDEST else 0.0
        return temperature, s.how.top_p, min(s.how.top_k, 2**31 - 1), 0, s.peek()

    return np.array([row(sampler) for sampler in samplers], CHOICE)
