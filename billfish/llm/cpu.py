"""The decoder and its caches on the CPU: tensors packed for the native decoder of backends/cpu/decoder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

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
from billfish.llm.adapters import AdaptedMatrix
from billfish.llm.decoder_base import Decoder, MtpDecoder, Passage, with_drafts
from billfish.llm.drafting.drafter import MOST_DRAFTED
from billfish.llm.kv_cache import Cache, Floats
from billfish.llm.model_weights import CALL, ExpertTensor, ModelTensors, Tensor
from billfish.llm.sampler import NextToken, Sampler
from billfish.models.description import (
    Attention,
    Block,
    Convolution,
    Dense,
    DenseAndMixture,
    GatedDeltaNet,
    LayerNorm,
    Mamba2,
    Matrix,
    Mixture,
    Model,
    MtpBlock,
    ShortConvolution,
    Stack,
    Vector,
    tensors_in,
)
from billfish.ops.matmul import dequantize, quantized_linear

# Gets a layer, one of its inputs, the expert that multiplies it or -1, and the rows.
Observe = Callable[[int, int, int, Floats], object]
Part = tuple[int, Cache, list[int]]  # of a passage, with its number: tokens that are fed at once
CACHE_TYPES: tuple[CacheType, ...] = ("float32", "float16", "int8")  # numbered as in kernel_table.h
EXPERT_INPUT = 4  # the first LayerInput that comes expert by expert
BATCH_BYTES = 1 << 28  # of tensors that are packed in one native call


class Enough(Exception):
    """Raised by an `Observe` that wants nothing further of these rows."""


class CpuDecoder(Decoder):
    """All layers in the native decoder."""

    device = "cpu"
    # Enough rows of x to decode weights once for many, few enough that what lies between two products stays in cache.
    chunk = 256
    usual, exact = "q16", "exact"
    cache_types, cache_type = CACHE_TYPES, "float32"

    def __init__(self, tensors: ModelTensors) -> None:
        super().__init__(tensors)
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self._backend = backend
        tables = {table: _in_memory(tensors.table(table)) for table in tensors.tables}
        per_layer, encoder = self.config.per_layer_embedding, self.config.encoder
        self._tables = list(tables.values())
        self._embedding = tables[self.config.embedding]
        self._layer_embedding = tables[per_layer.embedding] if per_layer else None
        self._positions = tables[encoder.positions] if encoder and encoder.positions else None
        self._token_types = tables[encoder.token_types] if encoder and encoder.token_types else None
        if encoder:
            self.chunk = self.config.context  # a text is read at once

    def pack(self, under_way: Callable[[], object]) -> None:
        tensors = self.tensors
        packed: dict[Matrix, PackedWeights | PlainWeights] = {}

        def read(matrices: list[Matrix]) -> Iterator[Tensor]:
            for matrix in matrices:
                yield self._matrix(matrix)
            if not packed:
                under_way()  # earlier, two threads would wait for each other to let go of the interpreter

        for matrices in self._batches():
            packed |= dict(zip(matrices, self._backend.pack_all(read(matrices)), strict=True))
            tensors.source.tensors.release()
        stacks: dict[Stack, PackedExperts] = {}
        for stack in tensors.stacks:  # one at a time: each is large
            stacks[stack] = self._backend.pack_experts(self._stack(stack))
            tensors.source.tensors.release()
        weights = [*packed.values(), *stacks.values()]
        self.nbytes = sum(each.nbytes for each in (*self._tables, *weights))
        self._packed, self._stacks = packed, stacks
        self._native = self._make_native(packed, stacks)
        self._set_embedding()

    def read_layer_again(self, layer: int, inputs: Sequence[int] = ()) -> None:
        """Its matrices, for a `convert` of :func:`billfish.llm.load` that has others by now, of whatever inputs."""
        parts = [*tensors_in(self.config.blocks[layer])]
        matrices = [part for part in parts if isinstance(part, Matrix)]
        self._packed |= dict(zip(matrices, self._backend.pack_all(map(self._matrix, matrices)), strict=True))
        for part in parts:
            if isinstance(part, Stack):
                self._stacks[part] = self._backend.pack_experts(self._stack(part))
        self.tensors.source.tensors.release()
        self._native = self._make_native(self._packed, self._stacks)
        self._set_embedding()

    @cached_property
    def mtp(self) -> CpuMtpDecoder | None:
        return None if self.config.mtp is None else CpuMtpDecoder(self, self.config.mtp)

    def native_mtp(self, mtp: MtpBlock) -> _cpu.Decoder:
        """A native decoder of the block, with the model's head."""
        parts = [*tensors_in(mtp.block)]
        matrices = [part for part in parts if isinstance(part, Matrix)]
        packed = dict(zip(matrices, self._backend.pack_all(map(self._matrix, matrices)), strict=True))
        stacks = {part: self._backend.pack_experts(self._stack(part)) for part in parts if isinstance(part, Stack)}
        config = dataclasses.replace(self.config, blocks=(mtp.block,), final_norm=mtp.norm)
        self.nbytes += sum(each.nbytes for each in (*packed.values(), *stacks.values()))
        return self._make_native(self._packed | packed, stacks, config, self.tensors.vector(mtp.norm))

    def _make_native(
        self,
        packed: dict[Matrix, PackedWeights | PlainWeights],
        stacks: dict[Stack, PackedExperts],
        config: Model | None = None,
        last_norm: Floats | None = None,
    ) -> _cpu.Decoder:
        """The native decoder: the description as dictionaries, with arrays for its tensors."""
        c, tensors = config or self.config, self.tensors
        last_norm = self.last_norm if last_norm is None else last_norm
        orders: dict[bytes, Array] = {}  # matrices with one order share its array, and x is put into it once for them

        def matrix(part: Matrix) -> _cpu.PackedMatrix:
            weights = packed[part]
            order = weights.permutation if isinstance(weights, PackedWeights) else None
            shared = None if order is None else orders.setdefault(order.tobytes(), order)
            return weights.description, weights.data, tensors.bias(part), shared

        def norm(part: LayerNorm) -> dict[str, Any]:
            return {"weight": tensors.vector(part), "bias": tensors.vector(part.bias)}

        def native(part: Any) -> Any:
            if isinstance(part, Matrix):
                return matrix(part)
            if isinstance(part, Stack):
                return stacks[part].arrays(tensors.bias(part))
            if isinstance(part, LayerNorm):
                return {**norm(part), "of_residual": part.of_residual}
            if isinstance(part, Vector):
                return tensors.vector(part)
            if isinstance(part, Convolution):
                return tensors.convolution(part)
            if not dataclasses.is_dataclass(part):
                return part
            fields = {field.name: native(getattr(part, field.name)) for field in dataclasses.fields(part)}
            if "activation" in fields:
                fields["activation"] = (*GATES, "gelu_erf").index(fields["activation"])
            return {"kind": type(part).__name__, **fields}

        ropes = [
            {
                "frequencies": tensors.frequencies(rope).tolist(),
                "magnitude": rope.scaling.magnitude,
                "adjacent": rope.adjacent,
            }
            for rope in c.ropes
        ]
        decoder = _cpu.Decoder(self._backend.level, c.hidden, c.norm_epsilon, c.logit_cap, ropes)
        for block in c.blocks:
            decoder.add_block(native(block))
        per_layer = c.per_layer_embedding
        if per_layer is not None:
            about = {field: native(getattr(per_layer, field)) for field in ("size", "projection", "norm")}
            scales = {"scale": per_layer.scale, "projection_scale": per_layer.projection_scale}
            decoder.set_per_layer_embedding({**about, **scales, "layers": c.layers})
        last: dict[str, Any] = {"norm": last_norm / np.float32(c.logit_scale)}
        if isinstance(c.final_norm, LayerNorm):
            last = {"norm": {**norm(c.final_norm), "of_residual": False}}
        decoder.set_head(last, None if c.encoder else matrix(c.head))
        return decoder

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

    def _batches(self) -> Iterator[list[Matrix]]:
        """The matrices, as many at a time as may be in memory twice, plain or quantized and packed."""
        batch, size = list[Matrix](), 0
        for matrix in self.tensors.matrices:
            nbytes = self.tensors.nbytes(matrix)
            if batch and size + nbytes > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(matrix)
            size += nbytes
        yield batch

    def _matrix(self, matrix: Matrix) -> Tensor:
        tensor = self.tensors.matrix(matrix)
        if isinstance(tensor, QuantizedTensor):
            self._check_format(f"{matrix.name}.weight", tensor)
        return tensor

    def _stack(self, part: Stack) -> ExpertTensor:
        stack = self.tensors.stack(part)
        if isinstance(stack, QuantizedExperts):
            self._check_format(f"{part.name}.weight", stack)
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

    def add_adapter(self, parts: Sequence[AdaptedMatrix]) -> int:
        return self._native.add_adapter([(each.layer, each.which, each.down, each.up, each.scale) for each in parts])

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
        else:
            rows = _rows_of(self._embedding, tokens)
        scale = np.float32(self.config.embedding_scale)
        return rows if scale == 1 else rows * scale

    def layer_inputs(self, tokens: list[int], x: Floats | None, digits: int) -> Floats | None:
        """What the layers take beside hidden states [tokens, layers, size], for models with an embedding per layer. x:
        the tokens' rows of the embedding, if they are there."""
        if self._layer_embedding is None:
            return None
        rows = _rows_of(self._layer_embedding, tokens)
        self._native.add_layer_inputs(self.embed(tokens) if x is None else x, rows, digits)
        return rows

    def run(self, passages: Sequence[Passage], activations: Activations | None, drafted: Sequence[int] = ()) -> Floats:
        """Texts of a batch come as one call; each gets the same numbers as alone while there are at most FEW_ROWS
        rows. drafted: of each text, the last tokens that may be taken back."""
        digits = DIGITS[check_activations("llm.run", activations or self.usual, DIGITS)]
        all_tokens = [token for _, tokens in passages for token in tokens]
        x = self.embed(all_tokens)
        if self.config.encoder:
            self._add_places(x, passages)
        inputs = self.layer_inputs(all_tokens, x, digits)
        with self._locked(passages):
            rows = []
            for (cache, tokens), draft in zip(passages, drafted or [0] * len(passages), strict=True):
                assert isinstance(cache, CpuCache)
                start = len(cache.tokens)
                cache.reserve_rows(start, len(tokens), self.ends_in(start, tokens), draft)
                rows.append((cache.state, start, len(tokens)))
            self._native.run(x, rows, digits, inputs)
            done = 0
            for cache, tokens in passages:
                if cache.hidden is not None:
                    cache.hidden.put(len(cache.tokens), x[done : done + len(tokens)])
                cache.tokens.extend(tokens)
                done += len(tokens)
        return x

    def passes(self, passages: Sequence[Passage], activations: Activations | None) -> list[list[int]]:
        return [[number for number, _, _ in group] for group in self._groups(passages, activations)]

    def _add_places(self, x: Floats, passages: Sequence[Passage]) -> None:
        """Rows of embeddings take in where their tokens are: in a text, and in which of a pair. What follows the first
        separator is of the second text, if something follows."""
        if any(cache.tokens for cache, _ in passages):
            raise ModelError(failure("llm.run", f"{self.config.architecture} reads a text at once", "Use a new cache."))
        row, separator = 0, self.separator
        for _, tokens in passages:
            part = x[row : row + len(tokens)]
            if self._positions is not None:
                part += _rows_of(self._positions, list(range(len(tokens))))
            if self._token_types is not None:
                ends = [i for i, token in enumerate(tokens[:-1]) if token == separator]
                second = ends[0] + 1 if ends and self._token_types.shape[0] > 1 else len(tokens)
                part += _rows_of(self._token_types, [int(i >= second) for i in range(len(tokens))])
            row += len(tokens)

    def run_layer(
        self, layer: int, tokens: list[int], x: Floats, source: Floats | None, cache: CpuCache, observe: Observe | None
    ) -> None:
        """The hidden states x [tokens, hidden] of a text, from its beginning, through one layer, in place and exactly.
        source: the states that enter the layer whose keys and values this one attends to, if they are another's.
        observe(layer, input, expert, rows [count, width]) gets what the layer's products multiply; see `LayerInput`.
        Where it raises `Enough`, what leaves the layer is not computed, and x has no meaning."""
        whose, exact = self.config.source(layer), DIGITS["exact"]
        with cache.lock:
            for start in range(0, len(x), self.chunk):
                part = x[start : start + self.chunk]
                cache.reserve_rows(start, len(part))
                passage = (cache.state, start, len(part))
                inputs = self.layer_inputs(tokens[start : start + self.chunk], None, exact)
                if source is not None and whose is not None:
                    before = source[start : start + self.chunk]
                    self._native.run_layers(before, [passage], exact, inputs, whose, whose + 1, None)
                with contextlib.suppress(Enough):
                    self._native.run_layers(part, [passage], exact, inputs, layer, layer + 1, observe)

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

    def rows_alike(self, activations: Activations | None) -> int:
        """With integer activations, a row has the same bits in any batch. In exact mode it has them in batches of up to
        FEW_ROWS rows; kernels of an expert depend on how many rows choose it."""
        if activations != "exact":
            return MOST_DRAFTED + 1
        return 1 if self.config.has_experts else int(_cpu.FEW_ROWS)

    def logits_alike(self, hidden: Floats, activations: Activations | None) -> Floats:
        if activations != "exact":
            return self.logits(hidden, activations)
        parts = [hidden[i : i + _cpu.FEW_ROWS] for i in range(0, len(hidden), _cpu.FEW_ROWS)]
        return np.concatenate([self.logits(part, activations) for part in parts])

    def _logits_for(self, samplers: Sequence[Sampler], hidden: Floats, activations: Activations | None) -> Floats:
        """Logits with the bits that each row has alone. Greedy decoding of more than two rows is not bound by memory:
        int8 pre-selection finds candidates, and int16 re-scoring decides. That their best token is the one of q16 has
        no proof (decoder/screen.h), so this is off after `begin_drafting`."""
        greedy = activations != "exact" and all(sampler.takes_best for sampler in samplers)
        if greedy and len(hidden) > 2 and not self.drafting:
            return self._scores(hidden, _cpu.BEST_OF_16)
        return self.logits_alike(hidden, activations)

    def choose(
        self, passages: Sequence[Passage], samplers: Sequence[Sampler], activations: Activations | None
    ) -> list[int]:
        states = self._last_states(passages, [1] * len(samplers), activations)
        if not samplers:
            return []
        logits = self._logits_for(samplers, np.concatenate(states), activations)
        return [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]

    def verify(
        self,
        passages: Sequence[Passage],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]],
        activations: Activations | None,
    ) -> list[list[NextToken]]:
        fed, wanted = with_drafts(passages, drafts), [len(draft) + 1 for draft in drafts]
        hidden = np.concatenate(self._last_states(fed, wanted, activations))
        logits = self._logits_for(samplers, hidden, activations)
        return self.accepted(fed, np.split(logits, np.cumsum(wanted)[:-1]), samplers, drafts)

    def _last_states(
        self, passages: Sequence[Passage], wanted: Sequence[int], activations: Activations | None
    ) -> list[Floats]:
        """Feed tokens, any number: the hidden states [wanted, hidden] behind the last ones of the first passages."""
        states = [np.empty((0, self.config.hidden), np.float32)] * len(wanted)
        for group in self._groups(passages, activations):
            drafted = [wanted[i] - 1 if i < len(wanted) else 0 for i, _, _ in group]
            parts = [(cache, tokens) for _, cache, tokens in group]
            rows = self.run(parts, activations, drafted) if any(drafted) else self.run(parts, activations)
            ends = np.cumsum([len(tokens) for _, _, tokens in group])
            for (i, _, tokens), end in zip(group, ends, strict=True):
                if i < len(wanted):
                    states[i] = np.concatenate([states[i], rows[end - len(tokens) : end]])[-wanted[i] :]
        return states

    def _groups(self, passages: Sequence[Passage], activations: Activations | None) -> Iterator[list[Part]]:
        """What is fed in one call: at most `chunk` rows, and of a text one part.

        More than FEW_ROWS rows take another kernel in exact mode. Few rows then are fed with few others, and many with
        many, so that a text gets the numbers that it gets alone. So it is with the rows of an expert, whose number
        depends on the text.
        """
        apart = activations == "exact"
        most = 1 if apart and self.config.has_experts else self.chunk
        for start in range(0, max((len(tokens) for _, tokens in passages), default=0), self.chunk):
            few, many = list[Part](), list[Part]()
            for i, (cache, tokens) in enumerate(passages):
                part = tokens[start : start + self.chunk]
                if part:
                    (few if apart and len(part) <= _cpu.FEW_ROWS else many).append((i, cache, part))
            yield from _filled(few, _cpu.FEW_ROWS)
            yield from _filled(many, most)


