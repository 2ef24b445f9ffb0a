"""Numbers that float16 cannot hold: kernels store the largest that it can, the kernels on the CPU (fibers.h)."""

from __future__ import annotations

import numpy as np
from cuda_compiled import H200
from cuda_fibers import FiberLauncher, Memory

from billfish.backends.cuda.plans import GATE_COLUMNS, GATES, gate_ctas

LARGEST = 65504


def test_an_activation_is_clamped():
    gates, numbers = (Memory(np.full((2, 64), value, np.float16)) for value in (3e4, -2e4))
    out = Memory(np.zeros((2, 64), np.float16))
    macros, grid = {"TYPE": "F16", "GATE": GATES["silu"]}, (gate_ctas(2, 64),)
    arguments = gates.pointer, numbers.pointer, out.pointer, 2, 64, 64
    FiberLauncher(1e-5, H200).launch(0, "gate", macros, grid, GATE_COLUMNS, *arguments)
    assert (out.array == -LARGEST).all()


def test_a_norm_is_clamped():
    rng = np.random.default_rng(0)
    hidden = Memory(rng.standard_normal((2, 64)).astype(np.float32))
    weight, x = Memory(np.full(64, 1e6, np.float32)), Memory(np.zeros((2, 64), np.float16))
    macros = {"TYPE": "F16", "HIDDEN": 64, "THREADS": 32, "ADD": 0, "POST": 0, "NORM": 1}
    arguments = hidden.pointer, 0, weight.pointer, 0, x.pointer, 0, 0, 1e-5, 1.0, 1.0
    FiberLauncher(1e-5, H200).launch(0, "normalize", macros, (2,), 32, *arguments)
    exact = 1e6 * hidden.array / np.sqrt((hidden.array**2).mean(axis=1, keepdims=True))
    far = np.abs(exact) > 1.01 * LARGEST
    assert far.sum() > 100
    assert np.array_equal(x.array[far], np.sign(exact[far]) * LARGEST)
