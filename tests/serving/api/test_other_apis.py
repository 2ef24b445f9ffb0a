"""The APIs beside OpenAI's chats: /v1/responses, Anthropic's, Ollama's, tokenizing, reranking. All ask one engine."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

import pytest
from chat_templates import TEMPLATES
from llm_models import Small, write_model
from serving_http import TOOLS_TEMPLATE, events, send, serving
from serving_script import ClientAtOnce, scripted

from billfish.llm.chat_template import ChatTemplate
from billfish.llm.conversation.choice import Choice, message_of
from billfish.llm.conversation.choose_reader import reader_of
from billfish.llm.conversation.derive import derive
from billfish.llm.detokenizer import Piece
from billfish.serving.api import anthropic, ollama, openai_responses
from billfish.serving.api.answering import Format, Usage
from billfish.serving.api.chat_completions import ChatBody, ChatFormat
from billfish.serving.ipc import session

ASKED = [{"role": "user", "content": "abba"}]
PARAMETERS = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2, 3]}},
    "required": ["days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small(template=TOOLS_TEMPLATE, context=1024))
    with serving(file, streams=2) as running:
        yield running


def alone(server: Any, count: int) -> str:
    return "".join(server.model.generate(ASKED, max_tokens=count, activations="exact"))


def ok(server: Any, path: str, body: dict[str, Any]) -> Any:
    status, _, answer = send(server.url, path, body)
    assert status == 200, answer
    return answer


# ---- /v1/responses --------------------------------------------------------------------------------------------------


def test_a_response_is_the_answer_of_a_chat(server):
    found = ok(server, "/v1/responses", {"input": "abba", "max_output_tokens": 6, "temperature": 0})
    assert found["output"][0]["content"][0]["text"] == alone(server, 6)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 6
    came = events(
        server.url, "/v1/responses", {"input": ASKED, "max_output_tokens": 6, "temperature": 0, "stream": True}
    )
    assert [each["sequence_number"] for each in came] == list(range(len(came)))
    kinds = [each["type"] for each in came]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [each["delta"] for each in came if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == came[-4]["text"] == alone(server, 6)
    assert came[-1]["response"]["output"][0] == came[-2]["item"]


def test_a_response_goes_on_with_an_earlier_one(server):
    first = ok(server, "/v1/responses", {"input": "ab", "max_output_tokens": 3, "temperature": 0, "instructions": "b"})
    body = {"input": "ba", "previous_response_id": first["id"], "max_output_tokens": 3, "temperature": 0}
    second = ok(server, "/v1/responses", body)
    said = first["output"][0]["content"][0]["text"]
    spelled = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "ba"},
    ]
    alone = ok(server, "/v1/responses", {"input": spelled, "max_output_tokens": 3, "temperature": 0, "store": False})
    assert second["output"][0]["content"] == alone["output"][0]["content"]
    assert second["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    assert send(server.url, f"/v1/responses/{second['id']}", None, "GET")[2]["id"] == second["id"]
    assert send(server.url, f"/v1/responses/{alone['id']}", None, "GET")[0] == 404
    assert send(server.url, f"/v1/responses/{first['id']}", None, "DELETE")[0] == 200
    status, _, answer = send(server.url, "/v1/responses", body)
    assert (status, answer["error"]["param"]) == (404, "previous_response_id")


def test_what_fronts_keep_is_bounded(monkeypatch):
    monkeypatch.setattr(session, "MOST_KEPT", 3)
    kept = session.Kept()
    for number in range(5):
        kept.put(str(number), b"x")
    assert [kept.get(str(number)) for number in range(5)] == [None, None, b"x", b"x", b"x"]
    monkeypatch.setattr(session, "MOST_KEPT_BYTES", 10)
    kept.put("long", b"x" * 11)
    assert kept.get("long") is None
    kept.put("short", b"x" * 10)
    kept.put("short", b"y" * 10)  # counted once
    assert kept.pop("short") == b"y" * 10
    assert kept.get("short") is None


def test_calls_of_a_response(server):
    tool = {"type": "function", "name": "go", "parameters": PARAMETERS, "strict": True}
    body = {"input": "ab", "tools": [tool, {"type": "web_search"}], "tool_choice": "required", "seed": 1}
    found = ok(server, "/v1/responses", body | {"parallel_tool_calls": False})
    (call,) = found["output"]
    assert (call["type"], call["name"]) == ("function_call", "go")
    assert json.loads(call["arguments"])["days"] in (1, 2, 3)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    after = {"previous_response_id": found["id"], "input": [result], "tools": [tool], "max_output_tokens": 2}
    assert ok(server, "/v1/responses", after)["output"]
    stay, few = {**tool, "name": "stay"}, [{"type": "function", "name": "stay"}, {"type": "mcp", "server_label": "x"}]
    held = {"tools": [tool, stay], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": few}}
    found = ok(server, "/v1/responses", body | held | {"parallel_tool_calls": False})
    assert [each["name"] for each in found["output"]] == ["stay"]
    custom = {"type": "custom", "name": "patch", "description": "words"}
    choice = {"type": "custom", "name": "patch"}
    came = events(
        server.url,
        "/v1/responses",
        {"input": "ab", "tools": [custom], "tool_choice": choice, "stream": True, "seed": 1, "max_output_tokens": 100},
    )
    items = [each["item"]["type"] for each in came if each["type"] == "response.output_item.done"]
    assert items == ["custom_tool_call"]


# ---- Anthropic ------------------------------------------------------------------------------------------------------


def test_messages_of_anthropic(server):
    body = {"messages": ASKED, "max_tokens": 6, "temperature": 0, "top_k": 5, "metadata": {"user_id": "x"}}
    found = ok(server, "/v1/messages", body)
    assert found["content"] == [{"type": "text", "text": alone(server, 6)}]
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "max_tokens")
    came = events(server.url, "/v1/messages", body | {"stream": True})
    kinds = [each["type"] for each in came]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(each["delta"]["text"] for each in came if each["type"] == "content_block_delta") == alone(server, 6)
    assert came[0]["message"]["usage"]["input_tokens"] == len(server.model.encode(ASKED))
    stop = alone(server, 6)[2:4]
    for stops, told in (([stop, "no such"], ("stop_sequence", stop)), (["no such"], ("max_tokens", None))):
        found = ok(server, "/v1/messages", body | {"stop_sequences": stops})
        assert (found["stop_reason"], found["stop_sequence"]) == told
        last = events(server.url, "/v1/messages", body | {"stop_sequences": stops, "stream": True})[-2]
        assert (last["delta"]["stop_reason"], last["delta"]["stop_sequence"]) == told
    counted = ok(server, "/v1/messages/count_tokens", {"messages": ASKED})
    assert counted == {"input_tokens": len(server.model.encode(ASKED))}
    long = {"messages": [{"role": "user", "content": "b" * 1100}], "max_tokens": 1}
    status, _, answer = send(server.url, "/v1/messages", long)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")


def test_tools_of_anthropic(server):
    tool = {"name": "go", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {
        "messages": ASKED,
        "max_tokens": 200,
        "tools": [tool, {"type": "web_search_20250305", "name": "web_search"}],
    }
    found = ok(server, "/v1/messages", body | {"tool_choice": choice})
    (use,) = found["content"]
    assert (use["type"], use["name"], found["stop_reason"]) == ("tool_use", "go", "tool_use")
    came = events(server.url, "/v1/messages", body | {"tool_choice": {"type": "tool", "name": "go"}, "stream": True})
    json_text = "".join(each["delta"]["partial_json"] for each in came if each["type"] == "content_block_delta")
    assert json.loads(json_text)["days"] in (1, 2, 3)
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "sun"}]}
    thinking = {"type": "thinking", "thinking": "so", "signature": "x"}
    said = [*ASKED, {"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [result]}]
    assert ok(server, "/v1/messages", {"messages": said, "max_tokens": 2, "tools": [tool]})["content"]


def test_an_answer_goes_on_with_its_beginning(server):
    begun = [*ASKED, {"role": "assistant", "content": "ab"}]
    found = ok(server, "/v1/messages", {"messages": begun, "max_tokens": 4, "temperature": 0})
    prompt = server.model.template.render(ASKED) + "ab"
    expected = "".join(server.model.generate(prompt, raw=True, max_tokens=4, activations="exact"))
    assert found["content"][0]["text"] == expected
    same = {"messages": begun, "max_tokens": 4, "temperature": 0, "continue_final_message": True}
    assert ok(server, "/v1/chat/completions", same)["choices"][0]["message"]["content"] == expected


def test_keys_of_anthropics_clients(tmp_path):
    file = tmp_path / "small.gguf"
    write_model(file, Small())
    with serving(file, streams=1, keys=["one"]) as server:
        body = {"messages": ASKED, "max_tokens": 1}
        assert send(server.url, "/v1/messages", body, x_api_key="one")[0] == 200
        status, _, answer = send(server.url, "/v1/messages", body, x_api_key="two")
        assert (status, answer["error"]["type"]) == (401, "authentication_error")


# ---- Ollama ---------------------------------------------------------------------------------------------------------


def test_ollamas_api(server):
    greedy = {"options": {"temperature": 0, "num_predict": 6, "num_ctx": 100}}
    lines = events(server.url, "/api/chat", {"model": "small", "messages": ASKED, **greedy})
    assert "".join(each["message"]["content"] for each in lines) == alone(server, 6)
    assert [each["done"] for each in lines][-2:] == [False, True]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", 6)
    whole = ok(server, "/api/generate", {"model": "small:latest", "prompt": "abba", "stream": False, **greedy})
    assert whole["response"] == alone(server, 6)
    for each in (lines[-1], whole):  # of which clients make tokens per second
        prompt, answer, total = (each[f"{name}_duration"] for name in ("prompt_eval", "eval", "total"))
        assert min(prompt, answer) > 1
        assert prompt + answer <= total
    raw = ok(server, "/api/generate", {"prompt": "abba", "raw": True, "stream": False, **greedy})
    assert raw["response"] == "".join(server.model.generate("abba", raw=True, max_tokens=6, activations="exact"))
    made = ok(server, "/api/chat", {"messages": ASKED, "format": PARAMETERS, "stream": False})
    assert json.loads(made["message"]["content"])["days"] in (1, 2, 3)
    made = ok(server, "/api/generate", {"prompt": "abba", "raw": True, "format": PARAMETERS, "stream": False})
    assert json.loads(made["response"])["days"] in (1, 2, 3)
    assert ok(server, "/api/chat", {"model": "small", "messages": [], "stream": False})["done_reason"] == "load"
    assert len(ok(server, "/api/embed", {"model": "small", "input": ["a", "b"]})["embeddings"]) == 2
    assert len(ok(server, "/api/embeddings", {"model": "small", "prompt": "a"})["embedding"]) == 64
    for path in ("/api/tags", "/api/ps"):
        (listed,) = send(server.url, path, None, "GET")[2]["models"]
        assert listed["name"] == "small"
        assert len(listed["digest"]) == 64  # of which `ollama list` takes 12, and fails if there are fewer
    assert "tools" in ok(server, "/api/show", {"model": "small"})["capabilities"]
    status, _, answer = send(server.url, "/api/chat", {"messages": [{"role": "poet"}]})
    assert (status, set(answer)) == (400, {"error"})


def test_log_probabilities_are_those_of_a_chat(server):
    how = {"temperature": 0, "max_tokens": 6}
    chat = ok(server, "/v1/chat/completions", {"messages": ASKED, "logprobs": True, "top_logprobs": 2, **how})
    expected = chat["choices"][0]["logprobs"]["content"]
    asked = {"input": "abba", "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2}
    assert ok(server, "/v1/responses", asked)["output"][0]["content"][0]["logprobs"] == expected
    came = events(server.url, "/v1/responses", {**asked, "stream": True})
    told = [entry for each in came if each["type"] == "response.output_text.delta" for entry in each["logprobs"]]
    assert told == expected
    assert came[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected
    included = {"input": "abba", "max_output_tokens": 6, "temperature": 0, "include": ["message.output_text.logprobs"]}
    alone = ok(server, "/v1/responses", included)["output"][0]["content"][0]["logprobs"]
    assert [each["logprob"] for each in alone] == [each["logprob"] for each in expected]
    options = {"options": {"temperature": 0, "num_predict": 6}, "logprobs": True, "top_logprobs": 2}
    assert ok(server, "/api/chat", {"messages": ASKED, "stream": False, **options})["logprobs"] == expected
    lines = events(server.url, "/api/chat", {"messages": ASKED, **options})
    assert [entry for each in lines for entry in each.get("logprobs", ())] == expected


# ---- tokens and documents -------------------------------------------------------------------------------------------


def test_tokens_and_templates(server):
    tokenizer = server.model.tokenizer
    assert ok(server, "/tokenize", {"content": "ab<|user|>"})["tokens"] == tokenizer.encode("ab<|user|>", start=False)
    plain = ok(server, "/tokenize", {"content": "<|user|>", "parse_special": False})
    assert plain["tokens"] == tokenizer.encode("<|user|>", special=False, start=False)
    assert ok(server, "/tokenize", {"content": "ab", "add_special": True})["tokens"] == tokenizer.encode("ab")
    assert ok(server, "/tokenize", {"prompt": "ab"})["tokens"] == tokenizer.encode("ab")
    pieces = ok(server, "/tokenize", {"content": "ab", "with_pieces": True})["tokens"]
    assert [each["piece"] for each in pieces] == ["ab"]
    assert ok(server, "/tokenize", {"messages": ASKED})["count"] == len(server.model.encode(ASKED))
    assert ok(server, "/detokenize", {"tokens": tokenizer.encode("abba")})["content"] == "abba"
    assert send(server.url, "/detokenize", {"tokens": [999]})[0] == 400
    rendered = server.model.template.render(ASKED)
    assert ok(server, "/apply-template", {"messages": ASKED})["prompt"] == rendered
    unbegun = ok(server, "/apply-template", {"messages": ASKED, "add_generation_prompt": False})["prompt"]
    assert unbegun == rendered.removesuffix("<|assistant|>")
    counted = ok(server, "/v1/chat/completions/input_tokens", {"messages": ASKED})
    assert counted == {"input_tokens": len(server.model.encode(ASKED))}
    both = {"messages": [*ASKED, {"role": "assistant", "content": "a"}], "max_tokens": 1}
    both |= {"add_generation_prompt": True, "continue_final_message": True}
    assert send(server.url, "/v1/chat/completions", both)[0] == 400


def test_paths_without_a_version(server):
    body = {"messages": ASKED, "max_tokens": 3, "temperature": 0}
    short, whole = ok(server, "/chat/completions", body), ok(server, "/v1/chat/completions", body)
    assert short["choices"] == whole["choices"]
    assert short["system_fingerprint"] == whole["system_fingerprint"]
    assert send(server.url, "/v2/chat/completions", body)[0] == 404


def test_texts_among_tokens_and_in_objects(server):
    """As llama.cpp's server takes them."""
    encode = server.model.tokenizer.encode
    forms = [
        "abba",
        {"prompt_string": "abba"},
        {"content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "ba"}]},
    ]
    expected, *others = (each["embedding"] for each in ok(server, "/v1/embeddings", {"input": forms})["data"])
    assert others == [expected, expected]
    mixed = [*encode("ab"), "ba", *encode("ab", start=False)]
    tokens = [*encode("ab"), *encode("ba", start=False), *encode("ab", start=False)]
    found = [ok(server, "/v1/embeddings", {"input": each})["data"][0]["embedding"] for each in (mixed, tokens)]
    assert found[0] == found[1]
    for wrong in ({"content": "ab"}, {"content": [{"type": "image_url"}]}, {"other": "ab"}, {"prompt_string": 1}, {}):
        assert send(server.url, "/v1/embeddings", {"input": wrong})[0] == 400


@pytest.mark.parametrize(
    ("begins", "off"),
    [
        ("<think>\n", "</think>"),  # a template that always thinks: its thought is closed
        ("{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}", ""),  # it has a switch
        ("", "<think></think>"),  # the model begins thoughts itself
    ],
)
def test_thoughts_are_off_with_any_template(tmp_path, begins, off):
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{% if message.reasoning_content %}<think>"
        "{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>" + begins + "{% endif %}"
    )
    file = tmp_path / "small.gguf"
    write_model(file, Small(template=template, context=256))
    with serving(file, streams=1) as server:
        kept = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
        expected = server.model.template.render(ASKED, **kept) + off
        server.service.effort = "none"  # --reasoning-effort
        assert ok(server, "/apply-template", {"messages": ASKED})["prompt"] == expected
        answer = ok(server, "/v1/chat/completions", {"messages": ASKED, "max_tokens": 4, "temperature": 0})
        message = answer["choices"][0]["message"]
        assert "reasoning_content" not in message