class CpuMtpDecoder(MtpDecoder):
    """The MTP block in a native decoder of its own."""

    def __init__(self, decoder: CpuDecoder, mtp: MtpBlock) -> None:
        self._decoder, tensors = decoder, decoder.tensors
        self._native = decoder.native_mtp(mtp)
        self._norms = tensors.vector(mtp.embedding_norm), tensors.vector(mtp.hidden_norm)
        self._projection = tensors.matrix(mtp.projection)
        if not isinstance(self._projection, QuantizedTensor):
            self._projection = np.ascontiguousarray(self._projection.astype(np.float32).T)
        self._config = dataclasses.replace(decoder.config, blocks=(mtp.block,))
        assert decoder.usual is not None
        self._digits = DIGITS[decoder.usual]

    def cache(self) -> CpuCache:
        return CpuCache(self._config)

    def run(self, cache: Cache, tokens: list[int], hidden: Floats) -> Floats:
        assert isinstance(cache, CpuCache)
        states = list[Floats]()
        for start in range(0, len(tokens), self._decoder.chunk):
            part = tokens[start : start + self._decoder.chunk]
            rows = self._decoder.embed(part), hidden[start : start + len(part)]
            x = np.concatenate([self._rms_norm(*each) for each in zip(rows, self._norms, strict=True)], axis=1)
            if isinstance(self._projection, QuantizedTensor):
                x = np.ascontiguousarray(quantized_linear(x, self._projection), np.float32)
            else:
                x = x @ self._projection
            cache.reserve_rows(len(cache.tokens), len(part))
            self._native.run(x, [(cache.state, len(cache.tokens), len(part))], self._digits, None)
            cache.tokens += part
            states.append(x)
        return np.concatenate(states)

    def _rms_norm(self, rows: Floats, weights: Floats) -> Floats:
        squares = np.mean(rows * rows, axis=1, keepdims=True)
        return rows / np.sqrt(squares + np.float32(self._config.norm_epsilon)) * weights

    def logits(self, hidden: Floats) -> Floats:
        out = np.empty((len(hidden), self._config.vocabulary), np.float32)
        self._native.finish(np.ascontiguousarray(hidden), self._digits, out)
        return out

    def normalize(self, hidden: Floats) -> Floats:
        out = np.empty_like(hidden)
        self._native.normalize(np.ascontiguousarray(hidden), out)
        return out

    def normalize_model(self, hidden: Floats) -> Floats:
        return self._decoder.normalize(hidden)


