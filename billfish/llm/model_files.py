"""Where a model comes from: a GGUF file, or a folder in any layout, which is looked at as if it were one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.layouts.gguf import Metadata
from billfish.checkpoints.names.gguf_names import EMBEDDING, HEAD, by_gguf_names, is_of_images, model_name
from billfish.checkpoints.tokenizer import gguf_tokenizer, tokenizer_json
from billfish.checkpoints.tokenizer.tokenizer import TOKEN_COST, Tokenizer
from billfish.core.errors import ModelError, failure
from billfish.core.files import is_affordable
from billfish.models import ARCHITECTURES

CALL = "llm.load"
LOGGER = logging.getLogger("billfish")
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
    no_tokenizer: str = ""  # why there is none

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
    problem, vocabulary = gguf_tokenizer.problem_of(fields), fields.length("tokenizer.ggml.tokens")
    if fields.get("general.architecture") in ARCHITECTURES and not problem:
        gguf_tokenizer.check_fields(fields)
    if problem and EMBEDDING in checkpoint:
        vocabulary = checkpoint.describe(EMBEDDING).shape[0]
    _check_vocabulary(checkpoint, vocabulary)
    template = partial(fields.get, "tokenizer.chat_template")
    tokenizer: Callable[[], Tokenizer] = partial(gguf_tokenizer.read_metadata, fields)
    if problem:
        tokenizer = partial(gguf_tokenizer.without_tokenizer, fields, vocabulary)
    return Source(checkpoint, fields, vocabulary, tokenizer, template, problem)


def _of_folder(checkpoint: Checkpoint, path: Path) -> Source:
    tensors = by_gguf_names(checkpoint)
    if left := [name for name in checkpoint if is_of_images(name)]:
        LOGGER.info("%d tensors for images or sound are left out: only text is run.", len(left))
    untied = checkpoint.config.get("tie_word_embeddings") is False
    for name in (EMBEDDING, HEAD) if untied else (EMBEDDING,):
        if name not in tensors:
            raise ModelError(failure(CALL, f"{checkpoint.path} has no tensor {model_name(name) or name}"))
    shape = tensors.describe(EMBEDDING).shape
    vocabulary = shape[0] if shape else 0
    _check_vocabulary(checkpoint, vocabulary)
    problem = tokenizer_json.problem_of(path)
    read = tokenizer_json.without_tokenizer if problem else tokenizer_json.read_folder
    template = partial(tokenizer_json.chat_template, path)
    return Source(tensors, tensors.metadata, vocabulary, partial(read, path, vocabulary), template, problem)


def _check_vocabulary(checkpoint: Checkpoint, tokens: int) -> None:
    """Raises if there are more tokens than may be read for the sake of files of this size."""
    size = sum(file.size for file in checkpoint.files)
    if not is_affordable(tokens * TOKEN_COST, size):
        problem = f"{checkpoint.path} has {tokens} tokens in {size} bytes, which are too many"
        raise ModelError(failure(CALL, problem))
