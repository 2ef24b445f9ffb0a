"""What README.md and docs/ take from benchmarks/results: run this to write it anew.

    python -m benchmarks.tables

`make lint` (tests/docs) fails where a page says something else than the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks import records

ROOT = records.RESULTS.parents[1]
Results = dict[str, Any]


class Passage(NamedTuple):
    """Part of a page that is made from results."""

    page: str
    results: str
    pattern: str  # what it looks like there
    write: Callable[[Results], str]

    def rewritten(self, text: str) -> str:
        """The page with this passage as the results have it."""
        results = records.read(self.results)
        again, count = re.subn(self.pattern, lambda _: self.write(results), text, flags=re.DOTALL)
        assert count == 1, f"{count} passages like {self.pattern!r} in {self.page}"
        return again


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n\n"


# ---- language models --------------------------------------------------------------------------------------------

PEERS = ("llama.cpp", "ik_llama.cpp")
ROWS = {
    "generation": "128 tokens, empty context",
    "generation after 1024": "32 tokens after 1024",
    "generation after 4096": "32 tokens after 4096",
    "prompt of 512": "prompt of 512 tokens",
    "prompt of 4096": "prompt of 4096 tokens",
    "streams: 1": "one stream",
    **{f"streams: {n}": f"{n} streams together" for n in (2, 4, 8, 16)},
    "cold start": "cold start to the first token, prompt of 20 tokens",
}


def speed(results: Results, rows: Iterable[str] = ROWS) -> str:
    """How fast, beside those of llama.cpp and ik_llama.cpp that ran; in brackets, times as fast as the second."""
    about, found = results["about"], {(r["what"], r["who"]): r for r in results["records"]}
    beside = [name for name in PEERS if name in about["peers"]]
    who = [*beside, *(f"billfish {activations}" for activations in ("q8", "q16", "exact"))]
    lines = [[f"{about['cpu']}, {about['threads']} threads", *beside, "q8", "q16", "exact"]]
    for what in rows:
        cells, best = [], found[what, PEERS[-1]]["seconds"]
        for name in who:
            record = found.get((what, name))
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


# Products first, then what lies between them.
PARTS = ("q, k, v", "attention output", "gate and up", "down", "head")
PARTS += ("norms", "rotation and cache", "attention", "gate", "Python")


def token(results: Results) -> str:
    """Milliseconds of one token, by part."""
    found = results["records"]
    rows = [["ms", *(f"{r['activations']}, after {r['context']}" for r in found)]]
    parts = [part for part in PARTS if part in found[0]["milliseconds"]]
    rows += [[part, *(f"{r['milliseconds'][part]:.2f}" for r in found)] for part in parts]
    return table([*rows, ["all", *(f"{sum(r['milliseconds'].values()):.2f}" for r in found)]])


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
    names = {"float32": "float32", "w4a8": "W4A8", "billfish": "billfish, q8"}
    kinds = {"prompts": "prompts of 512 tokens", "1": "one stream"}
    rows = [[f"{results['cpu']}, {results['threads']} threads, tok/s", *(names[engine] for engine in speeds)]]
    for kind in speeds["billfish"]:
        rows.append([kinds.get(kind, f"{kind} streams together"), *(f"{own[kind]:.0f}" for own in speeds.values())])
    return table(rows)


def eight_clients(results: Results) -> str:
    """How fast `billfish serve` is, beside the decoder without a server and llama.cpp's server."""
    about, found = results["about"], {(r["who"], r["what"]): r for r in results["records"]}
    whats = [f"first token, {state}" for state in ("idle", "busy")]
    rows = [[f"{about['cpu']}, {about['threads']} threads", "8 clients together", *whats]]
    for who in dict.fromkeys(r["who"] for r in results["records"]):
        waits = [found.get((who, what)) for what in whats]
        cells = [f"{1000 * wait['seconds']:.0f} ms" if wait else "" for wait in waits]
        rows.append([who, f"{found[who, '8 streams']['tokens_per_s']:.0f} tok/s", *cells])
    return table(rows)


# ---- quality ----------------------------------------------------------------------------------------------------


def by_format(found: list[Results], columns: list[Results], figure: str, digits: int) -> list[list[str]]:
    """A row for each format: the figure of each column, and in brackets that figure by the better of rtn and mse."""
    formats = {(r["format"], r["group_size"]): r["bits_per_weight"] for r in found if r["format"]}
    rows = []
    for (name, group_size), bits in formats.items():
        own = [record for record in found if (record["format"], record["group_size"]) == (name, group_size)]
        best = min(record[figure] for record in own if record["method"] in ("rtn", "mse"))
        row = [f"{name}, {group_size}", f"{bits:.2f}"]
        for column in columns:
            value = next((record[figure] for record in own if column.items() <= record.items()), None)
            share = "" if column["method"] in ("rtn", "mse") or value is None else f" ({value / best:.2f})"
            row.append("" if value is None else f"{value:.{digits}f}{share}")
        rows.append(row)
    return rows


