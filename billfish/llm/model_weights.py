"""The tensors of a model, by the names of GGUF, in the sizes that its configuration says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from billfish.checkpoints.entry import SUPPORTED
from billfish.checkpoints.layouts.gguf import ggml_names
from billfish.checkpoints.names.gguf_names import EMBEDDING, HEAD
from billfish.checkpoints.names.rope_scaling import FACTOR_TENSORS, LONG_FACTORS, ROTARY_FACTORS, SHORT_FACTORS
from billfish.core.arrays import FLOATS
from billfish.core.errors import ModelError, bad_argument, failure
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.config import Config
from billfish.llm.kv_cache import Floats
from billfish.llm.model_files import Source
from billfish.llm.rotary_embedding import Rotation, plain_frequencies

CALL = "llm.load"
Tensor = QuantizedTensor | Array
Stack = QuantizedExperts | Array  # the matrices of experts, [E, N, K]
AnyTensor = TypeVar("AnyTensor", Tensor, Stack)
Convert = Callable[[str, Tensor | Stack], Tensor | Stack]


# The matrices of a layer, in the order in which the native decoder takes them.
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")  # of the expert that all tokens have
ROUTER = "ffn_gate_inp"
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
LAST_NORM = "output_norm.weight"
UNUSED = re.compile(r"blk\.\d+\.attn_rot_embd\..*")  # of old files: frequencies, which follow from the metadata


class Part(NamedTuple):
    """What a file has for a place: a matrix, or some of its rows."""

    name: str
    shape: tuple[int, int]
    first: int = 0  # row of the file's matrix
    rows: int = 0  # of the file's matrix; 0: no others than these


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
        self.matrices: dict[str, Part] = {}  # by place
        self.stacks: dict[str, tuple[int, int, int]] = {}  # of experts, by place: (E, N, K)
        self._joined: tuple[str, Tensor] | None = None  # the last matrix of which a part was wanted
        for i in range(c.layers):
            for place, part in self._layer_parts(f"blk.{i}."):
                self._check(part.name, (part.rows or part.shape[0], part.shape[1]))  # at once: layers may be any number
                self.matrices[place] = part
            for place, size in self._layer_stacks(f"blk.{i}."):
                self._check(f"{place}.weight", size)
                self.stacks[place] = size
        # Many models use the embedding as the last matrix too.
        self.tied = HEAD not in source.tensors
        self.matrices["head"] = Part(EMBEDDING if self.tied else HEAD, (c.vocabulary, c.hidden))
        for name in {EMBEDDING, self.matrices["head"].name}:
            self._check(name, (c.vocabulary, c.hidden))
        source.check_matrices(self._names())
        self._refuse_others()

    def _layer_parts(self, layer: str) -> Iterator[tuple[str, Part]]:
        """The matrices of a layer, by place."""
        c, experts = self.config, self.config.experts
        q_size, kv_size = c.heads * c.head_size, c.kv_heads * c.head_size
        yield from self._beside(layer, "attn_qkv", {"attn_q": q_size, "attn_k": kv_size, "attn_v": kv_size})
        yield f"{layer}attn_output", Part(f"{layer}attn_output.weight", (c.hidden, q_size))
        if experts is not None:
            yield layer + ROUTER, Part(f"{layer}{ROUTER}.weight", (experts.count, c.hidden))
        if experts is None or experts.shared:
            gate, up, down = SHARED if experts else FEED_FORWARD
            size = experts.shared if experts else c.feed_forward
            yield from self._beside(layer, up, {gate: size, up: size})
            yield layer + down, Part(f"{layer}{down}.weight", (c.hidden, size))

    def _beside(self, layer: str, whole: str, parts: dict[str, int]) -> Iterator[tuple[str, Part]]:
        """Matrices that are multiplied with the same x; where they are joined, they are rows of the file's `whole`."""
        c, first, rows = self.config, 0, sum(parts.values())
        for place, size in parts.items():
            if c.family.joined:
                yield layer + place, Part(f"{layer}{whole}.weight", (size, c.hidden), first, rows)
            else:
                yield layer + place, Part(f"{layer}{place}.weight", (size, c.hidden))
            first += size

    def _layer_stacks(self, layer: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
        c, experts = self.config, self.config.experts
        if experts is not None:
            for name in STACKS[:2]:
                yield layer + name, (experts.count, experts.feed_forward, c.hidden)
            yield layer + STACKS[2], (experts.count, c.hidden, experts.feed_forward)

    def _names(self) -> set[str]:
        """Of all matrices and stacks in the file, but for an embedding that is not the head."""
        return {part.name for part in self.matrices.values()} | {f"{place}.weight" for place in self.stacks}

    def _refuse_others(self) -> None:
        """Raises for a tensor that no part of the model multiplies with: the file is of a model with more parts."""
        used = {EMBEDDING, HEAD, LAST_NORM, *FACTOR_TENSORS}
        used |= {f"{name.removesuffix('.weight')}.{kind}" for name in self._names() for kind in ("weight", "bias")}
        for i in range(self.config.layers):
            used |= {vector[0] for vector in (*self._vectors(f"blk.{i}."), self._shared_gate(f"blk.{i}.")) if vector}
        used -= {f"{self.matrices['head'].name.removesuffix('.weight')}.bias"}
        for name in self.source.tensors:
            if name not in used and not UNUSED.fullmatch(name):
                problem = f"{self.config.architecture} models have no tensor {self.source.name(name)}"
                raise ModelError(failure(CALL, problem))

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def nbytes(self, place: str) -> int:
        """Of the matrix for a place, as the file has it; of a part, about."""
        part = self.matrices[place]
        whole = int(self.source.tensors.describe(part.name).nbytes)
        return whole * part.shape[0] // part.rows if part.rows else whole

    def packed_bytes(self) -> int:
        """About what all weights take when they are packed: plain ones as 16-bit numbers."""
        names = self._names() | {EMBEDDING}
        abouts = [self.source.tensors.describe(name) for name in names]
        return sum(about.nbytes // (2 if about.dtype.upper() in ("F32", "FLOAT32") else 1) for about in abouts)

    def matrix(self, place: str) -> Tensor:
        """The matrix for a place: quantized, or plain."""
        name, shape, first, rows = self.matrices[place]
        if not rows:
            tensor = self._matrix(name, shape)
        else:
            if self._joined is None or self._joined[0] != name:
                self._joined = name, self._matrix(name, (rows, shape[1]))
            whole, wanted = self._joined[1], np.arange(first, first + shape[0])
            tensor = whole.take_rows(wanted) if isinstance(whole, QuantizedTensor) else whole[wanted]
            if first + shape[0] == rows:
                self._joined = None
        return self._seen(place, tensor)

    def stack(self, place: str) -> Stack:
        """The matrices of all experts for a place: quantized, or plain."""
        tensor = self._tensor(f"{place}.weight", self.stacks[place])
        assert not isinstance(tensor, QuantizedTensor)  # which has no three axes
        return self._seen(place, self._checked(f"{place}.weight", tensor))

    def stack_bias(self, place: str) -> Floats | None:
        """What the products of all experts add, [E, N], where the model has it."""
        routing, name = self.config.family.routing, f"{place}.bias"
        must = routing is not None and routing.biases
        return self._numbers(name, self.stacks[place][:2]) if must or self.has(name) else None

    def shared_gate(self, layer: str) -> Floats | None:
        """What the expert for all tokens is gated by, [hidden], where there is one."""
        gate = self._shared_gate(layer)
        return None if gate is None else self.vector(*gate)

    def _shared_gate(self, layer: str) -> tuple[str, int] | None:
        experts = self.config.experts
        there = experts is not None and experts.shared > 0
        return (f"{layer}ffn_gate_inp_shexp.weight", self.config.hidden) if there else None

    @property
    def bits_per_weight(self) -> float:
        """Of the layers' matrices that were read, scales included. The head, often the embedding, does not count."""
        nbytes, weights = (sum(counts) for counts in zip(*self._stored.values(), strict=True))
        return 8 * nbytes / weights

    def embedding(self) -> Tensor:
        """A row for each token: [vocabulary, hidden]."""
        return self._matrix(EMBEDDING, (self.config.vocabulary, self.config.hidden))

    def vector(self, name: str, size: int) -> Floats:
        return self._numbers(name, (size,))

    def _numbers(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Numbers in memory of their own: a decoder keeps them, and somebody may overwrite the file."""
        tensor = self._tensor(name, shape)
        if not isinstance(tensor, np.ndarray):
            raise ModelError(bad_argument(CALL, self.source.name(name), tensor.format.name, "unquantized"))
        return np.array(tensor, np.float32, order="C")

    def bias(self, place: str) -> Floats | None:
        """What a product of a layer adds, where the model has it."""
        weight, shape, first, rows = self.matrices[place]
        name = f"{weight.removesuffix('.weight')}.bias"
        must = place.rpartition(".")[2] in self.config.family.must_have_biases
        if not must and not self.has(name):
            return None
        return self.vector(name, rows or shape[0])[first : first + shape[0]]

    def layer_vectors(self, layer: str) -> list[Floats | None]:
        """Norms and sinks of a layer, in the order in which the native decoder takes them."""
        return [None if vector is None else self.vector(*vector) for vector in self._vectors(layer)]

    def _vectors(self, layer: str) -> list[tuple[str, int] | None]:
        """Their names and sizes."""
        c, family = self.config, self.config.family
        after = [f"{layer}{name}.weight" for name in ("post_attention_norm", "post_ffw_norm")]
        return [
            (f"{layer}attn_norm.weight", c.hidden),
            (f"{layer}{family.feed_forward_norm}.weight", c.hidden),
            self._head_norm(f"{layer}attn_q", c.heads),
            self._head_norm(f"{layer}attn_k", c.kv_heads),
            *((name, c.hidden) if family.post_norms else None for name in after),
            (f"{layer}attn_sinks.weight", c.heads) if family.sinks else None,
        ]

    def head_norm(self, place: str, heads: int) -> Floats | None:
        """The norm of every head's q or k, or of all heads together, where the model has it."""
        norm = self._head_norm(place, heads)
        return None if norm is None else self.vector(*norm)

    def _head_norm(self, place: str, heads: int) -> tuple[str, int] | None:
        kind, size = self.config.family.head_norms, self.config.head_size
        return (f"{place}_norm.weight", size if kind == "each" else heads * size) if kind else None

    def rotations(self) -> list[Rotation]:
        """How layers rotate, by `LayerKind.rotation`."""
        c, scaling = self.config, self.config.rope_scaling
        frequencies = plain_frequencies(c.rope_size, c.rope_base)
        name = self._factors()
        if name is not None:
            factors = self.vector(name, c.rope_size // 2)
            if not (np.isfinite(factors) & (factors > 0)).all():
                raise ModelError(failure(CALL, f"{self.source.name(name)} has RoPE factors that are not positive"))
            frequencies = frequencies / factors
        rotations = [Rotation(scaling.scaled(frequencies, c.rope_base), scaling.magnitude)]
        return [*rotations, Rotation(plain_frequencies(c.rope_size, c.local_base))] if c.local_base else rotations

    def _factors(self) -> str | None:
        """The tensor with the divisors of all frequencies, if there is one."""
        if self.has(ROTARY_FACTORS):
            return ROTARY_FACTORS
        long = self.config.context > self.config.rope_scaling.original > 0
        name = LONG_FACTORS if long else SHORT_FACTORS
        return name if self.config.rope_scaling.kind == "longrope" or self.has(name) else None

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises unless the file has such a tensor."""
        own = self.source.name(name)
        if not self.has(name):
            raise ModelError(failure(CALL, f"the model has no tensor {own}, which {self.config.architecture} needs"))
        about = self.source.tensors.describe(name)
        if about.unsupported:
            types = f"Supported are {', '.join([*ggml_names(), 'F32', 'F16', 'BF16'])}."
            fix = types if about.layout == "gguf" else SUPPORTED
            raise ModelError(failure(CALL, f"{own} is not supported: {about.unsupported}", fix))
        _check_shape(own, about.shape, shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor | Stack:
        self._check(name, shape)
        tensor = self.source.tensors[name]
        if self._convert is not None:
            tensor = self._convert(name, tensor)
        _check_shape(self.source.name(name), tensor.shape, shape)
        return tensor

    def _matrix(self, name: str, shape: tuple[int, int]) -> Tensor:
        tensor = self._tensor(name, shape)
        assert not isinstance(tensor, QuantizedExperts)  # which has three axes
        return self._checked(name, tensor)

    def _checked(self, name: str, tensor: AnyTensor) -> AnyTensor:
        """Raises if its numbers are of a type that no product takes."""
        if isinstance(tensor, np.ndarray) and not (tensor.dtype.isnative and tensor.dtype.name in FLOATS):
            *types, last = FLOATS
            expected = f"a quantized type, {', '.join(types)} or {last}"
            raise ModelError(bad_argument(CALL, f"dtype of {self.source.name(name)}", tensor.dtype, expected))
        return tensor

    def _seen(self, place: str, tensor: AnyTensor) -> AnyTensor:
        self.kinds.add(tensor.dtype.name if isinstance(tensor, np.ndarray) else tensor.format.name)
        if place != "head":
            self._stored[place] = tensor.nbytes, math.prod(tensor.shape)
        return tensor


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelError(bad_argument(CALL, f"shape of {name}", shape, f"{expected}, as the metadata says"))
