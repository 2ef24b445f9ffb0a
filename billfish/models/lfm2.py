"""LFM2 and 2.5: most layers are a convolution of three tokens between two gates, some are attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import (
    EXPERT_SIZE,
    FULL,
    NORMALIZED,
    TOP,
    Architecture,
    Config,
    Field,
    expert_modules,
    expert_settings,
)
from billfish.models.description import Convolution, FeedForward, Matrix, Mixer, Model, ShortConvolution, Vector
from billfish.models.difference import Difference
from billfish.models.fields import CONFIG_CALL, Fields, number, refuse

CONVOLUTION = "conv"


class Lfm2(Architecture):
    """LFM2 and LFM2.5, dense: short convolutions, attention with QK norm in some layers."""

    gguf, model_type, transformers = "lfm2", "lfm2", "Lfm2ForCausalLM"
    modules = Architecture.modules | {
        "attn_norm": "operator_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    }
    top = {name: module for name, module in TOP.items() if name != "output_norm"} | {
        "token_embd_norm": "model.embedding_norm"  # the last norm, whatever its name says
    }
    settings = {"conv_L_cache": "shortconv.l_cache"}
    defaults = {"conv_L_cache": 3, "norm_eps": 1e-5, "block_auto_adjust_ff_dim": True}
    fixed = {"conv_bias": False}
    theta = 1e6

    def difference(self, f: Fields, name: str, shape: tuple[int, ...]) -> Difference:
        if name == "shortconv.conv.weight":
            return Difference(folder_axis=1)
        return super().difference(f, name, shape)

    def completed(self, config: Config) -> dict[str, Any]:
        whole = super().completed(config)
        aliases = {
            "rms_norm_eps": "norm_eps",
            "intermediate_size": "block_ff_dim",
            "tie_word_embeddings": "tie_embedding",
        }
        return whole | {name: whole[alias] for name, alias in aliases.items() if alias in whole}

    def fields(self, config: Config) -> dict[str, Field]:
        fields, layers = super().fields(config), config["num_hidden_layers"]
        attention = config.get("full_attn_idxs") or range(layers)
        kinds = config.get("layer_types") or [FULL if i in attention else CONVOLUTION for i in range(layers)]
        if len(kinds) != layers or any(kind not in (CONVOLUTION, FULL) for kind in kinds):
            takes = f"{layers} of {CONVOLUTION} or {FULL}"
            raise CheckpointError(bad_argument(CONFIG_CALL, "layer_types", repr(kinds)[:80], takes))
        heads = int(number("num_key_value_heads", fields["attention.head_count_kv"]))
        return fields | {
            "attention.head_count_kv": [heads if kind == FULL else 0 for kind in kinds],
            "feed_forward_length": self.dense_size(config),
        }

    def dense_size(self, config: Config) -> int:
        """Of the feed-forward part, of which config.json has another number."""
        size = int(config["intermediate_size"])
        if not config.get("block_auto_adjust_ff_dim"):
            return size
        factor, step = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
        size = int(2 * size / 3)
        return size if factor is None else -(-int(number("block_ffn_dim_multiplier", factor) * size) // step) * step

    def config(self, fields: Fields, vocabulary: int, tensors: Container[str], *about: Any) -> dict[str, Any]:
        config, heads = super().config(fields, vocabulary, tensors, *about), fields.get("attention.head_count_kv")
        listed = heads if isinstance(heads, (list, tuple)) else [heads] * config["num_hidden_layers"]
        return {
            **config,
            "num_key_value_heads": max(listed),
            "layer_types": [FULL if count else CONVOLUTION for count in listed],
            "norm_eps": config["rms_norm_eps"],
            "block_auto_adjust_ff_dim": False,
        }

    def model(self, f: Fields, vocabulary: int) -> Model:
        model = super().model(f, vocabulary)
        return dataclasses.replace(model, final_norm=Vector("token_embd_norm.weight", model.hidden))

    def mixer(self, f: Fields, i: int) -> Mixer:
        if f.size("attention.head_count_kv", layer=i):
            return self.attention(f, i, head_norms="each")
        hidden, taps, at = f.size("embedding_length"), f.size("shortconv.l_cache"), f"blk.{i}.shortconv."
        refuse(not 1 <= taps <= 64, "shortconv.l_cache", taps, "a number of tokens from 1 to 64")
        refuse(hidden % 16 != 0, "embedding_length", hidden, "a multiple of 16")
        return ShortConvolution(
            Matrix(f"{at}in_proj", 3 * hidden, hidden),
            Convolution(f"{at}conv", hidden, taps),
            Matrix(f"{at}out_proj", hidden, hidden),
        )


class Lfm2Moe(Lfm2):
    """LFM2 MoE (8B-A1B, 24B-A2B): as LFM2 with a MoE with sigmoid router behind leading dense layers."""

    gguf, model_type, transformers = "lfm2moe", "lfm2_moe", "Lfm2MoeForCausalLM"
    modules = Lfm2.modules | expert_modules("feed_forward", "gate")
    parameters = {"exp_probs_b.bias": "feed_forward.expert_bias"}
    expert_files = "mixtral"
    settings = (
        Lfm2.settings
        | expert_settings("num_experts")
        | NORMALIZED
        | EXPERT_SIZE
        | {"num_dense_layers": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale"}
    )
    defaults = {"conv_L_cache": 3, "norm_eps": 1e-5, "num_dense_layers": 2, "norm_topk_prob": True}

    def fields(self, config: Config) -> dict[str, Field]:
        return {**super().fields(config), "expert_gating_func": 2}

    def config(self, fields: Fields, vocabulary: int, tensors: Container[str], *about: Any) -> dict[str, Any]:
        first = f"blk.{fields.size('leading_dense_block_count', 0)}.exp_probs_b.bias"
        return {**super().config(fields, vocabulary, tensors, *about), "use_expert_bias": first in tensors}

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        if i < f.size("leading_dense_block_count", 0):
            return self.dense(f, i, f.size("feed_forward_length"))
        biased = f.has(f"blk.{i}.exp_probs_b.bias")
        return self.mixture(f, i, renormalized=True, scores="sigmoid", selection_bias=biased)
