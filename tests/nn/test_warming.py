"""bf.warm_up: afterwards nothing is compiled or packed for the first products of a model."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from common import gaussian

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.metal import Kernels, MetalBackend
from billfish.backends.metal.mps import MpsBackend
from billfish.nn.torch import emulated_mps
from billfish.nn.torch.expert_layers import MarlinExperts


class Recorded:
    """A metal_kernel that gives back zeros, and notes what would have been compiled: a name and its types."""

    def __init__(self) -> None:
        self.compiled: list[tuple[object, ...]] = []

    def __call__(self, **arguments):
        def launch(*, inputs, template, output_shapes, output_dtypes, **_):
            key = (arguments["name"], *template, *(x.dtype for x in inputs))
            if key not in self.compiled:
                self.compiled.append(key)
            shapes = zip(output_shapes, output_dtypes, strict=True)
            if isinstance(inputs[0], torch.Tensor):
                return [inputs[0].new_zeros(shape, dtype=dtype) for shape, dtype in shapes]
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return launch

    @property
    def names(self) -> list[str]:
        return [str(name).removeprefix("marlin_") for name, *_ in self.compiled]


ROWS = ["gemv_q4_0", "gemv_rows_q4_0", "gemm_q4_0_striped", "reduce"]


@pytest.fixture
def mps(monkeypatch):
    recorded, backend = Recorded(), MpsBackend()
    backend.kernels = Kernels(recorded)
    monkeypatch.setitem(BACKENDS, "mps", backend)
    with emulated_mps.mps():
        yield recorded


def test_a_model_of_torch_on_a_mac(mps):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)), torch.nn.Linear(256, 64, bias=False))
    bf.quantize_model(model.half(), "q4_0", progress=False)
    model.to("mps")
    done = bf.warm_up(model, rows=(1, 8, 64))
    assert (done.layers, done.products) == (4, 3 + 1 + 1 + 3)
    assert mps.names == [*ROWS, "gemv_q4_0", "gemv_rows_q4_0", "reduce"]  # with a bias, and without
    assert str(done).startswith("4 layers, 8 products, ")
    compiled = len(mps.compiled)
    with torch.no_grad():
        for rows in (1, 3, 8, 17, 64):
            model(torch.zeros(rows, 256, device="mps", dtype=torch.float16))
    assert len(mps.compiled) == compiled
    bf.warm_up(model, rows=(1,), dtype=torch.bfloat16)
    assert len(mps.compiled) == compiled + 2


def test_experts_of_torch(mps):
    shapes = ((4, 32, 64), (4, 32, 64), (4, 64, 32))
    stacks = [bf.quantize(gaussian(shape, i), "u4b8") for i, shape in enumerate(shapes)]
    layer = MarlinExperts.from_quantized(*stacks, device="mps")
    assert bf.warm_up(layer, rows=(1, 64), chosen=3)[:2] == (1, 2)
    assert {key[3] for key in mps.compiled} == {("SHARE", 3), ("SHARE", 1)}
    assert set(mps.names) == {"gemv_experts_u4b8", "gemm_experts_u4b8"}


def test_a_model_of_mlx(monkeypatch):
    recorded, backend = Recorded(), MetalBackend()
    backend.kernels = Kernels(recorded)
    monkeypatch.setitem(BACKENDS, "metal", backend)
    monkeypatch.setattr(MetalBackend, "can_run", lambda self, problem: (problem.kind == "mlx", "no"))
    model = mlx.nn.Sequential(mlx.nn.Linear(256, 256), mlx.nn.ReLU(), mlx.nn.Linear(256, 256))
    bf.quantize_model(model, "q4_0", progress=False)
    assert bf.warm_up(model, rows=(8, 64))[:2] == (2, 3 + 1)
    assert recorded.names == ROWS


def test_on_the_cpu_weights_are_packed():
    layer = bf.MarlinLinear.from_linear(torch.nn.Linear(64, 32), format="q4_0")
    assert bf.warm_up(layer)[:2] == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": np.zeros(3)}, r"warm_up.*module.*ndarray.*torch.nn.Module or an mlx.nn.Module"),
        ({"rows": ()}, r"warm_up.*rows.*\(\).*positive integers"),
        ({"rows": (0,)}, r"warm_up.*rows.*\(0,\)"),
        ({"dtype": "int8"}, r"warm_up.*dtype.*'int8'.*float32, float16 or bfloat16"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(bf.BillfishError, match=message):
        bf.warm_up(**{"model": torch.nn.Linear(2, 2), **arguments})
