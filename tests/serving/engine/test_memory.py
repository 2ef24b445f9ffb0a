"""KV caches that share their memory: pages on demand, common beginnings once, and requests that wait where it ends."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import serving_soak
import serving_storm
from cuda_fake_gpu import VOCABULARY, FakeGpu
from llm_architectures import write_model as write_architecture
from llm_models import Small, write_model
from serving_http import serving
from serving_support import alone, random_sampling, random_tokens, small_model, submit

import billfish as bf
from billfish.llm import cuda_kv_cache, load
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import BOUNDS, Request

ENDLESS = Sampling(logit_bias={1: -100.0})


def assert_idle(engine: Engine) -> None:
    counts = engine.counts()
    assert (counts.running, counts.waiting, engine._slots.free) == (0, 0, engine.streams)


# ---- requests that are preempted ------------------------------------------------------------------------------------


@pytest.mark.promise(
    "server", "where memory ends a request waits, is read again and goes on; with `--activations exact` to the bit"
)
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_preempted_requests_get_what_each_gets_alone(tmp_path, architecture):
    """Memory for little more than one long request: those that came last wait, are read again and go on, to the bit."""
    if architecture == "llama":
        model = small_model(tmp_path)
    else:
        write_architecture(tmp_path, architecture, max_position_embeddings=512)
        model = load(tmp_path, device="cpu")
    rng, most = random.Random(1), min(261, model.config.vocabulary)
    common = [rng.randrange(4, most) for _ in range(100)]
    requests = []
    for _ in range(7):
        own = [rng.randrange(4, most) for _ in range(rng.choice([1, 10, 20]))]
        sampling = random_sampling(rng)
        bias = {**sampling.logit_bias, **dict.fromkeys(model.tokenizer.ends, -100.0)}
        sampling = Sampling(**{**vars(sampling), "logit_bias": bias})
        requests.append(Request(common[: rng.choice([0, 20, 40])] + own, rng.randrange(70, 120), sampling))
    with Engine(model, streams=5, context=320, cache_tokens=320, activations="exact") as engine:
        answers = [submit(engine, request) for request in requests]
        vectors = engine.embed([request.prompt for request in requests[:3]])
        for answer in answers:
            answer.wait()
        found = vectors.result(60)
        counts = engine.counts()
        assert_idle(engine)
    assert counts.preemptions > 0
    assert counts.prompt_tokens == sum(len(r.prompt) for r in requests) + sum(len(r.prompt) for r in requests[:3])
    for request, answer in zip(requests, answers, strict=True):
        assert (answer.text, answer.ids, answer.finished) == alone(model, request, activations="exact")
    for request, vector in zip(requests, found, strict=False):
        np.testing.assert_array_equal(vector, model.pool(model.hidden(request.prompt)))


@pytest.mark.promise(
    "server",
    "no request is lost or gets another's tokens under cancels, full queues, preemptions (`make soak`)",
)
def test_a_small_soak(tmp_path):
    found, record = serving_soak.soak(small_model(tmp_path, hidden=32, context=256), 200)
    assert found.wrong == []
    assert record["preemptions"] > 0
    assert record["queue_was_full"] > 0
    assert set(record["ends"]) == {"stop", "length", "cancelled", "left", "vector"}


def test_who_comes_first_is_not_preempted(tmp_path):
    model, ends = small_model(tmp_path), list[int]()
    with Engine(model, streams=4, context=256, cache_tokens=256, activations="exact") as engine:
        with engine._changed:
            for number in range(4):
                request = Request(random_tokens(random.Random(number), 60), 150, ENDLESS)
                take = lambda chosen, number=number: ends.append(number) if chosen.finished else None  # noqa: E731
                engine.submit(request, take)
        engine.close()
        assert ends == [0, 1, 2, 3]
        assert engine.counts().finished["length"] == 4


def test_a_cache_for_less_than_a_request_is_refused(tmp_path):
    with pytest.raises(bf.DataError, match=r"cache_tokens.*100.*256 or more"):
        Engine(small_model(tmp_path), streams=4, context=256, cache_tokens=100)


# ---- pages of a GPU -------------------------------------------------------------------------------------------------


class Code(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


class SmallGpu(FakeGpu):
    """With so many bytes of memory."""

    room = 1 << 40

    def cuMemAlloc(self, nbytes: int) -> tuple:
        return super().cuMemAlloc(nbytes) if nbytes <= self.cuMemGetInfo()[1] else (Code(2), 0)

    def cuMemGetInfo(self) -> tuple:
        return 0, max(0, self.room - sum(memory.nbytes for memory in self.live.values())), self.room


@pytest.fixture
def gpu(monkeypatch, request) -> Iterator[SmallGpu]:
    fake = SmallGpu(monkeypatch)
    monkeypatch.setattr(cuda_kv_cache, "SLAB_BYTES", 1 << 16)
    yield fake
    request.node.funcargs.clear()
    gc.collect()
    assert not fake.live
    monkeypatch.undo()
    fake.forget()


def loaded(tmp_path: Any, context: int = 400) -> bf.llm.Model:
    write_model(tmp_path / "model.gguf", Small(quantization="Q4_0", hidden=64, context=context))
    return load(tmp_path / "model.gguf", device="cuda")


def counting(first: int, count: int) -> list[int]:
    return [(first + i) % VOCABULARY for i in range(count)]


def expected(prompt: list[int], count: int) -> list[int]:
    found = counting(prompt[-1] + 1, count)
    return found[: found.index(1)] if 1 in found else found


def test_streams_that_memory_could_not_hold_at_once(gpu, tmp_path):
    """As 256 streams of 8192 tokens on a card of 24 GB beside 5 GB of weights: a sixteenth of that fits."""
    model = loaded(tmp_path, context=8192)
    model.decoder.choose([(model.cache(), [5])], [Sampling().sampler()], None)
    pages = model.decoder.pages
    gpu.room = sum(memory.nbytes for memory in gpu.live.values()) + 32 * pages.bytes_for(8192)
    with Engine(model, streams=256, context=8192, queue=300) as engine:
        bound = engine.counts().cache_bytes_bound
        assert pages.bytes_for(8192) <= bound <= 32 * pages.bytes_for(8192)
        prompts = [counting(20 + i, 30 + i % 7) for i in range(300)]
        answers = [submit(engine, Request(prompt, 20)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().ids == expected(prompt, 20)
        assert pages.bytes_held <= bound
        assert_idle(engine)
    del engine
    gc.collect()
    other = loaded(tmp_path, context=8192)
    gpu.room = sum(memory.nbytes for memory in gpu.live.values()) + pages.bytes_for(8192) // 2
    with pytest.raises(bf.DataError, match=r"256 streams of 8192 tokens.*--streams or --context"):
        Engine(other, streams=256, context=8192)


@pytest.mark.promise(
    "server", "where memory ends a request waits, is read again and goes on; with `--activations exact` to the bit"
)
def test_requests_of_a_gpu_are_preempted_and_go_on(gpu, tmp_path):
    model = loaded(tmp_path)
    with Engine(model, streams=6, context=256, cache_tokens=384) as engine:
        prompts = [counting(10 + 30 * i, 60 + i) for i in range(8)]
        answers = [submit(engine, Request(prompt, 120)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().ids == expected(prompt, 120)
        counts = engine.counts()
        assert min(counts.preemptions, counts.captures) > 0
        assert counts.cache_bytes <= counts.cache_bytes_bound == 6 * model.decoder.pages.pools[0].page_bytes
        assert_idle(engine)


def test_a_common_beginning_is_in_memory_once(gpu, tmp_path):
    model, common = loaded(tmp_path), counting(3, 200)
    pool = model.decoder.pages.pools[0]
    with Engine(model, streams=16, context=400) as engine:
        prompts = [[*common, *counting(50 + 7 * i, 30)] for i in range(16)]
        with engine._changed:
            answers = [submit(engine, Request(prompt, 20)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().ids == expected(prompt, 20)
        assert [answer.ticket.cached_tokens for answer in answers] == [0] + [192] * 15
        assert pool.shared == 3
        assert pool.used == 4 + 1 * 15
        assert engine._slots.pages.shared == 3
        other = submit(engine, Request(prompts[0], 5, tenant=b"another")).wait()
        assert other.ticket.cached_tokens == 0
    engine._slots.clear()
    assert (pool.used, pool.shared) == (0, 0)


def test_the_oldest_text_is_forgotten_where_memory_ends(gpu, tmp_path):
    model = loaded(tmp_path)
    with Engine(model, streams=2, context=256, cache_tokens=512) as engine:
        prompts = [counting(5 + 40 * i, 128) for i in range(5)]
        for prompt in prompts:
            submit(engine, Request(prompt, 1)).wait()
        cached = [submit(engine, Request([*prompt, 9], 1)).wait().ticket.cached_tokens for prompt in reversed(prompts)]
    assert cached[0] == 112
    assert cached[-1] == 0


@pytest.mark.promise("server", "a sequence never writes to a page of the KV cache that another reads")
def test_a_sequence_that_goes_back_writes_no_page_of_another(gpu, tmp_path):
    model = loaded(tmp_path)
    decoder, sampler = model.decoder, Sampling().sampler()
    cache, text = model.cache(), counting(7, 200)
    decoder.choose([(cache, text)], [sampler], None)
    other = cache.copy()
    pages, theirs = cache.lists[0].pages, list(other.lists[0].pages)
    assert pages[:3] == theirs[:3]
    assert pages[3] != theirs[3]
    copied, copy = [], gpu.cuMemcpyDtoDAsync

    def noted(to: int, source: int, nbytes: int, stream: int) -> tuple:
        copied.append((to, source))
        return copy(to, source, nbytes, stream)

    gpu.cuMemcpyDtoDAsync = noted
    cache.rollback(70)
    decoder.choose([(cache, counting(9, 100))], [sampler], None)
    assert other.lists[0].pages == theirs
    assert pages[0] == theirs[0]
    assert not {*pages[1:]} & {*theirs}
    assert copied == [(pages[1], theirs[1])]
    del gpu.cuMemcpyDtoDAsync
    assert decoder.choose([(other, [5])], [sampler], None) == [6]
    pool = decoder.pages.pools[0]
    del cache
    gc.collect()
    assert (pool.shared, pool.used) == (0, 4)


@pytest.mark.promise("server", "a sequence never writes to a page of the KV cache that another reads")
def test_pages_of_windows_are_shared(gpu, tmp_path):
    """A sequence moves on, and does not write to pages that another still attends to."""
    write_architecture(tmp_path, "gemma3", max_position_embeddings=1024)
    model = load(tmp_path, device="cuda")
    cache, text, sampler = model.cache(), [token % 90 for token in range(700)], Sampling().sampler()
    for start in range(0, 700, 50):
        model.decoder.choose([(cache, text[start : start + 50])], [sampler], None)
    other = cache.copy()
    windowed = other.lists[1]
    held = list(windowed.pages)
    for start in range(0, 300, 30):
        model.decoder.choose([(cache, text[start : start + 30])], [sampler], None)
        assert not {*cache.lists[1].pages[-2:]} & {page for page in held if page}
    assert windowed.pages == held
    del cache, other
    gc.collect()
    assert [(pool.used, pool.shared) for pool in model.decoder.pages.pools] == [(0, 0)] * 2


def test_memory_that_ends_in_the_middle_of_a_change_loses_no_page(gpu, tmp_path):
    model = loaded(tmp_path)
    pool, pages = model.decoder.pages.pools[0], model.decoder.pages
    caches = [model.decoder.cache(64) for _ in range(3)]
    pages.limit(pool.page_bytes * (pool.used + pool.free), 0)
    total = pool.used + pool.free
    with pytest.raises(bf.ModelError, match="KV cache is full"):
        caches.extend(model.decoder.cache(64) for _ in range(total))
    gc.collect()
    assert not caches[0].fits(64 * total, 1, 0)
    assert pool.used + pool.free == total
    caches.clear()
    gc.collect()
    assert (pool.used, pool.free) == (0, total)


def test_metrics_tell_of_pages_and_times(tmp_path):
    write_model(tmp_path / "m.gguf", Small(context=256))
    with serving(tmp_path / "m.gguf", streams=4, context=256, cache_tokens=256) as server:
        engine = server.engine
        with engine._changed:
            requests = [Request(random_tokens(random.Random(i), 60), 100, ENDLESS) for i in range(4)]
            answers = [submit(engine, request) for request in requests]
        for answer in answers:
            answer.wait()
        found = serving_storm.gauges(server.url)
        counts = engine.counts()
    assert found["billfish_preemptions_total"] == counts.preemptions > 0
    assert found["billfish_prefill_tokens_total"] == counts.prefill_tokens > 4 * 60
    assert found['billfish_first_token_time_seconds_bucket{le="+Inf"}'] == 4
    assert found["billfish_between_tokens_time_seconds_count"] == 4 * 99
    assert found["billfish_between_tokens_time_seconds_sum"] > 0
    states = [found[f'billfish_cache_pages{{state="{state}"}}'] for state in ("used", "shared", "free")]
    assert states == [counts.pages.used, 0, 4 - counts.pages.used]
    times = [found[f'billfish_first_token_time_seconds_bucket{{le="{bound:g}"}}'] for bound in BOUNDS]
    assert times == sorted(times)
