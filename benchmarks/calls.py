"""What a call costs besides the product, and how fast weights are packed, on this machine's CPU or GPU.

    python -m benchmarks.calls [--device cuda] [--json FILE]

`--device cuda`: calls_cuda.py. On the CPU: calls with weights so small that nothing else takes time, in microseconds,
and of 16 rows of W by 4096 k with several rows of x. Packing of 4096 x 4096, in milliseconds. The least of several runs
counts, with two threads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

import billfish as bf
from benchmarks import calls_cuda
from benchmarks.products.limits import machine
from billfish.backends.cpu.backend import set_threads
from billfish.core.files import write_atomically

FORMATS = ("q4_0", "q8_0", "q4_k", "iq4_nl", "u4b8", "u4", "fp4", "u8b128", "affine4", "mxfp4", "nvfp4")
FORMATS += ("mxfp4_gguf", "nvfp4_gguf")
RUNS = 7


def seconds(run: Callable[[], object], calls: int) -> float:
    """Of one call, in the fastest of several runs."""
    run()
    best = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def calls() -> dict[str, float]:
    """Microseconds."""
    linear = torch.nn.Linear(64, 32, bias=False)
    layer = bf.MarlinLinear.from_linear(linear, "q4_0", activations="q8")
    q, x, y = layer.quantized(), np.ones((1, 64), np.float32), np.empty((1, 32), np.float32)
    tensor = torch.from_numpy(x)
    found = {
        "quantized_linear, NumPy": seconds(lambda: bf.quantized_linear(x, q, activations="q8"), 3000),
        "quantized_linear, NumPy, out=": seconds(lambda: bf.quantized_linear(x, q, activations="q8", out=y), 3000),
        "quantized_linear, torch": seconds(lambda: bf.quantized_linear(tensor, q, activations="q8"), 3000),
    }
    with torch.no_grad():
        found["MarlinLinear"] = seconds(lambda: layer(tensor), 3000)
        # The gradient of x is wanted, so the call goes through torch's operator.
        wanted = tensor.clone().requires_grad_()
        with torch.enable_grad():
            found["MarlinLinear, with a gradient"] = seconds(lambda: layer(wanted), 1000)
        found["torch.nn.Linear, float32"] = seconds(lambda: linear(tensor), 3000)
    # Query, key and value of a small model, one by one and in one call.
    heads = [bf.prepack(bf.quantize(np.ones((n, 576), np.float32), "q4_0")) for n in (576, 192, 192)]
    token = np.ones((1, 576), np.float32)
    found["three products of 576 k"] = seconds(
        lambda: [bf.quantized_linear(token, w, activations="q8") for w in heads], 1000
    )
    found["quantized_linears, the same three"] = seconds(
        lambda: bf.quantized_linears(token, heads, activations="q8"), 1000
    )
    narrow = bf.prepack(bf.quantize(np.ones((16, 4096), np.float32), "q4_0"))
    for m in (1, 4, 64):
        rows = np.random.default_rng(0).standard_normal((m, 4096), dtype=np.float32)
        found[f"16 rows of W, {m} of x"] = seconds(
            lambda rows=rows: bf.quantized_linear(rows, narrow, activations="q8"), 500
        )
    return {name: 1e6 * value for name, value in found.items()}


def packing() -> dict[str, float]:
    """Milliseconds."""
    w = np.tile(np.random.default_rng(0).standard_normal((256, 4096), dtype=np.float32), (16, 1))
    found = {}
    for name in FORMATS:
        q = bf.quantize(w, name, method="rtn")
        found[name] = 1e3 * seconds(lambda q=q: bf.prepack(q), 1)
    return found


def cpu_report() -> dict[str, dict[str, float]]:
    set_threads(2)
    return {"microseconds": calls(), "packing_milliseconds": packing()}


def show(part: Mapping[str, object], under: str = "") -> None:
    """Each figure on a line of its own."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            show(value, f"{under}{name}: ")
        else:
            print(f"{under + name:60} {value:8.3g}" if isinstance(value, float) else f"{under}{name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = calls_cuda.report() if arguments.device == "cuda" else cpu_report()
    show(report)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps({"machine": machine()} | report, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
