"""The decoder's kernels on a GPU, against a forward pass in float64: prompts, batches of texts, graphs.

Without an NVIDIA GPU these are skipped; that every kernel compiles, and does not spill, is in test_cuda.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_late import check_late_rows

import billfish as bf
from billfish.backends.cuda.attention import DeviceAttention, HeadSizes, PagePlace, Rotation
from billfish.backends.cuda.block import DeviceBlock
from billfish.backends.cuda.decoder import DeviceDecoder, captured
from billfish.backends.cuda.dense import DeviceDense
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer, Stream, check, copy_in, copy_out, current, device, driver
from billfish.backends.cuda.embedding import DeviceEmbedding, RopeTables
from billfish.backends.cuda.launcher import DeviceMatrix, sent
from billfish.backends.cuda.step_memory import CHOICE, Batch
from billfish.core.errors import BackendUnavailable
from billfish.llm.sampler import Sampling, choose_token

try:
    device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

LENGTHS = (3, 130, 64, 65)  # of the prompts
MORE = 12  # tokens that follow
PAGES = 8


@dataclass(frozen=True)
class Shape:
    """The sizes of a model whose layers are alike."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    epsilon: float
    frequencies: tuple[float, ...]
    adjacent: bool = False
    gate: str = "silu"
    head_norms: bool = False
    embedding_scale: float = 1.0

    @property
    def sizes(self) -> HeadSizes:
        return HeadSizes(self.heads, self.kv_heads, self.head_size)

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def page_bytes(self) -> int:
        return self.layers * self.sizes.page_bytes


class Weights(NamedTuple):
    attention_norm: Any
    feed_forward_norm: Any
    q_norm: Any
    k_norm: Any
    bias: Any
    qkv: bf.QuantizedTensor
    o: bf.QuantizedTensor
    gate_up: bf.QuantizedTensor
    down: bf.QuantizedTensor


