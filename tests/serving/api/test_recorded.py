"""Requests of real clients, as they were recorded by run.py and agents.py of tests/in_clients: each gets an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES
from llm_models import Small, write_model
from serving_http import serving

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CONTEXT = 32_768  # a token is a byte here
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A template that knows functions and thoughts, and one that knows neither."""
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small(template=TEMPLATES[request.param], context=CONTEXT))
    with serving(file, streams=2, context=CONTEXT) as running:
        yield running


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """The same request for a few tokens."""
    short = {name: 3 for name in LENGTHS if name in body} or {}
    if "options" in body:
        short["options"] = {**body["options"], "num_predict": 3}
    return {**body, **short}


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_requests_are_answered(server, file):
    import http.client
    from urllib.parse import urlsplit

    recorded = json.loads(file.read_text("utf-8"))
    assert recorded["requests"]
    last_response = ""
    for each in recorded["requests"]:
        body = shortened(each["body"])
        if each["path"] == "/v1/responses":
            body["max_output_tokens"] = 3
        elif each["path"] == "/v1/chat/completions" and not any(name in body for name in LENGTHS):
            body["max_tokens"] = 3
        if "previous_response_id" in body:
            body["previous_response_id"] = last_response
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        connection.request(each["method"], each["path"], json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status == 200, (each, text)
        assert '"error":{' not in text.replace('"error":null', "")
        if each["path"] == "/v1/responses" and not body.get("stream"):
            last_response = json.loads(text)["id"]
