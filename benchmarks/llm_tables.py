"""What README.md, docs/llm.md, docs/inside-a-token.md and docs/vllm.md take from results: run this to write it anew.

    python benchmarks/llm_tables.py

`make lint` (docs/check) fails where a page says something else than the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
Results = dict[str, Any]


class Passage(NamedTuple):
    """Part of a page that is made from results."""

    page: str
    results: str
    pattern: str  # what it looks like there
    write: Callable[[Results], str]

    def rewritten(self, text: str) -> str:
        """The page with this passage as the results have it."""
        results = json.loads((ROOT / "benchmarks" / "results" / self.results).read_text())
        again, count = re.subn(self.pattern, lambda _: self.write(results), text, flags=re.DOTALL)
        assert count == 1, f"{count} passages like {self.pattern!r} in {self.page}"
        return again


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n\n"


def speed(results: Results) -> str:
    """How fast, beside llama.cpp."""
    about, records = results["about"], {(r["what"], r["who"]): r for r in results["records"]}
    names = {"generation": "128 tokens, empty context", "prompt": "prompt of 512 tokens"}
    counts = {"generation": 128, "prompt": 512}
    who = ["llama.cpp", *(f"billfish {activations}" for activations in ("q8", "q16", "exact"))]
    rows = [[f"{about['cpu']}, {about['threads']} threads", "llama.cpp", "q8", "q16", "exact"]]
    for what in ("generation", "prompt", "cold start"):
        cells = []
        for name in who:
            record = records.get((what, name))
            if record is None:
                cells.append("")
                continue
            seconds = record["seconds"]
            cell = f"{counts[what] / seconds:.0f} tok/s" if what in counts else f"{seconds:.2f} s"
            cells.append(cell if name == "llama.cpp" else f"{cell} ({record['ratio']:.2f})")
        rows.append([names.get(what, "cold start to the first token, prompt of 20 tokens"), *cells])
    return table(rows)


def token(results: Results) -> str:
    """Milliseconds of one token, by part."""
    records = results["records"]
    rows = [["ms", *(f"{r['activations']}, after {r['context']}" for r in records)]]
    parts = [part for part in PARTS if part in records[0]["milliseconds"]]
    rows += [[part, *(f"{r['milliseconds'][part]:.2f}" for r in records)] for part in parts]
    return table([*rows, ["all", *(f"{sum(r['milliseconds'].values()):.2f}" for r in records)]])


# Products first, then what lies between them.
PARTS = (
    "q, k, v",
    "attention output",
    "gate and up",
    "down",
    "head",
    "norms",
    "rotation and cache",
    "attention",
    "gate",
    "Python",
)


def least(results: Results) -> str:
    about = results["about"]
    size, milliseconds = about["weight_bytes"] / 1e6, about["least_milliseconds"]
    return f"Reading {size:.0f} MB of weights takes at least {milliseconds:.2f} ms."


def served(results: Results) -> str:
    """Whether vLLM gives the tokens of transformers."""
    rows = [[r["folder"], f"`{r['arguments']}`", r["verdict"]] for r in results["records"]]
    return table([["folder", "arguments of `vllm.LLM`", "tokens"], *rows])


def served_speed(results: Results) -> str:
    """How fast, beside vLLM's own kernels."""
    speeds = results["tokens per second"]
    rows = [[f"{results['cpu']}, {results['threads']} threads, tok/s", "float32", "W4A8", "billfish, q8"]]
    for kind in speeds["billfish"]:
        what = "prompts of 512 tokens" if kind == "prompts" else f"{kind} streams together"
        rows.append([what, *(f"{speeds[engine][kind]:.0f}" for engine in ("float32", "w4a8", "billfish"))])
    return table(rows)


LLM, INSIDE, VLLM = "docs/llm.md", "docs/inside-a-token.md", "docs/vllm.md"
SPEED = r"\| [^|\n]* threads \| llama\.cpp \|.*?\n\n"
PASSAGES = (
    Passage(LLM, "llm_neoverse_n1.json", SPEED, speed),
    Passage("README.md", "llm_neoverse_n1.json", SPEED, speed),
    Passage(INSIDE, "inside_a_token.json", r"\| ms \|.*?\n\n", token),
    Passage(VLLM, "vllm_tokens.json", r"\| folder \| arguments of.*?\n\n", served),
    Passage(INSIDE, "inside_a_token.json", r"Reading \d+ MB of weights takes at least [\d.]+ ms\.", least),
)


def write_pages(passages: Iterable[Passage]) -> None:
    for passage in passages:
        path = ROOT / passage.page
        path.write_text(passage.rewritten(path.read_text()))


def main() -> None:
    write_pages(PASSAGES)


if __name__ == "__main__":
    main()
