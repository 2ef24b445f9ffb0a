"""Rotation folded into weights: the rotated float model has the logits of the original, in every architecture that can
be rotated; the others are refused, with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import first
from encoder_models import write_encoder
from llm_architectures import MODELS, TOKENS, write_model, write_mtp_model
from llm_folders import edit, in_transformers, write_random, write_tokenizer
from llm_models import Small
from llm_models import write_model as write_gguf
from safetensors.numpy import load_file, save_file
from stack_models import gpt_oss_folder

import billfish as bf
from billfish.checkpoints.in_memory import HeldArray
from billfish.checkpoints.write import target as writing
from billfish.cli.main import main
from billfish.llm import load
from billfish.quantizing import rotate_checkpoint as rotating
from billfish.quantizing.rotation import Rotation

POST_NORMS = ("gemma2", "gemma3", "olmo2", "olmo3", "gemma4", "gemma4-moe", "gemma4-unified")
ACCEPTED = [name for name in MODELS if name not in POST_NORMS]
UNTIED = {"tie_word_embeddings": False}


def logits(path: Path) -> np.ndarray:
    return load(path, device="cpu", progress=False).logits(TOKENS)


def close(actual: np.ndarray, expected: np.ndarray, relative: float = 1e-4) -> bool:
    return bool(np.abs(actual - expected).max() <= relative * np.abs(expected).max())


# ---- the matrix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 9, 15, 32, 64, 80, 96, 576])
def test_a_rotation_is_orthogonal(size):
    matrix = Rotation(size, 0).apply(np.eye(size))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    np.testing.assert_array_equal(matrix, Rotation(size, 0).apply(np.eye(size)))
    if size > 8:
        assert np.abs(matrix - Rotation(size, 1).apply(np.eye(size))).max() > 0.1
    if size >= 32:
        assert np.abs(matrix).max() < 3.5 / np.sqrt(size) + 0.2  # every number is spread over all


def test_of_a_power_of_two_it_is_a_hadamard_matrix():
    np.testing.assert_allclose(np.abs(Rotation(128, 3).apply(np.eye(128))), 128**-0.5)


def test_runs_are_rotated_each():
    rotation, x = Rotation(24, 0), np.random.default_rng(0).standard_normal((5, 72))
    found = rotation.apply(x)
    for start in (0, 24, 48):
        np.testing.assert_allclose(found[:, start : start + 24], rotation.apply(x[:, start : start + 24]), atol=1e-12)


# ---- architectures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCEPTED)
def test_logits_stay(tmp_path, name):
    write_model(tmp_path / "in", name, **UNTIED)
    report = bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)
    expected = logits(tmp_path / "in")
    assert close(logits(tmp_path / "out"), expected)
    assert {tensor.done for tensor in report.tensors} <= {"rotated", "copied"}
    old, new = bf.open_checkpoint(tmp_path / "in"), bf.open_checkpoint(tmp_path / "out")
    assert {own: (old.describe(own).shape, old.describe(own).dtype) for own in old} == {
        own: (new.describe(own).shape, new.describe(own).dtype) for own in new
    }
    changed = {tensor.name for tensor in report.tensors if tensor.done == "rotated"}
    assert changed == {own for own in old if not np.array_equal(old[own], new[own])}


@pytest.mark.parametrize("name", ACCEPTED)
def test_logits_stay_in_gguf(tmp_path, name):
    write_model(tmp_path / "in", name, **UNTIED)
    bf.convert(tmp_path / "in", tmp_path / "in.gguf", "gguf", progress=False)
    bf.rotate_checkpoint(tmp_path / "in.gguf", tmp_path / "out.gguf", progress=False)
    expected = logits(tmp_path / "in")
    assert close(logits(tmp_path / "out.gguf"), expected)
    np.testing.assert_array_equal(bf.open_checkpoint(tmp_path / "out.gguf")["blk.0.attn_norm.weight"], 1)


@pytest.mark.parametrize("name", ["qwen3-yarn", "gpt-oss", "qwen35", "granitehybrid-moe"])
def test_the_other_layout_can_be_written(tmp_path, name):
    write_model(tmp_path / "in", name, **UNTIED)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out.gguf", progress=False)
    bf.rotate_checkpoint(tmp_path / "out.gguf", tmp_path / "out", seed=1, progress=False)
    for path in ("out.gguf", "out"):
        assert close(logits(tmp_path / path), logits(tmp_path / "in"))


@pytest.mark.parametrize("hidden", [48, 80, 144])
def test_hidden_sizes_that_are_no_power_of_two(tmp_path, hidden):
    write_model(tmp_path / "in", "mixtral", **UNTIED, hidden_size=hidden)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)
    assert close(logits(tmp_path / "out"), logits(tmp_path / "in"))


@pytest.mark.parametrize("name", ["qwen2", "gemma"])
def test_biases_and_norms_that_add_one(tmp_path, name):
    write_random(tmp_path / "in", name, **UNTIED)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)
    assert close(logits(tmp_path / "out"), logits(tmp_path / "in"))
    norm = bf.open_checkpoint(tmp_path / "out")["model.norm.weight"]
    np.testing.assert_array_equal(norm, 0 if name == "gemma" else 1)


@pytest.mark.torch
@pytest.mark.parametrize("name", first(6, ["llama3", "mixtral", "gpt-oss", "qwen35", "glm4moe", "phi3", *ACCEPTED]))
def test_transformers_loads_it_with_the_same_logits(tmp_path, name):
    write_model(tmp_path / "in", name, **UNTIED)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)
    assert close(in_transformers(tmp_path / "out", TOKENS), in_transformers(tmp_path / "in", TOKENS))


def test_values_are_rotated_where_nothing_gates_them(tmp_path):
    """Columns of attention's output say so: rows alone are rotated by the same matrix in each head."""
    for name, moved in (("llama3", True), ("phi3", True), ("qwen35", False)):
        write_model(tmp_path / name, name, **UNTIED)
        bf.rotate_checkpoint(tmp_path / name, tmp_path / f"{name}-out", progress=False)
        old, new = bf.open_checkpoint(tmp_path / name), bf.open_checkpoint(tmp_path / f"{name}-out")
        own = next(own for own in old if own.endswith("self_attn.o_proj.weight"))
        grams = [np.asarray(file[own], np.float64).T @ np.asarray(file[own], np.float64) for file in (old, new)]
        assert np.allclose(*grams, atol=1e-4) is not moved


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POST_NORMS)
def test_post_norms_are_refused(tmp_path, name):
    write_model(tmp_path / "in", name, **UNTIED)
    with pytest.raises(bf.ModelError, match=r"post-norms.*without `billfish rotate`"):
        bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_tied_embeddings_are_refused(tmp_path):
    write_model(tmp_path / "in", "llama3", tie_word_embeddings=True)
    write_gguf(tmp_path / "tied.gguf", Small(quantization="F32", tied=True))
    for path in ("in", "tied.gguf"):
        with pytest.raises(bf.ModelError, match=r"embedding is also its LM head"):
            bf.rotate_checkpoint(tmp_path / path, tmp_path / "out", progress=False)
    arrays = load_file(tmp_path / "in" / "model.safetensors")  # a head that transformers does not look at
    save_file(arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"] + 1}, tmp_path / "in/model.safetensors")
    with pytest.raises(bf.ModelError, match=r"config\.json ties"):
        bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)


