"""Training scales: the decoder in torch is ours, the divergence falls, codes stay, and a stopped run goes on."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import first
from killed_runs import ended
from llm_architectures import write_model as write_folder
from llm_models import Small, write_model

import billfish as bf
from billfish.cli.main import main
from billfish.llm import load
from billfish.llm.model_files import open_source
from billfish.llm.model_weights import ModelTensors
from billfish.models import describe
from billfish.quantizing import tune_checkpoint as tuning
from billfish.quantizing.torch_decoder import TorchDecoder, TorchHead
from billfish.quantizing.trained_matrix import TrainedMatrix, why_fixed

pytestmark = pytest.mark.torch
TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6
CPU = torch.device("cpu")
TRAINABLE = ["q4_0", "q4_1", "iq4_nl", "u4", "u4b8", "affine4", "fp4", "nvfp4", "q4_k", "q6_k", "nf4"]


@pytest.fixture
def model(tmp_path) -> Path:
    write_model(tmp_path / "model.gguf", Small(layers=2, quantization="F32"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "model.gguf"


def settings(model: Path, **more) -> dict:
    text = model.parent / "text.txt"
    return {"against": model, "text": text, "tokens": 160, "window": 40, "device": "cpu", "progress": False} | more


def divergence(model: Path, against: Path) -> float:
    model_, other = load(model, device="cpu", progress=False), load(against, device="cpu", progress=False)
    tokens = other.tokenizer.encode(TEXT, special=False)[:160]
    return bf.llm.evaluate(model_, tokens, against=other, activations="exact", window=40).divergence


@pytest.mark.parametrize("name", first(3, ["llama3", "gemma2", "qwen3-yarn", "olmo2", "phi3", "gemma3", "smollm3"]))
def test_the_decoder_in_torch_gives_our_logits(tmp_path, name):
    write_folder(tmp_path / name, name)
    tokens = [3, 9, 4, 7, 30, 31, 2, 8, 11, 5, 6, 12]
    ours = load(tmp_path / name, device="cpu", progress=False)
    source = open_source(tmp_path / name)
    tensors = ModelTensors(source, describe(source.fields, source.vocabulary, source.tensors))
    theirs = TorchDecoder(tensors, lambda matrix: theirs.floats(tensors.matrix(matrix)), CPU)
    expected = ours.decoder.logits(ours.hidden(tokens, "exact"), "exact")
    found = theirs.logits(theirs.hidden(tokens)).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    truth = tuning.Truth(ours, [tokens], TorchHead(tensors, CPU))
    np.testing.assert_allclose(truth.logits(0, slice(2, 5)), expected[2:5], atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", TRAINABLE)
def test_untrained_scales_mean_what_the_tensor_means(name):
    rng = np.random.default_rng(1)
    tensor = bf.quantize(rng.standard_normal((6, 256)).astype(np.float32), name)
    assert why_fixed(tensor) == ""
    trained = TrainedMatrix(tensor, CPU)
    np.testing.assert_allclose(trained.weights().detach().numpy(), bf.dequantize(tensor), rtol=1e-6, atol=1e-7)
    for part, array in trained.tensor().storage.items():
        np.testing.assert_array_equal(array, tensor.storage[part])


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_trained_tensor_means_the_trained_weights(name):
    """Up to the rounding of scales. Codes are the same."""
    rng = np.random.default_rng(2)
    tensor = bf.quantize(rng.standard_normal((6, 256)).astype(np.float32), name)
    trained = TrainedMatrix(tensor, CPU)
    with torch.no_grad():
        for parameter in trained.parameters:
            parameter += torch.from_numpy(rng.uniform(-0.2, 0.2, parameter.shape).astype(np.float32))
    found, expected = bf.dequantize(trained.tensor()), trained.weights().detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    assert np.abs(found - bf.dequantize(tensor)).max() > 0.05
    codes = tensor.format.unpack_codes(tensor.storage)
    np.testing.assert_array_equal(tensor.format.unpack_codes(trained.tensor().storage), codes)


@pytest.mark.parametrize("name", first(3, ["iq4_nl", "q4_1", "u4b8", "nvfp4", "u4"]))
def test_the_divergence_falls(model, name):
    """On the text itself: with so few tokens, that is all there is to learn."""
    layout = ".gguf" if name in ("iq4_nl", "q4_1", "nvfp4") else ""
    before, after = model.parent / f"before{layout}", model.parent / f"after{layout}"
    bf.quantize_checkpoint(model, before, name, progress=False)
    bf.tune_checkpoint(before, after, **settings(model, epochs=6, rate=0.01))
    assert divergence(after, model) < 0.8 * divergence(before, model)
    old, new = bf.open_checkpoint(before), bf.open_checkpoint(after)
    assert list(old) == list(new)
    changed = set()
    for own in old:
        a, b = old[own], new[own]
        if isinstance(a, bf.QuantizedTensor):
            assert (a.format, a.shape, a.group_size) == (b.format, b.shape, b.group_size)
            np.testing.assert_array_equal(a.format.unpack_codes(a.storage), b.format.unpack_codes(b.storage))
            changed |= {own} if any((a.storage[part] != b.storage[part]).any() for part in a.storage) else set()
        else:
            np.testing.assert_array_equal(a, b)
    assert len(changed) == 14
    assert not list(model.parent.glob("*.partial*"))


def test_a_stopped_run_goes_on_to_the_same_bytes(model, monkeypatch):
    quantized, whole, cut = (model.parent / f"{name}.gguf" for name in ("quantized", "whole", "cut"))
    bf.quantize_checkpoint(model, quantized, "q4_0", progress=False)
    bf.tune_checkpoint(quantized, whole, **settings(model))
    monkeypatch.setattr(tuning, "SAVE_SECONDS", 0.0)
    gradients, left = tuning.Training._gradients, [0]

    def stopping(self, window):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return gradients(self, window)

    with monkeypatch.context() as patched:
        patched.setattr(tuning.Training, "_gradients", stopping)
        for left[0] in (3, 1, 4):
            with pytest.raises(KeyboardInterrupt):
                bf.tune_checkpoint(quantized, cut, **settings(model))
    steps = []
    monkeypatch.setattr(tuning.Training, "_gradients", lambda *a: steps.append(a) or gradients(*a))
    bf.tune_checkpoint(quantized, cut, **settings(model))
    assert len(steps) == 2 * 4 - 5
    assert cut.read_bytes() == whole.read_bytes()
    assert not list(model.parent.glob("*.partial*"))


@pytest.mark.parametrize(("device", "error"), [("cuda:99", "GPUs, and not cuda:99"), ("tpu", r"device.*'tpu'.*cuda:N")])
def test_a_device_that_torch_does_not_have_is_refused(model, device, error):
    with pytest.raises(bf.BillfishError, match=error):
        bf.tune_checkpoint(model, model.parent / "out.gguf", **settings(model, device=device))


@pytest.mark.full  # it imports torch again; the test before it stops runs in this process
@pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")
@pytest.mark.promise("files", "tune, killed in a step, goes on with that step")
def test_killed_in_a_step_the_next_run_goes_on_with_it_to_the_same_bytes(model):
    """SIGKILL in the second step and in the last one, with progress saved after each."""
    quantized, whole, cut = (model.parent / f"{name}.gguf" for name in ("quantized", "whole", "cut"))
    bf.quantize_checkpoint(model, quantized, "q4_0", progress=False)
    runs = ended("tuned", model.parent, [(1, 1), (3, 1)])
    assert runs == [[-signal.SIGKILL, [0, 1]], [-signal.SIGKILL, [1, 2, 3]], [0, [3]]]
    bf.tune_checkpoint(quantized, whole, **settings(model, epochs=1))
    assert cut.read_bytes() == whole.read_bytes()
    assert not list(model.parent.glob("*.partial*"))


@pytest.mark.parametrize("changed", ["model", "kept"])
def test_a_stopped_run_with_another_model_or_a_damaged_file_begins_anew(model, monkeypatch, changed):
    quantized, out = model.parent / "quantized.gguf", model.parent / "out.gguf"
    bf.quantize_checkpoint(model, quantized, "q4_0", progress=False)
    monkeypatch.setattr(tuning, "SAVE_SECONDS", 0.0)
    gradients, steps = tuning.Training._gradients, []

    def counting(self, window):
        steps.append(window)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return gradients(self, window)

    monkeypatch.setattr(tuning.Training, "_gradients", counting)
    with pytest.raises(KeyboardInterrupt):
        bf.tune_checkpoint(quantized, out, **settings(model))
    if changed == "model":
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
    else:
        Path(f"{out}.partial-tuning").write_bytes(b"\x99 no pickle")
    steps += [-1]  # so that the next run is not stopped
    bf.tune_checkpoint(quantized, out, **settings(model))
    assert len(steps) == 4 + 2 * 4


def test_what_cannot_be_trained(model, tmp_path):
    for name, message in (("mxfp4", "powers of two"), ("q4_0", "exists")):
        quantized = tmp_path / f"{name}.gguf"
        bf.quantize_checkpoint(model, quantized, name, progress=False)
        out = quantized if message == "exists" else tmp_path / "out.gguf"
        with pytest.raises(bf.BillfishError, match=message):
            bf.tune_checkpoint(quantized, out, **settings(model))
    with pytest.raises(bf.DataError, match="no matrix of a layer is quantized"):
        bf.tune_checkpoint(model, tmp_path / "out.gguf", **settings(model))
    write_model(tmp_path / "other.gguf", Small(architecture="gemma"))
    with pytest.raises(bf.ModelError, match="vocabulary"):
        bf.tune_checkpoint(quantized, tmp_path / "out.gguf", **settings(model, against=tmp_path / "other.gguf"))
    write_folder(tmp_path / "mixtral", "mixtral")
    with pytest.raises(bf.ModelError, match="experts"):
        bf.tune_checkpoint(tmp_path / "mixtral", tmp_path / "out", **settings(model))
    for wrong in ({"tokens": 1}, {"epochs": 0}, {"rate": 2.0}, {"window": 1000}):
        with pytest.raises(bf.DataError, match=next(iter(wrong))):
            bf.tune_checkpoint(quantized, tmp_path / "out.gguf", **settings(model, **wrong))


def test_command(model, capsys):
    quantized, out = model.parent / "quantized.gguf", model.parent / "out.gguf"
    bf.quantize_checkpoint(model, quantized, "q4_0", progress=False)
    words = ["tune", str(quantized), str(out), "--against", str(model), "--tokens", "80", "--window", "40"]
    assert main([*words, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "q4_0" in captured.out
    assert "built-in text" in captured.err
    assert "KL divergence on the text" in captured.err
