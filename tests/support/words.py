"""Find private words in what users read: README and docs, `--help`, and messages. `make lint` runs it.

WORDS has a pattern for each private word and the field's word for it. A hit is allowed where the line also matches a
pattern of ALLOWED. Code in pages (blocks and `spans`) does not count, except for the comments of blocks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

WORDS = {
    r"keys and values": "KV cache",
    r"prompts? (is|are|was|were) (being )?read|read(s|ing)? (a|the|all|whole|long)? ?prompts?": "prefill",
    r"best tokens?|takes the best": "greedy decoding, top-1 token",
    r"scores?": "logits",
    r"products?": "matmul, GEMM, GEMV",
    r"multipl(y|ies|ied) with(?= *($|[.,;:)]))": "activations, inputs",
    r"bundles?": "batch, tile",
    r"plain (weights?|matri\w+|numbers?|checkpoints?|folders?|files?|tensors?|layers?|models?)": "unquantized, float",
    r"matrices that are no codes|weights that are numbers": "unquantized, float",
    r"sorted columns|columns in another order": "act-order, permutation",
    r"damages?": "KL divergence",
    r"turn(s|ed)? (keys|queries|q and k|positions|heads)": "RoPE, rotary embedding",
    r"(open(s|ed)? (a|the|its) )gates?|gates? (is|are) opened": "SwiGLU, activation",
    r"norms? behind": "post-norms",
    r"lent": "(delete the concept)",
    r"settle[sd]?": "re-scoring",
    r"courses?": "row block",
    r"strips?": "column block",
    r"letters?": "partial sum",
    r"visits?": "(token, expert) pair",
    r"gatherings?": "group",
    r"\d+ (texts|streams)|(texts|streams) together|a token of each text": "sequence, request, batch",
}

# Where a line may use the word: in the field's own sense, or as the name of something in the code.
ALLOWED = (
    r"(dot|outer|inner|partial|integer) products?|products? of (a|an|the|two) \w+",
    r"heads that share keys and values",  # grouped-query attention
    r"attention scores?|scores? (of|for) (experts|the router)|router",
    r"of course|letters? (of|or)|upper-?case|lower-?case|first letter",
    r"strips? (of bits|trailing|leading)",
    r"is a \*course\*.*",  # docs/cuda.md introduces the names of its code
)


class Line(NamedTuple):
    place: str  # file:line, or the command
    text: str


def pages() -> Iterator[Line]:
    """README and its like, and docs/ without notes: the text, and the comments in blocks of code."""
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        if "notes" in path.parts:
            continue
        fenced = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            fence = line.lstrip().startswith("```")
            fenced ^= fence
            indented = line.startswith("    ") and not line.lstrip().startswith(("-", "*", "|"))
            if fence or fenced or indented:
                line = line.partition("#")[2]
            shown = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", line) if not line.startswith("| `") else line
            yield Line(f"{path.relative_to(ROOT)}:{number}", shown)


def helps() -> Iterator[Line]:
    """All `--help` pages."""
    from billfish.cli.main import COMMANDS, parser_of

    for command in COMMANDS:
        for line in parser_of(command).format_help().splitlines():
            yield Line(f"billfish {command} --help", line)


SPEAKERS = {"complaint", "warn", "warning", "info", "error", "Refusal", "print"}


def messages() -> Iterator[Line]:
    """The texts of exceptions, warnings and log lines in the package."""
    for path in sorted((ROOT / "billfish").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = [node.exc] if isinstance(node, ast.Raise) else [node] if isinstance(node, ast.Call) else []
            for call in calls:
                name = getattr(getattr(call, "func", None), "id", getattr(getattr(call, "func", None), "attr", ""))
                if isinstance(node, ast.Raise) or name in SPEAKERS:
                    yield from _texts(path, call)


def _texts(path: Path, call: ast.AST | None) -> Iterator[Line]:
    for part in ast.walk(call) if call is not None else ():
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
            yield Line(f"{path.relative_to(ROOT)}:{part.lineno}", re.sub(r"`[^`]*`", " ", part.value))


def private(line: Line) -> Iterator[str]:
    """What is wrong with a line: place, word, and what to say instead."""
    allowed = [found.span() for each in ALLOWED for found in re.finditer(each, line.text, re.IGNORECASE)]
    for pattern, better in WORDS.items():
        for found in re.finditer(rf"(?<![\w.`/-])({pattern})(?![\w`/-])", line.text, re.IGNORECASE):
            if not any(start <= found.start() and found.end() <= end for start, end in allowed):
                yield f"{line.place}: {found[0]!r}; the field says: {better}"


def main() -> int:
    lines = {*pages(), *helps(), *messages()}
    wrong = sorted({complaint for line in lines for complaint in private(line)})
    print("\n".join(wrong) if wrong else f"no private words in {len(lines)} lines")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
