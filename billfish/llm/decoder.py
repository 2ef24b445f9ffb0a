"""The transformer: a file's tensors, packed for the CPU engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.gguf import ggml_names
from billfish.checkpoints.names import ROTARY_FACTORS
from billfish.errors import ModelError, complaint
from billfish.llm.cache import Cache, Floats
from billfish.llm.config import Config, embedding_scale
from billfish.ops import dequantize
from billfish.storage import Array
from billfish.tensor import QuantizedTensor

CALL = "llm.load"
Tensor = QuantizedTensor | Array
Convert = Callable[[str, Tensor], Tensor]


# The matrices of a layer, in the order in which the native decoder takes them.
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class Decoder:
    """All layers of a model. Making one checks the file's tensors; `pack` puts them into the order of the kernels."""

    def __init__(self, tensors: Mapping[str, Entry], config: Config, convert: Convert | None = None) -> None:
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self._backend, self._tensors, self._convert, self.config = backend, tensors, convert, config
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
        self._matrices: dict[str, Tensor] = {}
        for i in range(c.layers):
            for name, shape in zip(MATRICES, sizes, strict=True):
                self._matrices[f"blk.{i}.{name}"] = self._matrix(f"blk.{i}.{name}.weight", shape)
        # Many models use the embedding as the last matrix too.
        head = "output" if "output.weight" in tensors else "token_embd"
        self._matrices["head"] = self._matrix(f"{head}.weight", (c.vocabulary, c.hidden))
        self._embedding = self._tensor("token_embd.weight", (c.vocabulary, c.hidden))
        self.last_norm = self._vector("output_norm.weight", c.hidden)
        self.formats = sorted({_kind_of(matrix) for matrix in self._matrices.values()})

    def pack(self, under_way: Callable[[], object]) -> None:
        """Make it ready to run. When native threads begin to pack, beside which Python can go on, calls `under_way`."""
        c, family = self.config, self.config.family

        def matrices() -> Iterator[Tensor]:
            yield from self._matrices.values()
            under_way()  # earlier, two threads would wait for each other to let go of the interpreter

        packed = dict(zip(self._matrices, self._backend.pack_all(matrices()), strict=True))
        self._matrices.clear()
        self.nbytes = sum(weights.nbytes for weights in packed.values())
        factors = self._vector(ROTARY_FACTORS, c.rope_size // 2) if ROTARY_FACTORS in self._tensors else None
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
                biased = family.biases and name in ("attn_q", "attn_k", "attn_v")
                matrix = packed[layer + name]
                bias = self._vector(f"{layer}{name}.bias", matrix.shape[0]) if biased else None
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

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            raise ModelError(complaint(CALL, name, "no such tensor", f"a {self.config.architecture} file that has it"))
        entry = self._tensors[name]
        about = entry.description
        if about.unsupported:
            takes = f"a type that can be run: {', '.join([*ggml_names(), 'F32', 'F16', 'BF16'])}"
            raise ModelError(complaint(CALL, name, f"ggml's type {about.dtype}", takes))
        _check_shape(name, about.shape, shape)
        tensor = entry.read(None, None)
        if self._convert is not None:
            tensor = self._convert(name, tensor)
        _check_shape(name, tensor.shape, shape)
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
            raise ModelError(complaint(CALL, name, f"{tensor.dtype} weights", takes))
        return tensor

    # ---- computing ----------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> str:
        """Whose kernels run, for people."""
        return f"{self._backend.level} ({', '.join(self.formats)})"

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
