"""What docs/quality.md and docs/calibration.md take from benchmarks/results/quality.json: run this to write it anew.

    python -m benchmarks.quality_tables

`make lint` (tests/docs) fails where a page says something else than the results.
"""

from __future__ import annotations

from typing import Any

from benchmarks.llm_tables import ROOT, Passage, table, write_pages

NAME = "quality.json"
RESULTS = ROOT / "benchmarks" / "results" / NAME
Record = dict[str, Any]


def line(record: Record) -> str:
    """A record in one line, for people who wait for the next."""
    what = f"{record['format'] or 'mixed'}, {record['group_size']}, {record['method']}"
    if "distance" in record:
        return f"{what}: {record['distance']:.5f} ± {record['distance_error']:.5f}"
    text = f"{record['calibration_tokens']} tokens {record['calibration_text']}".strip()
    return f"{what}, {text}: {record['divergence']:.4f} ± {record['divergence_error']:.4f}"


def _by_format(records: list[Record], columns: list[Record], figure: str, digits: int) -> list[list[str]]:
    """A row for each format: the figure of each column, and in brackets that figure by the better of rtn and mse."""
    formats = {(r["format"], r["group_size"]): r["bits_per_weight"] for r in records if r["format"]}
    rows = []
    for (name, group_size), bits in formats.items():
        own = [record for record in records if (record["format"], record["group_size"]) == (name, group_size)]
        least = min(record[figure] for record in own if record["method"] in ("rtn", "mse"))
        row = [f"{name}, {group_size}", f"{bits:.2f}"]
        for column in columns:
            value = next((record[figure] for record in own if column.items() <= record.items()), None)
            share = "" if column["method"] in ("rtn", "mse") or value is None else f" ({value / least:.2f})"
            row.append("" if value is None else f"{value:.{digits}f}{share}")
        rows.append(row)
    return rows


def language(results: Any) -> str:
    """KL divergence of SmolLM2, by format and method."""
    calibrated = [
        {"method": method, "calibration_text": text, "calibration_tokens": 32768}
        for text in ("mixed", "documentation")
        for method in ("weighted", "gptq")
    ]
    columns = [{"method": "rtn"}, {"method": "mse"}, *calibrated]
    head = ["format, group size", "bits per weight", "`rtn`", "`mse`"]
    head += ["weighted, mixed", "`gptq`, mixed", "weighted, documentation", "`gptq`, documentation"]
    return table([head, *_by_format(results["records"], columns, "divergence", 3)])


def embeddings(results: Any) -> str:
    """Distance of MiniLM's embeddings, by format and method."""
    columns = [{"method": method} for method in ("rtn", "mse", "weighted", "gptq")]
    head = ["format, group size", "bits per weight", "embeddings: `rtn`", "`mse`", "weighted", "`gptq`"]
    return table([head, *_by_format(results["embeddings"], columns, "distance", 5)])


def others(results: Any) -> str:
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


def plan(results: Any) -> str:
    """The plan of `--bits`, as an example of one."""
    found = next(record["plan"] for record in results["records"] if record["method"] == "bits")
    return f"```\n{found}```"


PASSAGES = (
    Passage("docs/calibration.md", NAME, r"```\n# [^`]* bits per weight\..*?```", plan),
    Passage("docs/quality.md", NAME, r"\| format, group size \| bits per weight \| `rtn`.*?\n\n", language),
    Passage("docs/quality.md", NAME, r"\| further \|.*?\n\n", others),
    Passage("docs/quality.md", NAME, r"\| format, group size \| bits per weight \| embeddings.*?\n\n", embeddings),
)


def main() -> None:
    write_pages(PASSAGES)


if __name__ == "__main__":
    main()
