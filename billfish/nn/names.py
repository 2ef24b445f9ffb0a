"""A checkpoint under the names that models use. Only GGUF has names, and an order of rows, of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints import Checkpoint, Description, load
from billfish.errors import CheckpointError, complaint
from billfish.format import Array
from billfish.formats.words import WordFormat
from billfish.tensor import QuantizedTensor

# What llama.cpp calls the modules of a decoder with gated feed-forward blocks, and what transformers and mlx-lm do.
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
COMPUTED = ("rope_freqs.weight",)  # which the configuration says as well


class ModelWeights(Mapping[str, "QuantizedTensor | Array"]):
    """The tensors of a checkpoint by a model's names, read when asked for."""

    def __init__(self, source: Checkpoint | str | os.PathLike[str]) -> None:
        self.checkpoint = source if isinstance(source, Checkpoint) else load(source)
        self._names = {name: name for name in self.checkpoint}
        self._heads: dict[str, int] = {}  # of rotary heads whose rows llama.cpp has reordered
        if self.checkpoint.layouts == {"gguf"}:
            self._from_gguf(self.checkpoint.metadata)

    def _from_gguf(self, fields: Mapping[str, Any]) -> None:
        architecture = fields.get("general.architecture")
        if architecture not in ARCHITECTURES:
            got = f"architecture {architecture!r}"
            raise CheckpointError(complaint("load", str(self.checkpoint.path), got, " or ".join(ARCHITECTURES)))
        self._names = {}
        for name in self.checkpoint:
            if name in COMPUTED:
                continue
            module, _, kind = name.rpartition(".")
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
            known = f"model.layers.{match[1]}.{LAYER.get(match[2], '')}" if match else TOP.get(module, "")
            if not known or known.endswith("."):
                takes = "the tensors of a decoder with gated feed-forward blocks"
                raise CheckpointError(complaint("load", str(self.checkpoint.path), repr(name), takes))
            self._names[f"{known}.{kind}"] = name
            if architecture == "llama" and match and match[2] in ("attn_q", "attn_k"):
                heads = fields["llama.attention.head_count"]
                if match[2] == "attn_k":
                    heads = fields.get("llama.attention.head_count_kv", heads)
                self._heads[f"{known}.{kind}"] = int(heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> QuantizedTensor | Array:
        return self.read(name)

    def describe(self, name: str) -> Description:
        """What a tensor is; reads nothing but headers."""
        return self.checkpoint.describe(self._names[name])

    def permutation(self, name: str) -> NDArray[np.int64] | None:
        """As Checkpoint.permutation."""
        return self.checkpoint.permutation(self._names[name])

    def is_reordered(self, name: str) -> bool:
        """Whether columns are stored in another order. Headers only say where they may be; this looks."""
        return self.describe(name).act_order and self.permutation(name) is not None

    def read(
        self, name: str, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> QuantizedTensor | Array:
        """As Checkpoint.read, with rows in the model's order."""
        tensor = self.checkpoint.read(self._names[name], rows=rows, columns=columns)
        if name not in self._heads:
            return tensor
        # llama.cpp rotates neighbours, transformers the halves of a head: row (h, half, i) is stored as (h, i, half).
        n = self.describe(name).shape[0]
        head = n // self._heads[name]
        start, stop = rows or (0, n)
        if start % head or stop % head:
            raise CheckpointError(complaint("read", "rows", f"({start}, {stop})", f"whole heads of {head} for {name}"))
        order = np.arange(stop - start).reshape(-1, head // 2, 2).swapaxes(1, 2).ravel()
        return take_rows(tensor, order) if isinstance(tensor, QuantizedTensor) else tensor[order]


def take_rows(tensor: QuantizedTensor, rows: NDArray[Any]) -> QuantizedTensor:
    """W[rows], by moving storage: rows of a matrix never share a word, a block or a scale."""
    axis = 1 if isinstance(tensor.format, WordFormat) else 0
    storage = {name: a if a.ndim == 0 else np.take(a, rows, axis=axis) for name, a in tensor.storage.items()}
    return QuantizedTensor.from_storage(tensor.format, storage, tensor.group_size, call="take_rows")