def test_encoders_are_refused(tmp_path):
    write_encoder(tmp_path / "in", "bert")
    with pytest.raises(bf.ModelError, match="LayerNorm"):
        bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)


def test_draft_blocks_are_refused(tmp_path):
    write_mtp_model(tmp_path / "in", **UNTIED)
    with pytest.raises(bf.ModelError, match="MTP"):
        bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)


def test_parts_for_images_are_refused(tmp_path):
    write_model(tmp_path / "in", "llama3", **UNTIED)
    arrays = load_file(tmp_path / "in" / "model.safetensors")
    save_file(arrays | {"multi_modal_projector.weight": np.ones((4, 4), np.float32)}, tmp_path / "in/model.safetensors")
    with pytest.raises(bf.ModelError, match="images"):
        bf.rotate_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)


def test_wrong_arguments(tmp_path):
    write_gguf(tmp_path / "m.gguf", Small(quantization="F32"))
    for seed in (-1, 1.5, True):
        with pytest.raises(bf.DataError, match="seed"):
            bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / "out.gguf", seed=seed)
    with pytest.raises(bf.BillfishError, match="exists"):
        bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / "m.gguf")
    with pytest.raises(bf.BillfishError, match="int8"):
        bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / "out.gguf", dtype="int8")


# ---- files ----------------------------------------------------------------------------------------------------------


def test_types_stay_or_are_asked_for(tmp_path):
    write_random(tmp_path / "in", "llama", torch.bfloat16, **UNTIED)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "same", progress=False)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "wide", dtype="float32", progress=False)
    same, wide = bf.open_checkpoint(tmp_path / "same"), bf.open_checkpoint(tmp_path / "wide")
    assert {same.describe(own).dtype for own in same} == {"BF16"}
    assert {wide.describe(own).dtype for own in wide} == {"F32"}
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["tie_word_embeddings"] is False
    expected = logits(tmp_path / "in")
    assert close(logits(tmp_path / "wide"), expected)
    assert close(logits(tmp_path / "same"), expected, 0.1)
    assert not close(logits(tmp_path / "same"), expected)


