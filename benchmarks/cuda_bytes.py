"""The tables of docs/cuda.md about x in 8 bits: fp8 and q8 beside x in float16 and cuBLAS, with errors beside times.

    python -m benchmarks.cuda_bytes RESULT.json [products] [prompts]

As cuda_table.py. Times with x in 8 bits have the kernel that rounds x in them. prompts: of a model of Llama-3-8B's
sizes with random mxfp4 weights, x in float16 and in fp8, by turns. Without either word, both.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import billfish as bf
from benchmarks import cuda_table
from benchmarks.cuda_table import Weights, captured, stream, take_turns
from benchmarks.random_model import SHAPES, write_random_model
from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.driver import device
from billfish.backends.cuda.plans import Gemm, launches
from billfish.core.activations import quantize_rows
from billfish.core.files import write_atomically

cuda_table.KINDS |= {
    "mxfp4": Kind("E2M1", "ScaleE5M2", "NONE", 4, narrow=True),
    "fp4:128": Kind("E2M1", "ScaleF16", "NONE", 1),
}
MATRICES = [(4096, 14336), (14336, 4096), (8192, 8192), (4096, 4096)]
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
WAYS = {"mxfp4": ("fp8",), "u4b8:128": ("fp8", "q8"), "fp4:128": ("fp8",)}
CHECKED = 256  # rows whose errors are worked out
PROMPT, TURNS = 2048, 7


def relative(y: Any, exact: Any) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def measure(weights: Weights, m: int, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """A record for x in float16 and for each way of x in 8 bits."""
    k, n, gpu = weights.k, weights.n, device()
    x = torch.randn((m, k), device="cuda").half()
    y = torch.empty((m, n), dtype=torch.float16, device="cuda")
    calls = 40 if m <= 256 else 12
    contenders = {"cublas:f16": captured(calls, lambda i: torch.mm(x, weights.dense[i % len(weights.dense)].T, out=y))}
    errors, kernels, works = {}, {}, []  # graphs know addresses alone: what they write to has to stay
    as_it_was = x[:CHECKED].double() @ weights.exact.double().T
    for way in ("exact", *ways):
        gemm = Gemm(weights.kind, m, n, k, activations=way)
        work = torch.empty(weights.ours[0].work_bytes(gemm), dtype=torch.uint8, device="cuda")
        works.append(work)

        def call(i: int, gemm: Gemm = gemm, work: Any = work) -> None:
            held = weights.ours[i % len(weights.ours)]
            held.multiply(stream(), gemm, x.data_ptr(), k, 0, y.data_ptr(), work.data_ptr())

        call(0)
        errors[way] = {"relative_error": relative(y[:CHECKED], as_it_was)}
        kernels[way] = launches(gemm, gpu)
        if kernels[way][-1].name == "marlin_gemm_bytes":
            rounded = quantize_rows(x[:CHECKED].cpu().numpy(), way).values()
            exact = torch.from_numpy(rounded).cuda() @ weights.exact.double().T
            errors[way]["relative_error_of_rounded_x"] = relative(y[:CHECKED], exact)
        contenders[way] = captured(calls, call)
    seconds = take_turns(contenders, calls)
    cublas = seconds.pop("cublas:f16")
    records = []
    for way, mine in seconds.items():
        name, in_bytes = kernels[way][-1].name, len(kernels[way]) > 1
        shapes = [
            {name.lower(): int(v) for name, v in kernel.macros if name in cuda_table.SHAPE_MACROS}
            for kernel in kernels[way][in_bytes:]
        ]
        figures = f"{1e6 * mine:.1f} us, cuBLAS {cublas / mine:.2f}, x in float16 {seconds['exact'] / mine:.2f}"
        said = "; ".join(f"{name} {value:.1e}" for name, value in errors[way].items())
        print(f"{weights.label} {k}x{n} M={m} {way}: {figures}; {name}; {said}", flush=True)
        records.append(
            {
                "backend": "cuda",
                "format": weights.label,
                "activations": way,
                "m": m,
                "k": k,
                "n": n,
                "seconds": mine,
                "gops": 2 * m * n * k / mine / 1e9,
                "kernel": name,
                "shapes": shapes,
                **errors[way],
                "peers": {"cublas:f16": cublas},
            }
        )
    return records


def prompts() -> dict[str, Any]:
    """Tokens per second of prompts, x in float16 and in fp8."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write_random_model(path, SHAPES["8b"], blocks="mxfp4")
        model = bf.llm.load(path, device="cuda")
        rng, rates = np.random.default_rng(0), {"float16": [], "fp8": []}
        for turn in range(TURNS + 1):
            for way, found in rates.items():
                tokens = rng.integers(0, model.config.vocabulary, PROMPT).tolist()
                answer = model.generate(tokens, max_tokens=1, activations=None if way == "float16" else way)
                for _ in answer:
                    pass
                if turn:
                    found.append(answer.prompt_rate)
    return {"shape": "8b", "format": "mxfp4", "tokens": PROMPT} | {w: statistics.median(v) for w, v in rates.items()}


def main() -> None:
    content: dict[str, Any] = {
        "machine": {"gpu": device().name, "arch": device().arch, "date": time.strftime("%Y-%m-%d")},
        "versions": {"billfish": bf.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "records": [],
    }

    def save() -> None:
        write_atomically(Path(sys.argv[1]), (json.dumps(content, indent=1) + "\n").encode())

    wanted = sys.argv[2:] or ["products", "prompts"]
    for label, ways in WAYS.items() if "products" in wanted else ():
        for k, n in MATRICES:
            weights = Weights(label, k, n, False)
            for m in ROWS:
                content["records"] += measure(weights, m, ways)
            save()
    if "prompts" in wanted:
        content["prompts"] = prompts()
        print(content["prompts"], flush=True)
        save()


if __name__ == "__main__":
    main()
