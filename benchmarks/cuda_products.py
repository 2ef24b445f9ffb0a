"""Time the CUDA kernels beside cuBLAS, humming where it is installed, and reading alone: docs/cuda.md.

Random weights are made on the GPU, in copies that its L2 cache cannot hold. Each contender is a CUDA graph of many
calls; the graphs take turns, and the median counts. The GPU's clock moves, so whatever is compared takes turns: beside
other formats, u4b8 in groups of 128 is measured again. With --bytes x is in 8 bits, beside x in float16, and times have
the kernel that rounds x in them; then come prompts of a model of Llama-3-8B's sizes with random mxfp4 weights.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.random_model import SHAPES as MODELS
from benchmarks.random_model import write_random_model
from benchmarks.timing import captured, graph_medians
from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.device_weights import BrickInfo, DeviceWeights
from billfish.backends.cuda.driver import KernelLaunch, device, tensor_map
from billfish.backends.cuda.layout import brick_shape, interleave_e5m3
from billfish.backends.cuda.memory import address
from billfish.backends.cuda.plans import Gemm, launches, plan
from billfish.core.activations import quantize_rows

SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672)]
ROWS = ((1, 8, 16, 32, 64), (128, 256, 512, 1024, 4096))  # few first: after many rows the GPU is slower for a while
ROWS_OF_OTHERS, OTHERS_SHAPE = ((1, 8, 16), (256, 1024)), (4096, 14336)
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
# x in 8 bits: kinds of weights, and ways to round x.
BYTE_KINDS = {
    "mxfp4": (Kind("E2M1", "ScaleE5M2", "NONE", 4, narrow=True), ("fp8",)),
    "u4b8:128": (U4B8, ("fp8", "q8")),
    "fp4:128": (Kind("E2M1", "ScaleF16", "NONE", 1), ("fp8",)),
}
BYTE_SHAPES = [(4096, 14336), (14336, 4096), (8192, 8192), (4096, 4096)]
BYTE_ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
CHECKED = 256  # rows whose errors are worked out
PROMPT = 2048
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


def relative(y: Any, exact: Any) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def shape_of(launch: KernelLaunch) -> dict[str, int]:
    return {name.lower(): int(value) for name, value in launch.macros if name in SHAPE_MACROS}


class Weights:
    """Copies of one matrix for all contenders."""

    def __init__(self, label: str, kind: Kind, k: int, n: int, humming: bool = False) -> None:
        self.label, self.kind, self.k, self.n = label, kind, k, n
        cold = 2.2 * torch.cuda.get_device_properties(0).L2_cache_size
        first = random_weights(kind, k, n)
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

    def cublas(self, x: Any, y: Any) -> Any:
        return lambda i: torch.mm(x, self.dense[i % len(self.dense)].T, out=y)

    def prepare(self, x: Any, y: Any) -> tuple[KernelLaunch, Any]:
        """The kernel, and a function for the i-th call."""
        m, n, k = len(x), self.n, self.k
        chosen = plan(Gemm(self.kind, m, n, k), device())
        assert chosen is not None
        box = tensor_map(x.data_ptr(), False, m, k, k, chosen.box_rows)

        def call(i: int, launch: KernelLaunch = chosen.launch) -> None:
            held = self.ours[i % len(self.ours)]
            pointers = address(held.bricks), address(held.row_scale), x.data_ptr(), 0, y.data_ptr()
            launch(0, stream(), box, *pointers, m, n, k, k)

        return chosen.launch, call

    def record(self, m: int, seconds: float, activations: str = "exact") -> dict[str, Any]:
        """What all records begin with."""
        sizes = {"m": m, "k": self.k, "n": self.n}
        about = {"backend": "cuda", "format": self.label, "activations": activations, **sizes, "seconds": seconds}
        return about | {"gops": 2 * m * self.n * self.k / seconds / 1e9}

    def measure(self, m: int, standard: Weights | None = None) -> dict[str, Any]:
        """A record; beside `standard`, other weights of the same shape."""
        x = torch.randn((m, self.k), device="cuda").half()
        y = torch.full((m, self.n), float("nan"), dtype=torch.float16, device="cuda")
        launch, call = self.prepare(x, y)
        call(0)
        error = relative(y[:CHECKED], x[:CHECKED].double() @ self.exact.double().T)
        assert error < 2e-3, (self.label, self.k, self.n, m, error)
        calls, alone = 40 if m <= 256 else 12, replace(launch, overlap=False)
        contenders = {
            "billfish": captured(calls, call),
            "billfish without overlap": captured(calls, lambda i: call(i, alone)),
            "reading": captured(calls, self.read),
            "cublas:f16": captured(calls, self.cublas(x, y)),
        }
        if standard is not None:
            contenders["standard"] = captured(calls, standard.prepare(x, y)[1])
        if self.layers:
            try:
                contenders["humming"] = captured(calls, lambda i: self.layers[i % len(self.layers)](x))
            except Exception as problem:  # theirs
                print(f"humming: {problem!r}"[:300], file=sys.stderr)
        seconds = graph_medians(contenders, calls)
        mine, without = seconds.pop("billfish"), seconds.pop("billfish without overlap")
        reading = seconds.pop("reading")
        beside = {"seconds_u4b8": seconds.pop("standard")} if standard is not None else {}
        others = "  ".join(f"{name} {1e6 * t:.2f} ({t / mine:.2f})" for name, t in seconds.items())
        others += "".join(f"  u4b8 {1e6 * t:.2f} ({t / mine:.2f})" for t in beside.values())
        figures = f"{1e6 * mine:.2f} us, alone {1e6 * without:.2f}, read {1e6 * reading:.2f}"
        print(f"{self.label} {self.k}x{self.n} M={m}: {figures}; {others}", flush=True)
        return self.record(m, mine) | {
            "seconds_without_overlap": without,
            "seconds_reading_weights": reading,
            **beside,
            "weight_gbps": self.ours[0].nbytes / mine / 1e9,
            "kernel": launch.name,
            "shape": shape_of(launch),
            "relative_error": error,
            "peers": seconds,
        }

    def measure_bytes(self, m: int, ways: tuple[str, ...]) -> list[dict[str, Any]]:
        """A record for x in float16 and for each way of x in 8 bits."""
        k, n, gpu = self.k, self.n, device()
        x = torch.randn((m, k), device="cuda").half()
        y = torch.empty((m, n), dtype=torch.float16, device="cuda")
        calls = 40 if m <= 256 else 12
        contenders = {"cublas:f16": captured(calls, self.cublas(x, y))}
        errors, kernels, works = {}, {}, []  # graphs know addresses alone: what they write to has to stay
        as_it_was = x[:CHECKED].double() @ self.exact.double().T
        for way in ("exact", *ways):
            gemm = Gemm(self.kind, m, n, k, activations=way)
            work = torch.empty(self.ours[0].work_bytes(gemm), dtype=torch.uint8, device="cuda")
            works.append(work)

            def call(i: int, gemm: Gemm = gemm, work: Any = work) -> None:
                held = self.ours[i % len(self.ours)]
                held.multiply(stream(), gemm, x.data_ptr(), k, 0, y.data_ptr(), work.data_ptr())

            call(0)
            errors[way] = {"relative_error": relative(y[:CHECKED], as_it_was)}
            kernels[way] = launches(gemm, gpu)
            if kernels[way][-1].name == "marlin_gemm_bytes":
                rounded = quantize_rows(x[:CHECKED].cpu().numpy(), way).values()
                exact = torch.from_numpy(rounded).cuda() @ self.exact.double().T
                errors[way]["relative_error_of_rounded_x"] = relative(y[:CHECKED], exact)
            contenders[way] = captured(calls, call)
        seconds = graph_medians(contenders, calls)
        cublas, found = seconds.pop("cublas:f16"), []
        for way, mine in seconds.items():
            name, first = kernels[way][-1].name, int(len(kernels[way]) > 1)
            figures = f"{1e6 * mine:.1f} us, cuBLAS {cublas / mine:.2f}, x in float16 {seconds['exact'] / mine:.2f}"
            said = "; ".join(f"{what} {value:.1e}" for what, value in errors[way].items())
            print(f"{self.label} {k}x{n} M={m} {way}: {figures}; {name}; {said}", flush=True)
            about = {"kernel": name, "shapes": [shape_of(launch) for launch in kernels[way][first:]]}
            found.append(self.record(m, mine, way) | about | errors[way] | {"peers": {"cublas:f16": cublas}})
        return found


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


def prompts(rounds: int) -> dict[str, Any]:
    """Tokens per second of prompts, x in float16 and in fp8, by turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write_random_model(path, MODELS["8b"], blocks="mxfp4")
        model = bf.llm.load(path, device="cuda")
        rng, rates = np.random.default_rng(0), {"float16": [], "fp8": []}
        for _ in range(rounds + 1):
            for way, found in rates.items():
                tokens = rng.integers(0, model.config.vocabulary, PROMPT).tolist()
                answer = model.generate(tokens, max_tokens=1, activations=None if way == "float16" else way)
                for _ in answer:
                    pass
                found.append(answer.prompt_rate)
    medians = {way: statistics.median(found[1:]) for way, found in rates.items()}
    return {"shape": "8b", "format": "mxfp4", "tokens": PROMPT} | medians


