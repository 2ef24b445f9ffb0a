"""Language models from folders of every layout, against transformers and against each other."""

from __future__ import annotations

import json
import re
import sys

import checkpoint_folders as folders
import numpy as np
import pytest
import torch
from common import facts
from llm_folders import edit, in_transformers, write_random, write_tokenizer
from llm_models import Small, write_model
from safetensors.numpy import load_file, save_file

import billfish as bf
from billfish.cli.main import main
from billfish.llm import default_model, evaluate, load

TOKENS = [0, 5, 68, 20, 33, 7, 41, 66, 2, 68]
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "gemma"]


def close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    return bool(np.abs(a - b).max() <= tolerance * np.abs(b).max())


# ---- plain folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logits_are_those_of_transformers(tmp_path, model_type):
    write_random(tmp_path, model_type)
    model, expected = load(tmp_path), in_transformers(tmp_path, TOKENS)
    assert model.logits(TOKENS).shape == (10, 96)
    assert close(model.logits(TOKENS), expected, 2e-5)
    assert (model.path, model.config.name) == (tmp_path, tmp_path.name)
    assert re.fullmatch(rf"Model\('{tmp_path.name}', \w+, 2 layers, hidden 64, .*\(float32\)\)", repr(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_stay_sixteen_bits(tmp_path, dtype):
    write_random(tmp_path, "llama", dtype)
    model = load(tmp_path)
    assert close(model.logits(TOKENS), in_transformers(tmp_path, TOKENS), 2e-5)
    assert str(dtype).removeprefix("torch.") in model.decoder.kernels


@pytest.mark.parametrize("model_type", ["llama", "gemma"])
def test_a_folder_and_its_gguf_are_the_same_model(tmp_path, model_type):
    """Bits and all: both are read as the same tensors."""
    write_random(tmp_path / "in", model_type)
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    a, b = load(tmp_path / "in"), load(tmp_path / "m.gguf")
    assert np.array_equal(a.logits(TOKENS), b.logits(TOKENS))
    assert (a.tokenizer.pieces, a.tokenizer.ends) == (b.tokenizer.pieces, b.tokenizer.ends)
    assert a.encode("ab") == b.encode("ab")
    assert (a.config.name, a.config.context) == (b.config.name, b.config.context) == ("in", 64)


def test_biases_that_an_architecture_may_have(tmp_path):
    write_random(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert close(load(tmp_path).logits(TOKENS), in_transformers(tmp_path, TOKENS), 2e-5)


@pytest.mark.parametrize(
    "rule",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_positions(tmp_path, rule):
    write_random(tmp_path, "llama", rope_parameters={**rule, "rope_theta": 10000.0})
    model, tokens = load(tmp_path), [3 + i % 60 for i in range(48)]
    expected = in_transformers(tmp_path, tokens)
    assert close(model.logits(tokens), expected, 2e-5)
    edit(tmp_path / "config.json", rope_parameters=None)
    assert not close(load(tmp_path).logits(tokens), expected, 2e-3)


def test_a_file_and_a_folder_with_a_gguf(tmp_path):
    write_random(tmp_path / "in", "llama")
    expected = load(tmp_path / "in").logits(TOKENS)
    assert np.array_equal(load(tmp_path / "in" / "model.safetensors").logits(TOKENS), expected)
    (tmp_path / "other").mkdir()
    bf.convert(tmp_path / "in", tmp_path / "other" / "m.gguf", "gguf")
    assert np.array_equal(load(tmp_path / "other").logits(TOKENS), expected)


def test_no_folder_needs_the_package_gguf(tmp_path, monkeypatch):
    write_random(tmp_path, "gemma")
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not there
    assert load(tmp_path).encode("ab") == [0, 2, 68, 3]


# ---- quantized folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["gptq", "gptq-act-order", "awq", "compressed-tensors"])
def test_layouts_of_others(tmp_path, layout):
    """The same weights as plain numbers are the truth."""
    kind, act_order = layout.removesuffix("-act-order"), layout.endswith("act-order")
    truth = folders.write_folder(tmp_path / "in", kind, act_order)
    (tmp_path / "plain").mkdir()
    save_file(truth, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(folders.CONFIG))
    for folder in ("in", "plain"):
        write_tokenizer(tmp_path / folder)
    model, expected = load(tmp_path / "in"), load(tmp_path / "plain").logits(TOKENS)
    assert close(expected, in_transformers(tmp_path / "plain", TOKENS), 2e-5)
    assert close(model.logits(TOKENS), expected, 2e-5)
    assert close(model.logits(TOKENS, activations="q16"), expected, 1e-3)
    assert "u4" in model.decoder.kernels


@pytest.mark.parametrize(
    ("to", "format"), [("billfish", "fp4"), ("mlx", "affine4"), ("mlx", "mxfp4"), ("compressed-tensors", "u4b8")]
)
def test_layouts_that_we_write(tmp_path, to, format):
    write_random(tmp_path / "in", "qwen3", hidden_size=128, intermediate_size=128)
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", format, group_size=32, method="rtn", to=to)
    arrays = bf.load(tmp_path / "out")
    numbers = {n: bf.dequantize(t) if isinstance(t, bf.QuantizedTensor) else np.array(t) for n, t in arrays.items()}
    save_file(numbers, tmp_path / "in" / "model.safetensors")
    assert close(load(tmp_path / "out").logits(TOKENS), load(tmp_path / "in").logits(TOKENS), 2e-5)


@pytest.mark.full  # make docs-commands asks models of these layouts, too
@pytest.mark.parametrize("to", ["billfish", "mlx", "compressed-tensors"])
def test_the_capital_of_france_from_a_folder(tmp_path, to):
    assert main(["convert", str(default_model()), str(tmp_path / "out"), "--to", to, "--requantize"]) == 0
    answer = load(tmp_path / "out").generate("What is the capital of France?", max_tokens=12)
    assert "".join(answer) == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


# ---- quantized while they load --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "format", "group"), [("q4_0", "q4_0", None), ("fp4:64", "fp4", 64)])
def test_quantize_does_what_the_command_does(tmp_path, capsys, wanted, format, group):
    write_random(tmp_path / "in", "llama", intermediate_size=128)
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", format, group_size=group)
    capsys.readouterr()
    model = load(tmp_path / "in", quantize=wanted, progress=False)
    assert np.array_equal(model.logits(TOKENS), load(tmp_path / "out").logits(TOKENS))
    assert ", ".join(sorted([format, "float32"])) in repr(model)  # the head stays
    assert capsys.readouterr().err == ""
    with pytest.raises(bf.DataError, match=f"out is already quantized .{format}.*quantize='q8_0'.*--requantize"):
        load(tmp_path / "out", quantize="q8_0")


def test_quantize_names_what_is_quantized_already(tmp_path, caplog):
    write_random(tmp_path / "in", "llama")
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "half", "q4_0", only=["q_proj"])
    load(tmp_path / "half", quantize="q8_0")
    assert "model.layers.1.self_attn.q_proj.weight: already quantized (q4_0)" in caplog.text


@pytest.mark.parametrize("ignored", [{"method": "rtn"}, {"method": "mes"}, {"statistics": "stats.safetensors"}])
def test_settings_of_quantize_are_refused_without_it(tmp_path, ignored):
    write_random(tmp_path, "llama")
    with pytest.raises(bf.DataError, match=f"{next(iter(ignored))}.*quantize"):
        load(tmp_path, **ignored)


def test_quantize_names_what_does_not_fit(tmp_path, capsys, caplog):
    write_random(tmp_path, "llama", intermediate_size=80)
    assert main(["run", str(tmp_path), "-p", "ab", "-n", "2", "--quantize", "q4_0"]) == 0
    error = capsys.readouterr().err
    names = "model.layers.0.mlp.down_proj.weight, model.layers.1.mlp.down_proj.weight"
    assert f"not quantized: {names}: K = 80 is not a multiple of 32, as q4_0 needs" in caplog.messages
    assert "(float32, q4_0)" in error


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("q4_9", "llm.load|format|'q4_9'"),
        ("fp4:7", "llm.load|group_size|7|16, 32, 64, 128"),
        ("fp4:x", "'fp4:x'"),
    ],
)
def test_quantize_refuses_what_is_no_format(tmp_path, capsys, wanted, message):
    write_random(tmp_path, "llama")
    assert main(["run", str(tmp_path), "-p", "ab", "--quantize", wanted]) == 2
    assert re.search(facts(message), capsys.readouterr().err)
    with pytest.raises(bf.DataError, match="quantize= or convert="):
        load(tmp_path, quantize="q4_0", convert=lambda name, tensor: tensor)


def test_tensors_are_packed_some_at_a_time(tmp_path, monkeypatch):
    """A model that is larger than a batch gives the same numbers, and its plain matrices are gone one by one."""
    write_random(tmp_path, "llama")
    whole = load(tmp_path, quantize="q8_0").logits(TOKENS)
    monkeypatch.setattr("billfish.llm.cpu.BATCH_BYTES", 40_000)
    sizes = []
    backend = type(bf.BACKENDS["cpu"])
    pack_all = backend.pack_all

    def counted(self, tensors):
        packed = pack_all(self, tensors)
        sizes.append(len(packed))
        return packed

    monkeypatch.setattr(backend, "pack_all", counted)
    assert np.array_equal(load(tmp_path, quantize="q8_0").logits(TOKENS), whole)
    assert sum(sizes) == 15
    assert max(sizes) <= 2


# ---- commands -------------------------------------------------------------------------------------------------------


def test_eval_against_the_original(tmp_path, capsys):
    write_random(tmp_path / "in", "llama", torch.bfloat16)
    (tmp_path / "text").write_text("ab cab " * 20)
    model, text = str(tmp_path / "in"), str(tmp_path / "text")
    command = ["eval", model, "--text", text, "--against", model, "--json"]
    costs = []
    for format in ("q8_0", "q4_0"):
        assert main([*command, "--quantize", format]) == 0
        costs.append(json.loads(capsys.readouterr().out)[0]["divergence"])
    assert 0 < costs[0] < costs[1]
    assert main([*command, "--activations", "exact"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["divergence"] == 0


def test_eval_refuses_another_vocabulary(tmp_path, capsys):
    write_random(tmp_path / "a", "llama")
    write_model(tmp_path / "m.gguf", Small())
    (tmp_path / "text").write_text("ab cab " * 20)
    with pytest.raises(bf.ModelError, match=r"against=.*261 tokens.*of 96"):
        evaluate(load(tmp_path / "a"), [5] * 10, against=load(tmp_path / "m.gguf"))
    write_random(tmp_path / "b", "llama")
    file = tmp_path / "b" / "tokenizer.json"
    file.write_text(file.read_text().replace('"Z"', '"!"'))
    assert main(["eval", str(tmp_path / "a"), "--against", str(tmp_path / "b"), "--text", str(tmp_path / "text")]) == 2
    error = capsys.readouterr().err
    assert re.search(r"against=.*vocabulary.*token 30 is '!'.*'Z'", error)


# ---- what cannot run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'|config.json|llama, mistral"),
        ({"model_type": "mixtral"}, "num_experts_per_tok|None|number"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size|None|positive integer"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor|None|positive number"),
        ({"hidden_act": "gelu"}, "hidden_act|'gelu'|'silu' for llama"),
        ({"num_key_value_heads": 3}, "64 rows for 3 heads"),
    ],
)
def test_configurations_that_cannot_run(tmp_path, capsys, settings, message):
    write_random(tmp_path, "llama")
    edit(tmp_path / "config.json", **settings)
    assert main(["run", str(tmp_path), "-p", "ab"]) == 2
    assert re.search(facts(message), capsys.readouterr().err)


def test_tensors_go_by_the_names_that_the_folder_has(tmp_path, capsys):
    write_random(tmp_path, "llama")
    arrays = load_file(tmp_path / "model.safetensors")
    up = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        ({up: None}, f"no tensor {up}|llama"),
        ({up: np.ones((3, 3), np.float32)}, f"{up}|(3, 3)|(96, 64)"),
        ({"lm_head.weight": None}, "no tensor lm_head.weight"),
        ({"model.layers.0.mlp.odd_proj.weight": arrays[up]}, "unknown tensor 'model.layers.0.mlp.odd_proj.weight'"),
        ({up: np.ones((96, 64), np.int32)}, f"{up}|int32|float32, float16 or"),
    ):
        left = {name: array for name, array in (arrays | changed).items() if array is not None}
        save_file(left, tmp_path / "model.safetensors")
        assert main(["run", str(tmp_path), "-p", "ab"]) == 2
        assert re.search(facts(message), capsys.readouterr().err)
