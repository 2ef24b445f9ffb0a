"""The figures of docs/cpu.md and of the README's table of CPUs are the recorded ones."""

from __future__ import annotations

import re

import pytest
from pages import page, recorded, rows_after

RECORDS = ["cpu_neoverse_n1", "cpu_neoverse_n1_exact", "cpu_neoverse_n1_shapes", "cpu_neoverse_n1_512"]
RECORDS += ["cpu_neoverse_n1_kquants"]
RECORDS += [f"cpu_xeon_avx512_{kind}" for kind in ("2_threads", "exact", "8_threads")]


@pytest.mark.parametrize("name", RECORDS)
def test_ratios_to_the_best_peer(name):
    rows = rows_after(page("docs/cpu.md"), f"{name}.json")
    records = recorded(f"{name}.json")["records"]
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


def test_milliseconds_of_avx2():
    name = "cpu_xeon_avx2_2_threads.json"
    record = recorded(name)
    assert record["machine"]["isa"] == "avx2"
    cells: dict[str, list[str]] = {}
    for product in record["records"]:
        cells.setdefault(product["format"], []).append(f"{1e3 * product['seconds']:.2f}")
    rows = rows_after(page("docs/cpu.md"), name)
    assert rows == [f"| {format} | {' | '.join(times)} |" for format, times in cells.items()]


def test_milliseconds_of_q16_and_their_ratios_to_q8():
    q8 = {(each["format"], each["m"]): each["seconds"] for each in recorded("cpu_neoverse_n1.json")["records"]}
    cells: dict[str, list[str]] = {}
    for product in recorded("cpu_neoverse_n1_q16.json")["records"]:
        ratio = product["seconds"] / q8[product["format"], product["m"]]
        cells.setdefault(product["format"], []).append(f"{1e3 * product['seconds']:.2f} ({ratio:.2f})")
    rows = rows_after(page("docs/cpu.md"), "cpu_neoverse_n1_q16.json")
    assert rows == [f"| {format} | {' | '.join(times)} |" for format, times in cells.items()]


def test_costs_of_a_call():
    text = " ".join(page("docs/cpu.md").split())
    record = recorded("calls_neoverse_n1.json")
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
        assert sentence in text


def test_products_between_loops_of_torch():
    record, expected = recorded("beside_torch_xeon.json"), []
    for own, shared in zip(record["own"]["microseconds"], record["torch"]["microseconds"], strict=True):
        times = (own["product"], own["gelu"], own["in turns"], shared["in turns"])
        expected.append(f"| {own['m']} | {' | '.join(f'{us:.0f}' for us in times)} |")
    assert rows_after(page("docs/cpu.md"), "beside_torch_xeon.json") == expected


def test_dequantize():
    name = "dequantize_neoverse_n1.json"
    rows = rows_after(page("docs/cpu.md"), name)
    for row, record in zip(rows, recorded(name)["records"], strict=True):
        ours, ggml, limit = (record["gbps"].get(who) for who in ("billfish", "ggml", "memset"))
        beside = f"{ggml:.1f} | {ours / ggml:.1f}" if ggml else " | "
        assert row == f"| {record['format']} | {ours:.1f} | {beside} | {ours / limit:.0%} |"


def test_ratios_of_the_readme():
    records = recorded("cpu_neoverse_n1.json")["records"]
    section = page("README.md").split("## How fast")[1].split("## ")[0]
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 7
    for name, cells in rows:
        own = [record for record in records if record["format"] == name]
        assert cells == " | ".join(f"{min(r['peers'].values()) / r['seconds']:.2f}" for r in own)


def test_errors_of_ours_and_of_peers():
    name, rows = "cpu_neoverse_n1_errors.json", []
    for record in recorded(name)["records"]:
        found = {"billfish": record["error"], **record["peer_errors"]}
        cells = [" / ".join(f"{e:.2g}" for e in found.get(who, ())) for who in ("billfish", "ggml", "onnxruntime")]
        rows.append(f"| {record['format']} | {record['m']} | {' | '.join(cells)} |")
    assert rows_after(page("docs/cpu.md"), name) == rows
