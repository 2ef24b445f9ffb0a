"""The tokenizers of all families of models that run: ends, cuts, and the same ids from a folder and from GGUF."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from cases import first
from tokenizer_families import FAMILIES, TEXTS, Family, write_family

import billfish as bf
from billfish.checkpoints.tokenizer.ends import end_tokens
from billfish.checkpoints.tokenizer.gguf_extras import FIELD, read_extras
from billfish.checkpoints.tokenizer.gguf_tokenizer import read_metadata
from billfish.checkpoints.tokenizer.pre_tokenizers import CUTS, USUAL
from billfish.checkpoints.tokenizer.tokenizer import CONTROL, NORMAL, USER_DEFINED
from billfish.checkpoints.tokenizer.tokenizer_json import read_folder
from billfish.checkpoints.write.tokenizer_files import tokenizer_fields, tokenizer_files
from billfish.models import ARCHITECTURES

# Vocabularies as large as these take a second each.
QUICK = ["gpt-oss", "Llama 2, Mixtral, Mistral 7B", "Gemma 4", "Qwen 3.5 to 3.8", "Phi 3", "SmolLM2"]
IN_TURN = [*QUICK, *(name for name in FAMILIES if name not in QUICK)]


def test_every_architecture_has_a_family():
    named = {each.strip() for family in FAMILIES.values() for each in family.architectures.split(",")}
    assert named == set(ARCHITECTURES) - {"bert", "modern-bert"}  # which answer nothing
    assert set(USUAL) <= set(ARCHITECTURES)
    assert set(USUAL.values()) <= set(CUTS)


@pytest.mark.parametrize("name", first(len(QUICK), IN_TURN))
def test_a_folder_and_gguf_files_give_the_same_tokens(tmp_path, name):
    family = FAMILIES[name]
    write_family(tmp_path, family)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    folder = read_folder(tmp_path, family.size)
    fields = {"general.architecture": family.architecture}
    fields |= tokenizer_fields(tmp_path, family.size, family.architecture)
    file = read_metadata(fields)
    assert {token: folder.pieces[token] for token in family.control} == family.control
    kinds = ("gpt2", family.pre) if family.pre in CUTS else ({"spm": "llama"}.get(family.pre, family.pre), None)
    assert (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")) == kinds
    assert (FIELD in fields) == (name == "gpt-oss")  # llama.cpp's name for its cut does not ignore merges
    chat = "".join(f"{piece} \n{TEXTS[0]}" for piece in family.control.values())
    for text in [*TEXTS, chat]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert folder.encode(text, start=False) == file.encode(text, start=False) == expected
        assert folder.decode(expected) == file.decode(expected)
    published = read_metadata(as_published(fields, family))
    for each in (folder, file, published):
        assert each.ends == family.ends
        assert each.starts_with_bos == family.starts
        assert each.encode("fox") == theirs.encode("fox").ids


def as_published(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    """As llama.cpp's converter writes them: it names one end, and those of GLM."""
    extra = {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id", FIELD}
    fields = {name: value for name, value in fields.items() if name not in extra}
    fields |= {f"tokenizer.ggml.{role}_token_id": token for role, token in family.named.items()}
    if family.architecture == "gemma4":
        kinds = list(fields["tokenizer.ggml.token_type"])
        kinds[50] = USER_DEFINED
        fields |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.add_bos_token": False}  # the latter is wrong
    return fields


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_ends_of_every_family(name):
    """As in a published GGUF file, which names one of them, and in a folder, which may name all."""
    family = FAMILIES[name]
    pieces, kinds = [*family.control.values(), *family.visible.values()], [CONTROL] * len(family.control)
    kinds += [USER_DEFINED] * len(family.visible)
    numbers = {token: i for i, token in enumerate([*family.control, *family.visible])}
    expected = {numbers[token] for token in family.ends}
    for named in ({family.eos, *family.named.values()}, {family.eos, *family.listed}):
        assert end_tokens(pieces, kinds, {numbers[token] for token in named}, family.template) == expected


@pytest.mark.parametrize(
    ("pieces", "named", "template", "ends"),
    [
        (["</s>", "<|im_end|>", "<|eot_id|>", "x"], {3}, None, {0, 1, 2, 3}),
        (["</s>", "<|im_end|>", "<|eot_id|>", "x"], {3}, "{{ c }}<|im_end|>", {0, 1, 3}),
        (["</s>", "<|im_end|>", "<|eot_id|>", "x"], {2}, "{{ c }}", {0, 2}),  # what files name stays
        (["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], {0, 1}, "<|end|><|return|><|call|>", {1, 2}),
        (["<|end|>", "<|return|>", "<|call|>", "<|other|>"], {1}, "<|end|>", {0, 1}),
        (["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], {1}, 5, {1, 2}),  # no text, so no template
    ],
)
def test_files_names_and_the_template_decide_what_ends_an_answer(pieces, named, template, ends):
    assert end_tokens(pieces, [CONTROL] * 4, named, template) == ends


@pytest.mark.parametrize(("kind", "ends"), [(CONTROL, {0, 1}), (USER_DEFINED, {1}), (NORMAL, set())])
def test_text_that_looks_like_an_end_is_none(kind, ends):
    """Gemma has "</s>" for HTML."""
    assert end_tokens(["</s>", "<|tool_response>"], [kind] * 2, (), "<|tool_response></s>") == ends


def test_ends_that_gguf_has_no_fields_for(tmp_path):
    """More of them than GGUF's three fields, and none with a known name."""
    family = replace(FAMILIES["SmolLM2"], size=1500, listed=(2, 7, 8, 9))
    write_family(tmp_path, family)
    fields = tokenizer_fields(tmp_path, family.size, "llama")
    assert read_metadata(fields).ends == {0, 2, 7, 8, 9}
    more = {"tokenizer.ggml.fim_pad_token_id": 10, "tokenizer.ggml.fim_rep_token_id": 11, FIELD: "{}"}
    assert read_metadata(fields | more).ends == {0, 2, 7, 8, 10, 11}
    for name, content in tokenizer_files(fields).items():
        (tmp_path / name).write_bytes(content)
    assert read_folder(tmp_path, family.size).ends == {0, 2, 7, 8, 9}


@pytest.mark.parametrize("said", ["{", "[]", '{"ends": [99999999]}', '{"ends": 3}', '{"odd": 1}', '{"flags": [1]}', 7])
def test_a_damaged_field_of_our_own_is_named(said):
    with pytest.raises(bf.ModelError, match=FIELD):
        read_extras({FIELD: said}, 10)
