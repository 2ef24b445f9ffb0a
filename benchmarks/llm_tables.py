"""What README.md and the pages of docs/ on language models take from results: run this to write it anew.

    python -m benchmarks.llm_tables

`make lint` (tests/docs) fails where a page says something else than the results.
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


PEERS = ("llama.cpp", "ik_llama.cpp")
COLD = "cold start to the first token, prompt of 20 tokens"
ROWS = {
    "generation": "128 tokens, empty context",
    "generation after 1024": "32 tokens after 1024",
    "generation after 4096": "32 tokens after 4096",
    "prompt of 512": "prompt of 512 tokens",
    "prompt of 4096": "prompt of 4096 tokens",
    "streams: 1": "one stream",
    **{f"streams: {n}": f"{n} streams together" for n in (2, 4, 8, 16)},
    "cold start": COLD,
}


def speed(results: Results, rows: Iterable[str] = ROWS) -> str:
    """How fast, beside those of llama.cpp and ik_llama.cpp that ran; in brackets, times as fast as the second."""
    about, records = results["about"], {(r["what"], r["who"]): r for r in results["records"]}
    beside = [name for name in PEERS if name in about["peers"]]
    who = [*beside, *(f"billfish {activations}" for activations in ("q8", "q16", "exact"))]
    lines = [[f"{about['cpu']}, {about['threads']} threads", *beside, "q8", "q16", "exact"]]
    for what in rows:
        cells, best = [], records[what, PEERS[-1]]["seconds"]
        for name in who:
            record = records.get((what, name))
            if record is None:
                cells.append("")
                continue
            seconds = record["seconds"]
            cell = f"{seconds:.2f} s" if what == "cold start" else f"{record['tokens'] / seconds:.0f} tok/s"
            cells.append(cell if name in PEERS else f"{cell} ({best / seconds:.2f})")
        lines.append([ROWS[what], *cells])
    return table(lines)


def speed_in_short(results: Results) -> str:
    return speed(results, ("generation", "generation after 4096", "prompt of 512", "streams: 16", "cold start"))


def peers(results: Results) -> str:
    """Whose figures the peers' columns are."""
    found = results["about"]["peers"]
    return "Peers: " + ", ".join(f"{found[name]['version']} ({found[name]['date']})" for name in PEERS) + "."


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


SERVED_KINDS = {"prompts": "prompts of 512 tokens", "1": "one stream"}


def served_speed(results: Results) -> str:
    """How fast, beside vLLM's own kernels."""
    speeds = results["tokens per second"]
    names = {"float32": "float32", "w4a8": "W4A8", "billfish": "billfish, q8"}
    rows = [[f"{results['cpu']}, {results['threads']} threads, tok/s", *(names[engine] for engine in speeds)]]
    for kind in speeds["billfish"]:
        what = SERVED_KINDS.get(kind, f"{kind} streams together")
        rows.append([what, *(f"{own[kind]:.0f}" for own in speeds.values())])
    return table(rows)


def eight_clients(results: Results) -> str:
    """How fast `billfish serve` is, beside the decoder without a server and llama.cpp's server."""
    about, records = results["about"], {(r["who"], r["what"]): r for r in results["records"]}
    rows = [
        [f"{about['cpu']}, {about['threads']} threads", "8 clients together", *(f"first token, {s}" for s in STATES)]
    ]
    for who in dict.fromkeys(r["who"] for r in results["records"]):
        waits = [records.get((who, f"first token, {state}")) for state in STATES]
        cells = [f"{1000 * wait['seconds']:.0f} ms" if wait else "" for wait in waits]
        rows.append([who, f"{records[who, '8 streams']['tokens_per_s']:.0f} tok/s", *cells])
    return table(rows)


STATES = ("idle", "busy")
LLM, INSIDE, VLLM = "docs/llm.md", "docs/inside-a-token.md", "docs/vllm.md"
SPEED = r"\| [^|\n]* threads \| llama\.cpp \|.*?\n\n"
SPEED_BESIDE_IK = r"\| [^|\n]* threads \| ik_llama\.cpp \|.*?\n\n"
SERVED = r"\| Intel[^|\n]* threads, tok/s \|.*?\n\n"
PASSAGES = (
    Passage(LLM, "llm_neoverse_n1.json", SPEED, speed),
    Passage(LLM, "llm_neoverse_n1.json", r"Peers: [^\n]*\.", peers),
    Passage(LLM, "llm_xeon.json", SPEED_BESIDE_IK, speed),
    Passage("README.md", "llm_neoverse_n1.json", SPEED, speed_in_short),
    Passage(INSIDE, "inside_a_token.json", r"\| ms \|.*?\n\n", token),
    Passage(VLLM, "vllm_tokens.json", r"\| folder \| arguments of.*?\n\n", served),
    Passage(VLLM, "vllm_xeon.json", SERVED, served_speed),
    Passage("docs/serving.md", "serving_neoverse_n1.json", r"\| [^|\n]* threads \| 8 clients.*?\n\n", eight_clients),
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
