"""An RMSNorm folded into the products around it, on a GPU, against float64. Skipped without an NVIDIA GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

import billfish as bf
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer, copy_out, current, device
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher, Residual, sent
from billfish.core.errors import BackendUnavailable

try:
    device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

EPSILON, SCALE = 1e-5, 0.5


@dataclass
class Step:
    """As a StepMemory: arrays by name, sent as they are."""

    arrays: dict[str, np.ndarray]
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            self.buffers[name] = sent(array, 0)

    def at(self, name: str) -> int:
        return self.buffers[name].pointer

    def fetched(self, name: str) -> np.ndarray:
        copy_out(self.arrays[name], self.at(name), 0)
        return self.arrays[name]


class Folded:
    """Two products, and the norm between them. columns: of the second product, gate and up by eights where `gate`."""

    def __init__(self, format: str, hidden: int, inner: int, columns: int, gate: bool) -> None:
        rng = np.random.default_rng(0)
        tensors = [
            bf.quantize((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32), format, method="rtn")
            for n, k in ((hidden, inner), (columns, hidden))
        ]
        self.first, self.second = (DeviceMatrix(DeviceWeights.pack(tensor, "cpu")) for tensor in tensors)
        self.w = [bf.dequantize(tensor).astype(np.float64) for tensor in tensors]
        self.weight = (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)
        self.gate = gate
        self.x = rng.standard_normal((64, inner)).astype(np.float16)
        size = np.exp2(rng.integers(-8, 18, (64, 1)))  # float16 numbers end at 2^16
        self.hidden = (rng.standard_normal((64, hidden)) * size).astype(np.float32)
        self.launcher = Launcher(hidden, EPSILON)

    def run(self, rows: slice) -> tuple[np.ndarray, np.ndarray] | None:
        """The residual stream, and the output of the second product; None if these products are not folded."""
        x, hidden = self.x[rows].copy(), self.hidden[rows].copy()
        m, columns, launcher = len(x), len(self.w[1]) >> self.gate, self.launcher
        factors = np.full((m, 2), np.nan, np.float32)
        factors[:, 0] = 1 / np.sqrt((hidden**2).mean(axis=1) + EPSILON)
        with current(0):
            weight = sent(self.weight, 0)
            after = launcher.folded(m, self.first, (self.second,), Residual(scale=SCALE), weight)
            if after is None:
                return None
            step = Step({
                "inner": x, "hidden": hidden, "factors": factors, "work": np.zeros(16, np.uint8),
                "squares": np.full((m, hidden.shape[1] // 16), np.nan, np.float32),
                "x": np.full(hidden.shape, np.nan, np.float16), "y": np.full((m, columns), np.nan, np.float16),
            })  # fmt: skip
            launcher.output(0, step, self.first, step.at("inner"), m, after)
            gate = "silu" if self.gate else None
            launcher.products(0, step, (self.second,), step.at("x"), step.at("y"), m, gate=gate, normed=True)
            return step.fetched("hidden"), step.fetched("y")

    def expected(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        hidden = self.hidden[rows] + SCALE * self.x[rows].astype(np.float64) @ self.w[0].T
        y = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + EPSILON) * self.weight @ self.w[1].T
        if self.gate:
            pairs = y.reshape(len(y), -1, 2, 8)
            gate, up = (pairs[:, :, i].reshape(len(y), -1) for i in range(2))
            y = gate / (1 + np.exp(-gate)) * up
        return hidden, y


SHAPES = {
    "wide": ("q4_0", 4096, 1408, 8192, False),
    "gated": ("q4_0", 1024, 4096, 28672, True),
    "narrow": ("q4_1", 576, 1536, 1024, False),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_two_products_do_the_norm_between_them(shape):
    both = Folded(*SHAPES[shape])
    for m in (1, 2, 3, 8):
        made = both.run(slice(0, m))
        assert made is not None
        for found, expected in zip(made, both.expected(slice(0, m)), strict=True):
            errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert errors.max() < 2e-3, (m, errors)
        again = both.run(slice(0, m))
        assert again is not None
        assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))


def test_a_row_has_the_same_bits_in_any_batch():
    both = Folded(*SHAPES["narrow"])
    both.launcher.batch_invariant = True
    together = both.run(slice(0, 64))
    assert together is not None
    for start, stop in ((0, 1), (1, 4), (4, 11), (30, 64)):
        made = both.run(slice(start, stop))
        assert made is not None
        for some, all in zip(made, together, strict=True):
            assert np.array_equal(some, all[start:stop])
