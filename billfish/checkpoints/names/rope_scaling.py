"""Rotary positions that reach further than a model was trained for: config.json has a rule, GGUF what follows from it.

"linear" divides every position; GGUF has a field for the divisor. "llama3" divides slow rotations by `factor`, leaves
fast ones alone and goes smoothly from one to the other; GGUF has a tensor with one divisor for each pair. "yarn" does
the like along another ramp, and multiplies cosine and sine; GGUF has fields for its numbers. "longrope" has divisors
for each pair, one list for short texts and one for long ones; GGUF has tensors for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.safetensors_files import CALL, section
from billfish.core.errors import CheckpointError, bad_argument, failure

ROTARY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (ROTARY_FACTORS, LONG_FACTORS, SHORT_FACTORS)
THETA = 10000.0  # where config.json does not say
THETAS = {"mixtral": 1e6, "gpt_oss": 150000.0, "smollm3": 2e6, "gemma3_text": 1e6}  # nor for these types of models
LOCAL_THETA = 10000.0  # of Gemma 3's layers with a window
LARGEST = 1e300  # of numbers in a configuration
SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
# Every Llama from 3.1 on has these beside its factor, which the divisors do tell.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ORIGINAL = "original_max_position_embeddings"
YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}  # names in config.json, and in GGUF
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", *LLAMA3),
    "yarn": ("factor", ORIGINAL),
    "longrope": (ORIGINAL,),
}
OPTIONAL = {"yarn": (*YARN, "attention_factor", "mscale", "mscale_all_dim"), "longrope": ("factor", "attention_factor")}


def theta_of(config: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies; config.json has several places for it."""
    usual = THETAS.get(str(config.get("model_type")), THETA)
    beside = section(config, "rope_parameters").get("rope_theta")  # of a rule that is called rope_scaling
    return positive("rope_theta", config.get("rope_theta") or _rule(config).get("rope_theta") or beside or usual)


def local_theta_of(config: Mapping[str, Any]) -> float:
    """The base of Gemma 3's layers with a window."""
    rule = section(section(config, "rope_parameters"), "sliding_attention")
    kind = rule.get("rope_type", "default")
    if kind != "default":
        raise CheckpointError(bad_argument(CALL, "rope_parameters.sliding_attention", repr(kind), "'default'"))
    return positive("rope_local_base_freq", rule.get("rope_theta") or config.get("rope_local_base_freq") or LOCAL_THETA)


def _rule(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The numbers of a rule, of Gemma 3's layers without a window."""
    rule = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if config.get("model_type") == "gemma3_text" and isinstance(rule, dict) and "full_attention" in rule:
        return section(rule, "full_attention")
    whole = isinstance(rule, dict) and not any(isinstance(part, dict) for part in rule.values())  # not by kind of layer
    if not whole:
        raise CheckpointError(bad_argument(CALL, "rope_scaling", repr(rule), f"one of {', '.join(SCALINGS)}"))
    return dict(rule)


def scaling_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The rule of a config.json, one of SCALINGS, and its numbers; raises for any other rule."""
    rule = _rule(config)
    kind = rule.get("rope_type", rule.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in SCALINGS:
        raise CheckpointError(bad_argument(CALL, "rope_scaling", repr(kind), f"one of {', '.join(SCALINGS)}"))
    numbers = {name: rule.get(name) for name in NEEDED[kind]}
    if ORIGINAL in numbers:
        numbers[ORIGINAL] = rule.get(ORIGINAL) or config.get(ORIGINAL)
    numbers |= {name: rule[name] for name in OPTIONAL.get(kind, ()) if rule.get(name)}
    checked = {name: positive(f"rope_scaling.{name}", number) for name, number in numbers.items()}
    if kind == "yarn" and rule.get("truncate", True) != (config.get("model_type") != "gpt_oss"):
        expected = "false for gpt_oss and true for other models, because GGUF has no field for it"
        raise CheckpointError(bad_argument(CALL, "rope_scaling.truncate", repr(rule.get("truncate", True)), expected))
    return kind, checked


def rotary_share_of(config: Mapping[str, Any]) -> float:
    """Which part of the numbers of a head rotates: of Phi some may not."""
    share = config.get("partial_rotary_factor") or _rule(config).get("partial_rotary_factor") or 1
    return positive("partial_rotary_factor", share)


def scaling_fields(config: Mapping[str, Any]) -> dict[str, int | float | str]:
    """The rule in the words of GGUF, behind "rope.scaling."."""
    kind, rule = scaling_of(config)
    if kind in ("default", "llama3"):
        return {}
    fields: dict[str, int | float | str] = {"type": kind}
    if kind != "longrope":
        fields["factor"] = float(rule["factor"])
    if ORIGINAL in rule:
        fields["original_context_length"] = int(rule[ORIGINAL])
    fields |= {ours: float(rule[name]) for name, ours in YARN.items() if name in rule}
    magnitude = rule.get("attention_factor")
    if kind == "longrope":
        reach = rule.get("factor") or _context_of(config) / rule[ORIGINAL]
        fields["attn_factor"] = magnitude or (
            math.sqrt(1 + math.log(reach) / math.log(rule[ORIGINAL])) if reach > 1 else 1.0
        )
    elif kind == "yarn":
        usual = _yarn_magnitude(rule["factor"])
        if not magnitude and "mscale" in rule and "mscale_all_dim" in rule:
            own, all_dims = (_yarn_magnitude(rule["factor"], rule[name]) for name in ("mscale", "mscale_all_dim"))
            magnitude = own / all_dims
        if magnitude and magnitude != usual:
            fields["attn_factor"] = float(magnitude / usual)  # llama.cpp multiplies YaRN's own with it
    return fields


def _yarn_magnitude(factor: float, share: float = 1.0) -> float:
    return 1 + 0.1 * share * math.log(factor) if factor > 1 else 1.0


def _context_of(config: Mapping[str, Any]) -> float:
    return positive("max_position_embeddings", config.get("max_position_embeddings"))


def factor_tensors(config: Mapping[str, Any], rope_size: int) -> dict[str, NDArray[np.float32]]:
    """GGUF's tensors with a divisor for each pair, [rope_size / 2], that follow from the rule of a config.json."""
    kind, rule = scaling_of(config)
    if kind == "llama3":
        return {ROTARY_FACTORS: llama3_factors(rope_size, theta_of(config), rule)}
    if kind != "longrope":
        return {}
    return {
        tensor: _divisors(name, _rule(config).get(name), rope_size // 2)
        for name, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS))
    }


