"""Which fields are honoured, ignored, refused or unknown: what real clients send, and no more than that is refused."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from llm_models import Small, write_model
from serving_http import TOOLS_TEMPLATE, Running, send, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "ab"}]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "$defs": {"Place": {"enum": ["sea", "land"]}},
}
TOOL = {"type": "function", "function": {"name": "go", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {"name": "go", "parameters": PARAMETERS, "strict": True}}
CALL = {"id": "1", "type": "function", "function": {"name": "go", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small(template=TOOLS_TEMPLATE, context=512))
    with serving(file, streams=2) as running:
        yield running


FIRST_BODIES = """
import threading
from billfish.serving.api.request_bodies import Body, parse

class Inner(Body):
    value: "hold()"

class Outer(Body):
    inner: "Inner | None" = None
    number: int = 0

inside, asked = threading.Event(), threading.Event()

def hold():  # msgspec is between the fields of Outer
    inside.set()
    asked.wait()
    threading.Event().wait(0.1)  # for the other thread
    return int

def second():
    inside.wait()
    asked.set()
    assert parse(b'{"number": 2}', Outer)[0].number == 2

threads = [threading.Thread(target=parse, args=(b'{"number": 1}', Outer)), threading.Thread(target=second)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.promise("server", "a body may be any bytes of any length")
def test_the_first_bodies_of_a_kind_may_come_at_once():
    """It was a segmentation fault of msgspec, which ended the server."""
    done = subprocess.run([sys.executable, "-c", FIRST_BODIES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def chat(server: Running, **fields: Any) -> tuple[int, dict[str, str], Any]:
    return send(server.url, CHAT, {"messages": MESSAGES, "max_tokens": 2, "seed": 1, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prediction": {"type": "x"}},
        {"safety_identifier": "x", "prompt_cache_key": "x", "verbosity": "low", "modalities": ["text"]},
        {"tools": [STRICT]},
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tools": [TOOL], "parallel_tool_calls": True, "tool_choice": "required"},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        {"top_k": -1, "top_p": 0},
        {"top_k": 10**6, "max_tokens": 10**6, "stop": ["a", "b", "c", "d", "e"]},
        {"max_tokens": -1, "max_completion_tokens": 3, "seed": -1},
        {"reasoning_effort": "low"},
        {"logprobs": True, "top_logprobs": 20},
        {"structured_outputs": {"json": {"type": "boolean"}}},
        {"guided_json": {"type": "boolean"}},
        {"messages": [{"role": "user", "content": "ab", "name": "me"}]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *MESSAGES]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
                      {"role": "tool", "tool_call_id": "1", "content": "sun"}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "a", "reasoning_content": "so"}, *MESSAGES]},
        {"ignore_eos": False, "min_tokens": 0, "mirostat": 0, "use_beam_search": False},
    ],
    ids=lambda fields: "-".join(fields),
)  # fmt: skip
def test_what_clients_send_is_served(server, fields):
    status, headers, answer = chat(server, **fields)
    assert status == 200, answer
    assert "x-billfish-ignored" not in headers


@pytest.mark.promise(
    "server", "a field that would change the answer is used, or refused by name; an unknown one is named in a header"
)
def test_unknown_fields_are_ignored_and_told(server, caplog):
    caplog.set_level(logging.WARNING, "billfish.serving")
    messages = [{"role": "user", "content": "ab", "provider_specific_fields": {"a": 1}}] * 2
    for _ in range(2):
        status, headers, _ = chat(server, temprature=1, messages=messages)
        assert status == 200
        assert set(headers["x-billfish-ignored"].split(", ")) == {"temprature", "messages[].provider_specific_fields"}
    (line,) = (message for message in caplog.messages if "temprature" in message)
    assert CHAT in line


@pytest.mark.promise(
    "server", "a field that would change the answer is used, or refused by name; an unknown one is named in a header"
)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("length_penalty", 2),
        ("ignore_eos", True),
        ("min_tokens", 5),
        ("use_beam_search", True),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(server, field, value):
    status, _, answer = chat(server, **{field: value})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, field, "unsupported_field")
    assert field in answer["error"]["message"]


