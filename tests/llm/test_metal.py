"""The decoder of Apple GPUs, executed by MLX on the CPU with our kernels in the emulator, against the CPU's decoder."""

from __future__ import annotations

import itertools
import json
import sys
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from llm_architectures import ENCODERS, MODELS, TOKENS, write_model
from llm_folders import write_random
from llm_models import Small
from llm_models import write_model as write_gguf
from serving_http import process, send

import billfish as bf
from billfish.backends import emulator
from billfish.cli.main import main
from billfish.llm import load
from billfish.llm.devices import make_decoder
from billfish.llm.sampler import Sampling, choose_token
from billfish.models import MODEL_TYPES
from billfish.models.description import Dense

mx = pytest.importorskip("mlx.core")
from billfish.llm.metal_cache import KeysAndValues  # noqa: E402
from billfish.llm.metal_parts import RouterPart  # noqa: E402
from billfish.llm.metal_sampler import next_tokens  # noqa: E402

QUICK = ("gpt-oss", "gemma4", "qwen35")  # windows, sinks, experts; shared keys, inputs per layer; a delta net
FEW_ROWS = ("gpt-oss", "qwen35")  # a kernel for several rows takes 3 s to compile
PLAIN = ("gemma", "qwen2", "mistral")  # types of model without settings that matter
EVERY = (*MODELS, *PLAIN)
SOME = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in EVERY]
LIMIT = 2e-2  # of the largest logit, in float16. transformers with the same weights in float16: up to 1.3e-2
pytestmark = [pytest.mark.torch, pytest.mark.compile]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A small model on the CPU and in the emulator, loaded once."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def pair_of(name: str, format: str | None = "q4_0"):
        if (name, format) not in made:
            if not (folder / name).exists():
                write_random(folder / name, name) if name in PLAIN else write_model(folder / name, name)
            how = {"quantize": format, "method": "rtn"} if format else {}
            made[name, format] = tuple(load(folder / name, device=d, **how) for d in ("cpu", "metal-emulator"))
        return made[name, format]

    return pair_of


