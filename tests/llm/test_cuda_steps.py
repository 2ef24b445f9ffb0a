"""What the decoder of a GPU asks of its driver, on a driver that needs no GPU: steps, graphs, pages, steps ahead."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter as Calls
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import first as ordinary
from cuda_fake_gpu import VOCABULARY, FakeGpu
from cuda_late import check_late_rows
from llm_architectures import MODELS
from llm_architectures import write_model as write_architecture
from llm_models import Small, write_model
from serving_http import until
from serving_support import submit

import billfish as bf
from billfish.backends.cuda import decoder, driver, step_memory
from billfish.core.errors import BackendUnavailable
from billfish.llm import Model, cuda, cuda_kv_cache, cuda_sampling, cuda_steps, load
from billfish.llm.decoder_base import PENDING
from billfish.llm.drafting.drafter import Controller, Drafter, StepSeconds
from billfish.llm.generation import Generation
from billfish.llm.sampler import RequestSampler, Sampler, Sampling, with_best
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Request

SMALL = Small(quantization="Q4_0", hidden=64, context=300)


@pytest.fixture
def gpu(monkeypatch, request):
    """All that was taken of it is given back when the model is gone."""
    fake = FakeGpu(monkeypatch)
    yield fake
    request.node.funcargs.clear()  # pytest's own references
    gc.collect()
    assert not fake.live
    assert not fake.host
    assert not fake.objects
    assert not any(fake.graphs.values())
    monkeypatch.undo()
    fake.forget()


@pytest.fixture
def model(gpu, tmp_path) -> Model:
    write_model(tmp_path / "model.gguf", SMALL)
    return load(tmp_path / "model.gguf", device="cuda")


def counting(first: int, count: int) -> list[int]:
    return [(first + i) % VOCABULARY for i in range(count)]


def tokens_of(answer: Any) -> list[int]:
    for _ in answer:
        pass
    return answer.tokens


def check_fed(gpu: FakeGpu, text: list[int], pages: list[int]) -> None:
    """The last step at each position of a text had its token, in the page of that position."""
    gpu.cuCtxSynchronize()
    last = {position: (token, page) for step in gpu.fed for token, position, page in step if page in pages}
    for position, token in enumerate(text):
        assert last[position] == (token, pages[position // step_memory.PAGE]), position


def test_an_answer_counts_up_through_pages_and_graphs(gpu, model):
    cache = model.cache()
    answer = tokens_of(model.generate(counting(10, 70), max_tokens=100, cache=cache))
    assert answer == counting(80, 100)
    assert cache.tokens == counting(10, 169)
    check_fed(gpu, cache.tokens, cache.lists[0].pages)
    assert len(gpu.graphs) == 1
    single = [step for step in gpu.fed if len(step) == 1]
    assert len(single) == 100  # 99 tokens after the first, and one step ahead that nobody asked for


def test_texts_of_many_positions_have_a_graph_of_their_own(gpu, model, monkeypatch):
    """There, more CTAs share the keys of a text."""
    monkeypatch.setattr(cuda_steps, "LONG", 100)
    cache = model.cache()
    assert tokens_of(model.generate(counting(10, 70), max_tokens=60, cache=cache)) == counting(80, 60)
    check_fed(gpu, cache.tokens, cache.lists[0].pages)
    assert len(gpu.graphs) == 2


def test_answers_in_turns_take_no_step_of_each_other(model):
    answers = [model.stream([first], max_tokens=30) for first in (5, 100, 200)]
    for _ in range(29):
        for answer in answers:
            next(answer, None)
    for answer, first in zip(answers, (5, 100, 200), strict=True):
        assert tokens_of(answer) == counting(first + 1, 30)


def test_answers_that_share_a_cache_in_turns(model):
    cache = model.cache()
    answers = [model.stream(counting(first, 3), max_tokens=12, cache=cache) for first in (5, 100)]
    for _ in range(12):
        for answer in answers:
            next(answer, None)
    assert [answer.tokens for answer in answers] == [counting(8, 12), counting(103, 12)]


def test_texts_of_a_batch_leave_it_one_by_one(gpu, model, monkeypatch):
    ends = {60, 121}
    monkeypatch.setattr(model.tokenizer, "ends", ends)
    prompts = [counting(first, length) for first, length in ((50, 1), (100, 20), (150, 64), (200, 65), (10, 1))]
    answers = model.generate_batch(prompts, max_tokens=40)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = counting(prompt[-1] + 1, 40)
        stop = next((i + 1 for i, token in enumerate(expected) if token in ends), 40)
        assert answer == model.tokenizer.decode(expected[:stop])
    assert max(len(step) for step in gpu.fed if len(step) < 10) == 8  # five, and what fills up the graph


@pytest.mark.parametrize("more", [{}, {"presence_penalty": 0.1}])
def test_a_step_of_a_batch_is_under_way_before_the_one_before_is_read(model, monkeypatch, more):
    done, prompts = list[str](), [counting(50, 1), counting(100, 20)]
    launch, read = cuda_steps.CudaSteps.launch, cuda.CudaDecoder.read
    monkeypatch.setattr(cuda_steps.CudaSteps, "launch", lambda *of: done.append("launch") or launch(*of))
    monkeypatch.setattr(cuda.CudaDecoder, "read", lambda *of: done.append("read") or read(*of))
    monkeypatch.setattr(model.tokenizer, "ends", set())
    answers = model.generate_batch(prompts, max_tokens=4, **more)
    assert answers == [model.tokenizer.decode(counting(prompt[-1] + 1, 4)) for prompt in prompts]
    assert done == ["launch", *["launch", "read"] * 3, "read"]


def test_texts_without_a_sampler_are_only_fed(gpu, model):
    texts = [counting(50, 1), counting(100, 80), counting(150, 70), counting(20, 1)]
    caches = [model.cache() for _ in texts]
    samplers = [Sampling().sampler() for _ in range(2)]
    assert model.decoder.choose(list(zip(caches, texts, strict=True)), samplers, None) == [51, 180]
    for cache, text in zip(caches, texts, strict=True):
        assert cache.tokens == text
        check_fed(gpu, text, cache.lists[0].pages)


def test_late_rows_are_sampled_in_the_same_pass_as_the_others(gpu, model):
    texts = [counting(50, 1), counting(100, 80), counting(150, 70), counting(20, 1)]
    caches, biased = [model.cache() for _ in texts], Sampling(logit_bias={9: 5.0})
    samplers = [Sampling().sampler(), biased.sampler(), Sampling(presence_penalty=0.5).sampler(), biased.sampler()]
    assert model.decoder.choose(list(zip(caches, texts, strict=True)), samplers, None) == [51, 9, 220, 9]
    assert len(gpu.fed) == 1
    for cache, text in zip(caches, texts, strict=True):
        assert cache.tokens == text
        check_fed(gpu, text, cache.lists[0].pages)


class EverySecond:
    """A grammar that allows every second token behind the last one, and fails after so many."""

    complete = False

    def __init__(self, last: int, most: int = 1000) -> None:
        self.last, self.left = last, most

    def allowed(self) -> np.ndarray:
        if not self.left:
            raise ValueError("the grammar gives up")
        return np.arange(VOCABULARY) % 2 == self.last % 2

    def bits(self) -> np.ndarray:
        return np.packbits(self.allowed(), bitorder="little")

    def take(self, token: int) -> None:
        assert self.allowed()[token]
        self.last, self.left = token, self.left - 1


def kinds_of_samplers(first: int) -> list[Sampler]:
    """All reasons to be sampled late, and none."""
    drawn = {"temperature": 1.0, "top_k": 3, "seed": 5}
    return [
        Sampling(presence_penalty=2.0, logit_bias={9: 1.5, 10: 1.25}).sampler(),
        Sampling().sampler(),
        RequestSampler(Sampling(repetition_penalty=3.0, logit_bias={12: 0.9}), [first], None, 4),
        RequestSampler(Sampling(), [first], EverySecond(first)),
        RequestSampler(Sampling(**drawn), [first], EverySecond(first), 0),
        RequestSampler(Sampling(), [first], EverySecond(first, most=5)),
    ]


def test_late_rows_get_the_tokens_of_the_numpy_sampler(gpu, model, monkeypatch):
    """Each step is submitted before anybody asks for the tokens of the one before. The late rows of most are sampled
    because the next step begins, or because their tokens are wanted."""
    monkeypatch.setattr(cuda_sampling, "FEWEST_ROWS", 2)
    caches, samplers, texts = [model.cache() for _ in range(6)], kinds_of_samplers(7), [[7] for _ in range(6)]
    pending = model.decoder.submit(list(zip(caches, texts, strict=True)), samplers, None)
    scored = [list[Any]() for _ in samplers]
    for number in range(12):
        following = model.decoder.submit([(cache, [PENDING]) for cache in caches], samplers, None)
        for text, token, scores, sampler in zip(texts, pending.tokens(), scored, samplers, strict=True):
            text.append(token)
            scores.append(getattr(sampler, "scored", None))
        if number % 3:
            following.sample_late()
        pending = following
    for text, scores, sampler, alone in zip(texts, scored, samplers, kinds_of_samplers(7), strict=True):
        expected, logits = [7], []
        for _ in range(12):
            logits.append((np.arange(VOCABULARY) == (expected[-1] + 1) % VOCABULARY).astype(np.float32))
            expected.append(alone.choose(logits[-1]))
            if getattr(alone, "error", ""):
                assert sampler.error == alone.error
                break
        length = len(expected) - bool(getattr(alone, "error", ""))
        assert text[:length] == expected[:length]
        if sampler.alternatives is not None:
            for row, token, made in zip(logits, expected[1:], scores, strict=True):
                best = with_best(row, token, sampler.alternatives)
                assert [token for token, _ in made] == [token for token, _ in best]
                exact = np.array([each for _, each in best])
                assert np.array_equal([each for _, each in made], exact.astype(np.float32))  # as the device stores it
    assert max(len(step) for step in gpu.fed) == 8
    assert len(gpu.fed) == 12  # the last one waits for nobody


def test_late_rows_with_all_settings_are_those_of_the_numpy_sampler(gpu, model):
    steps = model.decoder._steps
    check_late_rows(model.decoder._layers, steps.grow(40), model.decoder._stream, 40)


def test_late_requests_take_part_in_every_step(gpu, model):
    """A penalty, log probabilities and a grammar beside a plain request: each has a token of each step."""
    with Engine(model, streams=4, context=200) as engine:
        grammar = SimpleNamespace(matcher=lambda: EverySecond(8))
        requests = [
            Request([8], 40),
            Request([8], 40, Sampling(frequency_penalty=0.5)),
            Request([8], 40, logprobs=2),
            Request([8], 40, grammar=grammar),
        ]
        answers = [submit(engine, request).wait() for request in requests]
        alone = engine.counts().steps
        answers += [answer.wait() for answer in [submit(engine, request) for request in requests]]
        assert engine.counts().steps - alone <= 50
        assert alone <= 4 * 45
    for answer in (*answers[:3], *answers[4:7]):
        assert answer.ids == counting(9, 40)
    for answer in (answers[3], answers[7]):
        assert all(token % 2 == 0 for token in answer.ids)
        assert len(answer.ids) == 40


def late_requests(ends: Iterable[int]) -> list[Request]:
    """Long answers that depend on all tokens before, and on their random numbers. One request in eight is plain."""
    drawn = {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    return [
        Request(
            counting(10 + 10 * i, 50 + i),
            120 + 8 * i,
            Sampling(**drawn, seed=i, logit_bias=dict.fromkeys(ends, -100.0)) if i else Sampling(),
            logprobs=3 if i % 4 == 3 else None,
            grammar=SimpleNamespace(matcher=lambda i=i: EverySecond(i)) if i % 2 else None,
        )
        for i in range(8)
    ]


def test_late_requests_are_preempted_and_cancelled(gpu, tmp_path, monkeypatch):
    """What was read again goes on with the same penalties, grammar and random numbers; who is cancelled in the middle
    of a step takes nothing from the others."""
    write_model(tmp_path / "model.gguf", SMALL)
    monkeypatch.setattr(cuda_kv_cache, "SLAB_BYTES", 0)  # no pages beyond what an engine asks for
    model = load(tmp_path / "model.gguf", device="cuda")
    with Engine(model, streams=1, context=300) as engine:
        alone = [submit(engine, request).wait() for request in late_requests(model.tokenizer.ends)]
    assert len({tuple(answer.ids) for answer in alone}) == 8
    model = load(tmp_path / "model.gguf", device="cuda")  # whose pages nobody has taken
    with Engine(model, streams=6, context=300, cache_tokens=384) as engine:
        gone = [submit(engine, request) for request in late_requests(model.tokenizer.ends)]
        together = [submit(engine, request) for request in late_requests(model.tokenizer.ends)]
        for number, each in enumerate(gone):
            until(lambda: each.ticket.completion_tokens > 3 * number or each.ended(0))  # noqa: B023
            each.ticket.cancel()
        for answer, expected in zip(together, alone, strict=True):
            assert (answer.wait().ids, answer.finished) == (expected.ids, expected.finished)
            logprobs = [token.logprob for piece in answer.pieces for token in piece.tokens]
            assert logprobs == [token.logprob for piece in expected.pieces for token in piece.tokens]
        assert engine.counts().preemptions > 3


def test_tokens_are_read_while_the_decoder_is_this_threads(gpu, model, monkeypatch):
    """The step of another thread would sample late rows, too, or write where their logits are."""
    free = list[bool]()

    def look() -> None:
        taken = model.decoder.lock.acquire(blocking=False)
        free.append(taken)
        if taken:
            model.decoder.lock.release()

    def beside(work: Any) -> Any:
        def looked(*how: Any) -> Any:
            other = threading.Thread(target=look)
            other.start()
            other.join()
            return work(*how)

        return looked

    cache, samplers = model.cache(), [Sampling(frequency_penalty=0.5).sampler()]
    first = model.decoder.submit([(cache, [5])], samplers, None)
    second = model.decoder.submit([(cache, [PENDING])], samplers, None)
    look()
    with monkeypatch.context() as patched:
        for name in ("read", "sample_late"):
            patched.setattr(model.decoder, name, beside(getattr(model.decoder, name)))
        assert (second.tokens(), first.tokens()) == ([7], [6])
    assert free == [True, False, False, False]


def test_an_engine_on_a_gpu(gpu, model):
    with Engine(model, streams=3, context=200) as engine:
        prompts = [counting(first, length) for first, length in ((50, 1), (100, 80), (100, 90), (10, 120), (60, 33))]
        answers = [submit(engine, Request(prompt, 40)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = counting(prompt[-1] + 1, 40)
            assert answer.wait().ids == (expected[: expected.index(1)] if 1 in expected else expected)
        assert engine.counts().cached_tokens >= 64
        assert engine.counts().cache_bytes_bound == 3 * 4 * model.decoder._pool.pools[0].page_bytes


def test_an_engine_for_a_model_that_has_more_pages_than_the_engine_wants(model):
    """A generation before it has taken them."""
    tokens_of(model.generate(counting(3, 200), max_tokens=5))
    with Engine(model, streams=3, context=200) as engine:
        assert submit(engine, Request(counting(50, 150), 40)).wait().ids == counting(200, 40)


@pytest.mark.parametrize("kernel", ["embed.cu", "attend.cu", "choose.cu"])
def test_an_interrupted_step_is_taken_for_no_answer(gpu, model, kernel):
    """A step of one text is under way; a batch is interrupted; then the first text goes on, and the batch as well."""
    first = model.stream([5], max_tokens=20)
    for _ in range(6):
        next(first)
    caches, samplers = [model.cache() for _ in range(3)], [Sampling().sampler() for _ in range(3)]
    passages = [(cache, [token]) for cache, token in zip(caches, (50, 100, 150), strict=True)]
    gpu.fail_at = kernel
    with pytest.raises(KeyboardInterrupt):
        model.decoder.choose(passages, samplers, None)
    assert [cache.tokens for cache in caches] == [[], [], []]
    assert tokens_of(first) == counting(6, 20)
    assert model.decoder.choose(passages, samplers, None) == [51, 101, 151]
    check_fed(gpu, [100], caches[1].lists[0].pages)


@pytest.mark.parametrize("sequences", [1, 8, 32, 64])
def test_serving_compiles_and_captures_nothing_after_warm(gpu, model, monkeypatch, sequences):
    """Whatever part of the sequences decodes while the prompts of all others end."""
    kernels = set[tuple[Any, ...]]()
    load_kernel = gpu.kernel

    def kernel(source: str, name: str, macros: Any, ordinal: int, shared_bytes: int) -> int:
        kernels.add((source, macros, shared_bytes))
        return load_kernel(source, name, macros, ordinal, shared_bytes)

    monkeypatch.setattr(driver, "kernel", kernel)
    decoder = model.decoder
    decoder.warm(sequences, None)
    warm, captures = set(kernels), decoder.captures
    assert warm
    for decoding in range(sequences):
        caches = [decoder.cache(32) for _ in range(sequences)]
        fed = [[5 + i] for i in range(decoding)] + [counting(i, 20) for i in range(decoding, sequences)]
        samplers = [Sampling().sampler() for _ in caches]
        decoder.choose(list(zip(caches, fed, strict=True)), samplers, None)
    assert kernels == warm
    assert decoder.captures == captures


def test_pages_are_given_back_and_used_again(model):
    for _ in range(20):
        tokens_of(model.generate(counting(3, 200), max_tokens=5))
    gc.collect()
    pool = model.decoder._pool.pools[0]
    assert len(pool._slabs) == 1
    assert len(pool._free) * pool.page_bytes == pool._slabs[0].nbytes
    cache = model.cache()
    other = cache.copy()
    assert not {*cache.lists[0].pages} & {*other.lists[0].pages}


def test_a_cache_that_is_collected_while_another_takes_pages(model, monkeypatch):
    """Garbage is collected anywhere, so in the pool too: no page is lost, and none is given twice."""
    pool = model.decoder._pool.pools[0]
    grow = type(pool)._grow
    monkeypatch.setattr(cuda_kv_cache, "SLAB_BYTES", 1)
    abandoned = [model.stream(counting(3, 40), max_tokens=50) for _ in range(2)]
    for answer in abandoned:
        next(answer)
    del answer
    taken = sum(slab.nbytes for slab in pool._slabs)

    def collecting(self: Any, missing: int) -> None:
        abandoned.clear()
        gc.collect()
        grow(self, missing)

    monkeypatch.setattr(type(pool), "_grow", collecting)
    caches = [model.decoder.cache(200) for _ in range(8)]
    pages = [page for cache in caches for page in cache.lists[0].pages]
    assert len({*pages, *pool._free}) == len(pages) + len(pool._free)
    assert sum(slab.nbytes for slab in pool._slabs) == (len(pages) + len(pool._free)) * pool.page_bytes > taken


def test_an_fp8_cache_has_a_byte_for_a_number_and_a_scale_for_a_position(gpu, model, tmp_path):
    fp8 = load(tmp_path / "model.gguf", device="cuda", cache_type="fp8")
    size = model.config.blocks[0].mixer.head_size
    heads, wide = 2 * SMALL.kv_heads * SMALL.layers, -(-size // 64) * 64
    assert [m.decoder.pages.pools[0].page_bytes for m in (model, fp8)] == [64 * heads * n for n in (2 * wide, wide + 4)]
    cache = fp8.cache()
    answer = fp8.generate(counting(3, 70), max_tokens=70, cache=cache)
    assert tokens_of(answer) == counting(73, 70)
    other = cache.copy()
    assert tokens_of(fp8.generate([*other.tokens, 9], max_tokens=3, cache=other)) == counting(10, 3)
    assert cache.nbytes == len(cache.lists[0].pages) * fp8.decoder.pages.pools[0].page_bytes


def test_an_fp8_cache_needs_a_gpu_that_converts_e4m3(gpu, model, tmp_path):
    with pytest.raises(bf.DataError, match=r"cache_type.*'int8'.*'float16' or 'fp8' on cuda:0"):
        load(tmp_path / "model.gguf", device="cuda", cache_type="int8")
    with pytest.raises(bf.ModelError, match=r"KV cache .* float16 already.*cache_type='fp8'"):
        model.decoder.set_cache_type("fp8")
    model.decoder.set_cache_type("float16")
    model.decoder._gpu = replace(model.decoder._gpu, capability=(8, 6))
    with pytest.raises(bf.DataError, match=r"cache_type.*'fp8'.*'float16' on .*compute capability 8\.9.*8\.6"):
        model.decoder.set_cache_type("fp8")


def test_pages_before_a_window_are_given_back(gpu, tmp_path):
    """Layers with a window of 7 keep few pages of a long text; those without keep all."""
    write_architecture(tmp_path, "gemma3", max_position_embeddings=1024)
    model = load(tmp_path, device="cuda")
    cache, text = model.cache(), [token % 90 for token in range(700)]
    model.decoder.choose([(cache, text)], [Sampling().sampler()], None)
    all_pages, windowed = (cache.lists[i] for i in range(2))
    assert (all_pages.table.window, windowed.table.window) == (0, 7)
    held = [page for page in windowed.pages if page]
    assert len(held) == 11  # of the prompt, which came in one piece
    model.decoder.choose([(cache, [5])], [Sampling().sampler()], None)
    held = [page for page in windowed.pages if page]
    assert len(held) <= 6
    assert held == windowed.pages[-len(held) :]
    assert sum(map(bool, all_pages.pages)) == 11
    assert cache.nbytes == 11 * all_pages.table.page_bytes + 6 * windowed.table.page_bytes
    assert cache.restorable(690) == 690
    assert cache.restorable(300) == 0
    other = cache.copy()
    assert other.tokens == cache.tokens
    tokens = [model.decoder.choose([(each, [9])], [Sampling().sampler()], None) for each in (cache, other)]
    assert tokens[0] == tokens[1]
    assert cache.rollback(300) == 0
    assert model.decoder.choose([(cache, text[:20])], [Sampling().sampler()], None)


def test_more_tokens_than_the_context_are_refused(model):
    cache = model.cache()
    tokens_of(model.generate(counting(3, 290), max_tokens=50, cache=cache))
    assert len(cache.tokens) == SMALL.context
    with pytest.raises(bf.ModelError, match=r"301 tokens.*300"):
        model.decoder.choose([(cache, [1])], [Sampling().sampler()], None)


def test_a_context_of_less_than_a_new_caches_pages(gpu, tmp_path):
    write_model(tmp_path / "model.gguf", Small(quantization="Q4_0", context=60))
    model = load(tmp_path / "model.gguf", device="cuda")
    assert model.generate_batch([[5], [50, 51], [100]], max_tokens=3) == [
        model.tokenizer.decode(counting(first, 3)) for first in (6, 52, 101)
    ]


def test_sizes_that_a_gpu_does_not_have_room_for_are_refused_at_load(gpu, tmp_path, monkeypatch):
    write_model(tmp_path / "odd.gguf", Small(quantization="F16", feed_forward=100))
    with pytest.raises(bf.ModelError, match=r"ffn_down\.weight.*100 numbers"):
        load(tmp_path / "odd.gguf", device="cuda")
    write_model(tmp_path / "model.gguf", SMALL)
    monkeypatch.setitem(gpu.ATTRIBUTES, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 17000)
    gpu.forget()
    with pytest.raises(BackendUnavailable, match=r"fake.*shared memory.*heads of 32 numbers"):
        load(tmp_path / "model.gguf", device="cuda")


def test_memory_that_is_full_is_told_with_numbers(gpu, tmp_path, monkeypatch, caplog):
    write_model(tmp_path / "model.gguf", SMALL)
    monkeypatch.setattr(cuda, "free_bytes", lambda ordinal: 1000)
    with pytest.raises(BackendUnavailable, match=r"needs \d\.\d GB.*fake has 0\.0 GB"):
        load(tmp_path / "model.gguf", device="cuda")
    monkeypatch.setenv("BILLFISH_DEVICE", "auto")
    monkeypatch.setattr("billfish.llm.devices._has_driver", lambda: True)
    assert load(tmp_path / "model.gguf").decoder.device == "cpu"
    assert "The CPU runs it." in caplog.text


class Code(int):
    """An error code of the driver."""

    name = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.promise("server", "a GPU without memory left is told, with numbers; nothing is half loaded")
def test_memory_that_ends_while_weights_are_packed_is_known_by_its_code(gpu, tmp_path, monkeypatch, capsys):
    """Not by the text of an error, which other errors may have as well."""
    write_model(tmp_path / "model.gguf", SMALL)
    allocate, left = gpu.cuMemAlloc, [5]

    def some(nbytes: int) -> tuple:
        left[0] -= 1
        return allocate(nbytes) if left[0] >= 0 else (Code(2), 0)

    monkeypatch.setattr(gpu, "cuMemAlloc", some)
    with pytest.raises(BackendUnavailable, match="out of memory after"):
        load(tmp_path / "model.gguf", device="cuda")
    monkeypatch.setattr(gpu, "cuMemAlloc", lambda nbytes: (Code(1), 0))  # of that name, and another code
    with pytest.raises(bf.BillfishError, match="OUT_OF_MEMORY") as caught:
        load(tmp_path / "model.gguf", device="cuda")
    assert not isinstance(caught.value, (BackendUnavailable, MemoryError))


@pytest.mark.promise("server", "a GPU without memory left is told, with numbers; nothing is half loaded")
def test_caches_without_room_are_told_of_streams_by_an_engine(gpu, model, monkeypatch):
    """`serve` spoke of llm.generate."""
    monkeypatch.setattr(gpu, "cuMemAlloc", lambda nbytes: (Code(2), 0))
    model.decoder._pool.pools[0]._free.clear()
    with pytest.raises(bf.ModelError, match=r"64 more positions of KV cache: .* GB") as caught:
        model.decoder.cache(64)
    assert "llm.generate" not in str(caught.value)
    with pytest.raises(bf.DataError, match=r"3 streams of 200 tokens") as caught:
        Engine(model, streams=3, context=200)
    assert "llm.generate" not in str(caught.value)


def test_a_cache_that_outlives_its_decoder_copies_on_a_stream_that_is_there(gpu, tmp_path, monkeypatch):
    write_model(tmp_path / "model.gguf", SMALL)
    model = load(tmp_path / "model.gguf", device="cuda")
    cache = model.cache()
    tokens_of(model.generate(counting(3, 100), max_tokens=5, cache=cache))
    del model
    gc.collect()
    copied, streams = gpu.cuMemcpyDtoDAsync, []

    def copy(to: int, source: int, nbytes: int, stream: int) -> tuple:
        streams.append(stream)
        return copied(to, source, nbytes, stream)

    monkeypatch.setattr(gpu, "cuMemcpyDtoDAsync", copy)
    other = cache.copy()
    assert other.tokens == cache.tokens
    assert streams
    assert {*streams} <= gpu.objects
    del cache, other
    gc.collect()
    assert not {*streams} & gpu.objects


def test_tiny_temperatures_take_the_best():
    how = cuda_steps.choices([Sampling(temperature=t).sampler() for t in (0.0, 1e-40, 0.5)])
    assert how["temperature"].tolist() == [0.0, 0.0, 0.5]


def test_words_of_device():
    with pytest.raises(bf.DataError, match=r"device.*'gpu'.*cpu, cuda, cuda:N"):
        load(device="gpu")


# ---- what a step costs the host -----------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, names: Iterable[str]) -> Calls[str]:
    """How often these functions of the driver are called from now on."""
    calls = Calls[str]()

    def counting_calls(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    for name in names:
        monkeypatch.setattr(gpu, name, counting_calls(name, getattr(gpu, name)))
    return calls


COPIES = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync")


def calls_of_steps(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, model: Model, sequences: int) -> list[Calls[str]]:
    """What the driver is asked for in each of three steps of so many sequences, which all have a new page in the
    second one."""
    monkeypatch.setattr(cuda_kv_cache, "SLAB_BYTES", 0)
    caches, samplers = (
        [model.decoder.cache(64) for _ in range(sequences)],
        [Sampling().sampler() for _ in range(sequences)],
    )
    model.decoder.warm(sequences, None)
    pending = model.decoder.submit([(cache, counting(i, 63)) for i, cache in enumerate(caches)], samplers, None)
    calls, found = counted(monkeypatch, gpu, (*COPIES, "cuMemAlloc", "cuGraphLaunch")), list[Calls[str]]()
    for _ in range(3):
        calls.clear()
        following = model.decoder.submit([(cache, [PENDING]) for cache in caches], samplers, None)
        pending.tokens()
        pending = following
        found.append(Calls(calls))
    assert pending.tokens() == [(i + 66) % VOCABULARY for i in range(sequences)]
    for i, cache in enumerate(caches):
        check_fed(gpu, counting(i, 66), cache.lists[0].pages)
    return found


@pytest.mark.parametrize("sequences", [1, 2, 40])
def test_a_step_asks_as_much_of_the_driver_for_any_number_of_sequences(gpu, model, monkeypatch, sequences):
    """Also where all of them begin a page."""
    once = Calls(cuMemcpyHtoDAsync=1, cuMemcpyDtoHAsync=1, cuGraphLaunch=1)
    new_pages = Calls(cuMemcpyHtoDAsync=1, cuMemAlloc=1)
    assert calls_of_steps(monkeypatch, gpu, model, sequences) == [once, once + new_pages, once]


def test_more_new_pages_than_are_sent_together(gpu, model, monkeypatch):
    monkeypatch.setattr(cuda_steps, "MOST_NEW_PAGES", 3)
    prompts = [counting(first, 250) for first in (10, 50, 90)]
    caches, samplers = [model.cache() for _ in prompts], [Sampling().sampler() for _ in prompts]
    model.decoder.warm(3, None)
    calls = counted(monkeypatch, gpu, ["cuMemcpyHtoDAsync"])
    assert model.decoder.choose(list(zip(caches, prompts, strict=True)), samplers, None) == [260, 39, 79]
    assert calls["cuMemcpyHtoDAsync"] == 1 + 4  # of twelve pages
    for cache, prompt in zip(caches, prompts, strict=True):
        check_fed(gpu, prompt, cache.lists[0].pages)


def test_memory_for_pages_grows_with_what_is_there_up_to_its_limit(gpu, model, monkeypatch):
    """Few allocations, and none beyond a share of what is left."""
    monkeypatch.setattr(cuda_kv_cache, "SLAB_BYTES", 0)
    pages = model.decoder.pages
    [pool] = pages.pools
    pages.limit(pool.page_bytes * 1000, 0)
    slabs = list[int]()
    while pool.free + pool.used < 1000:
        pool.take(1 + pool.free)
        slabs.append(pool._slabs[-1].nbytes // pool.page_bytes)
    assert slabs[:6] == [1, 1, 2, 4, 8, 16]
    assert max(slabs) == (1000 - 64) // 16
    assert sum(slabs) == 1000
    with pytest.raises(bf.ModelError, match="KV cache is full"):
        pool.take(1 + pool.free)


def test_the_tokens_of_a_step_are_found_by_sequence(model, monkeypatch):
    """Not by looking through all sequences for each of them."""
    made, choices_of = list[int](), cuda.CudaPending.tokens
    monkeypatch.setattr(cuda.CudaPending, "tokens", lambda pending: made.append(1) or choices_of(pending))
    caches, samplers = [model.cache() for _ in range(8)], [Sampling().sampler() for _ in range(8)]
    pending = model.decoder.submit([(cache, [i]) for i, cache in enumerate(caches)], samplers, None)
    assert pending.tokens() == counting(1, 8)
    following = model.decoder.submit([(cache, [PENDING]) for cache in reversed(caches)], samplers, None)
    assert following.tokens() == counting(2, 8)[::-1]
    assert len(made) == 2  # those of this test


def test_every_step_begins_with_the_copy_of_its_inputs(gpu, model, monkeypatch):
    """rotate.cu and attend.cu read inputs and tables of pages before griddepcontrol.wait. Both are there, as the first
    kernel of a step starts behind a copy."""
    done, copy, launch = list[str](), gpu.cuMemcpyHtoDAsync, gpu.launch

    def copied(to: int, *rest: Any) -> tuple:
        done.append("inputs" if to == model.decoder._steps.memory.at("inputs") else "other numbers")
        return copy(to, *rest)

    def launched(function: int, *rest: Any) -> None:
        if gpu.capture is None:
            done.append(gpu._kernels[function][0])
        launch(function, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(gpu, "cuMemcpyHtoDAsync", copied)
        patched.setattr(gpu, "launch", launched)
        tokens_of(model.generate(counting(10, 70), max_tokens=70))
        model.hidden(counting(5, 40))
        model.generate_batch([counting(50, 60), counting(100, 20)], max_tokens=9, presence_penalty=0.1)
        texts, drafts = [counting(50, 1), counting(100, 80), counting(150, 1)], [[51, 52, 9], [], [9, 151]]
        passages = [(model.cache(), text) for text in texts]
        model.decoder.submit(passages, [Sampling().sampler() for _ in texts], None, drafts).choices()
    first = [i for i, name in enumerate(done) if name == "embed.cu"]
    assert len(first) == len(gpu.fed) > 80
    assert {done[i - 1] for i in first} == {"inputs"}
    assert done.count("inputs") == len(first)
    pages = [i for i, name in enumerate(done) if name == "set_pages.cu"]
    assert len(pages) >= 4
    assert {done[i + 1] for i in pages} == {"inputs"}


# ---- the same bits in any batch --------------------------------------------------------------------------------------

# Macros that tell how many rows go together. SLOTS is a multiple of TEAMS, which share K in turns.
OF_ROWS = {"ROWS", "ALONE", "SORTED", "FRESH", "EXPERTS", "SLOTS"}
ROUTING = {"gather.cu", "route.cu"}  # which move rows
# Together these have every kind of part.
OFTEN = ("gpt-oss", "gemma4-moe", "qwen35moe")


def plans(model: Model, batch: step_memory.Batch, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels of a step, without what tells how many rows they have: into how many parts K is split, how many CTAs
    share the keys of a sequence, and what else decides the order of additions."""
    heard = set[driver.KernelLaunch]()
    monkeypatch.setattr(decoder, "compile_together", lambda launches, _: heard.update(launches))
    steps = model.decoder._steps
    model.decoder._layers.prepare(steps.memory, batch)
    found = set[Any]()
    for launch in heard:
        if launch.source not in ROUTING:
            macros = tuple((name, value) for name, value in launch.macros if name not in OF_ROWS)
            along = launch.name in ("marlin_gemm_small", "marlin_gemm_small_normed") or dict(macros).get("FEW") == "1"
            cluster = 0 if launch.source == "choose.cu" else launch.cluster  # it adds integers
            found.add((launch.name, macros, launch.grid[0] if along else 0, cluster))
    return found


