"""What a call of a layer costs on a GPU, and what that makes of a model: the parts of calls.py for CUDA.

The model has the shape of Llama-3-8B, with four of its layers and its head, and random weights. A token is one forward
pass of one token without a cache, in eager mode and in a CUDA graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import billfish as bf

FORMAT: dict[str, Any] = {"format": "u4b8", "group_size": 128, "method": "rtn"}
CALLS, TURNS = 200, 50  # calls in a turn; the queue of a GPU holds about 1,000
TOKENS = 20
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def host_microseconds(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of a call, without waiting for the GPU: contenders take turns, the median turn counts."""
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        for _ in range(CALLS):
            call()
    for _ in range(TURNS):
        for name, call in contenders.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            turns[name].append((time.perf_counter() - started) / CALLS)
    torch.cuda.synchronize()
    return {name: 1e6 * statistics.median(times) for name, times in turns.items()}


@torch.no_grad()
def calls() -> dict[str, float]:
    """Microseconds of the host for a call, one row of x by 4096 x 4096 weights, and the ratio of the two layers."""
    linear = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.float16)
    layer = bf.MarlinLinear.from_linear(linear, **FORMAT)
    q = bf.quantize(linear.weight.detach().cpu(), **FORMAT)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.float16)
    found = host_microseconds(
        {
            "torch.nn.Linear, float16": lambda: linear(x),
            "MarlinLinear": lambda: layer(x),
            "quantized_linear": lambda: bf.quantized_linear(x, q),
        }
    )
    return found | {"MarlinLinear / torch.nn.Linear": found["MarlinLinear"] / found["torch.nn.Linear, float16"]}


def model_with(quantized: bool) -> Any:
    """The model, in float16 or quantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).half().eval()
    if quantized:
        bf.quantize_model(model, **FORMAT, predicate=lambda path, layer: True, progress=False)
    return model


@torch.no_grad()
def token_steps(model: Any) -> dict[str, Callable[[], object]]:
    """A token, by eager mode and in a CUDA graph."""
    token = torch.tensor([[1]], device="cuda")

    def step() -> Any:
        return model(token, use_cache=False).logits

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return {"eager": step, "graph": graph.replay}


@torch.no_grad()
def tokens() -> dict[str, dict[str, float]]:
    """Milliseconds of a token until the GPU is done, for the model in float16, quantized, and quantized with joint
    products. All take turns, and the median turn counts."""
    models = {"float16": False, "quantized": True}
    steps = {name: token_steps(model_with(quantized)) for name, quantized in models.items()}
    turns: dict[str, dict[str, list[float]]] = {name: {"eager": [], "graph": []} for name in steps}
    for _ in range(TURNS):
        for name, ways in steps.items():
            for way, run in ways.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(TOKENS):
                    run()
                torch.cuda.synchronize()
                turns[name][way].append((time.perf_counter() - started) / TOKENS)
    found = {
        name: {way: 1e3 * statistics.median(times[TURNS // 5 :]) for way, times in ways.items()}
        for name, ways in turns.items()
    }
    for name in list(found)[1:]:
        found[f"float16 / {name}"] = {way: found["float16"][way] / found[name][way] for way in found[name]}
    return found


def report() -> dict[str, Any]:
    """All of it. Without transformers, the part that needs none."""
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "microseconds": calls()}
    try:
        import transformers
    except ImportError as error:
        print(f"no figures of a model: {error}; pip install transformers")
        return found
    return found | {"transformers": transformers.__version__, "token_milliseconds": tokens()}
