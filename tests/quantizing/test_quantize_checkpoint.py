"""Quantizing with statistics: checkpoints, models that load, layers; the bits are those of bf.quantize with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import write_folder
from llm_models import Small, write_model

import billfish as bf
from billfish.checkpoints.write import resumable_writer as engine
from billfish.cli.main import main
from billfish.statistics import InputStatistics, Statistics

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6
DOWN = "blk.1.ffn_down.weight"


def sources(folder: Path) -> tuple[Path, Path, Statistics]:
    """A model in plain numbers, a text, and its statistics with X^T X."""
    write_model(folder / "model.gguf", Small(quantization="F32"))
    (folder / "text.txt").write_text(TEXT)
    out = folder / "s.safetensors"
    known = bf.calibrate_checkpoint(folder / "model.gguf", out, text=folder / "text.txt", hessian=True, progress=False)
    return folder / "model.gguf", folder / "text.txt", known


def expected(model: Path, known: Statistics, method: str) -> bf.QuantizedTensor:
    weights, inputs = bf.load(model)[DOWN], known[DOWN]
    more = {"hessian": inputs.hessian(DOWN)} if method == "gptq" else {}
    return bf.quantize(weights, "q4_0", method=method, importance=inputs.importance(), **more)


def same(a: bf.QuantizedTensor, b: bf.QuantizedTensor) -> bool:
    return all(np.array_equal(a.storage[name], b.storage[name]) for name in a.storage)


@pytest.mark.parametrize("written", [["--format", "fp4:64"], ["--format", "fp4", "--group-size", "64"]])
def test_group_sizes_are_part_of_a_format_wherever_it_is_written(tmp_path, written):
    write_folder(tmp_path / "in", "plain")
    keep = ["--keep", r"layers\.0\.mlp.*=fp4:-1"]
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), *written, *keep]) == 0
    ck = bf.load(tmp_path / "out")
    assert ck["model.layers.1.mlp.up_proj.weight"].group_size == 64
    assert ck["model.layers.0.mlp.up_proj.weight"].group_size == ck["model.layers.0.mlp.up_proj.weight"].shape[1]
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "again", "fp4:64", keep={r"layers\.0\.mlp": "fp4:-1"})
    assert bf.verify(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_checkpoints_are_quantized_by_statistics(tmp_path, method):
    model, _, known = sources(tmp_path)
    bf.quantize_checkpoint(model, tmp_path / "out.gguf", "q4_0", method=method, statistics=known, progress=False)
    found = bf.load(tmp_path / "out.gguf")[DOWN]
    assert same(found, expected(model, known, method))
    bf.quantize_checkpoint(model, tmp_path / "plain.gguf", "q4_0", method="mse", progress=False)
    assert not same(found, bf.load(tmp_path / "plain.gguf")[DOWN])


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_a_text_gives_what_its_statistics_give(tmp_path, method, capsys):
    model, text, _ = sources(tmp_path)
    options = ["--format", "q4_0", "--method", method, "--no-sequential"]
    assert main(["quantize", str(model), str(tmp_path / "a.gguf"), *options, "--calibrate", str(text)]) == 0
    assert (
        main(["quantize", str(model), str(tmp_path / "b.gguf"), *options, "--imatrix", str(tmp_path / "s.safetensors")])
        == 0
    )
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert not list(tmp_path.glob("*partial*"))
    assert "--calibrate TEXT" not in capsys.readouterr().err


def test_without_a_text_the_command_says_which_it_takes(tmp_path, capsys):
    model, _, _ = sources(tmp_path)
    assert main(["quantize", str(model), str(tmp_path / "a.gguf"), "--format", "q4_0", "--method", "gptq"]) == 0
    assert "--calibrate FILE" in capsys.readouterr().err
    assert main(["quantize", str(model), str(tmp_path / "b.gguf"), "--format", "q4_0", "--calibrate"]) == 0
    assert "--calibrate FILE" in capsys.readouterr().err


def test_an_imatrix_file_serves(tmp_path):
    model, _, known = sources(tmp_path)
    means = {name: InputStatistics(k.squares, k.counts) for name, k in known.items()}
    Statistics(means).save(tmp_path / "imatrix.gguf")
    Statistics(means).save(tmp_path / "imatrix.dat")
    for name in ("gguf", "dat"):
        out = tmp_path / f"{name}.gguf"
        bf.quantize_checkpoint(model, out, "q4_0", statistics=tmp_path / f"imatrix.{name}", progress=False)
        truth = expected(model, known, "mse")
        assert same(bf.load(out)[DOWN], truth)
    with pytest.raises(bf.DataError, match="only mean squares"):
        bf.quantize_checkpoint(
            model, tmp_path / "x.gguf", "q4_0", method="gptq", statistics=tmp_path / "imatrix.gguf", progress=False
        )


def test_a_folder_takes_the_statistics_of_its_gguf_file(tmp_path):
    model, _, known = sources(tmp_path)
    bf.convert(model, tmp_path / "folder", "plain", progress=False)
    bf.quantize_checkpoint(tmp_path / "folder", tmp_path / "out", "q4_0", statistics=known, progress=False)
    found = bf.load(tmp_path / "out")["model.layers.1.mlp.down_proj.weight"]
    assert same(found, expected(model, known, "mse"))


def test_statistics_of_another_model_are_refused_and_nothing_is_written(tmp_path):
    _, _, known = sources(tmp_path)
    write_folder(tmp_path / "folder", "plain")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(bf.DataError, match=r"mlp\.down_proj\.weight.*\(64, 96\)"):
        bf.quantize_checkpoint(tmp_path / "folder", tmp_path / "out", "q4_0", statistics=known, progress=False)
    with pytest.raises(bf.DataError, match=r"calibrate=.*statistics="):
        bf.quantize_checkpoint(tmp_path / "folder", tmp_path / "out", "q4_0", statistics=known, calibrate=True)
    assert sorted(tmp_path.iterdir()) == before


def test_what_would_fail_fails_before_a_text_runs(tmp_path, monkeypatch):
    model, text, _ = sources(tmp_path)
    monkeypatch.setattr(
        "billfish.quantizing.calibrate_checkpoint.load", lambda *a, **k: pytest.fail("the model was read")
    )
    (tmp_path / "there.gguf").write_bytes(b"")
    with pytest.raises(bf.CheckpointError, match=" exists"):
        bf.quantize_checkpoint(model, tmp_path / "there.gguf", "q4_0", calibrate=text)
    with pytest.raises(bf.CheckpointError, match="matches no tensor"):
        bf.quantize_checkpoint(model, tmp_path / "out.gguf", "q4_0", calibrate=text, only=["nothing"])


def stop_at_piece(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C when so many pieces of a GGUF file are written."""
    write_piece, count = engine._write_piece, [0]

    def stopping(file, output, piece):
        count[0] += piece.label.startswith(("blk", "token", "output"))
        if count[0] == number:
            raise KeyboardInterrupt
        return write_piece(file, output, piece)

    monkeypatch.setattr(engine, "_write_piece", stopping)


