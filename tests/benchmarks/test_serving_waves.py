"""benchmarks/serving_waves.py against a small server: its clients count what the server counts."""

from __future__ import annotations

import random

import pytest

from benchmarks import serving_load, serving_waves
from benchmarks.random_model import Shape, write_random_model


def test_events_count_whole_however_they_come():
    """Cut anywhere, or several at once."""
    event = b'data: {"choices":[{"text":"<7>"}]}\n\n'
    last = b'data: {"usage":{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}\n\ndata: [DONE]\n\n'
    data = event * 3 + last
    for size in (1, 7, 40, 1000):
        answer = serving_load.Answer(0.0)
        for at in range(0, len(data), size):
            answer.take(data[at : at + size])
        found = answer.found()
        assert (found["tokens"], found["cached"], answer.over) == (3, 2, True)
        assert sum(count for _, count in answer.gaps) + 1 == 3 or size == 1000
    with pytest.raises(SystemExit, match="without its end"):
        serving_load.Answer(0.0).found()


@pytest.mark.process
def test_waves_of_a_small_model(tmp_path):
    path = tmp_path / "tiny.gguf"
    sizes = {"layers": 1, "hidden": 128, "feed_forward": 256, "heads": 4, "kv_heads": 2, "context": 256}
    write_random_model(path, Shape(vocabulary=600, **sizes), end=True)
    found = serving_waves.measure(path, "cpu", [(3, 40, 32, 5)], "--fronts", "1")
    mixed = serving_waves.measure_mixed(path, "cpu", (3, 10, 0, 40), "--fronts", "1")
    assert [record["wave"] for record in found] == [1, 2, 3]
    assert all(record["tok_per_s"] > 0 and record["first_token_p50_ms"] > 0 for record in found)
    assert all("tok/s" in serving_waves.row(record) for record in found)
    assert [(record["wave"], record["heavy"]) for record in mixed] == [(n, h) for n in (1, 2, 3) for h in (0, 1)]
    for plain, beside in zip(mixed[::2], mixed[1::2], strict=True):
        ratio = beside["others_tok_per_s"] / plain["others_tok_per_s"]
        assert beside["others_of_plain"] == pytest.approx(ratio, abs=0.01)
        assert "others" in serving_waves.row(beside)


def test_prompts_begin_alike_and_differ():
    made = serving_waves.bodies(4, 10, 6, 3, random.Random(0), 500)
    prompts = [each["prompt"] for each in made]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4
