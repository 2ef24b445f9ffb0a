"""The decoder on an Apple GPU: the description of a model as a graph of MLX's operations and our kernels.

    residual stream and recurrent states float32, keys and values float16, inputs and outputs of matmuls float16, or
    float32 where activations are "exact"

Rows of all sequences share the matmuls. Attention and recurrent mixers go sequence by sequence (metal_parts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import cast

import mlx.core as mx
import numpy as np

from billfish.backends import BACKENDS
from billfish.backends.metal import EmulatorBackend, MetalBackend
from billfish.backends.metal.kernels import MATVEC_ROWS
from billfish.core.errors import DataError, ModelError, bad_argument, failure
from billfish.core.typing import Activations
from billfish.llm.decoder_base import Decoder, Passage
from billfish.llm.kv_cache import Cache, Floats
from billfish.llm.metal_cache import Ahead, MetalCache
from billfish.llm.metal_parts import MetalBlock, Parts, Pass, Residual, Span
from billfish.llm.metal_sampler import next_tokens
from billfish.llm.model_weights import ModelTensors
from billfish.llm.recurrent_checkpoints import places
from billfish.llm.sampler import Sampler
from billfish.models.description import Attention, Dense

CHUNK = 512  # rows of a prompt at once


class MetalDecoder(Decoder):
    """All layers on an Apple GPU; or in the emulator, which is slow and runs anywhere."""

    usual, exact = None, "exact"
    cache_types, cache_type = ("float16", "float32"), "float16"
    chunk = CHUNK

    def __init__(self, tensors: ModelTensors, device: str = "metal") -> None:
        super().__init__(tensors)
        backend = BACKENDS[device]
        assert isinstance(backend, (MetalBackend, EmulatorBackend))
        self.device, self._backend, self._lock = device, backend, RLock()
        # MLX evaluates a graph on the thread that built it. On this stream any thread may, one at a time.
        self._stream = mx.new_thread_unsafe_stream(mx.default_device())

    def pack(self, under_way: Callable[[], object]) -> None:
        under_way()
        with mx.stream(self._stream):
            self._pack()

    def _pack(self) -> None:
        c = self.config
        parts = self._parts = Parts(self.tensors, self._backend.kernels)
        self._head = parts.packer.linear(c.head)
        tied = replace(c.head, bias=c.embedding.bias) == c.embedding and self._head.order is None
        self._embedding = self._head.weights if tied else parts.packer.table(c.embedding)
        self._last_norm = mx.array(self.last_norm / np.float32(c.logit_scale))
        if c.per_layer_embedding is not None:
            self._layer_table = parts.packer.table(c.per_layer_embedding.embedding)
            self._layer_projection = parts.packer.linear(c.per_layer_embedding.projection)
            self._layer_norm = parts.vector(c.per_layer_embedding.norm)
        self._blocks = [MetalBlock(parts, block) for block in c.blocks]
        self.nbytes = parts.packer.nbytes

    @property
    def kernels(self) -> str:
        name = "Apple GPU" if self.device == "metal" else "emulator of an Apple GPU"
        return f"{name} ({', '.join(sorted(self.tensors.kinds))})"

    def cache(self, capacity: int = 256) -> MetalCache:
        return MetalCache(self.config, capacity, self.cache_type)

    def check_activations(self, call: str, activations: str | None, usual: Activations | None) -> Activations | None:
        if activations in (None, "exact"):
            return usual if activations is None else "exact"
        expected = f"'exact' (float32), or none for float16, on {self.device}"
        raise DataError(bad_argument(call, "activations", repr(activations), expected))

    # ---- computing ---------------------------------------------------------------------------------------------------

    def run(self, passages: Sequence[Passage], activations: Activations | None) -> Floats:
        with self._working(passages, activations):
            return np.array(self._feed(passages))

    def logits(self, hidden: Floats, activations: Activations | None) -> Floats:
        self.check_hidden(hidden)
        with self._lock, mx.stream(self._stream):
            return np.array(self._logits(mx.array(hidden)))

    def choose(
        self, passages: Sequence[Passage], samplers: Sequence[Sampler], activations: Activations | None
    ) -> list[int]:
        with self._working(passages, activations):
            hidden, caches = self._last_rows(passages), [cache for cache, _ in passages]
            if not samplers:
                return []
            on_host = any(
                sampler.needs_scores or sampler.how.min_p > 0 or (self.drafting and not sampler.takes_best)
                for sampler in samplers
            )
            with _reset_by_errors(caches):
                logits = self._logits(hidden[: len(samplers)])
                if on_host:
                    scores = np.array(logits)
                else:
                    chosen = next_tokens(logits, samplers)
                    mx.async_eval(chosen)  # type: ignore[no-untyped-call]
                    spans, ahead = self._describe_next(caches[: len(samplers)], chosen)
                    tokens = [int(token) for token in np.array(chosen)]
                    mx.async_eval(ahead, [span.after for span in spans])  # type: ignore[no-untyped-call]
                    for span, token in zip(spans, tokens, strict=False):
                        span.cache.ahead = Ahead(token, span.start, self._parts.type, ahead, span.row, span.after)
            if on_host:
                return [sampler.choose(row) for sampler, row in zip(samplers, scores, strict=True)]
            for sampler in samplers:
                sampler.move_on()
            return tokens

    def rows_alike(self, activations: Activations | None) -> int:
        """As many rows as share weights in our kernels, where all of a row's numbers come from them or from itself."""
        blocks = self.config.blocks
        alone = all(isinstance(block.mixer, Attention) and isinstance(block.feed_forward, Dense) for block in blocks)
        return MATVEC_ROWS if alone and self._parts.packer.all_packed else 1

    def scores(
        self, passages: Sequence[Passage], wanted: Sequence[int], activations: Activations | None
    ) -> list[Floats]:
        """As others do, but no pass has more than `rows_alike` rows of several sequences: kernels depend on them."""
        together: list[list[int]] = []
        for number, (_, tokens) in enumerate(passages):
            rows = sum(len(passages[each][1]) for each in together[-1]) if together else self.chunk
            if rows + len(tokens) <= MATVEC_ROWS:
                together[-1].append(number)
            else:
                together.append([number])
        found: list[Floats] = []
        for numbers in together:
            found += super().scores([passages[i] for i in numbers], [wanted[i] for i in numbers], activations)
        return found

    def _last_rows(self, passages: Sequence[Passage]) -> mx.array:
        """The hidden state behind the last token of each passage."""
        ahead = self._take_ahead(passages)
        if [each.row for each in ahead.values()] == list(range(len(passages))):
            step = ahead[0].hidden
            if len(step) == len(passages) and all(each.hidden is step for each in ahead.values()):
                return step
        last = {i: each.hidden[each.row] for i, each in ahead.items()}
        others = {i: passage for i, passage in enumerate(passages) if i not in last}
        for start in range(0, max((len(tokens) for _, tokens in others.values()), default=0), self.chunk):
            parts = {i: (cache, some[start : start + self.chunk]) for i, (cache, some) in others.items()}
            parts = {i: part for i, part in parts.items() if part[1]}
            hidden = self._feed(list(parts.values()))
            ends = np.cumsum([len(tokens) for _, tokens in parts.values()])
            last |= {i: hidden[int(end) - 1] for i, end in zip(parts, ends, strict=True)}
        return mx.stack([last[i] for i in range(len(passages))])

    @contextmanager
    def _working(self, passages: Sequence[Passage], activations: Activations | None) -> Iterator[None]:
        """The decoder and all caches are this thread's."""
        for _, tokens in passages:
            self.check_tokens("llm.run", "tokens", tokens)
        with self._locked(passages), self._lock, mx.stream(self._stream):
            wanted = mx.float32 if activations == "exact" else mx.float16
            self._parts.type = wanted
            for cache, tokens in passages:
                positions, context = len(cache.tokens) + len(tokens), self.config.context
                if positions > context:
                    problem = f"tokens and cache hold {positions} tokens; the model's context is {context}"
                    raise ModelError(failure("llm.run", problem))
            yield

    def _feed(self, passages: Sequence[Passage]) -> mx.array:
        """Hidden states of all tokens, which the caches hold then."""
        spans, row = [], 0
        for cache, tokens in passages:
            spans.append(self._span(cast("MetalCache", cache), row, len(tokens), tokens))
            row += len(tokens)
        hidden = self._forward(mx.array([token for _, tokens in passages for token in tokens], mx.uint32), spans)
        self._finish(hidden, spans, [tokens for _, tokens in passages])
        return hidden

    def _span(self, cache: MetalCache, row: int, count: int, tokens: list[int]) -> Span:
        start = len(cache.tokens)
        kept = places(start, count, self.ends_in(start, tokens)) if cache.is_recurrent else []
        cuts = tuple(sorted({count, *(place - start for place in kept)}))
        return Span(cache, row, start, count, cache.begin_pass(start), cuts, tuple({} for _ in cuts))

    def _finish(self, hidden: mx.array, spans: list[Span], tokens: Sequence[list[int]]) -> None:
        """Compute what a pass has described, and let the caches hold it."""
        with _reset_by_errors([span.cache for span in spans]):
            mx.eval(
                hidden,
                [span.after for span in spans],
                [[held.both for held in span.cache.keys.values()] for span in spans],
            )
        for span, own in zip(spans, tokens, strict=True):
            span.cache.take(own, span.cuts, span.after, set(self.ends_in(span.start, own)))

    # ---- one step ahead ----------------------------------------------------------------------------------------------

    # MLX writes keys in place unless a launch that is under way reads them. So the graph of the next step is described
    # while this step runs, and submitted when its token is there, which is when nothing reads keys any more.

    def _describe_next(self, caches: Sequence[Cache], chosen: mx.array) -> tuple[list[Span], mx.array]:
        """The step behind the tokens that are being chosen, and its hidden states; no rows where a context ends. Keys
        that nobody asks for later are overwritten."""
        if any(len(cache.tokens) >= self.config.context for cache in caches):
            return [], mx.array([])
        spans = [self._span(cast("MetalCache", cache), row, 1, []) for row, cache in enumerate(caches)]
        return spans, self._forward(chosen, spans)

    def _take_ahead(self, passages: Sequence[Passage]) -> dict[int, Ahead]:
        """By number, the passages that were computed before: their caches hold those tokens then."""
        found: dict[int, Ahead] = {}
        for number, (cache, tokens) in enumerate(passages):
            assert isinstance(cache, MetalCache)
            ahead, cache.ahead = cache.ahead, None
            if ahead is not None and ahead.is_for(len(cache.tokens), tokens, self._parts.type):
                cache.take(tokens, (1,), ahead.after, set(self.ends_in(ahead.start, tokens)))
                found[number] = ahead
        return found

    # ---- the model ---------------------------------------------------------------------------------------------------

    def _forward(self, tokens: mx.array, spans: list[Span]) -> mx.array:
        """The residual stream float32 [rows, hidden] behind all layers."""
        x = self._parts.packer.rows(self._embedding, tokens)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        inputs = self._layer_inputs(tokens, x)
        stream, step = Residual(self._parts, x), Pass(spans)
        for layer, block in enumerate(self._blocks):
            block(stream, step, layer, None if inputs is None else inputs[:, layer])
        return stream.value()

    def _layer_inputs(self, tokens: mx.array, x: mx.array) -> mx.array | None:
        """What layers take beside the residual stream, [rows, layers, size]: see description.PerLayerEmbedding."""
        about = self.config.per_layer_embedding
        if about is None:
            return None
        shape = (len(x), self.config.layers, about.size)
        own = self._parts.packer.rows(self._layer_table, tokens).reshape(shape) * about.scale
        projected = (
            self._layer_projection(self._parts.rounded(x)).astype(mx.float32).reshape(shape) * about.projection_scale
        )
        return (self._parts.norm(projected, self._layer_norm) + own) * math.sqrt(0.5)

    def _logits(self, x: mx.array) -> mx.array:
        scores = self._head(self._parts.norm(x, self._last_norm))
        cap = self.config.logit_cap
        return cap * mx.tanh(scores / cap) if cap else scores


@contextmanager
def _reset_by_errors(caches: Sequence[Cache]) -> Iterator[None]:
    """Whatever is raised leaves caches empty: keys may be half-written."""
    try:
        yield
    except BaseException:
        for cache in caches:
            cast("MetalCache", cache).reset()
        raise
