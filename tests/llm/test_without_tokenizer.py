"""Models without a tokenizer take and give token ids. What needs text says what is missing."""

from __future__ import annotations

import json
import re

import pytest
from common import assert_same_bits, facts
from llm_architectures import TOKENS
from llm_folders import edit, write_random

import billfish as bf
from billfish.cli.main import main
from billfish.llm import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_random(path, "llama")
    (path / "tokenizer.json").unlink()
    edit(path / "generation_config.json", eos_token_id=[1, 7])
    return path


@pytest.fixture(scope="module", params=["folder", "gguf", "without fields"])
def model(request, folder, tmp_path_factory):
    if request.param == "folder":
        return load(folder, device="cpu")
    out = tmp_path_factory.mktemp("out") / "m.gguf"
    assert not bf.convert(folder, out, "gguf").notes
    assert bf.load(out).metadata["tokenizer.ggml.model"] == "none"
    if request.param == "without fields":  # as files of others may be
        content = out.read_bytes()
        assert content.count(b"tokenizer.ggml.") == 3
        out.write_bytes(content.replace(b"tokenizer.ggml.model", b"tokenizer.of.nothing"))
    return load(out, device="cpu")


def test_token_ids_are_enough(model, folder):
    assert_same_bits(model.logits(TOKENS), load(folder, device="cpu").logits(TOKENS))
    assert model.config.vocabulary == 96
    assert model.tokenizer.ends == {1, 7}
    endless = {1: -100.0, 7: -100.0}
    answer = model.generate(TOKENS, max_tokens=5, logit_bias=endless)
    assert (len(answer.tokens), answer.text) == (5, "")
    assert list(model.stream(TOKENS, max_tokens=5, logit_bias=endless)) == []
    bias = {token: -100.0 for token in range(96) if token != 7}
    assert model.generate(TOKENS, max_tokens=5, logit_bias=bias).finish_reason == "stop"


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.generate("ab"),
        lambda model: model.generate("ab", raw=True),
        lambda model: model.generate([{"role": "user", "content": "ab"}]),
        lambda model: model.generate_batch([[5, 6]]),
        lambda model: model.generate([5, 6], response_format={"type": "json_object"}),
        lambda model: model.tokenize("ab"),
        lambda model: model.detokenize([5]),
        lambda model: model.embed_text("ab"),
    ],
)
def test_text_needs_a_tokenizer(model, use):
    with pytest.raises(bf.ModelError, match=r"no tokenizer|no chat template"):
        use(model)


def test_commands_say_so_before_weights_are_packed(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("ab")
    message = facts("no tokenizer.json|token ids")
    for command in (["run", str(folder), "-p", "ab"], ["eval", str(folder), "--text", str(tmp_path / "text")]):
        assert main(command) == 2
        assert re.search(message, capsys.readouterr().err)


def test_a_folder_of_a_file_without_a_tokenizer(folder, tmp_path):
    bf.convert(folder, tmp_path / "m.gguf", "gguf")
    assert not bf.convert(tmp_path / "m.gguf", tmp_path / "back", "plain").notes
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
    assert_same_bits(load(tmp_path / "back", device="cpu").logits(TOKENS), load(folder, device="cpu").logits(TOKENS))


def test_a_tokenizer_without_merges(tmp_path):
    write_random(tmp_path / "in", "llama")
    about = json.loads((tmp_path / "in" / "tokenizer.json").read_text())
    about["model"]["merges"] = []
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(about))
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    bf.convert(tmp_path / "m.gguf", tmp_path / "back", "plain")
    folder, file, back = (load(tmp_path / name, device="cpu") for name in ("in", "m.gguf", "back"))
    assert folder.tokenize("ab ab") == file.tokenize("ab ab") == back.tokenize("ab ab") == [37, 38, 67, 37, 38]
