"""How much memory `billfish quantize` and `convert` take for a checkpoint of 4 GB: bounded by the largest tensor.

The checkpoint and what is made of it go to FOLDER (about 8 GB, removed afterwards). Each command runs in a process of
its own; the figure is the most memory that the process held, shared pages of the mapped file included.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks import command, machine, records
from billfish.checkpoints.write.target import json_bytes, safetensors_header

HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS = 2048, 8192, 64000, 28


def write_checkpoint(folder: Path) -> int:
    """Random bfloat16 weights in the shapes of a Llama, written tensor by tensor; returns the size."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    layer = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    layer |= {f"mlp.{name}_proj": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")}
    layer |= {"mlp.down_proj": (HIDDEN, FEED_FORWARD)}
    shapes |= {f"model.layers.{i}.{name}.weight": size for i in range(LAYERS) for name, size in layer.items()}
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
    parser = command.parser(__spec__, __doc__)
    parser.add_argument("folder", type=Path, help="folder with 8 GB of room")
    flags = parser.parse_args()
    work = flags.folder / "checkpoint-memory"
    shutil.rmtree(work, ignore_errors=True)
    size = write_checkpoint(work / "in")
    source, u4b8, mlx = str(work / "in"), str(work / "u4b8"), str(work / "mlx")
    commands = {
        "quantize --format fp4 --method rtn --keep lm_head=q8_0": [source, str(work / "fp4")],
        "quantize --format u4b8 --to compressed-tensors --method rtn": [source, u4b8],
        "convert --to mlx": [u4b8, mlx],
        "verify": [u4b8, mlx],
    }
    found = []
    print(f"checkpoint: {size / 1e9:.2f} GB; largest tensor: {2 * VOCABULARY * HIDDEN / 1e9:.2f} GB")
    for words, files in commands.items():
        name, *options = words.split()
        peak = peak_bytes([sys.executable, "-m", "billfish", name, *files, *options])
        found.append({"command": words, "peak_bytes": peak})
        print(f"{words}: {peak / 1e9:.2f} GB", flush=True)
    shutil.rmtree(work)
    about = {"machine": platform.machine()} | machine.versions("numpy")
    records.write(flags.json, {"about": about, "checkpoint_bytes": size, "records": found})


if __name__ == "__main__":
    main()
