"""Folders of models that also take images or sound: the language model runs, is converted and quantized."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from common import assert_same_bits
from llm_architectures import GEMMA3_ROPE, GEMMA4, MODELS, TOKENS
from llm_folders import SIZES, edit, in_transformers, randomize, write_tokenizer
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import billfish as bf
from billfish.llm import load

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
SOUND = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# The type of the whole model and of its language model, and their settings.
FOLDERS = {
    "gemma3": ("gemma3_text", {"rope_parameters": GEMMA3_ROPE, "sliding_window": 7}, {}),
    "gemma4": ("gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 0}, {"audio_config": SOUND}),
    "gemma4_unified": (
        "gemma4_unified_text",
        GEMMA4,
        {"vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32}, "audio_config": {"audio_embed_dim": 16}},
    ),
    "mistral3": ("ministral3", MODELS["ministral3"][2], {"vision_config": VISION | {"model_type": "pixtral"}}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes a folder, once."""
    room = tmp_path_factory.mktemp("models")

    def write(name: str):
        folder = room / name
        if not folder.exists():
            model_type, settings, others = FOLDERS[name]
            text = SIZES | {"initializer_range": 0.2, "model_type": model_type, "pad_token_id": 2} | settings
            parts = {"vision_config": VISION, **others}
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, text_config=text, **parts))
            randomize(model)
            model.save_pretrained(folder)
            write_tokenizer(folder)
        return folder

    return write


def expected(folder) -> np.ndarray:
    return in_transformers(folder, TOKENS, loader=AutoModelForImageTextToText)


def close(actual: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(actual - wanted).max() <= 2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", FOLDERS)
def test_text_has_the_logits_of_transformers(folder_of, name, tmp_path, caplog):
    folder, wanted = folder_of(name), expected(folder_of(name))
    others = [tensor for tensor in load_file(folder / "model.safetensors") if "language_model." not in tensor]
    caplog.set_level("INFO")
    assert close(load(folder, device="cpu").logits(TOKENS), wanted)
    assert re.search(rf"\b{len(others)} tensors for images or sound are left out", caplog.text)
    report = bf.convert(folder, tmp_path / "m.gguf", "gguf")
    assert sorted(note.name for note in report.notes if "images" in note.reason) == sorted(others)
    assert close(load(tmp_path / "m.gguf", device="cpu").logits(TOKENS), wanted)
    bf.convert(tmp_path / "m.gguf", tmp_path / "back", "plain")
    assert close(load(tmp_path / "back", device="cpu").logits(TOKENS), wanted)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_language_model_is_quantized_and_the_rest_stays(folder_of, name, tmp_path):
    report = bf.quantize_checkpoint(folder_of(name), tmp_path / "out", "q4_0", method="rtn")
    before = load_file(folder_of(name) / "model.safetensors")
    others = {tensor for tensor in before if "language_model." not in tensor}
    assert {tensor for tensor, reason in report.left.items() if "images" in reason} == others
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert others <= after.keys()
    for tensor in others:
        assert_same_bits(after[tensor], before[tensor])
    model = load(tmp_path / "out", device="cpu")
    assert "q4_0" in model.decoder.kernels
    bf.quantize_checkpoint(folder_of(name), tmp_path / "m.gguf", "q4_0", method="rtn")
    assert_same_bits(load(tmp_path / "m.gguf", device="cpu").logits(TOKENS), model.logits(TOKENS))
    bf.quantize_checkpoint(folder_of(name), tmp_path / "all", "q4_0", only=["tower|language_model"], method="rtn")


def test_statistics_are_for_the_language_model(folder_of, tmp_path):
    (tmp_path / "text").write_text("ab ba a" * 50)
    for out in ("out", "m.gguf"):
        settings = {"calibrate": tmp_path / "text", "progress": False}
        bf.quantize_checkpoint(folder_of("gemma4"), tmp_path / out, "q4_0", **settings)
    file, folder = (load(tmp_path / out, device="cpu").logits(TOKENS) for out in ("m.gguf", "out"))
    assert_same_bits(folder, file)


@pytest.mark.parametrize("name", ["gemma4", "mistral3"])
def test_modules_are_calibrated_with_text(folder_of, tmp_path, name):
    model = AutoModelForImageTextToText.from_pretrained(folder_of(name), dtype=torch.float32)
    known = bf.calibrate(model, [{"input_ids": torch.tensor([TOKENS])}], progress=False)
    assert not any("tower" in each for each in known)
    for out in ("out", "m.gguf"):
        report = bf.quantize_checkpoint(folder_of(name), tmp_path / out, "q4_0", statistics=known)
        assert any(tensor.done == "quantized" for tensor in report.tensors)


@pytest.mark.parametrize("said", [None, False, True])
def test_a_head_is_where_the_folder_has_it(folder_of, tmp_path, said):
    """A file that does not say whether it is the embedding shows it."""
    folder = folder_of("mistral3")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    arrays = load_file(folder / "model.safetensors")
    if said is False:
        arrays["language_model.lm_head.weight"] = 2 * arrays["language_model.model.embed_tokens.weight"]
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "config.json", tie_word_embeddings=said)
    logits, tied = load(tmp_path, device="cpu").logits(TOKENS), load(folder, device="cpu").logits(TOKENS)
    assert close(logits, 2 * tied if said is False else tied)
