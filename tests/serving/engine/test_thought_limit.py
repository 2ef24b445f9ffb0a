"""Budgets of thoughts: how many tokens they have, and what comes behind them, in Python and in every API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from chat_templates import TEMPLATES
from llm_models import Small, write_model
from serving_http import Running, send, serving

import billfish as bf
from billfish.checkpoints.tokenizer.tokenizer import CONTROL, NORMAL
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.conversation.chat import Conversation, Turn, prepare_chat
from billfish.llm.conversation.derive import derive
from billfish.llm.sampler import Sampling
from billfish.llm.thought_limit import ThoughtLimit, ThoughtMatcher
from billfish.serving.engine.requests import Request
from billfish.serving.ipc.messages import packed, unpacked

USER = [{"role": "user", "content": "abba"}]
THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.reasoning_content %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
CLOSING = b"\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a random model, whose thoughts never end."""
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small(template=THINKING, context=512))
    with serving(file, streams=2) as running:
        yield running


def ok(server: Running, path: str, body: dict[str, Any]) -> Any:
    status, _, answer = send(server.url, path, body)
    assert status == 200, answer
    return answer


def written(model: bf.llm.Model, tokens: list[int]) -> bytes:
    return b"".join(map(model.tokenizer.piece_bytes, tokens))


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_ends_behind_its_budget(server, budget):
    model, how = server.model, {"temperature": 0, "max_tokens": 60, "activations": "exact"}
    free = model.chat(USER, **how).generation.tokens
    assert model.chat(USER, **how, reasoning_budget=-1).generation.tokens == free
    answer = model.chat(USER, **how, reasoning_budget=budget)
    before, closed, after = written(model, answer.generation.tokens).partition(CLOSING)
    assert closed
    assert after
    more = len(before) - len(written(model, free[:budget]))
    assert before == written(model, free)[: len(before)]
    assert 0 <= more <= 3  # the rest of a character
    assert answer.content
    assert bool(answer.reasoning_content) == bool(before.strip())


def test_json_comes_behind_the_budget(server):
    format = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    answer = server.model.chat(USER, response_format=format, reasoning_budget=3, max_tokens=100, temperature=0)
    assert set(json.loads(answer.content)) == {"on"}
    assert answer.reasoning_content


def test_drafts_do_not_change_where_a_thought_ends(server):
    how = {
        "temperature": 0,
        "max_tokens": 60,
        "activations": "exact",
        "logit_bias": {70: 100.0},
        "reasoning_budget": 20,
    }
    drafted = server.model.chat(USER, **how, draft="ngram").generation
    assert drafted.tokens == server.model.chat(USER, **how).generation.tokens
    assert drafted.drafts.drafted > 0
    assert CLOSING in written(server.model, drafted.tokens)


