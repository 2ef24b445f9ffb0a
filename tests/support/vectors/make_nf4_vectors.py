"""Records what bitsandbytes does with NF4, in vectors/nf4.safetensors: its arrays, and the weights they mean.

    pip install --no-deps bitsandbytes
    python tests/support/vectors/make_nf4_vectors.py

Three matrices: `plain` with float32 absmax, `double` with double quantization, and `wide` with blocks of 128. A name
such as `double.weight.absmax` is that of a checkpoint; `plain.original` is what was quantized, `plain.expected` what
bitsandbytes makes of it again, both in float32.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import bitsandbytes.functional as functional
import torch
from safetensors.torch import save_file

SHAPES = {"plain": (24, 256), "double": (20, 1024), "wide": (8, 512)}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    arrays: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        w = torch.randn(shape, generator=generator) / 16
        packed, state = functional.quantize_4bit(
            w, blocksize=128 if name == "wide" else 64, compress_statistics=name == "double", quant_type="nf4"
        )
        if name != "double":
            arrays[f"{name}.original"] = w
        arrays[f"{name}.weight"] = packed
        for part, array in state.as_dict(packed=True).items():
            arrays[f"{name}.weight.{part}"] = array.contiguous()
        arrays[f"{name}.expected"] = functional.dequantize_4bit(packed, state)
    target = Path(__file__).with_name("nf4.safetensors")
    save_file(arrays, target, {"bitsandbytes": bitsandbytes.__version__})


if __name__ == "__main__":
    main()