GBNF = 'root ::= "ab"{2,2} word+\nword ::= "b" | "c"{3}\n'


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"grammar": GBNF}),
        ("/v1/chat/completions", {"guided_grammar": 'start: "ab" "ab" /[bc]{3}/'}),
        ("/v1/chat/completions", {"structured_outputs": {"grammar": GBNF}}),
        ("/v1/completions", {"grammar": GBNF}),
    ],
)
def test_grammars_of_llama_cpp_and_vllm(server, path, fields):
    asked = {"messages": ASKED} if "chat" in path else {"prompt": "abba"}
    answer = ok(server, path, {**asked, **fields, "max_tokens": 40, "seed": 1})
    text = answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
    assert re.fullmatch("(ab){2}(b|c{3})+c{0,2}|(ab){2}[bc]{3}", text)


@pytest.mark.parametrize(
    "grammar",
    ["root ::= this is (not valid", "root ::= other", "root ::= " + "(" * 20_000, 'root ::= "a' + "(" * 70_000],
)
def test_grammars_that_cannot_be_used(server, grammar):
    for length in (0, 3):
        status, _, answer = send(
            server.url, "/v1/chat/completions", {"messages": ASKED, "grammar": grammar, "max_tokens": length}
        )
        assert (status, answer["error"]["param"]) == (400, "grammar")
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "grammar": GBNF}
    assert send(server.url, "/v1/chat/completions", {"messages": ASKED, **tools})[0] == 400