def error(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each row, beside the largest logit."""
    return np.abs(actual - expected).max(axis=1) / np.abs(expected).max()


def test_every_architecture_is_here():
    """Encoders run on the CPU."""
    assert {kind for _, kind, _ in (MODELS | ENCODERS).values()} | {*PLAIN} == {*MODEL_TYPES}


# Of two experts with nearly equal scores, rounding may choose either, and no logits behind it are alike. So a second
# run takes the experts of the first, whose scores have to be the same up to rounding.


def record(monkeypatch) -> list[tuple[mx.array, mx.array]]:
    """What routers say from now on, in the order of their layers and pass by pass: scores of experts, and the best."""
    seen, best = [], RouterPart.best

    def recorded(router, scores):
        seen.append((scores, best(router, scores)))
        return seen[-1][1]

    monkeypatch.setattr(RouterPart, "best", recorded)
    return seen


def follow(monkeypatch, said: list[tuple[mx.array, mx.array]]) -> list[mx.array]:
    """Routers of one pass choose what was said. Returns how far their own scores are from those, in time."""
    given, apart = iter(said), []

    def followed(router, scores):
        expected, best = next(given)
        apart.append(mx.abs(scores - expected).max())
        return best

    monkeypatch.setattr(RouterPart, "best", followed)
    return apart


@pytest.mark.parametrize("name", SOME)
def test_logits_are_those_of_the_cpu(pair, name, monkeypatch):
    """Of every row: in float32 to rounding, in float16 within its limit."""
    cpu, metal = pair(name)
    metal.decoder.set_cache_type("float32")
    expected = cpu.logits(TOKENS)
    with monkeypatch.context() as patch:
        said = record(patch)
        assert error(metal.logits(TOKENS), expected).max() <= 2e-5
    metal.decoder.set_cache_type("float16")
    with monkeypatch.context() as patch:
        apart = follow(patch, said)
        hidden = metal.decoder.run([(metal.cache(), TOKENS)], None)
    errors = error(metal.decoder.logits(hidden, None), expected)
    assert errors.max() <= LIMIT
    assert np.median(errors) <= LIMIT / 4
    assert max(map(float, apart), default=0) <= LIMIT


@pytest.mark.parametrize("name", SOME)
def test_greedy_tokens_of_three_sequences_are_the_cpus(pair, name, monkeypatch):
    """In float16: each token is the best of the exact logits behind those before it, up to near ties."""
    cpu, metal = pair(name)
    metal.decoder.set_cache_type("float16")
    prompts, count = [TOKENS[:9], TOKENS[:3], TOKENS[2:19]], 8
    caches, samplers = [metal.cache() for _ in prompts], [Sampling(temperature=0).sampler([]) for _ in prompts]
    steps = [prompts]
    with monkeypatch.context() as patch:
        said = record(patch)
        for _ in range(count):
            chosen = metal.decoder.choose(list(zip(caches, steps[-1], strict=True)), samplers, None)
            steps.append([[token] for token in chosen])
    routers = sum(not isinstance(block.feed_forward, Dense) for block in metal.config.blocks)
    starts = np.cumsum([0, *map(len, prompts)])
    metal.decoder.set_cache_type("float32")
    for i in range(len(prompts)):
        text = [token for step in steps[:-1] for token in step[i]]
        rows = [slice(starts[i], starts[i + 1]), *[slice(i, i + 1)] * (count - 1)]
        own = [
            [mx.concatenate([said[p * routers + r][part][rows[p]] for p in range(count)]) for part in (0, 1)]
            for r in range(routers)
        ]
        with monkeypatch.context() as patch:
            apart = follow(patch, own)
            expected = metal.logits(text) if routers else cpu.logits(text)
        tokens = [step[i][0] for step in steps[1:]]
        for logits, token in zip(expected[-count:], tokens, strict=True):
            assert logits[token] >= logits.max() - LIMIT * np.abs(expected).max()
        assert max(map(float, apart), default=0) <= LIMIT


@pytest.mark.full
@pytest.mark.model
def test_smollm2_has_the_logits_of_the_cpu():
    """A whole model, its own weights."""
    tokens, cpu, metal = [504, 3575, 282, 4649, 314], *(load(device=d) for d in ("cpu", "metal-emulator"))
    expected = cpu.logits(tokens)
    metal.decoder.set_cache_type("float32")
    assert error(metal.logits(tokens), expected).max() <= 2e-5
    metal.decoder.set_cache_type("float16")
    hidden = metal.decoder.run([(metal.cache(), tokens)], None)
    assert error(metal.decoder.logits(hidden, None), expected).max() <= 1e-2


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW_ROWS else pytest.mark.full) for n in EVERY])
def test_any_pieces_and_any_batch_give_the_same_logits(pair, name):
    _, metal = pair(name)
    metal.decoder.set_cache_type("float32")
    expected = metal.logits(TOKENS)
    cuts = [0, 5, 6, 23, len(TOKENS)]
    cache = metal.cache()
    pieces = [metal.decoder.run([(cache, TOKENS[a:b])], "exact") for a, b in itertools.pairwise(cuts)]
    assert error(metal.decoder.logits(np.concatenate(pieces), "exact"), expected).max() <= 2e-5
    lengths = (3, 17, 30)
    caches = [metal.cache() for _ in lengths]
    metal.decoder.run([(c, TOKENS[: n - 1]) for c, n in zip(caches, lengths, strict=True)], "exact")
    rows = metal.decoder.run([(c, [TOKENS[n - 1]]) for c, n in zip(caches, lengths, strict=True)], "exact")
    wanted = expected[[n - 1 for n in lengths]]
    assert error(metal.decoder.logits(rows, "exact"), wanted).max() <= 2e-5


@pytest.mark.parametrize("name", SOME)
def test_a_sequence_goes_back(pair, name, monkeypatch):
    """A cache that is cut back, or copied, goes on as a new one does."""
    monkeypatch.setattr("billfish.llm.recurrent_checkpoints.EVERY", 8)
    _, metal = pair(name)
    metal.decoder.set_cache_type("float32")
    expected = metal.logits(TOKENS[:20])[-1:]
    cache = metal.cache()
    metal.decoder.run([(cache, [*TOKENS[:17], 3, 4, 5])], "exact")
    copied = cache.copy()
    for each in (cache, copied):
        kept = each.rollback(17)
        assert kept in (16, 17)  # a recurrent state goes back to a checkpoint
        rows = metal.decoder.run([(each, TOKENS[kept:20])], "exact")
        assert error(metal.decoder.logits(rows[-1:], "exact"), expected).max() <= 2e-5
        assert each.tokens == TOKENS[:20]


@pytest.mark.parametrize("name", SOME)
def test_greedy_tokens_are_the_cpus(pair, name):
    """One step is always submitted before it is asked for."""
    cpu, metal = pair(name)
    metal.decoder.set_cache_type("float32")
    how = {"max_tokens": 8, "activations": "exact", "temperature": 0}
    assert metal.generate(TOKENS[:9], **how).tokens == cpu.generate(TOKENS[:9], **how).tokens
    together = metal.generate_batch([TOKENS[:9], TOKENS[:3]], **how)
    assert together == cpu.generate_batch([TOKENS[:9], TOKENS[:3]], **how)


def test_drafted_rows_have_the_bits_that_they_have_alone(tmp_path, monkeypatch):
    """In float16, as they are used, beside another sequence, too; and so drafts change no token. The embedding, whose
    rows are looked up, may be unquantized."""
    write_gguf(tmp_path / "model.gguf", Small(quantization="Q4_0"))
    floats = lambda name, tensor: bf.dequantize(tensor) if name.startswith("token_embd") else tensor  # noqa: E731
    metal = load(tmp_path / "model.gguf", device="metal-emulator", convert=floats)
    decoder, text = metal.decoder, TOKENS[:20]
    assert decoder.rows_alike(None) == 8
    caches = [metal.cache() for _ in range(3)]
    for cache in caches:
        decoder.run([(cache, text)], None)
    alone = [decoder.scores([(caches[0], [token])], [1], None)[0] for token in TOKENS[20:28]]
    passages = [(caches[1], TOKENS[20:28]), (caches[2], TOKENS[20:23])]
    for rows in decoder.scores(passages, [8, 3], None):
        assert np.array_equal(rows, np.concatenate(alone)[: len(rows)])
    how, draft = {"max_tokens": 6, "temperature": 0}, load(tmp_path / "model.gguf", device="cpu")
    drafted = metal.generate(text, draft=draft, **how)
    assert drafted.tokens == metal.generate(text, **how).tokens
    assert drafted.drafts.drafted > 0
    on_gpu = lambda logits, samplers: pytest.fail("in float32")  # noqa: E731
    monkeypatch.setattr("billfish.llm.metal.next_tokens", on_gpu)  # whose rounding is another
    how |= {"temperature": 1.0, "seed": 3}
    drafted = metal.generate(text, draft=draft, **how)
    assert drafted.tokens == metal.generate(text, **how).tokens
    assert drafted.drafts.drafted > 0


def test_drafts_are_refused_where_rows_depend_on_others(pair):
    """Experts, recurrent layers, and matrices that MLX multiplies with."""
    for name in ("gpt-oss", "qwen35", "llama3"):  # the head of the last one is not quantized
        with pytest.raises(bf.DataError, match=r"draft.*LM head.*Q4_K_M"):
            pair(name)[1].generate(TOKENS[:9], draft="ngram", max_tokens=2)


@pytest.mark.parametrize("name", SOME)
def test_an_answer_goes_on_from_the_cache_of_another(pair, name):
    """A step ahead that was computed for the other text is not taken."""
    _, metal = pair(name)
    metal.decoder.set_cache_type("float32")
    how = {"max_tokens": 6, "temperature": 0, "activations": "exact"}
    cache = metal.cache()
    first = metal.generate(TOKENS[:9], cache=cache, **how).tokens
    assert metal.generate(TOKENS[:12], cache=cache, **how).tokens == metal.generate(TOKENS[:12], **how).tokens
    assert metal.generate(TOKENS[:9], cache=cache, **how).tokens == first


def test_each_token_may_be_asked_for_by_another_thread(pair):
    """And a step ahead described by one be submitted by the next."""
    _, metal = pair("qwen35")
    how = {"max_tokens": 4, "temperature": 0}
    expected, answer = metal.generate(TOKENS[:9], **how).tokens, metal.stream(TOKENS[:9], **how)
    for _ in range(how["max_tokens"] + 1):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(next, answer, "").result()
    assert answer.tokens == expected


def test_an_answer_that_is_over_keeps_no_cache(pair):
    _, metal = pair("qwen35")
    cache = metal.cache()
    metal.generate(TOKENS[:9], cache=cache, max_tokens=3, temperature=0)
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


def passes(decoder, monkeypatch) -> list[int]:
    """The rows of every pass from now on."""
    rows, forward = [], decoder._forward

    def counted(tokens, spans):
        rows.append(len(tokens))
        return forward(tokens, spans)

    monkeypatch.setattr(decoder, "_forward", counted)
    return rows


@pytest.mark.parametrize("name", QUICK)
def test_a_batch_takes_its_step_ahead(pair, name, monkeypatch):
    """Also those that go on when one of them has ended, and beside the prompt of another."""
    cpu, metal = pair(name)
    metal.decoder.set_cache_type("float32")
    prompts = [TOKENS[:9], TOKENS[:3], TOKENS[2:7]]

    def answers(model) -> list[list[int]]:
        caches, going, found = [model.cache() for _ in prompts], [[0, 1]] * 2 + [[1]] * 2 + [[1, 2]] * 2, [[], [], []]
        for numbers in going:
            fed = [(caches[i], found[i][-1:] or prompts[i]) for i in numbers]
            samplers = [Sampling(temperature=0).sampler(prompts[i]) for i in numbers]
            for i, token in zip(numbers, model.decoder.choose(fed, samplers, "exact"), strict=True):
                found[i].append(token)
        return found

    rows = passes(metal.decoder, monkeypatch)
    assert answers(metal) == answers(cpu)
    # Prompts of two, their next step, the one whose first row nobody asks for; the other's alone; a prompt, and both.
    assert rows == [12, 2, 2, 1, 1, 5, 2, 2]


def test_a_step_ahead_waits_while_others_decode(pair, monkeypatch):
    _, metal = pair("qwen35")
    caches, sampler = [metal.cache() for _ in range(2)], Sampling(temperature=0).sampler([])
    plain = [metal.generate(TOKENS[i : i + 5], max_tokens=3, temperature=0).tokens for i in range(2)]
    rows, found = passes(metal.decoder, monkeypatch), [[], []]
    for _ in range(3):
        for i, cache in enumerate(caches):
            fed = found[i][-1:] or TOKENS[i : i + 5]
            found[i] += metal.decoder.choose([(cache, fed)], [sampler], None)
    assert found == plain
    assert rows == [5, 1, 5, 1, 1, 1, 1, 1]


def test_a_token_does_not_wait_for_the_step_behind_it(pair, monkeypatch):
    """MLX has an array when all that was submitted with it is there; and what runs may not read keys that the next
    step writes, or MLX copies them all."""
    _, metal = pair("gpt-oss")
    log, asarray, submit = [], np.array, mx.async_eval

    def read(x, *given):
        if isinstance(x, mx.array) and x.shape == (1,) and x.dtype == mx.uint32:
            log.append("read")
        return asarray(x, *given)

    monkeypatch.setattr(np, "array", read)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: log.append(f"submit {arrays[0].ndim}") or submit(*arrays))
    forward = metal.decoder._forward
    monkeypatch.setattr(metal.decoder, "_forward", lambda *given: log.append("describe") or forward(*given))
    cache, sampler = metal.cache(), Sampling(temperature=0).sampler([])
    token = metal.decoder.choose([(cache, TOKENS[:5])], [sampler], None)
    log.clear()
    metal.decoder.choose([(cache, token)], [sampler], None)
    assert log == ["submit 1", "describe", "read", "submit 2"]


def test_a_step_that_fails_leaves_its_caches_empty(pair, monkeypatch):
    _, metal = pair("qwen35")
    caches, samplers = [metal.cache() for _ in range(2)], [Sampling(temperature=0).sampler([]) for _ in range(2)]
    first = metal.decoder.choose([(cache, TOKENS[:5]) for cache in caches], samplers, None)

    def fail(*_: object) -> None:
        raise RuntimeError("the GPU has gone")

    fed = [(cache, [token]) for cache, token in zip(caches, first, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", fail)
        with pytest.raises(RuntimeError, match="gone"):
            metal.decoder.choose(fed, samplers, None)
    assert [cache.tokens for cache in caches] == [[], []]
    assert metal.decoder.choose([(cache, TOKENS[:5]) for cache in caches], samplers, None) == first


def test_a_cache_that_was_given_another_text_takes_no_step_of_the_one_before(pair):
    """Of the same length, and with the same token behind it."""
    _, metal = pair("llama3")
    decoder, sampler, cache, other = metal.decoder, Sampling(temperature=0).sampler([]), metal.cache(), metal.cache()
    decoder.run([(other, TOKENS[10:15])], None)
    token = decoder.choose([(metal.cache(), TOKENS[:5])], [sampler], None)
    expected = decoder.run([(other.copy(), token)], None)
    assert decoder.choose([(cache, TOKENS[:5])], [sampler], None) == token
    cache.begin_as(other, 5)
    assert np.array_equal(np.array(decoder._last_rows([(cache, token)])), expected)


@pytest.mark.parametrize(
    "how", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.5}, {"temperature": 0.3}, {"temperature": 0}]
)
def test_sampling_is_the_cpus(how):
    logits = np.random.default_rng(0).normal(size=(40, 300)).astype(np.float32)
    logits[:, 7] = logits[:, 9]  # of equal tokens, the first is kept
    samplers = [Sampling(**{"temperature": 1.1, "seed": seed, **how}).sampler() for seed in range(len(logits))]
    expected = [choose_token(row, s.how, s.peek()) for row, s in zip(logits, samplers, strict=True)]
    assert np.array(next_tokens(mx.array(logits), samplers)).tolist() == expected


def test_a_window_does_not_grow():
    """What no later token sees is let go, in steps."""
    held, window = KeysAndValues(mx.zeros((2, 1, 0, 4))), 100
    for position in range(1500):
        held = held.with_rows(position, mx.full((2, 1, 1, 4), float(position)), window)
    keys, _ = held.seen(1500, 1, window)
    assert np.array_equal(np.array(keys)[0, 0, :, 0], np.arange(1400, 1500))
    assert held.both.shape[2] <= window + 2 * 256
    assert held.holds(1500, window)
    assert not held.holds(1000, window)


def test_a_decode_step_of_a_dense_layer_has_seven_launches_of_ours(pair):
    """Beside MLX's attention, and its update of the KV cache."""
    _, metal = pair("llama3")
    cache = metal.cache()
    metal.decoder.run([(cache, TOKENS[:5])], None)
    with emulator.launches() as log:
        metal.decoder.run([(cache, [7])], None)
    counts = Counter(launch.name.removesuffix("_q4_0") for launch in log)
    layers = metal.config.layers
    assert counts == {"marlin_add_norm": 2 * layers, "marlin_rotate": layers, "marlin_gemv": 4 * layers}


@pytest.fixture
def file(tmp_path):
    """Of mixed formats: v is multiplied apart from q and k."""
    write_gguf(tmp_path / "small.gguf", Small(quantization="Q4_0", finer="Q8_0"))
    return str(tmp_path / "small.gguf")


def test_run_and_eval_on_metal(file, tmp_path, capsys):
    (tmp_path / "text").write_text("ab cab " * 4)

    def said(device: str) -> tuple[str, float]:
        how = ["--activations", "exact", "--cache-type", "float32", "--device", device]
        assert main(["run", file, "-p", "ab", "-n", "4", "--temperature", "0", *how]) == 0
        answer = capsys.readouterr().out
        assert main(["eval", file, "--text", str(tmp_path / "text"), "--json", *how]) == 0
        return answer, json.loads(capsys.readouterr().out)[0]["perplexity"]

    (answer, perplexity), (metal_answer, metal_perplexity) = said("cpu"), said("metal-emulator")
    assert metal_answer == answer != ""
    assert metal_perplexity == pytest.approx(perplexity, rel=1e-4)


@pytest.mark.full
@pytest.mark.process
def test_serve_on_metal(file):
    """Three requests at once."""
    prompts, how = ["ab", "a", "cab ab"], {"max_tokens": 4, "temperature": 0}
    alone = load(file, device="cpu")
    words = ["--activations", "exact", "--cache-type", "float32", "--streams", "3", "--context", "64"]
    words += ["--device", "metal-emulator"]
    with process(file, *words) as (_, url), ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda prompt: send(url, "/v1/completions", {"prompt": prompt, **how}), prompts)
        found = [answer["choices"][0]["text"] for _, _, answer in answers]
    assert found == [alone.generate(prompt, raw=True, activations="exact", **how).text for prompt in prompts]


