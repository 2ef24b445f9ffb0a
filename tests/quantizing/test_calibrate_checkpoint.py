"""A text through a language model: the sums are those of the same model in transformers, whatever interrupts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import llm_architectures
import numpy as np
import pytest
from llm_models import Small, in_transformers, write_model

import billfish as bf
from billfish.cli.main import main
from billfish.llm.cpu import CpuDecoder
from billfish.quantizing.calibrate_checkpoint import Calibration, Layers, default_text
from billfish.statistics import Statistics

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6


def model_and_text(folder: Path, small: Small) -> tuple[dict[str, np.ndarray], Path]:
    (folder / "text.txt").write_text(TEXT)
    return write_model(folder / "model.gguf", small), folder / "text.txt"


@pytest.mark.parametrize("small", [Small(), Small("qwen2"), Small("gemma", tied=True)], ids=lambda s: s.architecture)
def test_sums_are_those_of_hooks_in_transformers(tmp_path, small):
    import torch

    weights, text = model_and_text(tmp_path, small)
    ours = bf.calibrate_checkpoint(
        tmp_path / "model.gguf", tmp_path / "s.safetensors", text=text, hessian=True, window=48, tokens=200
    )
    tokenizer = bf.llm.load(tmp_path / "model.gguf", device="cpu").tokenizer
    ids = tokenizer.encode(TEXT, special=False, start=False)
    start = [tokenizer.bos] if tokenizer.starts_with_bos else []
    step = 48 - len(start)
    windows = [start + ids[at : at + step] for at in range(0, len(ids), step)]
    fed = [window for i, window in enumerate(windows) if 48 * (i + 1) <= 200]
    fed.append(windows[len(fed)][: 200 - 48 * len(fed)])
    theirs = bf.calibrate(in_transformers(small, weights), [torch.tensor([window]) for window in fed], hessian=True)
    assert ours.tokens == theirs.tokens == 200
    names = [name for name in ours if name.startswith("blk")]
    assert len(names) == 14
    for name in [*names, "output.weight"]:
        mine, other = ours["token_embd.weight" if small.tied and name == "output.weight" else name], theirs[name]
        assert mine.counts == other.counts
        np.testing.assert_allclose(mine.squares, other.squares, rtol=2e-3, atol=1e-4 * other.squares.max())
        np.testing.assert_allclose(mine.outer, other.outer, rtol=2e-3, atol=1e-3 * np.abs(other.outer).max())


def test_a_folder_has_the_statistics_of_its_file(tmp_path):
    _, text = model_and_text(tmp_path, Small(quantization="F32"))
    bf.convert(tmp_path / "model.gguf", tmp_path / "folder", "plain", progress=False)
    of_file = bf.calibrate_checkpoint(tmp_path / "model.gguf", tmp_path / "a.safetensors", text=text)
    of_folder = bf.calibrate_checkpoint(tmp_path / "folder", tmp_path / "b.safetensors", text=text)
    assert of_file.shapes == of_folder.shapes
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_allclose(of_file[name].squares, of_folder[name].squares, rtol=1e-4)


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    _, text = model_and_text(tmp_path, Small(layers=4))
    model, whole, cut = tmp_path / "model.gguf", tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    bf.calibrate_checkpoint(model, whole, text=text, hessian=True, window=40)
    layers: list[int] = []
    run_layer = CpuDecoder.run_layer

    def stopping(self, layer, *arguments):
        layers.append(layer)
        if layer == 2 and layers.count(2) == 3:
            raise KeyboardInterrupt
        run_layer(self, layer, *arguments)

    monkeypatch.setattr(CpuDecoder, "run_layer", stopping)
    with pytest.raises(KeyboardInterrupt):
        bf.calibrate_checkpoint(model, cut, text=text, hessian=True, window=40)
    assert not cut.exists()
    assert (tmp_path / "cut.safetensors.partial").is_dir()
    layers.clear()
    monkeypatch.setattr(CpuDecoder, "run_layer", run_layer)
    seen = Layers.statistics
    monkeypatch.setattr(Layers, "statistics", lambda self, layer: layers.append(layer) or seen(self, layer))
    bf.calibrate_checkpoint(model, cut, text=text, hessian=True, window=40)
    assert layers == [2, 3, 4]  # the first two were there; the last is the head's
    assert whole.read_bytes() == cut.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cut.safetensors", "model.gguf", "text.txt", "whole.safetensors"
    ]  # fmt: skip


def test_states_that_somebody_cleared_are_computed_again(tmp_path, monkeypatch):
    _, text = model_and_text(tmp_path, Small(layers=3))
    model = tmp_path / "model.gguf"
    bf.calibrate_checkpoint(model, tmp_path / "whole.safetensors", text=text)
    seen = Layers.statistics

    def clearing(self, layer):
        for path in self._room.iterdir() if layer == 2 else ():
            path.unlink()
        return seen(self, layer)

    monkeypatch.setattr(Layers, "statistics", clearing)
    bf.calibrate_checkpoint(model, tmp_path / "cleared.safetensors", text=text)
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "cleared.safetensors").read_bytes()


def test_the_bits_do_not_depend_on_threads(tmp_path):
    _, text = model_and_text(tmp_path, Small())
    for threads in ("1", "2"):
        out = tmp_path / f"{threads}.safetensors"
        command = ["calibrate", str(tmp_path / "model.gguf"), "--text", str(text), "-o", str(out), "--hessian"]
        variables = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-m", "billfish", *command], check=True, env=variables, capture_output=True)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()


def test_the_command(tmp_path, capsys):
    _, text = model_and_text(tmp_path, Small())
    model, out = str(tmp_path / "model.gguf"), tmp_path / "imatrix.gguf"
    assert main(["calibrate", model, "--text", str(text), "-o", str(out), "--tokens", "100", "--window", "32"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("imatrix.gguf: 15 matrices, 100 tokens in windows of 32; 0.0 MB")
    assert Statistics.load(out).texts == ("text.txt",)
    assert main(["calibrate", model, "-o", str(tmp_path / "s.safetensors"), "--tokens", "50"]) == 0
    assert "--text FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "s.txt"], "'s.txt' must end in .safetensors or .gguf."),
        (["-o", "s.dat"], "'s.dat' must end in .safetensors or .gguf."),
        (["-o", "s.gguf", "--hessian"], r"'s.gguf' cannot hold X\^T X"),
        (["-o", "s.gguf", "--tokens", "0"], r"tokens.*0.*1 or more"),
        (["-o", "s.gguf", "--window", "1000"], r"window.*1000.*1 to 128"),
        (["-o", "s.gguf", "--text", "nothing.txt"], "No such file"),
        (["-o", "s.gguf", "--text", "empty.txt"], "text is empty"),
        (["-o", "text.txt.safetensors"], " exists"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path, monkeypatch, capsys, options, message):
    model_and_text(tmp_path, Small(layers=1))
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("text.txt.safetensors").write_text("")
    before = sorted(tmp_path.iterdir())
    given = [] if "--text" in options else ["--text", "text.txt"]
    assert main(["calibrate", "model.gguf", *given, *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(tmp_path.iterdir()) == before


def test_the_text_that_the_package_carries_is_varied():
    text = default_text()
    assert 25_000 < len(text.encode()) < 80_000
    for part in ("def merge_sort", "User: ", "Es war einmal", "今天", "SELECT ", "Traceback", "2 3 5 7 11"):
        assert part in text


def test_windows_begin_as_the_model_has_it(tmp_path):
    _, text = model_and_text(tmp_path, Small("gemma", tied=True))
    calibration = Calibration.of(tmp_path / "model.gguf", text, False, 90, 40)
    assert [len(window) for window in calibration.windows] == [40, 40, 10]
    assert all(window[0] == 0 for window in calibration.windows)  # <s>


def test_matrices_that_a_file_has_as_one_have_one_input(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    llm_architectures.write_model(tmp_path / "phi3", "phi3")
    (tmp_path / "text.txt").write_text(TEXT)
    calibration = Calibration.of(tmp_path / "phi3", tmp_path / "text.txt", False, 40, 20)
    calibration.write(tmp_path / "s.safetensors", progress=False)
    ours = Statistics.load(tmp_path / "s.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "phi3", dtype=torch.float32)
    theirs = bf.calibrate(model, [torch.tensor([window]) for window in calibration.windows], progress=False)
    for name in ("qkv_proj", "o_proj"):
        known = [statistics[f"model.layers.1.self_attn.{name}.weight"].squares for statistics in (ours, theirs)]
        np.testing.assert_allclose(*known, rtol=1e-3)
