"""Statistics of a model on an Apple GPU, which the emulator stands in for, beside the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llm_architectures import write_model
from llm_models import Small
from llm_models import write_model as write_small

import billfish as bf
from billfish.checkpoints.write.selection import Quantization
from billfish.quantizing.calibrate_checkpoint import Calibration
from billfish.statistics import Statistics

pytest.importorskip("mlx.core")
pytestmark = pytest.mark.compile

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6
OF_NORM = 1e-2  # what float16 between products may change of X^T X, of few tokens and a random model


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def on(device: str, model: Path, text: Path, **options) -> Statistics:
    out = model.parent / f"{device}-{model.name}.safetensors"
    settings = {"text": text, "tokens": 100, "window": 40, "hessian": True, "progress": False, **options}
    return bf.calibrate_checkpoint(model, out, device=device, **settings)


def assert_alike(found: Statistics, expected: Statistics, most: float = OF_NORM) -> None:
    assert [*found] == [*expected]
    for name, known in expected.items():
        np.testing.assert_array_equal(found[name].counts, known.counts)
        for what in ("outer", "squares", "cross"):
            ours, theirs = getattr(found[name], what), getattr(known, what)
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert np.linalg.norm(ours - theirs) <= most * np.linalg.norm(theirs), name


@pytest.mark.parametrize("name", ["gemma2", "olmo3", "qwen35", "granitehybrid", "lfm2"])
def test_sums_are_the_cpus(tmp_path, text, name):
    """Windows and caps, norms of all heads, a delta net, Mamba-2, short convolutions."""
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", name, max_position_embeddings=256)
    assert_alike(on("metal-emulator", tmp_path / "model", text), on("cpu", tmp_path / "model", text))


@pytest.mark.parametrize("quantization", ["Q4_0", "F32"])
def test_a_window_longer_than_a_pass(tmp_path, text, monkeypatch, quantization):
    """Its pieces see each other."""
    write_small(tmp_path / "model.gguf", Small(quantization=quantization))
    monkeypatch.setattr("billfish.llm.metal_layers.MetalLayers.chunk", 24)
    found = on("metal-emulator", tmp_path / "model.gguf", text, window=100)
    assert_alike(found, on("cpu", tmp_path / "model.gguf", text, window=100))


def test_sequential_gptq_sees_what_it_sees_on_the_cpu(tmp_path, text):
    model, found = tmp_path / "model.gguf", []
    write_small(model, Small(layers=3, quantization="F32"))
    for device in ("metal-emulator", "cpu"):
        how = Quantization(bf.get_format("q8_0"), None, "gptq")
        sequential = Calibration.of(model, text, True, 100, 40, device).sequential(how, False)
        assert sequential is not None
        assert sequential.device == device
        sequential.write(tmp_path / f"{device}.safetensors", False, overwrite=True)
        found.append(Statistics.load(tmp_path / f"{device}.safetensors"))
    assert_alike(*found, most=3 * OF_NORM)  # some codes are others
    later = found[0]["blk.2.ffn_down.weight"]
    assert not np.array_equal(later.cross, later.outer)


def test_what_only_the_cpu_can(tmp_path, text):
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", "mixtral", max_position_embeddings=256)
    with pytest.raises(bf.BackendUnavailable, match=r"metal-emulator cannot calibrate mixtures of experts.*cpu"):
        on("metal-emulator", tmp_path / "model", text)
