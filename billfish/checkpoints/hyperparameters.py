"""The sizes and settings of a decoder, as config.json has them and as the fields of GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from billfish.checkpoints.container import CALL
from billfish.checkpoints.rotary import ROTARY_FACTORS, llama3_rule, positive, scaling_of, theta_of
from billfish.errors import CheckpointError, complaint
from billfish.storage import Array

# transformers' types of models, and the architectures of llama.cpp that they are.
ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma"}
ARCHITECTURES = tuple(dict.fromkeys(ARCHITECTURE_OF.values()))
CLASSES = {name: f"{name.capitalize()}ForCausalLM" for name in ARCHITECTURES}
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
HEAD_SIZES = {"qwen3": 128, "gemma": 256}  # where config.json does not say; the others' heads share out `hidden_size`
# What feed-forward gates go through. Gemma's first files say "gelu" and mean its approximation.
GATES = {"gemma": ("gelu_pytorch_tanh", "gelu")}
SILU = ("silu",)

Fields = dict[str, int | float | str]


class UnknownModel(CheckpointError):
    """A model that we have no other names for."""


def fields_of(config: Mapping[str, Any], path: Path) -> Fields:
    """GGUF's fields for a config.json: all that a decoder must know. Raises UnknownModel for one of another kind."""
    architecture = ARCHITECTURE_OF.get(str(config.get("model_type")))
    if architecture is None:
        got = f"model_type {config.get('model_type')!r}" if config else "no config.json beside it"
        takes = f"a config.json whose model_type is one of {', '.join(ARCHITECTURE_OF)}"
        raise UnknownModel(complaint(CALL, str(path), got, takes))
    for name in NEEDED:
        if type(config.get(name)) is not int or not 1 <= config[name] < 1 << 31:
            raise UnknownModel(complaint(CALL, f"{path}: {name}", repr(config.get(name)), "a positive size"))
    _refuse_variants(config, architecture)
    kind, rule = scaling_of(config)
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or HEAD_SIZES.get(architecture) or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    for name, size in (("head_dim", head_size), ("num_key_value_heads", kv_heads)):
        if type(size) is not int or not 1 <= size <= LARGEST_HEAD:
            takes = f"a size from 1 to {LARGEST_HEAD}"
            raise UnknownModel(complaint(CALL, f"{path}: {name}", repr(size), takes))
    known = {
        **config,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": _context(config),
        "head_dim": head_size,
        "rms_norm_eps": float(positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6))),
        "rope_theta": float(theta_of(config)),
    }
    about = {field: known[name] for name, field in SIZES.items() if known[name] is not None}
    about |= {"attention.value_length": head_size, "rope.dimension_count": head_size}
    if kind == "linear":
        about |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rule["factor"])}
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
    for name, takes in (("hidden_act", gates), ("partial_rotary_factor", (1,)), ("use_bidirectional_attention", ())):
        if config.get(name) and config[name] not in takes:
            allowed = " or ".join(map(repr, takes)) or "none"
            raise CheckpointError(complaint(CALL, name, repr(config[name]), f"{allowed} for {architecture}"))


def _context(config: Mapping[str, Any]) -> int | None:
    """How many positions see each other: a window that slides is where the context ends, as GGUF knows no window."""
    limits = [config.get("max_position_embeddings")]
    if config.get("use_sliding_window", True):
        limits.append(config.get("sliding_window"))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def config_of(fields: Mapping[str, Any], vocabulary: int, tied: bool, factors: Array | None) -> dict[str, Any]:
    """The config.json of a GGUF file. tied: the embedding is the last matrix. factors: of rotary frequencies."""
    architecture = fields["general.architecture"]
    config: dict[str, Any] = {"architectures": [CLASSES[architecture]], "model_type": architecture}
    config |= {name: fields[f"{architecture}.{f}"] for name, f in SIZES.items() if f"{architecture}.{f}" in fields}
    config |= {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    for name in ("bos", "eos", "pad"):
        if f"tokenizer.ggml.{name}_token_id" in fields:
            config[f"{name}_token_id"] = fields[f"tokenizer.ggml.{name}_token_id"]
    rule = _rule_of(fields, architecture, theta_of(config), factors)
    if rule:
        config["rope_scaling"] = rule  # where mlx-lm looks
    config["rope_parameters"] = {"rope_type": "default", **rule, "rope_theta": theta_of(config)}
    return {**config, "hidden_act": GATES.get(architecture, SILU)[0], "torch_dtype": "float16"}


def _rule_of(fields: Mapping[str, Any], architecture: str, theta: float, factors: Array | None) -> dict[str, Any]:
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear") or (kind == "linear" and factors is not None):
        got = f"rotary positions scaled by {kind!r}" + ("" if factors is None else f" and by {ROTARY_FACTORS}")
        takes = "'none', 'linear' or Llama 3's divisors: nothing else is translated"
        raise CheckpointError(complaint(CALL, f"{architecture}.rope.scaling.type", got, takes))
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields[f"{architecture}.rope.scaling.factor"]}
    return {} if factors is None else {"rope_type": "llama3", **llama3_rule(factors, theta)}
