"""Where a model comes from: a GGUF file, or a folder in any layout, which is looked at as if it were one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.layouts.gguf import Metadata
from billfish.checkpoints.names.gguf_names import EMBEDDING, HEAD, by_gguf_names, model_name
from billfish.checkpoints.tokenizer import gguf_tokenizer, tokenizer_json
from billfish.checkpoints.tokenizer.tokenizer import TOKEN_COST, Tokenizer
from billfish.core.errors import ModelError, failure
from billfish.core.files import is_affordable
from billfish.models import ARCHITECTURES

CALL = "llm.load"
PADDING = 32  # rows and columns of packed matrices are multiples of it, or of a divisor
MATRIX_COST = 4096  # bytes of memory for a packed matrix, beside its weights


@dataclass(frozen=True)
class Source:
    """Tensors under GGUF's names and in its order of rows, and its fields. The rest is read when it is asked for."""

    tensors: Checkpoint
    fields: Mapping[str, Any]
    vocabulary: int  # tokens, and rows of the embedding
    tokenizer: Callable[[], Tokenizer]
    template: Callable[[], str | None]

    def check_matrices(self, names: Iterable[str]) -> None:
        """Raises if these matrices, packed, would take more memory than files of this size may cost: each is padded."""
        cost, size = 0, sum(file.size for file in self.tensors.files)
        for name in names:
            about = self.tensors.describe(name)
            n, k = (-(-extent // PADDING) * PADDING for extent in about.shape[-2:])
            cost += math.prod(about.shape[:-2]) * (MATRIX_COST + n * k * math.ceil(about.bits_per_weight / 8))
        if not is_affordable(cost, size):
            problem = f"{self.tensors.path} has too many small matrices: {size} bytes would need {cost} in memory"
            raise ModelError(failure(CALL, problem))

    def name(self, tensor: str) -> str:
        """What the file calls a tensor, or would call it: what a user looks for."""
        if isinstance(self.fields, Metadata):
            return tensor
        return model_name(tensor, str(self.fields["general.architecture"])) or tensor


def open_source(path: Path) -> Source:
    """A GGUF file, a safetensors file beside its config.json, or a folder with either. Reads nothing but headers."""
    checkpoint = Checkpoint(path)
    if isinstance(checkpoint.metadata, Metadata):
        return _of_gguf(checkpoint, checkpoint.metadata)
    assert checkpoint.folder is not None  # it is not in memory
    return _of_folder(checkpoint, checkpoint.folder)


def _of_gguf(checkpoint: Checkpoint, fields: Metadata) -> Source:
    if fields.get("general.architecture") in ARCHITECTURES:
        gguf_tokenizer.check_fields(fields)
    vocabulary = fields.length("tokenizer.ggml.tokens")
    _check_vocabulary(checkpoint, vocabulary)
    template = partial(fields.get, "tokenizer.chat_template")
    return Source(checkpoint, fields, vocabulary, partial(gguf_tokenizer.read_metadata, fields), template)


def _of_folder(checkpoint: Checkpoint, path: Path) -> Source:
    tensors = by_gguf_names(checkpoint)
    tokenizer_json.check_files(path)
    untied = checkpoint.config.get("tie_word_embeddings") is False
    for name in (EMBEDDING, HEAD) if untied else (EMBEDDING,):
        if name not in tensors:
            raise ModelError(failure(CALL, f"{checkpoint.path} has no tensor {model_name(name) or name}"))
    shape = tensors.describe(EMBEDDING).shape
    vocabulary = shape[0] if shape else 0
    _check_vocabulary(checkpoint, vocabulary)
    tokenizer = partial(tokenizer_json.read_folder, path, vocabulary)
    return Source(tensors, tensors.metadata, vocabulary, tokenizer, partial(tokenizer_json.chat_template, path))


def _check_vocabulary(checkpoint: Checkpoint, tokens: int) -> None:
    """Raises if there are more tokens than may be read for the sake of files of this size."""
    size = sum(file.size for file in checkpoint.files)
    if not is_affordable(tokens * TOKEN_COST, size):
        problem = f"{checkpoint.path} has {tokens} tokens in {size} bytes, which are too many"
        raise ModelError(failure(CALL, problem))
