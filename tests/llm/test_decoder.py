"""The decoder against transformers' classes and a NumPy forward pass: architectures, ISA levels, caches, batches."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from common import assert_same_bits, facts
from llm_models import Small, in_transformers, write_model
from llm_oracle import Oracle

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cpu import _cpu
from billfish.checkpoints.layouts.gguf import ggml_names
from billfish.core.activations import quantize_activations
from billfish.core.elements import U4B8
from billfish.core.formats.word_packing import ScaledWordFormat
from billfish.llm import Model, load
from billfish.llm.cpu import CpuDecoder

TOKENS = np.random.default_rng(3).integers(4, 260, 40).tolist()

MODELS = {
    "llama": Small("llama"),
    "llama-tied-q4_1": Small("llama", quantization="Q4_1", tied=True, kv_heads=1, head_size=16, rope_base=1e5),
    "qwen2": Small("qwen2", quantization="Q5_0", heads=6, kv_heads=6),
    "qwen3": Small("qwen3", quantization="Q4_0", head_size=48, seed=2),
    "gemma": Small("gemma", tied=True, head_size=64, kv_heads=1),
}
EVERY_MODEL = pytest.mark.parametrize("small", MODELS.values(), ids=MODELS.keys())


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Writes a model, once."""
    folder = tmp_path_factory.mktemp("models")
    written: dict[str, tuple] = {}

    def write(small: Small):
        key = str(dataclasses.astuple(small))
        if key not in written:
            path = folder / f"{len(written)}.gguf"
            written[key] = path, write_model(path, small)
        return written[key][0]

    write.weights = lambda small: (write(small), written[str(dataclasses.astuple(small))][1])[1]
    return write


def close(actual: np.ndarray, expected: np.ndarray, relative: float) -> bool:
    return bool(np.abs(actual - expected).max() <= relative * np.abs(expected).max())


@EVERY_MODEL
def test_logits_are_those_of_transformers(path_of, small):
    import torch

    with torch.no_grad():
        expected = in_transformers(small, path_of.weights(small))(torch.tensor([TOKENS])).logits[0].numpy()
    assert close(load(path_of(small)).logits(TOKENS), expected, 1e-5)


@EVERY_MODEL
@pytest.mark.parametrize("level", _cpu.levels())
def test_logits_are_those_of_the_oracle(path_of, small, level, monkeypatch):
    monkeypatch.setattr(BACKENDS["cpu"], "level", level)
    model = load(path_of(small))
    assert close(model.logits(TOKENS), Oracle(path_of(small)).logits(TOKENS), 2e-5)
    vocabulary = model.decoder.config.vocabulary
    for activations in ("q8", "q16"):

        def rounded(x, w, activations=activations):
            kind = "q16" if len(w) == vocabulary else activations  # q8 has 16 bits before the head
            return quantize_activations(x.astype(np.float32), kind, 32).values(x.shape[1]) @ w.T

        # A number at the border of two codes may fall to either side. Among q8's few codes that is rare; among q16's
        # many it happens to all tokens, and matters little.
        expected = Oracle(path_of(small), rounded).logits(TOKENS)
        error = np.abs(model.logits(TOKENS, activations=activations) - expected).max(axis=1)
        assert np.median(error) <= 2e-4 * np.abs(expected).max()


