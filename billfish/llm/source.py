"""Where a model comes from: a GGUF file, or a folder in any layout, which is looked at as if it were one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.gguf import Metadata
from billfish.checkpoints.names import EMBEDDING, HEAD, by_gguf_names, model_name
from billfish.errors import ModelError, complaint
from billfish.tokenizer import Tokenizer

CALL = "llm.load"


@dataclass(frozen=True)
class Source:
    """Tensors under GGUF's names and in its order of rows, and its fields. The rest is read when it is asked for."""

    tensors: Checkpoint
    fields: Mapping[str, Any]
    vocabulary: int  # tokens, and rows of the embedding
    tokenizer: Callable[[], Tokenizer]
    template: Callable[[], str | None]

    def name(self, tensor: str) -> str:
        """What the file calls a tensor, or would call it: what a user looks for."""
        return tensor if isinstance(self.fields, Metadata) else model_name(tensor) or tensor


def open_source(path: Path) -> Source:
    """A GGUF file, a safetensors file beside its config.json, or a folder with either. Reads nothing but headers."""
    checkpoint = Checkpoint(path)
    fields = checkpoint.metadata
    if isinstance(fields, Metadata):
        from billfish.tokenizer.gguf import read_metadata

        vocabulary = fields.length("tokenizer.ggml.tokens")
        return Source(checkpoint, fields, vocabulary, partial(read_metadata, fields), partial(_field, fields))
    from billfish.tokenizer import folder as files

    folder = path if path.is_dir() else path.parent
    tensors = by_gguf_names(checkpoint)
    files.check_files(folder)
    for name in (EMBEDDING, HEAD):
        if name not in tensors and (name == EMBEDDING or checkpoint.config.get("tie_word_embeddings") is False):
            raise ModelError(complaint(CALL, model_name(name) or name, "no such tensor", "a folder that has it"))
    vocabulary = tensors.describe(EMBEDDING).shape[0]
    tokenizer = partial(files.read_folder, folder, vocabulary)
    return Source(tensors, tensors.metadata, vocabulary, tokenizer, partial(files.chat_template, folder))


def _field(fields: Metadata) -> Any:
    return fields.get("tokenizer.chat_template")
