"""benchmarks/llm_speed.py and its contenders, on a tiny model: what is timed, and what becomes of records."""

from __future__ import annotations

import platform
import subprocess

import numpy as np
import pytest
from llm_models import Small, write_model

from benchmarks import llm_speed, records, tables
from benchmarks.peers.instructions import instructions_of
from benchmarks.peers.llama_cpp import Ours
from benchmarks.peers.openvino import OpenVino
from billfish.llm import load

TOKENS = np.random.default_rng(0).integers(4, 260, 96).tolist()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path, Small(layers=1, heads=2, kv_heads=1, head_size=16, context=256))
    return Ours(load(path), "exact", 128)


def test_a_text_goes_on_where_it_was_cut(ours):
    ours.forget(0)
    ours.feed(TOKENS)
    ours.forget(40)
    ours.step([7])
    assert ours._caches[0].tokens == [*TOKENS[:40], 7]


def test_streams_have_a_text_each(ours):
    ours.forget(0)
    for step in range(3):
        ours.step(TOKENS[4 * step : 4 * step + 4])
    assert [cache.tokens for cache in ours._caches[:5]] == [*(TOKENS[i:12:4] for i in range(4)), []]


def test_the_first_text_has_room_for_the_longest_context(ours):
    """Otherwise growing it would be timed with the tokens after it."""
    ours.forget(0)
    capacity = ours._caches[0].capacity
    ours.feed(TOKENS)
    ours.step([1])
    assert ours._caches[0].capacity == capacity


def test_timings_count_all_tokens(ours, monkeypatch):
    monkeypatch.setattr(llm_speed, "LONG_PROMPT", 96)
    monkeypatch.setattr(llm_speed, "CONTEXTS", (64, 32))
    monkeypatch.setattr(llm_speed, "STREAMS", (1, 2))
    monkeypatch.setattr(llm_speed, "TOKENS", 8)
    long = [timing[:2] for timing in llm_speed.long_texts(ours, TOKENS)]
    assert long == [("prompt of 96", 96), ("generation after 64", 8), ("generation after 32", 8)]
    assert ours._caches[0].tokens == [*TOKENS[:32], *TOKENS[:8]]
    many = [timing[:2] for timing in llm_speed.many_texts(ours, TOKENS)]
    assert many == [("streams: 1", 8), ("streams: 2", 16)]
    assert [len(cache.tokens) for cache in ours._caches[:3]] == [8, 8, 0]


class Answers(OpenVino):
    """A prompt takes a second for each token, and an answer a tenth of one."""

    def __init__(self):
        pass

    def answer(self, tokens, count):
        return float(len(tokens)), 0.1


def test_whole_answers_give_the_same_timings():
    tokens = [0] * llm_speed.DEEP_PROMPT
    found = {
        what: (count, seconds)
        for group in llm_speed.MEASUREMENTS
        for what, count, seconds in llm_speed.timings(Answers(), group, tokens)
    }
    assert found["generation"] == (128, pytest.approx(12.8))
    assert found["prompt of 512"] == (512, 512)
    assert found["generation after 16384"] == (32, pytest.approx(3.2))
    assert {"prompt of 4096", "generation after 4096", "generation after 1024"} <= found.keys()


ASSEMBLY = {
    "x86_64": ("vpdpbusd %zmm0, %zmm1, %zmm2\nvpmaddubsw %ymm0, %ymm1, %ymm2\n", ["AVX2", "AVX-512 VNNI"]),
    "aarch64": (".arch armv8.2-a+dotprod\nsdot v0.4s, v1.16b, v2.16b\n", ["dotprod"]),
}


@pytest.mark.compile
@pytest.mark.skipif(platform.machine() not in ASSEMBLY, reason="has assembly for x86_64 and aarch64")
def test_a_peer_is_said_to_have_what_its_machine_code_has(tmp_path):
    source, expected = ASSEMBLY[platform.machine()]
    file = tmp_path / "kernel.s"
    file.write_text(source)
    subprocess.run(["cc", "-c", file, "-o", tmp_path / "kernel.so"], check=True)
    assert instructions_of([tmp_path / "kernel.so"]) == expected


def results(peers, **seconds):
    records = [
        {"what": "generation", "who": who, "tokens": 128, "seconds": s, "rounds": 1} for who, s in seconds.items()
    ]
    about = {"cpu": "a CPU", "threads": 2, "peers": {name: {"version": f"{name} 1", "date": "today"} for name in peers}}
    return {"about": about, "records": records}


def test_a_peer_that_is_not_measured_keeps_its_records():
    old = results(["llama.cpp", "ik_llama.cpp"], **{"llama.cpp": 2.0, "ik_llama.cpp": 1.5, "billfish q8": 1.0})
    new = results(["ik_llama.cpp"], **{"ik_llama.cpp": 1.0, "billfish q8": 0.5})
    both = records.merged(old, new)
    assert {record["who"]: record["seconds"] for record in both["records"]} == {
        "llama.cpp": 2.0,
        "ik_llama.cpp": 1.0,
        "billfish q8": 0.5,
    }
    assert set(both["about"]["peers"]) == {"llama.cpp", "ik_llama.cpp"}
    *_, row, _ = tables.speed(both, ["generation"]).splitlines()
    assert row.endswith("| 64 tok/s | 128 tok/s | 256 tok/s (2.00) |")


def test_the_tables_say_what_a_peer_contains():
    found = results(["llama.cpp", "OpenVINO GenAI"], **{"llama.cpp": 1.0})
    found["about"]["peers"]["llama.cpp"]["instructions"] = ["AVX2", "AMX"]
    assert tables.peers(found) == "llama.cpp 1 with AVX2, AMX (today), OpenVINO GenAI 1 (today)"


def test_medians_are_recorded():
    (record,) = llm_speed.records_of({("generation", "billfish q8", 128): [3.0, 1.0, 2.0]})
    assert (record["seconds"], record["rounds"]) == (2.0, 3)
    (line,) = llm_speed.lines([record])
    assert "64.0 tok/s" in line
