"""What docs/add-a-format.md says, done: its own block of code, and then all that a format is for."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from common import assert_same_bits, gaussian

import billfish as bf
from billfish.cli.formats import print_formats

PAGE = Path(__file__).parents[2] / "docs" / "add-a-format.md"
NAME = "q5_m"


@pytest.fixture
def format():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert code is not None
    exec(code[1], {})
    yield bf.get_format(NAME)
    del bf.FORMATS[NAME]


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_weights_come_back(format, method):
    w = gaussian((24, 256))
    q = bf.quantize(w, NAME, method=method)
    assert q.bits_per_weight == format.bits_per_weight(32) == 6
    twin = bf.quantize(w, "q5_1", method=method)  # the same numbers in another order of fields
    assert_same_bits(bf.dequantize(q), bf.dequantize(twin))
    assert_same_bits(bf.dequantize(bf.QuantizedTensor.from_planes(NAME, q.planes)), bf.dequantize(q))
    assert_same_bits(bf.dequantize(pickle.loads(pickle.dumps(q))), bf.dequantize(q))
    for backend in ("cpu", "reference", "metal-emulator"):
        assert_same_bits(bf.dequantize(q, backend=backend), bf.dequantize(twin, backend="reference"))


@pytest.mark.parametrize("backend", ["cpu", "reference", "metal-emulator"])
def test_products_are_those_of_its_twin(format, backend):
    w, x = gaussian((24, 256)), gaussian((3, 256), 1)
    y = bf.quantized_linear(x, bf.quantize(w, NAME), backend=backend)
    expected = bf.quantized_linear(x, bf.quantize(w, "q5_1"), backend="reference")
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_packed_weights_are_saved_and_loaded(format, tmp_path):
    q, x = bf.quantize(gaussian((24, 256)), NAME), gaussian((3, 256), 1)
    bf.prepack(q).save(tmp_path / "packed")
    assert_same_bits(bf.quantized_linear(x, bf.PackedWeights.load(tmp_path / "packed")), bf.quantized_linear(x, q))


def test_layers_of_both_frameworks_hold_it(format):
    x = gaussian((3, 256), 1)
    linear = torch.nn.Linear(256, 24)
    layer = bf.MarlinLinear.from_linear(linear, NAME)
    empty = type(layer)(256, 24, format=NAME)
    empty.load_state_dict(layer.state_dict())
    assert_same_bits(empty(torch.from_numpy(x)).detach().numpy(), layer(torch.from_numpy(x)).detach().numpy())
    other = bf.MarlinLinear.from_linear(mlx.nn.Linear(256, 24), NAME)
    other.load_weights([(name, mx.array(array.numpy())) for name, array in layer.state_dict().items()])
    np.testing.assert_allclose(np.array(other(mx.array(x))), layer(torch.from_numpy(x)).detach().numpy(), atol=1e-5)


def test_checkpoints_hold_it(format, tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "in").mkdir()
    weights = {"model.layers.0.mlp.up_proj.weight": gaussian((24, 256))}
    save_file(weights, tmp_path / "in" / "model.safetensors")
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", NAME, method="rtn")
    (name,) = weights
    checkpoint = bf.load(tmp_path / "out")
    expected = bf.dequantize(bf.quantize(weights[name], NAME, method="rtn"))
    assert checkpoint.describe(name).format is format
    assert_same_bits(bf.dequantize(checkpoint[name]), expected)
    part = checkpoint.read(name, rows=(3, 9), columns=(32, 128))
    assert_same_bits(bf.dequantize(part), expected[3:9, 32:128])


def test_the_list_of_formats_has_it(format):
    out = io.StringIO()
    print_formats(out, False)
    assert NAME in out.getvalue()