def test_a_schema_is_compiled_for_no_token(server):
    body = {
        "messages": ASKED,
        "max_tokens": 0,
        "response_format": {"type": "json_object", "schema": {"type": "hiccup"}},
    }
    assert send(server.url, "/v1/chat/completions", body)[0] == 400
    body["response_format"]["schema"]["type"] = "integer"
    assert ok(server, "/v1/chat/completions", body)["usage"]["completion_tokens"] == 0


def test_a_day_for_templates_that_want_one(tmp_path):
    file = tmp_path / "small.gguf"
    write_model(file, Small(template="{{ date_string }} {{ messages[0].content }}", context=256))
    with serving(file, streams=1) as server:
        prompt = ok(server, "/apply-template", {"messages": ASKED})["prompt"]
        given = {"messages": ASKED, "chat_template_kwargs": {"date_string": "then"}}
        assert ok(server, "/apply-template", given)["prompt"].startswith("then ")
    today = date.today()
    assert prompt == f"{today:%d %b %Y} abba"


def test_the_reason_comes_once_and_last_when_all_tokens_come_at_once(tmp_path):
    file = tmp_path / "small.gguf"
    write_model(file, Small(template=TOOLS_TEMPLATE, context=256))
    for path, fields in (("/v1/chat/completions", {"messages": ASKED}), ("/v1/completions", {"prompt": "ab"})):
        with serving(file, streams=1, client=ClientAtOnce) as server:
            choices = [event["choices"][0] for event in events(server.url, path, {**fields, "stream": True})]
        said = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        assert (said, choices[-1]["finish_reason"]) == ("abba", "stop")
        assert {choice["finish_reason"] for choice in choices[:-1]} == {None}


