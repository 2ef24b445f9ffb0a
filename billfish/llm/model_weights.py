"""The tensors of a model: those that its description names, read when they are asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import SUPPORTED
from billfish.checkpoints.layouts.gguf import ggml_names
from billfish.core.arrays import FLOATS
from billfish.core.errors import ModelError, bad_argument, failure
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.kv_cache import Floats
from billfish.llm.model_files import Source
from billfish.models.architecture import EMBEDDING, HEAD
from billfish.models.description import Convolution, Matrix, Model, Stack, Vector, tensors_in
from billfish.models.rope import FACTOR_TENSORS, LONG_FACTORS, ROTARY_FACTORS, SHORT_FACTORS, Rope
from billfish.ops.matmul import dequantize

CALL = "llm.load"
Tensor = QuantizedTensor | Array
ExpertTensor = QuantizedExperts | Array  # the matrices of experts, [E, N, K]
AnyTensor = TypeVar("AnyTensor", Tensor, ExpertTensor)
Convert = Callable[[str, Tensor | ExpertTensor], Tensor | ExpertTensor]

UNUSED = r"blk\.\d+\.attn_rot_embd\..*"  # of old files: frequencies, which follow from the metadata
MOST_DRAFTS = 16  # blocks behind the others


class ModelTensors:
    """What a decoder is made of. Making one checks that all matrices are there; nothing but headers is read.

    converted: `convert` gives tensors of other sizes than the file's.
    """

    def __init__(
        self, source: Source, config: Model, convert: Convert | None = None, *, converted: bool = False
    ) -> None:
        self.source, self.config, self._convert = source, config, convert
        self.converted = converted
        self.kinds: set[str] = set()  # formats, and types of plain matrices, that were read
        self._stored: dict[Matrix | Stack, tuple[int, int]] = {}  # bytes and weights of layers' matrices that were read
        self._joined: tuple[str, Tensor] | None = None  # the last matrix of which a part was wanted
        parts = [*tensors_in((config.blocks, config.per_layer_embedding))]
        encoder = config.encoder
        others = None if config.per_layer_embedding is None else config.per_layer_embedding.embedding
        positions, types = (None, None) if encoder is None else (encoder.positions, encoder.token_types)
        self.tables = [config.embedding, *(table for table in (others, positions, types) if table is not None)]
        self.matrices = [part for part in parts if isinstance(part, Matrix) and part not in self.tables]
        self.matrices += [config.head] if encoder is None else []
        self.small = [part for part in tensors_in(encoder and encoder.classifier) if isinstance(part, Matrix)]
        self.stacks = [part for part in parts if isinstance(part, Stack)]
        self.weights: list[Matrix | Stack] = [*self.matrices, *self.stacks]  # what is multiplied with
        self._all = [*self.tables, *self.weights, *self.small]
        for matrix in dict.fromkeys(self._all):
            self._check(f"{matrix.name}.weight", matrix.shape)
        source.check_matrices({f"{matrix.name}.weight" for matrix in self.weights})
        self._refuse_others([*parts, *tensors_in((encoder, config.final_norm))])

    def _refuse_others(self, parts: list[Vector | Matrix | Stack | Convolution]) -> None:
        """Raises for a tensor that no part of the model multiplies with: the file is of a model with more parts."""
        used = {EMBEDDING, HEAD, *FACTOR_TENSORS, *self.config.unused}
        for part in parts:
            used |= {part.name} if isinstance(part, Vector) else {f"{part.name}.weight"}
            if not isinstance(part, Vector) and part.bias != "none":
                used.add(f"{part.name}.bias")
        drafts = range(self.config.layers, self.config.layers + min(self.config.draft_blocks, MOST_DRAFTS))
        kept = re.compile("|".join([UNUSED, *(rf"blk\.{i}\..*" for i in drafts)]))
        for name in self.source.tensors:
            if name not in used and not kept.fullmatch(name):
                problem = f"{self.config.architecture} models have no tensor {self.source.name(name)}"
                raise ModelError(failure(CALL, problem))

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def nbytes(self, matrix: Matrix) -> int:
        """Of a matrix, as the file has it; of a part, about."""
        whole = int(self.source.tensors.describe(f"{matrix.name}.weight").nbytes)
        return whole * matrix.rows // matrix.joined if matrix.joined else whole

    def packed_bytes(self) -> int:
        """About what all weights take when they are packed: plain ones as 16-bit numbers."""
        names = {f"{matrix.name}.weight" for matrix in self._all}
        abouts = [self.source.tensors.describe(name) for name in names]
        return sum(about.nbytes // (2 if about.dtype.upper() in ("F32", "FLOAT32") else 1) for about in abouts)

    def matrix(self, matrix: Matrix) -> Tensor:
        """A matrix: quantized, or plain."""
        if not matrix.joined:
            tensor = self._matrix(matrix)
        else:
            if self._joined is None or self._joined[0] != matrix.name:
                self._joined = matrix.name, self._matrix(matrix)
            whole, last = self._joined[1], matrix.first + matrix.rows
            wanted = np.array(matrix.chosen) if matrix.chosen else np.arange(matrix.first, last)
            tensor = whole.take_rows(wanted) if isinstance(whole, QuantizedTensor) else whole[wanted]
            if wanted[-1] == matrix.joined - 1:
                self._joined = None
        return self._seen(matrix, tensor)

    def stack(self, stack: Stack) -> ExpertTensor:
        """The matrices of all experts: quantized, or plain."""
        name = f"{stack.name}.weight"
        tensor = self._tensor(name, stack.shape)
        assert not isinstance(tensor, QuantizedTensor)  # which has no three axes
        return self._seen(stack, self._checked(name, tensor))

    @property
    def bits_per_weight(self) -> float:
        """Of the layers' matrices that were read, scales included. The head, often the embedding, does not count."""
        nbytes, weights = (sum(counts) for counts in zip(*self._stored.values(), strict=True))
        return 8 * nbytes / weights

    def numbers(self, matrix: Matrix) -> tuple[Floats, Floats | None]:
        """A small matrix in float32, and its bias if it has one."""
        tensor = self._matrix(matrix)
        plain = dequantize(tensor) if isinstance(tensor, QuantizedTensor) else np.array(tensor, np.float32, order="C")
        return plain, self.bias(matrix)

    def table(self, table: Matrix) -> Tensor:
        """A matrix with a row for each token."""
        return self._matrix(table)

    def embed(self, tokens: list[int]) -> Floats:
        """The rows of the embedding: [tokens, hidden]."""
        table = self.table(self.config.embedding)
        rows = dequantize(table.take_rows(tokens)) if isinstance(table, QuantizedTensor) else table[tokens]
        return rows.astype(np.float32) * np.float32(self.config.embedding_scale)

    @overload
    def vector(self, vector: Vector) -> Floats: ...

    @overload
    def vector(self, vector: Vector | None) -> Floats | None: ...

    def vector(self, vector: Vector | None) -> Floats | None:
        """Its numbers; None for none."""
        if vector is None:
            return None
        shape = vector.stored or (vector.size,)
        if self.has(vector.name) and self.source.tensors.describe(vector.name).shape == (1, vector.size):
            shape = (1, vector.size)  # as llama.cpp writes the gate of a shared expert
        numbers = self._numbers(vector.name, shape).reshape(vector.size)
        return numbers if vector.factor == 1 else numbers * np.float32(vector.factor)

    def convolution(self, part: Convolution) -> tuple[Floats, Floats | None]:
        """Weights [taps, channels], and the bias [channels] where the model has it."""
        weights, bias = self._numbers(f"{part.name}.weight", (part.channels, part.taps)), f"{part.name}.bias"
        has_bias = part.bias == "required" or (part.bias == "allowed" and self.has(bias))
        return np.ascontiguousarray(weights.T), self._numbers(bias, (part.channels,)) if has_bias else None

    def _numbers(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Numbers in memory of their own: a decoder keeps them, and somebody may overwrite the file."""
        tensor = self._tensor(name, shape)
        if not isinstance(tensor, np.ndarray):
            raise ModelError(bad_argument(CALL, self.source.name(name), tensor.format.name, "unquantized"))
        return np.array(tensor, np.float32, order="C")

    def bias(self, part: Matrix | Stack) -> Floats | None:
        """What a product adds, [N] or of all experts [E, N], where the model has it."""
        name = f"{part.name}.bias"
        if part.bias == "none" or (part.bias == "allowed" and not self.has(name)):
            return None
        if isinstance(part, Stack):
            return self._numbers(name, part.shape[:2])
        return self._numbers(name, part.shape[:1])[part.first : part.first + part.rows]

    def frequencies(self, rope: Rope) -> NDArray[np.float64]:
        """By how many radians each pair of a head rotates from one position to the next, [pairs]."""
        name, divisors = self._factors() if rope.divisors else None, None
        if name is not None:
            divisors = self._numbers(name, (rope.size // 2,))
            if not (np.isfinite(divisors) & (divisors > 0)).all():
                raise ModelError(failure(CALL, f"{self.source.name(name)} has RoPE factors that are not positive"))
        return rope.frequencies(divisors)

    def _factors(self) -> str | None:
        """The tensor with the divisors of all frequencies, if there is one."""
        if self.has(ROTARY_FACTORS):
            return ROTARY_FACTORS
        scaling = self.config.ropes[0].scaling
        name = LONG_FACTORS if self.config.context > scaling.original > 0 else SHORT_FACTORS
        return name if scaling.kind == "longrope" or self.has(name) else None

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

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor | ExpertTensor:
        self._check(name, shape)
        tensor = self.source.tensors[name]
        if self._convert is not None:
            tensor = self._convert(name, tensor)
        _check_shape(self.source.name(name), tensor.shape, shape)
        return tensor

    def _matrix(self, matrix: Matrix) -> Tensor:
        """All rows of the file's matrix."""
        name = f"{matrix.name}.weight"
        tensor = self._tensor(name, matrix.shape)
        assert not isinstance(tensor, QuantizedExperts)  # which has three axes
        return self._checked(name, tensor)

    def _checked(self, name: str, tensor: AnyTensor) -> AnyTensor:
        """Raises if its numbers are of a type that no product takes."""
        if isinstance(tensor, np.ndarray) and not (tensor.dtype.isnative and tensor.dtype.name in FLOATS):
            *types, last = FLOATS
            expected = f"a quantized type, {', '.join(types)} or {last}"
            raise ModelError(bad_argument(CALL, f"dtype of {self.source.name(name)}", tensor.dtype, expected))
        return tensor

    def _seen(self, part: Matrix | Stack, tensor: AnyTensor) -> AnyTensor:
        self.kinds.add(tensor.dtype.name if isinstance(tensor, np.ndarray) else tensor.format.name)
        if part != self.config.head:
            self._stored[part] = tensor.nbytes, math.prod(tensor.shape)
        return tensor


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelError(bad_argument(CALL, f"shape of {name}", shape, f"{expected}, as the metadata says"))