class Model:
    """Random weights, on the GPU and as numbers."""

    def __init__(self, shape: Shape, format: str, bias: bool, bfloat16: bool) -> None:
        rng = np.random.default_rng(0)
        self.shape = s = shape

        def matrix(n: int, k: int, size: float = 1.0) -> bf.QuantizedTensor:
            w = rng.standard_normal((n, k)) * size / np.sqrt(k)
            return bf.quantize(w.astype(np.float32), format, method="rtn")

        def norm(n: int) -> np.ndarray:
            return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

        self.layers = [
            Weights(
                norm(s.hidden),
                norm(s.hidden),
                *((norm(s.head_size), norm(s.head_size)) if s.head_norms else (None, None)),
                rng.standard_normal(s.qkv).astype(np.float32) if bias else None,
                matrix(s.qkv, s.hidden),
                matrix(s.hidden, s.heads * s.head_size),
                matrix(2 * s.feed_forward, s.hidden),
                matrix(s.hidden, s.feed_forward),
            )
            for _ in range(s.layers)
        ]
        self.embedding, self.head = matrix(s.vocabulary, s.hidden, 8.0), matrix(s.vocabulary, s.hidden)
        self.last_norm = norm(s.hidden)
        rotation = Rotation(0, len(s.frequencies), len(s.frequencies), s.adjacent)
        blocks = []
        for i, w in enumerate(self.layers):
            norms = [None if v is None else sent(v, 0) for v in w[:5]]
            qkv, o, gate_up, down = (DeviceWeights.pack(q, "cpu") for q in w[5:])
            attention = DeviceAttention(
                s.sizes,
                (DeviceMatrix(qkv, norms[4]),),
                DeviceMatrix(o),
                PagePlace(0, i * s.sizes.page_bytes),
                s.head_size**-0.5,
                rotation,
                q_norm=norms[2],
                k_norm=norms[3],
            )
            dense = DeviceDense(s.feed_forward, (DeviceMatrix(gate_up),), DeviceMatrix(down), s.gate)
            blocks.append(DeviceBlock(attention, dense, norms[0], norms[1]))
        embedding, head = (DeviceWeights.pack(q, "cpu") for q in (self.embedding, self.head))
        angles = np.asarray(s.frequencies, np.float64)
        ropes = RopeTables(len(angles), sent(angles, 0), sent(np.ones_like(angles), 0))
        self.decoder = DeviceDecoder(
            blocks,
            DeviceEmbedding(embedding, ropes, s.embedding_scale),
            DeviceMatrix(head),
            sent(self.last_norm, 0),
            epsilon=s.epsilon,
            bfloat16=bfloat16,
        )

    def scores(self, tokens: np.ndarray) -> np.ndarray:
        """[tokens, vocabulary], in float64."""
        s, t = self.shape, len(tokens)
        positions, frequencies = np.arange(t), np.asarray(s.frequencies)
        x = bf.dequantize(self.embedding).astype(np.float64)[tokens] * s.embedding_scale
        for w in self.layers:
            qkv, o, gate_up, down = (bf.dequantize(q).astype(np.float64) for q in w[5:])
            h = normalized(x, w.attention_norm, s.epsilon) @ qkv.T + (0 if w.bias is None else w.bias)
            q, k, v = np.split(h.reshape(t, -1, s.head_size), [s.heads, s.heads + s.kv_heads], axis=1)
            if s.head_norms:
                q, k = normalized(q, w.q_norm, s.epsilon), normalized(k, w.k_norm, s.epsilon)
            q, k = (rotated(v, positions[:, None] * frequencies, s.adjacent) for v in (q, k))
            k, v = (np.repeat(each, s.sizes.group, axis=1) for each in (k, v))
            p = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(s.head_size)
            p = np.exp(np.where(positions > positions[:, None], -np.inf, p - p.max(axis=-1, keepdims=True)))
            p /= p.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", p, v).reshape(t, -1) @ o.T
            h = (normalized(x, w.feed_forward_norm, s.epsilon) @ gate_up.T).reshape(t, -1, 2, 8)
            gate, up = h[:, :, 0].reshape(t, -1), h[:, :, 1].reshape(t, -1)
            if s.gate == "gelu":
                opened = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            else:
                opened = gate / (1 + np.exp(-gate))
            x = x + (opened * up) @ down.T
        return normalized(x, self.last_norm, s.epsilon) @ bf.dequantize(self.head).astype(np.float64).T


