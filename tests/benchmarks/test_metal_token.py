"""benchmarks.metal_token: the graphs of both decode steps, and the promises about what is recorded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from benchmarks import records
from benchmarks.random_model import Shape

pytest.importorskip("mlx_lm")
from benchmarks import metal_token

pytestmark = pytest.mark.compile
SMALL = Shape(3, 64, 128, 4, 2, 320, tied=True)
OURS = ["marlin_add_norm", "marlin_gemv_q4_0", "marlin_rotate", "SliceUpdate", "mlx_attention", "marlin_gemv_q4_0"]
OURS += ["marlin_add_norm", "marlin_gemv_q4_0", "marlin_gemv_q4_0"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(metal_token.MODELS, "small", SMALL)
    monkeypatch.setattr(metal_token, "SMALL", 320)


def test_both_steps_are_counted(small, tmp_path, capsys):
    """Nine launches a layer are ours, whatever its neighbours have; mlx-lm's are those of its code."""
    file = tmp_path / "steps.json"
    metal_token.main(["--models", "small", "--context", "40", "--json", str(file)])
    mlx, ours = json.loads(file.read_text())["records"]
    assert sorted(ours["layer"]) == sorted(OURS)
    assert len(mlx["layer"]) == 17
    assert mlx["layer"].count("affine_qmv") == 7
    assert ours["launches"] < mlx["launches"]
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["model", "step", "of"]


def test_a_layer_whose_v_has_another_format_has_a_launch_more(small, monkeypatch):
    """Its matmul; nothing is copied to put q, k and v together."""
    monkeypatch.setitem(metal_token.MODELS, "small", replace(SMALL, finer="q8_0"))
    mlx, ours = metal_token.count_steps("small", 40)
    finer = ["marlin_gemv_q8_0" if i == len(OURS) - 1 else name for i, name in enumerate(OURS)]
    assert sorted(ours.layer) == sorted([*finer, "marlin_gemv_q8_0"])
    assert len(mlx.layer) == 17


def test_a_longer_cache_costs_its_bytes(small):
    few, many = (metal_token.count_steps("small", context)[1] for context in (40, 200))
    cache = SMALL.layers * 2 * SMALL.kv_heads * SMALL.head_size * 160 * 2
    assert many.nbytes - few.nbytes == many.least - few.least == cache


def test_an_untied_table_is_not_read():
    """But for a row."""
    tied = metal_token.least(SMALL, 40)
    assert metal_token.least(replace(SMALL, tied=False), 40) == tied


def test_an_unknown_model_is_named(capsys):
    with pytest.raises(SystemExit):
        metal_token.main(["--models", "9b"])
    assert "'9b'" in capsys.readouterr().err


def test_the_promises_of_the_record():
    steps = records.read("metal_token.json")["records"]
    by_model = {
        step["model"]: {each["owner"]: each for each in steps if each["model"] == step["model"]} for step in steps
    }
    assert set(by_model) == set(metal_token.MODELS)
    for pair in by_model.values():
        ours, mlx = pair["billfish"], pair["mlx-lm"]
        assert ours.keys() == asdict(metal_token.Step("", 0, "", [], 0, 0, 0, {})).keys()
        assert len(ours["layer"]) <= (10 if ours["model"] == "8b-mixed" else 9)
        assert ours["nbytes"] <= 1.03 * ours["least"]
        for chip in ("M1", "M1 Max", "M2 Max"):
            assert ours["estimated_us"][chip] < mlx["estimated_us"][chip]