def test_an_interrupted_command_goes_on_with_its_statistics(tmp_path, monkeypatch):
    model, text, _ = sources(tmp_path)
    bf.quantize_checkpoint(model, tmp_path / "whole.gguf", "q4_0", calibrate=text, progress=False)
    with monkeypatch.context() as patch:
        stop_at_piece(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            bf.quantize_checkpoint(model, tmp_path / "cut.gguf", "q4_0", calibrate=text, progress=False)
    assert (tmp_path / "cut.gguf.partial-statistics.safetensors").is_file()
    with monkeypatch.context() as patch:
        patch.setattr("billfish.quantizing.calibrate_checkpoint.load", lambda *a, **k: pytest.fail("calibrated again"))
        bf.quantize_checkpoint(model, tmp_path / "cut.gguf", "q4_0", calibrate=text, progress=False)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "cut.gguf").read_bytes()
    assert not list(tmp_path.glob("*partial*"))


def test_other_statistics_continue_nothing(tmp_path, monkeypatch):
    model, _, known = sources(tmp_path)
    others = Statistics({name: InputStatistics(k.squares[::-1].copy(), k.counts) for name, k in known.items()})
    with monkeypatch.context() as patch:
        stop_at_piece(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            bf.quantize_checkpoint(model, tmp_path / "a.gguf", "q4_0", statistics=known, progress=False)
    bf.quantize_checkpoint(model, tmp_path / "a.gguf", "q4_0", statistics=others, progress=False)
    bf.quantize_checkpoint(model, tmp_path / "b.gguf", "q4_0", statistics=others, progress=False)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_models_take_statistics_while_they_load(tmp_path):
    model, _, known = sources(tmp_path)
    bf.quantize_checkpoint(model, tmp_path / "out.gguf", "q4_0", method="gptq", statistics=known, progress=False)
    tokens = [1, 50, 60, 70]
    file = bf.llm.load(tmp_path / "out.gguf", device="cpu").logits(tokens)
    path = tmp_path / "s.safetensors"
    loaded = bf.llm.load(model, device="cpu", quantize="q4_0", method="gptq", statistics=path, progress=False)
    np.testing.assert_array_equal(file, loaded.logits(tokens))
    with pytest.raises(bf.DataError, match="needs statistics= with X"):
        bf.llm.load(model, device="cpu", quantize="q4_0", method="gptq")


# ---- stacks of experts --------------------------------------------------------------------------------------------


def test_each_expert_of_a_stack_is_quantized_by_its_own_inputs(tmp_path):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 8, 64), np.float32)
    squares = rng.uniform(0.01, 10, (3, 64))
    name = "model.layers.0.mlp.experts.down_proj.weight"
    known = Statistics({name: InputStatistics(squares, np.array([5, 0, 7], np.int64))})
    bf.save({name: w}, tmp_path / "in.safetensors", progress=False)
    bf.quantize_checkpoint(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", "q4_0", keep={"experts": "q4_0"}, statistics=known,
        progress=False,
    )  # fmt: skip
    found = bf.load(tmp_path / "out.safetensors")[name]
    for expert in range(3):
        truth = bf.quantize(w[expert], "q4_0", importance=known[name].importance(expert))
        np.testing.assert_array_equal(bf.dequantize(found[expert]), bf.dequantize(truth))


