"""LoRA adapters of peft: logits are those of its merged model, alone and in batches with others."""

from __future__ import annotations

import json

import numpy as np
import pytest
from common import assert_same_bits
from llm_architectures import TOKENS, write_model
from llm_folders import edit
from peft_adapters import ALL, write_adapter

import billfish as bf
from billfish.llm import load
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Request

# Rotary pairs in another order in GGUF; norms of heads; one matrix of q, k and v; post-norms and windows.
TARGETS = {
    "llama3": ALL,
    "qwen3-yarn": ALL,
    "phi3": ["qkv_proj", "o_proj", "down_proj"],
    "gemma2": ALL,
}


def close(actual, expected, relative=2e-5) -> bool:
    return bool(np.abs(actual - expected).max() <= relative * np.abs(expected).max())


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_the_merged_model(name, tmp_path):
    write_model(tmp_path / "m", name)
    more = {"use_rslora": True, "alpha_pattern": {"o_proj": 3}} if name == "llama3" else {}
    expected = write_adapter(tmp_path / "m", tmp_path / "a", TARGETS[name], **more)
    bf.convert(tmp_path / "m", tmp_path / "m.gguf", "gguf")
    for path in ("m", "m.gguf"):
        model = load(tmp_path / path, device="cpu")
        before = model.logits(TOKENS)
        model.load_adapter("a", tmp_path / "a")
        assert close(model.logits(TOKENS, adapter="a"), expected)
        assert not close(expected, before, 1e-2)
        assert_same_bits(model.logits(TOKENS), before)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model with four adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    write_model(folder / "m", "llama3")
    for i in range(4):
        write_adapter(folder / "m", folder / f"a{i}", ALL if i else ["q_proj", "v_proj"], seed=i)
    model = load(folder / "m", device="cpu", quantize="q8_0")
    for i in range(4):
        model.load_adapter(f"a{i}", folder / f"a{i}")
    return model


def test_sequences_of_a_batch_have_the_bits_that_they_have_alone(adapted):
    decoder, names = adapted.decoder, [None, "a0", "a1", "a2", "a3", "a0", "a1", None]
    caches = [adapted._adapted("test", decoder.cache(), name) or decoder.cache() for name in names]
    prompts = [TOKENS[i : i + 5 + i] for i in range(8)]
    together = [decoder.run(list(zip(caches, prompts, strict=True)), "exact")]
    together.append(decoder.run([(cache, [7]) for cache in caches], "exact"))
    first = np.split(together[0], np.cumsum([len(prompt) for prompt in prompts])[:-1])
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        cache = decoder.cache()
        cache.adapt(-1 if name is None else adapted.adapters[name])
        assert close(first[i], decoder.run([(cache, prompt)], "exact"))
        assert close(together[1][i], decoder.run([(cache, [7])], "exact")[0])


def test_eight_requests_with_four_adapters_get_what_each_gets_alone(adapted):
    names, prompts = [None, "a0", "a1", "a2", "a3", "a0", "a1", None], [TOKENS[i : i + 5 + i] for i in range(8)]
    answers: dict[int, list[int]] = {i: [] for i in range(8)}
    with Engine(adapted, streams=8, context=64, activations="exact") as engine:
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            request = Request(prompt, 12, adapter=name)
            engine.submit(request, lambda chosen, i=i: answers[i].append(chosen.token))
    found = []
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        alone = adapted.generate(prompt, max_tokens=12, adapter=name, activations="exact").tokens
        assert [token for token in answers[i] if token is not None][: len(alone)] == alone
        found.append(tuple(alone))
    assert len(set(found)) > 4


def test_a_cache_serves_one_adapter_at_a_time(adapted):
    cache, prompt = adapted.cache(), TOKENS[:9]
    plain = adapted.generate(prompt, max_tokens=3, cache=cache)
    other = adapted.generate(prompt, max_tokens=3, cache=cache, adapter="a1")
    assert other.reused_tokens == 0
    assert adapted.generate(prompt, max_tokens=3, cache=cache.copy(), adapter="a1").reused_tokens == 8
    assert adapted.generate(prompt, max_tokens=3, cache=cache).tokens == plain.tokens


def test_errors(adapted, tmp_path):
    with pytest.raises(bf.DataError, match=r"adapter.*'b'.*a0"):
        adapted.generate([5], adapter="b")
    with pytest.raises(bf.ModelError, match=r"adapter_config\.json"):
        adapted.load_adapter("x", tmp_path)
    write_model(tmp_path / "m", "llama3")
    write_adapter(tmp_path / "m", tmp_path / "a", ["q_proj"])
    with pytest.raises(bf.DataError, match="name"):
        adapted.load_adapter("a0", tmp_path / "a")
    for setting, value in (("use_dora", True), ("bias", "all"), ("peft_type", "LOHA"), ("lora_alpha", "8")):
        before = json.loads((tmp_path / "a" / "adapter_config.json").read_text())[setting]
        edit(tmp_path / "a" / "adapter_config.json", **{setting: value})
        with pytest.raises(bf.ModelError, match=setting):
            adapted.load_adapter("x", tmp_path / "a")
        edit(tmp_path / "a" / "adapter_config.json", **{setting: before})
    write_adapter(tmp_path / "m", tmp_path / "head", ["lm_head", "q_proj"])
    with pytest.raises(bf.ModelError, match="lm_head"):
        adapted.load_adapter("x", tmp_path / "head")
    write_model(tmp_path / "wide", "llama3", hidden_size=128)
    write_adapter(tmp_path / "wide", tmp_path / "b", ["q_proj"])
    with pytest.raises(bf.ModelError, match="shapes"):
        adapted.load_adapter("x", tmp_path / "b")
    assert "x" not in adapted.adapters
