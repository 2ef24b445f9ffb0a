"""bf.convert, bf.quantize_checkpoint and bf.verify: what they say about what they did, and what they refuse to do."""

from __future__ import annotations

import os
from pathlib import Path

import checkpoint_samples as samples
import numpy as np
import pytest
from checkpoint_folders import write_folder
from common import gaussian
from safetensors.numpy import save_file

import billfish as bf
from billfish.checkpoints import verification

UP = "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"


def write_every_kind(folder: Path) -> None:
    """A tensor for each reason that leaves one as it is, and two that are quantized."""
    samples.write_config(folder)
    tensors = {
        "model.embed_tokens.weight": gaussian((16, 64)),
        "model.layers.0.input_layernorm.weight": np.ones(64, np.float32),
        "model.layers.0.conv.weight": gaussian((4, 16, 64)),
        EXPERTS: gaussian((4, 16, 64)),
        "model.layers.0.mlp.odd.weight": gaussian((16, 40)),
        "model.layers.0.mlp.table.weight": np.ones((4, 64), np.int32),
        "model.layers.0.mlp.matrix": gaussian((16, 64)),
        "model.layers.0.mlp.up_proj.bias": np.ones(16, np.float32),
        UP: gaussian((16, 64)),
        "model.layers.1.mlp.up_proj.weight": gaussian((16, 64)),
        "model.layers.2.mlp.up_proj.weight": gaussian((16, 64)),
    }
    save_file(tensors, folder / "model.safetensors")


def test_each_tensor_that_is_left_has_its_reason(tmp_path):
    write_every_kind(tmp_path / "in")
    report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0", keep={r"layers\.2": "keep"})
    assert report.quantized == (EXPERTS, UP, "model.layers.1.mlp.up_proj.weight")
    reasons = {name.removeprefix("model.").removeprefix("layers."): reason for name, reason in report.left.items()}
    sensitive = "not quantized by default (embeddings, LM head, norms, routers); --keep REGEX=FORMAT quantizes them"
    assert reasons == {
        "embed_tokens.weight": sensitive,
        "0.input_layernorm.weight": sensitive,
        "0.conv.weight": "more than two axes, and not experts; `keep` chooses a format",
        "0.mlp.odd.weight": "K = 40 is not a positive multiple of 32, as q4_0 needs",
        "0.mlp.table.weight": "not a matrix of float32, float16 or bfloat16",
        "0.mlp.matrix": "not called `weight`; `keep` chooses a format",
        "0.mlp.up_proj.bias": "not a matrix",
        "2.mlp.up_proj.weight": r"kept by the rule 'layers\.2'",
    }
    ck = bf.load(tmp_path / "out")
    assert {name for name in ck if ck.describe(name).format is None} == set(report.left)
    assert report.bytes_before == bf.load(tmp_path / "in").nbytes
    assert report.bytes_after == ck.nbytes
    weights = sum(int(np.prod(ck.describe(name).shape)) for name in ck)
    assert report.bits_per_weight == (8 * report.bytes_before / weights, 8 * ck.nbytes / weights)
    assert report.nbytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "quantized  f32 -> q4_0  3" in text
    assert "left as they were: 8 tensors" in text
    for name in report.left:
        assert name in text


def test_a_summary_of_long_names_fits_80_columns(tmp_path):
    long = "model." + "a_rather_long_part." * 8
    save_file({f"{long}{i}.weight": gaussian((8, 40 + 32 * (i < 2))) for i in range(9)}, tmp_path / "in.safetensors")
    keep = {rf"part\.{i}": "keep" for i in range(2, 9)}
    with pytest.raises(bf.CheckpointError, match="nothing to quantize"):
        bf.quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "q4_0", keep=keep)
    report = bf.quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / ("out" * 40), "u8", keep=keep)
    assert max(map(len, str(report).splitlines())) <= 80


def test_experts_are_quantized_as_a_rule_says(tmp_path):
    write_every_kind(tmp_path / "in")
    report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0", keep={"experts": "q8_0"})
    assert EXPERTS in report.quantized
    assert bf.load(tmp_path / "out").describe(EXPERTS).format.name == "q8_0"
    compared = {comparison.name: comparison for comparison in bf.verify(tmp_path / "in", tmp_path / "out").comparisons}
    assert 0 < compared[EXPERTS].relative_error < 0.01