class CpuCache(Cache):
    """The state of a sequence in native memory: keys and values in float32, float16 or int8, in blocks of CACHE_BLOCK
    positions, which only kernels know to read. Layers with a window keep a ring of positions. Recurrent layers keep one
    state, and checkpoints of earlier ones: the sequence can only be cut back to those."""

    def __init__(self, config: Model, capacity: int = 256, type: CacheType = "float32") -> None:
        super().__init__(config, capacity)
        self.type: CacheType = type
        shapes = [_state_shape(block, i) for i, block in enumerate(config.blocks)]
        self.state = _cpu.SequenceState(shapes, CACHE_TYPES.index(type), capacity)

    def adapt(self, adapter: int) -> None:
        super().adapt(adapter)
        self.state.adapter = adapter

    @property
    def capacity(self) -> int:
        return self.state.capacity

    @property
    def nbytes(self) -> int:
        return self.state.nbytes

    def reserve(self, positions: int) -> None:
        with self.lock:
            self.state.reserve(len(self.tokens), 0, positions, [])

    def reserve_rows(self, start: int, count: int, message_ends: Sequence[int] = (), drafted: int = 0) -> None:
        """Make room for the rows of a pass. The capacity doubles, so that a long text is not copied at every token.
        message_ends: positions behind the last token of a message, where other prompts are likely to part. drafted:
        the last rows, which may be taken back."""
        capacity = self.state.capacity
        if start + count > capacity:
            capacity = max(start + count, min(2 * capacity, self.config.context))
        self.state.reserve(start, count, capacity, list(message_ends), drafted)

    def like(self, capacity: int) -> CpuCache:
        return CpuCache(self.config, capacity, self.type)

    def copy_positions(self, other: Cache, positions: int) -> None:
        assert isinstance(other, CpuCache)
        self.state.copy(other.state, positions)

    def restorable(self, positions: int) -> int:
        return self.state.restorable(positions)