def main() -> None:
    parser = command.parser(__spec__, __doc__, rounds=7)
    parser.add_argument("--bytes", action="store_true", help="x in 8 bits, then prompts (default: x in float16)")
    flags = parser.parse_args()
    found: list[dict[str, Any]] = []
    about = machine.gpu() | {"l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size}
    content = {"machine": about, "versions": machine.versions("torch", "numpy"), "records": found}
    if flags.bytes:
        for label, (kind, ways) in BYTE_KINDS.items():
            for k, n in BYTE_SHAPES:
                weights = Weights(label, kind, k, n)
                for m in BYTE_ROWS:
                    found += weights.measure_bytes(m, ways)
                records.write(flags.json, content)
        content["prompts"] = prompts(flags.rounds)
        print(content["prompts"], flush=True)
        records.write(flags.json, content)
        return
    standard = [Weights("u4b8:128", U4B8, k, n, humming=True) for k, n in SHAPES]
    others = [Weights(label, kind, *OTHERS_SHAPE) for label, kind in list(KINDS.items())[1:]]
    beside = standard[SHAPES.index(OTHERS_SHAPE)]
    for rows, rows_of_others in zip(ROWS, ROWS_OF_OTHERS, strict=True):
        for weights in standard:
            found += [weights.measure(m) for m in rows]
            records.write(flags.json, content)
        for weights in others:
            found += [weights.measure(m, beside) for m in rows_of_others]
            records.write(flags.json, content)


if __name__ == "__main__":
    main()