def test_quantized_weights_are_dequantized(tmp_path):
    write_gguf(tmp_path / "m.gguf", Small(quantization="Q8_0"))
    gpt_oss_folder(tmp_path / "gpt-oss")
    write_tokenizer(tmp_path / "gpt-oss")
    edit(tmp_path / "gpt-oss" / "config.json", **UNTIED)
    for before, after in (("m.gguf", "out.gguf"), ("gpt-oss", "out")):
        bf.rotate_checkpoint(tmp_path / before, tmp_path / after, dtype="float32", progress=False)
        assert close(logits(tmp_path / after), logits(tmp_path / before))
        rotated = bf.open_checkpoint(tmp_path / after)
        assert all(rotated.describe(own).format is None for own in rotated)


def test_large_matrices_are_computed_in_parts(tmp_path, monkeypatch):
    write_model(tmp_path / "in", "qwen3moe", **UNTIED)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "whole", progress=False)
    monkeypatch.setattr(rotating, "CHUNK", 640)
    bf.rotate_checkpoint(tmp_path / "in", tmp_path / "parts", progress=False)
    assert close(logits(tmp_path / "parts"), logits(tmp_path / "whole"), 1e-6)


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    """With the same seed; with another it begins anew."""
    write_gguf(tmp_path / "m.gguf", Small(quantization="F32"))
    for seed in (0, 1):
        bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / f"whole{seed}.gguf", seed=seed, progress=False)
    made, left = writing.Target.make, [0]

    def stopping(self, item):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return made(self, item)

    monkeypatch.setattr(writing.Target, "make", stopping)
    left[0] = 6
    with pytest.raises(KeyboardInterrupt):
        bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / "cut.gguf", progress=False)
    assert not (tmp_path / "cut.gguf").exists()
    left[0] = 0
    bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / "cut.gguf", progress=False)
    tensors = len(bf.open_checkpoint(tmp_path / "m.gguf"))
    assert -left[0] == tensors - 5
    assert (tmp_path / "cut.gguf").read_bytes() == (tmp_path / "whole0.gguf").read_bytes()
    left[0] = 6
    with pytest.raises(KeyboardInterrupt):
        bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / "other.gguf", progress=False)
    left[0] = 0
    bf.rotate_checkpoint(tmp_path / "m.gguf", tmp_path / "other.gguf", seed=1, progress=False)
    assert -left[0] == tensors
    assert (tmp_path / "other.gguf").read_bytes() == (tmp_path / "whole1.gguf").read_bytes()


def test_outliers_are_spread(tmp_path):
    """What a rotation is for: a few large columns of a matrix are the same size as the others afterwards."""
    write_gguf(tmp_path / "m.gguf", Small(quantization="F32"))
    arrays = {name: np.array(array) for name, array in bf.open_checkpoint(tmp_path / "m.gguf").items()}
    before = arrays["blk.0.ffn_up.weight"]
    before[:, 5] *= 20
    change = rotating.Change(Rotation(64, 0))
    after = change.apply(before.astype(np.float64))
    errors = [np.square(bf.dequantize(bf.quantize(w.astype(np.float32), "q4_0")) - w).mean() for w in (before, after)]
    assert errors[1] < 0.3 * errors[0]


def test_what_a_type_cannot_hold_is_an_error():
    entry = HeldArray("w", np.full((2, 64), 1e6, np.float32))
    rotated = rotating.Rotated(entry, rotating.Change(Rotation(64, 0)), np.dtype(np.float16), False)
    with pytest.raises(bf.CheckpointError, match="w overflows float16"):
        rotated.read()


def test_command(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", Small(quantization="F32"))
    out = tmp_path / "out.gguf"
    assert main(["rotate", str(tmp_path / "m.gguf"), str(out), "--seed", "3", "--dtype", "float16"]) == 0
    assert "rotated" in capsys.readouterr().out
    assert bf.open_checkpoint(out)["blk.0.attn_q.weight"].dtype == np.float16
    assert main(["rotate", str(tmp_path / "m.gguf"), str(out)]) != 0
    assert "exists" in capsys.readouterr().err
    assert main(["rotate", str(tmp_path / "m.gguf"), str(out), "--force"]) == 0
    assert close(logits(out), logits(tmp_path / "m.gguf"))