# ---- layers -------------------------------------------------------------------------------------------------------


def small_torch_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))


def scaled_batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, 7, 64) * torch.linspace(0.1, 3, 64) for _ in range(3)]


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_layers_are_quantized_by_statistics(method):
    known = bf.calibrate(small_torch_model(), scaled_batches(), hessian=True, progress=False)
    by_statistics, by_batches = small_torch_model(), small_torch_model()
    more = {"hessian": known["0.weight"].hessian("0")} if method == "gptq" else {}
    weight = by_batches[0].weight.detach()
    truth = bf.quantize(weight, "q4_0", method=method, importance=known["0.weight"].importance(), **more)
    bf.quantize_model(by_statistics, "q4_0", method=method, statistics=known, progress=False)
    bf.quantize_model(by_batches, "q4_0", method=method, calibrate=scaled_batches(), progress=False)
    for model in (by_statistics, by_batches):
        np.testing.assert_array_equal(bf.dequantize(model[0].quantized()), bf.dequantize(truth))


def test_layers_refuse_what_is_not_theirs():
    model = small_torch_model()
    known = bf.calibrate(torch.nn.Sequential(torch.nn.Linear(64, 64)), scaled_batches(), progress=False)
    with pytest.raises(bf.DataError, match=r"0\.weight.*\(64, 64\)"):
        bf.quantize_model(model, "q4_0", statistics=known)
    with pytest.raises(bf.DataError, match="'gptq' needs statistics"):
        bf.quantize_model(model, "q4_0", method="gptq")
    assert type(model[0]) is torch.nn.Linear


def test_transformers_take_statistics(tmp_path):
    from transformers import AutoModelForCausalLM

    from billfish.nn.transformers import BillfishConfig

    write_folder(tmp_path / "folder", "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    known = bf.calibrate(plain, [torch.arange(60).reshape(2, 30)], hessian=True, progress=False)
    known.save(tmp_path / "s.safetensors")
    config = BillfishConfig("q4_0", method="gptq", statistics=tmp_path / "s.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", quantization_config=config)
    name = "model.layers.0.mlp.down_proj.weight"
    weight, inputs = plain.get_parameter(name).detach(), known[name]
    truth = bf.quantize(weight, "q4_0", method="gptq", importance=inputs.importance(), hessian=inputs.hessian(name))
    found = model.model.layers[0].mlp.down_proj.quantized()
    np.testing.assert_array_equal(bf.dequantize(found), bf.dequantize(truth))
    model.save_pretrained(tmp_path / "saved")
    assert "statistics" not in (tmp_path / "saved" / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    config = BillfishConfig("q4_0", method="gptq")
    with pytest.raises(bf.FormatError, match="statistics= with X"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "folder", quantization_config=config)