def test_linear_scaling_and_frequency_factors(path_of, tmp_path):
    small = Small(fields={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    model = load(path_of(small))
    assert close(model.logits(TOKENS), Oracle(path_of(small)).logits(TOKENS), 2e-5)
    assert not close(model.logits(TOKENS), load(path_of(MODELS["llama"])).logits(TOKENS), 1e-2)


def test_tokens_one_by_one_give_what_all_at_once_give(path_of):
    model = load(path_of(MODELS["qwen3"]))
    cache = model.decoder.cache(16)
    rows = [model.decoder.run([(cache, [token])], "exact") for token in TOKENS]
    assert cache.tokens == TOKENS
    assert cache.capacity >= len(TOKENS)
    alone = model.decoder.logits(np.concatenate(rows), "exact")
    assert close(alone, model.logits(TOKENS), 2e-5)


def test_a_long_prompt_goes_in_chunks(path_of):
    small = Small(context=4 * CpuDecoder.chunk)
    model = load(path_of(small))
    tokens = np.random.default_rng(0).integers(4, 260, 2 * CpuDecoder.chunk + 37).tolist()
    assert close(model.logits(tokens), Oracle(path_of(small)).logits(tokens), 2e-5)


def test_texts_of_a_batch_get_the_bits_they_get_alone(path_of):
    model = load(path_of(MODELS["qwen2"]))
    check_batch(model, [TOKENS[:n] for n in (3, 17, 1, 33, 8, 5, 16)], "exact")


def check_batch(model: Model, texts: list[list[int]], activations: str) -> None:
    """The next token of each text gets the same bits alone and beside the others."""
    caches = [model.cache() for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        model.decoder.run([(cache, text)], activations)
    together = model.decoder.run([(cache, [7]) for cache in caches], activations)
    for text, row in zip(texts, together, strict=True):
        cache = model.cache()
        model.decoder.run([(cache, text)], activations)
        assert_same_bits(model.decoder.run([(cache, [7])], activations)[0], row)


@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
def test_a_text_that_is_not_finite_spoils_no_other(path_of, activations, monkeypatch):
    model = load(path_of(MODELS["llama"]))
    embed = model.decoder.embed

    def with_infinities(tokens: list[int]) -> np.ndarray:
        return np.where(np.array(tokens)[:, None] == 9, np.float32(np.inf), embed(tokens))

    monkeypatch.setattr(model.decoder, "embed", with_infinities)
    spoilt, other = model.decoder.run([(model.cache(), [token]) for token in (9, 7)], activations)
    assert np.isnan(spoilt).all()
    assert_same_bits(other, model.decoder.run([(model.cache(), [7])], activations)[0])


@pytest.mark.promise("numerics", "the same call gives the same bits for any number of threads")
@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
def test_any_number_of_threads_gives_the_same_bits(path_of, activations):
    model = load(path_of(MODELS["gemma"]))
    before = _cpu.threads()
    try:
        results = []
        for count in (1, 2, 3, 5):
            _cpu.set_threads(count)
            results.append(model.logits(TOKENS, activations=activations))
    finally:
        _cpu.set_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_huge_scores_do_not_overflow(path_of):
    """A key that matches its query a thousandfold takes all the weight, and nothing becomes NaN."""
    small = Small("qwen3", seed=5)
    path = path_of(small)
    weights = path_of.weights(small)
    assert weights["blk.0.attn_q_norm.weight"].max() < 3
    model = load(path)
    cache = model.cache()
    model.decoder.run([(cache, TOKENS)], "exact")
    for layer in range(model.config.layers):
        cache.state.keys(layer)[...] *= np.float32(1e4)
    assert np.isfinite(model.decoder.run([(cache, [5])], "exact")).all()


@pytest.mark.parametrize("architecture", ["llama", "gemma"])  # gemma's rows are scaled
@pytest.mark.parametrize("kind", [*ggml_names(), "F32", "F16", "BF16"])
def test_rows_of_an_embedding_of_any_type(path_of, kind, architecture):
    path = path_of(Small(architecture, layers=1, hidden=256, embedding=kind))
    model, stored = load(path), bf.load(path)["token_embd.weight"]
    whole = bf.dequantize(stored) if isinstance(stored, bf.QuantizedTensor) else stored.astype(np.float32)
    scale = np.float32(16 if architecture == "gemma" else 1)
    for tokens in (TOKENS, [0, 0, len(whole) - 1], [7]):
        assert_same_bits(model.decoder.embed(tokens), whole[tokens] * scale)


@pytest.mark.parametrize("format", bf.FORMATS)
def test_rows_of_an_embedding_that_was_converted(path_of, format):
    converted = {}

    def convert(name, tensor):
        if name == "token_embd.weight":
            tensor = converted[name] = bf.quantize(bf.dequantize(tensor), format)
        return tensor

    model = load(path_of(Small("llama", layers=1, hidden=256)), convert=convert)
    assert_same_bits(model.decoder.embed(TOKENS), bf.dequantize(converted["token_embd.weight"])[TOKENS])


@pytest.mark.parametrize("kind", ggml_names())
def test_an_embedding_of_any_quantized_type_is_a_head_too(path_of, kind):
    path = path_of(Small("llama", layers=1, hidden=256, embedding=kind, tied=True))
    model = load(path)
    hidden = model.hidden(TOKENS, "exact").astype(np.float64)
    normal = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-5) * model.decoder.last_norm
    expected = normal @ bf.dequantize(bf.load(path)["token_embd.weight"]).astype(np.float64).T
    assert close(model.logits(TOKENS), expected, 1e-5)


# ---- plain matrices, and columns in another order --------------------------------------------------------------------

PLAIN = pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])