def _state_shape(block: Block, number: int) -> tuple[int, int, int, int]:
    """What a layer keeps of a sequence: heads and their size, the window, and the numbers of a recurrent state. Layers
    that see a whole text at once share the place of the first: nobody needs an earlier one's keys."""
    mixer = block.mixer
    if not isinstance(mixer, Attention):
        return 0, 16, 0, state_numbers(mixer)
    if mixer.bidirectional:
        return (mixer.kv_heads, mixer.head_size, 0, 0) if number == 0 else (0, 16, 0, 0)
    return (mixer.kv_heads, mixer.head_size, mixer.window, 0) if mixer.shares is None else (0, 16, 0, 0)


def state_numbers(mixer: GatedDeltaNet | ShortConvolution | Mamba2) -> int:
    """Float32 numbers that a sequence keeps of a recurrent layer. A delta net's state changes once in a chunk of
    tokens; until then, the chunk's keys and what they wrote are kept beside it."""
    if not isinstance(mixer, GatedDeltaNet):
        return mixer.state_numbers
    token = mixer.key_heads * mixer.key_size + mixer.value_heads * mixer.value_size
    return mixer.state_numbers + _cpu.DELTA_CHUNK * token + (_cpu.DELTA_CHUNK + 1) * mixer.value_heads


