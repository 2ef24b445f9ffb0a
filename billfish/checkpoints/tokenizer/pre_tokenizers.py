"""How byte-level tokenizers cut text before they merge: GGUF has names for it, tokenizer.json a list of steps."""

from __future__ import annotations

import json
from typing import Any

from billfish.core.errors import ModelError, bad_argument
from billfish.core.extras import require

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (  # what may follow a word, and how many digits go together
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASES % ("", "", r"\p{N}")
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# How `tokenizer.ggml.pre` cuts: digits alone or not, then a pattern, None being GPT-2's own. Of names that mean the
# same, the first is the one that we write.
CUTS: dict[str, tuple[bool, str | None]] = {
    "gpt-2": (False, None),
    "default": (False, None),
    "smollm": (True, None),
    "starcoder": (True, None),
    "llama-bpe": (False, _WORDS % r"\p{N}{1,3}"),
    "llama3": (False, _WORDS % r"\p{N}{1,3}"),
    "qwen2": (False, _WORDS % r"\p{N}"),
    "tekken": (False, _TEKKEN),
    "gpt-4o": (False, _CASES % (_SHORT, _SHORT, r"\p{N}{1,3}")),
    "olmo": (False, None),
    "refact": (True, None),
}

Step = tuple[str, bool | str]  # a part of a pre-tokenizer, and the one setting that tells it from others of its type


def pre_tokenizer(cut: str) -> Any:
    """What the library `tokenizers` cuts with."""
    tokenizers = require("tokenizers", "llm")
    parts = tokenizers.pre_tokenizers
    digits_alone, pattern = CUTS[cut]
    digits = [parts.Digits(individual_digits=True)] if digits_alone else []
    words = [] if pattern is None else [parts.Split(tokenizers.Regex(pattern), behavior="isolated")]
    return parts.Sequence([*digits, *words, parts.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])


def cut_of(cutter: Any) -> str:
    """GGUF's name for the way in which a pre-tokenizer of the library cuts; raises ModelError if it has none."""
    steps = _steps(cutter)
    for name in CUTS:
        if steps == _steps(pre_tokenizer(name)):
            return name
    found = ", then ".join(f"{kind} {setting!r}" for kind, setting in steps)
    expected = f"one that GGUF has a name for ({', '.join(CUTS)})"
    raise ModelError(bad_argument("convert", "pre_tokenizer of tokenizer.json", found, expected))


def _steps(cutter: Any) -> list[Step]:
    state = {"type": "none"} if cutter is None else json.loads(cutter.__getstate__())
    return [_step(part) for part in state.get("pretokenizers", [state])]


def _step(part: dict[str, Any]) -> Step:
    """A part of a pre-tokenizer; one of which more is special gets a setting that no cut has."""
    kind, pattern = str(part["type"]), part.get("pattern", {})
    if kind == "Digits":
        return kind, part["individual_digits"]
    if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"] and "Regex" in pattern:
        return kind, pattern["Regex"]
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return kind, part["use_regex"]
    return kind, json.dumps(part)