def test_every_api_has_a_budget(server):
    chat = {"messages": USER, "max_tokens": 60, "temperature": 0}
    expected = server.model.chat(USER, max_tokens=60, temperature=0, reasoning_budget=5, activations="exact")
    for field in ("thinking_budget_tokens", "thinking_token_budget"):
        message = ok(server, "/v1/chat/completions", {**chat, field: 5})["choices"][0]["message"]
        assert message["content"] == expected.content
        assert message["reasoning_content"] == expected.reasoning_content
    thinking = {"type": "enabled", "budget_tokens": 5}
    blocks = ok(server, "/v1/messages", {**chat, "thinking": thinking})["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert blocks[1]["text"] == expected.content
    free = ok(server, "/v1/chat/completions", chat)["choices"][0]["message"]
    assert free["content"] in (None, "")
    server.service.budget = 5  # --reasoning-budget
    try:
        assert ok(server, "/v1/chat/completions", chat)["choices"][0]["message"]["content"] == expected.content
        response = ok(server, "/v1/responses", {"input": "abba", "max_output_tokens": 60, "temperature": 0})
        assert response["output"][-1]["content"][0]["text"] == expected.content
        told = ok(server, "/v1/chat/completions", {**chat, "thinking_budget_tokens": -1})["choices"][0]["message"]
        assert told == free
    finally:
        server.service.budget = None
    status, _, answer = send(server.url, "/v1/chat/completions", {**chat, "thinking_budget_tokens": -2})
    assert (status, answer["error"]["param"]) == (400, "thinking_budget_tokens")


def test_a_budget_goes_to_the_engine():
    limit = ThoughtLimit(3, True, "<think>", "</think>", [5, 6], again=True, avoided=4)
    request = Request([1, 2], 9, Sampling(0.5), thought=limit)
    assert unpacked(msgspec.msgpack.decode(msgspec.msgpack.encode(packed(request)))) == request


class Words:
    """A tokenizer of a few words; those in <| |> are control tokens."""

    def __init__(self, *words: str) -> None:
        self.pieces = [*words, *map(chr, range(97, 123)), "ä"]
        self.kinds = [CONTROL if word.startswith("<|") else NORMAL for word in self.pieces]

    def piece_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode() if self.kinds[token] != CONTROL else b""

    def encode(self, text: str, **options: bool) -> list[int]:
        found = []
        while text:
            token = next(i for i, piece in enumerate(self.pieces) if text.startswith(piece))
            found.append(token)
            text = text[len(self.pieces[token]) :]
        return found


def told(words: Words, limit: ThoughtLimit, text: str) -> tuple[ThoughtMatcher, list[str]]:
    """The matcher behind a text, and the text with whatever was forced in it, as words."""
    matcher, said = limit.matcher(words, len(words.pieces), None), []

    def forced() -> None:
        while sum(allowed := matcher.allowed()) == 1:
            said.append(f"[{words.pieces[allowed.argmax()]}]")
            matcher.take(int(allowed.argmax()))

    forced()
    for token in words.encode(text):
        assert matcher.allowed()[token], (said, words.pieces[token])
        said.append(words.pieces[token])
        matcher.take(token)
        forced()
    return matcher, said


def test_a_thought_that_the_model_begins():
    words = Words("<think>", "</think>", "\n", " ")
    limit = ThoughtLimit(2, False, "<think>", "</think>", words.encode("\n</think>\n"))
    for text, expected in (
        ("<think>abcd", "<think> a b [\n] [</think>] [\n] c d"),
        ("\n<think>a</think>abcd", "\n <think> a </think> a b c d"),
        ("abc<think>abcd", "a b c <think> a b c d"),  # it is text
        (" <think>abc<think>d", "  <think> a b [\n] [</think>] [\n] c <think> d"),
    ):
        assert " ".join(told(words, limit, text)[1]) == expected, text


def test_a_thought_is_spelt_in_letters():
    """Where marks are several tokens, and where a character is."""
    words = Words()
    words.pieces += list("<>/\n")
    words.kinds += [NORMAL] * 4
    limit = ThoughtLimit(12, True, "<a>", "</a>", words.encode("</a>"))
    assert " ".join(told(words, limit, "bc</a>defghijklmnop")[1]) == "b c < / a > d e f g h i j k l m n o p"
    halves = Words()
    halves.piece_bytes = lambda token: b"\xc3" if token == 0 else b"\xa4"  # type: ignore[method-assign]
    matcher = ThoughtLimit(1, True, "<a>", "</a>", [7]).matcher(halves, 27, None)
    matcher.take(0)
    assert matcher.allowed().all()
    matcher.take(1)
    assert matcher.allowed().nonzero()[0].tolist() == [7]


def test_channels_of_harmony():
    """Several thoughts share the budget, and behind it none begins."""
    words = Words("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "assistant", "analysis", "final")
    limit = ThoughtLimit(
        3,
        False,
        "<|channel|>analysis<|message|>",
        "<|end|>",
        words.encode("<|end|><|start|>assistant<|channel|>"),
        again=True,
        avoided=5,
    )
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
    matcher, said = told(words, limit, text)
    assert said[-4:] == ["[<|end|>]", "[<|start|>]", "[assistant]", "[<|channel|>]"]
    assert matcher.allowed().tolist() == [token != 5 for token in range(len(words.pieces))]
    matcher.take(6)
    assert matcher.allowed().all()


def test_prompts_without_a_thought_have_no_limit():
    qwen = derive(ChatTemplate(TEMPLATES["qwen3"], bos_token="<s>", eos_token="</s>"))
    assert qwen.thought is not None

    class Texts:
        template, syntax = ChatTemplate(TEMPLATES["qwen3"], bos_token="<s>", eos_token="</s>"), qwen
        control_tokens, marks = dict[str, int](), frozenset[int]()

        class control_names:
            @staticmethod
            def guarded(value: Any) -> Any:
                return value

        @staticmethod
        def tokens(mark: str) -> list[int]:
            return list(mark.encode())

    for more, limited in (
        ({"thought_budget": 4}, True),
        ({}, False),
        ({"thought_budget": -1}, False),
        ({"thought_budget": 4, "effort": "none"}, False),
    ):
        made = prepare_chat(Texts, Conversation([Turn("user", "a")], **more))  # type: ignore[arg-type]
        assert (made.thought is not None) == limited, more
        if made.thought is not None:
            assert (made.thought.start, made.thought.end, made.thought.opened) == ("<think>", "</think>", False)
            assert bytes(made.thought.closing).strip() == b"</think>"
