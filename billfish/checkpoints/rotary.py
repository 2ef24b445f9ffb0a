"""Rotary positions that reach further than a model was trained for: config.json has a rule, GGUF what follows from it.

"linear" divides every position; GGUF has a field for the divisor. "llama3" divides slow rotations by `factor`, leaves
fast ones alone and goes smoothly from one to the other; GGUF has a tensor with one divisor for each pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.container import CALL, section
from billfish.errors import CheckpointError, complaint

ROTARY_FACTORS = "rope_freqs.weight"
THETA = 10000.0  # where config.json does not say
LARGEST = 1e300  # of numbers in a configuration
SCALINGS = ("default", "linear", "llama3")
# Every Llama from 3.1 on has these beside its factor, which the divisors do tell.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def theta_of(config: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies; config.json has one of two places for it."""
    theta = config.get("rope_theta") or section(config, "rope_parameters").get("rope_theta") or THETA
    return positive("rope_theta", theta)


def scaling_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The rule of a config.json, one of SCALINGS, and its numbers; raises for any other rule."""
    rule = config.get("rope_scaling") or config.get("rope_parameters") or {}
    whole = isinstance(rule, dict) and not any(isinstance(part, dict) for part in rule.values())  # not by kind of layer
    kind = rule.get("rope_type", rule.get("type", "default")) if whole else None
    if kind not in SCALINGS:
        raise CheckpointError(complaint(CALL, "rope_scaling", repr(kind or rule), f"one of {', '.join(SCALINGS)}"))
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", *LLAMA3)}[kind]
    numbers = {name: rule.get(name) for name in needed}
    return kind, {name: positive(f"rope_scaling.{name}", number) for name, number in numbers.items()}


def positive(name: str, number: Any) -> float:
    """A number of a configuration as it is; raises unless it is positive, and a float can hold it."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < LARGEST:
        raise CheckpointError(complaint(CALL, name, repr(number), "a positive number"))
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
        raise CheckpointError(complaint(CALL, ROTARY_FACTORS, "divisors of another rule", "those of Llama 3"))
    return rule