@pytest.mark.parametrize("name", ordinary(len(OFTEN), [*OFTEN, *sorted({*MODELS} - {*OFTEN})]))
def test_a_sequence_has_the_plans_that_it_has_alone(gpu, tmp_path, monkeypatch, name):
    """With `batch_invariant`: the next token of one, and a prompt, in steps of up to 512 sequences."""
    for attribute, value in (("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 232448), ("MULTIPROCESSOR_COUNT", 132)):  # an H200's
        monkeypatch.setitem(gpu.ATTRIBUTES, attribute, value)
    gpu.forget()
    write_architecture(tmp_path, name, max_position_embeddings=256)
    model = load(tmp_path, device="cuda")
    steps, layers = model.decoder._steps, model.decoder._layers
    with driver.current(0):
        steps.grow(cuda.TOGETHER)
        states = int(bool(model.decoder._pool.layout.state_bytes))

        def prompts(count: int, rows: int, decoding: int = 0) -> step_memory.Batch:
            about = {"blocks": 8 * count, "prompts": states * count, "chunks": states * count}
            return step_memory.Batch(rows, decoding, scored=decoding + count, **about)

        layers.batch_invariant = True
        alone = plans(model, step_memory.Batch(1, 1, scored=1), monkeypatch)
        for size in (2, 8, 24, 64, 512):
            assert plans(model, step_memory.Batch(size, size, scored=size), monkeypatch) == alone
        prompt = plans(model, prompts(1, 40), monkeypatch)
        for batch in (prompts(1, 8), prompts(9, 360), prompts(4, 2048)):
            assert plans(model, batch, monkeypatch) == prompt
        for batch in (prompts(1, 48, 8), prompts(6, 2560, 512)):
            assert plans(model, batch, monkeypatch) == alone | prompt
        layers.batch_invariant = False
        different = [plans(model, step_memory.Batch(size, size, scored=size), monkeypatch) for size in (1, 64)]
        assert different[0] != different[1]


# ---- drafts ----------------------------------------------------------------------------------------------------------


class Counter(Drafter):
    """Drafts what the fake GPU chooses, but for every `wrong`-th token of the vocabulary."""

    def __init__(self, wrong: int = 1000) -> None:
        self._wrong = wrong

    def draft(self, sequence, most):
        drafted = counting(sequence[-1] + 1, most)
        return [token if token % self._wrong else 3 for token in drafted]


@pytest.mark.parametrize("wrong", [1, 3, 10, 1000])
def test_drafted_tokens_are_rows_of_one_step(gpu, model, monkeypatch, wrong):
    monkeypatch.setattr(Controller, "length", lambda self, kind=0, others=0: self.most)
    cache, prompt = model.cache(), counting(10, 50)
    answer = Generation(
        model.decoder, model.tokenizer, prompt, 60, Sampling(), None, cache, drafter=Counter(wrong)
    ).finish()
    assert answer.tokens == counting(60, 60)
    assert cache.tokens == counting(10, 109)
    check_fed(gpu, cache.tokens, cache.lists[0].pages)
    assert answer.drafts.steps == (59 if wrong == 1 else 8 if wrong == 1000 else answer.drafts.steps)
    assert answer.drafts.accepted == 59 - answer.drafts.steps
    assert {len(step) for step in gpu.fed[1:]} <= {1, 2, 4, 8}  # what graphs there are


def test_drafts_go_in_one_step_with_other_sequences_and_prompts(gpu, model):
    texts = [counting(50, 1), counting(100, 80), counting(150, 1), counting(20, 1), counting(7, 9)]
    drafts = [[51, 52, 9], [], [9, 151], [21], []]
    caches, biased = [model.cache() for _ in texts], Sampling(logit_bias={9: 5.0})
    samplers = [Sampling().sampler(), Sampling().sampler(), biased.sampler(), Sampling().sampler()]
    passages = list(zip(caches, texts, strict=True))
    pending = model.decoder.submit(passages, samplers, None, drafts[:4])
    chosen = [[choice.token for choice in choices] for choices in pending.choices()]
    assert chosen == [[51, 52, 53], [180], [9, 9], [21, 22]]
    assert len(gpu.fed) == 1
    assert [cache.tokens for cache in caches] == [[50, 51, 52], texts[1], [150, 9], [20, 21], texts[4]]
    for cache in caches:
        check_fed(gpu, cache.tokens, cache.lists[0].pages)


NEW, REPEATED = [5], [*counting(5, 100), 5]  # answers to them count on: nothing, and all of it, came before


def test_a_model_is_batch_invariant_from_its_first_draft_on(gpu, model, monkeypatch):
    """Whether a draft is tried or not, and in answers without drafts too: all have the same kernels."""
    monkeypatch.setattr(StepSeconds, "note", lambda self, rows, seconds: None)
    layers, how = model.decoder._layers, {"max_tokens": 40}
    plain = model.generate(NEW, draft="ngram", **how)
    assert not layers.batch_invariant
    assert (plain.drafts.drafted, plain.drafts.steps) == (0, 39)
    drafted = model.generate(REPEATED, draft="ngram", **how)
    assert layers.batch_invariant
    assert drafted.tokens == plain.tokens == counting(6, 40)
    assert drafted.drafts.accepted > 25
    assert model.generate(NEW, **how).tokens == plain.tokens
    assert layers.batch_invariant


def test_a_draft_model_makes_a_model_batch_invariant_at_once(gpu, model):
    assert model.drafters("llm.generate", model, None, None)() is not None
    model.generate(NEW, max_tokens=1)
    assert model.decoder._layers.batch_invariant


def test_a_server_is_batch_invariant_from_its_first_draft_on(gpu, model, monkeypatch):
    """Both kinds of steps are ready before."""
    monkeypatch.setattr(StepSeconds, "note", lambda self, rows, seconds: None)
    decoder, kernels, load_kernel = model.decoder, set[tuple[Any, ...]](), gpu.kernel

    def kernel(source: str, name: str, macros: Any, ordinal: int, shared_bytes: int) -> int:
        kernels.add((source, macros, shared_bytes))
        return load_kernel(source, name, macros, ordinal, shared_bytes)

    monkeypatch.setattr(driver, "kernel", kernel)
    with Engine(model, streams=2, context=200, draft="ngram") as engine:
        warm, captures = set(kernels), decoder.captures
        assert submit(engine, Request(NEW, 40)).wait().ids == counting(6, 40)
        assert not decoder._layers.batch_invariant
        assert engine.counts().drafts == 0
        assert submit(engine, Request(REPEATED, 40)).wait().ids == counting(6, 40)
        assert decoder._layers.batch_invariant
        assert engine.counts().accepted_tokens > 25
        submit(engine, Request(NEW, 4, draft=False)).wait()
        assert decoder._layers.batch_invariant
        assert (kernels, decoder.captures) == (warm, captures)


class Everything(Drafter):
    """As `Counter`, from everything that is known."""

    acceptance = (0.8,)

    def draft(self, sequence, most):
        return Counter(9).draft(sequence, most)


@pytest.mark.parametrize("sometimes", [False, True])
def test_an_engine_drafts_some_sequences_and_not_others(gpu, model, monkeypatch, sometimes):
    """Steps overlap, but where what was chosen must be known before it is drafted behind."""
    dice = random.Random(1)
    pays = lambda self, kind=0, others=0: 0 if sometimes and dice.random() < 0.6 else self.most  # noqa: E731
    monkeypatch.setattr(Controller, "length", pays)
    monkeypatch.setattr("billfish.llm.model.NgramDrafter", Everything)
    with Engine(model, streams=3, context=200, draft="ngram") as engine:
        prompts = [counting(first, length) for first, length in ((50, 1), (100, 80), (100, 90), (10, 120), (60, 33))]
        settings = [{}, {"draft": False}, {"logprobs": 2}, {}, {"sampling": Sampling(frequency_penalty=0.1)}]
        requests = [Request(prompt, 40, **how) for prompt, how in zip(prompts, settings, strict=True)]
        answers = [submit(engine, request) for request in requests]
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = counting(prompt[-1] + 1, 40)
            assert answer.wait().ids == (expected[: expected.index(1)] if 1 in expected else expected)
        counts = engine.counts()
    assert counts.drafted_tokens > counts.accepted_tokens > 40
    assert answers[1].ticket.drafts.drafted == 0
    assert all(answer.ticket.drafts.accepted > 0 for answer in (answers[0], answers[2], answers[3], answers[4]))


def test_each_drafted_token_has_its_own_random_number(gpu, model):
    sampler, other = (Sampling(temperature=1.0, seed=5).sampler() for _ in range(2))
    expected = [other.upcoming(4)[i] for i in range(4)]
    rows = cuda_steps.choices([sampler], [4])
    assert list(rows["random"]) == expected
    [choices] = model.decoder.submit([(model.cache(), [50])], [sampler], None, [[51, 9, 9]]).choices()
    assert len(choices) == 2
    assert sampler.upcoming(2) == expected[2:]
