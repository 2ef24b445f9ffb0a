"""Seconds and memory of `billfish calibrate --hessian` for a model of random float16 weights in a known shape.

The command runs in a process of its own. The model and the statistics go to FOLDER (16 and 33 GB for 8b, removed
afterwards). Host memory is the most that the process held, shared pages of mapped files included.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import command, machine, records
from benchmarks.checkpoint_memory import peak_bytes
from benchmarks.random_model import SHAPES, write_random_model

WORDS = "the of and a to in is you that it he was for on are as with his they at be this have from or one had by word "


def write_text(path: Path, tokens: int) -> None:
    """Random words: the models have a token for each byte."""
    words = np.random.default_rng(0).choice(WORDS.split(), tokens)
    path.write_text(" ".join(words)[: tokens + tokens // 64])


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.add_argument("folder", type=Path, help="folder with room")
    parser.add_argument("--shape", choices=[*SHAPES], default="8b", help="sizes of the model (default: 8b)")
    parser.option("--layers", "layers of the model, if not its own", 0, int, "N")
    parser.option("--tokens", "tokens of the text", 32768, command.positive, "N")
    parser.option("--device", "device of `billfish calibrate`", "auto", str, "DEVICE")
    flags = parser.parse_args()
    shape = SHAPES[flags.shape]
    shape = replace(shape, layers=flags.layers or shape.layers)
    model, text, out = (
        flags.folder / name for name in ("calibration.gguf", "calibration.txt", "calibration.safetensors")
    )
    try:
        write_random_model(model, shape, blocks="f16")
        write_text(text, flags.tokens)
        options = ["--text", text, "--tokens", flags.tokens, "--device", flags.device]
        words = ["billfish", "calibrate", model, "-o", out, "--hessian", "--force", *options]
        started = time.perf_counter()
        peak = peak_bytes([sys.executable, "-m", *map(str, words)])
        found = {
            "shape": flags.shape,
            "layers": shape.layers,
            "tokens": flags.tokens,
            "device": flags.device,
            "seconds": time.perf_counter() - started,
            "peak_host_bytes": peak,
            "statistics_bytes": out.stat().st_size,
        }
    finally:
        for path in (model, text, out):
            path.unlink(missing_ok=True)
    print(f"{found['seconds']:.1f} s, {peak / 1e9:.2f} GB of host memory, {found['statistics_bytes'] / 1e9:.2f} GB")
    records.write(flags.json, {"about": machine.machine() | machine.today(), "records": [found]})


if __name__ == "__main__":
    main()
