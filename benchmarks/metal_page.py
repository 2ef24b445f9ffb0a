"""Writes what `billfish profile --json benchmarks/results/metal_profile.json` recorded into docs/metal.md.

python -m benchmarks.metal_page
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DECODE = ["element", "decoded by", "simple", "complex", "memory", "cycles"]
PRODUCTS = [
    "format",
    "M",
    "kernel",
    "cycles per weight",
    "M1",
    "M1 Max",
    "M2",
    "M2 Max",
    "bound on M1 Max",
    "threadgroup memory, B",
]
SHOWN_N = 4096
ONE_ROW = ["format", "at most", "4096 x 4096", "4096 x 14336", "bound on all four chips"]
MOST_CYCLES = dict.fromkeys(["u4b8", "q4_0", "fp4", "mxfp4"], 3.5)
MOST_CYCLES |= dict.fromkeys(["nvfp4", "u4", "q4_1", "q4_k", "q8_0"], 4.5)
RATIOS = ["format", "M", "ours", "MLX's", "on M1", "on M1 Max", "on M2", "on M2 Max"]


def decode_row(each: Mapping[str, Any]) -> list[str]:
    slots = [f"{each['issue'][kind]:.2f}" for kind in DECODE[2:5]]
    return [each["element"], each["way"], *slots, f"{each['cycles']:.2f}"]


def product_row(record: Mapping[str, Any]) -> list[str]:
    kernel = "`" + record["kernel"].replace(" + ", "` + `") + "`"
    times = [f"{us:,.0f}" for us in record["estimated_us"].values()]
    cycles, memory = f"{record['cycles_per_weight']:.2f}", f"{record['threadgroup_memory']:,}"
    return [record["format"], str(record["m"]), kernel, cycles, *times, record["bound_by"]["M1 Max"], memory]


def one_row(records: list[dict[str, Any]]) -> list[list[str]]:
    """Cycles per weight of ours at M = 1."""
    rows = []
    for format, most in MOST_CYCLES.items():
        ours = [r for r in records if (r["format"], r["m"], r["owner"]) == (format, 1, "billfish")]
        bounds = {bound for record in ours for bound in record["bound_by"].values()}
        rows.append([format, str(most), *(f"{r['cycles_per_weight']:.2f}" for r in ours), ", ".join(sorted(bounds))])
    return rows


def ratio_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """Our time as a part of MLX's, the larger of both shapes; cycles are those of the first."""
    found: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
    for theirs, ours in pairwise(records):  # MLX's come before ours
        if theirs["owner"] == "mlx":
            found.setdefault((ours["format"], ours["m"]), []).append((ours, theirs))
    rows = []
    for (format, m), pairs in found.items():
        cycles = [f"{record['cycles_per_weight']:.2f}" for record in pairs[0]]
        times = [(ours["estimated_us"], theirs["estimated_us"]) for ours, theirs in pairs]
        largest = [f"{max(ours[chip] / theirs[chip] for ours, theirs in times):.2f}" for chip in times[0][0]]
        rows.append([format, str(m), *cycles, *largest])
    return rows


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]).replace("| --- ", "|---")


def main() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "metal_profile.json").read_text())
    page = ROOT / "docs" / "metal.md"
    text = page.read_text()
    records = recorded["records"]
    shared = {record["format"] for record in records if record["owner"] == "mlx"}
    shown = [record for record in records if record["n"] == SHOWN_N and record["format"] in shared]
    tables = {
        table(DECODE, []).split("\n")[0]: table(DECODE, [decode_row(each) for each in recorded["decode"]]),
        table(ONE_ROW, []).split("\n")[0]: table(ONE_ROW, one_row(records)),
        table(RATIOS, []).split("\n")[0]: table(RATIOS, ratio_rows(records)),
        table(PRODUCTS, []).split("\n")[0]: table(PRODUCTS, [product_row(record) for record in shown]),
    }
    for first, whole in tables.items():
        text, count = re.subn(
            rf"^{re.escape(first)}\n(?:\|.*\n)*", lambda _, new=whole: f"{new}\n", text, flags=re.MULTILINE
        )
        assert count == 1, f"docs/metal.md has no table that begins with {first}"
    page.write_text(text)


if __name__ == "__main__":
    main()
