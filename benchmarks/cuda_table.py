"""The tables of docs/cuda.md: our kernels beside cuBLAS, humming-kernels where it is installed, and reading alone.

    python -m benchmarks.cuda_table RESULT.json

Random weights are made on the GPU, in copies that its L2 cache cannot hold. Each contender is a CUDA graph of many
calls; the graphs take turns, and the median counts. The GPU's clock moves, so whatever is compared takes turns: beside
other formats, u4b8 in groups of 128 is measured again.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import billfish
from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.device_weights import BrickInfo, DeviceWeights
from billfish.backends.cuda.driver import KernelLaunch, device, tensor_map
from billfish.backends.cuda.layout import brick_shape, interleave_e5m3
from billfish.backends.cuda.memory import address
from billfish.backends.cuda.plans import Gemm, Plan, plan
from billfish.core.files import write_atomically

SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672)]
ROWS = ((1, 8, 16, 32, 64), (128, 256, 512, 1024, 4096))  # few first: after many rows the GPU is slower for a while
ROWS_OF_OTHERS = ((1, 8, 16), (256, 1024))
U4B8 = Kind("Int4", "ScaleF16", "NONE", 1)
KINDS = {
    "u4b8:128": U4B8,
    "u4:128": Kind("Int4", "ScaleF16", "ZERO", 1, 8),
    "u8b128:128": Kind("Int8", "ScaleF16", "NONE", 1),
    "fp4:32": Kind("E2M1", "ScaleF16", "NONE", 4),
    "mxfp4": Kind("E2M1", "ScaleE5M2", "NONE", 4),
    "nvfp4": Kind("E2M1", "ScaleE5M3", "NONE", 8),
    "q4_0": Kind("Int4", "ScaleF16", "NONE", 4),
    "q4_1": Kind("Int4", "ScaleF16", "MINIMUM", 4, 8),
}
OTHERS_SHAPE = (4096, 14336)
ROUNDS = 7
# What says which shape of a kernel ran.
SHAPE_MACROS = ("TEAMS", "SHARERS", "COURSES", "ROWS", "SLOTS", "RESIDENT")  # gemm_small
SHAPE_MACROS += ("WARPGROUPS", "TEAMS", "TALL", "WIDTH", "STAGES", "SPLIT", "PAIRED", "BUFFERS", "BATCH")


def random_weights(kind: Kind, k: int, n: int) -> DeviceWeights:
    """All codes random; scales from 1 to below 2, zero points and minimums around the middle."""
    down, along = brick_shape(n, k)
    bricks = torch.randint(0, 256, (down * along, kind.brick_bytes), dtype=torch.uint8, device="cuda")
    count = kind.group_bytes // kind.scale_dtype.itemsize
    shape = (down * along, count)
    if kind.scale == "ScaleE5M2":
        scales = (torch.randint(15, 17, shape, device="cuda") * 4).to(torch.uint8)  # powers of two
    elif kind.scale == "ScaleE5M3":
        stored = np.random.default_rng(0).integers(0x78, 0x80, (shape[0], 8, kind.groups, 2))
        words = interleave_e5m3(stored.astype(np.uint8))
        scales = torch.from_numpy(words.view(np.uint8).reshape(shape)).cuda()
    else:
        scales = (torch.rand(shape, device="cuda") * 0.99 + 1).half().view(torch.uint8)
    bricks[:, kind.code_bytes : kind.code_bytes + kind.group_bytes] = scales
    if kind.offset != "NONE":
        middle = 8.0 if kind.offset == "ZERO" else -12.0
        offsets = (torch.rand(shape, device="cuda") + middle).half().view(torch.uint8)
        bricks[:, kind.code_bytes + kind.group_bytes :] = offsets
    row_scale = torch.full((n,), 2.0**-8, device="cuda").view(torch.uint8)
    return DeviceWeights(BrickInfo(kind, (n, k)), bricks.ravel(), row_scale)


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def captured(calls: int, run: Any) -> Any:
    for i in range(3):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    return graph


def take_turns(contenders: dict[str, Any], calls: int) -> dict[str, float]:
    """Seconds of a call."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(ROUNDS + 1):
        for name, graph in contenders.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                samples[name].append(begin.elapsed_time(end) / 1e3 / calls)
    return {name: statistics.median(times) for name, times in samples.items()}


