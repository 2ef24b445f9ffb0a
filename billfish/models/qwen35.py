"""Qwen 3.5 to 3.8: three of four layers are a gated delta net, every fourth is attention with an output gate."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import (
    EXPERT_SIZE,
    FULL,
    SHARED_SIZE,
    Architecture,
    Config,
    Field,
    expert_modules,
    expert_settings,
)
from billfish.models.description import (
    Block,
    Convolution,
    FeedForward,
    GatedDeltaNet,
    Matrix,
    Mixer,
    Model,
    MtpBlock,
    Vector,
)
from billfish.models.difference import NEGATIVE_EXPONENTIAL, PLUS_ONE, SAME, Difference, tiled
from billfish.models.fields import CONFIG_CALL, Fields, number, refuse, section

LINEAR = "linear_attention"
STEP = 4  # every so many-th layer is attention, if nothing is said
SECTIONS = [11, 11, 10, 0]  # of rotary pairs, for positions in time, height and width: one number for all in a text
DRAFT = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}


class Qwen35(Architecture):
    """Qwen 3.5, 3.6 and 3.8, text: gated delta nets, attention with QK norm, output gate and partial RoPE in every
    fourth layer."""

    gguf, model_type, transformers = "qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM"
    modules = (
        {name: module for name, module in Architecture.modules.items() if name != "ffn_norm"}
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        }
        | {f"nextn.{name.replace('.', '_')}": name for name in DRAFT}
    )
    parameters = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
    biases = {"attention_bias": "attn_q"}
    settings = {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "mtp_num_hidden_layers": "nextn_predict_layers",
    }
    defaults = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    head_dim = 256
    partial_rotation = True
    reordered_columns: ClassVar[tuple[str, ...]] = ("ssm_out",)
    tiled: ClassVar[bool] = True  # the order of value heads in GGUF

    # ---- names -------------------------------------------------------------------------------------------------------

    def prefixes(self, layers: int) -> dict[str, str]:
        draft = {f"mtp.{theirs}.": f"model.layers.{layers}.{ours}." for ours, theirs in DRAFT.items()}
        return super().prefixes(layers) | draft | {"mtp.layers.0.": f"model.layers.{layers}."}

    def difference(self, f: Fields, name: str, shape: tuple[int, ...]) -> Difference:
        if name.endswith("norm.weight") and name != "ssm_norm.weight":
            return Difference(values=PLUS_ONE)
        if not name.startswith(("ssm_", "attn_qkv.", "attn_gate.")):
            return super().difference(f, name, shape)
        groups, heads = self.heads(f)
        size, keys, sharing = f.size("ssm.inner_size") // heads, groups * f.size("ssm.state_size"), heads // groups
        moves = self.tiled and sharing > 1
        each = tiled(groups, sharing, 1) if moves else None  # one number or row for each value head
        values = tiled(groups, sharing, size) if moves else None
        channels = tiled(groups, sharing, size, 2 * keys) if moves else None
        known = {
            "attn_qkv.weight": Difference(rows=channels),
            "attn_gate.weight": Difference(rows=values),
            "ssm_beta.weight": Difference(rows=each),
            "ssm_alpha.weight": Difference(rows=each),
            "ssm_dt.bias": Difference(rows=each),
            "ssm_a": Difference(rows=each, values=NEGATIVE_EXPONENTIAL),
            "ssm_conv1d.weight": Difference(rows=channels, folder_axis=1),
            "ssm_out.weight": Difference(columns=values),
        }
        return known.get(name, SAME)

    # ---- hyperparameters ---------------------------------------------------------------------------------------------

    def completed(self, config: Config) -> dict[str, Any]:
        whole = super().completed(config)
        if not any("partial_rotary_factor" in section(whole, rule) for rule in ("rope_parameters", "rope_scaling")):
            whole.setdefault("partial_rotary_factor", 0.25)
        return whole

    def fields(self, config: Config) -> dict[str, Field]:
        fields, layers = super().fields(config), config["num_hidden_layers"]
        heads, size = (number(name, config[name]) for name in ("linear_num_value_heads", "linear_value_head_dim"))
        kinds, step = config.get("layer_types"), config.get("full_attention_interval") or STEP
        if kinds is not None and (len(kinds) != layers or any(kind not in (LINEAR, FULL) for kind in kinds)):
            takes = f"{layers} of {LINEAR} or {FULL}"
            raise CheckpointError(bad_argument(CONFIG_CALL, "layer_types", repr(kinds)[:80], takes))
        linear = [(i + 1) % step != 0 for i in range(layers)] if kinds is None else [kind == LINEAR for kind in kinds]
        step = linear.index(False) + 1 if False in linear else layers + 1
        drafts = int(config.get("mtp_num_hidden_layers") or 0)
        fields |= {
            "block_count": layers + drafts,
            "ssm.inner_size": int(heads * size),
            "full_attention_interval": step,
        }
        if linear != [(i + 1) % step != 0 for i in range(layers)]:
            fields["attention.recurrent_layers"] = [*linear, *[False] * drafts]
        return fields | self.rope_sections(config)

    def rope_sections(self, config: Config) -> dict[str, Field]:
        listed = self.rule(config).numbers.get("mrope_section") or SECTIONS
        return {"rope.dimension_sections": [*listed, 0, 0, 0, 0][:4]}

    def config(self, fields: Fields, vocabulary: int, tensors: Container[str], *about: Any) -> dict[str, Any]:
        layers, heads = self.layers(fields), fields.size("ssm.time_step_rank")
        kinds = [LINEAR if self.is_recurrent(fields, i) else FULL for i in range(layers)]
        attention = kinds.index(FULL) if FULL in kinds else 0
        return {
            **super().config(fields, vocabulary, tensors, *about),
            "num_hidden_layers": layers,
            "linear_value_head_dim": fields.size("ssm.inner_size") // heads,
            "layer_types": kinds,
            "attention_bias": f"blk.{attention}.attn_q.bias" in tensors,
        }

    def is_recurrent(self, f: Fields, i: int) -> bool:
        """Whether layer i is a delta net."""
        listed, step = f.get("attention.recurrent_layers"), f.size("full_attention_interval", STEP)
        if isinstance(listed, (list, tuple, np.ndarray)):
            refuse(len(listed) < self.layers(f), "attention.recurrent_layers", f"{len(listed)} layers", "all layers")
            return bool(listed[i])
        refuse(step < 1, "full_attention_interval", step, "a number of layers")
        return (i + 1) % step != 0

    # ---- the description ---------------------------------------------------------------------------------------------

    def model(self, f: Fields, vocabulary: int) -> Model:
        model, i = super().model(f, vocabulary), self.layers(f)
        has_block = model.draft_blocks > 0 and f.has(f"blk.{i}.nextn.eh_proj.weight", default=False)
        return replace(model, mtp=self.mtp_block(f, i)) if has_block else model

    def mtp_block(self, f: Fields, i: int) -> MtpBlock:
        """Its layer is attention, whatever layers before it are."""
        hidden = f.size("embedding_length")
        return MtpBlock(
            Matrix(f"blk.{i}.nextn.eh_proj", hidden, 2 * hidden, bias="none"),
            self.norm(f, i, "nextn.enorm"),
            self.norm(f, i, "nextn.hnorm"),
            replace(self.block(f, i), mixer=self.attention(f, i, head_norms="each", gated=True)),
            self.norm(f, i, "nextn.shared_head_norm"),
        )

    def block(self, f: Fields, i: int) -> Block:
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=self.norm(f, i, "attn_norm"),
            feed_forward_norm=self.norm(f, i, "post_attention_norm"),  # before the feed-forward part
        )

    def mixer(self, f: Fields, i: int) -> Mixer:
        return self.delta_net(f, i) if self.is_recurrent(f, i) else self.attention(f, i, head_norms="each", gated=True)

    def delta_net(self, f: Fields, i: int) -> GatedDeltaNet:
        key_heads, heads = self.heads(f)
        key_size, inner, taps = f.size("ssm.state_size"), f.size("ssm.inner_size"), f.size("ssm.conv_kernel")
        refuse(key_size < 1 or key_size % 16 != 0, "ssm.state_size", key_size, "a multiple of 16")
        refuse(inner < 1 or inner % (16 * heads) != 0, "ssm.inner_size", inner, f"{heads} heads, multiples of 16")
        refuse(not 1 <= taps <= 64, "ssm.conv_kernel", taps, "a number of tokens from 1 to 64")
        hidden, at, channels = f.size("embedding_length"), f"blk.{i}.", 2 * key_heads * key_size + inner
        beta, alpha = self.gates(f, i, heads, hidden)
        return GatedDeltaNet(
            key_heads,
            heads,
            key_size,
            inner // heads,
            self.tiled,
            qkv=Matrix(f"{at}attn_qkv", channels, hidden),
            z=Matrix(f"{at}attn_gate", inner, hidden),
            beta=beta,
            alpha=alpha,
            convolution=Convolution(f"{at}ssm_conv1d", channels, taps),
            decay=Vector(f"{at}ssm_a", heads),
            step=Vector(f"{at}ssm_dt.bias", heads),
            norm=Vector(f"{at}ssm_norm.weight", inner // heads),
            output=Matrix(f"{at}ssm_out", hidden, inner),
        )

    def heads(self, f: Fields) -> tuple[int, int]:
        """Of keys, and of values."""
        key_heads, heads = f.size("ssm.group_count"), f.size("ssm.time_step_rank")
        refuse(key_heads < 1, "ssm.group_count", key_heads, "a positive number")
        takes = f"a multiple of {key_heads}, the key heads"
        refuse(heads < 1 or heads % key_heads != 0, "ssm.time_step_rank", heads, takes)
        return key_heads, heads

    def gates(self, f: Fields, i: int, heads: int, hidden: int) -> tuple[Matrix, Matrix]:
        """beta and alpha."""
        return Matrix(f"blk.{i}.ssm_beta", heads, hidden), Matrix(f"blk.{i}.ssm_alpha", heads, hidden)


class Qwen35Moe(Qwen35):
    """Qwen 3.5, 3.6 and 3.8 MoE (35B-A3B, 122B-A10B, 397B-A17B), text: as Qwen 3.5 with a MoE and a gated shared
    expert."""

    gguf, model_type, transformers = "qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"
    modules = (
        Qwen35.modules
        | expert_modules("mlp", "gate", shared="shared_expert")
        | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
    )
    settings = (
        Qwen35.settings
        | expert_settings("num_experts")
        | EXPERT_SIZE
        | {"shared_expert_intermediate_size": SHARED_SIZE}
    )

    def completed(self, config: Config) -> dict[str, Any]:
        whole = super().completed(config)
        whole.setdefault("intermediate_size", whole.get("moe_intermediate_size"))  # no layer is dense
        return whole

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        size = f.size(SHARED_SIZE, f.get("feed_forward_length"))
        refuse(size % 16 != 0 or size < 0, SHARED_SIZE, size, "a multiple of 16")
        return self.mixture(f, i, renormalized=True, shared=self.dense(f, i, size, "_shexp"), shared_gate=True)
