"""Time quantized models on the GPU: billfish beside llama.cpp, and Llamas beside transformers in float16.

The models have random weights and the sizes of Llama-3-8B, Llama-3.2-1B, gpt-oss-20b and Qwen3-30B-A3B. --llama names
the folder with llama-bench and llama-batched-bench; docs/cuda.md says how they are built. --models keeps the GGUF files
for the next run. billfish and llama.cpp take turns, billfish first and last, and medians count. --peers names a record
of what peers reached on such a GPU, for machines that do not have them. Tokens per second:

    generate      128 tokens of one text, from an empty context
    prompt_N      a prompt of N tokens, until the logits after its last
    streams_B     128 tokens of each of B texts together, after prompts of 512 tokens
"""

from __future__ import annotations

import gc
import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.random_model import MIXTURES, SHAPES, MixtureShape, Shape, write_random_model
from benchmarks.timing import captured, timed
from billfish.core.typing import CacheType
from billfish.llm.cuda import CudaDecoder

GENERATED = 128  # tokens of each text, in every case that generates
PROMPTS = (512, 2048)
STREAMS = (16, 64)  # texts that go together, each after a prompt of 512
STREAM_PROMPT = 512
MODELS: dict[str, Shape | MixtureShape] = {**SHAPES, **MIXTURES}
OURS, LLAMA, TRANSFORMERS = "billfish", "llama.cpp", "transformers fp16"
CASES = ("generate", *(f"prompt_{n}" for n in PROMPTS), *(f"streams_{n}" for n in STREAMS))

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
        config = transformers.LlamaConfig(**shape.transformers(), dtype=dtype)
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self._cache = transformers.StaticCache(config=config, max_cache_len=2 * GENERATED)
        self._graph: Any = None

    @torch.no_grad()
    def step(self) -> None:
        """The best token after the text so far takes the place of `token`. The cache counts positions on the device."""
        logits = self.model(self.token, past_key_values=self._cache, use_cache=True).logits
        self.token.copy_(logits[:, -1:].argmax(-1))

    def measure(self) -> Rates:
        if self._graph is None:
            self._graph = captured(1, lambda _: self.step())
        self._cache.reset()
        torch.cuda.synchronize()

        def generate() -> None:
            for _ in range(GENERATED):
                self._graph.replay()
            torch.cuda.synchronize()

        return {"generate": [GENERATED / timed(generate)]}


class Ours:
    """A model that billfish loaded. No token of a random model ends a text: answers have the length that is asked."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rng = np.random.default_rng(0)

    def _random_prompt(self, tokens: int) -> list[int]:
        return self._rng.integers(0, self._model.config.vocabulary, tokens).tolist()

    def generate(self, tokens: int) -> float:
        """Of one text, after a prompt of one token, which the model is fed to choose the first."""
        answer = self._model.generate(self._random_prompt(1), max_tokens=tokens + 1)
        for _ in answer:
            pass
        assert len(answer.tokens) == tokens + 1
        return answer.generation_rate

    def prompt(self, tokens: int) -> float:
        answer = self._model.generate(self._random_prompt(tokens), max_tokens=1)
        for _ in answer:
            pass
        return answer.prompt_rate

    def streams(self, count: int, prompt: int, tokens: int) -> float:
        """All texts together: the time of `tokens` + 1 for each, less the time of one, which the prompts give."""
        prompts = [self._random_prompt(prompt) for _ in range(count)]
        first = timed(lambda: self._model.generate_batch(prompts, max_tokens=1))
        whole = timed(lambda: self._model.generate_batch(prompts, max_tokens=tokens + 1))
        return count * tokens / (whole - first)

    def measure(self) -> Rates:
        rates = [self.generate(GENERATED), *(self.prompt(n) for n in PROMPTS)]
        rates += [self.streams(n, STREAM_PROMPT, GENERATED) for n in STREAMS]
        return {case: [rate] for case, rate in zip(CASES, rates, strict=True)}


def records_of(shape: str, rates: dict[str, Rates]) -> list[dict[str, Any]]:
    """Medians of what was measured: one record for each case, with the peers that have it."""
    peers = {name: cases for name, cases in rates.items() if name != OURS}
    return [
        {
            "shape": shape,
            "case": case,
            "tok_per_s": median(rates[OURS][case]),
            "peers": {name: median(cases[case]) for name, cases in peers.items() if case in cases},
        }
        for case in CASES
    ]


def add_peers(found: list[dict[str, Any]], peers: dict[str, Any]) -> dict[str, str]:
    """Add the rates that peers reached in other runs to records that lack these peers: their versions, and the days."""
    versions: dict[str, str] = {}
    rates = {(r["shape"], r["case"], r["who"]): r for r in peers["records"]}
    for (shape, case, who), known in rates.items():
        for record in found:
            if (record["shape"], record["case"]) == (shape, case) and who not in record["peers"]:
                record["peers"][who] = known["tok_per_s"]
                name = who.partition(" ")[0]
                versions[f"{name}, {shape}"] = f"{peers['versions'][name]}, {known['date']}"
    return versions


def row(record: dict[str, Any]) -> str:
    """A line of the table: tokens per second, and how many times each peer's they are."""
    ours = record["tok_per_s"]
    peers = "".join(f"   {name} {rate:10,.0f} ({ours / rate:.2f} times)" for name, rate in record["peers"].items())
    return f"{record['shape']:13} {record['case']:12} {OURS} {ours:10,.0f}{peers}"


