"""Profile the kernels of one token on a GPU: when each starts and ends, in a decode step of a q4_0 model.

The model has random weights and the sizes of Llama-3-8B. torch's profiler (CUPTI) watches a whole answer, and times are
medians over its tokens. A decode step is a CUDA graph with programmatic dependent launch, so kernels overlap: a kernel
starts, fetches weights, and waits for the one before it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import command, machine, records

TOKENS, SKIPPED = 40, 20  # of the answer, and of those the first ones
FIRST = "marlin_embed"
LAYER = ("QKV", "RoPE, KV cache", "attention", "attention output", "gate and up, SwiGLU", "down")
LAST = ("RMSNorm", "LM head", "sampling")


def parts(layers: int) -> list[str]:
    """The launches of a decode step, in their order (backends/cuda/decoder.py)."""
    return ["embedding", "RMSNorm", *LAYER * layers, *LAST]


def token(events: list[dict[str, Any]], layers: int) -> list[dict[str, Any]]:
    """The launches of a token: microseconds from its start, medians over the tokens of the events of a trace."""
    events = sorted(events, key=lambda event: event["ts"])
    starts = [i for i, event in enumerate(events) if event["name"] == FIRST]
    steps = [events[a:b] for a, b in zip(starts[SKIPPED:], starts[SKIPPED + 1 :], strict=False)]
    names = parts(layers)
    assert {len(step) for step in steps} == {len(names)}, "a step has other launches than a Llama's"
    found = []
    for i, part in enumerate(names):
        begin = median(step[i]["ts"] - step[0]["ts"] for step in steps)
        end = median(step[i]["ts"] + step[i]["dur"] - step[0]["ts"] for step in steps)
        kernel = steps[0][i]["name"]
        found.append({"part": part, "kernel": kernel, "start_us": round(begin, 2), "end_us": round(end, 2)})
    return found


def main() -> None:
    flags = command.parser(__spec__, __doc__).parse_args()
    from torch.profiler import ProfilerActivity, profile

    import billfish as bf
    from benchmarks.random_model import SHAPES, write_random_model

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        write_random_model(path, SHAPES["8b"])
        model = bf.llm.load(path, device="cuda")

        def rate(tokens: int) -> float:
            answer = model.generate([5], max_tokens=tokens)
            for _ in answer:
                pass
            return float(answer.generation_rate)

        rate(TOKENS)  # compiles
        undisturbed = rate(129)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            profiled = rate(TOKENS)
        trace = Path(place) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    launches = token(events, model.config.layers)
    for launch in launches[: 2 + len(LAYER)]:
        print(f"{launch['part']:24}{launch['kernel']:22}{launch['start_us']:9.2f}{launch['end_us']:9.2f}")
    about = {
        "machine": machine.gpu(),
        "versions": machine.versions("torch", "numpy"),
        "model": "Llama-3-8B, random q4_0",
    }
    rates = {"tokens_per_second": undisturbed, "tokens_per_second_profiled": profiled}
    records.write(flags.json, about | rates | {"records": launches})


if __name__ == "__main__":
    main()