def test_functions_for_a_template_that_reads_no_tools(tmp_path):
    """As Firefunction's."""
    file = tmp_path / "small.gguf"
    source = "{{ 'Call: ' + functions + ' on ' + datetime }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    write_model(file, Small(template=source, context=256))
    tool = {"type": "function", "function": {"name": "clock"}}
    with serving(file, streams=1) as server:
        without = ok(server, "/apply-template", {"messages": ASKED})["prompt"]
        told = ok(server, "/apply-template", {"messages": ASKED, "tools": [tool]})["prompt"]
    today = f"{date.today():%b %d %Y}"
    assert without == f"Call:  on {today}[abba]"
    functions = json.loads(told.removeprefix("Call: ").partition(" on ")[0])
    assert [each["function"]["name"] for each in functions] == ["clock"]


def test_documents_are_ranked_by_their_vectors(server):
    documents = ["ab", "something else", {"text": "abba ba"}]
    found = ok(server, "/v1/rerank", {"query": "ab", "documents": documents, "top_n": 2})
    assert len(found["results"]) == 2
    assert found["results"][0]["index"] == 0
    assert found["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-3)
    # As text-embeddings-inference has it.
    listed = ok(server, "/rerank", {"query": "ab", "texts": ["ab", "something else"], "return_text": True})
    assert listed[0] == {"index": 0, "score": pytest.approx(1, abs=1e-3), "text": "ab"}


# ---- thoughts, calls and text in each API ---------------------------------------------------------------------------


class Server:
    """As much of a service as formats need."""

    name, verbose = "m", False

    class client:
        def keep(id: str, data: bytes) -> None:
            assert isinstance(data, bytes)

    class model:
        class tokenizer:
            pieces: list[str] = []


def test_functions_of_a_namespace(tmp_path):
    """Codex offers them. The model calls them by both names, and a client gets the names apart."""
    inner = [{"type": "function", "name": "go", "parameters": PARAMETERS}]
    tools = [{"type": "namespace", "name": "space", "tools": inner}, *inner]
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return '<tool_call>\n{"name": "space__go", "arguments": {"days": 2}}\n</tool_call>'

    with scripted(tmp_path, script) as server:
        (item,) = ok(server, "/v1/responses", {"input": "Go.", "tools": tools, "store": False})["output"]
        assert (item["type"], item["name"], item["namespace"]) == ("function_call", "go", "space")
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "gone"}
        events(server.url, "/v1/responses", {"input": [item, result], "tools": tools, "stream": True})
        twice = send(server.url, "/v1/responses", {"input": "Go.", "tools": [tools[0], tools[0]]})
    assert '"name": "space__go", "arguments": {"days": 2}' in prompts[1]
    assert (twice[0], "space__go" in twice[2]["error"]["message"]) == (400, True)


