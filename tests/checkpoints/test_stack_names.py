"""Models with experts, and today's others, under the names and in the sizes that llama.cpp reads.

gguf's own tables are the judge of names, and transformers' own modules of what is in a stack.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import stack_models as models
import torch
from safetensors.numpy import load_file

import billfish as bf
from billfish.checkpoints.names.expert_stacks import MIXTRAL, by_stacks
from billfish.checkpoints.names.gguf_names import by_gguf_names, model_name

SHIFTED = ("gemma2", "gemma3")  # norms are 1 + w in GGUF


def architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def folder_of(name: str, folder: Path) -> torch.nn.Module:
    made = models.model(name)
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("name", models.MODELS)
def test_names_are_those_of_gguf(tmp_path, name):
    folder_of(name, tmp_path / "in")
    arch = architecture(name)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    view = by_gguf_names(bf.load(tmp_path / "in"))
    for tensor in view:
        module = tensor.rpartition(".")[0]
        layer = module.split(".")[1] if module.startswith("blk.") else ""
        assert module.replace(f"blk.{layer}.", "blk.{bid}.") in known, tensor
    table = gguf.get_tensor_name_map(arch, models.LAYERS)
    stacked = by_stacks(bf.load(tmp_path / "in"))
    for theirs in stacked:  # gguf's map from the names of transformers, for all that it has one for
        own = f"{theirs}.weight" if theirs.endswith("sinks") else theirs
        expected = table.get_name(own, try_suffixes=(".weight", ".bias"))
        if "block_sparse_moe.experts" in own:  # which gguf knows under Mixtral's names
            for short, projection in MIXTRAL.items():
                own = own.replace(projection, short)
            expected = table.get_name(own, try_suffixes=(".weight", ".bias"))
        assert expected is not None, theirs
        if not (name.startswith("gemma") and expected == "output.weight"):
            assert expected in view, theirs


@pytest.mark.parametrize("name", models.WITH_EXPERTS)
def test_stacks_are_what_the_model_multiplies_with(tmp_path, name):
    made = folder_of(name, tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    view, file = by_gguf_names(bf.load(tmp_path / "in")), bf.load(tmp_path / "out.gguf")
    for layer in range(models.LAYERS):
        for part, expected in models.experts(made, name, layer).items():
            tensor = f"blk.{layer}.ffn_{part}_exps.weight"
            assert view.describe(tensor).shape == tuple(expected.shape)
            np.testing.assert_array_equal(view[tensor], expected.numpy())
            np.testing.assert_array_equal(file[tensor], expected.numpy())
            np.testing.assert_array_equal(view.read(tensor, experts=(1, 3))[:, 2:5], expected.numpy()[1:3, 2:5])


@pytest.mark.parametrize("name", models.MODELS)
def test_gguf_reads_the_sizes_that_llama_cpp_wants(tmp_path, name):
    folder_of(name, tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    shapes = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    e, h, i = models.EXPERTS, models.HIDDEN, models.INNER
    assert shapes["token_embd.weight"] == (96, h)
    if name in models.WITH_EXPERTS:
        assert shapes["blk.1.ffn_gate_exps.weight"] == shapes["blk.1.ffn_up_exps.weight"] == (e, i, h)
        assert shapes["blk.1.ffn_down_exps.weight"] == (e, h, i)
        assert shapes["blk.1.ffn_gate_inp.weight"] == (e, h)
        field = reader.fields[f"{name}.expert_count"]
        assert field.contents() == e
    if name == "qwen2moe":
        assert shapes["blk.0.ffn_gate_inp_shexp.weight"] == (1, h)
        assert shapes["blk.0.ffn_up_shexp.weight"] == (48, h)
    if name == "gpt-oss":
        assert shapes["blk.0.ffn_gate_exps.bias"] == (e, i)
        assert shapes["blk.0.ffn_down_exps.bias"] == (e, h)
        assert shapes["blk.0.attn_sinks.weight"] == (4,)
        assert "blk.0.post_attention_norm.weight" in shapes
        assert "blk.0.ffn_norm.weight" not in shapes
    if name == "phi3":
        assert shapes["blk.0.attn_qkv.weight"] == (2 * h, h)
        assert shapes["blk.0.ffn_up.weight"] == (2 * i, h)
        assert "blk.0.ffn_gate.weight" not in shapes
    exact = [n for n in shapes if n.endswith(("norm.weight", ".bias", "ffn_gate_inp.weight", "sinks.weight"))]
    assert {types[n] for n in exact} == {"F32"}


@pytest.mark.parametrize("name", models.WITH_EXPERTS)
def test_models_in_memory_become_the_same_file(tmp_path, name):
    """transformers has other names for experts in memory than in files."""
    made = folder_of(name, tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    bf.save(made, tmp_path / "saved.gguf")
    report = bf.verify(tmp_path / "out.gguf", tmp_path / "saved.gguf")
    assert {comparison.outcome for comparison in report.comparisons} == {"equal bits"}
    # A model in memory says nothing of a tokenizer, and its name is another.
    ours, theirs = (
        {key: value for key, value in bf.load(tmp_path / file).metadata.items() if not key.startswith("tokenizer.")}
        for file in ("saved.gguf", "out.gguf")
    )
    assert {**ours, "general.name": ""} == {**theirs, "general.name": ""}


@pytest.mark.parametrize("name", models.MODELS)
def test_folder_to_gguf_and_back_is_the_same_model(tmp_path, name):
    made = folder_of(name, tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    assert bf.verify(tmp_path / "in", tmp_path / "out.gguf")
    bf.convert(tmp_path / "out.gguf", tmp_path / "back", "plain")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "back"))
    if name in SHIFTED:
        before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        np.testing.assert_array_equal(after[tensor].reshape(array.shape), array, err_msg=tensor)
    tokens = {name: models.SIZES[name] for name in models.SIZES if name.endswith("token_id")}  # no tokenizer says
    again = type(made).from_pretrained(tmp_path / "back", dtype=torch.float32, **tokens)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, made(tokens).logits)


def test_names_of_a_layer_lead_back():
    assert model_name("blk.3.ffn_gate_exps.weight", "qwen3moe") == "model.layers.3.mlp.experts.gate_proj.weight"
    assert model_name("blk.3.attn_sinks.weight", "gpt-oss") == "model.layers.3.self_attn.sinks"
    assert model_name("blk.3.ffn_norm.weight", "gemma2") == "model.layers.3.pre_feedforward_layernorm.weight"
    assert model_name("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    assert model_name("blk.3.ffn_gate_exps.weight") is not None
    assert model_name("blk.3.time_mix_key.weight") is None
