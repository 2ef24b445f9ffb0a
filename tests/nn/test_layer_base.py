"""bf.MarlinLinear(...) makes the layer of a framework; bf.quantize and bf.dequantize take and give arrays of each."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from cases import first
from common import assert_same_bits, gaussian
from nn_frameworks import MLX, TORCH

import billfish as bf
import billfish.nn.mlx.linear
import billfish.nn.torch.linear
from billfish.core.arrays import ADAPTERS

BOTH = pytest.mark.parametrize("framework", [TORCH, MLX], ids=lambda f: f.name)
NAMES = ["float32", "float16", "bfloat16"]


@BOTH
def test_calling_makes_the_layer_of_the_framework_that_is_named(framework):
    layer = bf.MarlinLinear(256, 128, format="fp4", framework=framework.name)
    assert type(layer) is framework.ours.MarlinLinear
    assert isinstance(layer, bf.MarlinLinear)
    assert (layer.in_features, layer.out_features, layer.format, layer.group_size) == (256, 128, "fp4", 32)
    assert tuple(layer(framework.array(gaussian((3, 256)))).shape) == (3, 128)
    assert "bias=False" in repr(bf.MarlinLinear(256, 128, False, framework=framework.name, group_size=-1))
    assert type(copy.deepcopy(layer)) is type(pickle.loads(pickle.dumps(layer))) is type(layer)


@pytest.mark.parametrize("name", first(1, ["torch", "mlx"]))
def test_the_only_framework_that_is_imported_is_meant(name):
    imported = {"torch": "import torch", "mlx": "import mlx.core"}[name]
    program = f"{imported}; import billfish as bf; print(type(bf.MarlinLinear(256, 128, format='fp4')).__module__)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == f"billfish.nn.{name}.linear"


@pytest.mark.parametrize("name", first(1, ["mlx", "torch"]))
def test_the_only_framework_that_is_installed_is_meant(name):
    other = {"torch": "mlx", "mlx": "torch"}[name]
    hide = (
        f"import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: None if n == {other!r} else find(n)"
    )
    program = f"{hide}\nimport billfish as bf; print(type(bf.MarlinLinear(256, 128)).__module__)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == f"billfish.nn.{name}.linear"


def test_errors_about_frameworks():
    both = r"torch and mlx are imported.*framework='torch' or framework='mlx'"
    with pytest.raises(bf.BackendUnavailable, match=both):
        bf.MarlinLinear(256, 128, format="fp4")
    with pytest.raises(bf.FormatError, match=r"framework.*'jax'.*framework='torch' or framework='mlx'"):
        bf.MarlinLinear(256, 128, framework="jax")
    with pytest.raises(bf.FormatError, match=r"framework.*'mlx'.*'torch'.*billfish\.MarlinLinear"):
        billfish.nn.torch.linear.MarlinLinear(256, 128, framework="mlx")
    program = "import sys; sys.modules['mlx'] = None; import billfish as bf; bf.MarlinLinear(256, 128, framework='mlx')"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "BackendUnavailable: MarlinLinear: " in run.stderr
    assert "framework='mlx' is not installed" in run.stderr


# ---- arrays of every library -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NAMES)
@BOTH
def test_quantize_takes_arrays_of_each(framework, dtype):
    w = framework.array(gaussian((16, 64)), dtype)
    expected = bf.quantize(framework.numpy(w), "u4", method="mse")
    for name, array in bf.quantize(w, "u4", method="mse").storage.items():
        assert_same_bits(array, expected.storage[name])


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("act_order", [False, True])
def test_dequantize_gives_arrays_of_each(dtype, act_order):
    order = np.random.default_rng(0).permutation(64) if act_order else None
    stored = bf.quantize(gaussian((16, 64)), "q4_0")
    q = bf.QuantizedTensor.from_storage("q4_0", stored.storage, permutation=order)
    expected = bf.dequantize(q, dtype)
    numpy_type = {"bfloat16": ml_dtypes.bfloat16}.get(dtype) or getattr(np, dtype)
    ways = {
        "numpy": [
            bf.dequantize(q, numpy_type),
            bf.dequantize(q, np.dtype(numpy_type)),
            bf.dequantize(q, getattr(torch, dtype), like="numpy"),
            bf.dequantize(q, dtype, like=expected),
        ],
        "torch": [
            bf.dequantize(q, getattr(torch, dtype)),
            bf.dequantize(q, dtype, like="torch"),
            bf.dequantize(q, dtype, like=torch.zeros(1)),
            bf.dequantize(q, getattr(mx, dtype), like="torch"),
        ],
        "mlx": [
            bf.dequantize(q, getattr(mx, dtype)),
            bf.dequantize(q, dtype, like="mlx"),
            bf.dequantize(q, numpy_type, like=mx.zeros(1)),
        ],
    }
    for adapter in ADAPTERS[:3]:
        for w in ways[adapter.kind]:
            assert adapter.owns(w)
            assert_same_bits(adapter.to_numpy(w), expected)


def test_dequantize_goes_to_the_device_of_like():
    """Where no kernel can write, the error says so; the array was asked for on that device."""
    q = bf.quantize(gaussian((16, 64)), "q4_0")
    with pytest.raises(bf.BackendUnavailable, match="meta"):
        bf.dequantize(q, like=torch.zeros(1, device="meta"))


def test_types_of_torch_and_mlx_in_unpack():
    packed, scales = bf.pack_fp4_weights(torch.from_numpy(gaussian((64, 16))))
    w = bf.unpack_fp4_weights(packed, scales, dtype=torch.bfloat16)
    assert w.dtype is torch.bfloat16
    assert torch.equal(w, bf.unpack_fp4_weights(packed, scales, dtype="bfloat16"))


def test_errors_about_kinds():
    q = bf.quantize(gaussian((16, 64)), "q4_0")
    with pytest.raises(bf.DTypeError, match=r"like.*'jax'.*'numpy', 'torch', 'mlx', or an array"):
        bf.dequantize(q, like="jax")
    with pytest.raises(bf.DTypeError, match=r"like.*list"):
        bf.dequantize(q, like=[])
    with pytest.raises(bf.DTypeError, match=r"like= and out="):
        bf.dequantize(q, like="torch", out=torch.zeros(16, 64))
    for wrong in (torch.int8, mx.int32, np.int8, "float64", torch.float64):
        with pytest.raises(bf.DTypeError, match=r"dtype.*float32, float16 or bfloat16"):
            bf.dequantize(q, wrong)
    program = (
        "import sys; sys.modules['torch'] = None; import numpy as np, billfish as bf\n"
        "bf.dequantize(bf.quantize(np.zeros((2, 32), np.float32), 'q4_0'), like='torch')"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.search(r"BackendUnavailable: dequantize.*like.*'torch', which cannot be imported", run.stderr)