def test_only_what_is_asked_for(tmp_path):
    write_every_kind(tmp_path / "in")
    report = bf.quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", "q4_0", only=[r"layers\.0", "embed"], keep={r"layers\.2": "q8_0"}
    )
    assert report.quantized == (EXPERTS, UP, "model.layers.2.mlp.up_proj.weight")  # a rule counts before `only`
    assert report.left["model.layers.1.mlp.up_proj.weight"] == "not matched by `only`"
    assert report.left["model.embed_tokens.weight"].startswith("not quantized by default")


@pytest.mark.parametrize("argument", ["keep", "only"])
def test_a_pattern_that_finds_nothing_is_an_error_with_names(tmp_path, argument):
    write_every_kind(tmp_path / "in")
    given = {"up_porj": "q8_0"} if argument == "keep" else ["up_porj"]
    with pytest.raises(bf.CheckpointError, match=rf"quantize.*{argument}.*'up_porj', which .*up_proj\.weight"):
        bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0", **{argument: given})
    assert os.listdir(tmp_path) == ["in"]


def test_what_is_quantized_already_asks_for_requantize(tmp_path):
    write_folder(tmp_path / "in", "gptq")
    with pytest.raises(bf.CheckpointError, match=r"already quantized .*u4.*--requantize") as caught:
        bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0")
    assert "--requantize (requantize=True)" in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]
    report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0", requantize=True)
    assert len(report.quantized) == 14
    # and where only a part of it is
    report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / "some", "q4_0", keep={"lm_head": "q8_0"})
    assert report.quantized == ("lm_head.weight",)
    assert report.left[UP] == "already quantized (u4); --requantize (requantize=True) quantizes it again"
    assert bf.load(tmp_path / "some")[UP].format.name == "u4"


def test_convert_sums_up(tmp_path):
    write_folder(tmp_path / "in", "gptq")
    report = bf.convert(bf.load(tmp_path / "in"), tmp_path / "out", "mlx")
    assert (report.quantized, report.left, report.layout) == ((), {}, "mlx")
    became = {(tensor.done, tensor.before, tensor.after) for tensor in report.tensors}
    assert became == {("moved", "u4", "affine4"), ("copied", "f32", "f32")}
    assert "  moved   u4 -> affine4  14  " in str(report)
    assert "  copied  f32            7   " in str(report)
    assert max(map(len, str(report).splitlines())) <= 80


# ---- names that no program knows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["architecture", "sizes", "names"])
def test_gguf_that_no_program_can_run_is_refused(tmp_path, lacks):
    write_folder(tmp_path / "in", "plain")
    config = bf.load(tmp_path / "in").config
    if lacks == "names":
        tensors = {f"decoder.{name}": np.array(tensor) for name, tensor in bf.load(tmp_path / "in").items()}
        save_file(tensors, tmp_path / "in" / "model.safetensors")
    elif lacks == "sizes":
        config.pop("num_attention_heads")
    samples.write_config(tmp_path / "in", **config | ({"model_type": "bloom"} if lacks == "architecture" else {}))
    for call in (
        lambda **more: bf.convert(tmp_path / "in", tmp_path / "a.gguf", "gguf", **more),
        lambda **more: bf.quantize_checkpoint(tmp_path / "in", tmp_path / "b.gguf", "q4_0", **more),
    ):
        with pytest.raises(bf.CheckpointError, match=r"GGUF.*--raw-names \(raw_names=True\)"):
            call()
        call(raw_names=True)
    assert set(bf.load(tmp_path / "a.gguf")) == set(bf.load(tmp_path / "in"))
    bf.convert(tmp_path / "a.gguf", tmp_path / "c.gguf", "gguf")  # what is GGUF already passes


# ---- verify -------------------------------------------------------------------------------------------------------