@PLAIN
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("level", _cpu.levels())
def test_plain_matrices(path_of, kind, architecture, level, monkeypatch):
    """Hidden 80 and feed-forward 112 are no multiples of 32. x is never rounded for a plain matrix."""
    monkeypatch.setattr(BACKENDS["cpu"], "level", level)
    small = Small(architecture, quantization=kind, tied=architecture == "gemma", hidden=80, feed_forward=112, seed=4)
    model = load(path_of(small))
    logits = model.logits(TOKENS)
    assert close(logits, Oracle(path_of(small)).logits(TOKENS), 2e-5)
    for activations in ("q8", "q16"):
        assert_same_bits(model.logits(TOKENS, activations=activations), logits)


@PLAIN
def test_texts_of_a_batch_with_plain_matrices_get_the_bits_they_get_alone(path_of, kind):
    model = load(path_of(Small("qwen2", quantization=kind)))
    check_batch(model, [TOKENS[: 1 + n] for n in range(_cpu.FEW_ROWS + 5)], "q16")


def reordered(w: np.ndarray, format: str, seed: int) -> bf.QuantizedTensor:
    """Quantized with its columns in another order, as GPTQ's act-order has them."""
    order = np.random.default_rng(seed).permutation(w.shape[1])
    tensor = bf.quantize(w[:, order], format)
    return bf.QuantizedTensor.from_storage(format, tensor.storage, tensor.group_size, permutation=order)