def inputs_of(block: Block) -> list[tuple[Matrix | Stack, ...]]:
    """The matrices that multiply each input of a layer, in the order of the native decoder's LayerInput."""
    mixer, part = block.mixer, block.feed_forward
    if isinstance(mixer, Attention):
        first = tuple(matrix for matrix in (mixer.q, mixer.k, mixer.v) if matrix is not None)
    elif isinstance(mixer, GatedDeltaNet):
        first = (mixer.qkv, mixer.z, mixer.beta, mixer.alpha)
    else:
        first = (mixer.projection,)
    dense = part if isinstance(part, Dense) else part.dense if isinstance(part, DenseAndMixture) else part.shared
    mixture = part if isinstance(part, Mixture) else part.mixture if isinstance(part, DenseAndMixture) else None
    own_router = [mixture.router.matrix] if mixture is not None and mixture is part else []
    other_router = [mixture.router.matrix] if mixture is not None and mixture is not part else []
    layer_input = block.per_layer_input
    return [
        first,
        (mixer.output,),
        (*((dense.gate, *([dense.up] if dense.up else [])) if dense else ()), *own_router),
        (dense.down,) if dense else (),
        tuple(stack for stack in (mixture.gate, mixture.up) if stack) if mixture else (),
        (mixture.down,) if mixture else (),
        tuple(other_router),
        (layer_input.gate,) if layer_input else (),
        (layer_input.projection,) if layer_input else (),
    ]


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


def _rows_of(table: Tensor, tokens: list[int]) -> Floats:
    if isinstance(table, QuantizedTensor):
        return dequantize(table.take_rows(tokens))
    return table[tokens].astype(np.float32)


def _in_memory(tensor: Tensor) -> Tensor:
    """A copy. The original may be a view of a mapped file, which somebody may overwrite while the model runs."""
    if not isinstance(tensor, QuantizedTensor):
        return np.array(tensor)
    storage = {name: np.array(array) for name, array in tensor.storage.items()}
    return QuantizedTensor.owning(tensor.format, tensor.shape, tensor.group_size, storage, tensor.permutation)
