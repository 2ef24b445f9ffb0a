"""The sweep: what it runs for each case, and what becomes of its records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
from llm_models import Small, write_model

import billfish as bf
from benchmarks import sweep, tables
from billfish.llm import load
from billfish.llm.evaluation import Truth

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6


@pytest.fixture
def model(tmp_path) -> Path:
    write_model(tmp_path / "model.gguf", Small(quantization="F32"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "model.gguf"


def test_a_sweep_goes_on_where_it_was_stopped(model, monkeypatch, capsys):
    record = model.parent / "sweep.json"
    words = [str(model), "--text", str(model.parent / "text.txt"), "--tokens", "120", "--device", "cpu"]
    for formats in ("q4_0", "q4_0,q8_0,u4b8"):
        more = ["--formats", formats, "--methods", "rtn,mse", "--bits", "5", "--json", str(record)]
        monkeypatch.setattr(sys, "argv", ["sweep", *words, *more])
        sweep.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"billfish, {format}, {method}" for format in ("q4_0", "q8_0", "u4b8") for method in ("rtn", "mse")
    ]
    found = sweep.records.Growing(record, records=[]).content["records"]
    best = min(found, key=lambda one: one["divergence"])
    assert best["format"] == "q8_0"
    assert all(one["divergence_999"] > one["divergence"] > 0 for one in found)
    shown = tables.sweep({"records": found}).strip().splitlines()
    assert len(shown) == 2 + len(found)
    assert shown[2].startswith("| u4b8, ")


def test_llama_cpp_s_program_is_another_row(model):
    """A program that writes what llama.cpp's would."""
    theirs = model.parent / "made.gguf"
    bf.quantize_checkpoint(model, theirs, "q4_0", method="rtn", progress=False)
    program = model.parent / "llama-quantize"
    program.write_text(f'#!/bin/sh\n[ "$1 $4" = "--allow-requantize Q4_0" ] && cp {theirs} "$3"\n')
    program.chmod(0o755)
    flags = argparse.Namespace(
        formats=[], methods=["mse"], bits=[], mixes=["Q4_0"], llama_quantize=program, imatrix=None, device="cpu"
    )
    [case] = sweep.cases(flags)
    flags.imatrix = Path("imatrix.gguf")
    assert [case["method"] for case in sweep.cases(flags)] == ["plain", "imatrix"]
    flags.methods = ["weighted"]
    assert [case["method"] for case in sweep.cases(flags)] == ["imatrix"]
    reference = load(model, device="cpu", progress=False)
    truth = Truth(reference, reference.tokenizer.encode(TEXT, special=False)[:100])
    record = sweep.measured(case, sweep.write(case, model, model.parent, flags), truth, "cpu")
    assert (record["by"], record["bits_per_weight"], record["tokens"]) == ("llama.cpp", 4.5, 99)
    assert record["bytes"] == theirs.stat().st_size


def test_mixes_and_plans_are_quantized_as_by_the_commands(model, monkeypatch):
    """Each file once: what the folder has is not written again."""
    planned = []

    def plans(source, out, bits, formats, plan, *_, **settings):
        planned.append((bits, Path(plan).name, settings["method"], settings["calibrate"]))
        bf.quantize_checkpoint(source, out, "q8_0", method="rtn", progress=False)

    monkeypatch.setattr(sweep, "quantize_to_bits", plans)
    text = str(model.parent / "text.txt")
    flags = argparse.Namespace(calibrate=text, device="cpu")
    for _ in range(2):
        out = sweep.write({"by": "billfish", "format": "--bits 5.5", "method": "gptq"}, model, model.parent, flags)
        assert out == model.parent / "--bits 5.5-gptq.gguf"
    sweep.write({"by": "billfish", "format": "--bits 5.5", "method": "weighted"}, model, model.parent, flags)
    assert planned == [(5.5, "--bits 5.5.txt", "gptq", text), (5.5, "--bits 5.5.txt", "mse", False)]
    mixed = sweep.write({"by": "billfish", "format": "Q4_K_M", "method": "weighted"}, model, model.parent, flags)
    expected = model.parent / "expected.gguf"
    bf.quantize_checkpoint(model, expected, "Q4_K_M", calibrate=text, progress=False)
    assert mixed.read_bytes() == expected.read_bytes()


def test_off_the_grid_no_weight_is_where_it_was(tmp_path):
    """Matrices of layers become float16, half a step away at most. The embedding stays as it is."""
    write_model(tmp_path / "model.gguf", Small(quantization="Q4_1"))
    made = sweep.without_grid(tmp_path / "model.gguf", tmp_path)
    assert sweep.without_grid(tmp_path / "model.gguf", tmp_path) == made
    before, after = bf.open_checkpoint(tmp_path / "model.gguf"), bf.open_checkpoint(made)
    assert [*before] == [*after]
    name = "blk.0.ffn_down.weight"
    w, noisy = bf.dequantize(before[name]), np.asarray(after[name])
    assert noisy.dtype == np.float16
    step = np.repeat(before[name].planes["scale"].astype(np.float32), 32, axis=1)
    assert 0.2 < (np.abs(noisy - w) / step).mean() < 0.3
    np.testing.assert_array_equal(
        after["token_embd.weight"].planes["codes"], before["token_embd.weight"].planes["codes"]
    )
    assert load(made, device="cpu", progress=False).decoder.tensors.bits_per_weight == 16


def test_a_tuned_file_of_the_folder_is_not_tuned_again(model, monkeypatch):
    def tune(source, out, **settings):
        assert not Path(out).exists()
        bf.quantize_checkpoint(model, out, "q8_0", method="rtn", progress=False)
        tuned.append(Path(source).name)

    tuned: list[str] = []
    monkeypatch.setattr(bf, "tune_checkpoint", tune)
    flags = argparse.Namespace(calibrate=str(model.parent / "text.txt"), device="cpu")
    bf.quantize_checkpoint(model, model.parent / "q4_0-gptq.gguf", "q4_0", method="rtn", progress=False)
    for _ in range(2):
        out = sweep.write({"by": "billfish", "format": "q4_0", "method": "tune"}, model, model.parent, flags)
        assert out.name == "tuned-q4_0-gptq.gguf"
    assert tuned == ["q4_0-gptq.gguf"]
