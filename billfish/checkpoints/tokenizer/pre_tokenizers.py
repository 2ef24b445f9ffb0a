"""How byte-level tokenizers cut text before they merge: GGUF has names for it, tokenizer.json a list of steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from billfish.core.errors import ModelError, bad_argument
from billfish.core.extras import require

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS, _ONE_DIGIT = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
_MARKS = (  # combining marks belong to words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LINES_APART = (  # punctuation takes no line ends with it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (  # what may follow a word, and how many digits go together
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN, _GPT_4O = _CASES % ("", "", r"\p{N}"), _CASES % (_SHORT, _SHORT, r"\p{N}{1,3}")
# Other spellings of a pattern, which find the same. The first is tiktoken's cl100k_base.
SPELLINGS = {
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+": _THREE_DIGITS,
    _LINES_APART.replace("{1}", ""): _LINES_APART,
}


@dataclass(frozen=True)
class Cut:
    """What a name of GGUF says about a byte-level tokenizer."""

    pattern: str | None = None  # of words; None is GPT-2's own, which the library knows
    digits_alone: bool = False  # each digit is cut off before
    ignore_merges: bool = False  # a word that is a piece is taken whole, whether merges lead to it or not
    starts_with_bos: bool = False  # where no field says
    nfc: bool = False  # text is brought to Unicode's NFC first


_NAMES: dict[Cut, tuple[str, ...]] = {  # the first name is the one that we write
    Cut(): ("gpt-2", "default", "olmo", "phi-2", "mellum", "a.x-4.0", "trillion", "granite-docling"),
    Cut(digits_alone=True): ("smollm", "starcoder", "refact", "minerva-7b"),
    Cut(_THREE_DIGITS, ignore_merges=True, starts_with_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"),
    ),
    Cut(_THREE_DIGITS): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    Cut(_THREE_DIGITS, ignore_merges=True): ("glm4", "glm5"),
    Cut(_ONE_DIGIT, nfc=True): ("qwen2", "deepseek-r1-qwen", "megrez"),
    Cut(_MARKS, nfc=True): ("qwen35",),
    Cut(_TEKKEN, ignore_merges=True, starts_with_bos=True): ("tekken",),
    Cut(_GPT_4O): ("gpt-4o", "llama4", "minimax-m2"),
    Cut(_LINES_APART): ("seed-coder",),
}
CUTS = {name: cut for cut, names in _NAMES.items() for name in names}  # by `tokenizer.ggml.pre`
USUAL = {  # where it is not the first of several names
    "glm4moe": "glm4",
    "granitemoe": "refact",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "minimax-m2": "minimax-m2",
    "olmoe": "olmo",
}

Step = tuple[str, bool | str]  # a part of a pre-tokenizer, and the one setting that tells it from others of its type


def pre_tokenizer(name: str) -> Any:
    """What the library `tokenizers` cuts with."""
    tokenizers = require("tokenizers", "llm")
    parts, cut = tokenizers.pre_tokenizers, CUTS[name]
    digits = [parts.Digits(individual_digits=True)] if cut.digits_alone else []
    words = [] if cut.pattern is None else [parts.Split(tokenizers.Regex(cut.pattern), behavior="isolated")]
    return parts.Sequence([*digits, *words, parts.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None)])


def cut_of(cutter: Any, *, ignore_merges: bool = False, architecture: str = "") -> str:
    """GGUF's name for the way in which a pre-tokenizer of the library cuts; raises ModelError if it has none.

    ignore_merges: of the tokenizer. Of names for the same cut, one that says the same about merges comes first, and
    of these the name that llama.cpp's converter writes for the architecture.
    """
    steps = _steps(cutter)
    names = [name for name in CUTS if steps == _steps(pre_tokenizer(name))]
    if names:
        alike = [name for name in names if CUTS[name].ignore_merges == ignore_merges] or names
        return USUAL[architecture] if USUAL.get(architecture) in alike else alike[0]
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
    if kind == "Split" and "Regex" in pattern:
        # Our patterns find every character, so that it is all the same to remove what is between their finds.
        isolated = (part["behavior"], part["invert"]) in (("Isolated", False), ("Removed", True))
        spelled = pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n")
        return (kind, SPELLINGS.get(spelled, spelled)) if isolated else (kind, json.dumps(part))
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return kind, part["use_regex"]
    return kind, json.dumps(part)
