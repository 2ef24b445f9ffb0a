"""The peers of `llm_cuda.py`: llama.cpp's own benchmarks, and transformers in float16 under a CUDA graph."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.random_model import Shape

GENERATED = 128  # tokens of each text, in every case that generates
PROMPTS = (512, 2048)
STREAMS = (16, 64)  # texts that go together, each after a prompt of 512
STREAM_PROMPT = 512

Rates = dict[str, list[float]]  # tokens per second, by case


def llama_bench_rates(output: str) -> tuple[Rates, str]:
    """The samples in the JSON of llama-bench, and the version that it names; raises if no GPU was used."""
    entries = json.loads(output)
    rates: Rates = {}
    for entry in entries:
        if "CUDA" not in entry["backends"]:
            raise SystemExit(f"llama-bench: it ran on {entry['backends']}. Build it with GGML_CUDA=ON.")
        case = "generate" if entry["n_gen"] else f"prompt_{entry['n_prompt']}"
        rates[case] = [float(rate) for rate in entry["samples_ts"]]
    return rates, entries[0]["build_commit"]


def batched_bench_rates(output: str) -> Rates:
    """Tokens per second of all texts together, from the lines of llama-batched-bench."""
    lines = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    return {f"streams_{line['pl']}": [float(line["speed_tg"])] for line in lines}


class LlamaCpp:
    """llama-bench and llama-batched-bench in a folder, flash attention on, every layer on the GPU."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self.version = ""

    def measure(self) -> Rates:
        output = self._run("llama-bench", "-p", _joined(PROMPTS), "-n", str(GENERATED), "-o", "json")
        rates, self.version = llama_bench_rates(output)
        context = max(STREAMS) * (STREAM_PROMPT + GENERATED)
        sizes = ["-c", str(context), "-npp", str(STREAM_PROMPT), "-ntg", str(GENERATED), "-npl", _joined(STREAMS)]
        return rates | batched_bench_rates(self._run("llama-batched-bench", *sizes, "--output-format", "jsonl"))

    def _run(self, tool: str, *arguments: str) -> str:
        command = [self._folder / tool, "-m", self._model, "-ngl", "99", "-fa", "on", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{tool} failed with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


class Transformers:
    """A Llama of this shape with random float16 weights; one graph launch for each token of one text."""

    def __init__(self, shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.float16) -> None:
        import transformers

        self.version = transformers.__version__
        config = transformers.LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.context,
            rms_norm_eps=shape.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
            tie_word_embeddings=shape.tied,
            dtype=dtype,
        )
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self._cache = transformers.StaticCache(config=config, max_cache_len=2 * GENERATED)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self) -> None:
        """The best token after the text so far takes the place of `token`. The cache counts positions on the device."""
        logits = self.model(self.token, past_key_values=self._cache, use_cache=True).logits
        self.token.copy_(logits[:, -1:].argmax(-1))

    def measure(self) -> Rates:
        graph = self._graph = self._graph or self._captured()
        self._cache.reset()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(GENERATED):
            graph.replay()
        torch.cuda.synchronize()
        return {"generate": [GENERATED / (time.perf_counter() - started)]}

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels are chosen and memory is taken before the capture
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph
