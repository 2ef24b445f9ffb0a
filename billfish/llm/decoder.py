"""The transformer: a file's tensors, packed for the CPU engine, and the cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from billfish.activations import ACTIVATIONS
from billfish.backends import BACKENDS
from billfish.backends.cpu import CpuBackend, _cpu
from billfish.backends.cpu.source import codes_of
from billfish.backends.cpu.structure import structure_of
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.names import ROTARY_FACTORS
from billfish.errors import FormatError, ModelError, complaint
from billfish.llm.config import Config, embedding_scale
from billfish.ops import dequantize
from billfish.storage import Array
from billfish.tensor import QuantizedTensor

CALL = "llm.load"
Floats = NDArray[np.float32]
Tensor = QuantizedTensor | Array
Convert = Callable[[str, Tensor], Tensor]


class Cache:
    """Keys and values of one text, for all layers; `tokens` are those whose are in it.

    Keys lie in blocks of 16 positions with the positions innermost, which is how the kernel reads them.
    """

    def __init__(self, config: Config, capacity: int = 256) -> None:
        self.config = config
        self.tokens: list[int] = []
        self.keys, self.values = self._arrays(capacity)

    def _arrays(self, capacity: int) -> tuple[Floats, Floats]:
        c, blocks = self.config, -(-capacity // _cpu.KEY_BLOCK)
        keys = np.zeros((c.layers, c.kv_heads, blocks, c.head_size, _cpu.KEY_BLOCK), np.float32)
        return keys, np.zeros((c.layers, c.kv_heads, blocks * _cpu.KEY_BLOCK, c.head_size), np.float32)

    @property
    def capacity(self) -> int:
        return self.values.shape[2]

    def reserve(self, positions: int) -> None:
        """Make room, doubling, so that a long text is not copied at every token."""
        if positions <= self.capacity:
            return
        keys, values = self._arrays(max(positions, min(2 * self.capacity, self.config.context)))
        keys[:, :, : self.keys.shape[2]], values[:, :, : self.capacity] = self.keys, self.values
        self.keys, self.values = keys, values

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


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
        self._matrices: dict[str, QuantizedTensor] = {}
        for i in range(c.layers):
            for name, shape in zip(MATRICES, sizes, strict=True):
                self._matrices[f"blk.{i}.{name}"] = self._matrix(f"blk.{i}.{name}.weight", shape)
        # Many models use the embedding as the last matrix too.
        head = "output" if "output.weight" in tensors else "token_embd"
        self._matrices["head"] = self._matrix(f"{head}.weight", (c.vocabulary, c.hidden))
        self._embedding = self._tensor("token_embd.weight", (c.vocabulary, c.hidden))
        self.last_norm = self._vector("output_norm.weight", c.hidden)
        self.formats = sorted({tensor.format.name for tensor in self._matrices.values()})

    def pack(self, under_way: Callable[[], object]) -> None:
        """Make it ready to run. When native threads begin to pack, beside which Python can go on, calls `under_way`."""
        c, family = self.config, self.config.family

        def matrices() -> Iterator[QuantizedTensor]:
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
        for i in range(c.layers):
            layer = f"blk.{i}."
            weights = []
            for name in MATRICES:
                biased = family.biases and name in ("attn_q", "attn_k", "attn_v")
                matrix = packed[layer + name]
                bias = self._vector(f"{layer}{name}.bias", matrix.shape[0]) if biased else None
                weights.append((matrix.description, matrix.data, bias))
            self._native.add_layer(
                self._vector(f"{layer}attn_norm.weight", c.hidden),
                self._vector(f"{layer}ffn_norm.weight", c.hidden),
                self._vector(f"{layer}attn_q_norm.weight", c.head_size) if family.head_norms else None,
                self._vector(f"{layer}attn_k_norm.weight", c.head_size) if family.head_norms else None,
                weights,
            )
        self._native.set_head(self.last_norm, (packed["head"].description, packed["head"].data, None))
        self._native_embedding = False
        if isinstance(self._embedding, QuantizedTensor):
            structure = structure_of(self._embedding.format)
            self._native_embedding = structure is not None and structure.scales_inside
            if self._native_embedding:
                source = codes_of(self._embedding)
                self._native.set_embedding(source.data, source.about)

    # ---- tensors of the file ------------------------------------------------------------------------------------

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            raise ModelError(complaint(CALL, name, "no such tensor", f"a {self.config.architecture} file that has it"))
        tensor = self._tensors[name].read(None, None)
        if self._convert is not None:
            tensor = self._convert(name, tensor)
        if tensor.shape != shape:
            raise ModelError(complaint(CALL, name, f"shape {tensor.shape}", f"{shape}, as the metadata says"))
        return tensor

    def _vector(self, name: str, size: int) -> Floats:
        tensor = self._tensor(name, (size,))
        assert isinstance(tensor, np.ndarray)  # only matrices are quantized
        return np.ascontiguousarray(tensor, np.float32)

    def _matrix(self, name: str, shape: tuple[int, int]) -> QuantizedTensor:
        tensor = self._tensor(name, shape)
        if not isinstance(tensor, QuantizedTensor):
            raise ModelError(complaint(CALL, name, f"{tensor.dtype} weights", "quantized ones"))
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
        rows: Floats
        if self._native_embedding:
            rows = np.empty((len(tokens), self.config.hidden), np.float32)
            self._native.embed(tokens, rows)
        elif isinstance(self._embedding, QuantizedTensor):
            blocks = {"blocks": self._embedding.storage["blocks"][tokens]}
            rows = dequantize(QuantizedTensor.from_storage(self._embedding.format, blocks))
        else:
            rows = self._embedding[tokens].astype(np.float32)
        return rows * embedding_scale(self.config) if self.config.family.scaled_embedding else rows

    def run(self, spans: list[tuple[Cache, list[int]]], activations: str) -> Floats:
        """Feed tokens, each list behind what its cache holds: hidden states [all tokens in order, hidden].

        Texts of a batch come as one call; each gets the same numbers as alone while there are at most FEW_ROWS rows.
        """
        x = self.embed([token for _, tokens in spans for token in tokens])
        rows = []
        for cache, tokens in spans:
            start = len(cache.tokens)
            cache.reserve(start + len(tokens))
            rows.append((cache.keys, cache.values, start, len(tokens)))
            cache.tokens += tokens
        self._native.run(x, rows, planes_of(activations))
        return x

    def logits(self, hidden: Floats, activations: str) -> Floats:
        """Hidden states [m, hidden] to the scores of all tokens [m, vocabulary].

        The head is the largest matrix and waits for memory, so that x in 16 bits instead of 8 costs nothing there.
        """
        out = np.empty((len(hidden), self.config.vocabulary), np.float32)
        self._native.finish(np.ascontiguousarray(hidden), planes_of("q16" if activations == "q8" else activations), out)
        return out


def planes_of(activations: str) -> int:
    """The number by which kernels know a kind of activations."""
    if activations not in ACTIVATIONS:
        raise FormatError(complaint("llm", "activations", repr(activations), " or ".join(map(repr, ACTIVATIONS))))
    return ACTIVATIONS.index(activations)