def _divisors(name: str, listed: Any, pairs: int) -> NDArray[np.float32]:
    if not isinstance(listed, list) or len(listed) != pairs:
        found = f"a list of {len(listed)}" if isinstance(listed, list) else repr(listed)
        raise CheckpointError(bad_argument(CALL, f"rope_scaling.{name}", found, f"a list of {pairs} numbers"))
    return np.array([positive(f"rope_scaling.{name}", number) for number in listed], np.float32)


def positive(name: str, number: Any) -> float:
    """A number of a configuration as it is; raises unless it is positive, and a float can hold it."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < LARGEST:
        raise CheckpointError(bad_argument(CALL, name, repr(number), "a positive number"))
    return number


def llama3_factors(head_size: int, theta: float, rule: Mapping[str, float]) -> NDArray[np.float32]:
    """What the frequency of each pair is divided by, [head_size / 2]."""
    low, high, context = (rule[name] for name in LLAMA3)
    turns = context * theta ** -(np.arange(0, head_size, 2) / head_size) / (2 * np.pi)  # within the trained context
    fast = np.clip((turns - low) / (high - low), 0, 1) if high != low else (turns > low).astype(np.float64)
    return (1 / ((1 - fast) / rule["factor"] + fast)).astype(np.float32)


def llama3_rule(factors: NDArray[np.float32], theta: float) -> dict[str, float]:
    """The rule that these divisors follow from; raises if it is not Llama 3's."""
    rule = {"factor": float(factors.max()), **LLAMA3}
    if not np.allclose(llama3_factors(2 * len(factors), theta, rule), factors, rtol=1e-5):
        raise CheckpointError(failure(CALL, f"{ROTARY_FACTORS} is not Llama 3's RoPE scaling: it cannot be converted"))
    return rule


def rule_of(scaling: Mapping[str, Any], theta: float, factors: Mapping[str, NDArray[np.float32]]) -> dict[str, Any]:
    """The rule of a config.json that GGUF's fields behind "rope.scaling." and tensors of divisors follow from."""
    kind, divisors = scaling.get("type", "none"), factors.get(ROTARY_FACTORS)
    original = {ORIGINAL: scaling["original_context_length"]} if "original_context_length" in scaling else {}
    if LONG_FACTORS in factors and SHORT_FACTORS in factors and kind in ("none", "longrope") and divisors is None:
        lists = {"long_factor": factors[LONG_FACTORS].tolist(), "short_factor": factors[SHORT_FACTORS].tolist()}
        return {"rope_type": "longrope", **original, "attention_factor": scaling.get("attn_factor", 1.0), **lists}
    if kind not in ("none", "linear", "yarn") or (kind != "none" and divisors is not None):
        found = repr(kind) if divisors is None else f"{kind!r} beside {ROTARY_FACTORS}"
        expected = "'none', 'linear', 'yarn', 'longrope', or the factors of Llama 3"
        raise CheckpointError(bad_argument(CALL, "rope.scaling.type", found, expected))
    if kind == "none":
        return {} if divisors is None else {"rope_type": "llama3", **llama3_rule(divisors, theta)}
    rule = {"rope_type": kind, "factor": scaling["factor"], **original}
    if kind == "yarn":
        rule |= {name: scaling[ours] for name, ours in YARN.items() if ours in scaling}
        magnitude = scaling.get("yarn_attn_factor") or _yarn_magnitude(rule["factor"]) * scaling.get("attn_factor", 1.0)
        rule["attention_factor"] = magnitude
    return rule
