"""rotate.cu and attend.cu on the CPU (fibers.h), as GPUs before Hopper run them, beside the same launches in NumPy.

test_cuda_models.py has the kernels in NumPy beside the CPU's exact mode.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import first
from cuda_attention import Attention, Case

CASES = {
    "heads-64": Case(64, heads=8, pairs=32, adjacent=True, sinks=True),
    "heads-96": Case(96, pairs=12, gated=True, norms="each", window=70),
    "heads-128": Case(128, heads=20, kv_heads=1, pairs=64, norms="together", starts=(130, 2), lengths=(6,)),
    "heads-192": Case(192, heads=2, kv_heads=1, starts=(1, 65), lengths=(2,)),
    "heads-256": Case(256, heads=2, kv_heads=1, cap=3.0, v_norm=True, starts=(63, 64), lengths=(3,)),
    "heads-512": Case(512, heads=2, kv_heads=1, pairs=64, window=80, starts=(150, 62), lengths=(3,)),
}
OFTEN = [("heads-64", True), ("heads-96", False)]


@pytest.mark.parametrize(
    ("name", "fp8"), first(2, [*OFTEN, *((n, f) for n in CASES for f in (False, True) if (n, f) not in OFTEN)])
)
def test_attention_is_that_of_numpy(name, fp8):
    attention = Attention(CASES[name], fp8)
    made, expected = attention.on_fibers(), attention.in_numpy()
    np.testing.assert_allclose(made["q"].astype(np.float32), expected["q"].astype(np.float32), rtol=1e-3, atol=1e-4)
    assert not np.array_equal(expected["pages"], attention.pages)
    np.testing.assert_array_equal(made["pages"], expected["pages"])
    errors = np.abs(made["outputs"].astype(np.float32) - expected["outputs"]).max(axis=1)
    assert (errors < 2e-3 * np.abs(expected["outputs"]).max()).all(), errors


@pytest.mark.parametrize(
    ("value", "stored"),
    [(0.0, 0.0), (448.0, 448.0), (449.0, 448.0), (1e-3, 0.0009765625), (61440.0, 61440.0), (65504.0, 61440.0),
     (np.inf, 61440.0), (-np.inf, -61440.0), (np.nan, np.nan)],
)  # fmt: skip
def test_codes_of_numbers_at_the_ends_of_the_range(value, stored):
    """Beside the largest number of its row, on fibers and in NumPy."""
    attention = Attention(Case(64, heads=1, kv_heads=1, starts=(0,), lengths=(1,)), fp8=True)
    attention.qkv[:, 64:] = value
    for pages in (attention.on_fibers()["pages"], attention.in_numpy()["pages"]):
        for tile in attention.tiles(pages)[0, 0, :, 0]:
            codes, scale = attention.codes(tile)
            np.testing.assert_array_equal(codes[0] * scale[0], np.full(64, stored, np.float32))
