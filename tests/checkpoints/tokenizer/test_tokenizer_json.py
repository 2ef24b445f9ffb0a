"""Tokenizers and chat templates from folders, and between folders and GGUF."""

from __future__ import annotations

import json
import re

import pytest
import tokenizers
from common import facts
from llm_folders import edit, write_random, write_tokenizer
from llm_models import TEMPLATE, vocabulary
from llm_text import varied_lines
from tokenizers import pre_tokenizers as parts
from transformers import AutoTokenizer

import billfish as bf
from billfish.checkpoints.tokenizer.gguf_tokenizer import read_metadata
from billfish.checkpoints.tokenizer.pre_tokenizers import CUTS, SPELLINGS, cut_of, pre_tokenizer
from billfish.checkpoints.tokenizer.tokenizer_json import chat_template, read_folder
from billfish.checkpoints.write.tokenizer_files import tokenizer_fields, tokenizer_files
from billfish.cli.main import main
from billfish.llm import default_model, load

# ---- from a folder --------------------------------------------------------------------------------------------------


def test_a_real_tokenizer(tmp_path):
    """SmolLM2's from files: transformers and the GGUF file agree with it."""
    metadata = bf.load(default_model()).metadata
    for name, content in tokenizer_files(metadata).items():
        (tmp_path / name).write_bytes(content)
    ours, from_gguf = read_folder(tmp_path, 49152), read_metadata(metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.pieces, ours.kinds, ours.roles) == (from_gguf.pieces, from_gguf.kinds, from_gguf.roles)
    assert (ours.ends, ours.starts_with_bos) == (from_gguf.ends, from_gguf.starts_with_bos)
    for line in [*varied_lines()[:300], "<|im_start|>user\nHi<|im_end|>"]:
        tokens = ours.encode(line)
        assert theirs(line).input_ids == from_gguf.encode(line) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


