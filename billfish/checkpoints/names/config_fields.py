"""Settings of a decoder beside its sizes: windows, soft caps, experts and multipliers, in config.json and in GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billfish.checkpoints.names.rope_scaling import LARGEST, local_theta_of
from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, bad_argument

Field = int | float | str | list[bool]
EXPERTS = {"num_experts_per_tok": "expert_used_count", "num_local_experts": "expert_count"}
NORMALIZED = {"norm_topk_prob": "expert_weights_norm"}
OWN_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
WINDOW = {"sliding_window": "attention.sliding_window"}
MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
# Names in config.json, and in GGUF behind the architecture, by the type of a model in transformers.
NUMBERS: dict[str, dict[str, str]] = {
    "mixtral": EXPERTS,
    "qwen2_moe": {
        **EXPERTS,
        **NORMALIZED,
        **OWN_SIZE,
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    "qwen3_moe": {**EXPERTS, **NORMALIZED, **OWN_SIZE},
    "olmoe": {**EXPERTS, **NORMALIZED},
    "granitemoe": {**EXPERTS, **MULTIPLIERS},
    "gpt_oss": {**EXPERTS, **WINDOW},
    "gemma2": {**CAPS, **WINDOW},
    "gemma3_text": {**CAPS, **WINDOW},
    "phi3": WINDOW,
}
OTHER_NAMES = {"num_local_experts": "num_experts"}  # of a setting, in other folders
WINDOW_STEPS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}  # every so many-th layer has none
QUERY_SIZES = ("gemma2", "gemma3_text")  # whose scores are divided by the root of a setting of its own
UNROTATED_STEP = 4  # of SmolLM3: every so many-th layer does not rotate
# What transformers takes for settings that a config.json does not name, where GGUF's readers take another. A null
# is named: it stands for no window, or no cap.
GPT_OSS_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": False},
    "olmoe": {"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    "granitemoe": {"attention_multiplier": 1.0},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128, "rms_norm_eps": 1e-5, "rope_parameters": GPT_OSS_ROTARY},
    "phi3": {"rms_norm_eps": 1e-5},
}
# Settings that change what a decoder computes, GGUF has no field for, and these values alone are run.
FIXED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": {"clip_qkv": None},
    "gpt_oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "smollm3": {"use_sliding_window": False},
}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the settings that transformers fills in."""
    usual = dict(DEFAULTS.get(str(config.get("model_type")), {}))
    if "rope_scaling" in config:  # the older name
        usual.pop("rope_parameters", None)
    return {**usual, **config}


def setting_fields(config: Mapping[str, Any], model_type: str) -> dict[str, Field]:
    """What config.json sets beside sizes, in the words of GGUF. Raises CheckpointError for what GGUF cannot say."""
    for name, only in FIXED.get(model_type, {}).items():
        if config.get(name, only) != only:
            raise CheckpointError(bad_argument(CALL, name, repr(config[name]), f"{only!r} for {model_type}"))
    fields: dict[str, Field] = {}
    for name, field in NUMBERS.get(model_type, {}).items():
        value = config.get(name, config.get(OTHER_NAMES.get(name, name)))
        if value is not None or name in EXPERTS:
            fields[field] = _number(name, value)
        elif name in CAPS and model_type == "gemma2":
            fields[field] = 0.0  # null: without a field, llama.cpp has caps of its own
    if model_type in QUERY_SIZES:
        fields["attention.scale"] = float(
            _number("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256)) ** -0.5
        )
    if model_type == "gemma3_text":
        fields["rope.freq_base_swa"] = float(local_theta_of(config))
    if model_type == "gpt_oss":
        fields["expert_feed_forward_length"] = config["intermediate_size"]
    if model_type == "smollm3":
        _check_unrotated(config)
    return fields | _pattern(config, model_type)


def _number(name: str, value: Any) -> int | float:
    """A number that a field can hold. Those that are wrong for a model are refused where it is run."""
    if not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        raise CheckpointError(bad_argument(CALL, name, repr(value), "a number"))
    return value


def _pattern(config: Mapping[str, Any], model_type: str) -> dict[str, Field]:
    """Which layers have a window, if it is not as in all models of this type."""
    step, layers = WINDOW_STEPS.get(model_type), config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if step is None:
        return {}
    if kinds is None:
        own = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", step))
        return {} if own == step else {"attention.sliding_window_pattern": int(_number("sliding_window_pattern", own))}
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(bad_argument(CALL, "layer_types", repr(kinds)[:80], f"{layers} of {' or '.join(known)}"))
    narrow = [kind == known[0] for kind in kinds]
    if narrow == [(i + 1) % step != 0 for i in range(layers)]:
        return {}
    return {"attention.sliding_window_pattern": narrow}


def _check_unrotated(config: Mapping[str, Any]) -> None:
    """Raises unless layers rotate as llama.cpp has it for all models of SmolLM3."""
    step, listed = config.get("no_rope_layer_interval", UNROTATED_STEP), config.get("no_rope_layers")
    usual = [int((i + 1) % UNROTATED_STEP != 0) for i in range(config["num_hidden_layers"])]
    if (listed is None and step != UNROTATED_STEP) or (listed is not None and listed != usual):
        found = repr(listed)[:80] if listed is not None else f"every {step}th layer"
        expected = f"every {UNROTATED_STEP}th layer, because GGUF has no field for it"
        raise CheckpointError(bad_argument(CALL, "no_rope_layers", found, expected))


def settings_of(fields: Mapping[str, Any], architecture: str, model_type: str, layers: int) -> dict[str, Any]:
    """What config.json says of GGUF's fields beside sizes."""

    def field(name: str) -> Any:
        return fields.get(f"{architecture}.{name}")

    names = NUMBERS.get(model_type, {})
    settings = {name: field(ours) for name, ours in names.items() if field(ours) is not None}
    if "num_local_experts" in settings and model_type in ("qwen2_moe", "olmoe"):
        settings["num_experts"] = settings.pop("num_local_experts")
    settings |= {name: None for name in CAPS if settings.get(name) == 0}
    if model_type == "qwen3_moe":
        settings.setdefault("norm_topk_prob", True)  # as llama.cpp has it for all of them
    if model_type == "phi3" and settings.get("sliding_window") == 0:
        settings["sliding_window"] = None
    if model_type in QUERY_SIZES:
        scale = field("attention.scale")
        settings["query_pre_attn_scalar"] = round(scale**-2) if scale else field("attention.key_length")
    if model_type == "gpt_oss":
        settings["intermediate_size"] = field("expert_feed_forward_length") or field("feed_forward_length")
    step, pattern = WINDOW_STEPS.get(model_type), field("attention.sliding_window_pattern")
    if step is not None:
        every = pattern if isinstance(pattern, int) else step
        listed = pattern if isinstance(pattern, list) else [(i + 1) % every != 0 for i in range(layers)]
        settings["layer_types"] = ["sliding_attention" if narrow else "full_attention" for narrow in listed]
    return settings
