"""The parts around the decoder: files, sampling, generation, evaluation, commands. Small random models only."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import struct
import sys
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from common import facts
from llm_models import Small, write_model
from safetensors.numpy import save_file

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.checkpoints.gguf_header import read_header
from billfish.checkpoints.safetensors_files import MappedFile
from billfish.cli import run
from billfish.cli.main import main, parser_of
from billfish.core.errors import MissingPackage
from billfish.llm import evaluate, load
from billfish.llm.cpu import CpuDecoder
from billfish.llm.model import Model
from billfish.llm.sampler import Sampler, Sampling, _kept, best_of


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small())
    return file


@pytest.fixture(scope="module")
def model(path):
    return load(path)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_file_that_breaks_off_anywhere_is_refused(path, tmp_path):
    whole = path.read_bytes()
    header = min(info.offset for info in read_header(MappedFile(path)).tensors)
    broken = tmp_path / "broken.gguf"
    for length in [*range(0, header - 32, 97), len(whole) - 100]:
        broken.write_bytes(whole[:length])
        with pytest.raises(bf.CheckpointError, match=r"damaged GGUF header|complete|truncated|empty file|unknown type"):
            load(broken)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", r"begins with b'GGML\\x03"),
        (4, struct.pack("<I", 1), "b'GGUF', version 1"),
        (8, struct.pack("<Q", 2**60), "damaged"),
        (16, struct.pack("<Q", 2**60), "damaged"),
        (24, struct.pack("<Q", 2**63), "damaged"),
    ],
)
def test_a_header_that_lies_is_refused(path, tmp_path, at, value, message):
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    lying = tmp_path / "lying.gguf"
    lying.write_bytes(data)
    with pytest.raises(bf.CheckpointError, match=message):
        load(lying)


def test_no_file(tmp_path):
    with pytest.raises(bf.CheckpointError, match="no such file"):
        load(tmp_path / "none.gguf")


def test_paths_that_hold_no_model_are_named(tmp_path, capsys):
    save_file({"t": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "pickle.bin").write_bytes(b"PK\x03\x04 and so on")
    (tmp_path / "empty").mkdir()
    no_config = "no config.json. Supported are bert, modernbert, ernie4_5, gemma,"
    for path, got in (
        (tmp_path, no_config),
        (tmp_path / "model.safetensors", no_config),
        (tmp_path / "empty", "no *.safetensors and no *.gguf"),
        (tmp_path / "none", "hf download"),
        (tmp_path / "pickle.bin", "PyTorch|pickle.safetensors"),
    ):
        for command in (["run", str(path), "-p", "a"], ["eval", str(path), "--text", __file__]):
            assert main(command) == 2
            assert re.search(facts(f"billfish: load: |{path}|{got}"), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("small", "message"),
    [
        (Small("mamba"), r"architecture 'mamba'.*llama, .*qwen3, "),
        (Small(without=("blk.1.ffn_up.weight",)), r"no tensor blk.1.ffn_up.weight.*llama"),
        (Small(without=("output_norm.weight",)), r"no tensor output_norm.weight"),
        (Small("qwen3", fields={"qwen3.expert_count": 8}), r"expert_count.*8.*qwen3 has no experts"),
        (Small(fields={"llama.rope.scaling.type": "yarn"}), r"no field .*rope.scaling.factor"),
        (Small(kv_heads=3), r"head_count_kv.*3.*divisor of 4"),
        (Small(head_size=8, hidden=32), r"key_length.*8.*multiple of 16"),
    ],
)
def test_models_that_cannot_run_say_why(tmp_path, small, message):
    write_model(tmp_path / "model.gguf", small)
    with pytest.raises(bf.ModelError, match=message):
        load(tmp_path / "model.gguf")


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = Sampler(Sampling(temperature=1.0, seed=5))
    counts = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 0.03
    sharper = Sampler(Sampling(temperature=0.5, seed=5))
    counts = np.bincount([sharper.choose(logits) for _ in range(4000)], minlength=4) / 4000
    assert np.abs(counts - np.array([16, 4, 1, 1]) / 22).max() < 0.03


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        (Sampling(temperature=0), {1}),
        (Sampling(temperature=5, top_k=1), {1}),
        (Sampling(temperature=5, top_k=2), {1, 3}),
        (Sampling(temperature=1, top_p=0.6), {1}),
        (Sampling(temperature=1, top_p=0.8), {1, 3}),
        (Sampling(temperature=1, top_k=3, top_p=0.99), {0, 1, 3}),
        (Sampling(temperature=9), {0, 1, 2, 3}),
        (Sampling(temperature=1, min_p=0.3), {1, 3}),
        (Sampling(temperature=1, min_p=1.0), {1}),
        (Sampling(temperature=1, top_k=3, min_p=0.01), {0, 1, 3}),
        (Sampling(temperature=0, logit_bias={2: 5.0}), {2}),
        (Sampling(temperature=9, logit_bias={1: -100.0, 3: -100.0}), {0, 2}),
    ],
)
def test_only_the_best_are_drawn(how, allowed):
    logits = np.log(np.array([0.1, 0.6, 0.05, 0.25], np.float32))
    sampler = how.sampler()
    assert {sampler.choose(logits) for _ in range(600)} == allowed


def test_penalties_of_tokens_that_were_there():
    """By hand: divided or multiplied if in prompt or answer, less for each time in the answer, then the bias."""
    how = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={0: 0.125, 3: -1.0})
    sampler, scores = how.sampler(prompt=[1, 1, 2]), np.array([1.0, 4.0, -1.0, 0.5], np.float32)
    assert sampler.adjusted(scores).tolist() == [1.125, 2.0, -2.0, -0.5]
    assert [sampler.choose(scores) for _ in range(3)] == [1, 1, 0]
    assert sampler.adjusted(scores).tolist() == [0.5 - 0.75 + 0.125, 2.0 - 1.0, -2.0, -0.5]
    assert scores.tolist() == [1.0, 4.0, -1.0, 0.5], "the caller's scores stay"


def test_only_settings_that_a_gpu_does_not_know_need_scores():
    assert not Sampling(temperature=1, top_k=5, top_p=0.5, min_p=0.1, seed=3).sampler([5]).needs_scores
    for how in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {5: 1.0}},
    ):
        assert Sampling(**how).sampler().needs_scores


def test_top_p_of_a_flat_vocabulary_needs_more_than_the_first_thousand():
    kept = _kept(np.full(5000, 1000, np.uint64), Sampling(temperature=1, top_p=0.9))
    assert np.array_equal(kept, np.arange(5000) < 4500)
    assert best_of(np.array([1, 3, 3, 2], np.uint64), 3).tolist() == [1, 2, 3]
    many = np.random.default_rng(0).integers(0, 5, 3000).astype(np.uint64)
    for count in (1, 10, 700, 3000):
        assert best_of(many, count).tolist() == sorted(range(3000), key=lambda i: (-int(many[i]), i))[:count]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"min_p": 1.5},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"logit_bias": {5: 1e9}},
    ],
)
def test_settings_out_of_range(model, bad):
    with pytest.raises(bf.DataError, match=rf"llm.generate: {next(iter(bad))} is"):
        model.generate("a", **bad)


def test_settings_reach_answers_of_one_and_of_many(model):
    how = {"max_tokens": 12, "activations": "exact", "repetition_penalty": 3.0, "logit_bias": {1: -100.0}}
    tokens = [5, 6, 7]
    answer = model.generate(tokens, **how)
    text = "".join(answer)
    assert len(set(answer.tokens)) == 12, "nothing comes twice"
    assert text != "".join(model.generate(tokens, max_tokens=12, activations="exact"))
    assert model.generate_batch([tokens, [9]], **how)[0] == text
    for generate in (model.generate, lambda prompt, **more: model.generate_batch([prompt], **more)):
        with pytest.raises(bf.ModelError, match=r"logit_bias.*token 999999.*tokens from 0 to"):
            generate(tokens, logit_bias={999999: 1.0})


# ---- generating -----------------------------------------------------------------------------------------------------


def test_prompts_as_text_messages_and_tokens(model):
    tokens = model.encode("ab")
    assert tokens == model.encode([{"role": "user", "content": "ab"}])
    assert model.tokenizer.encode("<s><|user|>ab<|assistant|>") == tokens
    assert model.encode("ab", raw=True) == model.tokenizer.encode("ab")
    answers = [
        "".join(model.generate(prompt, max_tokens=5)) for prompt in ("ab", [{"role": "user", "content": "ab"}], tokens)
    ]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(bf.DataError, match="a string, messages or token ids"):
        model.encode([1, "a"])


def test_answers_end_with_length_context_or_the_models_own(model):
    assert list(model.generate("a", max_tokens=0)) == []
    short = model.generate([5, 6], max_tokens=3)
    assert (short.finish_reason, short.finished, len(short.tokens)) == ("length", "length", 3)
    full = model.generate([5] * 120, max_tokens=500, temperature=3.0, top_k=50)
    assert (full.finish_reason, full.finished) in (("length", "context"), ("stop", "end"))
    assert full.context_full == (full.finish_reason == "length")
    if full.context_full:
        assert 120 + len(full.tokens) == model.config.context + 1


def test_too_long_a_prompt_and_other_bad_ones(model):
    with pytest.raises(bf.ModelError, match=r"129 tokens.*context is 128"):
        model.generate([5] * 129)
    with pytest.raises(bf.ModelError, match="prompt is empty"):
        model.generate([])
    with pytest.raises(bf.ModelError, match=r"token 999.*tokens from 0 to 260"):
        model.logits([1, 999])
    with pytest.raises(bf.FormatError, match=r"activations.*'q4'"):
        model.generate("a", activations="q4")
    with pytest.raises(bf.DataError, match="max_tokens"):
        model.generate("a", max_tokens=-1)


def test_batches_of_more_rows_than_the_small_kernels_take(model):
    prompts = [[5 + i, 9, 30 + i] for i in range(11)]
    settings = {"max_tokens": 9, "temperature": 1.5, "seed": 1, "activations": "exact"}
    assert model.generate_batch(prompts, **settings) == ["".join(model.generate(p, **settings)) for p in prompts]


# ---- evaluating -----------------------------------------------------------------------------------------------------


def test_evaluation_by_hand(model, tmp_path):
    write_model(tmp_path / "other.gguf", Small(seed=9))
    other = load(tmp_path / "other.gguf")
    tokens = np.random.default_rng(1).integers(4, 260, 70).tolist()
    found = evaluate(model, tokens, against=other, window=40, activations="exact")
    losses, divergences, same = [], [], []
    for part in (tokens[:40], tokens[40:]):
        p, q = (_probabilities(m.logits(part)[:-1]) for m in (other, model))
        losses += [-np.log(row[token]) for row, token in zip(q, part[1:], strict=True)]
        divergences += (p * np.log(p / q)).sum(axis=1).tolist()
        same += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    assert found.tokens == 68
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert found.divergence == pytest.approx(np.mean(divergences), rel=1e-6)
    assert found.same_best == pytest.approx(np.mean(same))
    assert evaluate(model, tokens, against=model, activations="exact").divergence == 0


def _probabilities(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_evaluation_of_what_cannot_be(model, tmp_path):
    with pytest.raises(bf.DataError, match=r"window.*129"):
        evaluate(model, [5] * 10, window=129)
    with pytest.raises(bf.DataError, match="2 or more"):
        evaluate(model, [5])
    write_model(tmp_path / "gemma.gguf", Small("gemma"))
    with pytest.raises(bf.ModelError, match=r"against=.*266 tokens.*261"):
        evaluate(model, [5] * 10, against=load(tmp_path / "gemma.gguf"), window=10)


# ---- commands -------------------------------------------------------------------------------------------------------


def test_eval_command(path, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("abc " * 30)
    assert main(["eval", str(path), "--text", str(text), "--against", str(path), "--activations", "q8"]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "KL divergence" in out
    assert main(["eval", str(path), "--text", str(text), "--tokens", "50", "--window", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == 47
    for odd in (tmp_path / "none", tmp_path):
        assert main(["eval", str(path), "--text", str(odd)]) == 2
        assert "cannot read --text" in capsys.readouterr().err


@pytest.mark.promise("inputs", "a text for `eval` may be a pipe, and ends after 256 MB")
@pytest.mark.skipif(sys.platform == "win32", reason="no such device")
def test_eval_reads_pipes_and_not_for_ever(path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("billfish.core.files.MOST_TEXT", 1 << 20)
    assert main(["eval", str(path), "--text", "/dev/zero"]) == 2
    assert "cannot read --text '/dev/zero': more than 1 MB" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("ab ab ab",))
    writer.start()
    assert main(["eval", str(path), "--text", str(tmp_path / "pipe")]) == 0
    writer.join()


def test_a_missing_package_is_no_missing_gpu(path, monkeypatch, caplog):
    """The weights were packed, then packed again for the CPU, and then it failed."""
    monkeypatch.setenv("BILLFISH_DEVICE", "auto")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not there
    monkeypatch.setattr(CpuDecoder, "pack", lambda *_: pytest.fail("packed"))
    with pytest.raises(MissingPackage, match=r"tokenizers is not installed.*'\.\[llm\]'"):
        load(path)
    assert "The CPU runs it" not in caplog.text
    monkeypatch.delitem(sys.modules, "tokenizers")
    monkeypatch.setattr(CpuDecoder, "pack", Mock(side_effect=MissingPackage("something else")))
    with pytest.raises(MissingPackage, match="something else"):
        load(path)
    assert "The CPU runs it" not in caplog.text


@pytest.mark.parametrize(("options", "message"), [
    ({"cache_type": "int4"}, "cache_type|'int4'|'float32' or 'float16' or 'int8'"),
    ({"method": "rtn"}, "method='rtn' has no effect without quantize"),
    ({"statistics": "stats.safetensors"}, "statistics has no effect without quantize"),
    ({"quantize": "q4_0", "convert": lambda name, tensor: tensor}, "quantize= or convert=, not both"),
])  # fmt: skip
def test_options_of_load_are_checked_before_weights_are_packed(path, options, message, monkeypatch):
    monkeypatch.setattr(CpuDecoder, "pack", lambda *_: pytest.fail("packed"))
    with pytest.raises(bf.DataError, match=facts(message)):
        load(path, device="cpu", **options)


def test_a_model_without_anything_to_quantize_says_so(path):
    with pytest.raises(bf.DataError, match=r"already quantized \(q8_0\), so quantize='q4_0' has no effect"):
        load(path, device="cpu", quantize="q4_0")


WRONG = {
    "temperature": [None, "1", float("nan"), float("inf"), -1, True, [1]],
    "top_k": [None, "5", 1.5, -1, True],
    "top_p": [None, "1", 0, 1.5],
    "min_p": [None, "0", -0.1, 2],
    "presence_penalty": [None, "0", 1e9],
    "frequency_penalty": [None, "0", 1e9],
    "repetition_penalty": [None, "1", 0],
    "seed": [None, "1", 1.5, -1],
    "logit_bias": [[1], {"a": 1.0}, {1: "2"}, {1: 1e9}],
    "max_tokens": [None, "5", 1.5, -1, True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
@pytest.mark.parametrize("call", ["generate", "generate_batch"])
def test_settings_of_the_wrong_type_are_named_with_the_call(model, call, name, value):
    prompt = "ab" if call == "generate" else ["ab"]
    with pytest.raises(bf.DataError, match=rf"llm\.{call}: .*{name}") as caught:
        getattr(model, call)(prompt, **{name: value})
    assert repr(value) in str(caught.value)


def test_settings_may_be_numbers_of_numpy(model):
    how = {"temperature": np.float32(1), "top_k": np.int64(3), "seed": np.uint8(1), "max_tokens": np.int32(2)}
    assert "".join(model.generate("ab", **how)) == model.generate_batch(["ab"], **how)[0]


@pytest.mark.parametrize(("name", "hint"), [("max_new_tokens", "max_tokens=N"), ("topk", "'top_k'"), ("xyz", "seed")])
@pytest.mark.parametrize("call", ["generate", "generate_batch"])
def test_a_setting_that_is_none_gets_a_hint(model, call, name, hint):
    with pytest.raises(bf.DataError, match=rf"llm\.{call}.*{name!r}.*{hint}"):
        getattr(model, call)("ab" if call == "generate" else ["ab"], **{name: 5})


@pytest.mark.parametrize("prompt", [None, 5, [None], [1.5]])
def test_a_prompt_that_is_none(model, prompt):
    with pytest.raises(bf.DataError, match=r"prompt.*.*string, messages or token ids"):
        model.generate(prompt)


def test_several_prompts_are_a_list(model):
    with pytest.raises(bf.DataError, match=r"llm\.generate_batch.*prompts.*str.*list"):
        model.generate_batch("ab")


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named_with_the_command_that_brings_it(path, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    assert main(["run", str(path), "-p", "ab"]) == 2
    error = capsys.readouterr().err
    assert f"{package} is not installed" in error
    assert "pip install '.[llm]'" in error


def test_run_command_reads_standard_input(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab"))
    assert main(["run", str(path), "-n", "4", "--raw", "--threads", "1"]) == 0
    assert "prompt 1 token," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --threads 0", r"run: --threads.*0.*number from 1 to 1024"),
        ("run --threads -1", r"run: --threads.*-1.*number from 1 to 1024"),
        ("run --threads 5000", r"run: --threads.*5000.*number from 1 to 1024"),
        ("eval --threads 5000", r"eval: --threads.*5000.*number from 1 to 1024"),
        ("run -n -1", r"llm.generate: max_tokens.*-1.*0 or more"),
        ("run --temperature nan", r"llm.generate: temperature.*nan.*0 or more"),
        ("run --activations q4", r"run: activations.*'q4'.*'exact' or 'q8' or 'q16'"),
        ("eval --tokens -5", r"eval: --tokens.*-5.*at least 2"),
        ("eval --tokens 0", r"eval: --tokens.*0.*at least 2"),
        ("eval --window 1", r"eval: --window.*1.*at least 2"),
        ("eval --window 129", r"llm.evaluate: window.*129.*2 to 128"),
    ],
)
def test_numbers_that_make_no_sense(path, tmp_path, capsys, words, message):
    text = tmp_path / "text"
    text.write_text("abc " * 30)
    command, *options = words.split()
    about = {"run": [str(path), "-p", "a"], "eval": [str(path), "--text", str(text)]}[command]
    before = _cpu.threads()
    assert main([command, *about, *options]) == 2
    assert re.fullmatch(rf"billfish: {message}.*\n", capsys.readouterr().err)
    assert _cpu.threads() == before


@pytest.mark.parametrize("option", ["-n", "--threads", "--top-k", "--seed"])
def test_numbers_that_are_none(path, capsys, option):
    with pytest.raises(SystemExit) as stop:
        main(["run", str(path), "-p", "a", option, "some"])
    assert stop.value.code == 2
    assert "invalid int value: 'some'" in capsys.readouterr().err


def test_chat_keeps_its_history_and_survives_ctrl_c(model, monkeypatch, capsys):
    said = iter(["ab", "", KeyboardInterrupt, "ba", "x" * 200, EOFError])

    def answer(prompt):
        line = next(said)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)
    chat = run.Chat(model, parser_of("run").parse_args(["-n", "3", "--system", "b"]))
    chat.talk()
    captured = capsys.readouterr()
    assert captured.err.count("answer 3 tokens") == 2
    assert "context is 128" in captured.err
    assert "new conversation" in captured.err
    assert [m["role"] for m in chat._messages] == ["system"]


def test_ctrl_c_stops_an_answer_not_the_chat(model, monkeypatch, capsys):
    chat = run.Chat(model, parser_of("run").parse_args([]))
    decoder_run, calls = model.decoder.run, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decoder_run(*arguments)

    monkeypatch.setattr(model.decoder, "run", interrupted)
    chat.answer("ab")
    assert "…" in capsys.readouterr().out
    assert [m["role"] for m in chat._messages] == ["user", "assistant"]


def test_one_default_of_activations_for_answers_and_evaluation():
    defaults = {inspect.signature(call).parameters["activations"].default for call in (evaluate, Model.generate)}
    for command, *words in (["run"], ["eval", "--text", "a"]):
        defaults.add(parser_of(command).parse_args(words).activations)
    assert (defaults, CpuDecoder.usual) == ({None}, "q16")