def test_a_decode_step_of_a_layer_whose_v_has_another_format_has_a_launch_more(file):
    metal = load(file, device="metal-emulator")
    cache = metal.cache()
    metal.decoder.run([(cache, TOKENS[:5])], None)
    with emulator.launches() as log:
        metal.decoder.run([(cache, [7])], None)
    counts = Counter(launch.name for launch in log)
    layers = metal.config.layers
    assert (counts["marlin_gemv_q4_0"], counts["marlin_gemv_q8_0"]) == (3 * layers, 2 * layers)


@pytest.mark.skipif(sys.platform == "darwin", reason="has Metal")
def test_a_machine_without_metal_is_told(pair, tmp_path):
    write_model(tmp_path, "llama3")
    with pytest.raises(bf.BackendUnavailable, match=r"metal.*macOS"):
        load(tmp_path, device="metal")


def test_an_mlx_without_streams_for_any_thread_is_too_old(file, monkeypatch):
    monkeypatch.delattr(mx, "new_thread_unsafe_stream")
    with pytest.raises(bf.BackendUnavailable, match=r"mlx is too old.*\[metal\]"):
        load(file, device="metal-emulator")


def test_encoders_run_on_the_cpu():
    encoder = SimpleNamespace(config=SimpleNamespace(encoder=True))
    with pytest.raises(bf.BackendUnavailable, match=r"metal-emulator.*encoders.*device='cpu'"):
        make_decoder("metal-emulator", encoder)


def test_activations_that_there_are_not(pair):
    _, metal = pair("qwen35")
    with pytest.raises(bf.DataError, match=r"activations.*q8.*exact"):
        metal.generate(TOKENS[:3], activations="q8")