def language(results: Results) -> str:
    """KL divergence of SmolLM2, by format and method."""
    calibrated = [
        {"method": method, "calibration_text": text, "calibration_tokens": 32768}
        for text in ("mixed", "documentation")
        for method in ("weighted", "gptq")
    ]
    columns = [{"method": "rtn"}, {"method": "mse"}, *calibrated]
    head = ["format, group size", "bits per weight", "`rtn`", "`mse`"]
    head += ["weighted, mixed", "`gptq`, mixed", "weighted, documentation", "`gptq`, documentation"]
    return table([head, *by_format(results["records"], columns, "divergence", 3)])


def embeddings(results: Results) -> str:
    """Distance of MiniLM's embeddings, by format and method."""
    columns = [{"method": method} for method in ("rtn", "mse", "weighted", "gptq")]
    head = ["format, group size", "bits per weight", "embeddings: `rtn`", "`mse`", "weighted", "`gptq`"]
    return table([head, *by_format(results["embeddings"], columns, "distance", 5)])


def others(results: Results) -> str:
    """What else was measured with the mixed text: llama.cpp's quantizer, few tokens, a format for each matrix."""
    rows = [["further", "bits per weight", "calibration tokens", "KL divergence", "same best token", "perplexity"]]
    for record in results["records"]:
        name = "`--bits 4.6`, weighted" if record["method"] == "bits" else f"{record['format']}, {record['method']}"
        if record["method"] in ("bits", "ggml") or 0 < record["calibration_tokens"] < 32768:
            kl = f"{record['divergence']:.4f} ± {record['divergence_error']:.4f}"
            perplexity = f"{record['perplexity']:.2f} ± {record['perplexity_error']:.2f}"
            bits, tokens = f"{record['bits_per_weight']:.2f}", str(record["calibration_tokens"])
            rows.append([name, bits, tokens, kl, f"{record['same_best']:.1%}", perplexity])
    return table(rows)


def plan(results: Results) -> str:
    """The plan of `--bits`, as an example of one."""
    found = next(record["plan"] for record in results["records"] if record["method"] == "bits")
    return f"```\n{found}```"


# ---- CUDA: x in 8 bits ------------------------------------------------------------------------------------------


def byte_products(results: Results) -> str:
    """Microseconds; in brackets, cuBLAS's time and that of x in float16, divided by ours."""
    found = {(r["format"], r["activations"], r["k"], r["n"], r["m"]): r for r in results["records"]}
    rows = sorted({m for *_, m in found})
    lines = [["weights, x", "K x N", *map(str, rows)]]
    for format, way, k, n in dict.fromkeys(key[:-1] for key in found if key[1] != "exact"):
        line = [f"{format} {way}", f"{k} x {n}"]
        for m in rows:
            record, exact = found[format, way, k, n, m], found[format, "exact", k, n, m]
            seconds, cublas = record["seconds"], record["peers"]["cublas:f16"]
            in_bytes = record["kernel"] == "marlin_gemm_bytes"
            gain = f"{exact['seconds'] / seconds:.2f}" if in_bytes else "as it is"
            line.append(f"{1e6 * seconds:.{1 if seconds < 1e-4 else 0}f} ({cublas / seconds:.2f}, {gain})")
        lines.append(line)
    return table(lines)


def prompts(results: Results) -> str:
    found = results["prompts"]
    rates = f'{found["float16"]:,.0f} tokens a second, and with `activations="fp8"` at {found["fp8"]:,.0f}'
    return f"prompts of {found['tokens']} tokens at {rates}: {found['fp8'] / found['float16']:.2f}\ntimes."


# ---- Metal ------------------------------------------------------------------------------------------------------

SHOWN_N = 4096
MOST_CYCLES = dict.fromkeys(["u4b8", "q4_0", "fp4", "mxfp4"], 3.5)
MOST_CYCLES |= dict.fromkeys(["nvfp4", "u4", "q4_1", "q4_k", "q8_0"], 4.5)


def decoding(results: Results) -> str:
    """What decoding a value costs."""
    kinds = ("simple", "complex", "memory")
    rows = [["element", "decoded by", *kinds, "cycles"]]
    for each in results["decode"]:
        rows.append([each["element"], each["way"], *(f"{each['issue'][kind]:.2f}" for kind in kinds)])
        rows[-1].append(f"{each['cycles']:.2f}")
    return table(rows)


def one_row(results: Results) -> str:
    """Cycles per weight of ours at M = 1."""
    rows = [["format", "at most", "4096 x 4096", "4096 x 14336", "bound on all four chips"]]
    for format, most in MOST_CYCLES.items():
        ours = [r for r in results["records"] if (r["format"], r["m"], r["owner"]) == (format, 1, "billfish")]
        bounds = sorted({bound for record in ours for bound in record["bound_by"].values()})
        rows.append([format, str(most), *(f"{r['cycles_per_weight']:.2f}" for r in ours), ", ".join(bounds)])
    return table(rows)


