"""benchmarks/qwen35_speed.py: the model that it makes, what is timed, and what becomes of records."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from benchmarks import qwen35_speed, random_model, tables
from benchmarks.peers.llama_cpp import Ours
from billfish.llm import load

SMALL = random_model.QWEN35 | {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "vocab_size": 320,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("model") / "small.gguf"
    random_model.write_random_architecture(made, SMALL, "qwen2")
    return made


def test_the_model_has_the_tensors_of_its_architecture(path):
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert "output.weight" not in found  # the embedding is the head
    assert found["blk.0.attn_qkv.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_0
    assert (found["blk.0.ssm_a"].data == -1).all()
    logits = load(path, device="cpu").logits([1, 2, 300])
    assert logits.shape == (3, 320)
    assert 0.5 < logits.std() < 2


def test_the_published_sizes_make_three_quarters_of_a_billion_weights():
    config = random_model.QWEN35
    architecture = random_model.of_config(config, "")
    fields = {f"qwen35.{name}": value for name, value in architecture.fields(architecture.completed(config)).items()}
    model = random_model.describe(fields | {"general.architecture": "qwen35"}, config["vocab_size"])
    shapes = {each.name: each.shape for each in random_model.tensors_in(model) if hasattr(each, "shape")}
    del shapes["output"]
    assert sum(np.prod(shape) for shape in shapes.values()) == 751_894_528


def test_timings_count_all_tokens(path):
    ours = Ours(load(path, device="cpu"), "q8", 600)
    tokens = np.random.default_rng(0).integers(0, 300, qwen35_speed.PROMPT).tolist()
    timings = [timing[:2] for timing in qwen35_speed.measure(ours, tokens)]
    assert timings == [("generation", 64), ("prompt of 512", 512)]
    assert ours._caches[0].tokens == tokens


def machine(cpu, seconds):
    records = [
        {"what": what, "who": who, "tokens": 64, "seconds": s}
        for what in ("generation", "prompt of 512")
        for who, s in (("llama.cpp", 1.0), ("billfish q8", seconds))
    ]
    return {"cpu": cpu, "threads": 2, "records": records}


def test_other_machines_keep_their_records():
    results = {"machines": []}
    for each in (machine("B", 0.25), machine("A", 0.4), machine("B", 0.5)):
        results = qwen35_speed.with_machine(results, each)
    assert [each["cpu"] for each in results["machines"]] == ["A", "B"]
    assert "| B, 2 threads | 64 tok/s | 128 tok/s (2.00) |" in tables.hybrid(results)
    assert "2.00 times llama.cpp" in list(qwen35_speed.lines(results["machines"][1]["records"]))[1]
