"""The figures of errors, checkpoints, embeddings, language models and x in 8 bits are the recorded ones."""

from __future__ import annotations

import pytest
from pages import page, recorded

import billfish as bf
from benchmarks import sentence_embeddings, tables


def test_errors_of_formats():
    records, table = recorded("quantization_error.json")["records"], page("docs/formats.md")
    assert [record["format"] for record in records] == list(bf.FORMATS)
    for record in records:
        gaussian = record["gaussian"]
        assert f"| {record['format']} | {gaussian['mse'] / gaussian['rtn']:.3f} |" in table


def test_memory_of_the_commands_for_checkpoints():
    text, record = page("docs/checkpoints.md"), recorded("checkpoint_memory.json")
    assert f"{record['checkpoint_bytes'] / 1e9:.2f} GB" in text
    for command in record["records"]:
        assert f"| `{command['command']}` | {command['peak_bytes'] / 1e9:.2f} GB |" in text
        assert command["peak_bytes"] < 1.5e9


def test_embeddings_of_sentences():
    text, record = page("docs/layers.md"), recorded("sentence_embeddings.json")
    assert [(each["format"], each["group_size"]) for each in record["records"]] == sentence_embeddings.cases()
    assert record["about"]["sentences"] == len(sentence_embeddings.SENTENCES)
    for each in record["records"]:
        assert sentence_embeddings.row(each) in text


@pytest.mark.parametrize(
    "passage",
    tables.PASSAGES,
    ids=lambda passage: f"{passage.page}:{passage.write.__name__}",
)
def test_passages_that_are_written_by_scripts(passage):
    text = page(passage.page)
    assert passage.rewritten(text) == text, "python -m benchmarks.tables writes it anew"
