"""bf.load: every layout of safetensors against the library that owns it, or against bytes written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_samples as samples
import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoint_samples import MODULE, K, N
from common import assert_same_bits, gaussian
from safetensors.numpy import save_file

import billfish as bf

WEIGHT = f"{MODULE}.weight"


# ---- GPTQ -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(tmp_path, bits, version, symmetric, act_order):
    expected = samples.gptq(tmp_path, bits=bits, version=version, symmetric=symmetric, act_order=act_order)
    ck = bf.load(tmp_path)
    assert ck.layouts == {"gptq", "plain"}
    about = ck.describe(WEIGHT)
    assert (about.shape, about.group_size, about.act_order) == ((N, K), 64, act_order)
    assert about.format is ck[WEIGHT].format
    assert about.format.name == (f"u{bits}b{2 ** (bits - 1)}" if symmetric else f"u{bits}")
    assert_same_bits(bf.dequantize(ck[WEIGHT]), expected)
    assert (ck.permutation(WEIGHT) is not None) == act_order
    x = gaussian((3, K))
    assert (ck[WEIGHT].permutation is not None) == act_order
    y = bf.quantized_linear(x, ck[WEIGHT], bias=ck[f"{MODULE}.bias"])
    np.testing.assert_allclose(y, x @ expected.T + np.arange(N), rtol=1e-4, atol=1e-4)


def write_gptq_words(folder: Path, zeros: int, **config) -> bf.Checkpoint:
    """One word of each kind, by hand: K = 32, N = 8, one group of 32."""
    samples.write_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, **config})
    qweight = np.full((4, 8), 0x76543210, np.uint32)  # nibble j is k = 8r + j
    qweight[1, 2] = 0xFEDCBA98
    arrays = {"m.qweight": qweight, "m.qzeros": np.full((1, 1), zeros, np.uint32)}
    save_file(
        {**{k: v.view(np.int32) for k, v in arrays.items()}, "m.scales": np.ones((1, 8), np.float16)},
        folder / "model.safetensors",
    )
    return bf.load(folder)


def test_gptq_nibbles_and_zero_points_by_hand(tmp_path):
    ck = write_gptq_words(tmp_path, 0x7654321F, sym=False)
    w = bf.dequantize(ck["m.weight"])
    assert w.shape == (8, 32)
    # Version 1 stores one less: n = 0 holds 15 and means 16, and nothing carries into its neighbour, 1, which means 2.
    assert list(w[0, :8]) == [q - 16 for q in range(8)]
    assert list(w[1, :8]) == [q - 2 for q in range(8)]
    assert list(w[2, 8:16]) == [q - 3 for q in range(8, 16)]
    assert list(w[7, 24:]) == [q - 8 for q in range(8)]


def test_gptq_version_2_by_hand(tmp_path):
    w = bf.dequantize(write_gptq_words(tmp_path, 0x7654321F, sym=False, checkpoint_format="gptq_v2")["m.weight"])
    assert list(w[0, :8]) == [q - 15 for q in range(8)]
    assert list(w[1, :8]) == [q - 1 for q in range(8)]


@pytest.mark.parametrize("zeros", [0x77777777, 0x88888888])
@pytest.mark.parametrize("declared", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, None])
def test_symmetric_zero_points_tell_the_version(tmp_path, zeros, declared, sym):
    config = {"checkpoint_format": declared} | ({} if sym is None else {"sym": sym})
    w = bf.dequantize(write_gptq_words(tmp_path, zeros, **config)["m.weight"])
    assert list(w[0, :8]) == [q - 8 for q in range(8)]


def test_gptq_that_claims_to_be_symmetric_and_is_not(tmp_path):
    ck = write_gptq_words(tmp_path, 0x77777771, sym=True)
    assert ck["m.weight"].format.name == "u4"
    assert bf.dequantize(ck["m.weight"])[0, 0] == -2


def test_gptq_eight_bit_zero_of_255_means_256(tmp_path):
    samples.write_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 8, "sym": False})
    save_file(
        {
            "m.qweight": np.full((8, 4), 0x03020100, np.int32),
            "m.qzeros": np.array([[0x010203FF]], np.int32),
            "m.scales": np.ones((1, 4), np.float16),
        },
        tmp_path / "model.safetensors",
    )
    w = bf.dequantize(bf.load(tmp_path)["m.weight"])
    assert [list(row[:4]) for row in w] == [[q - z for q in range(4)] for z in (256, 4, 3, 2)]


def test_gptq_is_recognised_without_a_config(tmp_path):
    expected = samples.gptq(tmp_path, bits=8)
    (tmp_path / "config.json").unlink()
    assert_same_bits(bf.dequantize(bf.load(tmp_path / "model.safetensors")[WEIGHT]), expected)


@pytest.mark.parametrize("group", [32, 128, 256])
def test_gptq_group_sizes(tmp_path, group):
    """Those of several 128 are split, the scale repeated."""
    expected = samples.gptq(tmp_path, group=group, k=512, act_order=True)
    ck = bf.load(tmp_path)
    assert ck[WEIGHT].group_size == min(group, 128)
    assert ck.describe(WEIGHT).column_step == group  # a part begins where a group of the file does
    assert_same_bits(bf.dequantize(ck[WEIGHT]), expected)


def test_what_gptq_we_do_not_read_is_named(tmp_path):
    ck = write_gptq_words(tmp_path, 0, bits=4, checkpoint_format="marlin")
    assert "Marlin" in ck.describe("m.weight").unsupported
    with pytest.raises(bf.CheckpointError, match=r"m\.weight.*GPTQ.*Marlin"):
        ck["m.weight"]
    save_file(
        {
            "m.qweight": np.zeros((3, 32), np.int32),
            "m.qzeros": np.zeros((1, 3), np.int32),
            "m.scales": np.ones((1, 32), np.float16),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    assert "3-bit" in bf.load(tmp_path).describe("m.weight").unsupported


# ---- AWQ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq(tmp_path, group):
    expected = samples.awq(tmp_path, group=group)
    ck = bf.load(tmp_path)
    assert ck.layouts == {"awq"}
    assert_same_bits(bf.dequantize(ck[WEIGHT]), expected)


def test_awq_order_by_hand(tmp_path):
    qweight = np.zeros((8, 1), np.uint32)
    qweight[3] = 0x76543210  # nibble i is column [0, 2, 4, 6, 1, 3, 5, 7][i]
    arrays = {"m.qweight": np.tile(qweight, (4, 1)), "m.qzeros": np.full((1, 1), 0x00000001, np.uint32)}
    scales = np.ones((1, 8), np.float16)
    save_file({**{k: v.view(np.int32) for k, v in arrays.items()}, "m.scales": scales}, tmp_path / "model.safetensors")
    w = bf.dequantize(bf.load(tmp_path)["m.weight"])
    assert list(w[:, 3]) == [0 - 1, 4, 1, 5, 2, 6, 3, 7]
    assert list(w[:, 0]) == [-1, 0, 0, 0, 0, 0, 0, 0]


def test_awq_in_another_order_is_refused_by_name(tmp_path):
    samples.awq(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(bf.CheckpointError, match="'gemv'"):
        bf.load(tmp_path)[WEIGHT]


# ---- compressed-tensors, against its own decompression ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors(tmp_path, bits, symmetric, group, dtype):
    expected = samples.compressed(tmp_path, bits=bits, symmetric=symmetric, group=group, dtype=dtype)
    ck = bf.load(tmp_path)
    about = ck.describe(WEIGHT)
    assert about.layout == "compressed-tensors"
    assert about.format.name == (f"u{bits}b{2 ** (bits - 1)}" if symmetric else f"u{bits}")
    assert (about.shape, about.group_size) == ((N, K), group or K)
    tensor = ck[WEIGHT]
    # float16 where that holds the scales, which is so for all bfloat16 of ordinary size.
    assert tensor.storage["scales"].dtype == (np.float32 if dtype == torch.float32 else np.float16)
    # Its decompression rounds to the type of the scales once, and so do we.
    ours = bf.dequantize(tensor, str(dtype).removeprefix("torch.")).astype(np.float32)
    assert_same_bits(ours, expected)


def test_compressed_tensors_with_scales_below_float16(tmp_path):
    expected = samples.compressed(tmp_path, dtype=torch.bfloat16, scale=1e-9)
    tensor = bf.load(tmp_path)[WEIGHT]
    assert tensor.storage["scales"].dtype == np.float32
    assert_same_bits(bf.dequantize(tensor, "bfloat16").astype(np.float32), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_with_act_order(tmp_path, symmetric):
    expected = samples.compressed(tmp_path, symmetric=symmetric, act_order=True, dtype=torch.float32)
    ck = bf.load(tmp_path)
    assert ck.describe(WEIGHT).act_order
    assert_same_bits(bf.dequantize(ck[WEIGHT]), expected)


def test_compressed_tensors_mxfp4(tmp_path):
    expected = samples.compressed_fp4(tmp_path, "mxfp4")
    ck = bf.load(tmp_path)
    assert ck.describe(WEIGHT).format.name == "mxfp4"
    assert_same_bits(bf.dequantize(ck[WEIGHT], "bfloat16").astype(np.float32), expected)


def test_compressed_tensors_nvfp4_has_a_divisor(tmp_path):
    expected = samples.compressed_fp4(tmp_path / "a", "nvfp4", divisor=512)
    ck = bf.load(tmp_path / "a")
    assert ck.describe(WEIGHT).format.name == "nvfp4"
    assert float(ck[WEIGHT].storage["global_scale"]) == 1 / 512
    # The package decodes in bfloat16 steps; in float32 a power of two divides exactly, so one rounding is left.
    np.testing.assert_allclose(bf.dequantize(ck[WEIGHT]), expected, rtol=2**-7)
    samples.compressed_fp4(tmp_path / "b", "nvfp4", divisor=1234.5)
    assert bf.load(tmp_path / "b")[WEIGHT].storage["global_scale"] == np.float32(1) / np.float32(1234.5)


# ---- ModelOpt and gpt-oss ---------------------------------------------------------------------------------------


def test_modelopt_nvfp4_has_a_multiplier(tmp_path):
    expected = samples.modelopt(tmp_path)
    ck = bf.load(tmp_path)
    assert ck.layouts == {"modelopt", "plain"}
    assert ck.config["quantization_config"]["quant_algo"] == "NVFP4"
    assert_same_bits(bf.dequantize(ck[WEIGHT]), expected)
    assert ck[f"{MODULE}.input_scale"] == np.float32(0.5)


def test_gpt_oss_blocks(tmp_path):
    expected = samples.gpt_oss(tmp_path)
    ck = bf.load(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert ck.describe(name).shape == (3, N, K)
    assert_same_bits(bf.dequantize(ck[name]), expected)
    part = ck.read(name, experts=(1, 3), rows=(2, 9), columns=(32, 96))
    assert_same_bits(bf.dequantize(part), expected[1:, 2:9, 32:96])
    assert ck[f"{name}_bias"].shape == (3, N)


# ---- MLX --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_affine(tmp_path, bits, group, dtype):
    expected = samples.mlx(tmp_path, bits=bits, group=group, dtype=dtype)
    ck = bf.load(tmp_path)
    tensor = ck[WEIGHT]
    assert ck.layouts == {"mlx"}
    assert (tensor.format.name, tensor.group_size) == (f"affine{bits}", group)
    assert str(tensor.storage["scales"].dtype) == str(dtype).removeprefix("mlx.core.")
    # Ours rounds the product and then the sum; MLX may fuse the two.
    np.testing.assert_allclose(bf.dequantize(tensor), expected, rtol=0, atol=2**-22 * np.abs(expected).max())
    x = gaussian((3, K))
    arrays = mx.load(str(tmp_path / "model.safetensors"))
    parts = [arrays[f"{MODULE}.{n}"] for n in ("weight", "scales", "biases")]
    parts[1:] = [part.astype(mx.float32) for part in parts[1:]]
    theirs = mx.quantized_matmul(mx.array(x), *parts, transpose=True, group_size=group, bits=bits)
    np.testing.assert_allclose(bf.quantized_linear(x, tensor), np.array(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("with_config", [True, False])
def test_mlx_fp4(tmp_path, mode, with_config):
    expected = samples.mlx(tmp_path, mode=mode, group=32 if mode == "mxfp4" else 16)
    if not with_config:
        (tmp_path / "config.json").unlink()
    tensor = bf.load(tmp_path)[WEIGHT]
    assert tensor.format.name == mode
    assert_same_bits(bf.dequantize(tensor), expected)


def test_mlx_global_scale_is_the_largest_magnitude(tmp_path):
    samples.write_config(tmp_path, quantization={"mode": "nvfp4", "bits": 4, "group_size": 16})
    w = mx.random.normal((N, K), key=mx.random.key(7))
    largest = mx.abs(w).max()
    packed, scales = mx.quantize(w, mode="nvfp4", global_scale=largest)
    arrays = {"m.weight": packed, "m.scales": scales, "m.global_scale": largest}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    theirs = mx.dequantize(packed, scales, mode="nvfp4", global_scale=largest, dtype=mx.float32)
    ours = bf.dequantize(bf.load(tmp_path)["m.weight"])
    np.testing.assert_allclose(ours, np.array(theirs), rtol=1e-6)


def test_mlx_stacked_experts_and_exceptions_by_path(tmp_path):
    expected = samples.mlx(tmp_path, experts=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8, MODULE: {"group_size": 64, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ck = bf.load(tmp_path)
    assert ck.describe(WEIGHT).shape == (3, N, K)
    np.testing.assert_allclose(bf.dequantize(ck[WEIGHT]), expected.reshape(3, N, K), atol=1e-6)


def test_mlx_without_a_config_is_not_guessed(tmp_path):
    samples.mlx(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(bf.CheckpointError, match=r"without config\.json"):
        bf.load(tmp_path)[WEIGHT]


@pytest.mark.parametrize(("bits", "mode"), [(3, "affine"), (8, "mxfp8")])
def test_mlx_that_we_do_not_read_is_named(tmp_path, bits, mode):
    samples.mlx(tmp_path, bits=bits, mode=mode, group=32)
    with pytest.raises(bf.CheckpointError, match=f"MLX's.*{mode}"):
        bf.load(tmp_path)[WEIGHT]
