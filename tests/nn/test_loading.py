"""load_into: checkpoints of every layout into models of torch and MLX."""

from __future__ import annotations

from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import safetensors.numpy
import torch
from checkpoint_folders import CONFIG, matrices, write_folder
from common import assert_same_bits, gaussian
from mlx_lm.models import llama
from mlx_models import smollm2
from nn_frameworks import MLX, TORCH

import billfish as bf
from billfish.nn.mlx.linear import MarlinLinear

LAYOUTS = [("gptq", False), ("gptq", True), ("awq", False), ("compressed-tensors", False)]


@pytest.mark.parametrize(("layout", "act_order"), LAYOUTS)
def test_a_folder_loads_into_the_layers_of_mlx_lm(layout, act_order, tmp_path):
    """mlx-lm has no reader for act-order GPTQ; the model code is its own, the layers are ours."""
    truth = write_folder(tmp_path, layout, act_order)
    model, plain = (llama.Model(llama.ModelArgs.from_dict(CONFIG)) for _ in range(2))
    plain.load_weights([(name, mx.array(array)) for name, array in truth.items()])
    report = bf.load_into(model, tmp_path)
    assert {layer.path for layer in report.replaced} == set(matrices())
    layer = model.model.layers[1].mlp.down_proj
    assert isinstance(layer, MarlinLinear)
    assert_same_bits(np.array(layer.to_linear().weight), truth["model.layers.1.mlp.down_proj.weight"])
    assert ("permutation" in layer) == act_order
    tokens = mx.array([[1, 5, 7, 9]])
    y, expected = model(tokens), plain(tokens)
    assert mx.abs(y - expected).max().item() <= 1e-5 * mx.abs(expected).max().item()


def test_gguf_loads_into_mlx_lm_and_speaks():
    """SmolLM2 as its GGUF file has it: q4_1 matrices, a q8_0 embedding, and rows in llama.cpp's order."""
    model, report, words = smollm2()
    assert {layer.format for layer in report.replaced} == {"q4_1"}
    assert len(report.replaced) == 7 * len(model.layers)
    prompt = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    tokens = mx.array([[words.index(word) for word in prompt]])
    assert words[mx.argmax(model(tokens)[0, -1]).item()] == "ĠParis"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(64, 96), torch.nn.LayerNorm(96)
        self.down = torch.nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def write_block(folder: Path, **more: np.ndarray) -> tuple[Path, bf.QuantizedTensor]:
    """`up` quantized with a bias, the rest as numbers, in our own layout."""
    tensor = bf.quantize(gaussian((96, 64)), "q4_0")
    arrays = {
        "up.blocks": tensor.storage["blocks"],
        "up.bias": gaussian((96,), 1),
        "norm.weight": gaussian((96,), 2),
        "norm.bias": gaussian((96,), 3),
        "down.weight": gaussian((64, 96), 4),
        **more,
    }
    path = folder / "model.safetensors"
    metadata = {"billfish": '{"format": "q4_0", "group_size": 32}'}
    safetensors.numpy.save_file({name: a for name, a in arrays.items() if a is not None}, path, metadata)
    return path, tensor


def test_torch_models_and_what_stays_numbers(tmp_path):
    path, tensor = write_block(tmp_path)
    model = torch.nn.Sequential(Block()).eval()
    report = bf.load_into(model, path, rename=lambda name: name.removeprefix("0."))
    assert [layer.path for layer in report.replaced] == ["0.up"]
    assert_same_bits(model[0].up.quantized().storage["blocks"], tensor.storage["blocks"])
    assert_same_bits(model[0].up.bias.detach().numpy(), gaussian((96,), 1))
    assert_same_bits(model[0].down.weight.detach().numpy(), gaussian((64, 96), 4))
    assert not model[0].up.training
    assert model(torch.zeros(2, 64)).shape == (2, 64)


def test_names_that_do_not_fit_are_an_error_and_change_nothing(tmp_path):
    path, _ = write_block(tmp_path, extra=gaussian((3,)))
    model = Block()
    with pytest.raises(bf.CheckpointError, match=r"1 tensors.*'extra'.*strict=False"):
        bf.load_into(model, path)
    assert type(model.up) is torch.nn.Linear
    assert [layer.path for layer in bf.load_into(model, path, strict=False).replaced] == ["up"]
    (tmp_path / "b").mkdir()
    path, _ = write_block(tmp_path / "b", **{"norm.bias": None, "down.weight": None})
    with pytest.raises(bf.CheckpointError, match=r"'down\.weight' and 1 others"):
        bf.load_into(Block(), path)
    (tmp_path / "c").mkdir()
    path, _ = write_block(tmp_path / "c", **{"norm.bias": gaussian((1,))})
    with pytest.raises(bf.CheckpointError, match=r"norm\.bias.*\(1,\).*\(96,\)"):
        bf.load_into(Block(), path)


@pytest.mark.parametrize("framework", [TORCH, MLX], ids=lambda f: f.name)
def test_a_bias_that_the_checkpoint_lacks(framework, tmp_path):
    """An error that names it, and nothing is changed; the model's own bias stays where that is wanted."""
    path, tensor = write_block(tmp_path, **{"up.bias": None, "norm.weight": None, "norm.bias": None})
    container = torch.nn.Module if framework is TORCH else mlx.nn.Module

    class Model(container):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = framework.make_linear(96, 64), framework.make_linear(64, 96, bias=False)

    model = Model()
    weight = framework.numpy(model.down.weight)
    with pytest.raises(bf.CheckpointError, match=r"'up\.weight' without 'up\.bias'.*strict=False"):
        bf.load_into(model, path)
    assert type(model.up) is framework.linear
    assert_same_bits(framework.numpy(model.down.weight), weight)
    assert [layer.path for layer in bf.load_into(model, path, strict=False).replaced] == ["up"]
    assert_same_bits(framework.numpy(model.up.bias), gaussian((96,), 1))
    x = gaussian((3, 64))
    expected = bf.quantized_linear(x, tensor, bias=gaussian((96,), 1))
    assert_same_bits(framework.numpy(model.up(framework.array(x))), expected)


def test_shapes_are_checked_before_anything_changes(tmp_path):
    path, _ = write_block(tmp_path, **{"down.weight": gaussian((64, 95))})
    model = Block()
    bits = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(bf.CheckpointError, match=r"down\.weight.*\(64, 95\).*\(64, 96\)"):
        bf.load_into(model, path)
    assert type(model.up) is torch.nn.Linear
    assert all(torch.equal(tensor, bits[name]) for name, tensor in model.state_dict().items())


def test_tied_arrays_need_one_name(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(8, 32), torch.nn.Linear(32, 8, bias=False)
            self.head.weight = self.embedding.weight

    safetensors.numpy.save_file({"embedding.weight": gaussian((8, 32))}, tmp_path / "model.safetensors")
    model = Tied()
    bf.load_into(model, tmp_path)
    assert model.head.weight is model.embedding.weight
    assert_same_bits(model.head.weight.detach().numpy(), gaussian((8, 32)))


@pytest.mark.parametrize("format", ["u4", "nvfp4", "q4_k"])
def test_take_rows(format):
    tensor = bf.quantize(gaussian((12, 256)), format)
    rows = np.array([3, 0, 11, 3])
    assert_same_bits(bf.dequantize(tensor.take_rows(rows)), bf.dequantize(tensor)[rows])


def test_other_architectures_are_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", gaussian((8, 32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(bf.CheckpointError, match=r"'mamba'.*llama.*qwen2, qwen2moe, qwen3, "):
        bf.load_into(mlx.nn.Linear(2, 2), path)
