"""With integer activations, a row of x gets the same bits alone and in any batch."""

from __future__ import annotations

import numpy as np
import pytest
from common import assert_same_bits

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.axes import why_never
from billfish.core.format import FORMATS

INTEGERS = [name for name, format in FORMATS.items() if not why_never(format)]


@pytest.mark.parametrize("activations", ["q8", "q16"])
@pytest.mark.parametrize("level", _cpu.levels())
@pytest.mark.parametrize("format", INTEGERS)
def test_rows_have_the_same_bits_in_any_batch(format, level, activations, monkeypatch):
    generator = np.random.default_rng(0)
    q = bf.quantize(generator.standard_normal((80, 512)).astype(np.float32), format, method="rtn")
    x = generator.standard_normal((20, 512)).astype(np.float32)
    backend = bf.BACKENDS["cpu"]
    monkeypatch.setattr(backend, "level", level)

    def multiply(rows):
        return bf.quantized_linear(rows, q, activations=activations)

    alone = np.concatenate([multiply(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, 4, 5, 7, 8, 13, 20):
        assert_same_bits(multiply(x[:rows]), alone[:rows])
