"""fp8, mxfp8 and nf4: every code, NaN and all scales; folders of them beside the libraries that write such."""

from __future__ import annotations

import json

import checkpoint_samples as samples
import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_samples import MODULE, compressor, scheme, write_config
from common import ALL_BYTES, assert_same_bits, gaussian, multiply
from safetensors.torch import save_file as save_torch

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend
from billfish.core.elements import FP8, NF4

LEVELS = pytest.mark.parametrize("level", _cpu.levels())
NAME = f"{MODULE}.weight"


def backend_at(level: str) -> CpuBackend:
    backend = CpuBackend()
    backend.level = level
    return backend


def fp8_tensor(n: int, k: int, group: int, seed: int = 0, finite: bool = True) -> bf.QuantizedTensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    if finite:
        codes[codes & 0x7F == 0x7F] = 0
    scales = (rng.standard_normal((n, 1 if group == -1 else -(-k // group))) / 64).astype(np.float32)
    return bf.QuantizedTensor.from_storage("fp8", {"packed": codes, "scales": scales}, group)


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_every_byte_of_fp8_means_what_ml_dtypes_says():
    expected = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for scale in (1, 0.37, -3e-5, 2.0**100):
        storage = {"packed": ALL_BYTES[None], "scales": np.full((1, 1), scale, np.float32)}
        q = bf.QuantizedTensor.from_storage("fp8", storage, -1)
        for backend in ("cpu", "reference"):
            assert_same_bits(bf.dequantize(q, backend=backend), expected[None] * np.float32(scale))


def test_every_byte_of_mxfp8_means_what_ml_dtypes_says():
    values = ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    storage = {"packed": np.tile(ALL_BYTES, (256, 1)), "scales": np.repeat(ALL_BYTES[:, None], 8, axis=1)}
    q = bf.QuantizedTensor.from_storage("mxfp8", storage)
    with np.errstate(over="ignore"):
        expected = values * scales[:, None]
    for backend in ("cpu", "reference"):
        assert_same_bits(bf.dequantize(q, backend=backend), expected)


def test_fp8_rounds_as_ml_dtypes_and_saturates():
    x = gaussian((4096,)) * np.float32(100)
    np.testing.assert_array_equal(FP8.encode(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert FP8.round(np.float32([1e9, -1e9, 460])).tolist() == [448, -448, 448]


def test_plain_rounding_of_fp8_is_that_of_torch():
    w = gaussian((16, 256))
    q = bf.quantize(w, "fp8", group_size=-1, method="rtn")
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(448)
    np.testing.assert_array_equal(q.storage["scales"], scale)
    theirs = torch.from_numpy(w * (np.float32(1) / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(q.storage["packed"], theirs.view(torch.uint8).numpy())


def test_nf4_takes_the_nearest_level():
    x = np.random.default_rng(0).uniform(-1.1, 1.1, 100_000).astype(np.float32)
    distance = np.abs(x[:, None].astype(np.float64) - NF4.values)
    np.testing.assert_array_equal(NF4.encode(x), distance.argmin(axis=1))


# ---- products -------------------------------------------------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**9, 2.0**60])
@pytest.mark.parametrize("group", [128, -1])
def test_products_with_all_codes_and_scales_of_any_size(level, scale, group):
    q = fp8_tensor(40, 520, group)
    storage = {"packed": q.storage["packed"], "scales": q.storage["scales"] * np.float32(scale)}
    q = bf.QuantizedTensor.from_storage("fp8", storage, group)
    w, backend = bf.dequantize(q, backend="reference").astype(np.float64), backend_at(level)
    for m in (1, 3, 8, 9, 40):
        x = gaussian((m, 520), m)
        y = multiply(backend, x, backend.pack(q))
        bound = 1e-5 * np.abs(x) @ np.abs(w).T
        assert (np.abs(y - x.astype(np.float64) @ w.T) <= bound).all()


@LEVELS
@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_a_code_that_is_nan_makes_its_row_nan(level, name):
    q = bf.quantize(gaussian((5, 256)), name)
    packed = np.array(q.storage["packed"])
    packed[1, 7], packed[3, 255] = 0x7F, 0xFF
    q = bf.QuantizedTensor.from_storage(name, {**q.storage, "packed": packed}, q.group_size)
    backend = backend_at(level)
    for m in (1, 9):
        y = multiply(backend, gaussian((m, 256), m), backend.pack(q))
        assert np.isnan(y).all(axis=0).tolist() == [False, True, False, True, False]
        assert not np.isnan(y[:, [0, 2, 4]]).any()


@LEVELS
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nf4"])
def test_x_stays_as_it_is_whatever_was_asked_for(level, name):
    """The same bits: integers for x would need integers for the weights."""
    q, backend = bf.quantize(gaussian((33, 256)), name), backend_at(level)
    packed = backend.pack(q)
    for m in (1, 20):
        x = gaussian((m, 256), m)
        exact = multiply(backend, x, packed)
        for activations in ("q8", "q16"):
            assert_same_bits(multiply(backend, x, packed, None, activations), exact)


def test_a_matrix_of_any_sixteen_floats_is_multiplied_too():
    """A table of someone else's, such as bitsandbytes' fp4."""
    from billfish.core.elements import SortedFloats
    from billfish.core.formats.nf4 import Nf4

    class Another(Nf4):
        name = "another_nf4"
        element = SortedFloats(
            "another", np.linspace(-1, 1, 16, dtype=np.float32) ** 3 * 0.5 + np.linspace(-0.5, 0.5, 16)
        )

    q = bf.quantize(gaussian((20, 128)), Another())
    w, x = bf.dequantize(q, backend="reference"), gaussian((4, 128), 1)
    y = bf.quantized_linear(x, q, backend="cpu")
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-4, atol=1e-4)


# ---- folders of fp8 -------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize(
    "weights",
    [
        {"strategy": "channel"},
        {"strategy": "tensor"},
        {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ],
    ids=lambda weights: weights["strategy"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_float_quantized_folders_of_compressed_tensors(tmp_path, weights, dtype):
    n, k = 200, 384
    args = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    shape = {"channel": (n, 1), "tensor": (1,), "block": (2, 3), "group": (n, 3)}[weights["strategy"]]
    rng = torch.Generator().manual_seed(0)
    scale = ((torch.rand(shape, generator=rng) + 0.5) / 64).to(dtype)
    state = {"weight": torch.randn(n, k, generator=rng, dtype=torch.float32), "weight_scale": scale}
    stored = compressor("float-quantized").compress(state, scheme(**args))
    expected = compressor("float-quantized").decompress(stored | {"weight_scale": scale.float()}, scheme(**args))
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    about = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    write_config(tmp_path, quantization_config=about)
    save_torch({f"{MODULE}.{name}": array for name, array in stored.items()}, tmp_path / "model.safetensors")
    found = bf.load(tmp_path)
    described = found.describe(NAME)
    assert (described.layout, described.format.name, described.shape) == ("compressed-tensors", "fp8", (n, k))
    assert described.group_size == (k if weights["strategy"] in ("channel", "tensor") else 128)
    assert_same_bits(bf.dequantize(found[NAME]), expected["weight"].float().numpy())
    part = found.read(NAME, rows=(100, 150), columns=(128, 384))
    assert_same_bits(bf.dequantize(part), expected["weight"].float().numpy()[100:150, 128:384])


@pytest.mark.torch
def test_mxfp8_folders_of_compressed_tensors(tmp_path):
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    full = scheme(**args, scale_dtype=torch.uint8, zp_dtype=torch.uint8)
    rng = torch.Generator().manual_seed(1)
    scale = torch.ldexp(torch.ones(24, 8), torch.randint(-9, -3, (24, 8), generator=rng))
    stored = compressor("mxfp8-quantized").compress(
        {"weight": torch.randn(24, 256, generator=rng), "weight_scale": scale}, full
    )
    expected = compressor("mxfp8-quantized").decompress(stored, full)["weight"].float().numpy()
    about = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": args}}}
    write_config(tmp_path, quantization_config=about)
    save_torch({f"{MODULE}.{name}": array for name, array in stored.items()}, tmp_path / "model.safetensors")
    q = bf.load(tmp_path)[NAME]
    assert q.format.name == "mxfp8"
    assert_same_bits(bf.dequantize(q), expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(300, 520), (3, 130, 256)])
def test_folders_with_scales_of_blocks(tmp_path, shape, dtype):
    """DeepSeek's layout: weight_scale_inv is multiplied, and rows and columns may end inside a block."""
    *stack, n, k = shape
    scales = np.random.default_rng(4).uniform(0.5, 2, (*stack, -(-n // 128), -(-k // 128))).astype(dtype)
    values = samples.fp8(tmp_path, shape, scales, "_scale_inv", weight_block_size=[128, 128])
    spread = np.repeat(np.repeat(scales.astype(np.float32), 128, axis=-2), 128, axis=-1)[..., :n, :k]
    found = bf.load(tmp_path)
    assert (found.describe(NAME).layout, found.describe(NAME).shape) == ("fp8", shape)
    assert_same_bits(bf.dequantize(found[NAME]), values * spread)
    assert_same_bits(bf.dequantize(found.read(NAME, rows=(100, 130))), (values * spread)[..., 100:130, :])


def test_folders_of_modelopt_with_one_scale(tmp_path):
    values = samples.fp8(tmp_path, (24, 64), np.array(0.37, np.float32), "_scale", quant_method="modelopt")
    q = bf.load(tmp_path)[NAME]
    assert (q.format.name, q.group_size) == ("fp8", 64)
    assert_same_bits(bf.dequantize(q), values * np.float32(0.37))


def test_a_folder_of_fp8_is_saved_and_comes_back(tmp_path):
    scales = np.random.default_rng(5).uniform(0.5, 2, (2, 2)).astype(np.float32)
    samples.fp8(tmp_path / "a", (256, 256), scales, "_scale_inv", weight_block_size=[128, 128])
    q = bf.load(tmp_path / "a")[NAME]
    bf.save({NAME: q}, tmp_path / "b")
    again = bf.load(tmp_path / "b")[NAME]
    for part, array in q.storage.items():
        assert_same_bits(again.storage[part], array)


@pytest.mark.parametrize(
    ("scales", "about", "message"),
    [
        (np.ones((7, 3), np.float32), {}, r"\(7, 3\).*for each matrix, row or block"),
        (np.ones((24, 4), np.int32), {}, "I32.*F32"),
        (np.ones((3, 4), np.float32), {"weight_block_size": [8, 64]}, "a scale for 64 weights of a row"),
        (np.ones((3, 4), np.float32), {"weight_block_size": [0, "a"]}, r"\(3, 4\)"),
    ],
)
def test_scales_that_do_not_fit(tmp_path, scales, about, message):
    samples.fp8(tmp_path, (24, 256), scales, "_scale", **about)
    with pytest.raises(bf.CheckpointError, match=message):
        bf.load(tmp_path)[NAME]


# ---- folders of bitsandbytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "double", "wide"])
def test_nf4_folders_of_bitsandbytes(tmp_path, name):
    _, expected = samples.nf4(tmp_path, name)
    found = bf.load(tmp_path)
    assert list(found) == [NAME]
    assert (found.describe(NAME).layout, found.describe(NAME).shape) == ("bitsandbytes", expected.shape)
    for backend in ("cpu", "reference"):
        assert_same_bits(bf.dequantize(found[NAME], backend=backend), expected)
    part = found.read(NAME, rows=(3, 7), columns=(128, 256))
    assert_same_bits(bf.dequantize(part), expected[3:7, 128:256])


@pytest.mark.parametrize("name", ["plain", "wide"])
def test_plain_rounding_to_nf4_has_the_bytes_of_bitsandbytes(tmp_path, name):
    original, _ = samples.nf4(tmp_path, name)
    theirs = bf.load(tmp_path)[NAME]
    ours = bf.quantize(original, "nf4", group_size=theirs.group_size, method="rtn")
    for part, array in theirs.storage.items():
        np.testing.assert_array_equal(ours.storage[part], array)


def state(**changed: object) -> np.ndarray:
    whole = {"quant_type": "nf4", "blocksize": 64, "shape": [20, 1024], "nested_blocksize": 256, "nested_offset": 0.5}
    return np.frombuffer(json.dumps(whole | changed).encode(), np.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": state(shape=[20])}, "shape"),
        ({"state": np.frombuffer(b"{no", np.uint8)}, "shape"),
        ({"state": state(shape=[20, 1 << 40])}, "bytes"),
        ({"state": state(blocksize=0)}, "blocksize.* 0"),
        ({"state": state(blocksize=96)}, "NF4 in blocks of 96 for rows of 1024"),
        ({"state": state(nested_blocksize=-1)}, "nested_blocksize.* -1"),
        ({"state": state(nested_blocksize=128)}, "shape.*nested_absmax"),
        ({"state": state(nested_offset="x")}, "nested_offset"),
        ({"absmax": np.zeros(7, np.uint8)}, "shape.*absmax"),
        ({"absmax": np.zeros(320, np.float32)}, "absmax.*F32"),
        ({"absmax": None}, "absmax and quant_map"),
        ({"nested_quant_map": None}, "no nested_quant_map"),
        ({"quant_map": np.zeros(16, np.float32)}, "NF4 with other levels"),
    ],
)
def test_damaged_nf4(tmp_path, changed, message):
    samples.nf4(tmp_path, "double", **changed)
    with pytest.raises(bf.CheckpointError, match=message):
        bf.load(tmp_path)[NAME]
