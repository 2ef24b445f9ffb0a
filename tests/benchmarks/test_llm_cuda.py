"""benchmarks/llm_cuda.py, as far as it goes without a GPU: its models, what it reads of its peers, and its records."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

import billfish as bf
from benchmarks import llm_cuda, machine, random_model, records, timing

# What llama-bench and llama-batched-bench print, less fields that nobody reads.
LLAMA_BENCH = """[
  {
    "build_commit": "llama-cpp-python-0.3.36",
    "backends": "CUDA",
    "n_prompt": 512,
    "n_gen": 0,
    "avg_ts": 545.695553,
    "samples_ns": [ 105639377, 131807549 ],
    "samples_ts": [ 605.835, 485.556 ]
  },
  {
    "build_commit": "llama-cpp-python-0.3.36",
    "backends": "CUDA",
    "n_prompt": 0,
    "n_gen": 128,
    "avg_ts": 340.5,
    "samples_ns": [ 375000000, 378000000 ],
    "samples_ts": [ 341.333, 338.624 ]
  }
]"""
BATCHED_BENCH = """
{"n_kv_max": 1024, "flash_attn": 1, "pp": 512, "tg": 128, "pl": 16, "n_kv": 48, "t_tg": 0.086000, "speed_tg": 186.046509, "speed": 415.5}
{"n_kv_max": 1024, "flash_attn": 1, "pp": 512, "tg": 128, "pl": 64, "n_kv": 96, "t_tg": 0.214726, "speed_tg": 149.027130, "speed": 317.4}