def beside_mlx(results: Results) -> str:
    """Our time as a part of MLX's, the larger of both shapes; cycles are those of the first."""
    found: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
    for theirs, ours in pairwise(results["records"]):  # MLX's come before ours
        if theirs["owner"] == "mlx":
            found.setdefault((ours["format"], ours["m"]), []).append((ours, theirs))
    rows = [["format", "M", "ours", "MLX's", "on M1", "on M1 Max", "on M2", "on M2 Max"]]
    for (format, m), pairs in found.items():
        cycles = [f"{record['cycles_per_weight']:.2f}" for record in pairs[0]]
        times = [(ours["estimated_us"], theirs["estimated_us"]) for ours, theirs in pairs]
        largest = [f"{max(ours[chip] / theirs[chip] for ours, theirs in times):.2f}" for chip in times[0][0]]
        rows.append([format, str(m), *cycles, *largest])
    return table(rows)


def metal_products(results: Results) -> str:
    """Of the formats that MLX has, too."""
    head = ["format", "M", "kernel", "cycles per weight", "M1", "M1 Max", "M2", "M2 Max", "bound on M1 Max"]
    rows = [[*head, "threadgroup memory, B"]]
    shared = {record["format"] for record in results["records"] if record["owner"] == "mlx"}
    for record in results["records"]:
        if record["n"] == SHOWN_N and record["format"] in shared:
            kernel = "`" + record["kernel"].replace(" + ", "` + `") + "`"
            times = [f"{us:,.0f}" for us in record["estimated_us"].values()]
            cells = [record["format"], str(record["m"]), kernel, f"{record['cycles_per_weight']:.2f}", *times]
            rows.append([*cells, record["bound_by"]["M1 Max"], f"{record['threadgroup_memory']:,}"])
    return table(rows)


# ---- the pages --------------------------------------------------------------------------------------------------

LLM, INSIDE, VLLM, QUALITY = "docs/llm.md", "docs/inside-a-token.md", "docs/vllm.md", "docs/quality.md"
CUDA, BYTES, METAL, PROFILE = "docs/cuda.md", "cuda_bytes_h200.json", "docs/metal.md", "metal_profile.json"
SPEED = r"\| [^|\n]* threads \| llama\.cpp \|.*?\n\n"
SPEED_BESIDE_IK = r"\| [^|\n]* threads \| ik_llama\.cpp \|.*?\n\n"
PASSAGES = (
    Passage(LLM, "llm_neoverse_n1.json", SPEED, speed),
    Passage(LLM, "llm_neoverse_n1.json", r"Peers: [^\n]*\.", peers),
    Passage(LLM, "llm_xeon.json", SPEED_BESIDE_IK, speed),
    Passage("README.md", "llm_neoverse_n1.json", SPEED, speed_in_short),
    Passage(INSIDE, "inside_a_token.json", r"\| ms \|.*?\n\n", token),
    Passage(INSIDE, "inside_a_token.json", r"Reading \d+ MB of weights takes at least [\d.]+ ms\.", least),
    Passage(VLLM, "vllm_tokens.json", r"\| folder \| arguments of.*?\n\n", served),
    Passage(VLLM, "vllm_xeon.json", r"\| Intel[^|\n]* threads, tok/s \|.*?\n\n", served_speed),
    Passage("docs/serving.md", "serving_neoverse_n1.json", r"\| [^|\n]* threads \| 8 clients.*?\n\n", eight_clients),
    Passage("docs/calibration.md", "quality.json", r"```\n# [^`]* bits per weight\..*?```", plan),
    Passage(QUALITY, "quality.json", r"\| format, group size \| bits per weight \| `rtn`.*?\n\n", language),
    Passage(QUALITY, "quality.json", r"\| further \|.*?\n\n", others),
    Passage(QUALITY, "quality.json", r"\| format, group size \| bits per weight \| embeddings.*?\n\n", embeddings),
    Passage(CUDA, BYTES, r"\| weights, x \| K x N \|.*?\n\n", byte_products),
    Passage(CUDA, BYTES, r"prompts of \d+ tokens at [\d,]+ tokens a second, and with [^\n]*\ntimes\.", prompts),
    Passage(METAL, PROFILE, r"\| element \| decoded by \|.*?\n\n", decoding),
    Passage(METAL, PROFILE, r"\| format \| at most \|.*?\n\n", one_row),
    Passage(METAL, PROFILE, r"\| format \| M \| ours \|.*?\n\n", beside_mlx),
    Passage(METAL, PROFILE, r"\| format \| M \| kernel \|.*?\n\n", metal_products),
)


def main(passages: Iterable[Passage] = PASSAGES) -> None:
    for passage in passages:
        path = ROOT / passage.page
        path.write_text(passage.rewritten(path.read_text()))


if __name__ == "__main__":
    main()
