"""The real model: SmolLM2-135M-Instruct from PyPI, against a NumPy forward pass and what llama.cpp made of it."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from llm_oracle import Oracle, divergence
from llm_text import PROSE, samples, varied_lines

from billfish.backends.cpu import _cpu
from billfish.cli.main import main
from billfish.llm import Model, default_model, evaluate, load

RECORDED = json.loads((Path(__file__).parents[1] / "support" / "vectors" / "llm.json").read_text())
FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


@pytest.mark.full  # test_decoder.py compares small models with the oracle, and others here this one with llama.cpp
def test_exact_logits_are_those_of_a_float32_forward_pass(model):
    tokens = model.tokenizer.encode(PROSE)[:48]
    expected = Oracle(model.path, dtype=np.float32).logits(tokens)
    logits = model.logits(tokens)
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
    assert divergence(expected, logits) < 1e-9


@pytest.mark.full
def test_rounded_activations_diverge_no_more_than_those_of_llama_cpp(model):
    """The exact logits, which the last test has checked, are the truth.

    q8 rounds x as llama.cpp does, but not before the head: that is worth a quarter of the divergence. Which way a
    number just between two integers goes changes the divergence of a text by a tenth, so there are three texts.
    """
    apart = {"q8": [], "q16": []}
    predictions = RECORDED["predictions"]
    for text, recorded in zip(samples(), predictions, strict=True):
        tokens = model.tokenizer.encode(text, special=False)
        assert len(tokens) == recorded["tokens"]
        exact = model.logits(tokens)
        for activations, values in apart.items():
            rounded = model.logits(tokens, activations=activations)
            values.append(len(tokens) * divergence(exact, rounded))
    theirs = sum(recorded["tokens"] * recorded["divergence"] for recorded in predictions)
    assert sum(apart["q8"]) <= 0.8 * theirs
    assert sum(apart["q16"]) <= theirs / 1000


def test_loss_is_that_of_llama_cpp(model):
    tokens = model.tokenizer.encode(PROSE, special=False)
    found = evaluate(model, tokens, activations="q8")
    assert found.tokens == len(tokens) - 1
    assert found.loss == pytest.approx(RECORDED["predictions"][0]["loss"], abs=0.015)  # exact products: 0.004
    assert found.perplexity == pytest.approx(np.exp(found.loss))


def test_tokens_are_those_of_llama_cpp(model):
    lines = varied_lines()
    assert len(lines) == len(RECORDED["token_checksums"]) == 3000
    for line, checksum in zip(lines, RECORDED["token_checksums"], strict=True):
        tokens = model.tokenizer.encode(line, special=False)
        assert zlib.crc32(np.asarray(tokens, "<u4").tobytes()) == checksum, repr(line)
        assert model.tokenizer.decode(tokens) == line
    assert RECORDED["not_decoded_to_the_same_text"] == []


@pytest.mark.parametrize("activations", ["exact", "q16"])
def test_the_capital_of_france(model, activations):
    answer = model.generate(FRANCE, max_tokens=20, activations=activations)
    assert "".join(answer) == "The capital of France is Paris."
    assert (answer.finish_reason, answer.prompt_tokens, len(answer.tokens)) == ("stop", 37, 8)
    assert answer.prompt_rate > 0
    assert answer.generation_rate > 0


def test_same_seed_same_text_for_any_number_of_threads(model):
    before = _cpu.threads()
    texts = []
    try:
        for count in (1, 3):
            _cpu.set_threads(count)
            texts.append("".join(model.generate("Tell me a story.", max_tokens=12, temperature=0.9, seed=11)))
    finally:
        _cpu.set_threads(before)
    assert len(texts[0]) > 20
    assert texts[0] == texts[1]
    assert texts[0] != "".join(model.generate("Tell me a story.", max_tokens=12, temperature=0.9, seed=12))


def test_a_batch_gives_what_its_prompts_give_alone(model):
    prompts = [FRANCE, "Name a colour.", "Count to five."]
    settings = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "activations": "exact"}
    alone = ["".join(model.generate(prompt, **settings)) for prompt in prompts]
    assert model.generate_batch(prompts, **settings) == alone


def test_a_conversation_is_not_computed_twice(model):
    cache = model.cache()
    first = model.generate([{"role": "user", "content": FRANCE}], max_tokens=12, cache=cache)
    text = "".join(first)
    messages = [
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = model.generate(messages, max_tokens=12, cache=cache)
    continued = "".join(second)
    assert second.reused_tokens >= first.prompt_tokens + len(first.tokens) - 1
    assert continued == "".join(model.generate(messages, max_tokens=12))


def test_run_prints_one_line_of_json_and_nothing_else(capfd):
    assert main(["run", "-p", FRANCE, "--json", "--temperature", "0"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    found = json.loads(captured.out)
    assert list(found) == [
        "text",
        "reasoning_content",
        "finish_reason",
        "prompt_tokens",
        "generated_tokens",
        "prompt_tok_per_s",
        "generation_tok_per_s",
        "time_to_first_token_s",
        "drafted_tokens",
        "accepted_tokens",
        "tokens_per_step",
        "model",
        "kernels",
    ]
    assert found["text"] == "The capital of France is Paris."
    assert found["finish_reason"] == "stop"
    assert (found["prompt_tokens"], found["generated_tokens"]) == (37, 8)
    assert found["time_to_first_token_s"] > 0
    assert "q4_1" in found["kernels"]


def test_make_demo_answers_paris():
    """What `make demo` runs once it has installed things."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    command = next(line for line in makefile.splitlines() if "billfish run" in line)
    assert command == f'\t$(BIN)/billfish run --temperature 0 -p "{FRANCE}"'
    command = [sys.executable, "-m", "billfish", "run", "--temperature", "0", "-p", FRANCE]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "The capital of France is Paris.\n")
    assert "prompt 37 tokens" in ran.stderr
    assert "threads" in ran.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")
def test_memory_is_the_packed_weights_and_little_else():
    code = r"""
import re
import billfish as bf

def held():
    status = open("/proc/self/status").read()
    return [1024 * int(re.search(kind + r":\s+(\d+)", status)[1]) for kind in ("RssAnon", "RssFile")]

before = held()
model = bf.llm.load()
print(*(b - a for a, b in zip(before, held())), model.decoder.nbytes)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own, mapped, weights = map(int, ran.stdout.split())
    assert weights <= own <= 1.5 * weights  # a vocabulary of 49152 words is most of the rest
    assert mapped <= 0.25 * weights  # libraries; of the file hardly a page


def test_default_model_is_the_package():
    assert default_model().name == RECORDED["model"]
