"""A whole model through the Metal engine: mlx-lm's SmolLM2 with our layers, whose kernels run in the emulator."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_models import smollm2

import billfish as bf
from billfish.backends import BACKENDS, emulator
from billfish.backends.metal import Kernels
from billfish.nn.mlx.linear import MarlinLinear

PROMPT = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]


@pytest.fixture
def on_a_mac(monkeypatch):
    """MLX says that it has Metal, and the kernels that it is given run here."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setitem(BACKENDS["metal"].__dict__, "kernels", Kernels(emulator.metal_kernel))


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    return np.array(model(mx.array([tokens])).astype(mx.float32)[0])


@pytest.mark.full  # nn/test_layers.py has layers of MLX, test_backend.py their products on Metal
def test_smollm2_gives_the_logits_of_the_cpu_engine(on_a_mac):
    """All layers, four rows at a time as in matvec, in float32: the same sums in another order."""
    model, _, words = smollm2()
    tokens = [words.index(word) for word in PROMPT[:4]]
    with emulator.launches() as log:
        found = logits(model, tokens)
    assert [launch.name for launch in log] == ["marlin_gemv_rows_q4_1"] * 7 * len(model.layers)
    expected = bf.llm.load(device="cpu").logits(tokens)
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.full
def test_smollm2_in_float16_is_as_exact_as_a_dense_model(on_a_mac):
    """Nine rows, as in tiles: at most twice the error of the same model with plain layers."""
    model, _, words = smollm2()
    tokens = [words.index(word) for word in [*PROMPT, "ĠParis", ".", "ĠThe", "Ġcapital"]]
    expected = bf.llm.load(device="cpu").logits(tokens)
    model.set_dtype(mx.float16)
    with emulator.launches() as log:
        found = logits(model, tokens)
    assert {launch.name for launch in log} == {"marlin_gemm_q4_1_striped", "marlin_reduce"}
    model.update_modules(tree_map(plain, model.leaf_modules(), is_leaf=lambda each: isinstance(each, nn.Module)))
    model.set_dtype(mx.float16)
    dense = logits(model, tokens)
    assert error(found, expected) <= 2 * error(dense, expected)


def plain(layer: Any) -> Any:
    return layer.to_linear() if isinstance(layer, MarlinLinear) else layer


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean()))