def test_tokens_have_kinds_roles_and_ends(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = read_folder(tmp_path, 72)
    assert tokenizer.pieces[66:] == ["~", "Ġ", "ab", "[PAD69]", "[PAD70]", "[PAD71]"]
    assert (tokenizer.kinds[:5], tokenizer.kinds[68:]) == ([3, 3, 3, 3, 1], [1, 5, 5, 5])
    assert tokenizer.roles == {"bos": 0, "eos": 1}
    assert tokenizer.encode("<|user|>ab a") == [2, 68, 67, 37]
    assert tokenizer.encode("<s>", special=False) != [0]
    assert tokenizer.decode([0, 68, 67, 37, 1]) == "ab a"
    assert tokenizer.ends == {1}
    edit(tmp_path / "generation_config.json", eos_token_id=[1, 3])
    edit(tmp_path / "config.json", eos_token_id=2, pad_token_id=5)
    tokenizer = read_folder(tmp_path, 72)
    assert tokenizer.ends == {1, 2, 3}
    assert tokenizer.roles == {"bos": 0, "eos": 1, "pad": 5}


@pytest.mark.parametrize(("declared", "processed", "expected"), [
    (None, False, False), (None, True, True), (False, True, False), (True, False, True),
])  # fmt: skip
def test_whether_a_text_begins_with_a_token_of_its_own(tmp_path, declared, processed, expected):
    write_tokenizer(tmp_path, add_bos_token=declared)
    if processed:
        encoder = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        template = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        encoder.post_processor = template
        encoder.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_folder(tmp_path, 69)
    assert tokenizer.starts_with_bos is expected
    assert tokenizer.encode("ab") == [*([0] if expected else []), 68]
    assert tokenizer.encode("<s>ab") == [0, 68]


def test_texts_are_never_cut_or_filled_up(tmp_path):
    write_tokenizer(tmp_path)
    encoder = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoder.enable_truncation(2)
    encoder.enable_padding(length=50)
    encoder.save(str(tmp_path / "tokenizer.json"))
    assert read_folder(tmp_path, 69).encode("abcd") == [68, 39, 40]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((), "no tokenizer.json. "),
        (("tokenizer.model",), "no tokenizer.json, only tokenizer.model"),
    ],
)
def test_folders_without_a_tokenizer(tmp_path, capsys, others, message):
    write_random(tmp_path, "llama")
    (tmp_path / "tokenizer.json").unlink()
    for name in others:
        (tmp_path / name).write_bytes(b"")
    assert main(["run", str(tmp_path), "-p", "ab"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"cannot read.*tokenizer.json"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', r"cannot read.*tokenizer.json"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', r"decoder.*ByteLevel, WordPiece, or"),
    ],
)
def test_tokenizers_that_make_no_sense(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(bf.ModelError, match=message):
        read_folder(tmp_path, 5)


# ---- chat templates -------------------------------------------------------------------------------------------------


def test_templates_lie_in_several_places(tmp_path):
    assert chat_template(tmp_path) is None
    edit(tmp_path / "tokenizer_config.json", chat_template="config")
    assert chat_template(tmp_path) == "config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    edit(tmp_path / "tokenizer_config.json", chat_template=named)
    assert chat_template(tmp_path) == "default"
    edit(tmp_path / "chat_template.json", chat_template="json")
    assert chat_template(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert chat_template(tmp_path) == "jinja é"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(bf.ModelError, match=r"cannot read.*chat_template\.jinja"):
        chat_template(tmp_path)


def test_a_conversation_with_a_folder(tmp_path):
    write_random(tmp_path, "llama")
    model = load(tmp_path)
    assert model.encode("ab") == model.encode([{"role": "user", "content": "ab"}]) == [0, 2, 68, 3]
    edit(tmp_path / "tokenizer_config.json", chat_template=None)
    with pytest.raises(bf.ModelError, match="this model has no chat template"):
        load(tmp_path).encode([{"role": "user", "content": "ab"}])


# ---- to GGUF --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_cuts_are_known_by_what_they_do(cut):
    """Of names that mean the same, the first is written, or that of the architecture."""
    alike = [name for name in CUTS if CUTS[name].pattern == CUTS[cut].pattern]
    alike = [name for name in alike if CUTS[name].digits_alone == CUTS[cut].digits_alone]
    for ignore in (False, True):
        fitting = [name for name in alike if CUTS[name].ignore_merges == ignore] or alike
        assert cut_of(pre_tokenizer(cut), ignore_merges=ignore) == fitting[0]
    assert cut_of(pre_tokenizer("olmo"), architecture="olmoe") == "olmo"
    assert cut_of(pre_tokenizer("qwen2"), architecture="olmoe") == "qwen2"


def test_spellings_that_find_the_same():
    """tiktoken's own for cl100k_base, line ends as they are, and what is between the finds removed."""
    pattern = CUTS["llama-bpe"].pattern
    for spelled in (pattern, *SPELLINGS, pattern.replace(r"\r\n", "\r\n")):
        other = tokenizers.Regex(spelled)
        for behavior, invert in (("isolated", False), ("removed", True)):
            cutter = parts.Sequence([parts.Split(other, behavior, invert), parts.ByteLevel(False, use_regex=False)])
            name = cut_of(cutter)
            for line in [*varied_lines()[:20], "a\r\n\r\nb's WE'LL 12345", "x  \n \n y", "...\n\n'"]:
                assert cutter.pre_tokenize_str(line) == pre_tokenizer(name).pre_tokenize_str(line)


@pytest.mark.parametrize(
    "cutter",
    [
        None,
        parts.ByteLevel(add_prefix_space=True),
        parts.Sequence([parts.Punctuation(), parts.ByteLevel(add_prefix_space=False)]),
        parts.Sequence([parts.Digits(individual_digits=False), parts.ByteLevel(add_prefix_space=False)]),
        parts.Sequence([parts.Split(tokenizers.Regex(CUTS["qwen2"].pattern), "removed"), parts.ByteLevel(False)]),
        parts.Sequence([parts.Split(tokenizers.Regex(r"\p{N}"), "isolated"), parts.ByteLevel(False, use_regex=False)]),
    ],
)
def test_other_cuts_have_no_name(cutter):
    with pytest.raises(bf.ModelError, match=r"pre_tokenizer.*.*GGUF.*gpt-2"):
        cut_of(cutter)


def test_the_cut_comes_from_the_tokenizer_not_from_the_size(tmp_path, capsys):
    """A Llama with a vocabulary of SmolLM's size that is cut as Qwen's is, and then in a way without a name."""
    write_random(tmp_path / "in", "llama", vocab_size=49152)
    encoder = tokenizers.Tokenizer.from_file(str(tmp_path / "in" / "tokenizer.json"))
    encoder.pre_tokenizer = pre_tokenizer("qwen2")
    encoder.save(str(tmp_path / "in" / "tokenizer.json"))
    assert not bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf").notes
    assert bf.load(tmp_path / "m.gguf").metadata["tokenizer.ggml.pre"] == "qwen2"
    encoder.pre_tokenizer = parts.Sequence([parts.Punctuation(), parts.ByteLevel(add_prefix_space=False)])
    encoder.save(str(tmp_path / "in" / "tokenizer.json"))
    with pytest.raises(bf.CheckpointError, match=r"pre_tokenizer.*Punctuation.*--raw-names"):
        bf.convert(tmp_path / "in", tmp_path / "other.gguf", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "m.gguf"]
    (note,) = bf.convert(tmp_path / "in", tmp_path / "other.gguf", "gguf", raw_names=True).notes
    assert note.name == "tokenizer.json"
    assert re.match(r"left out: .*pre_tokenizer.*Punctuation", note.reason)
    assert not any(name.startswith("tokenizer.") for name in bf.load(tmp_path / "other.gguf").metadata)
    assert main(["run", str(tmp_path / "other.gguf"), "-p", "ab"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def sentencepiece(space_first: bool) -> dict:
    """GGUF's fields for a small one."""
    pieces, kinds = vocabulary("gemma")
    pieces, kinds = [*pieces, "c", "abc", "  "], [*kinds, 1, 1, 4]
    scores = [0.0] * 260 + [-7.0, -8.0, -9.0, -3.0, -1.0, -2.0, -9.0, -5.0, 0.0]
    about = {"model": "llama", "tokens": pieces, "token_type": kinds, "scores": scores, "bos_token_id": 0}
    about |= {"eos_token_id": 1, "add_space_prefix": space_first, "add_bos_token": True}
    return {f"tokenizer.ggml.{name}": value for name, value in about.items()}


@pytest.mark.parametrize("space_first", [False, True])
def test_sentencepiece_to_files_and_back(tmp_path, space_first):
    metadata = sentencepiece(space_first)
    for name, content in tokenizer_files(metadata).items():
        (tmp_path / name).write_bytes(content)
    first, folder = read_metadata(metadata), read_folder(tmp_path, 269)
    fields = tokenizer_fields(tmp_path, 269)
    again = read_metadata(fields)
    for name in ("tokens", "token_type", "model", "add_space_prefix", "add_bos_token", "bos_token_id", "eos_token_id"):
        assert fields[f"tokenizer.ggml.{name}"] == metadata[f"tokenizer.ggml.{name}"]
    for text in ("ab a é", "abc", " ab  abc", "abcab</s>c", "", "🎣 b"):
        tokens = first.encode(text)
        assert folder.encode(text) == again.encode(text) == tokens
        assert folder.decode(tokens) == first.decode(tokens)


def test_metaspace_is_sentencepiece_too(tmp_path):
    for name, content in tokenizer_files(sentencepiece(True)).items():
        (tmp_path / name).write_bytes(content)
    about = json.loads((tmp_path / "tokenizer.json").read_text())
    about["normalizer"] = None
    for scheme, first in (("always", True), ("first", True), ("never", False)):
        about["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        (tmp_path / "tokenizer.json").write_text(json.dumps(about))
        fields = tokenizer_fields(tmp_path, 269)
        assert fields["tokenizer.ggml.add_space_prefix"] is first
        assert read_metadata(fields).encode("ab abc") == read_folder(tmp_path, 269).encode("ab abc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, 'normalizer|{"type": "Lowercase"}|spaces as'),
        ({"pre_tokenizer": {"type": "Whitespace"}}, 'pre_tokenizer|{"type": "Whitespace"}|none, or Meta'),
        ({"merges": [["a", "b"]]}, "merges|SentencePiece"),
        ({"byte_fallback": False}, "tokenizer.json|byte_fallback"),
    ],
)
def test_sentencepiece_that_gguf_cannot_say(tmp_path, change, message):
    for name, content in tokenizer_files(sentencepiece(True)).items():
        (tmp_path / name).write_bytes(content)
    about = json.loads((tmp_path / "tokenizer.json").read_text())
    for name, value in change.items():
        (about["model"] if name in about["model"] else about)[name] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(bf.ModelError, match=facts(message)):
        tokenizer_fields(tmp_path, 269)


def test_fields_of_a_byte_level_tokenizer(tmp_path):
    write_tokenizer(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=[1, 3])
    fields = tokenizer_fields(tmp_path, 80)
    assert fields["tokenizer.ggml.eot_token_id"] == 3  # a name that nobody would take for an end
    assert fields["tokenizer.chat_template"] == TEMPLATE
    assert read_metadata(fields).ends == read_folder(tmp_path, 80).ends == {1, 3}
    with pytest.raises(bf.ModelError, match=r"69 tokens.*60 rows"):
        tokenizer_fields(tmp_path, 60)
    about = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(about | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(bf.ModelError, match=r"normalizer.*.*none, or NFC"):
        tokenizer_fields(tmp_path, 80)
