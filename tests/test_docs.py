"""The documentation does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import billfish as bf
from billfish.cli import main

ROOT = Path(__file__).parent.parent


def test_the_example_of_the_readme_runs(capsys):
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(example, names)
    x, w = names["x"], names["w"]
    for y in (names["y"], names["y2"]):
        error = np.linalg.norm(y - x @ w.T) / np.linalg.norm(x @ w.T)
        assert error < 0.12
    assert capsys.readouterr().out.startswith("QuantizedTensor(fp4, [4096, 1024]")


def test_the_walk_in_the_readme_is_what_explain_prints(capsys):
    main(["explain", "fp4", "0b1011", "--scale", "0.3"])
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    readme = (ROOT / "README.md").read_text()
    shown = [line[4:].rstrip() for line in readme.splitlines() if re.match(r"      \w+ .*(0x|minus|bias|\^)", line)]
    assert len(shown) == 9
    assert set(shown) <= printed


def test_the_formats_in_the_readme_exist():
    readme = (ROOT / "README.md").read_text()
    (comment,) = re.findall(r"# or (.*), \.\.\.", readme)
    for name in comment.split(", "):
        assert name in bf.FORMATS


def test_the_error_table_is_the_recorded_one():
    records = json.loads((ROOT / "benchmarks" / "results" / "quantization_error.json").read_text())["records"]
    assert [record["format"] for record in records] == list(bf.FORMATS)
    table = (ROOT / "docs" / "formats.md").read_text()
    for record in records:
        gaussian = record["gaussian"]
        assert f"| {record['format']} | {gaussian['mse'] / gaussian['rtn']:.3f} |" in table


RECORDS = ["cpu_neoverse_n1", "cpu_neoverse_n1_exact", "cpu_neoverse_n1_shapes", "cpu_neoverse_n1_512"]
RECORDS += ["cpu_neoverse_n1_kquants"]
RECORDS += [f"cpu_xeon_avx512_{kind}" for kind in ("2_threads", "exact", "8_threads")]


@pytest.mark.parametrize("name", RECORDS)
def test_the_ratios_of_the_cpu_page_are_the_recorded_ones(name):
    page = (ROOT / "docs" / "cpu.md").read_text()
    rows = page.split(f"{name}.json`):")[1].split("\n\n")[1].splitlines()[2:]
    records = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["records"]
    one_shape = len({(record["k"], record["n"]) for record in records}) == 1
    ratios: dict[str, list[str]] = {}
    for record in records:
        if not record["peers"]:
            continue
        best = min(record["peers"].values())
        cell = f"{best / record['seconds']:.2f} ({100 * record['limit_fraction']:.0f} %)"
        row = f"| {record['format']} | " + ("" if one_shape else f"{record['k']} x {record['n']} | ")
        ratios.setdefault(row, []).append(cell)
    assert len(rows) == len(ratios)
    for row, (start, cells) in zip(rows, ratios.items(), strict=True):
        assert row.startswith(start)
        assert row.endswith("| " + " | ".join(cells) + " |")


def test_the_milliseconds_of_avx2_are_the_recorded_ones():
    page = (ROOT / "docs" / "cpu.md").read_text()
    name = "cpu_xeon_avx2_2_threads.json"
    record = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    assert record["machine"]["isa"] == "avx2"
    cells: dict[str, list[str]] = {}
    for product in record["records"]:
        cells.setdefault(product["format"], []).append(f"{1e3 * product['seconds']:.2f}")
    rows = page.split(f"{name}`):")[1].split("\n\n")[1].splitlines()[2:]
    assert rows == [f"| {format} | {' | '.join(times)} |" for format, times in cells.items()]


def test_the_milliseconds_of_q16_and_their_ratios_to_q8_are_the_recorded_ones():
    page, results = (ROOT / "docs" / "cpu.md").read_text(), ROOT / "benchmarks" / "results"
    one_plane = json.loads((results / "cpu_neoverse_n1.json").read_text())["records"]
    q8 = {(product["format"], product["m"]): product["seconds"] for product in one_plane}
    cells: dict[str, list[str]] = {}
    for product in json.loads((results / "cpu_neoverse_n1_q16.json").read_text())["records"]:
        ratio = product["seconds"] / q8[product["format"], product["m"]]
        cells.setdefault(product["format"], []).append(f"{1e3 * product['seconds']:.2f} ({ratio:.2f})")
    rows = page.split("cpu_neoverse_n1_q16.json`):")[1].split("\n\n")[1].splitlines()[2:]
    assert rows == [f"| {format} | {' | '.join(times)} |" for format, times in cells.items()]


def test_the_costs_of_a_call_are_the_recorded_ones():
    page = " ".join((ROOT / "docs" / "cpu.md").read_text().split())
    record = json.loads((ROOT / "benchmarks" / "results" / "calls_neoverse_n1.json").read_text())
    of, packing = record["microseconds"], record["packing_milliseconds"].values()
    by_numpy, by_torch, layer = (
        of[name] for name in ("quantized_linear, NumPy", "quantized_linear, torch", "MarlinLinear")
    )
    one, four, many = (of[f"16 rows of W, {m} of x"] for m in (1, 4, 64))
    apart, together = of["three products of 576 k"], of["quantized_linears, the same three"]
    for sentence in (
        f"takes {by_numpy:.0f} us when Python's own code is in the caches",
        f"{by_torch:.0f} with torch tensors, a MarlinLinear {layer:.0f}",
        f"take {apart:.0f} us one by one and {together:.0f} in one call",
        f"a call with 16 rows of W takes {one:.0f}, {four:.0f} and {many:.0f} microseconds",
        f"4096 x 4096 in {min(packing):.0f} to {max(packing):.0f} ms with two threads",
    ):
        assert sentence in page


def test_the_table_of_dequantize_is_the_recorded_one():
    name = "dequantize_neoverse_n1.json"
    page = (ROOT / "docs" / "cpu.md").read_text()
    rows = page.split(f"{name}`):")[1].split("\n\n")[1].splitlines()[2:]
    records = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["records"]
    for row, record in zip(rows, records, strict=True):
        ours, ggml, limit = (record["gbps"].get(who) for who in ("billfish", "ggml", "memset"))
        beside = f"{ggml:.1f} | {ours / ggml:.1f}" if ggml else " | "
        assert row == f"| {record['format']} | {ours:.1f} | {beside} | {ours / limit:.0%} |"


def test_the_ratios_of_the_readme_are_the_recorded_ones():
    records = json.loads((ROOT / "benchmarks" / "results" / "cpu_neoverse_n1.json").read_text())["records"]
    section = (ROOT / "README.md").read_text().split("## How fast")[1].split("## ")[0]
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 7
    for name, cells in rows:
        own = [record for record in records if record["format"] == name]
        assert cells == " | ".join(f"{min(r['peers'].values()) / r['seconds']:.2f}" for r in own)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target