def test_a_system_message_goes_where_the_template_wants_it(tmp_path):
    """Claude Code sends some behind the user's first message, which published templates refuse."""
    late = (
        "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('late') }}{% endif %}"
    )
    file = tmp_path / "small.gguf"
    write_model(file, Small(template=late + TEMPLATES["qwen3"], context=512))
    messages = [*ASKED, {"role": "system", "content": "Agents: none."}]
    with serving(file, streams=1) as server:
        body = {"system": "Be brief.", "messages": messages, "max_tokens": 2}
        assert ok(server, "/v1/messages", body)["content"]
        told = [{"role": "system", "content": "Be brief."}, *messages]
        prompt = ok(server, "/apply-template", {"messages": told})["prompt"]
    assert prompt.index("Be brief.\n\nAgents: none.") < prompt.index("abba")


SAID = '<think>\nmaybe\n</think>\n\nYes.\n<tool_call>\n{"name": "go", "arguments": {"days": 1}}\n</tool_call>'


def formatted(format: Format, size: int) -> tuple[list[Any], Any]:
    """The events of a stream, and the answer in one piece."""
    syntax = derive(ChatTemplate(TEMPLATES["qwen3"]))
    choice = Choice(reader_of(syntax, "", {"go": PARAMETERS}))
    usage, data = Usage(5, 0, 9, 2), format.begin([choice], 5)
    for start in range(0, len(SAID), size):
        events = choice.take(Piece(SAID[start : start + size]))
        data += format.step(0, choice, events, ())
    data += format.step(0, choice, choice.take(Piece("", finished="stop")), ()) + format.end([choice], usage)
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")], choice


