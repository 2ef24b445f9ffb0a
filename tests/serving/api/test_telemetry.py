"""What llama-server tells beside an answer: progress of the prefill, timings, the rendered prompt."""

from __future__ import annotations

import itertools
import json

import pytest
from llm_models import Small, write_model
from serving_http import TOOLS_TEMPLATE, events, process, send, serving

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FIELDS = {f"{kind}_{name}" for kind in ("prompt", "predicted") for name in ("n", "ms", "per_token_ms", "per_second")}
UNENDING = {"logit_bias": {"1": -100}}  # the model's end is never chosen


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    made = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(made, Small(template=TOOLS_TEMPLATE, context=2048))
    return made


@pytest.fixture(scope="module")
def server(file):
    with serving(file, streams=4, context=2048) as running:
        yield running


def asked(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0, **UNENDING, **fields}


def test_progress_from_what_is_cached_to_the_whole_prompt(server):
    long = "".join(letters for letters in map("".join, itertools.product("abcdefgh", repeat=4)))[:1600]
    body = asked(long, stream=True, return_progress=True, stream_options={"include_usage": True})
    cached = list[int]()
    for _ in range(2):
        came = events(server.url, CHAT, body)
        assert came[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
        usage = came[-1]["usage"]
        found = [event["prompt_progress"] for event in came if "prompt_progress" in event]
        assert {each["total"] for each in found} == {usage["prompt_tokens"]}
        assert {each["cache"] for each in found} == {usage["prompt_tokens_details"]["cached_tokens"]}
        processed = [each["processed"] for each in found]
        assert processed == sorted(set(processed))
        assert (processed[0], processed[-1]) == (found[0]["cache"], usage["prompt_tokens"])
        assert [each["time_ms"] for each in found] == sorted(each["time_ms"] for each in found)
        first_text = next(at for at, event in enumerate(came) if event["choices"][0]["delta"].get("content"))
        assert all("prompt_progress" not in event for event in came[first_text:])
        cached.append(found[0]["cache"])
        if not found[0]["cache"]:
            assert len(found) > 2, "the prompt is longer than what is read in one step"
    assert cached[0] == 0 < cached[1]


def test_timings_agree_with_the_usage(server):
    for more in ({}, {"stream_options": {"include_usage": True}}):
        came = events(server.url, CHAT, asked("abba baab", stream=True, timings_per_token=True, **more))
        assert "timings" not in came[0]
        assert all("timings" in event for event in came[1:])
        counts = [event["timings"]["predicted_n"] for event in came[1:]]
        assert counts == sorted(counts)
        assert counts[-1] == 6
    usage, timings = came[-1]["usage"], came[-1]["timings"]
    assert set(timings) == FIELDS | {"cache_n"}
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    for kind in ("prompt", "predicted"):
        count, milliseconds = timings[f"{kind}_n"], timings[f"{kind}_ms"]
        assert timings[f"{kind}_per_second"] == pytest.approx(1000 * count / milliseconds)
        assert timings[f"{kind}_per_token_ms"] == pytest.approx(milliseconds / count)
    whole = send(server.url, CHAT, asked("abba", timings_per_token=True, n=2))[2]
    assert whole["timings"]["predicted_n"] == 6
    assert "timings" not in send(server.url, CHAT, asked("abba", max_tokens=0, timings_per_token=True))[2]


def test_responses_tell_the_same(server):
    body = {"input": "abba " * 20, "max_output_tokens": 6, "temperature": 0, "stream": True}
    plain = events(server.url, RESPONSES, body)
    assert not any({"timings", "prompt_progress"} & set(event) for event in plain)
    came = events(server.url, RESPONSES, {**body, "return_progress": True, "timings_per_token": True})
    found = [event for event in came if "prompt_progress" in event]
    assert {event["type"] for event in found} == {"response.in_progress"}
    assert found[-1]["prompt_progress"]["processed"] == came[-1]["response"]["usage"]["input_tokens"]
    assert all("timings" in event for event in came if event["type"] == "response.output_text.delta")
    assert came[-1]["timings"]["predicted_n"] == came[-1]["response"]["usage"]["output_tokens"]
    assert [event["sequence_number"] for event in came] == list(range(len(came)))


def test_nobody_is_told_what_was_not_asked_for(server):
    answer = send(server.url, CHAT, asked("abba", return_progress=True))[2]
    came = events(server.url, CHAT, asked("abba", stream=True))
    assert not any({"timings", "prompt_progress", "__verbose"} & set(each) for each in (answer, *came))


def test_verbose_requests_get_their_prompt(server):
    rendered = send(server.url, "/apply-template", {"messages": asked("abba<|user|>")["messages"]})[2]["prompt"]
    answer = send(server.url, CHAT, asked("abba<|user|>", verbose=True))[2]
    assert answer["__verbose"] == {"prompt": rendered}
    came = events(server.url, CHAT, asked("abba<|user|>", verbose=True, stream=True))
    assert [event.get("__verbose") for event in came] == [None] * (len(came) - 1) + [answer["__verbose"]]


def test_a_verbose_server_with_a_front(file):
    with process(str(file), "--fronts", "1", "--verbose", "--streams", "1", "--device", "cpu") as (_, url):
        came = events(url, CHAT, asked("abba", stream=True, return_progress=True, timings_per_token=True))
    assert "abba" in came[-1]["__verbose"]["prompt"]
    assert json.dumps(came).count("prompt_progress") == 2
    assert came[-1]["timings"]["predicted_n"] == 6
