"""bf.save: tensors and models from memory to files, read back bit for bit; and the file of one quantized tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from checkpoint_folders import CONFIG
from common import assert_same_bits, gaussian, options_of, random_storage

import billfish as bf
from billfish.checkpoints.write import resumable_writer as engine
from billfish.core.arrays import bfloat16


def assert_same_tensor(actual: bf.QuantizedTensor, expected: bf.QuantizedTensor) -> None:
    assert (actual.format, actual.shape, actual.group_size) == (expected.format, expected.shape, expected.group_size)
    assert actual.storage.keys() == expected.storage.keys()
    for name, array in expected.storage.items():
        assert actual.storage[name].dtype == array.dtype
        assert actual.storage[name].tobytes() == array.tobytes()
    assert (actual.permutation is None) == (expected.permutation is None)
    if expected.permutation is not None:
        assert np.array_equal(actual.permutation, expected.permutation)


# ---- one tensor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", bf.FORMATS)
def test_a_tensor_in_a_file(tmp_path, format):
    """Every format, with every option, group size and scale type that storage may have, with and without act-order."""
    known = bf.FORMATS[format]
    groups = [*known.group_sizes, *([-1] if known.whole_row_groups else [])]
    tensors = [
        bf.quantize(gaussian((24, 512)), format, group_size=group, method="rtn", **options)
        for group in groups
        for options in options_of(known)
    ]
    tensors.append(bf.QuantizedTensor.from_storage(known, random_storage(known, 24, 512, np.random.default_rng(0))))
    order = np.random.default_rng(1).permutation(512)
    tensors.append(bf.QuantizedTensor.from_storage(known, tensors[0].storage, groups[0], permutation=order))
    for scales in (part for part in known.parts({}) if part.axes and not part.like):
        for dtype in scales.dtypes[1:]:
            wider = {
                part.name: array.astype(dtype) if scales.name in (part.name, part.like) else array
                for part, array in zip(known.parts({}), tensors[0].storage.values(), strict=True)
            }
            tensors.append(bf.QuantizedTensor.from_storage(known, wider, groups[0]))
    for i, tensor in enumerate(tensors):
        bf.save(tensor, tmp_path / f"{i}.safetensors")
        assert_same_tensor(bf.load(tmp_path / f"{i}.safetensors")["weight"], tensor)
    assert sorted(os.listdir(tmp_path)) == sorted(f"{i}.safetensors" for i in range(len(tensors)))


def test_one_tensor_does_not_replace_a_file(tmp_path):
    tensor = bf.quantize(gaussian((8, 64)), "q4_0")
    bf.save(tensor, tmp_path / "one.safetensors")
    with pytest.raises(bf.CheckpointError, match="exists"):
        bf.save(tensor, tmp_path / "one.safetensors")


# ---- tensors by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["folder", "one.safetensors"])
def test_tensors_of_every_kind(tmp_path, path):
    tensors = {
        "a.weight": bf.quantize(gaussian((16, 128)), "fp4", group_size=64),
        "a.bias": torch.arange(16).to(torch.bfloat16),
        "b.weight": bf.quantize(gaussian((16, 256)), "q4_k"),
        "blocks": bf.quantize(gaussian((4, 32)), "mxfp4"),
        "mlx": mx.array([[1.5, 2.5]], mx.bfloat16),
        "integers": np.arange(6, dtype=np.int64).reshape(2, 3),
        "strided": gaussian((6, 4)).T,
        "number": np.array(2.5, np.float32),
        "truth": torch.tensor([True, False]),
    }
    report = bf.save(tensors, tmp_path / path)
    assert (report.layout, report.quantized, len(report.tensors)) == ("billfish", (), len(tensors))
    ck = bf.load(tmp_path / path)
    assert list(ck) != []
    assert set(ck) == set(tensors)
    for name in ("a.weight", "b.weight", "blocks"):
        assert_same_tensor(ck[name], tensors[name])
    assert_same_bits(ck["a.bias"], np.arange(16).astype(bfloat16))
    assert_same_bits(ck["mlx"], np.array([[1.5, 2.5]], bfloat16))
    for name in ("integers", "strided", "number"):
        assert_same_bits(ck[name], np.asarray(tensors[name]))
    assert ck["truth"].tolist() == [True, False]
    assert os.listdir(tmp_path) == [path]


def test_tensors_in_other_layouts(tmp_path):
    tensors = {"m.weight": bf.quantize(gaussian((16, 64)), "q4_0")}
    bf.save(tensors, tmp_path / "mlx", to="mlx")
    assert bf.load(tmp_path / "mlx")["m.weight"].format.name == "affine4"
    with pytest.raises(bf.CheckpointError, match=r"save.*GGUF.*memory"):
        bf.save(tensors, tmp_path / "memory.gguf")
    bf.save(tensors, tmp_path / "raw.gguf", raw_names=True)
    assert_same_tensor(bf.load(tmp_path / "raw.gguf")["m.weight"], tensors["m.weight"])
    bf.save({"blk.0.attn_q.weight": tensors["m.weight"]}, tmp_path / "named.gguf")
    assert_same_tensor(bf.load(tmp_path / "named.gguf")["blk.0.attn_q.weight"], tensors["m.weight"])
    with pytest.raises(bf.CheckpointError, match="--requantize"):
        bf.save({"m.weight": bf.quantize(gaussian((16, 64)), "fp4")}, tmp_path / "fp4", to="mlx")
    with pytest.raises(bf.FormatError, match=r"to.*'onnx'"):
        bf.save(tensors, tmp_path / "onnx", to="onnx")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "model_or_tensors is empty"),
        ({"a": [1.0]}, r"save.*a.*list"),
        ({"a": np.zeros(2, np.complex128)}, r"save.*a.*complex128"),
        ({"a": torch.zeros(2, device="meta")}, r"save.*a.*'meta'"),
        (3, r"model_or_tensors.*int.*torch.nn.Module"),
    ],
)
def test_what_cannot_be_saved(tmp_path, given, message):
    with pytest.raises(bf.BillfishError, match=message):
        bf.save(given, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError, ValueError])
def test_nothing_is_left_of_a_save_that_failed(tmp_path, monkeypatch, error):
    """What was in memory is gone with its process: nobody could continue."""
    original, calls = engine._write_piece, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return original(*arguments)

    monkeypatch.setattr(engine, "_write_piece", failing)
    with pytest.raises(bf.CheckpointError if error is OSError else error):
        bf.save({"a": np.ones(4), "b": np.ones(4)}, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_of_a_save_that_was_interrupted_at_its_beginning(tmp_path, monkeypatch):
    original = engine.Partial.create

    def interrupted(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.Partial, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bf.save({"a": np.ones(4)}, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_killed_save_is_not_continued_with_other_numbers(tmp_path):
    """A process that was killed leaves a partial folder; the next save has the same names and shapes."""
    from writer_worker import start, status_of

    def killed(done: int, total: int, name: str) -> None:
        if name == "b":
            os.kill(os.getpid(), 9)

    old, new = ({name: np.full((4, 64), value) for name in "abc"} for value in (1.0, 2.0))
    assert status_of(start(lambda: bf.save(old, tmp_path / "out", progress=killed))) == -9
    assert (tmp_path / "out.partial").exists()
    bf.save(new, tmp_path / "out")
    ck = bf.load(tmp_path / "out")
    assert all((ck[name] == 2).all() for name in "abc")
    assert os.listdir(tmp_path) == ["out"]


# ---- models -------------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """Two names for one parameter, two layers with one matrix, a buffer that is kept and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 64)
        linear = torch.nn.Linear(64, 16)
        self.first = bf.MarlinLinear.from_linear(linear, format="fp4")
        self.second = self.first.with_bias(torch.ones(16))
        self.third = self.first
        self.head = torch.nn.Linear(64, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("dropped", torch.arange(3), persistent=False)


def test_a_torch_model_with_what_is_tied_once(tmp_path):
    model = Tied()
    bf.save(model, tmp_path / "out")
    ck = bf.load(tmp_path / "out")
    assert set(ck) == {"embed.weight", "first.weight", "first.bias", "second.bias", "kept"}
    assert_same_tensor(ck["first.weight"], model.first.quantized())
    assert_same_bits(ck["embed.weight"], model.embed.weight.detach().numpy())
    assert_same_bits(ck["second.bias"], np.ones(16, np.float32))
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_torch_model_that_has_computed_goes_into_another(tmp_path):
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False))

    model = build()
    bf.quantize_model(model, format="q4_0", progress=False)
    x = torch.randn(3, 64)
    expected = model(x)  # from now on the layers may hold nothing but packed weights
    bf.save(model, tmp_path / "model.safetensors")
    other = build()
    bf.load_into(other, tmp_path / "model.safetensors", progress=False)
    assert torch.equal(other(x), expected)
    assert torch.equal(model(x), expected)


