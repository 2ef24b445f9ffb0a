"""Qwen3-Next: as Qwen 3.5 MoE, with the products of a delta net as two matrices, in which each key head has rows."""

from __future__ import annotations

import numpy as np

from billfish.models.architecture import NORMALIZED, Config, Field
from billfish.models.description import Matrix
from billfish.models.difference import Difference
from billfish.models.fields import Fields
from billfish.models.qwen35 import Qwen35Moe


class Qwen3Next(Qwen35Moe):
    """Qwen3-Next 80B-A3B, Qwen3-Coder-Next: as Qwen 3.5 MoE."""

    gguf, model_type, transformers = "qwen3next", "qwen3_next", "Qwen3NextForCausalLM"
    modules = {name: module for name, module in Qwen35Moe.modules.items() if name not in ("ssm_beta", "ssm_alpha")} | {
        "attn_qkv": "linear_attn.in_proj_qkvz",
        "attn_gate": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    }
    joined = (("attn_qkv", "attn_gate"),)
    settings = Qwen35Moe.settings | NORMALIZED
    defaults = Qwen35Moe.defaults | {"norm_topk_prob": True}
    fixed = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    reordered_columns, tiled = (), False

    def difference(self, f: Fields, name: str, shape: tuple[int, ...]) -> Difference:
        if name not in ("attn_qkv.weight", "attn_gate.weight"):
            return super().difference(f, name, shape)
        # A folder has q, k, v and z of a key head below each other.
        (groups, _), key = self.heads(f), f.size("ssm.state_size")
        value = f.size("ssm.inner_size") // groups
        rows = np.arange(groups * 2 * (key + value)).reshape(groups, -1)
        q, k, v, z = (part.ravel() for part in np.split(rows, np.cumsum([key, key, value]), axis=1))
        return Difference(rows=z if name == "attn_gate.weight" else np.concatenate((q, k, v)))

    def rope_sections(self, config: Config) -> dict[str, Field]:
        return {}

    def gates(self, f: Fields, i: int, heads: int, hidden: int) -> tuple[Matrix, Matrix]:
        """In one matrix, of a key head those of beta above those of alpha."""
        rows = np.arange(2 * heads).reshape(f.size("ssm.group_count"), 2, -1)
        beta, alpha = (
            Matrix(f"blk.{i}.ssm_ba", heads, hidden, joined=2 * heads, chosen=tuple(rows[:, half].ravel().tolist()))
            for half in range(2)
        )
        return beta, alpha