class Weights:
    """Copies of one matrix for all contenders."""

    def __init__(self, label: str, k: int, n: int, humming: bool) -> None:
        self.label, self.kind, self.k, self.n = label, KINDS[label], k, n
        cold = 2.2 * torch.cuda.get_device_properties(0).L2_cache_size
        first = random_weights(self.kind, k, n)
        self.ours = [first, *(copy.deepcopy(first) for _ in range(max(1, math.ceil(cold / first.nbytes) - 1)))]
        self.exact = torch.empty((n, k), dtype=torch.float16, device="cuda")
        first.dequantize(stream(), "float16", self.exact.data_ptr())
        copies = max(1, math.ceil(cold / self.exact.nbytes) - 1)
        self.dense = [self.exact, *(self.exact.clone() for _ in range(copies))]
        self.layers = humming_layers(self.exact, len(self.ours)) if humming else []

    def read(self, i: int) -> None:
        bricks = self.ours[i % len(self.ours)].bricks
        launch = KernelLaunch("read.cu", "read_all", (), (4 * device().multiprocessors, 1), 512, 0, 1, True)
        launch(0, stream(), address(bricks), bricks.nbytes // 16, self.exact.data_ptr())

    def multiply(self, i: int, launch: KernelLaunch, box: Any, x: Any, y: Any) -> None:
        held = self.ours[i % len(self.ours)]
        pointers = address(held.bricks), address(held.row_scale), x.data_ptr(), 0, y.data_ptr()
        launch(0, stream(), box, *pointers, len(x), self.n, self.k, self.k)

    def prepare(self, m: int, x: Any, y: Any) -> tuple[Plan, Any]:
        """A plan, and a function for the i-th call."""
        chosen = plan(Gemm(self.kind, m, self.n, self.k), device())
        assert chosen is not None
        box = tensor_map(x.data_ptr(), False, m, self.k, self.k, chosen.box_rows)
        return chosen, lambda i, launch=chosen.launch: self.multiply(i, launch, box, x, y)

    def measure(self, m: int, standard: Weights | None = None) -> dict[str, Any]:
        """A record; beside `standard`, other weights of the same shape."""
        k, n = self.k, self.n
        x = torch.randn((m, k), device="cuda").half()
        y = torch.full((m, n), float("nan"), dtype=torch.float16, device="cuda")
        chosen, call = self.prepare(m, x, y)
        call(0)
        rows = x[:256].double() @ self.exact.double().T
        error = float((y[:256].double() - rows).norm() / rows.norm())
        assert error < 2e-3, (self.label, k, n, m, error)
        calls, alone = 40 if m <= 256 else 12, replace(chosen.launch, overlap=False)
        contenders = {
            "billfish": captured(calls, call),
            "billfish without overlap": captured(calls, lambda i: call(i, alone)),
            "reading": captured(calls, self.read),
            "cublas:f16": captured(calls, lambda i: torch.mm(x, self.dense[i % len(self.dense)].T, out=y)),
        }
        if standard is not None:
            contenders["standard"] = captured(calls, standard.prepare(m, x, y)[1])
        if self.layers:
            try:
                contenders["humming"] = captured(calls, lambda i: self.layers[i % len(self.layers)](x))
            except Exception as problem:  # theirs
                print(f"humming: {problem!r}"[:300], file=sys.stderr)
        seconds = take_turns(contenders, calls)
        mine, without = seconds.pop("billfish"), seconds.pop("billfish without overlap")
        reading = seconds.pop("reading")
        beside = {"seconds_u4b8": seconds.pop("standard")} if standard is not None else {}
        others = "  ".join(f"{name} {1e6 * t:.2f} ({t / mine:.2f})" for name, t in seconds.items())
        figures = f"{1e6 * mine:.2f} us, alone {1e6 * without:.2f}, read {1e6 * reading:.2f}"
        others += "".join(f"  u4b8 {1e6 * t:.2f} ({t / mine:.2f})" for t in beside.values())
        print(f"{self.label} {k}x{n} M={m}: {figures}; {others}", flush=True)
        return {
            "backend": "cuda",
            "format": self.label,
            "activations": "exact",
            "m": m,
            "k": k,
            "n": n,
            "seconds": mine,
            "seconds_without_overlap": without,
            "seconds_reading_weights": reading,
            **beside,
            "gops": 2 * m * n * k / mine / 1e9,
            "weight_gbps": self.ours[0].nbytes / mine / 1e9,
            "kernel": chosen.launch.name,
            "shape": {name.lower(): int(value) for name, value in chosen.launch.macros if name in SHAPE_MACROS},
            "relative_error": error,
            "peers": seconds,
        }


def humming_layers(dense: Any, copies: int) -> list[Any]:
    try:
        from humming.layer import HummingLayer
    except ImportError as error:
        print(f"humming: {error}", file=sys.stderr)
        return []
    n, k = dense.shape
    config = {"dtype": "uint4", "group_size": 128}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.float16).cuda()
    layer.load_from_unquantized(dense)
    layer.transform()
    return [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]


def main() -> None:
    records: list[dict[str, Any]] = []

    def save() -> None:
        properties = torch.cuda.get_device_properties(0)
        about = {"gpu": device().name, "arch": device().arch, "multiprocessors": device().multiprocessors}
        about |= {"l2_bytes": properties.L2_cache_size, "date": time.strftime("%Y-%m-%d")}
        versions = {"billfish": billfish.__version__, "torch": torch.__version__, "numpy": np.__version__}
        content = {"machine": about, "versions": versions, "records": records}
        write_atomically(Path(sys.argv[1]), (json.dumps(content, indent=1) + "\n").encode())

    standard = [Weights("u4b8:128", k, n, True) for k, n in SHAPES]
    others = [Weights(label, *OTHERS_SHAPE, False) for label in list(KINDS)[1:]]
    beside = standard[SHAPES.index(OTHERS_SHAPE)]
    for rows, rows_of_others in zip(ROWS, ROWS_OF_OTHERS, strict=True):
        for weights in standard:
            records += [weights.measure(m) for m in rows]
            save()
        for weights in others:
            records += [weights.measure(m, beside) for m in rows_of_others]
            save()


if __name__ == "__main__":
    main()
