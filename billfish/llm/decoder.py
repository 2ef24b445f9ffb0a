"""The transformer: a file's tensors, packed for the CPU engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np

from billfish.activations import DIGITS, check_activations
from billfish.backends import BACKENDS
from billfish.backends.cpu import CpuBackend, _cpu
from billfish.backends.cpu.axes import why_never, why_not
from billfish.backends.cpu.packed import PackedWeights
from billfish.backends.cpu.plain import PLAIN_TYPES, PlainWeights
from billfish.backends.cpu.source import codes_of
from billfish.backends.cpu.structure import structure_of
from billfish.checkpoints.gguf import ggml_names
from billfish.checkpoints.names import EMBEDDING, HEAD, ROTARY_FACTORS
from billfish.errors import ModelError, ShapeError, complaint
from billfish.llm.cache import Cache, Floats
from billfish.llm.config import Config, embedding_scale
from billfish.llm.source import Source
from billfish.ops import dequantize
from billfish.storage import Array
from billfish.tensor import QuantizedTensor

CALL = "llm.load"
BATCH_BYTES = 1 << 28  # of tensors that are packed in one native call
Tensor = QuantizedTensor | Array
Convert = Callable[[str, Tensor], Tensor]


# The matrices of a layer, in the order in which the native decoder takes them.
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class Decoder:
    """All layers of a model. Making one checks that the tensors are there; `pack` reads them, some at a time, and puts
    them into the order of the kernels."""

    def __init__(self, source: Source, config: Config, convert: Convert | None = None) -> None:
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self._backend, self._source, self._convert, self.config = backend, source, convert, config
        c = config
        q_size, kv_size = c.heads * c.head_size, c.kv_heads * c.head_size
        sizes = (
            (q_size, c.hidden),
            (kv_size, c.hidden),
            (kv_size, c.hidden),
            (c.hidden, q_size),
            (c.feed_forward, c.hidden),
            (c.feed_forward, c.hidden),
            (c.hidden, c.feed_forward),
        )
        self._matrices: dict[str, tuple[str, tuple[int, int]]] = {}  # what the file has for them: name and shape
        for i in range(c.layers):
            for name, shape in zip(MATRICES, sizes, strict=True):
                self._check(f"blk.{i}.{name}.weight", shape)  # at once: a count of layers may be any
                self._matrices[f"blk.{i}.{name}"] = f"blk.{i}.{name}.weight", shape
        # Many models use the embedding as the last matrix too.
        head = HEAD if HEAD in source.tensors else EMBEDDING
        self._check(head, (c.vocabulary, c.hidden))
        self._matrices["head"] = head, (c.vocabulary, c.hidden)
        source.check_matrices(name for name, _ in self._matrices.values())
        self._embedding = self._tensor(EMBEDDING, (c.vocabulary, c.hidden))
        self.last_norm = self._vector("output_norm.weight", c.hidden)
        self._formats: set[str] = set()

    def pack(self, under_way: Callable[[], object]) -> None:
        """Make it ready to run. When native threads begin to pack, beside which Python can go on, calls `under_way`."""
        c, family = self.config, self.config.family
        packed: dict[str, PackedWeights | PlainWeights] = {}

        def matrices(places: list[str]) -> Iterator[Tensor]:
            for place in places:
                yield self._matrix(*self._matrices[place])
            if not packed:
                under_way()  # earlier, two threads would wait for each other to let go of the interpreter

        for places in self._batches():
            packed |= dict(zip(places, self._backend.pack_all(matrices(places)), strict=True))
            self._source.tensors.release()  # rows of the embedding, which are still needed, are read when they are
        self.nbytes = sum(weights.nbytes for weights in packed.values())
        factors = self._vector(ROTARY_FACTORS, c.rope_size // 2) if self._has(ROTARY_FACTORS) else None
        self._native = _cpu.Decoder(
            self._backend.level,
            c.hidden,
            c.heads,
            c.kv_heads,
            c.head_size,
            c.feed_forward,
            c.norm_epsilon,
            family.rope == "adjacent",
            family.gate == "gelu",
            c.rope_frequencies(factors).tolist(),
        )
        orders: dict[bytes, Array] = {}  # matrices with one order share its array, and x is put into it once for them

        def native(weights: PackedWeights | PlainWeights, bias: Floats | None = None) -> _cpu.PackedMatrix:
            order = weights.permutation if isinstance(weights, PackedWeights) else None
            shared = None if order is None else orders.setdefault(order.tobytes(), order)
            return weights.description, weights.data, bias, shared

        for i in range(c.layers):
            layer = f"blk.{i}."
            weights = []
            for name in MATRICES:
                matrix, bias_name = packed[layer + name], f"{layer}{name}.bias"
                biased = (family.biases and name in ("attn_q", "attn_k", "attn_v")) or self._has(bias_name)
                bias = self._vector(bias_name, matrix.shape[0]) if biased else None
                weights.append(native(matrix, bias))
            self._native.add_layer(
                self._vector(f"{layer}attn_norm.weight", c.hidden),
                self._vector(f"{layer}ffn_norm.weight", c.hidden),
                self._vector(f"{layer}attn_q_norm.weight", c.head_size) if family.head_norms else None,
                self._vector(f"{layer}attn_k_norm.weight", c.head_size) if family.head_norms else None,
                weights,
            )
        self._native.set_head(self.last_norm, native(packed["head"]))
        self._native_embedding = False
        if isinstance(self._embedding, QuantizedTensor):
            structure = structure_of(self._embedding.format)
            in_order = self._embedding.permutation is None
            self._native_embedding = in_order and structure is not None and structure.scales_inside
            if self._native_embedding:
                source = codes_of(self._embedding)
                self._native.set_embedding(source.data, source.about)

    # ---- tensors of the file ------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[str]]:
        """The matrices, as many at a time as may be in memory twice, plain or quantized and packed."""
        batch, size = list[str](), 0
        for place, (name, _) in self._matrices.items():
            nbytes = self._source.tensors.describe(name).nbytes
            if batch and size + nbytes > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(place)
            size += nbytes
        yield batch

    def _has(self, name: str) -> bool:
        return name in self._source.tensors

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises unless the file has such a tensor."""
        own = self._source.name(name)
        if not self._has(name):
            raise ModelError(complaint(CALL, own, "no such tensor", f"a {self.config.architecture} model that has it"))
        about = self._source.tensors.describe(name)
        if about.unsupported:
            types = f"a type that can be run: {', '.join([*ggml_names(), 'F32', 'F16', 'BF16'])}"
            takes = types if about.layout == "gguf" else "a layout that docs/checkpoints.md lists"
            raise ModelError(complaint(CALL, own, about.unsupported, takes))
        _check_shape(own, about.shape, shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._check(name, shape)
        tensor = self._source.tensors[name]
        if self._convert is not None:
            tensor = self._convert(name, tensor)
        _check_shape(self._source.name(name), tensor.shape, shape)
        return tensor

    def _vector(self, name: str, size: int) -> Floats:
        tensor = self._tensor(name, (size,))
        assert isinstance(tensor, np.ndarray)  # only matrices are quantized
        return np.ascontiguousarray(tensor, np.float32)

    def _matrix(self, name: str, shape: tuple[int, int]) -> Tensor:
        tensor = self._tensor(name, shape)
        if isinstance(tensor, QuantizedTensor):
            if reason := why_never(tensor.format) or why_not(tensor.group_size, shape[1]):
                got, takes = f"{tensor.format.name} weights ({reason})", "a format that the CPU engine multiplies with"
                raise ModelError(complaint(CALL, name, got, takes))
        elif not tensor.dtype.isnative or tensor.dtype.name not in PLAIN_TYPES:
            takes = f"quantized ones, {', '.join(PLAIN_TYPES[:-1])} or {PLAIN_TYPES[-1]}"
            raise ModelError(complaint(CALL, self._source.name(name), f"{tensor.dtype} weights", takes))
        self._formats.add(_kind_of(tensor))
        return tensor

    # ---- computing ----------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> str:
        """Whose kernels run, for people."""
        return f"{self._backend.level} ({', '.join(sorted(self._formats))})"

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time has gone since the model was loaded, by part of a layer."""
        return self._native.seconds()

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
        return rows * embedding_scale(self.config) if self.config.family.scaled_embedding else rows

    def run(self, passages: list[tuple[Cache, list[int]]], activations: str) -> Floats:
        """Feed tokens, each list behind what its cache holds: hidden states [all tokens in order, hidden].

        Texts of a batch come as one call; each gets the same numbers as alone while there are at most FEW_ROWS rows.
        A cache takes its tokens when all their keys are in it, so that whatever is raised leaves it as it was.
        """
        digits = DIGITS[check_activations("llm.run", activations)]
        caches = {id(cache): cache for cache, _ in passages}
        if len(caches) < len(passages):
            raise ModelError(complaint("llm.run", "passages", "a cache twice", "a cache for each text"))
        for cache in caches.values():
            self.check_cache("llm.run", cache)
        x = self.embed([token for _, tokens in passages for token in tokens])
        with ExitStack() as locks:
            for key in sorted(caches):  # in one order in all threads, so that no two wait for each other
                locks.enter_context(caches[key].lock)
            rows = []
            for cache, tokens in passages:
                start = len(cache.tokens)
                cache.reserve(start + len(tokens))
                rows.append((cache.keys, cache.values, start, len(tokens)))
            self._native.run(x, rows, digits)
            for cache, tokens in passages:
                cache.tokens.extend(tokens)
        return x

    def logits(self, hidden: Floats, activations: str) -> Floats:
        """Hidden states [m, hidden] to the scores of all tokens [m, vocabulary].

        The head is the largest matrix and waits for memory, so that x in 16 bits instead of 8 costs nothing there.
        """
        if (
            not isinstance(hidden, np.ndarray)
            or hidden.dtype != np.float32
            or hidden.shape[1:] != (self.config.hidden,)
        ):
            got = f"{getattr(hidden, 'dtype', type(hidden).__name__)} of shape {getattr(hidden, 'shape', '?')}"
            raise ShapeError(complaint("llm.logits", "hidden", got, f"float32 [m, {self.config.hidden}]"))
        out = np.empty((len(hidden), self.config.vocabulary), np.float32)
        digits = DIGITS["q16" if check_activations("llm.logits", activations) == "q8" else activations]
        self._native.finish(np.ascontiguousarray(hidden), digits, out)
        return out

    def check_tokens(self, call: str, argument: str, tokens: list[int]) -> None:
        """Raises unless the vocabulary has them all."""
        last = self.config.vocabulary - 1
        odd = next((token for token in tokens if not 0 <= token <= last), None)
        if odd is not None:
            raise ModelError(complaint(call, argument, f"token {odd}", f"tokens from 0 to {last}"))

    def check_cache(self, call: str, cache: Cache) -> None:
        """Raises unless the cache is this model's: another one's has other sizes, or keys that mean something else."""
        if cache.config is not self.config:
            got, takes = f"one of another model ({cache.config.name})", "one that this model's cache() made"
            raise ModelError(complaint(call, "cache", got, takes))


def _kind_of(matrix: Tensor) -> str:
    """The name of its format, or of its type where it is plain."""
    return matrix.format.name if isinstance(matrix, QuantizedTensor) else matrix.dtype.name


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelError(complaint(CALL, name, f"shape {shape}", f"{expected}, as the metadata says"))
