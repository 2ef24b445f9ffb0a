"""GGUF files of a small model, quantized in every way that llama.cpp must read. Its perplexities are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_architectures import write_model

import billfish as bf
from billfish.quantizing.quantize_checkpoint import quantize_to_bits

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 8
TOKENS, WINDOW = 144, 48
BITS = "--bits 5"
# Format and method: llama.cpp must read each of them.
FILES = (
    ("q4_0", "tune"),
    ("iq4_nl", "gptq"),
    ("nvfp4", "gptq"),
    ("mxfp4", "gptq"),
    (BITS, "gptq"),
    ("q4_0", "gptq"),
    ("iq4_nl", "tune"),
    ("nvfp4", "tune"),
)


def write_file(folder: Path, format: str, method: str) -> Path:
    """One of FILES, calibrated and tuned with TEXT."""
    text, source, out = folder / "text.txt", folder / "model", folder / "quantized.gguf"
    wide = {"hidden_size": 64, "intermediate_size": 128} if format == "nvfp4" else {}  # its blocks are of 64
    write_model(source, "llama3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **wide)
    text.write_text(TEXT)
    settings: Any = {"method": "gptq", "calibrate": str(text), "progress": False}
    if format == BITS:
        further: Any = {"statistics": None, "group_size": None}
        quantize_to_bits(
            str(source), str(out), float(BITS.split()[1]), "mxfp4,iq4_nl,q8_0", None, {}, **settings, **further
        )
    else:
        bf.quantize_checkpoint(source, out, format, to="gguf", **settings)
    if method == "gptq":
        return out
    tuned = folder / "tuned.gguf"
    settings = {"against": source, "text": text, "tokens": 192, "window": WINDOW, "rate": 0.01}
    bf.tune_checkpoint(out, tuned, **settings, device="cpu", progress=False)
    return tuned
