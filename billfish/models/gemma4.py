"""Gemma 4: head sizes that differ by layer, values normalized, layers that share keys and values, per-layer embeddings,
experts beside a dense part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import (
    FULL,
    POST_NORMS,
    SLIDING,
    TOP,
    WINDOW,
    Architecture,
    Config,
    Field,
    expert_modules,
)
from billfish.models.description import (
    Attention,
    Block,
    DenseAndMixture,
    FeedForward,
    Matrix,
    Model,
    PerLayerEmbedding,
    PerLayerInput,
    Vector,
)
from billfish.models.fields import CONFIG_CALL, Fields, number, positive, refuse, section
from billfish.models.rope import ROTARY_FACTORS, Rope, rotated_share

SHARED_LAYERS, LAYER_SIZE = "attention.shared_kv_layers", "embedding_length_per_layer_input"


class Gemma4(Architecture):
    """Gemma 4, text (E2B, E4B, 26B-A4B, 31B): as Gemma 3 with head sizes by layer, V norm, shared KV layers,
    per-layer embeddings, MoE beside a dense MLP."""

    gguf, model_type, transformers = "gemma4", "gemma4_text", "Gemma4ForCausalLM"
    modules = (
        Architecture.modules
        | POST_NORMS
        | expert_modules("", "router.proj")
        | {
            "ffn_norm": "pre_feedforward_layernorm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        }
    )
    parameters = {
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
    }
    top = TOP | {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    unpublished_head = True
    expert_files = "stacked"
    biases = {"attention_bias": "attn_q"}
    settings = WINDOW | {
        "num_kv_shared_layers": SHARED_LAYERS,
        "hidden_size_per_layer_input": LAYER_SIZE,
        "final_logit_softcapping": "final_logit_softcapping",
    }
    defaults = {"sliding_window": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0}
    hidden_acts = ("gelu_pytorch_tanh",)
    head_dim = 256
    theta = 1e6
    partial_rotation = True
    rope_layers = FULL
    windows, window_step = True, 6
    activation = "gelu"

    # ---- hyperparameters ---------------------------------------------------------------------------------------------

    def fields(self, config: Config) -> dict[str, Field]:
        fields, layers = super().fields(config), config["num_hidden_layers"]
        narrow, overrides = self._narrow_layers(config), section(config, "per_layer_config")

        def of_layer(i: int, name: str, usual: Any) -> int:
            return int(number(name, section(overrides, str(i)).get(name, usual)))

        whole = [i for i in range(layers) if not narrow[i]]
        sizes = {of_layer(i, "head_dim", config.get("global_head_dim") or 512) for i in whole}
        if len(sizes) != 1:
            expected = "one size of heads for all layers without a window"
            raise CheckpointError(bad_argument(CONFIG_CALL, "per_layer_config", sorted(sizes), expected))
        [size] = sizes
        kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        full_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        listed = [int(kv_heads)] * layers
        for i in whole:
            listed[i] = of_layer(i, "num_key_value_heads", full_heads or kv_heads)
        shared, small = int(config["num_kv_shared_layers"] or 0), config["intermediate_size"]
        if config.get("use_double_wide_mlp") and shared:
            fields["feed_forward_length"] = [small if i < layers - shared else 2 * small for i in range(layers)]
        if config.get("enable_moe_block"):
            fields |= {
                "expert_count": int(number("num_experts", config.get("num_experts"))),
                "expert_used_count": int(number("top_k_experts", config.get("top_k_experts"))),
                "expert_feed_forward_length": int(number("moe_intermediate_size", config.get("moe_intermediate_size"))),
            }
        local = section(section(config, "rope_parameters"), SLIDING)
        if local.get("rope_type", "default") != "default":
            raise CheckpointError(bad_argument(CONFIG_CALL, f"rope_parameters.{SLIDING}", repr(local), "'default'"))
        head_size = fields["attention.key_length"]
        return fields | {
            "attention.head_count_kv": listed if len(set(listed)) > 1 else listed[0],
            "attention.key_length": size,
            "attention.value_length": size,
            "attention.key_length_swa": head_size,
            "attention.value_length_swa": head_size,
            "attention.sliding_window_pattern": narrow,
            "rope.dimension_count": size,
            "rope.dimension_count_swa": head_size,
            "rope.freq_base_swa": float(positive("rope_theta", local.get("rope_theta", 10000.0))),
        }

    def _narrow_layers(self, config: Config) -> list[bool]:
        """Which layers have a window. The last has none, whatever is said."""
        layers = config["num_hidden_layers"]
        kinds = config.get("layer_types") or [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
        return [*(kind == SLIDING for kind in kinds[:-1]), False]

    def config(
        self, fields: Fields, vocabulary: int, tensors: Container[str], factors: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, Any]:
        config = super().config(fields, vocabulary, tensors, {})
        last = self.layers(fields) - 1
        full = next((i for i in range(last) if not self.is_narrow(fields, i)), last)
        window = next((i for i in range(last) if self.is_narrow(fields, i)), full)
        size, last_size = (fields.size("feed_forward_length", layer=i) for i in (0, last))
        config |= {
            "head_dim": fields.get("attention.key_length_swa"),
            "global_head_dim": fields.get("attention.key_length"),
            "num_key_value_heads": fields.size("attention.head_count_kv", layer=window),
            "num_global_key_value_heads": fields.size("attention.head_count_kv", layer=full),
            "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
            "intermediate_size": size,
            "use_double_wide_mlp": last_size != size,
            "vocab_size_per_layer_input": vocabulary,
            "hidden_activation": self.hidden_acts[0],
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": rotated_share(factors.get(ROTARY_FACTORS)),
                    "rope_theta": fields.get("rope.freq_base", self.theta),
                },
                SLIDING: {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 10000.0)},
            },
        }
        if fields.get("expert_count"):
            config |= {
                "enable_moe_block": True,
                "num_experts": fields.get("expert_count"),
                "top_k_experts": fields.get("expert_used_count"),
                "moe_intermediate_size": fields.get("expert_feed_forward_length"),
            }
        return config

    # ---- the description ---------------------------------------------------------------------------------------------

    def model(self, f: Fields, vocabulary: int) -> Model:
        model, layers, size = super().model(f, vocabulary), self.layers(f), f.size(LAYER_SIZE, 0)
        sharing = [f"blk.{i}." for i, block in enumerate(model.blocks) if self._source(f, i) is not None]
        ignored = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")  # of layers that share another's
        embedding = PerLayerEmbedding(
            size,
            Matrix("per_layer_token_embd", vocabulary, layers * size, bias="none"),
            Matrix("per_layer_model_proj", layers * size, model.hidden, bias="none"),
            Vector("per_layer_proj_norm.weight", size),
            scale=math.sqrt(size),
            projection_scale=model.hidden**-0.5,
        )
        return dataclasses.replace(
            model,
            per_layer_embedding=embedding if size else None,
            unused=tuple(at + name for at in sharing for name in ignored),
        )

    def embedding_scale(self, hidden: int) -> float:
        return math.sqrt(hidden)

    def ropes(self, f: Fields) -> tuple[Rope, ...]:
        base, local = f.positive("rope.freq_base", self.theta), f.positive("rope.freq_base_swa", 10000.0)
        size = f.size("rope.dimension_count_swa", f.size("attention.key_length_swa"))
        return Rope(self._rope_size(f), base), Rope(size, local, divisors=False)

    def block(self, f: Fields, i: int) -> Block:
        hidden, size, at = f.size("embedding_length"), f.size(LAYER_SIZE, 0), f"blk.{i}."
        own_input = PerLayerInput(
            Matrix(f"{at}inp_gate", size, hidden),
            Matrix(f"{at}proj", hidden, size),
            self.norm(f, i, "post_norm"),
            self.activation,
        )
        scaled = f.has(f"{at}layer_output_scale.weight")
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=self.norm(f, i, "attn_norm"),
            feed_forward_norm=self.norm(f, i, "ffn_norm"),
            mixer_post_norm=self.norm(f, i, "post_attention_norm"),
            feed_forward_post_norm=self.norm(f, i, "post_ffw_norm"),
            per_layer_input=own_input if size else None,
            output_scale=Vector(f"{at}layer_output_scale.weight", 1) if scaled else None,
        )

    def mixer(self, f: Fields, i: int) -> Attention:
        window, source = self.window(f, i), self._source(f, i)
        attention = self.attention(f, i, head_norms="each", window=window, rope=1 if window else 0)
        changes: dict[str, Any] = {"scale": 1.0, "v_norm": True, "shares": source}
        if source is not None:
            changes |= {"k": None, "v": None, "k_norm": None}
        elif not f.has(f"blk.{i}.attn_v.weight"):
            changes |= {"v": None}
        return dataclasses.replace(attention, **changes)

    def head_size(self, f: Fields, i: int) -> int:
        return f.size("attention.key_length_swa" if self.is_narrow(f, i) else "attention.key_length")

    def _source(self, f: Fields, i: int) -> int | None:
        """The layer whose keys and values layer i attends to, if they are another's: the last of its kind that has some
        of its own."""
        shared = f.size(SHARED_LAYERS, 0)
        first = self.layers(f) - shared
        refuse(not 0 <= shared < self.layers(f), SHARED_LAYERS, shared, "fewer than there are layers")
        if i < first:
            return None
        alike = [j for j in range(first) if self.is_narrow(f, j) == self.is_narrow(f, i)]
        refuse(not alike, SHARED_LAYERS, shared, "fewer: each kind of layers needs one with keys of its own")
        return alike[-1]

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        dense = self.dense(f, i, f.size("feed_forward_length", layer=i))
        if not f.size("expert_count", 0):
            return dense
        hidden, at = f.size("embedding_length"), f"blk.{i}."
        mixture = self.mixture(f, i, renormalized=True)
        scale = Vector(f"{at}ffn_down_exps.scale", mixture.experts) if f.has(f"{at}ffn_down_exps.scale") else None
        router = dataclasses.replace(mixture.router, expert_scale=scale)
        return DenseAndMixture(
            dense,
            dataclasses.replace(mixture, router=router),
            dense_post_norm=self.norm(f, i, "post_ffw_norm_1"),
            router_norm=Vector(f"{at}ffn_gate_inp.scale", hidden, hidden**-0.5),
            mixture_norm=self.norm(f, i, "pre_ffw_norm_2"),
            mixture_post_norm=self.norm(f, i, "post_ffw_norm_2"),
        )


class Gemma4Unified(Gemma4):
    """Gemma 4 12B, text: as the other Gemma 4."""

    model_type, transformers = "gemma4_unified_text", "Gemma4UnifiedForCausalLM"
    defaults = Gemma4.defaults | {"sliding_window": 1024, "hidden_size_per_layer_input": 0}

    def matches(self, fields: Fields) -> bool:
        return False  # a GGUF file becomes a folder of the other type, which can say the same
