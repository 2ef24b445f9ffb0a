"""The decoder and its caches on the CPU: tensors packed for the native decoder of backends/cpu/decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from billfish.backends import BACKENDS
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.axes import why_never, why_not
from billfish.backends.cpu.backend import CpuBackend
from billfish.backends.cpu.experts import PackedExperts
from billfish.backends.cpu.packed import PackedWeights, PlainWeights
from billfish.backends.cpu.source import codes_of
from billfish.core.activations import DIGITS, check_activations
from billfish.core.errors import ModelError, failure
from billfish.core.formats.structure import structure_of
from billfish.core.mixture import GATES
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.core.typing import Activations, CacheType
from billfish.llm.config import Config
from billfish.llm.decoder_base import Decoder, Passage
from billfish.llm.kv_cache import Cache, Floats
from billfish.llm.model_weights import (
    ATTENTION,
    CALL,
    FEED_FORWARD,
    ROUTER,
    SHARED,
    STACKS,
    ModelTensors,
    Stack,
    Tensor,
)
from billfish.llm.sampler import Sampler
from billfish.ops.matmul import dequantize

# Gets a layer, one of its inputs, the expert that multiplies it or -1, and the rows.
Observe = Callable[[int, int, int, Floats], object]
Part = tuple[int, Cache, list[int]]  # of a passage, with its number: tokens that are fed at once
BATCH_BYTES = 1 << 28  # of tensors that are packed in one native call


class CpuDecoder(Decoder):
    """All layers in the native decoder."""

    device = "cpu"
    # Enough rows of x to decode weights once for many, few enough that what lies between two products stays in cache.
    chunk = 256
    usual, exact = "q16", "exact"
    cache_types, cache_type = ("float32", "float16"), "float32"

    def __init__(self, tensors: ModelTensors) -> None:
        super().__init__(tensors)
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self._backend = backend
        self._embedding = _in_memory(tensors.embedding())

    def pack(self, under_way: Callable[[], object]) -> None:
        tensors = self.tensors
        packed: dict[str, PackedWeights | PlainWeights] = {}

        def read(places: list[str]) -> Iterator[Tensor]:
            for place in places:
                yield self._matrix(place)
            if not packed:
                under_way()  # earlier, two threads would wait for each other to let go of the interpreter

        for places in self._batches():
            packed |= dict(zip(places, self._backend.pack_all(read(places)), strict=True))
            tensors.source.tensors.release()
        stacks: dict[str, PackedExperts] = {}
        for place in tensors.stacks:  # one at a time: each is large
            stacks[place] = self._backend.pack_experts(self._stack(place))
            tensors.source.tensors.release()
        weights = [*packed.values(), *stacks.values()]
        self.nbytes = self._embedding.nbytes + sum(each.nbytes for each in weights)
        self._native = self._make_native()
        self._add_layers(packed, stacks)
        self._set_embedding()

    def _make_native(self) -> _cpu.Decoder:
        c, family = self.config, self.config.family
        return _cpu.Decoder(
            level=self._backend.level,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_size=c.head_size,
            feed_forward=c.feed_forward if c.experts is None else c.experts.shared,
            epsilon=c.norm_epsilon,
            query_scale=c.query_scale,
            residual_scale=c.residual_scale,
            attention_cap=c.attention_cap,
            logit_cap=c.logit_cap,
            adjacent=family.rope == "adjacent",
            gate=GATES.index(family.gate),
            joint_norms=family.head_norms == "all",
            rotations=[(rotation.frequencies.tolist(), rotation.magnitude) for rotation in self.tensors.rotations()],
        )

    def _add_layers(self, packed: dict[str, PackedWeights | PlainWeights], stacks: dict[str, PackedExperts]) -> None:
        c, tensors = self.config, self.tensors
        orders: dict[bytes, Array] = {}  # matrices with one order share its array, and x is put into it once for them

        def native(place: str, bias: Floats | None) -> _cpu.PackedMatrix:
            weights = packed[place]
            order = weights.permutation if isinstance(weights, PackedWeights) else None
            shared = None if order is None else orders.setdefault(order.tobytes(), order)
            return weights.description, weights.data, bias, shared

        for i in range(c.layers):
            layer, kind, experts, mixture = f"blk.{i}.", c.kind(i), c.experts, None
            dense = FEED_FORWARD if experts is None else SHARED if experts.shared else ()
            matrices = [native(layer + name, tensors.bias(layer + name)) for name in (*ATTENTION, *dense)]
            if experts is not None:
                router = native(layer + ROUTER, tensors.bias(layer + ROUTER))
                parts = [stacks[layer + name].arrays(tensors.stack_bias(layer + name)) for name in STACKS]
                how = experts.chosen, experts.renormalized, experts.scale, tensors.shared_gate(layer)
                mixture = router, parts, *how
            self._native.add_layer(tensors.layer_vectors(layer), kind.window, kind.rotation, matrices, mixture)
        self._native.set_head(self.last_norm / np.float32(c.logit_scale), native("head", None))

    def _set_embedding(self) -> None:
        """Native code decodes its rows, where it knows the format."""
        self._native_embedding = False
        if isinstance(self._embedding, QuantizedTensor):
            structure = structure_of(self._embedding.format)
            in_order = self._embedding.permutation is None
            self._native_embedding = in_order and structure is not None and structure.scales_inside
            if self._native_embedding:
                source = codes_of(self._embedding)
                self._native.set_embedding(source.data, source.about)

    def _batches(self) -> Iterator[list[str]]:
        """The matrices, as many at a time as may be in memory twice, plain or quantized and packed."""
        batch, size = list[str](), 0
        for place in self.tensors.matrices:
            nbytes = self.tensors.nbytes(place)
            if batch and size + nbytes > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(place)
            size += nbytes
        yield batch

    def _matrix(self, place: str) -> Tensor:
        tensor = self.tensors.matrix(place)
        if isinstance(tensor, QuantizedTensor):
            self._check_format(self.tensors.matrices[place].name, tensor)
        return tensor

    def _stack(self, place: str) -> Stack:
        stack = self.tensors.stack(place)
        if isinstance(stack, QuantizedExperts):
            self._check_format(f"{place}.weight", stack)
        return stack

    def _check_format(self, name: str, tensor: QuantizedTensor | QuantizedExperts) -> None:
        """Raises unless there are kernels for the weights."""
        reason = why_never(tensor.format) or why_not(tensor.group_size, tensor.shape[-1])
        if reason:
            raise ModelError(failure(CALL, f"the CPU cannot run {name} in {tensor.format.name}: {reason}"))

    # ---- computing ----------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> str:
        return f"{self._backend.level} ({', '.join(sorted(self.tensors.kinds))})"

    @property
    def about(self) -> str:
        return f"{self.kernels}, {_cpu.threads()} threads"

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time has gone since the model was loaded, by part of a layer."""
        return self._native.seconds()

    def cache(self, capacity: int = 256) -> CpuCache:
        return CpuCache(self.config, capacity, self.cache_type)

    def check_activations(self, call: str, activations: str | None, usual: Activations | None) -> Activations | None:
        return usual if activations is None else check_activations(call, activations, DIGITS)

    def embed(self, tokens: list[int]) -> Floats:
        """The rows of the embedding: [tokens, hidden]."""
        self.check_tokens("llm.embed", "tokens", tokens)
        rows: Floats
        if self._native_embedding:
            rows = np.empty((len(tokens), self.config.hidden), np.float32)
            self._native.embed(tokens, rows)
        elif isinstance(self._embedding, QuantizedTensor):
            rows = dequantize(self._embedding.take_rows(tokens))
        else:
            rows = self._embedding[tokens].astype(np.float32)
        scale = np.float32(self.config.embedding_scale)
        return rows if scale == 1 else rows * scale

    def run(self, passages: Sequence[Passage], activations: Activations | None) -> Floats:
        """Texts of a batch come as one call; each gets the same numbers as alone while there are at most FEW_ROWS
        rows."""
        digits = DIGITS[check_activations("llm.run", activations or self.usual, DIGITS)]
        x = self.embed([token for _, tokens in passages for token in tokens])
        with self._locked(passages):
            rows = []
            for cache, tokens in passages:
                assert isinstance(cache, CpuCache)
                start = len(cache.tokens)
                cache.reserve(start + len(tokens))
                rows.append((cache.keys, cache.values, start, len(tokens)))
            self._native.run(x, rows, digits)
            for cache, tokens in passages:
                cache.tokens.extend(tokens)
        return x

    def run_layer(self, layer: int, x: Floats, cache: CpuCache, observe: Observe | None) -> None:
        """The hidden states x [tokens, hidden] of a text, from its beginning, through one layer, in place and exactly.
        observe(layer, input, expert, rows [count, width]) gets what the layer's products multiply; see `LayerInput`."""
        with cache.lock:
            cache.reserve(len(x))
            for start in range(0, len(x), self.chunk):
                part = x[start : start + self.chunk]
                passage = (cache.keys, cache.values, start, len(part))
                self._native.run_layers(part, [passage], DIGITS["exact"], layer, layer + 1, observe)

    def normalize(self, hidden: Floats) -> Floats:
        """Hidden states [m, hidden] behind the last norm: what the head multiplies."""
        out = np.empty_like(hidden)
        self._native.normalize(np.ascontiguousarray(hidden), out)
        return out

    def logits(self, hidden: Floats, activations: Activations | None) -> Floats:
        """The head is the largest matrix and waits for memory, so that x in 16 bits, not 8, costs nothing there."""
        self.check_hidden(hidden)
        checked = check_activations("llm.logits", activations or self.usual, DIGITS)
        return self._scores(hidden, DIGITS["q16" if checked == "q8" else checked])

    def _scores(self, hidden: Floats, digits: int) -> Floats:
        out = np.empty((len(hidden), self.config.vocabulary), np.float32)
        self._native.finish(np.ascontiguousarray(hidden), digits, out)
        return out

    def choose(
        self, passages: Sequence[Passage], samplers: Sequence[Sampler], activations: Activations | None
    ) -> list[int]:
        states: list[Floats] = [np.empty(0, np.float32)] * len(passages)
        for group in self._groups(passages, activations):
            rows = self.run([(cache, tokens) for _, cache, tokens in group], activations)
            ends = np.cumsum([len(tokens) for _, _, tokens in group])
            for (i, _, _), end in zip(group, ends, strict=True):
                states[i] = rows[end - 1]
        most, chosen = _cpu.FEW_ROWS if activations == "exact" else max(1, len(samplers)), []
        for start in range(0, len(samplers), most):
            together = samplers[start : start + most]
            hidden = np.stack(states[start : start + len(together)])
            # More than two rows do not wait for memory: the best token is found with 8 bits, and settled with 16.
            best = activations != "exact" and len(together) > 2 and all(sampler.takes_best for sampler in together)
            scores = self._scores(hidden, _cpu.BEST_OF_16) if best else self.logits(hidden, activations)
            chosen += [sampler.choose(row) for sampler, row in zip(together, scores, strict=True)]
        return chosen

    def _groups(self, passages: Sequence[Passage], activations: Activations | None) -> Iterator[list[Part]]:
        """What is fed in one call: at most `chunk` rows, and of a text one part.

        More than FEW_ROWS rows take another kernel in exact mode. Few rows then are fed with few others, and many with
        many, so that a text gets the numbers that it gets alone. So it is with the rows of an expert, whose number
        depends on the text.
        """
        apart = activations == "exact"
        most = 1 if apart and self.config.experts is not None else self.chunk
        for start in range(0, max((len(tokens) for _, tokens in passages), default=0), self.chunk):
            few, many = list[Part](), list[Part]()
            for i, (cache, tokens) in enumerate(passages):
                part = tokens[start : start + self.chunk]
                if part:
                    (few if apart and len(part) <= _cpu.FEW_ROWS else many).append((i, cache, part))
            yield from _filled(few, _cpu.FEW_ROWS)
            yield from _filled(many, most)