# How each matrix is made of the file's weights. q and k have one order, v another one; gate and up have one order and
# two kinds of codes.
MIXED = {
    "attn_q": lambda w: reordered(w, "u4b8", 1),
    "attn_k": lambda w: reordered(w, "u4b8", 1),
    "attn_v": lambda w: reordered(w, "q8_0", 2),
    "attn_output": lambda w: w.astype(ml_dtypes.bfloat16),
    "ffn_gate": lambda w: reordered(w, "fp4", 3),
    "ffn_up": lambda w: reordered(w, "u8b128", 3),
    "ffn_down": lambda w: reordered(w, "q4_1", 4),
    "output": lambda w: reordered(w, "q8_0", 5),
}
# The other way around: plain where the above is quantized, and beside what has no order.
TURNED = {
    "attn_q": lambda w: w.astype(np.float16),
    "attn_k": lambda w: reordered(w, "q4_0", 1),
    "attn_v": lambda w: bf.quantize(w, "q4_0"),
    "attn_output": lambda w: reordered(w, "q8_0", 2),
    "ffn_gate": lambda w: w.astype(np.float32),
    "ffn_up": lambda w: w.astype(ml_dtypes.bfloat16),
    "ffn_down": lambda w: w.astype(np.float16),
    "output": lambda w: w.astype(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("kinds", [MIXED, TURNED], ids=["mixed", "turned"])
@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
@pytest.mark.parametrize("level", _cpu.levels())
def test_matrices_of_a_layer_may_differ_in_kind_and_order(path_of, kinds, activations, level, monkeypatch):
    monkeypatch.setattr(BACKENDS["cpu"], "level", level)
    path, made = path_of(Small("llama", quantization="F32")), {}

    def convert(name, tensor):
        part = name.split(".")[-2]
        if part in kinds:
            tensor = made[name] = kinds[part](tensor)
        return tensor

    model, oracle = load(path, convert=convert), Oracle(path)
    tensor_of = {}  # by the oracle's array
    for name, tensor in made.items():
        quantized = isinstance(tensor, bf.QuantizedTensor)
        oracle.weights[name] = (bf.dequantize(tensor) if quantized else tensor).astype(np.float64)
        tensor_of[id(oracle.weights[name])] = name, tensor

    def linear(x, w):
        name, tensor = tensor_of[id(w)]
        if activations == "exact" or not isinstance(tensor, bf.QuantizedTensor):
            return x @ w.T
        rounding = "q16" if name == "output.weight" else activations
        order = slice(None) if tensor.permutation is None else tensor.permutation
        return (
            quantize_activations(x[:, order].astype(np.float32), rounding, tensor.group_size).values(x.shape[1])
            @ w[:, order].T
        )

    oracle.linear = linear
    for tokens in (TOKENS, TOKENS[:3]):
        expected = oracle.logits(tokens)
        error = np.abs(model.logits(tokens, activations=activations) - expected)
        if activations == "exact":
            assert error.max() <= 2e-5 * np.abs(expected).max()
        else:  # see test_logits_are_those_of_the_oracle
            assert np.median(error.max(axis=1)) <= 2e-4 * np.abs(expected).max()


def test_an_embedding_in_another_order(path_of):
    def convert(name, tensor):
        return reordered(tensor, "q8_0", 6) if name == "token_embd.weight" else tensor

    small = Small("llama", quantization="F32", tied=True)
    model, oracle = load(path_of(small), convert=convert), Oracle(path_of(small))
    whole = bf.dequantize(reordered(path_of.weights(small)["token_embd.weight"], "q8_0", 6))
    assert_same_bits(model.decoder.embed(TOKENS), whole[TOKENS])
    oracle.weights["token_embd.weight"] = whole.astype(np.float64)
    assert close(model.logits(TOKENS), oracle.logits(TOKENS), 2e-5)


def test_a_matrix_of_another_type_is_refused(path_of):
    path = path_of(Small("llama", quantization="F32"))
    for dtype in (np.float64, np.int8, ">f4"):
        message = f"llm.load|token_embd.weight|{np.dtype(dtype)}|float32, float16 or bfloat16"
        with pytest.raises(bf.ModelError, match=facts(message)):
            load(path, convert=lambda _, tensor, dtype=dtype: tensor.astype(dtype))


class OddGroups(ScaledWordFormat):
    name, element, block_size, group_sizes = "odd_groups", U4B8, 8, (48,)


def test_a_format_that_the_kernels_do_not_take_is_refused(path_of):
    path = path_of(Small("llama", quantization="F32", hidden=96))
    message = "llm.load|blk.0.attn_q.weight|odd_groups|group_size is 48|16, 32, 64, 128, 256, multiples of 256"
    with pytest.raises(bf.ModelError, match=facts(message)):
        load(path, convert=lambda _, tensor: bf.quantize(tensor, OddGroups()) if tensor.ndim == 2 else tensor)


def test_types_of_plain_matrices_are_named(path_of):
    model = load(path_of(Small("llama", quantization="BF16")))
    assert "(bfloat16)" in model.decoder.kernels
    small = Small()
    weights = small.layers * sum(n * k for n, k in small.matrices().values())
    embedding_and_head = 2 * model.config.vocabulary * small.hidden
    assert model.decoder.nbytes >= 2 * (weights + embedding_and_head)
    assert model.decoder.nbytes <= 2 * (weights + embedding_and_head + 32 * small.hidden)


def test_embedding_of_a_text_is_the_mean_hidden_state(path_of):
    model = load(path_of(MODELS["llama"]))
    text = "ab c"
    mean = Oracle(path_of(MODELS["llama"])).hidden(model.tokenizer.encode(text)).mean(axis=0)
    vector = model.embed_text(text)
    assert (vector.dtype, vector.shape) == (np.float32, (64,))
    assert close(vector, mean / np.linalg.norm(mean), 1e-5)
    assert np.linalg.norm(vector) == pytest.approx(1)


def test_formats_of_the_packed_weights_are_named(path_of):
    model = load(path_of(MODELS["llama-tied-q4_1"]))
    assert "q4_1" in model.decoder.kernels
    assert "q4_1" in repr(model)
    packed = sum(
        bf.QuantizedTensor.from_storage("q4_1", {"blocks": np.zeros((n, k // 32 * 20), np.uint8)}).nbytes
        for n, k in MODELS["llama-tied-q4_1"].matrices().values()
    )
    assert model.decoder.nbytes >= 2 * packed
