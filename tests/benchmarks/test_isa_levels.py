"""benchmarks/isa_levels.py, on a tiny model."""

from __future__ import annotations

import pytest
from llm_models import Small, write_model

from benchmarks import isa_levels, tables
from billfish.backends.cpu import _cpu


class Prompts:
    """A level that takes so many seconds for each token."""

    def __init__(self, seconds):
        self._seconds = seconds

    def prompt(self, length, activations):
        return length * self._seconds


def test_a_record_has_the_ratio_of_the_second_level_to_the_first():
    found = isa_levels.record({"amx": Prompts(0.25), "avx512_vnni": Prompts(0.5)}, 512, "q8", 3)
    assert found["tok_per_s"] == {"amx": 4, "avx512_vnni": 2}
    assert found["ratio"] == 2
    row = tables.isa_levels({"records": [found]})
    assert "| prefill, 512 tokens | q8 | 2 tok/s | 4 tok/s (2.00) |" in row


@pytest.mark.process
@pytest.mark.model
def test_a_level_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(isa_levels, "LENGTHS", ((32, "q8"),))
    write_model(tmp_path / "tiny.gguf", Small(layers=1, heads=2, kv_heads=1, head_size=16, context=64))
    level = isa_levels.Level(_cpu.levels()[-1], tmp_path / "tiny.gguf", 1)
    assert level.prompt(32, "q8") > 0
    level.close()
