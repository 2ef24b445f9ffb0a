"""The decoder on a GPU: a model's matrices in bricks, its sequences in pages, and steps that nothing waits for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import RLock
from typing import NamedTuple, cast

import numpy as np

from billfish.backends import BACKENDS
from billfish.backends.cuda.backend import CudaBackend
from billfish.backends.cuda.compile import check_compiler
from billfish.backends.cuda.decoder import DeviceDecoder
from billfish.backends.cuda.driver import (
    OutOfMemory,
    Stream,
    check,
    check_device,
    copy_in,
    copy_out,
    current,
    device,
    driver,
    free_bytes,
)
from billfish.backends.cuda.embedding import DeviceEmbedding
from billfish.backends.cuda.step_memory import PAGE
from billfish.core.errors import BackendUnavailable, DataError, ModelError, bad_argument, failure
from billfish.core.typing import Activations, CacheType
from billfish.llm.cuda_blocks import BlockMaker
from billfish.llm.cuda_kv_cache import CudaCache, SequencePool
from billfish.llm.cuda_mtp import CudaMtpDecoder
from billfish.llm.cuda_sampling import choices
from billfish.llm.cuda_states import SequenceStates
from billfish.llm.cuda_steps import SCORED, CudaSteps, Fed, Result, Scratch, padded
from billfish.llm.cuda_weights import GpuWeights
from billfish.llm.decoder_base import PENDING, Decoder, Passage, PendingStep, with_drafts
from billfish.llm.drafting.drafter import MOST_DRAFTED
from billfish.llm.drafting.mtp import PIECE
from billfish.llm.kv_cache import Floats
from billfish.llm.model_weights import CALL, ModelTensors
from billfish.llm.sampler import NextToken, Sampler

TOGETHER = 512  # sequences that are in one step, at most
FP8_CAPABILITY = 8, 9  # compute capability from which on GPUs convert E4M3
EIGHT_BITS = ("fp8", "q8")  # x in products of prompts, where matrices have formats that can; Hopper's
CHUNK, FEW_CHUNK = 2048, 64  # rows of a prompt at once; on GPUs that are not Hopper the kernels take no more than 64


class CudaPending(PendingStep):
    """Steps under way for some passages: one, or several where the passages are long or many."""

    def __init__(
        self,
        decoder: CudaDecoder,
        caches: Sequence[CudaCache],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        """drafts: none of any, or of each sampler."""
        self._decoder: CudaDecoder | None = decoder
        self._lock = decoder.lock  # the next step of another thread may be what samples late rows
        self.drafts = drafts or [()] * len(samplers)
        self._caches, self._samplers = [weakref.ref(cache) for cache in caches], samplers
        self._numbers = {id(cache): number for number, cache in enumerate(caches)}  # of those that are there
        self._lengths = [len(cache.tokens) for cache in caches]
        self.results: list[Result] = []
        self._places: list[tuple[weakref.ref[CudaCache], int]] = []  # where caches hold PENDING
        self._choices: list[list[NextToken]] | None = None
        self.late: Result | None = None  # the step whose late rows are not sampled yet
        self.befores: list[CudaPending] = []  # which choose the tokens that late rows are fed
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._choices is not None

    def token_of(self, cache: CudaCache) -> int:
        return self.choices()[self._numbers[id(cache)]][-1].token

    def will_fill(self, cache: CudaCache) -> None:
        """The last token of the cache is PENDING."""
        self._places.append((weakref.ref(cache), len(cache.tokens) - 1))

    def undo(self) -> None:
        """The caches hold what they held before."""
        for cache, length in zip(self._caches, self._lengths, strict=True):
            if (found := cache()) is not None:
                del found.tokens[length:]
                if found.states is not None:
                    found.states.drop_rows()

    def sample_late(self) -> None:
        """An error is raised by `choices`: the next step, which may not want these rows, calls this as well."""
        with self._lock:
            late, self.late = self.late, None
            if late is None or self._decoder is None:
                return
            try:
                for before in self.befores:
                    before.choices()
                self._decoder.sample_late(late, self._samplers)
            except BaseException as error:
                self._error = error
            self.befores = []

    def choices(self) -> list[list[NextToken]]:
        with self._lock:
            if self._choices is None:
                decoder = self._decoder
                assert decoder is not None
                self.sample_late()
                try:
                    if self._error is not None:
                        raise self._error
                    chosen = decoder.read(self.results, self._samplers, self.drafts)
                except BaseException:
                    self.undo()
                    raise
                self._choices, self.results, self._decoder = chosen, [], None
                for cache, length, draft, own in zip(self._caches, self._lengths, self.drafts, chosen, strict=False):
                    if draft and (found := cache()) is not None:
                        del found.tokens[length + len(own) :]
                        if found.states is not None:
                            decoder.settle(found.states, length, len(own))
                for cache, place in self._places:
                    found = cache()
                    if found is not None and place < len(found.tokens) and found.tokens[place] == PENDING:
                        found.tokens[place] = chosen[self._numbers[id(found)]][-1].token
            return self._choices


class Ahead(NamedTuple):
    """A step that was submitted before anybody asked for it: what has to be asked for."""

    cache: weakref.ref[CudaCache]
    position: int
    choice: bytes
    batch_invariant: bool
    before: CudaPending  # which chose the token that was fed
    result: Result


class CudaDecoder(Decoder):
    """All layers on one GPU. x is float16, keys and values are float16 or E4M3."""

    usual = exact = None
    cache_types, cache_type = ("float16", "fp8"), "float16"
    overlaps = True

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
        self.lock = RLock()  # the stream and the memory of steps are for one call at a time
        self._ahead: Ahead | None = None
        self._late: weakref.ref[CudaPending] | None = None  # whose last step has late rows that are not sampled

    def set_cache_type(self, cache_type: CacheType) -> None:
        """Set the type of the KV cache. Raises for a GPU that cannot convert E4M3, and once the weights are packed."""
        if cache_type == "fp8" and self._gpu.capability < FP8_CAPABILITY:
            major, minor = self._gpu.capability
            expected = f"'float16' on {self._gpu.name}: fp8 needs compute capability 8.9, this GPU has {major}.{minor}"
            raise DataError(bad_argument(CALL, "cache_type", repr(cache_type), expected))
        if cache_type != self.cache_type and hasattr(self, "_pool"):
            problem = f"the KV cache of this model was allocated as {self.cache_type} already"
            raise ModelError(failure(CALL, problem, f"Load it with cache_type={cache_type!r}."))
        super().set_cache_type(cache_type)

    def pack(self, under_way: Callable[[], object]) -> None:
        under_way()
        weights = GpuWeights(self.tensors, self._ordinal)
        try:
            maker = BlockMaker(self.config, weights, self.cache_type)
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
        self._stream = Stream(self._ordinal)
        self._pool = SequencePool(maker.layout, self._stream, self.lock)
        self._steps = CudaSteps(
            self._layers,
            self._stream,
            Scratch(maker.layout, self._ordinal),
            chunk=self.chunk,
            most_rows=CHUNK + TOGETHER if self._hopper else FEW_CHUNK,
            pages=-(-self.config.context // PAGE),
        )

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

    @cached_property
    def mtp(self) -> CudaMtpDecoder | None:
        block, layers = self.config.mtp, self._layers
        if block is None:
            return None
        chunk = min(PIECE, self.chunk)
        try:
            made = CudaMtpDecoder(self.tensors, block, layers.embedding, layers.head, self._stream, self.lock, chunk)
        except OutOfMemory:
            problem = f"{self._gpu.name} is out of memory for the MTP block"
            raise BackendUnavailable(failure(CALL, problem, "Draft by 'ngram', or use a smaller model.")) from None
        self.nbytes += made.nbytes
        return made

    @property
    def stream(self) -> int:
        """The CUDA stream of all steps."""
        return self._stream.pointer

    @property
    def captures(self) -> int:
        return self._steps.captures

    def check_device(self) -> None:
        check_device(self._ordinal)

    def prefill_budget(self, decoding: int) -> int:
        return self.chunk

    def __del__(self) -> None:
        """Waits for a step that is under way; then memory may go. Its stream may be gone already, where the decoder is
        collected as a part of a cycle."""
        if not hasattr(self, "_steps"):
            return
        try:
            with current(self._ordinal):
                check(driver().cuCtxSynchronize(), "waiting for the device")
                self._steps.destroy_graphs()
        except Exception:  # the interpreter ends, and the driver may be gone
            return

    # ---- computing ----------------------------------------------------------------------------------------------

    def run(self, passages: Sequence[Passage], activations: Activations | None) -> Floats:
        out = np.empty((sum(len(tokens) for _, tokens in passages), self.config.hidden), np.float32)
        starts = np.cumsum([0, *(len(tokens) for _, tokens in passages)])
        with self._working(passages):
            self._drop_ahead()
            for _, group in self._groups([], self._pieces(passages)):
                hidden, row = self._steps.hidden(group, activations or "exact"), 0
                for fed in group:
                    start = starts[fed.number]
                    out[start : start + len(fed.tokens)] = hidden[row : row + len(fed.tokens)]
                    if fed.cache.hidden is not None:
                        fed.cache.hidden.put(len(fed.cache.tokens), hidden[row : row + len(fed.tokens)])
                    starts[fed.number] += len(fed.tokens)
                    row += len(fed.tokens)
                self._taken(group)
        return out

    def passes(self, passages: Sequence[Passage], activations: Activations | None) -> list[list[int]]:
        """All together: the last digits may differ, as those of answers in a batch do."""
        return [[*range(len(passages))]] if passages else []

    def logits(self, hidden: Floats, activations: Activations | None) -> Floats:
        self.check_hidden(hidden)
        out = np.empty((len(hidden), self.config.vocabulary), np.float32)
        with self._working([]):
            step, stream = self._steps.memory, self._stream.pointer
            for start in range(0, len(hidden), SCORED):
                rows = np.ascontiguousarray(hidden[start : start + SCORED])
                copy_in(step.at("hidden"), rows, stream)
                self._layers.finish(stream, step, len(rows), added=False)
                self._layers.score(stream, step, len(rows))
                copy_out(out[start : start + SCORED], step.at("logits"), stream)
        return out

    def choose(
        self, passages: Sequence[Passage], samplers: Sequence[Sampler], activations: Activations | None
    ) -> list[int]:
        """A single sequence gets one step more than it asks for, which runs while the caller looks at the token."""
        with self._working(passages):
            alone = len(passages) == 1 and len(passages[0][1]) == 1 and not any(s.needs_scores for s in samplers)
            pending = self._take_ahead(passages[0], samplers) if alone and samplers else None
            pending = pending or self._submit(passages, samplers, activations)
            if alone and samplers:
                try:
                    self._go_ahead(pending, passages[0][0], samplers[0], activations)
                except BaseException:
                    pending.undo()
                    raise
            return pending.tokens()

    def submit(
        self,
        passages: Sequence[Passage],
        samplers: Sequence[Sampler],
        activations: Activations | None,
        drafts: Sequence[Sequence[int]] = (),
    ) -> PendingStep:
        with self._working(with_drafts(passages, drafts), len(passages) + sum(map(len, drafts))):
            try:
                having_room = [
                    draft if cast("CudaCache", cache).reserve_rows(len(draft)) else []
                    for (cache, _), draft in zip(passages, drafts, strict=False)
                ]
                return self._submit(passages, samplers, activations, having_room)
            except BaseException:
                for cache, _ in passages:
                    cast("CudaCache", cache).reserve_rows(0)
                raise

    def verify(
        self,
        passages: Sequence[Passage],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]],
        activations: Activations | None,
    ) -> list[list[NextToken]]:
        return self.submit(passages, samplers, activations, drafts).choices()

    def rows_alike(self, activations: Activations | None) -> int:
        """A drafted token is a row of its own, as of a sequence that decodes."""
        return MOST_DRAFTED + 1

    def warm(self, sequences: int, activations: Activations | None, drafting: int = 0) -> None:
        with self._working([]):
            now = self._layers.batch_invariant
            if drafting:  # first, as graphs are dropped when memory grows
                self._layers.batch_invariant = True
                self._steps.warm(min(drafting, self._together), activations or "exact")
                self._layers.batch_invariant = now
            self._steps.warm(min(sequences, self._together), activations or "exact")

    def read(
        self, results: Sequence[Result], samplers: Sequence[Sampler], drafts: Sequence[Sequence[int]]
    ) -> list[list[NextToken]]:
        """Wait for steps: the tokens of all passages with samplers."""
        chosen: list[list[NextToken]] = [[] for _ in samplers]
        for result in results:
            result.wait()
            result.keep_hidden(self.config.hidden)
            tokens: list[int] = result.tokens.tolist()
            for number, places in result.numbers.items():
                sampler, draft = samplers[number], drafts[number]
                if number in result.places:
                    chosen[number] = sampler.accept(result.logits(number, self.config.vocabulary), draft)
                else:
                    picked = tokens[places.start : places.stop]
                    right = right_tokens(picked, draft) if draft else 0
                    for _ in range(right):  # the first one's random number was counted when the step was submitted
                        sampler.move_on()
                    chosen[number] = [sampler.choice(token) for token in picked[: right + 1]]
            if result.late_result is not None:
                for number, (token, scored) in zip(result.late, result.late_result.read(), strict=True):
                    samplers[number].took(token, scored)
                    chosen[number] = [samplers[number].choice(token)]
        with self.lock:
            for result in results:
                self._steps.give_back(result)
        return chosen

    def sample_late(self, result: Result, samplers: Sequence[Sampler]) -> None:
        """Sample the late rows of the last step."""
        with self.lock, current(self._ordinal):
            self._steps.sample_late(result, samplers)

    def settle(self, states: SequenceStates, start: int, right: int) -> None:
        """So many rows of a step with a draft, which began at `start`, were right."""
        with self.lock, current(self._ordinal):
            states.settle(start, right)

    def _finish_late(self) -> None:
        """The next step writes where the late rows of the last one are."""
        late, self._late = None if self._late is None else self._late(), None
        if late is not None:
            late.sample_late()

    @property
    def _together(self) -> int:
        return TOGETHER if self._hopper else FEW_CHUNK

    @contextmanager
    def _working(self, passages: Sequence[Passage], rows: int = 0) -> Iterator[None]:
        """The device is current, and the decoder and all caches are this thread's. rows: that decode, if they are more
        than there are passages."""
        for cache, tokens in passages:
            assert isinstance(cache, CudaCache)
            if tokens != [PENDING] or cache.choosing is None:
                self.check_tokens("llm.run", "tokens", tokens)
        with self._locked(passages), self.lock, current(self._ordinal):
            self._finish_late()
            backend = BACKENDS["cuda"]
            assert isinstance(backend, CudaBackend)
            self._layers.batch_invariant = self.drafting or bool(backend.batch_invariant)
            sequences = min(max(1, len(passages), rows), self._together)
            if sequences > self._steps.sequences:  # tokens that are chosen in the memory of now
                for cache, tokens in passages:
                    if tokens == [PENDING]:
                        cast("CudaCache", cache).choosing.tokens()
            self._steps.grow(sequences)
            context = self.config.context
            for cache, tokens in passages:
                positions = len(cache.tokens) + len(tokens)
                if positions > context:
                    problem = f"tokens and cache hold {positions} tokens; the model's context is {context}"
                    raise ModelError(failure("llm.run", problem))
                assert isinstance(cache, CudaCache)
                if tokens != [PENDING]:
                    cache.reserve_rows(0)  # of a step that nobody asked for its tokens
                cache.check_state()
                cache.reserve(positions)
            yield

    # ---- steps --------------------------------------------------------------------------------------------------

    def _submit(
        self,
        passages: Sequence[Passage],
        samplers: Sequence[Sampler],
        activations: Activations | None,
        drafts: Sequence[Sequence[int]] = (),
    ) -> CudaPending:
        """One step, if it has room for all passages. Those of one token decode, and may have a draft; others are parts
        of prompts."""
        self._drop_ahead()
        caches = [cast("CudaCache", cache) for cache, _ in passages]
        pending, by_number = CudaPending(self, caches, samplers, drafts), dict(enumerate(samplers))
        given = [(cache, self._known(cache, tokens)) for cache, (_, tokens) in zip(caches, passages, strict=True)]
        single = {number for number, (_, tokens) in enumerate(given) if len(tokens) == 1}
        assert all(number in single for number, draft in enumerate(drafts) if draft), "a draft is for one token"
        pieces = self._pieces(with_drafts(given, drafts))
        decoding = [fed for fed in pieces if fed.number in single]
        prompts = [fed for fed in pieces if fed.number not in single]
        choosers = {cache.choosing for cache, tokens in given if tokens == [PENDING]}
        try:
            for decodes, parts in self._groups(decoding, prompts):
                self._finish_late()
                asked = [fed.number for fed in (*decodes, *parts) if fed.last and fed.number in by_number]
                of_step = {number: by_number[number] for number in asked}
                pending.results.append(self._steps.launch(decodes, parts, of_step, activations or "exact"))
                if pending.results[-1].late:
                    pending.late, pending.befores, self._late = pending.results[-1], [*choosers], weakref.ref(pending)
                self._taken([*decodes, *parts])
        except BaseException:
            pending.undo()
            raise
        for sampler in samplers:
            if not sampler.needs_scores:
                sampler.move_on()
        for cache, tokens in given:
            if tokens == [PENDING]:
                cache.choosing.will_fill(cache)
        for cache in caches[: len(samplers)]:
            cache.choosing = pending
        return pending

    def _known(self, cache: CudaCache, tokens: list[int]) -> list[int]:
        """The tokens to feed; PENDING, where the device alone knows."""
        chooser: CudaPending | None = cache.choosing
        if tokens != [PENDING] or chooser is None:
            return tokens
        unknown = not chooser.done and self._steps.knows(cache)
        return tokens if unknown else [chooser.token_of(cache)]

    def _pieces(self, passages: Sequence[Passage]) -> list[Fed]:
        """Where a sequence is cut does not depend on those beside it. The first pieces of all come first."""
        pieces, later = list[Fed](), list[tuple[int, Fed]]()
        for number, (cache, tokens) in enumerate(passages):
            assert isinstance(cache, CudaCache)
            for start in range(0, len(tokens), self.chunk):
                part = tokens[start : start + self.chunk]
                ends = self.ends_in(len(cache.tokens) + start, part)
                piece = Fed(cache, part, number, start + len(part) == len(tokens), ends)
                if start:
                    later.append((start, piece))
                else:
                    pieces.append(piece)
        return [*pieces, *(piece for _, piece in sorted(later, key=lambda each: each[0]))]

    def _groups(self, decoding: Sequence[Fed], prompts: Sequence[Fed]) -> Iterator[tuple[list[Fed], list[Fed]]]:
        """What goes into one step: as much as its memory has room for, and of a sequence one piece."""
        step, most = self._steps.memory, self._steps.sequences
        decodes, rows = list[Fed](), 0
        for fed in decoding:
            if rows + len(fed.tokens) > most:
                yield decodes, []
                decodes, rows = [], 0
            decodes.append(fed)
            rows += len(fed.tokens)
        first = rows = padded(rows) if decodes else 0
        group, numbers = list[Fed](), set[int]()
        for fed in prompts:
            if rows + len(fed.tokens) > step.rows or first + len(group) >= step.scored or fed.number in numbers:
                yield decodes, group
                decodes, group, numbers, first, rows = [], [], set(), 0, 0
            group.append(fed)
            numbers.add(fed.number)
            rows += len(fed.tokens)
        if decodes or group:
            yield decodes, group

    def _taken(self, fed: Sequence[Fed]) -> None:
        """Keys and values are there, or on their way."""
        for cache, tokens, *_ in fed:
            cache.tokens.extend(tokens)
            if cache.states is not None and cache.states.rows_known:
                cache.states.done(len(cache.tokens))

    # ---- a step more than was asked for ---------------------------------------------------------------------------

    def _take_ahead(self, passage: Passage, samplers: Sequence[Sampler]) -> CudaPending | None:
        """The step that is under way already, if it is the one that is asked for."""
        ahead, cache, tokens = self._ahead, cast("CudaCache", passage[0]), passage[1]
        if ahead is None or ahead.cache() is not cache or ahead.position != len(cache.tokens) or not ahead.before.done:
            return None
        asked = choices(samplers).tobytes(), self._layers.batch_invariant
        if asked != (ahead.choice, ahead.batch_invariant) or tokens != [ahead.before.token_of(cache)]:
            return None
        self._ahead, pending = None, CudaPending(self, [cache], samplers)
        pending.results.append(ahead.result)
        cache.tokens += tokens
        samplers[0].move_on()
        cache.choosing = pending
        return pending

    def _drop_ahead(self) -> None:
        """Its sequence may be another one now."""
        if self._ahead is not None:
            self._steps.give_back(self._ahead.result)  # what is under way ends before its memory is written again
            self._ahead = None

    def _go_ahead(self, pending: CudaPending, cache: object, sampler: Sampler, activations: Activations | None) -> None:
        """Begin the next step, with the token that the pending one chooses, if there is room for it."""
        assert isinstance(cache, CudaCache)
        position = len(cache.tokens)
        if position >= min(self.config.context, cache.capacity):
            return
        if cache.states is not None and not cache.states.keep():  # if nobody asks for the step, it has to be undone
            return
        fed = Fed(cache, [PENDING], 0, True, ())
        how = choices([sampler]).tobytes()
        result = self._steps.launch([fed], [], {0: sampler}, activations or "exact")
        if cache.states is not None:
            cache.states.done(position + 1)
        self._ahead = Ahead(weakref.ref(cache), position, how, self._layers.batch_invariant, pending, result)


def right_tokens(chosen: Sequence[int], draft: Sequence[int]) -> int:
    """How many of the first tokens of a draft are those that were chosen."""
    wrong = (i for i, (token, guess) in enumerate(zip(chosen, draft, strict=False)) if token != guess)
    return next(wrong, len(draft))