def test_an_mlx_model(tmp_path):
    model = mlx.nn.Sequential(mlx.nn.Linear(64, 96), mlx.nn.GELU(), mlx.nn.Linear(96, 32, bias=False))
    bf.quantize_model(model, format="mxfp4", progress=False)
    bf.save(model, tmp_path / "out")
    ck = bf.load(tmp_path / "out")
    assert set(ck) == {"layers.0.weight", "layers.0.bias", "layers.2.weight"}
    assert_same_tensor(ck["layers.2.weight"], model.layers[2].quantized())
    assert_same_bits(ck["layers.0.bias"], np.array(model.layers[0].bias))


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_a_layer_alone(tmp_path, framework):
    linear = torch.nn.Linear(64, 16) if framework == "torch" else mlx.nn.Linear(64, 16)
    layer = bf.MarlinLinear.from_linear(linear, format="u4")
    tensor = layer.quantized()
    ordered = bf.QuantizedTensor.from_storage("u4", tensor.storage, 32, permutation=np.arange(64)[::-1])
    layer = type(layer).from_quantized(ordered, layer.bias)
    bf.save(layer, tmp_path / "layer.safetensors")
    ck = bf.load(tmp_path / "layer.safetensors")
    assert set(ck) == {"weight", "bias"}
    assert_same_tensor(ck["weight"], ordered)


