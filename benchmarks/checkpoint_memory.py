"""How much memory `billfish quantize` and `convert` take for a checkpoint of 4 GB: bounded by the largest tensor.

    python -m benchmarks.checkpoint_memory FOLDER [--json FILE]

writes the checkpoint and what is made of it to FOLDER (about 8 GB, removed afterwards), runs each command in a process
of its own and prints the largest amount of memory that the process held, shared pages of the mapped file included.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import billfish as bf
from billfish.checkpoints.write.target import json_bytes, safetensors_header

HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS = 2048, 8192, 64000, 28


def write_checkpoint(folder: Path) -> int:
    """Random bfloat16 weights in the shapes of a Llama, written tensor by tensor; returns the size."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HIDDEN, HIDDEN),
            "self_attn.v_proj": (HIDDEN, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
            "mlp.up_proj": (FEED_FORWARD, HIDDEN),
            "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(json_bytes({"model_type": "llama", "torch_dtype": "bfloat16"}))
    # A small block over and over: a child's peak counts from what its parent held when it was started.
    block = np.random.default_rng(0).standard_normal(HIDDEN * 1024, np.float32).astype(bfloat16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(safetensors_header({name: (bfloat16, shape) for name, shape in shapes.items()}, {}))
        for n, k in shapes.values():
            for start in range(0, n * k, block.size):
                file.write(block[: n * k - start].view(np.uint8).data)
        return file.tell()


def peak_bytes(command: list[str]) -> int:
    """The largest resident size of a command, as the kernel counts it.

    To the kernel, a process is as large as the one that started it was, so a small one starts the command.
    """
    done = subprocess.run([sys.executable, "-c", STARTER, *command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}")
    return int(done.stdout) * 1024


STARTER = """
import os, sys
silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=silent), 0)
print(usage.ru_maxrss)
sys.exit(status != 0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", metavar="FILE", help="also write the records there")
    arguments = parser.parse_args()
    work = arguments.folder / "checkpoint-memory"
    shutil.rmtree(work, ignore_errors=True)
    size = write_checkpoint(work / "in")
    billfish, source = [sys.executable, "-m", "billfish"], str(work / "in")
    commands = {
        "quantize --format fp4 --method rtn --keep lm_head=q8_0": ["quantize", source, str(work / "fp4")],
        "quantize --format u4b8 --to compressed-tensors --method rtn": ["quantize", source, str(work / "u4b8")],
        "convert --to mlx": ["convert", str(work / "u4b8"), str(work / "mlx")],
        "verify": ["verify", str(work / "u4b8"), str(work / "mlx")],
    }
    records = []
    print(f"checkpoint: {size / 1e9:.2f} GB; largest tensor: {2 * VOCABULARY * HIDDEN / 1e9:.2f} GB")
    for name, start in commands.items():
        peak = peak_bytes([*billfish, *start, *name.split()[1:]])
        records.append({"command": name, "peak_bytes": peak})
        print(f"{name}: {peak / 1e9:.2f} GB", flush=True)
    shutil.rmtree(work)
    if arguments.json:
        about = {"machine": platform.machine(), "numpy": np.__version__, "billfish": bf.__version__}
        Path(arguments.json).write_bytes(json_bytes({"about": about, "checkpoint_bytes": size, "records": records}))


if __name__ == "__main__":
    main()