def test_every_api_tells_thoughts_text_and_calls():
    service: Any = Server()
    for size in (1, 5, 1000):
        came, choice = formatted(ChatFormat(service, ChatBody(messages=[], stream=True), False), size)
        deltas = [each["choices"][0]["delta"] for each in came]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "maybe"
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "maybe"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(call["function"].get("arguments", "") for call in calls) == '{"days": 1}'
        assert came[-1]["choices"][0]["finish_reason"] == "tool_calls"
        message = message_of(choice.message)
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "maybe")

        came, _ = formatted(anthropic.MessagesFormat(service, True), size)
        blocks = [each["content_block"]["type"] for each in came if each["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use"]
        texts = {"thinking": "", "text": "", "partial_json": ""}
        for each in came:
            if each["type"] == "content_block_delta":
                for key in texts:
                    texts[key] += each["delta"].get(key, "")
        assert texts == {"thinking": "maybe", "text": "Yes.", "partial_json": '{"days": 1}'}
        assert came[-2]["delta"]["stop_reason"] == "tool_use"

        body = openai_responses.ResponsesBody(input="a")
        came, choice = formatted(openai_responses.ResponsesFormat(service, body, [], {}), size)
        items = came[-1]["response"]["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        assert items[0]["content"] == [{"type": "reasoning_text", "text": "maybe"}]
        assert items[2]["arguments"] == '{"days": 1}'
        whole: Any = openai_responses.ResponsesFormat(service, body, [], {}).whole([choice], Usage(5, 0, 9, 2))
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]

        came, _ = formatted(ollama.OllamaFormat(service, ollama.ChatBody(), chat=True), size)
        assert "".join(each["message"].get("thinking", "") for each in came) == "maybe"
        (calls,) = (each["message"]["tool_calls"] for each in came if "tool_calls" in each["message"])
        assert calls[0]["function"]["arguments"] == {"days": 1}


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "smollm2", "glm4.6", "gpt-oss", "lfm2", "mistral-nemo"])
def test_tools_with_the_template_of_each_family(tmp_path, name):
    """A conversation with calls and results, and a call that must come, whatever the template knows of functions."""
    file = tmp_path / "small.gguf"
    write_model(file, Small(template=TEMPLATES[name], context=1024))
    call = {"id": "123456789", "type": "function", "function": {"name": "go", "arguments": '{"days": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "sun"},
    ]
    tools = [{"type": "function", "function": {"name": "go", "parameters": PARAMETERS}}]
    with serving(file, streams=1) as server:
        body = {"messages": messages, "tools": tools, "max_tokens": 2, "temperature": 0}
        assert ok(server, "/v1/chat/completions", body)["choices"]
        prompt = ok(server, "/apply-template", {"messages": messages, "tools": tools})["prompt"]
        assert [word for word in ("Be brief.", "abba", "go", "days", "sun") if word not in prompt] == []
        if name == "gpt-oss":  # whose control tokens the small vocabulary does not have
            return
        body = {"messages": ASKED, "tools": tools, "tool_choice": "required", "reasoning_effort": "none", "seed": 2}
        body |= {"parallel_tool_calls": False, "max_tokens": 500, "logit_bias": {"1": -100}}
        (made,) = ok(server, "/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"])["days"] in (1, 2, 3)
