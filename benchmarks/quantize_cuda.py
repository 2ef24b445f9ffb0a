"""How long a GPU takes to quantize and to pack the 8e9 weights of a model of Llama-3-8B's shape.

Weights are bfloat16 and on the GPU from the start, one tensor for each shape. Every matrix of the model is quantized
from the tensor of its shape, and all packed weights are kept. Kernels are compiled before. A record has the seconds,
the bytes that the packed weights take, the most that the GPU held beside them, and the error of the first 64 rows of
one matrix, as quantized on the GPU and on the CPU: the root of the mean square, relative to that of the weights.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.random_model import SHAPES
from billfish.core.format import parse_format

COMPARED_ROWS = 64


def shapes(layers: int) -> Counter[tuple[int, int]]:
    """How many matrices of each shape the model has."""
    return Counter(replace(SHAPES["8b"], layers=layers).matrices().values())


def relative_error(w: np.ndarray, q: bf.QuantizedTensor) -> float:
    difference = bf.dequantize(q).astype(np.float64) - w
    return float(np.sqrt((difference**2).mean() / (w.astype(np.float64) ** 2).mean()))


def record(name: str, method: Any, tensors: dict[tuple[int, int], torch.Tensor], layers: int) -> dict[str, Any]:
    """One format and one method over the whole model."""
    format, size = parse_format(name, "--formats")
    settings: dict[str, Any] = {"group_size": size, "method": method}
    sample = next(iter(tensors.values()))[:COMPARED_ROWS]
    here = sample.float().cpu().numpy()
    on_gpu, on_cpu = (relative_error(here, bf.quantize(w, format, **settings)) for w in (sample, here))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, kept = torch.cuda.memory_allocated(), []
    started = time.perf_counter()
    for shape, count in shapes(layers).items():
        kept += [bf.quantize(tensors[shape], format, **settings) for _ in range(count)]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    packed = torch.cuda.memory_allocated() - before
    return {
        "format": name,
        "method": method,
        "weights": sum(n * k * count for (n, k), count in shapes(layers).items()),
        "seconds": seconds,
        "packed_bytes": packed,
        "peak_bytes_beside": torch.cuda.max_memory_allocated() - before - packed,
        "relative_error": on_gpu,
        "relative_error_on_the_cpu": on_cpu,
    }


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.listed("--formats", "formats", "q4_0,fp4:128,u4b8:128,u4:128,q4_k,nvfp4,iq4_nl,q8_0")
    parser.listed("--methods", "methods", "rtn,mse")
    parser.option("--layers", "layers of the model", 32, command.positive, "N")
    flags = parser.parse_args()
    torch.manual_seed(0)
    tensors = {shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in shapes(flags.layers)}
    found = []
    print(f"{'format':10} {'method':6} {'seconds':>8} {'1e9 weights/s':>14} {'error':>9} {'on the CPU':>11}")
    for name in flags.formats:
        for method in flags.methods:
            each = record(name, method, tensors, flags.layers)
            rate = each["weights"] / each["seconds"] / 1e9
            errors = f"{each['relative_error']:9.6f} {each['relative_error_on_the_cpu']:11.6f}"
            print(f"{name:10} {method:6} {each['seconds']:8.2f} {rate:14.2f} {errors}", flush=True)
            found.append(each)
    about = {"machine": machine.gpu(), "versions": machine.versions("torch", "numpy")}
    records.write(flags.json, about | {"records": found})


if __name__ == "__main__":
    main()
