"""Granite 3 and 4: a Llama whose embedding, scores, residuals and logits have multipliers. In Granite 4 most layers are
a Mamba-2 scan."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import numpy as np

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import FULL, SHARED_SIZE, Architecture, Config, Field, expert_modules, expert_settings
from billfish.models.description import Convolution, FeedForward, Mamba2, Matrix, Mixer, Vector
from billfish.models.difference import NEGATIVE_EXPONENTIAL, Difference
from billfish.models.fields import CONFIG_CALL, Fields, number, refuse

LINEAR = "linear_attention"
KINDS = {LINEAR: LINEAR, "mamba": LINEAR, FULL: FULL, "attention": FULL}  # of layers, also by their older names
ROTATES = "rope.scaling.finetuned"  # llama.cpp's switch for rotary positions in granitehybrid


class GraniteMoe(Architecture):
    """Granite 3.0 and 3.1 MoE: MoE, multipliers of embedding, attention, residuals and logits."""

    gguf, model_type, transformers = "granitemoe", "granitemoe", "GraniteMoeForCausalLM"
    reordered = adjacent = True
    modules = Architecture.modules | expert_modules("block_sparse_moe", "router.layer")
    expert_files = "granite"
    settings = expert_settings() | {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    defaults = {"attention_multiplier": 1.0}

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        return self.mixture(f, i, renormalized=True)


class GraniteHybrid(GraniteMoe):
    """Granite 4.0 H (micro, tiny, small): as Granite 3 with Mamba-2 layers, dense or MoE with a shared expert, mostly
    without RoPE."""

    gguf, model_type, transformers = "granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM"
    modules = GraniteMoe.modules | {
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
        **{f"ffn_{name}{kind}": "shared_mlp.input_linear" for kind in ("", "_shexp") for name in ("gate", "up")},
        **{f"ffn_down{kind}": "shared_mlp.output_linear" for kind in ("", "_shexp")},
    }
    parameters = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
    joined = (("ffn_gate", "ffn_up"), ("ffn_gate_shexp", "ffn_up_shexp"))
    settings = GraniteMoe.settings | {
        "shared_intermediate_size": SHARED_SIZE,
        "mamba_d_conv": "ssm.conv_kernel",
        "mamba_d_state": "ssm.state_size",
        "mamba_n_groups": "ssm.group_count",
        "mamba_n_heads": "ssm.time_step_rank",
    }
    defaults = {
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_d_conv": 4,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
    }

    # ---- names -------------------------------------------------------------------------------------------------------

    def own_name(self, f: Fields, module: str) -> str:
        """The expert for all tokens is the feed-forward part of models without others."""
        plain = module.removesuffix("_shexp")
        if plain not in ("ffn_gate", "ffn_up", "ffn_down"):
            return module
        return f"{plain}_shexp" if f.size("expert_count", 0) else plain

    def difference(self, f: Fields, name: str, shape: tuple[int, ...]) -> Difference:
        if name.startswith(("ffn_gate.", "ffn_up.", "ffn_gate_shexp.", "ffn_up_shexp.")):
            size = f.size(SHARED_SIZE if f.size("expert_count", 0) else "feed_forward_length")
            first = size if name.startswith("ffn_up") else 0
            return Difference(rows=np.arange(first, first + size))
        if name == "ssm_norm.weight":
            groups = f.size("ssm.group_count")
            refuse(groups < 1, "ssm.group_count", groups, "a positive number")
            return Difference(gguf_groups=groups)
        known = {
            "ssm_conv1d.weight": Difference(folder_axis=1),
            "ssm_a": Difference(values=NEGATIVE_EXPONENTIAL, gguf_axis=1),
            "ssm_d": Difference(gguf_axis=1),
        }
        return known.get(name) or super().difference(f, name, shape)

    # ---- hyperparameters ---------------------------------------------------------------------------------------------

    def check(self, config: Config) -> None:
        super().check(config)
        first, last = config.get("time_step_limit") or (0.0, math.inf)
        endless = last == math.inf or last == {"__float__": "Infinity"}
        if first != 0 or not endless:
            takes = "0 and infinity: GGUF has no field for it"
            raise CheckpointError(bad_argument(CONFIG_CALL, "time_step_limit", [first, last], takes))

    def fields(self, config: Config) -> dict[str, Field]:
        fields, layers = super().fields(config), config["num_hidden_layers"]
        kinds = config.get("layer_types") or config.get("layers_block_type") or [LINEAR] * layers
        if len(kinds) != layers or any(kind not in KINDS for kind in kinds):
            takes = f"{layers} of {', '.join(KINDS)}"
            raise CheckpointError(bad_argument(CONFIG_CALL, "layer_types", repr(kinds)[:80], takes))
        heads = int(number("num_key_value_heads", fields["attention.head_count_kv"]))
        fields |= {
            "attention.head_count_kv": [heads if KINDS[kind] == FULL else 0 for kind in kinds],
            "ssm.inner_size": int(number("mamba_expand", config["mamba_expand"])) * config["hidden_size"],
            ROTATES: config.get("position_embedding_type") == "rope",
        }
        if not fields["expert_count"]:
            fields["feed_forward_length"] = fields.pop(SHARED_SIZE)
            del fields["expert_count"], fields["expert_used_count"]
        return fields

    def config(self, fields: Fields, vocabulary: int, tensors: Container[str], *about: Any) -> dict[str, Any]:
        config, heads = super().config(fields, vocabulary, tensors, *about), fields.get("attention.head_count_kv")
        listed = heads if isinstance(heads, (list, tuple)) else [heads] * config["num_hidden_layers"]
        inner = fields.size("ssm.inner_size")
        return {
            "num_local_experts": 0,
            "shared_intermediate_size": fields.get("feed_forward_length"),
            **config,
            "num_key_value_heads": max(listed),
            "layer_types": [FULL if count else LINEAR for count in listed],
            "mamba_expand": inner // fields.size("embedding_length"),
            "mamba_d_head": inner // fields.size("ssm.time_step_rank"),
            "mamba_conv_bias": any(f"blk.{i}.ssm_conv1d.bias" in tensors for i in range(len(listed))),
            "mamba_proj_bias": any(f"blk.{i}.ssm_in.bias" in tensors for i in range(len(listed))),
            "position_embedding_type": "rope" if fields.get(ROTATES, True) else None,
        }

    # ---- the description ---------------------------------------------------------------------------------------------

    def mixer(self, f: Fields, i: int) -> Mixer:
        if f.size("attention.head_count_kv", layer=i):
            return self.attention(f, i, rope=0 if f.get(ROTATES, True) else None)
        heads, groups = f.size("ssm.time_step_rank"), f.size("ssm.group_count")
        inner, state, taps = f.size("ssm.inner_size"), f.size("ssm.state_size"), f.size("ssm.conv_kernel")
        refuse(heads < 1, "ssm.time_step_rank", heads, "a positive number")
        refuse(inner < 1 or inner % (16 * heads) != 0, "ssm.inner_size", inner, f"{heads} heads, multiples of 16")
        refuse(groups < 1 or heads % groups != 0, "ssm.group_count", groups, f"a divisor of {heads} heads")
        refuse(state < 1 or state % 16 != 0, "ssm.state_size", state, "a multiple of 16")
        refuse(not 1 <= taps <= 64, "ssm.conv_kernel", taps, "a number of tokens from 1 to 64")
        hidden, at, channels = f.size("embedding_length"), f"blk.{i}.", inner + 2 * groups * state
        return Mamba2(
            heads,
            inner // heads,
            state,
            groups,
            projection=Matrix(f"{at}ssm_in", inner + channels + heads, hidden),
            convolution=Convolution(f"{at}ssm_conv1d", channels, taps, "allowed"),
            step=Vector(f"{at}ssm_dt.bias", heads),
            decay=Vector(f"{at}ssm_a", heads, stored=(heads, 1)),
            skip=Vector(f"{at}ssm_d", heads, stored=(heads, 1)),
            norm=Vector(f"{at}ssm_norm.weight", inner, stored=(groups, inner // groups)),
            output=Matrix(f"{at}ssm_out", hidden, inner),
        )

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        if not f.size("expert_count", 0):
            return self.dense(f, i, f.size("feed_forward_length"))
        size = f.size(SHARED_SIZE, 0)
        refuse(size % 16 != 0 or size < 0, SHARED_SIZE, size, "a multiple of 16")
        return self.mixture(f, i, renormalized=True, shared=self.dense(f, i, size, "_shexp") if size else None)