def test_strict_fields_refuses_unknown_ones(tmp_path):
    file = tmp_path / "small.gguf"
    write_model(file, Small())
    with serving(file, streams=1, strict_fields=True) as server:
        status, _, answer = chat(server, temprature=1)
        assert (status, answer["error"]["param"]) == (400, "temprature")
        assert "'temperature'" in answer["error"]["message"]
        status, _, answer = chat(server, messages=[{"role": "user", "content": "a", "odd": 1}])
        assert answer["error"]["param"] == "messages[0].odd"
        assert chat(server, user="me")[0] == 200
        tool, server_of_tools = {"type": "function", "name": "go"}, {"type": "mcp", "server_label": "there"}
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [server_of_tools]}
        body = {"input": "a", "tools": [tool], "tool_choice": choice, "max_output_tokens": 1}
        status, _, answer = send(server.url, "/v1/responses", body)
        assert (status, answer.get("error")) == (200, None)


def test_lengths_and_limits_of_clients(server):
    status, _, answer = chat(server, max_tokens=0)
    assert (status, answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (
        200,
        "",
        "length",
    )
    assert answer["usage"]["completion_tokens"] == 0
    greedy = chat(server, temperature=0, max_tokens=8)[2]["choices"][0]["message"]["content"]
    assert chat(server, temperature=1, top_p=0, max_tokens=8)[2]["choices"][0]["message"]["content"] == greedy


def test_strict_functions_are_held_in_free_answers(server):
    """The end of a forced call is by a grammar, and so is what begins like one."""
    for seed in range(3):
        call = {"type": "function", "function": {"name": "go"}}
        _, _, answer = chat(server, tools=[STRICT], tool_choice=call, seed=seed, max_tokens=200)
        (made,) = answer["choices"][0]["message"]["tool_calls"]
        assert made["function"]["name"] == "go"


def test_echo_with_logprobs_scores_the_prompt(server):
    """What lm-evaluation-harness asks for."""
    import numpy as np

    body = {"prompt": "abba", "echo": True, "logprobs": 3, "max_tokens": 0}
    _, _, answer = send(server.url, COMPLETIONS, body)
    (choice,) = answer["choices"]
    tokens = server.model.tokenizer.encode("abba")
    scores = server.model.logits(tokens, activations="exact").astype(np.float64)
    logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    assert choice["text"] == "abba"
    assert choice["logprobs"]["token_logprobs"][0] is None
    found = choice["logprobs"]["token_logprobs"][1:]
    np.testing.assert_allclose(found, [logs[i, token] for i, token in enumerate(tokens[1:])], atol=1e-4)
    assert all(3 <= len(top) <= 4 for top in choice["logprobs"]["top_logprobs"][1:])
    longer = send(server.url, COMPLETIONS, body | {"max_tokens": 2, "seed": 1})[2]["choices"][0]
    assert len(longer["logprobs"]["tokens"]) == len(tokens) + 2
    assert longer["logprobs"]["tokens"][: len(tokens)] == choice["logprobs"]["tokens"]
    assert longer["logprobs"]["text_offset"][len(tokens)] == 4


def test_best_of_gives_the_most_probable_answers(server):
    body = {"prompt": "ab", "max_tokens": 6, "seed": 3, "temperature": 1, "logprobs": 0}
    _, _, answer = send(server.url, COMPLETIONS, body | {"n": 4})
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in answer["choices"]]
    _, _, best = send(server.url, COMPLETIONS, body | {"best_of": 4})
    assert [choice["text"] for choice in best["choices"]] == [answer["choices"][means.index(max(means))]["text"]]


def test_a_schema_in_completions(server):
    body = {"prompt": "ab", "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x", 5]}}}}
    _, _, answer = send(server.url, COMPLETIONS, body)
    assert answer["choices"][0]["text"] in ('"x"', "5")


def test_the_description_of_the_api(server):
    _, _, described = send(server.url, "/openapi.json", None, "GET")
    assert described["openapi"].startswith("3.")
    body = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    assert "temperature" in described["components"]["schemas"][name]["properties"]
    for path in ("/v1/messages", "/api/chat", "/v1/responses", "/tokenize"):
        assert "requestBody" in described["paths"][path]["post"]
