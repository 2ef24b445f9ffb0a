"""What docs/cuda.md says of x in 8 bits, from benchmarks/results/cuda_bytes_h200.json: run this to write it anew.

    python -m benchmarks.cuda_bytes_tables

`make lint` (tests/docs) fails where the page says something else than the results.
"""

from __future__ import annotations

from benchmarks.llm_tables import Passage, Results, table, write_pages


def products(results: Results) -> str:
    """Microseconds; in brackets, cuBLAS's time and that of x in float16, divided by ours."""
    records = {(r["format"], r["activations"], r["k"], r["n"], r["m"]): r for r in results["records"]}
    rows = sorted({m for *_, m in records})
    lines = [["weights, x", "K x N", *map(str, rows)]]
    for format, way, k, n in dict.fromkeys(key[:-1] for key in records if key[1] != "exact"):
        line = [f"{format} {way}", f"{k} x {n}"]
        for m in rows:
            record, exact = records[format, way, k, n, m], records[format, "exact", k, n, m]
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


CUDA, NAME = "docs/cuda.md", "cuda_bytes_h200.json"
PASSAGES = (
    Passage(CUDA, NAME, r"\| weights, x \| K x N \|.*?\n\n", products),
    Passage(CUDA, NAME, r"prompts of \d+ tokens at [\d,]+ tokens a second, and with [^\n]*\ntimes\.", prompts),
)


def main() -> None:
    write_pages(PASSAGES)


if __name__ == "__main__":
    main()
