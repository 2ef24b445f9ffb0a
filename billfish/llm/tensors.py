"""The tensors of a model, by the names of GGUF, in the sizes that its configuration says."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from billfish.arrays import FLOATS
from billfish.checkpoints.gguf import ggml_names
from billfish.checkpoints.names import EMBEDDING, HEAD, ROTARY_FACTORS
from billfish.errors import ModelError, complaint
from billfish.llm.cache import Floats
from billfish.llm.config import Config
from billfish.llm.source import Source
from billfish.storage import Array
from billfish.tensor import QuantizedTensor

CALL = "llm.load"
Tensor = QuantizedTensor | Array
Convert = Callable[[str, Tensor], Tensor]

# The matrices of a layer, in the order in which the native decoder takes them.
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class ModelTensors:
    """What a decoder is made of. Making one checks that all matrices are there; nothing but headers is read.

    converted: `convert` gives tensors of other sizes than the file's.
    """

    def __init__(
        self, source: Source, config: Config, convert: Convert | None = None, *, converted: bool = False
    ) -> None:
        self.source, self.config, self._convert = source, config, convert
        self.converted = converted
        self.kinds: set[str] = set()  # formats, and types of plain matrices, that were read
        self._stored: dict[str, tuple[int, int]] = {}  # bytes and weights of the layers' matrices that were read
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
        self.matrices: dict[str, tuple[str, tuple[int, int]]] = {}  # what the file has for them: name and shape
        for i in range(c.layers):
            for name, shape in zip(MATRICES, sizes, strict=True):
                self._check(f"blk.{i}.{name}.weight", shape)  # at once: a count of layers may be any
                self.matrices[f"blk.{i}.{name}"] = f"blk.{i}.{name}.weight", shape
        # Many models use the embedding as the last matrix too.
        self.tied = HEAD not in source.tensors
        self.matrices["head"] = EMBEDDING if self.tied else HEAD, (c.vocabulary, c.hidden)
        for name in {EMBEDDING, self.matrices["head"][0]}:
            self._check(name, (c.vocabulary, c.hidden))
        source.check_matrices(name for name, _ in self.matrices.values())

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def nbytes(self, place: str) -> int:
        """Of the matrix for a place, as the file has it."""
        return int(self.source.tensors.describe(self.matrices[place][0]).nbytes)

    def packed_bytes(self) -> int:
        """About what all weights take when they are packed: plain ones as 16-bit numbers."""
        names = {name for name, _ in self.matrices.values()} | {EMBEDDING}
        abouts = [self.source.tensors.describe(name) for name in names]
        return sum(about.nbytes // (2 if about.dtype.upper() in ("F32", "FLOAT32") else 1) for about in abouts)

    def matrix(self, place: str) -> Tensor:
        """The matrix for a place: quantized, or plain."""
        tensor = self._matrix(*self.matrices[place])
        self.kinds.add(tensor.format.name if isinstance(tensor, QuantizedTensor) else tensor.dtype.name)
        if place != "head":
            self._stored[place] = tensor.nbytes, math.prod(tensor.shape)
        return tensor

    @property
    def bits_per_weight(self) -> float:
        """Of the layers' matrices that were read, scales included. The head, often the embedding, does not count."""
        nbytes, weights = (sum(counts) for counts in zip(*self._stored.values(), strict=True))
        return 8 * nbytes / weights

    def embedding(self) -> Tensor:
        """A row for each token: [vocabulary, hidden]."""
        return self._matrix(EMBEDDING, (self.config.vocabulary, self.config.hidden))

    def vector(self, name: str, size: int) -> Floats:
        """Numbers in memory of their own: a decoder keeps them, and somebody may overwrite the file."""
        tensor = self._tensor(name, (size,))
        assert isinstance(tensor, np.ndarray)  # only matrices are quantized
        return np.array(tensor, np.float32, order="C")

    def bias(self, place: str) -> Floats | None:
        """What a product of a layer adds, where the model has it."""
        name = f"{place}.bias"
        must = self.config.family.biases and place.endswith(("attn_q", "attn_k", "attn_v"))
        return self.vector(name, self.matrices[place][1][0]) if must or self.has(name) else None

    def head_norm(self, place: str) -> Floats | None:
        """The norm of every head's q or k, where the model has it."""
        return self.vector(f"{place}_norm.weight", self.config.head_size) if self.config.family.head_norms else None

    def frequencies(self) -> list[float]:
        """The angle by which each pair of a head rotates from one position to the next."""
        c = self.config
        factors = self.vector(ROTARY_FACTORS, c.rope_size // 2) if self.has(ROTARY_FACTORS) else None
        return c.rope_frequencies(factors).tolist()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises unless the file has such a tensor."""
        own = self.source.name(name)
        if not self.has(name):
            raise ModelError(complaint(CALL, own, "no such tensor", f"a {self.config.architecture} model that has it"))
        about = self.source.tensors.describe(name)
        if about.unsupported:
            types = f"a type that can be run: {', '.join([*ggml_names(), 'F32', 'F16', 'BF16'])}"
            takes = types if about.layout == "gguf" else "a layout that docs/checkpoints.md lists"
            raise ModelError(complaint(CALL, own, about.unsupported, takes))
        _check_shape(own, about.shape, shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._check(name, shape)
        tensor = self.source.tensors[name]
        if self._convert is not None:
            tensor = self._convert(name, tensor)
        _check_shape(self.source.name(name), tensor.shape, shape)
        return tensor

    def _matrix(self, name: str, shape: tuple[int, int]) -> Tensor:
        tensor = self._tensor(name, shape)
        if isinstance(tensor, np.ndarray) and not (tensor.dtype.isnative and tensor.dtype.name in FLOATS):
            *types, last = FLOATS
            takes = f"quantized ones, {', '.join(types)} or {last}"
            raise ModelError(complaint(CALL, self.source.name(name), f"{tensor.dtype} weights", takes))
        return tensor


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelError(complaint(CALL, name, f"shape {shape}", f"{expected}, as the metadata says"))