llama_perf_context_print:        load time =     173.59 ms
"""  # noqa: E501


def tiny(tied=False):
    return random_model.Shape(
        layers=2, hidden=128, feed_forward=256, heads=4, kv_heads=2, vocabulary=320, context=256, tied=tied
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    random_model.write_random_model(path, tiny())
    return bf.llm.load(path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_random_model_opens_and_gives_scores_of_about_size_one(tmp_path, tied):
    path = tmp_path / "tiny.gguf"
    random_model.write_random_model(path, tiny(tied))
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
    logits = bf.llm.load(path).logits([1, 2, 300])
    assert logits.shape == (3, 320)
    assert 0.5 < logits.std() < 2


@pytest.mark.parametrize("name", random_model.MIXTURES)
def test_a_random_model_with_experts_opens_and_gives_scores(tmp_path, name):
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_size": 32, "experts": 8, "expert_size": 64}
    shape = replace(random_model.MIXTURES[name], **sizes, chosen=2, vocabulary=320, context=256)
    random_model.write_random_model(tmp_path / "tiny.gguf", shape)
    logits = bf.llm.load(tmp_path / "tiny.gguf", device="cpu").logits([1, 2, 300])
    assert 0.5 < logits.std() < 2
    found = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert found == {"F32", shape.blocks.upper(), shape.rest.upper()}


def test_another_reader_finds_the_tensors_that_the_shape_says(tmp_path):
    path = tmp_path / "tiny.gguf"
    random_model.write_random_model(path, tiny())
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, (n, k) in tiny().matrices().items():
        assert found[name].tensor_type == gguf.GGMLQuantizationType.Q4_0
        weights = gguf.quants.dequantize(found[name].data, found[name].tensor_type)
        assert weights.shape == (n, k)
        assert weights.std() == pytest.approx(1 / np.sqrt(k), rel=0.05)
    assert set(found) == {*tiny().matrices(), *tiny().norms()}


def test_a_file_that_cannot_be_finished_is_not_left_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(random_model, "random_blocks", full)
    with pytest.raises(OSError, match="no space"):
        random_model.write_random_model(tmp_path / "tiny.gguf", tiny())
    assert list(tmp_path.iterdir()) == []


def test_the_shapes_have_as_many_weights_as_their_models():
    counted = {name: sum(n * k for n, k in shape.matrices().values()) for name, shape in random_model.SHAPES.items()}
    assert counted == {"8b": 8_029_995_008, "1b": 1_235_746_816}


def test_llama_bench_is_read():
    rates, version = llm_cuda.llama_bench_rates(LLAMA_BENCH)
    assert rates == {"prompt_512": [605.835, 485.556], "generate": [341.333, 338.624]}
    assert version == "llama-cpp-python-0.3.36"


def test_llama_bench_without_a_gpu_is_refused():
    with pytest.raises(SystemExit, match=r"ran on CPU.*GGML_CUDA=ON"):
        llm_cuda.llama_bench_rates(LLAMA_BENCH.replace("CUDA", "CPU"))


def test_llama_batched_bench_is_read():
    assert llm_cuda.batched_bench_rates(BATCHED_BENCH) == {"streams_16": [186.046509], "streams_64": [149.02713]}


def test_llama_cpp_is_run_on_the_gpu_with_flash_attention(tmp_path):
    """Stand-ins print what the tools print, if they are called as they should be."""
    for tool, output, sizes in (
        ("llama-bench", LLAMA_BENCH, "-p 512,2048 -n 128 -o json"),
        ("llama-batched-bench", BATCHED_BENCH, "-c 40960 -npp 512 -ntg 128 -npl 16,64 --output-format jsonl"),
    ):
        (tmp_path / f"{tool}.txt").write_text(output)
        expected = f"-m model.gguf -ngl 99 -fa on {sizes}"
        script = f'#!/bin/sh\n[ "$*" = "{expected}" ] || {{ echo "$*" >&2; exit 3; }}\ncat "$0.txt"\n'
        (tmp_path / tool).write_text(script)
        (tmp_path / tool).chmod(0o755)
    peer = llm_cuda.LlamaCpp(tmp_path, Path("model.gguf"))
    assert set(peer.measure()) == {"generate", "prompt_512", "streams_16", "streams_64"}
    assert peer.version == "llama-cpp-python-0.3.36"
    with pytest.raises(SystemExit, match="llama-bench failed with 3"):
        llm_cuda.LlamaCpp(tmp_path, Path("another.gguf")).measure()


def test_transformers_step_goes_on_with_the_best_token():
    torch.manual_seed(0)
    peer = llm_cuda.Transformers(tiny(), "cpu", torch.float32)
    for weights in peer.model.parameters():
        if weights.ndim == 2:
            torch.nn.init.normal_(weights, std=0.3)  # large enough that tokens differ
    text = [0]
    for _ in range(8):
        peer.step()
        text.append(int(peer.token))
    with torch.no_grad():
        best = peer.model(torch.tensor([text[:-1]])).logits[0].argmax(-1).tolist()
    assert text[1:] == best
    assert len(set(text)) > 3


def test_ours_measures_a_model(model):
    ours = llm_cuda.Ours(model)
    assert ours.generate(4) > 0
    assert ours.prompt(16) > 0


def test_streams_count_the_tokens_after_the_prompts_and_not_the_prompts(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def generate_batch(prompts, max_tokens):
        assert [len(prompt) for prompt in prompts] == [32, 32, 32]
        clock.now += 5.0 + 0.5 * (max_tokens - 1)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    fake = SimpleNamespace(config=SimpleNamespace(vocabulary=320), generate_batch=generate_batch)
    assert llm_cuda.Ours(fake).streams(3, 32, 8) == pytest.approx(3 / 0.5)


def test_records_are_medians_and_name_the_peers_that_have_the_case():
    rates = {
        "billfish": {case: [1.0, 30.0, 20.0] for case in llm_cuda.CASES},
        "llama.cpp": {case: [10.0] for case in llm_cuda.CASES},
        "transformers fp16": {"generate": [5.0, 4.0, 6.0]},
    }
    records = llm_cuda.records_of("8b", rates)
    assert [record["case"] for record in records] == [
        "generate", "prompt_512", "prompt_2048", "streams_16", "streams_64"
    ]  # fmt: skip
    first = {"shape": "8b", "case": "generate", "tok_per_s": 20.0}
    assert records[0] == first | {"peers": {"llama.cpp": 10.0, "transformers fp16": 5.0}}
    assert records[1]["peers"] == {"llama.cpp": 10.0}
    assert "llama.cpp         10 (2.00 times)" in llm_cuda.row(records[0])
    assert json.loads(json.dumps(records)) == records


def test_rates_that_peers_reached_in_other_runs_stand_beside_ours():
    found = llm_cuda.records_of(
        "8b", {"billfish": {case: [30.0] for case in llm_cuda.CASES}, "llama.cpp": {"generate": [9.0]}}
    )
    known = {"shape": "8b", "who": "llama.cpp", "date": "2026-01-31"}
    rates = {"generate": 10.0, "prompt_512": 20.0}
    peers = {
        "versions": {"llama.cpp": "b1"},
        "records": [known | {"case": c, "tok_per_s": r} for c, r in rates.items()],
    }
    assert llm_cuda.add_peers(found, peers) == {"llama.cpp, 8b": "b1, 2026-01-31"}
    assert [record["peers"] for record in found] == [{"llama.cpp": 9.0}, {"llama.cpp": 20.0}, {}, {}, {}]
    whole = json.loads((records.RESULTS / "llm_cuda_peers_h200.json").read_text())
    assert {record["shape"] for record in whole["records"]} == set(llm_cuda.MODELS)


def test_a_run_without_peers_says_so_and_writes_its_records(tmp_path, monkeypatch, capsys):
    """Of a tiny shape on the CPU, with rates that are given."""

    def without_transformers(shape):
        raise ImportError("No module named 'transformers'")

    rates = {case: [100.0] for case in llm_cuda.CASES}
    gpu = {"gpu": "NVIDIA H200", "arch": "sm_90a", "multiprocessors": 132, "date": "2026-01-31"}
    monkeypatch.setattr(llm_cuda, "MODELS", {"1b": tiny()})
    monkeypatch.setattr(llm_cuda.bf.llm, "load", lambda path, device, cache_type: (path.exists(), device, cache_type))
    known = {(True, "cuda", "fp8"): rates}
    monkeypatch.setattr(llm_cuda, "Ours", lambda model: SimpleNamespace(measure=lambda: known[model]))
    monkeypatch.setattr(llm_cuda, "Transformers", without_transformers)
    monkeypatch.setattr(machine, "gpu", lambda: gpu)
    file = tmp_path / "records.json"
    monkeypatch.setattr(sys, "argv", ["llm_cuda.py", "--shapes", "1b", "--cache-type", "fp8", "--json", str(file)])
    llm_cuda.main()
    said = capsys.readouterr().out
    assert "no llama-bench in --llama FOLDER; left out" in said
    assert "No module named 'transformers'; left out" in said
    written = json.loads(file.read_text())
    assert set(written) == {"machine", "versions", "cache_type", "records"}
    assert (written["machine"], written["cache_type"]) == (gpu, "fp8")
    assert {"billfish", "torch", "numpy"} == set(written["versions"])
    assert written["records"] == llm_cuda.records_of("1b", {"billfish": rates})
