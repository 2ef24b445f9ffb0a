"""Time what a call costs besides the product, and how fast weights are packed, on this machine's CPU or GPU.

On the CPU: calls with weights so small that nothing else takes time, in microseconds, and of 16 rows of W by 4096 k
with several rows of x. Packing of 4096 x 4096, in milliseconds. The least of several runs counts.

On a GPU: microseconds of the host for one row of x by 4096 x 4096 weights. Then milliseconds of a token of a model with
the shape of Llama-3-8B, four of its layers and its head, and random weights: one forward pass of one token without a
cache, in eager mode and in a CUDA graph. All take turns, and the median counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.random_model import SHAPES
from benchmarks.timing import best, captured, medians
from billfish.backends.cpu.backend import set_threads

FORMATS = ("q4_0", "q8_0", "q4_k", "iq4_nl", "u4b8", "u4", "fp4", "u8b128", "affine4", "mxfp4", "nvfp4")
FORMATS += ("mxfp4_gguf", "nvfp4_gguf")
ATTEMPTS = 7
CUDA_FORMAT: dict[str, Any] = {"format": "u4b8", "group_size": 128, "method": "rtn"}
CUDA_CALLS, CUDA_TURNS, CUDA_TOKENS = 200, 50, 20  # calls in a turn; the queue of a GPU holds about 1,000
MODEL = replace(SHAPES["8b"], layers=4)


# ---- CPU --------------------------------------------------------------------------------------------------------


def cpu_calls() -> dict[str, float]:
    """Microseconds."""
    found: dict[str, float] = {}

    def add(name: str, run: Callable[[], object], calls: int = 3000) -> None:
        found[name] = 1e6 * best(run, ATTEMPTS, calls)

    linear = torch.nn.Linear(64, 32, bias=False)
    layer = bf.MarlinLinear.from_linear(linear, "q4_0", activations="q8")
    q, x, y = layer.quantized(), np.ones((1, 64), np.float32), np.empty((1, 32), np.float32)
    tensor = torch.from_numpy(x)
    add("quantized_linear, NumPy", lambda: bf.quantized_linear(x, q, activations="q8"))
    add("quantized_linear, NumPy, out=", lambda: bf.quantized_linear(x, q, activations="q8", out=y))
    add("quantized_linear, torch", lambda: bf.quantized_linear(tensor, q, activations="q8"))
    with torch.no_grad():
        add("MarlinLinear", lambda: layer(tensor))
        # The gradient of x is wanted, so the call goes through torch's operator.
        wanted = tensor.clone().requires_grad_()
        with torch.enable_grad():
            add("MarlinLinear, with a gradient", lambda: layer(wanted), 1000)
        add("torch.nn.Linear, float32", lambda: linear(tensor))
    # Query, key and value of a small model, one by one and in one call.
    heads = [bf.prepack(bf.quantize(np.ones((n, 576), np.float32), "q4_0")) for n in (576, 192, 192)]
    token = np.ones((1, 576), np.float32)
    add("three products of 576 k", lambda: [bf.quantized_linear(token, w, activations="q8") for w in heads], 1000)
    add("quantized_linears, the same three", lambda: bf.quantized_linears(token, heads, activations="q8"), 1000)
    narrow = bf.prepack(bf.quantize(np.ones((16, 4096), np.float32), "q4_0"))
    for m in (1, 4, 64):
        rows = np.random.default_rng(0).standard_normal((m, 4096), dtype=np.float32)
        add(f"16 rows of W, {m} of x", lambda rows=rows: bf.quantized_linear(rows, narrow, activations="q8"), 500)
    return found


def packing() -> dict[str, float]:
    """Milliseconds."""
    w = np.tile(np.random.default_rng(0).standard_normal((256, 4096), dtype=np.float32), (16, 1))
    weights = {name: bf.quantize(w, name, method="rtn") for name in FORMATS}
    return {name: 1e3 * best(lambda q=q: bf.prepack(q), ATTEMPTS) for name, q in weights.items()}


# ---- CUDA -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def cuda_calls() -> dict[str, float]:
    """Microseconds of the host for a call, and the ratio of the two layers."""
    linear = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.float16)
    layer = bf.MarlinLinear.from_linear(linear, **CUDA_FORMAT)
    q = bf.quantize(linear.weight.detach().cpu(), **CUDA_FORMAT)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.float16)
    runs: dict[str, Callable[[], object]] = {
        "torch.nn.Linear, float16": lambda: linear(x),
        "MarlinLinear": lambda: layer(x),
        "quantized_linear": lambda: bf.quantized_linear(x, q),
    }
    seconds = medians(runs, CUDA_TURNS, CUDA_CALLS, torch.cuda.synchronize, waits=False)
    found = {name: 1e6 * value for name, value in seconds.items()}
    return found | {"MarlinLinear / torch.nn.Linear": found["MarlinLinear"] / found["torch.nn.Linear, float16"]}


def model_with(quantized: bool) -> Any:
    """The model in float16, or quantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**MODEL.transformers())).half().eval()
    if quantized:
        bf.quantize_model(model, **CUDA_FORMAT, progress=False)
    return model


@torch.no_grad()
def cuda_tokens() -> dict[str, dict[str, float]]:
    """Milliseconds of a token until the GPU is done, for the model in float16 and quantized."""
    models = {"float16": False, "quantized": True}
    token, runs = torch.tensor([[1]], device="cuda"), {}
    for name, quantized in models.items():
        model = model_with(quantized)
        runs[name, "eager"] = lambda model=model: model(token, use_cache=False).logits
        runs[name, "graph"] = captured(1, lambda _, model=model: model(token, use_cache=False).logits).replay
    seconds = medians(runs, CUDA_TURNS, CUDA_TOKENS, torch.cuda.synchronize)
    found = {name: {way: 1e3 * seconds[name, way] for way in ("eager", "graph")} for name in models}
    for name in list(models)[1:]:
        found[f"float16 / {name}"] = {way: found["float16"][way] / found[name][way] for way in found[name]}
    return found


def cuda_report() -> dict[str, Any]:
    """All of it. Without transformers, the part that needs none."""
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "microseconds": cuda_calls()}
    try:
        import transformers
    except ImportError as error:
        print(f"No figures of a model: transformers is not installed ({error}). Run: pip install transformers")
        return found
    return found | {"transformers": transformers.__version__, "token_milliseconds": cuda_tokens()}


def show(part: Mapping[str, object], under: str = "") -> None:
    """Each figure on a line of its own."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            show(value, f"{under}{name}: ")
        else:
            print(f"{under + name:60} {value:8.3g}" if isinstance(value, float) else f"{under}{name}: {value}")


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: cpu)")
    flags = parser.parse_args()
    set_threads(flags.threads)
    cuda = flags.device == "cuda"
    report = cuda_report() if cuda else {"microseconds": cpu_calls(), "packing_milliseconds": packing()}
    show(report)
    records.write(flags.json, {"machine": machine.machine()} | report)


if __name__ == "__main__":
    main()