def measure(
    shape: Shape | MixtureShape, path: Path, llama: Path | None, rounds: int, cache_type: CacheType = "float16"
) -> tuple[dict[str, Rates], dict[str, str]]:
    """Of billfish and its peers, the rates by name, and the peers' versions."""
    rates: dict[str, Rates] = {}
    versions: dict[str, str] = {}

    def add(name: str, measured: Rates) -> None:
        for case, values in measured.items():
            rates.setdefault(name, {}).setdefault(case, []).extend(values)

    ours = Ours(bf.llm.load(path, device="cuda", cache_type=cache_type))
    ours.measure()  # compiles kernels and captures graphs
    for _ in range(rounds):
        add(OURS, ours.measure())
        if llama is not None:
            peer = LlamaCpp(llama, path)
            add(LLAMA, peer.measure())
            versions[LLAMA] = peer.version
    add(OURS, ours.measure())
    del ours
    gc.collect()
    if not isinstance(shape, Shape):
        return rates, versions
    try:
        dense = Transformers(shape)
        for _ in range(rounds + 1):
            add(TRANSFORMERS, dense.measure())
        versions["transformers"] = dense.version
    except (ImportError, RuntimeError) as error:  # not installed, or too little memory
        print(f"transformers: {error}; left out")
    return rates, versions


def model_file(name: str, folder: Path, *, end: bool = False) -> Path:
    """The GGUF file of a shape, written if it is not there. end: as in write_random_model."""
    path = folder / f"random_{name}{'_end' if end else ''}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        took = timed(lambda: write_random_model(path, MODELS[name], end=end))
        print(f"{path.name}: {path.stat().st_size / 1e9:.2f} GB, written in {took:.1f} s")
    return path


def main() -> None:
    parser = command.parser(__spec__, __doc__, rounds=3)
    parser.add_argument("--shapes", nargs="+", choices=list(MODELS), default=list(MODELS), help="models (default: all)")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="record of peers' rates, for those that do not run")
    types = CudaDecoder.cache_types
    parser.add_argument("--cache-type", choices=types, default=types[0], help="of our KV cache (default: float16)")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="folder that keeps the GGUF files (35 GB)")
    flags = parser.parse_args()
    llama = flags.llama
    if llama is None or not (llama / "llama-bench").exists():
        print(f"llama.cpp: no llama-bench in {llama or '--llama FOLDER'}; left out")
        llama = None
    recorded = {"records": []} if flags.peers is None else json.loads(flags.peers.read_text())
    versions, found = machine.versions("torch", "numpy"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as passing:
        for name in flags.shapes:
            path = model_file(name, flags.models or Path(passing))
            rates, peers = measure(MODELS[name], path, llama, flags.rounds, flags.cache_type)
            versions |= peers
            found += records_of(name, rates)
            versions |= add_peers(found, recorded)
            print(*(row(record) for record in found if record["shape"] == name), sep="\n")
            about = {"machine": machine.gpu(), "versions": versions, "cache_type": flags.cache_type}
            records.write(flags.json, about | {"records": found})


if __name__ == "__main__":
    main()
