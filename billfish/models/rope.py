"""Rotary positions: the angles by which pairs of numbers in a head rotate, and how they reach past the trained context.

`Rope` is a table of a model. What config.json calls `rope_parameters` becomes GGUF's fields and tensors, and back:
"linear" divides every position; GGUF has a field for the divisor. "llama3" divides slow rotations by `factor`, leaves
fast ones alone and goes smoothly from one to the other; GGUF has a tensor with one divisor per pair. "yarn" does the
like along another ramp, and multiplies cosine and sine; GGUF has fields for its numbers. "longrope" has divisors for
each pair, one list for short texts and one for long ones; GGUF has tensors for both. "proportional" rotates the
first pairs of a head alone; GGUF has a tensor with divisors that are too large for the others to rotate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.models.fields import CONFIG_CALL, Fields, positive, refuse, section

ROTARY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (ROTARY_FACTORS, LONG_FACTORS, SHORT_FACTORS)
ORIGINAL = "original_max_position_embeddings"
# ---- tables of a model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaling:
    """How rotations reach further than the context of the training.

    "linear" divides every frequency by `factor`. "yarn" divides slow ones, leaves fast ones alone, and goes from one to
    the other along a ramp: a pair that turns more than `fast` times within the `original` context is fast, one that
    turns less than `slow` times is slow. "longrope" has two lists of divisors, one for texts within the `original`
    context and one for longer ones.
    """

    kind: str = "none"
    factor: float = 1.0
    original: int = 0
    fast: float = 32.0
    slow: float = 1.0
    whole_ramp: bool = True  # YaRN's ramp begins and ends at whole numbers of pairs
    magnitude: float = 1.0  # what cosine and sine are multiplied with

    def scaled(self, frequencies: NDArray[np.float64], base: float) -> NDArray[np.float64]:
        """Of a head's pairs [pairs], which `base` gave."""
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind != "yarn":
            return frequencies
        pairs = len(frequencies)
        first, last = (pairs * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)
                       for turns in (self.fast, self.slow))  # fmt: skip
        if self.whole_ramp:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)


@dataclass(frozen=True)
class Rope:
    """A table of rotations. The first `size` numbers of a head rotate, in pairs: i and i + size / 2, or 2i and 2i + 1
    where they are `adjacent`. Pair j turns by base^(-2j / size) from one position to the next, before scaling.

    divisors: whether the file's tensor of divisors, if it has one, is for this table.
    """

    size: int
    base: float
    adjacent: bool = False
    scaling: Scaling = Scaling()
    divisors: bool = True

    def frequencies(self, divisors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
        """Radians from one position to the next, [size / 2]."""
        plain: NDArray[np.float64] = self.base ** -(np.arange(0, self.size, 2) / self.size)
        return self.scaling.scaled(plain if divisors is None else plain / divisors, self.base)


def read_scaling(fields: Fields, base: float, whole_ramp: bool) -> Scaling:
    """The scaling that GGUF's fields say."""
    kinds = ("none", "linear", "yarn", "longrope")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))  # the last is of old files
    kind = fields.get("rope.scaling.type", "none" if factor is None else "linear")
    refuse(kind not in kinds, "rope.scaling.type", repr(kind), f"one of {', '.join(kinds)}")
    magnitude = fields.positive("rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        old = fields.positive("rope.scale_linear", 1.0)
        return Scaling(kind, fields.positive("rope.scaling.factor", old), magnitude=magnitude)
    original = fields.size("rope.scaling.original_context_length", fields.number("context_length"))
    refuse(original < 1, "rope.scaling.original_context_length", original, "a positive number")
    if kind != "yarn":
        return Scaling(kind, original=original, magnitude=magnitude)
    extrapolation = fields.number("rope.scaling.yarn_ext_factor", 1)
    refuse(extrapolation != 1, "rope.scaling.yarn_ext_factor", extrapolation, "1")
    refuse(base <= 1, "rope.freq_base", base, "a number above 1 for YaRN")
    factor = fields.positive("rope.scaling.factor")
    shared = fields.number("rope.scaling.yarn_log_multiplier", 0)  # the part of the magnitude that scores do not see
    magnitude *= yarn_magnitude(factor) / yarn_magnitude(factor, shared)
    return Scaling(
        kind,
        factor,
        original,
        fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        fields.positive("rope.scaling.yarn_beta_slow", 1.0),
        whole_ramp,
        fields.positive("rope.scaling.yarn_attn_factor", magnitude),
    )


def yarn_magnitude(factor: float, share: float = 1.0) -> float:
    """What YaRN multiplies cosine and sine with, unless a model says otherwise."""
    return 1 + 0.1 * share * math.log(factor) if factor > 1 else 1.0


# ---- rules of config.json ------------------------------------------------------------------------------------------

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
UNROTATED = 1e30  # divisor of pairs that do not rotate, in the rule "proportional"
# Every Llama from 3.1 on has these beside its factor, which the divisors do tell.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}  # names in config.json, and in GGUF
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", *LLAMA3),
    "yarn": ("factor", ORIGINAL),
    "longrope": (ORIGINAL,),
    "proportional": ("partial_rotary_factor",),
}
OPTIONAL = {"yarn": (*YARN, "attention_factor", "mscale", "mscale_all_dim"), "longrope": ("factor", "attention_factor")}