def test_a_part_of_a_layer_is_not_saved_as_the_whole(tmp_path):
    from billfish.nn.parallel import ColumnParallelLinear

    layer = ColumnParallelLinear.from_quantized(bf.quantize(gaussian((16, 64)), "fp4"))
    with pytest.raises(bf.CheckpointError, match=r"ColumnParallelLinear.*part of its matrix"):
        bf.save(torch.nn.Sequential(layer), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def llama(**config: object) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG, **config}))


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_with_its_configuration(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    import billfish.nn.transformers  # noqa: F401  (makes our layout known to it)

    model = llama(tie_word_embeddings=tied)
    bf.quantize_model(model.model, format="fp4", progress=False)
    bf.save(model, tmp_path / "out")
    assert ("lm_head.weight" in bf.load(tmp_path / "out")) != tied
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.torch
def test_a_model_of_transformers_as_gguf(tmp_path, monkeypatch):
    """The configuration tells llama.cpp's names, rows and sizes; files of the folder that we are in are not taken."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    Path("tokenizer.json").write_text("{}")
    model = llama()
    bf.quantize_model(model.model, format="q4_0", progress=False)
    report = bf.save(model, "model.gguf")
    assert report.notes == ()
    ck = bf.load("model.gguf")
    assert ck.metadata["llama.embedding_length"] == CONFIG["hidden_size"]
    assert ck.metadata["general.name"] == "model"
    bf.save(model, "folder")
    assert bf.verify("model.gguf", "folder")
    assert sorted(os.listdir("folder")) == ["config.json", "model.safetensors"]


# ---- pickles ------------------------------------------------------------------------------------------------------


def test_pickles_are_refused_with_a_way_out(tmp_path):
    state = {"a": torch.ones(3)}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "folder").mkdir()
    torch.save(state, tmp_path / "folder" / "pytorch_model.bin")
    for path in ("new.pt", "old.pt", "folder"):
        with pytest.raises(bf.CheckpointError, match=r"pickle.*safetensors.*bf\.save\("):
            bf.load(tmp_path / path)
    bf.save(torch.load(tmp_path / "new.pt", weights_only=True), tmp_path / "out.safetensors")  # as the message says
    assert bf.load(tmp_path / "out.safetensors")["a"].tolist() == [1, 1, 1]


# ---- names and places of outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.GGUF", "x.safetensor", "x.ggfu", "x.onnx"])
def test_a_name_of_another_file_is_refused_with_those_that_are_written(tmp_path, name):
    with pytest.raises(bf.CheckpointError, match=rf"{name} is a \.\w+ file.* a folder or .* \.safetensors"):
        bf.save({"a": np.ones((2, 32), np.float32)}, tmp_path / name, progress=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "llama.v2", "x.d", "model.q4_k", "a.b.c"])
def test_folders_may_have_dots(tmp_path, name):
    bf.save({"a": np.ones((2, 32), np.float32)}, tmp_path / name, progress=False)
    assert (tmp_path / name / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["m", "m.safetensors", "m.gguf"])
def test_save_convert_and_quantize_replace_what_they_may(tmp_path, name):
    tensors = {"a.weight": np.ones((2, 32), np.float32)}
    bf.save(tensors, tmp_path / "source", progress=False)
    layout = "gguf" if name.endswith("gguf") else "billfish"
    for write in (
        lambda **about: bf.save(tensors, tmp_path / name, raw_names=True, progress=False, **about),
        lambda **about: bf.convert(
            tmp_path / "source", tmp_path / name, layout, raw_names=True, progress=False, **about
        ),
        lambda **about: bf.quantize_checkpoint(
            tmp_path / "source", tmp_path / name, "q8_0", raw_names=True, progress=False, **about
        ),
    ):
        bf.save({"b": np.zeros(3, np.float32)}, tmp_path / name, raw_names=True, progress=False, overwrite=True)
        with pytest.raises(bf.CheckpointError, match=rf"{name} exists.*overwrite=True"):
            write()
        assert list(bf.load(tmp_path / name)) == ["b"]
        write(overwrite=True)
        assert list(bf.load(tmp_path / name)) == ["a.weight"]
    assert sorted(os.listdir(tmp_path)) == [name, "source"]


def test_an_input_is_not_replaced_by_its_output(tmp_path):
    bf.save({"a.weight": np.ones((2, 32), np.float32)}, tmp_path / "m", progress=False)
    bf.save({"a.weight": np.ones((2, 32), np.float32)}, tmp_path / "m.gguf", raw_names=True, progress=False)
    (tmp_path / "link").symlink_to("m")
    for source, out in (("m", "m"), ("m", "link"), ("m/model.safetensors", "m"), ("m.gguf", "m.gguf")):
        to = "gguf" if out.endswith("gguf") else "billfish"
        with pytest.raises(bf.CheckpointError, match=f"{out} is where the input is"):
            bf.convert(tmp_path / source, tmp_path / out, to, overwrite=True, raw_names=True, progress=False)
    assert list(bf.load(tmp_path / "m")) == ["a.weight"]
