"""benchmarks.metal_model: a whole model in the emulator beside the CPU, and what is recorded of SmolLM2."""

from __future__ import annotations

import json

import pytest
from llm_models import Small, write_model

from benchmarks import metal_model, records

pytestmark = [pytest.mark.compile, pytest.mark.torch]


def test_a_model_runs_in_both_types(tmp_path, capsys):
    write_model(tmp_path / "small.gguf", Small(quantization="Q4_0"))
    file = tmp_path / "runs.json"
    metal_model.main(["--model", str(tmp_path / "small.gguf"), "--tokens", "3", "--json", str(file)])
    exact, half = json.loads(file.read_text())["records"]
    assert (exact["type"], exact["same_tokens"], len(exact["tokens"])) == ("float32", 3, 3)
    assert exact["error"] <= 2e-5 < half["error"] <= 2e-2
    assert capsys.readouterr().out.split()[:3] == ["type", "prompt", "error"]


def test_smollm2_is_recorded_as_right():
    exact, half = records.read("metal_model.json")["records"]
    assert exact["error"] <= 2e-5
    assert half["error"] <= 1e-2
    for each in (exact, half):
        assert each["same_tokens"] == len(each["tokens"]) > 0