@dataclass(frozen=True)
class Rule:
    """What a config.json says of rotary positions.

    theta_default: the base where nothing is said. layer_type: the rule of these layers, where there is one for each
    kind. whole_ramp: of YaRN, what GGUF's readers take for granted.
    """

    config: Mapping[str, Any]
    theta_default: float
    layer_type: str = ""
    whole_ramp: bool = True

    @property
    def numbers(self) -> dict[str, Any]:
        rule = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if self.layer_type and isinstance(rule, dict) and self.layer_type in rule:
            return section(rule, self.layer_type)
        plain = isinstance(rule, dict) and not any(isinstance(part, dict) for part in rule.values())
        if not plain:
            raise CheckpointError(
                bad_argument(CONFIG_CALL, "rope_scaling", repr(rule), f"one of {', '.join(SCALINGS)}")
            )
        return dict(rule)

    @property
    def theta(self) -> float:
        """The base of the frequencies; config.json has several places for it."""
        beside = section(self.config, "rope_parameters").get("rope_theta")  # of a rule that is called rope_scaling
        said = self.config.get("rope_theta") or self.numbers.get("rope_theta") or beside
        return positive("rope_theta", said or self.theta_default)

    @property
    def rotary_share(self) -> float:
        """Which part of the numbers of a head rotates."""
        share = self.config.get("partial_rotary_factor") or self.numbers.get("partial_rotary_factor") or 1
        return positive("partial_rotary_factor", share)

    def scaling(self) -> tuple[str, dict[str, Any]]:
        """The rule, one of SCALINGS, and its numbers; raises for any other rule."""
        rule = self.numbers
        kind = rule.get("rope_type", rule.get("type", "default"))
        kind = "longrope" if kind == "su" else kind
        if kind not in SCALINGS:
            raise CheckpointError(
                bad_argument(CONFIG_CALL, "rope_scaling", repr(kind), f"one of {', '.join(SCALINGS)}")
            )
        numbers = {name: rule.get(name) for name in NEEDED[kind]}
        if ORIGINAL in numbers:
            numbers[ORIGINAL] = rule.get(ORIGINAL) or self.config.get(ORIGINAL)
        numbers |= {name: rule[name] for name in OPTIONAL.get(kind, ()) if rule.get(name)}
        checked = {name: positive(f"rope_scaling.{name}", number) for name, number in numbers.items()}
        if kind == "yarn" and rule.get("truncate", True) != self.whole_ramp:
            expected = f"{self.whole_ramp} for {self.config.get('model_type')}, because GGUF has no field for it"
            got = repr(rule.get("truncate", True))
            raise CheckpointError(bad_argument(CONFIG_CALL, "rope_scaling.truncate", got, expected))
        return kind, checked

    def fields(self) -> dict[str, int | float | str]:
        """The rule in the words of GGUF, behind "rope.scaling."."""
        kind, rule = self.scaling()
        if kind in ("default", "llama3", "proportional"):
            return {}
        fields: dict[str, int | float | str] = {"type": kind}
        if kind != "longrope":
            fields["factor"] = float(rule["factor"])
        if ORIGINAL in rule:
            fields["original_context_length"] = int(rule[ORIGINAL])
        fields |= {ours: float(rule[name]) for name, ours in YARN.items() if name in rule}
        magnitude = rule.get("attention_factor")
        if kind == "longrope":
            context = positive("max_position_embeddings", self.config.get("max_position_embeddings"))
            reach = rule.get("factor") or context / rule[ORIGINAL]
            fields["attn_factor"] = magnitude or (
                math.sqrt(1 + math.log(reach) / math.log(rule[ORIGINAL])) if reach > 1 else 1.0
            )
        elif kind == "yarn":
            usual = yarn_magnitude(rule["factor"])
            if not magnitude and "mscale" in rule and "mscale_all_dim" in rule:
                own, all_dims = (yarn_magnitude(rule["factor"], rule[name]) for name in ("mscale", "mscale_all_dim"))
                magnitude = own / all_dims
            if magnitude and magnitude != usual:
                fields["attn_factor"] = float(magnitude / usual)  # llama.cpp multiplies YaRN's own with it
        return fields

    def factor_tensors(self, size: int) -> dict[str, NDArray[np.float32]]:
        """GGUF's tensors with a divisor for each pair, [size / 2]."""
        kind, rule = self.scaling()
        if kind == "llama3":
            return {ROTARY_FACTORS: llama3_factors(size, self.theta, rule)}
        if kind == "proportional":
            rotated = int(size * rule["partial_rotary_factor"] // 2)
            factors = np.where(np.arange(size // 2) < rotated, 1, UNROTATED).astype(np.float32)
            return {ROTARY_FACTORS: factors}
        if kind != "longrope":
            return {}
        lists = (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS))
        return {tensor: _divisors(name, self.numbers.get(name), size // 2) for name, tensor in lists}


def _divisors(name: str, listed: Any, pairs: int) -> NDArray[np.float32]:
    if not isinstance(listed, list) or len(listed) != pairs:
        found = f"a list of {len(listed)}" if isinstance(listed, list) else repr(listed)
        raise CheckpointError(bad_argument(CONFIG_CALL, f"rope_scaling.{name}", found, f"a list of {pairs} numbers"))
    return np.array([positive(f"rope_scaling.{name}", number) for number in listed], np.float32)


def rotated_share(factors: NDArray[np.float32] | None) -> float:
    """The part of a head that rotates, by divisors of the rule "proportional"."""
    return 1.0 if factors is None else float((factors < UNROTATED / 2).mean())


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
        problem = f"{ROTARY_FACTORS} is not Llama 3's RoPE scaling: it cannot be converted"
        raise CheckpointError(failure(CONFIG_CALL, problem))
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
        raise CheckpointError(bad_argument(CONFIG_CALL, "rope.scaling.type", found, expected))
    if kind == "none":
        return {} if divisors is None else {"rope_type": "llama3", **llama3_rule(divisors, theta)}
    rule = {"rope_type": kind, "factor": scaling["factor"], **original}
    if kind == "yarn":
        rule |= {name: scaling[ours] for name, ours in YARN.items() if ours in scaling}
        magnitude = scaling.get("yarn_attn_factor") or yarn_magnitude(rule["factor"]) * scaling.get("attn_factor", 1.0)
        rule["attention_factor"] = magnitude
    return rule
