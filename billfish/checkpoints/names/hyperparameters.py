"""The sizes and settings of a decoder, as config.json has them and as the fields of GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.names.config_fields import Field, setting_fields, settings_of
from billfish.checkpoints.names.rope_scaling import (
    LOCAL_THETA,
    positive,
    rotary_share_of,
    rule_of,
    scaling_fields,
    theta_of,
)
from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, bad_argument, failure

# transformers' types of models, and the architectures of llama.cpp that they are.
ARCHITECTURE_OF = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "phi3": "phi3",
    "smollm3": "smollm3",
}
ARCHITECTURES = tuple(dict.fromkeys(ARCHITECTURE_OF.values()))
MODEL_TYPES = {architecture: kind for kind, architecture in reversed(ARCHITECTURE_OF.items())}  # the first of several
CLASSES = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}  # of transformers; the others' are their type's name
# Names in config.json, and in GGUF behind the architecture. No model is without the first four.
NEEDED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
SIZES = NEEDED | {
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
LARGEST_HEAD = 1 << 16  # numbers of a head, and heads
# Where config.json does not say; the others' heads share out `hidden_size`.
HEAD_SIZES = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3": 256, "gpt-oss": 64}
# What feed-forward gates go through. Gemma's first files say "gelu" and mean its approximation.
GATES = dict.fromkeys(("gemma", "gemma2", "gemma3"), ("gelu_pytorch_tanh", "gelu"))
SILU = ("silu",)
WINDOWED = ("gemma2", "gemma3", "gpt-oss", "phi3")  # architectures of which GGUF files have windows

Fields = dict[str, Field]


class UnknownModel(CheckpointError):
    """A model whose tensors cannot be renamed between GGUF and Hugging Face."""


def fields_of(config: Mapping[str, Any], path: Path) -> Fields:
    """GGUF's fields for a config.json that is `completed`: all that a decoder must know. Raises UnknownModel for one of
    another kind."""
    model_type = str(config.get("model_type"))
    architecture = ARCHITECTURE_OF.get(model_type)
    if architecture is None:
        what = f"model_type {config.get('model_type')!r} in config.json" if config else "no config.json"
        fix = f"Supported are {', '.join(ARCHITECTURE_OF)}."
        raise UnknownModel(failure(CALL, f"{path} has {what}", fix))
    for name in NEEDED:
        if type(config.get(name)) is not int or not 1 <= config[name] < 1 << 31:
            raise UnknownModel(bad_argument(CALL, f"{name} of {path}", repr(config.get(name)), "a positive integer"))
    _refuse_variants(config, architecture)
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or HEAD_SIZES.get(architecture) or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    for name, size in (("head_dim", head_size), ("num_key_value_heads", kv_heads)):
        if type(size) is not int or not 1 <= size <= LARGEST_HEAD:
            argument = f"{name} in config.json of {path}"
            raise UnknownModel(bad_argument(CALL, argument, repr(size), f"1 to {LARGEST_HEAD}"))
    known = {
        **config,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": _context(config, architecture),
        "head_dim": head_size,
        "rms_norm_eps": float(positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6))),
        "rope_theta": float(theta_of(config)),
    }
    about = {field: known[name] for name, field in SIZES.items() if known[name] is not None}
    about |= {"attention.value_length": head_size, "rope.dimension_count": int(head_size * rotary_share_of(config))}
    about |= {f"rope.scaling.{name}": value for name, value in scaling_fields(config).items()}
    about |= setting_fields(config, model_type)
    if isinstance(config.get("vocab_size"), int):
        about["vocab_size"] = config["vocab_size"]
    name = Path(str(config.get("_name_or_path") or path)).name
    return {
        "general.architecture": architecture,
        "general.name": name.encode(errors="replace").decode(),  # of a path, which may be no UTF-8
        **{f"{architecture}.{field}": value for field, value in about.items()},
    }


def _refuse_variants(config: Mapping[str, Any], architecture: str) -> None:
    """Raises for settings that change what a decoder computes, and that GGUF has no field for."""
    gates = GATES.get(architecture, SILU)
    only: dict[str, tuple[Any, ...]] = {
        "hidden_act": gates,
        "hidden_activation": gates,
        "use_bidirectional_attention": (),
    }
    share = rotary_share_of(config)
    if architecture != "phi3" and share != 1:
        raise CheckpointError(bad_argument(CALL, "partial_rotary_factor", share, f"1 for {architecture}"))
    for name, known in only.items():
        if config.get(name) and config[name] not in known:
            allowed = " or ".join(map(repr, known)) or "none"
            raise CheckpointError(bad_argument(CALL, name, repr(config[name]), f"{allowed} for {architecture}"))


def _context(config: Mapping[str, Any], architecture: str) -> int | None:
    """How many positions see each other: a window that slides is where the context ends, where GGUF knows no window."""
    limits = [config.get("max_position_embeddings")]
    if config.get("use_sliding_window", True) and architecture not in WINDOWED:
        limits.append(config.get("sliding_window"))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def config_of(
    fields: Mapping[str, Any], vocabulary: int, tied: bool, factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any]:
    """The config.json of a GGUF file. tied: the embedding is the last matrix. factors: tensors with divisors of rotary
    frequencies, by name."""
    architecture = fields["general.architecture"]
    mixtral = architecture == "llama" and fields.get("llama.expert_count", 0)
    model_type = "mixtral" if mixtral else MODEL_TYPES[architecture]
    name = CLASSES.get(model_type, f"{model_type.capitalize()}ForCausalLM")
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    config |= {name: fields[f"{architecture}.{f}"] for name, f in SIZES.items() if f"{architecture}.{f}" in fields}
    config |= {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    config |= settings_of(fields, architecture, model_type, config["num_hidden_layers"])
    for name in ("bos", "eos", "pad"):
        if f"tokenizer.ggml.{name}_token_id" in fields:
            config[f"{name}_token_id"] = fields[f"tokenizer.ggml.{name}_token_id"]
    config |= _rotary_settings(fields, architecture, theta_of(config), factors)
    if architecture in ("gemma2", "gemma3"):
        config["hidden_activation"] = GATES[architecture][0]
    return {**config, "hidden_act": GATES.get(architecture, SILU)[0], "torch_dtype": "float16"}


def _rotary_settings(
    fields: Mapping[str, Any], architecture: str, theta: float, factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any]:
    prefix = f"{architecture}.rope.scaling."
    rule = rule_of(
        {name.removeprefix(prefix): fields[name] for name in fields if name.startswith(prefix)}, theta, factors
    )
    if architecture == "gpt-oss" and rule:
        rule["truncate"] = False
    whole = {"rope_type": "default", **rule, "rope_theta": theta}
    if architecture == "gemma3":
        local = fields.get("gemma3.rope.freq_base_swa", LOCAL_THETA)
        parts = {"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        return {"rope_parameters": parts, "rope_local_base_freq": local, **({"rope_scaling": rule} if rule else {})}
    if architecture == "phi3":
        head = fields.get(f"{architecture}.attention.key_length")
        size = fields.get(f"{architecture}.rope.dimension_count", head)
        if head and size != head:
            whole["partial_rotary_factor"] = size / head
    settings: dict[str, Any] = {"rope_parameters": whole}
    return {"rope_scaling": rule, **settings} if rule else settings  # rope_scaling is where mlx-lm looks