def test_verify_has_an_outcome_for_each_tensor(tmp_path):
    arrays = {name: gaussian((4, 32), i) for i, name in enumerate(["same", "rounded", "gone", "other"])}
    save_file(arrays, tmp_path / "a.safetensors")
    changed = {"same": arrays["same"], "rounded": arrays["rounded"].astype(np.float16), "new": arrays["gone"]}
    save_file({**changed, "other": arrays["other"][:2]}, tmp_path / "b.safetensors")
    report = bf.verify(tmp_path / "a.safetensors", bf.load(tmp_path / "b.safetensors"))
    assert not report
    outcomes = {comparison.name: comparison.outcome for comparison in report.comparisons}
    assert outcomes == {
        "same": "equal bits",
        "rounded": "different",
        "gone": "only in A",
        "other": "different",
        "new": "only in B",
    }
    rounded = next(c for c in report.comparisons if c.name == "rounded")
    difference = arrays["rounded"].astype(np.float64) - changed["rounded"]
    assert rounded.largest_difference == np.abs(difference).max()
    assert rounded.relative_error == np.linalg.norm(difference) / np.linalg.norm(arrays["rounded"].astype(np.float64))
    assert report.count("different") == 2
    assert bf.verify(tmp_path / "a.safetensors", tmp_path / "a.safetensors")


def verified(tmp_path, a, b):
    save_file({"a": a}, tmp_path / "a.safetensors")
    save_file({"a": b}, tmp_path / "b.safetensors")
    [comparison] = bf.verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors").comparisons
    return comparison


@pytest.mark.parametrize("shape", [(8, 32), (3, 4, 32)])
@pytest.mark.parametrize("row", [0, 2, -1])
def test_verify_has_the_same_error_wherever_the_difference_is(tmp_path, monkeypatch, shape, row):
    """Tensors are compared a part at a time; parts that are equal count in the norm as well."""
    monkeypatch.setattr(verification, "VERIFY_ELEMENTS", 64)
    a = gaussian(shape)
    b = a.copy()
    b.reshape(-1, 32)[row] += 0.5
    found = verified(tmp_path, a, b)
    exact = a.astype(np.float64)
    assert found.relative_error == pytest.approx(np.linalg.norm(exact - b) / np.linalg.norm(exact), rel=1e-12)
    assert found.largest_difference == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_verify_does_not_take_nan_for_a_number(tmp_path, bad):
    a = gaussian((4, 32))
    b = a.copy()
    b[1, 2] = bad
    for pair in ((a, b), (b, a)):
        found = verified(tmp_path, *pair)
        assert (found.outcome, found.relative_error, found.largest_difference) == ("different", np.inf, np.inf)
    c = b.copy()
    c[0, 0] += 1
    assert 0 < verified(tmp_path, b, c).relative_error < 1  # what is no number in both is the same


def test_verify_counts_equal_values(tmp_path):
    write_folder(tmp_path / "in", "gptq")
    bf.convert(tmp_path / "in", tmp_path / "out", "mlx")
    report = bf.verify(tmp_path / "in", tmp_path / "out")
    assert report.same
    assert (report.count("equal values"), report.count("equal bits")) == (14, 7)
    assert str(report).splitlines()[-1] == "the same values"


# ---- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["convert", "quantize", "verify", "save"])
def test_progress_is_told_of_bytes_and_names(tmp_path, call):
    write_folder(tmp_path / "in", "plain")
    told: list[tuple[int, int, str]] = []

    def tell(done: int, total: int, name: str) -> None:
        told.append((done, total, name))

    if call == "convert":
        bf.convert(tmp_path / "in", tmp_path / "out", "billfish", progress=tell)
    elif call == "quantize":
        bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0", progress=tell)
    elif call == "verify":
        bf.verify(tmp_path / "in", tmp_path / "in", progress=tell)
    else:
        bf.save(dict(bf.load(tmp_path / "in")), tmp_path / "out", progress=tell)
    assert {name for _, _, name in told} >= set(bf.load(tmp_path / "in"))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1]
    assert len({total for _, total, _ in told}) == 1


# ---- one file -----------------------------------------------------------------------------------------------------


def test_one_file_says_what_it_leaves_out(tmp_path):
    write_folder(tmp_path / "in", "gptq", act_order=True)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    report = bf.convert(tmp_path / "in", tmp_path / "out.safetensors", "billfish")
    assert report.notes == (("tokenizer.json", "left out: the output is one file"),)
    assert report.nbytes == (tmp_path / "out.safetensors").stat().st_size
    assert bf.verify(tmp_path / "in", tmp_path / "out.safetensors")
    with pytest.raises(bf.CheckpointError, match=r"a folder or a name that ends in \.safetensors"):
        bf.convert(tmp_path / "in", tmp_path / "out.gguf", "billfish")
