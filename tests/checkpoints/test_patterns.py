"""Regular expressions that choose tensors."""

from __future__ import annotations

import pytest
from checkpoint_folders import write_folder

import billfish as bf
from billfish.checkpoints.write import pattern_trial
from billfish.cli.main import main

ENDLESS = r"(\w*\.?\w*)*!"


@pytest.mark.promise(
    "inputs", "a regular expression of `--keep`, `--only` or a plan that takes for ever is refused after 5 s"
)
def test_a_pattern_without_end_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pattern_trial, "SECONDS", 0.3)
    write_folder(tmp_path / "in", "plain")
    for more in ({"keep": {ENDLESS: "keep"}}, {"only": [ENDLESS]}):
        with pytest.raises(bf.CheckpointError, match="regular expression"):
            bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0", progress=False, **more)
    words = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "q4_0", "--keep", f"{ENDLESS}=keep"]
    assert main(words) != 0
    assert "regular expression" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.promise(
    "inputs", "a regular expression of `--keep`, `--only` or a plan that takes for ever is refused after 5 s"
)
def test_the_first_pattern_without_end_is_told(monkeypatch):
    monkeypatch.setattr(pattern_trial, "SECONDS", 0.5)
    names = ["model.layers.0.self_attn.q_proj.weight", "", "\ud800", "x" * 1000]
    assert pattern_trial.endless_pattern([r"layers\.\d+\.", ".*", ENDLESS, "(a*)*b"], names) == ENDLESS
    assert pattern_trial.endless_pattern([r"layers\.\d+\.", "lm_head", ".*weight$"], names) is None
