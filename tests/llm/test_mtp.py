"""MTP blocks: what one drafts is what NumPy computes of its tensors, and the answer is the one without drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llm_architectures import TOKENS, write_model, write_mtp_model
from safetensors.numpy import load_file

import billfish as bf
from billfish.llm import load
from billfish.llm.drafting.drafter import Controller
from billfish.llm.drafting.mtp import MtpDrafter
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp")
    write_mtp_model(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, device="cpu")


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(Controller, "length", lambda self, kind=0, others=0: self.most)


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def norm(x, weights):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + weights)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotated(x, size, base):
    """[positions, heads, head size], of which the first `size` rotate, in halves."""
    angles = np.arange(len(x))[:, None] / base ** (np.arange(0, size, 2) / size)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : size // 2], x[..., size // 2 : size]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, x[..., size:]], -1)


class NumpyMtp:
    """The block in float64, with the names of its folder."""

    def __init__(self, folder):
        self.arrays = {name: a.astype(np.float64) for name, a in load_file(folder / "model.safetensors").items()}
        self.config = json.loads((folder / "config.json").read_text())

    def run(self, tokens, hidden):
        """Hidden states behind the norm: what the head multiplies."""
        w, c = self.arrays, self.config
        get = lambda name: w[f"mtp.{name}.weight"]  # noqa: E731
        emb = norm(w["model.embed_tokens.weight"][tokens], get("pre_fc_norm_embedding"))
        x = np.concatenate([emb, norm(hidden, get("pre_fc_norm_hidden"))], -1) @ get("fc").T
        layer = lambda name: get(f"layers.0.{name}")  # noqa: E731
        n, heads, kv, size = len(x), c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        y = norm(x, layer("input_layernorm"))
        q, gate = np.split((y @ layer("self_attn.q_proj").T).reshape(n, heads, 2 * size), 2, -1)
        k = (y @ layer("self_attn.k_proj").T).reshape(n, kv, size)
        v = (y @ layer("self_attn.v_proj").T).reshape(n, kv, size)
        rope = c["rope_parameters"]
        turn = lambda each: rotated(each, int(size * rope["partial_rotary_factor"]), rope["rope_theta"])  # noqa: E731
        q, k = turn(norm(q, layer("self_attn.q_norm"))), turn(norm(k, layer("self_attn.k_norm")))
        k, v = (np.repeat(each, heads // kv, 1) for each in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size) + np.triu(np.full((n, n), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", shares, v) * sigmoid(gate)
        x = x + mixed.reshape(n, -1) @ layer("self_attn.o_proj").T
        y = norm(x, layer("post_attention_layernorm"))
        up = y @ layer("mlp.gate_proj").T
        x = x + (up * sigmoid(up) * (y @ layer("mlp.up_proj").T)) @ layer("mlp.down_proj").T
        return norm(x, get("norm"))

    def logits(self, states):
        return states @ self.arrays.get("lm_head.weight", self.arrays["model.embed_tokens.weight"]).T


def test_logits_are_those_of_numpy(folder, model):
    """In parts of any length, behind the model's hidden states and behind the block's own."""
    cache = model.cache()
    drafter = MtpDrafter(model.decoder.mtp, model.config.hidden)
    drafter.follow(cache)
    text = TOKENS[:30]
    model.decoder.run([(cache, text[:20])], "exact")
    model.decoder.run([(cache, text[20:])], "exact")
    hidden = model.decoder.normalize(cache.hidden.of(0, len(text)))
    assert np.array_equal(hidden, model.decoder.normalize(model.hidden(text)))
    oracle, mtp = NumpyMtp(folder), model.decoder.mtp
    expected = oracle.run(text[1:], hidden[:-1].astype(np.float64))
    own = mtp.cache()
    states = np.concatenate([mtp.run(own, text[1:12], hidden[:11]), mtp.run(own, text[12:], hidden[11:-1])])
    logits = oracle.logits(expected)
    assert np.abs(mtp.logits(states) - logits).max() < 2e-3 * np.abs(logits).max()
    assert np.abs(mtp.normalize(states) - expected).max() < 2e-3 * np.abs(expected).max()


def test_drafts_are_the_best_tokens_of_the_block(folder, model):
    cache, text = model.cache(), TOKENS[:20]
    drafter, oracle = MtpDrafter(model.decoder.mtp, model.config.hidden), NumpyMtp(folder)
    drafter.follow(cache)
    model.decoder.run([(cache, text)], "exact")
    hidden = model.decoder.normalize(cache.hidden.of(0, len(text))).astype(np.float64)
    sequence = [*text, 7]
    drafted = drafter.draft(sequence, 3)
    fed, states = sequence[1:], hidden
    for token in drafted:
        made = oracle.run(fed, states)
        scores = oracle.logits(made[-1])
        assert scores[token] >= scores.max() - 5e-3 * np.abs(scores).max()
        fed, states = [*fed, token], np.concatenate([states, made[-1:]])
    assert drafter.draft(sequence, 3) == drafted
    again = MtpDrafter(model.decoder.mtp, model.config.hidden)  # which has not seen the beginning in parts
    again.follow(model.cache())
    again._hidden = drafter._hidden
    assert again.draft(sequence, 3) == drafted


def test_a_long_prompt_is_read_in_pieces(model, always, monkeypatch):
    whole = model.generate(TOKENS[:30], max_tokens=16, draft="mtp")
    monkeypatch.setattr("billfish.llm.drafting.mtp.PIECE", 7)
    lengths, run = list[int](), model.decoder.mtp.run
    monkeypatch.setattr(
        model.decoder.mtp,
        "run",
        lambda cache, tokens, hidden: lengths.append(len(tokens)) or run(cache, tokens, hidden),
    )
    pieces = model.generate(TOKENS[:30], max_tokens=16, draft="mtp")
    assert lengths[:4] == [7] * 4
    assert max(lengths) == 7
    assert pieces.tokens == whole.tokens
    assert whole.drafts.drafted > pieces.drafts.drafted > 0


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("activations", ["q8", "q16", "exact"])
def test_the_answer_is_the_one_without_drafts(model, always, how, activations):
    for start in range(3):
        asked = {"max_tokens": 24, "activations": activations, **how}
        plain = model.generate(TOKENS[start : start + 12], **asked)
        drafted = model.generate(TOKENS[start : start + 12], draft="mtp", **asked)
        assert drafted.tokens == plain.tokens
        assert drafted.drafts.drafted > 0


def test_a_conversation_goes_on_behind_the_states_of_its_cache(model, always):
    cache, prompt = model.cache(), TOKENS[:20]
    first = model.generate(prompt, max_tokens=9, draft="mtp", cache=cache)
    more = [*prompt, *first.tokens, 5, 6]
    second = model.generate(more, max_tokens=9, draft="mtp", cache=cache)
    assert second.reused_tokens > 20
    assert second.tokens == model.generate(more, max_tokens=9).tokens
    expected = model.decoder.run([(model.cache(), more)], None)
    assert np.abs(cache.hidden.of(0, len(more)) - expected).max() < 1e-2 * np.abs(expected).max()


def test_a_batch_is_drafted_by_the_block(model, always):
    prompts = [TOKENS[i : i + 5 + 7 * (i % 3)] for i in range(9)]
    with Engine(model, streams=4, context=200, activations="exact", draft="mtp") as engine:
        found: list[list[int]] = [[] for _ in prompts]
        for prompt, tokens in zip(prompts, found, strict=True):
            take = lambda chosen, to=tokens: to.append(chosen.token)  # noqa: E731
            engine.submit(Request(prompt, 20), take)
        engine.close()
        assert engine.counts().drafted_tokens > 0
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == model.generate(prompt, max_tokens=20, activations="exact").tokens


def test_a_gguf_file_and_quantized_blocks(folder, tmp_path, always):
    bf.convert(folder, tmp_path / "m.gguf", "gguf")
    for model in (load(tmp_path / "m.gguf", device="cpu"), load(folder, device="cpu", quantize="q4_0", method="rtn")):
        plain = model.generate(TOKENS[:9], max_tokens=16)
        drafted = model.generate(TOKENS[:9], max_tokens=16, draft="mtp")
        assert drafted.tokens == plain.tokens
        assert drafted.drafts.drafted > 0


def test_a_file_without_a_block(tmp_path):
    write_model(tmp_path, "qwen35")
    with pytest.raises(bf.DataError, match=r"no MTP block.*ngram"):
        load(tmp_path, device="cpu").generate(TOKENS[:4], draft="mtp")


def test_a_device_that_does_not_run_blocks(folder, monkeypatch):
    model = load(folder, device="cpu")
    monkeypatch.setattr(type(model.decoder), "mtp", None)
    with pytest.raises(bf.DataError, match=r"MTP blocks.*cpu.*ngram"):
        model.generate(TOKENS[:4], draft="mtp")
