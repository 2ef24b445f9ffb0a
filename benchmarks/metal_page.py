"""Writes what `billfish profile --json benchmarks/results/metal_profile.json` recorded into docs/metal.md.

python benchmarks/metal_page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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


def decode_row(each: Mapping[str, Any]) -> list[str]:
    slots = [f"{each['issue'][kind]:.2f}" for kind in DECODE[2:5]]
    return [each["element"], each["way"], *slots, f"{each['cycles']:.2f}"]


def product_row(record: Mapping[str, Any]) -> list[str]:
    kernel = "`" + record["kernel"].replace(" + ", "` + `") + "`"
    times = [f"{us:,.0f}" for us in record["estimated_us"].values()]
    cycles, memory = f"{record['cycles_per_weight']:.2f}", f"{record['threadgroup_memory']:,}"
    return [record["format"], str(record["m"]), kernel, cycles, *times, record["bound_by"]["M1 Max"], memory]


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]).replace("| --- ", "|---")


def main() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "metal_profile.json").read_text())
    page = ROOT / "docs" / "metal.md"
    text = page.read_text()
    shown = [record for record in recorded["records"] if record["n"] == SHOWN_N]
    tables = {
        table(DECODE, []).split("\n")[0]: table(DECODE, [decode_row(each) for each in recorded["decode"]]),
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