class CpuCache(Cache):
    """Keys and values in float32 or float16, in blocks of CACHE_BLOCK positions, which only kernels know to read."""

    def __init__(self, config: Config, capacity: int = 256, type: CacheType = "float32") -> None:
        super().__init__(config, capacity)
        self.type: CacheType = type
        # One attribute for both: whatever interrupts `reserve`, they are of one capacity.
        self._keys_and_values = self._room(capacity)

    def _room(self, capacity: int) -> tuple[Array, Array]:
        c, blocks = self.config, -(-capacity // _cpu.CACHE_BLOCK)
        shape = (c.layers, c.kv_heads, blocks, _cpu.CACHE_BLOCK * c.head_size)
        return np.zeros(shape, self.type), np.zeros(shape, self.type)

    @property
    def keys(self) -> Array:
        """[layers, heads, blocks, CACHE_BLOCK * head size], as backends/cpu/decoder/decoder.h has them."""
        return self._keys_and_values[0]

    @property
    def values(self) -> Array:
        """The same."""
        return self._keys_and_values[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2] * _cpu.CACHE_BLOCK

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, positions: int) -> None:
        """By doubling, so that a long text is not copied at every token."""
        with self.lock:
            if positions <= self.capacity:
                return
            keys, values = self._room(max(positions, min(2 * self.capacity, self.config.context)))
            blocks = self.keys.shape[2]
            keys[:, :, :blocks], values[:, :, :blocks] = self.keys, self.values
            self._keys_and_values = keys, values

    def like(self, capacity: int) -> CpuCache:
        return CpuCache(self.config, capacity, self.type)

    def copy_positions(self, other: Cache, positions: int) -> None:
        assert isinstance(other, CpuCache)
        blocks = -(-positions // _cpu.CACHE_BLOCK)
        self.keys[:, :, :blocks], self.values[:, :, :blocks] = other.keys[:, :, :blocks], other.values[:, :, :blocks]


def _filled(parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    """The parts, as many together as have at most so many tokens; a longer one is alone."""
    group, rows = list[Part](), 0
    for part in parts:
        if group and rows + len(part[2]) > most:
            yield group
            group, rows = [], 0
        group.append(part)
        rows += len(part[2])
    if group:
        yield group


def _in_memory(tensor: Tensor) -> Tensor:
    """A copy. The original may be a view of a mapped file, which somebody may overwrite while the model runs."""
    if not isinstance(tensor, QuantizedTensor):
        return np.array(tensor)
    storage = {name: np.array(array) for name, array in tensor.storage.items()}
    return QuantizedTensor.owning(tensor.format, tensor.shape, tensor.group_size, storage, tensor.permutation)