def normalized(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def rotated(x: np.ndarray, angles: np.ndarray, adjacent: bool) -> np.ndarray:
    """x [tokens, heads, head size]; angles [tokens, pairs]."""
    pairs = angles.shape[1]
    first = np.arange(pairs) * (2 if adjacent else 1)
    second = first + (1 if adjacent else pairs)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    y = x.copy()
    y[..., first] = x[..., first] * cosine - x[..., second] * sine
    y[..., second] = x[..., first] * sine + x[..., second] * cosine
    return y


def frequencies(count: int) -> tuple[float, ...]:
    return tuple(10000.0 ** -(np.arange(count) / count))


SHAPE = Shape(2, 256, 8, 2, 64, 512, 1000, 1e-5, frequencies(32), adjacent=True)
CASES = {
    "llama": (SHAPE, "q4_0", False, False),
    "qwen3": (
        replace(SHAPE, hidden=512, heads=4, kv_heads=1, head_size=128, adjacent=False, head_norms=True,
                frequencies=frequencies(64)),
        "q4_1", True, False,
    ),
    "three heads share keys, bfloat16": (
        replace(SHAPE, hidden=576, heads=9, kv_heads=3, feed_forward=1536, vocabulary=999), "q8_0", False, True,
    ),
    "gemma": (
        replace(SHAPE, heads=2, head_size=256, gate="gelu", adjacent=False, frequencies=frequencies(128),
                embedding_scale=16.0),
        "q4_0", False, False,
    ),
    "sixteen heads share keys, a part of a head rotates": (
        replace(SHAPE, hidden=512, heads=16, kv_heads=1, head_size=96, feed_forward=1024, adjacent=False,
                frequencies=frequencies(24)),
        "q4_k", True, False,
    ),
    "twenty heads share keys": (replace(SHAPE, hidden=1280, heads=20, kv_heads=1), "u4b8", False, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_prompts_and_tokens_get_the_oracles_scores(case):
    """Prompts of four texts together, in two pieces; then a token of each at a time, in graphs."""
    model = Model(*CASES[case])
    decoder, s, count = model.decoder, model.shape, len(LENGTHS)
    limit = 5e-2 if decoder.bfloat16 else 5e-3
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, s.vocabulary, length + MORE) for length in LENGTHS]
    oracle = [model.scores(text) for text in texts]
    pages = [[Buffer(s.page_bytes, 0) for _ in range(PAGES)] for _ in texts]  # never cleared, whatever is in them
    table = np.array([[page.pointer for page in of_text] for of_text in pages], np.uint64)

    def check_scores(step: Any, stream: int, places: list[int]) -> np.ndarray:
        scores = np.empty((count, s.vocabulary), np.float32)
        copy_out(scores, step.at("logits"), stream)
        for i, place in enumerate(places):
            expected = oracle[i][place]
            assert np.linalg.norm(scores[i] - expected) < limit * np.linalg.norm(expected), (i, place)
        return scores

    with current(0):
        stream = int(check(driver().cuStreamCreate(1), "a stream"))
        step = decoder.step(sum(LENGTHS), count, PAGES, count)
        copy_in(step.at("pages"), table, stream)
        slots = np.zeros(count, CHOICE)
        slots["slot"] = np.arange(count)
        for start, stop in pairwise((0, 1, 3)):
            spans = [(length * start // 3, length * stop // 3) for length in LENGTHS]
            rows, blocks, last = 0, [], []
            for i, (a, b) in enumerate(spans):
                size = decoder.query_block
                blocks += [(rows + p - a, min(size, b - p), i, p) for p in range(a, b, size)]
                rows += b - a
                last.append(rows - 1)
            parts = {
                "tokens": np.concatenate([text[a:b] for text, (a, b) in zip(texts, spans, strict=True)]),
                "positions": np.concatenate([np.arange(a, b) for a, b in spans]),
                "sequences": np.concatenate([np.full(b - a, i) for i, (a, b) in enumerate(spans)]),
                "blocks": np.array(blocks),
                "scored": np.array(last),
            }
            batch = Batch(rows, 0, blocks=len(blocks), scored=count)
            step.use(batch)
            for name, values in parts.items():
                copy_in(step.at(name), values.astype(np.int32), stream)
            decoder.run(stream, step, batch)
            check_scores(step, stream, [b - 1 for _, b in spans])

        step = decoder.step(count, count, PAGES, count)
        copy_in(step.at("pages"), table, stream)
        graphs: dict[int, Any] = {}
        for i in range(MORE):
            positions = np.array(LENGTHS, np.int32) + i
            tokens = np.array([text[p] for text, p in zip(texts, positions, strict=True)], np.int32)
            parts = (8, 4, 2, 1)[i % 4]
            batch = Batch(count, count, scored=count, parts=parts)
            step.use(batch)
            # Every second token is the one that the step before left in a slot.
            numbers = np.arange(count, dtype=np.int32)
            copy_in(step.at("chosen"), tokens, stream)
            copy_in(step.at("tokens"), np.where(numbers % 2, ~numbers, tokens).astype(np.int32), stream)
            copy_in(step.at("positions"), positions, stream)
            copy_in(step.at("sequences"), numbers, stream)
            blocks = np.stack([numbers, np.ones_like(numbers), numbers, positions], axis=1)
            copy_in(step.at("blocks"), blocks, stream)
            copy_in(step.at("scored"), numbers, stream)
            copy_in(step.at("choices"), slots, stream)

            def work(stream: int, batch: Batch = batch) -> None:
                decoder.run(stream, step, batch)
                decoder.choose(stream, step, count)

            if i < 4:  # compiles what it takes
                work(stream)
                graphs[parts] = captured(work, stream)
            else:
                check(driver().cuGraphLaunch(graphs[parts], stream), "a graph")
            scores = check_scores(step, stream, list(positions))
            for name in ("picked", "chosen"):
                copy_out(tokens, step.at(name), stream)
                assert (tokens == scores.argmax(axis=1)).all()


def choose(scores: np.ndarray, samplings: list[Sampling], random: np.ndarray) -> np.ndarray:
    """The tokens that choose.cu takes for rows of scores."""
    rows, vocabulary = scores.shape
    model = Model(replace(SHAPE, vocabulary=vocabulary), "q4_0", False, False)
    with current(0):
        step = model.decoder.step(rows, rows, PAGES, rows)
        step.use(Batch(rows, rows, scored=rows))
        how = np.zeros(rows, CHOICE)
        for i, sampling in enumerate(samplings):
            how[i] = sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, i, 0, random[i]
        copy_in(step.at("logits"), scores, 0)
        copy_in(step.at("choices"), how, 0)
        model.decoder.choose(0, step, rows)
        tokens = np.empty(rows, np.int32)
        copy_out(tokens, step.at("picked"), 0)
    return tokens


@pytest.mark.parametrize("vocabulary", [7, 1000, 32003])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_tokens_are_drawn_as_on_the_cpu(rows, vocabulary):
    """All but those whose random number is within the rounding of a power from a token's end."""
    rng = np.random.default_rng(rows + vocabulary)
    scores = (rng.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    scores[:, ::3] = np.rint(scores[:, ::3])  # some are equal
    options = {
        "temperature": (0.0, 0.3, 1.0, 5.0),
        "top_k": (0, 1, 2, 40, 10**6),
        "top_p": (1.0, 0.95, 0.5, 1e-9),
        "min_p": (0.0, 0.0, 0.05, 0.5, 1.0),
    }
    samplings = [Sampling(**{name: rng.choice(values).item() for name, values in options.items()}) for _ in range(rows)]
    random = rng.random(rows)
    near = []
    for row, how, number in zip(scores, samplings, random, strict=True):
        tried = {choose_token(row, how, min(max(0.0, number + d), 1 - 1e-12)) for d in (-1e-5, 0, 1e-5)}
        looser = [replace(how, top_p=min(1.0, how.top_p * f)) for f in (1 - 1e-5, 1 + 1e-5)]
        looser += [replace(how, min_p=min(1.0, how.min_p * f)) for f in (1 - 1e-5, 1 + 1e-5)]
        near.append(tried | {choose_token(row, other, number) for other in looser})
    chosen = choose(scores, samplings, random)
    assert all(int(token) in allowed for token, allowed in zip(chosen, near, strict=True))
    assert sum(len(allowed) > 1 for allowed in near) <= 0.05 * rows + 1


@pytest.mark.parametrize(("vocabulary", "rows"), [(1000, 1), (1000, 40), (32003, 20), (151936, 8)])
def test_late_rows_are_sampled_as_on_the_cpu(vocabulary, rows):
    """With penalties, biases, masks and log probabilities."""
    model, stream = Model(replace(SHAPE, vocabulary=vocabulary), "q4_0", False, False), Stream(0)
    check_late_rows(model.decoder, model.decoder.step(rows, rows, PAGES, rows), stream, rows)


def test_scores_that_are_no_numbers_choose_a_token():
    model = Model(SHAPE, "q4_0", False, False)
    with current(0):
        step = model.decoder.step(2, 2, PAGES, 2)
        step.use(Batch(2, 2, scored=2))
        scores = np.full((2, 1000), np.nan, np.float32)
        scores[1, 7] = -5.0
        copy_in(step.at("logits"), scores, 0)
        model.decoder.choose(0, step, 2)
        tokens = np.empty(2, np.int32)
        copy_out(tokens, step.at("picked"), 0)
    assert tokens.tolist() == [0, 7]
