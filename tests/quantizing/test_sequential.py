"""Sequential GPTQ: each layer sees what the quantized layers before it give, and makes up for their errors."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cases import first
from common import assert_same_planes, gaussian
from killed_runs import ended
from llm_architectures import write_model as write_architecture
from llm_models import Small, write_model

import billfish as bf
from billfish.checkpoints.write import plan, resumable_writer
from billfish.checkpoints.write.selection import Quantization
from billfish.cli.main import main
from billfish.core import gptq_solver
from billfish.llm.cpu import CpuDecoder
from billfish.quantizing import calibrate_checkpoint, quantize_checkpoint
from billfish.quantizing.calibrate_checkpoint import Calibration
from billfish.statistics import Statistics

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6


@pytest.fixture
def model(tmp_path) -> Path:
    write_model(tmp_path / "model.gguf", Small(layers=4, quantization="F32"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "model.gguf"


def inputs(tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Correlated inputs, and the same with errors that depend on them."""
    rng = np.random.default_rng(1)
    y = rng.standard_normal((tokens, k)) @ (np.eye(k) + 0.3 * rng.standard_normal((k, k)) / k**0.5)
    return y, 0.9 * y + 0.1 * np.roll(y, 1, axis=1) + 0.05 * rng.standard_normal((tokens, k))


@pytest.mark.parametrize("name", ["q4_0", "u4b8", "nvfp4", "mxfp4", "iq4_nl", "q4_k"])
def test_cross_products_make_up_for_other_inputs(name, monkeypatch):
    monkeypatch.setattr(gptq_solver, "STEP", 1.0)
    w, (y, x) = gaussian((24, 256)), inputs(2000, 256)
    hessian, cross = x.T @ x, x.T @ y

    def error(**further) -> float:
        q = bf.quantize(w, name, method="gptq", hessian=hessian, **further)
        return float(np.square(y @ w.T - x @ bf.dequantize(q).T).sum())

    whole = error(cross=cross)
    assert whole < 0.7 * error()
    monkeypatch.setattr(gptq_solver, "STEP", 0.5)
    assert whole < error(cross=cross) < error()


def test_the_float_models_own_inputs_change_nothing():
    w, (y, _) = gaussian((9, 128)), inputs(500, 128)
    hessian = y.T @ y
    found = bf.quantize(w, "q4_0", method="gptq", hessian=hessian, cross=hessian).planes
    assert_same_planes(found, bf.quantize(w, "q4_0", method="gptq", hessian=hessian).planes)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_of_16_bits_are_quantized_as_the_same_numbers_in_32(dtype):
    w, (y, x) = gaussian((9, 128)).astype(dtype), inputs(500, 128)
    known = {"method": "gptq", "hessian": x.T @ x, "cross": x.T @ y}
    assert_same_planes(bf.quantize(w, "q4_0", **known).planes, bf.quantize(w.astype("f4"), "q4_0", **known).planes)


def test_wrong_cross_products():
    w, hessian = gaussian((4, 64)), np.eye(64)
    with pytest.raises(bf.FormatError, match="cross= is for method 'gptq'"):
        bf.quantize(w, "q4_0", cross=hessian)
    with pytest.raises(bf.ShapeError, match="cross"):
        bf.quantize(w, "q4_0", method="gptq", hessian=hessian, cross=hessian[:8])
    with pytest.raises(bf.DataError, match="finite"):
        bf.quantize(w, "q4_0", method="gptq", hessian=hessian, cross=hessian * np.nan)
    with pytest.raises(bf.FormatError, match="stack"):
        bf.quantize(np.stack([w, w]), "q4_0", method="gptq", hessian=hessian, cross=hessian)


def statistics_of(model: Path, formats: str = "q4_0", only: tuple[str, ...] = ()) -> Statistics:
    calibration = Calibration.of(model, model.parent / "text.txt", True, 200, 40)
    how = Quantization(bf.get_format(formats), None, "gptq", only=tuple(map(re.compile, only)))
    sequential = calibration.sequential(how, False)
    assert sequential is not None
    out = model.parent / f"sequential{len(only)}.safetensors"
    sequential.write(out, False, overwrite=True)
    return Statistics.load(out)


@pytest.mark.parametrize(
    ("quantized", "inputs"),
    [
        (r"blk\.[01]\.", ("blk.2.attn_q.weight", "blk.3.ffn_down.weight", "output.weight")),
        (r"blk\.1\.attn_[qkv]\.", ("blk.1.attn_output.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight")),
        (r"blk\.1\.attn_output", ("blk.1.ffn_gate.weight", "blk.2.attn_k.weight")),
        (r"blk\.0\.ffn_(gate|up)", ("blk.0.ffn_down.weight", "blk.1.attn_q.weight")),
    ],
)
def test_a_matrix_sees_the_quantized_ones_before_it(model, quantized, inputs):
    """Quantize some matrices alone: those behind them have the inputs of that very model, and cross products with those
    of the float model."""
    found = statistics_of(model, only=(quantized,))
    truth = bf.calibrate_checkpoint(
        model, model.parent / "float.safetensors", text=model.parent / "text.txt", hessian=True, tokens=200, window=40
    )
    half = model.parent / "half.gguf"
    settings = {"only": [quantized], "method": "gptq", "progress": False}
    bf.quantize_checkpoint(model, half, "q4_0", statistics=found, **settings)
    theirs = bf.calibrate_checkpoint(
        half, model.parent / "half.safetensors", text=model.parent / "text.txt", hessian=True, tokens=200, window=40
    )
    for name in inputs:
        np.testing.assert_allclose(
            found[name].outer, theirs[name].outer, rtol=1e-3, atol=1e-3 * theirs[name].outer.max()
        )
        difference = np.abs(found[name].outer - truth[name].outer).max()
        assert difference > 10 * np.abs(found[name].outer - theirs[name].outer).max()
    first = found["blk.0.attn_q.weight"]
    np.testing.assert_allclose(first.cross, first.outer, rtol=1e-4, atol=1e-4 * first.outer.max())


def test_an_interrupted_run_goes_on_to_the_same_bytes(model, monkeypatch):
    text, whole, cut = model.parent / "text.txt", model.parent / "whole.gguf", model.parent / "cut.gguf"
    settings = {"method": "gptq", "calibrate": text, "progress": False}
    bf.quantize_checkpoint(model, whole, "q4_0", **settings)
    run_layer, left = CpuDecoder.run_layer, [0]

    def stopping(self, layer, *arguments):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        run_layer(self, layer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(CpuDecoder, "run_layer", stopping)
        for left[0] in (2, 9, 20, 33, 47):
            with pytest.raises(KeyboardInterrupt):
                bf.quantize_checkpoint(model, cut, "q4_0", **settings)
    write_piece, pieces = resumable_writer._write_piece, [9]

    def stopping_at_a_tensor(file, output, piece):
        pieces[0] -= output.name == "cut.gguf"
        if not pieces[0]:
            raise KeyboardInterrupt
        return write_piece(file, output, piece)

    with monkeypatch.context() as patched:
        patched.setattr(resumable_writer, "_write_piece", stopping_at_a_tensor)
        with pytest.raises(KeyboardInterrupt):
            bf.quantize_checkpoint(model, cut, "q4_0", **settings)
    monkeypatch.setattr(calibrate_checkpoint, "load", lambda *a, **k: pytest.fail("calibrated again"))
    bf.quantize_checkpoint(model, cut, "q4_0", **settings)
    assert cut.read_bytes() == whole.read_bytes()
    monkeypatch.undo()
    assert {path.name for path in model.parent.iterdir()} == {"model.gguf", "text.txt", "whole.gguf", "cut.gguf"}
    bf.quantize_checkpoint(model, model.parent / "plain.gguf", "q4_0", **{**settings, "sequential": False})
    assert (model.parent / "plain.gguf").read_bytes() != whole.read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")
@pytest.mark.promise("files", "GPTQ in order, killed in a layer, goes on with that layer")
def test_killed_in_a_layer_the_next_run_goes_on_with_it_to_the_same_bytes(model):
    """SIGKILL in the middle of the second layer, and of the last one: each is run again, and none before it."""
    bf.quantize_checkpoint(
        model, model.parent / "whole.gguf", "q4_0", method="gptq", calibrate=model.parent / "text.txt", progress=False
    )
    runs = ended("in_order", model.parent, [(1, 7), (3, 12)])
    assert [status for status, _ in runs] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [sorted({*layers}) for _, layers in runs] == [[0, 1], [1, 2, 3], [3]]
    assert (model.parent / "cut.gguf").read_bytes() == (model.parent / "whole.gguf").read_bytes()
    assert {path.name for path in model.parent.iterdir()} == {"model.gguf", "text.txt", "whole.gguf", "cut.gguf"}


def test_states_that_were_cleared_are_computed_again(model):
    expected = statistics_of(model)
    again = Calibration.of(model, model.parent / "text.txt", True, 200, 40)
    from billfish.core.progress import Progress
    from billfish.quantizing.calibrate_checkpoint import Layers

    sequential = again.sequential(Quantization(bf.get_format("q4_0"), None, "gptq"), False)
    assert sequential is not None
    room = model.parent / "room"
    with Progress(1, "layers", enabled=False) as bar:
        known = Layers(sequential, room, bar).statistics(2)
    np.testing.assert_array_equal(known[0].outer, expected["blk.2.attn_q.weight"].outer)
    np.testing.assert_array_equal(known[0].cross, expected["blk.2.attn_q.weight"].cross)


@pytest.mark.parametrize("arguments", [{"method": "mse"}, {"method": "gptq", "statistics": "known.safetensors"}])
def test_sequential_needs_gptq_and_a_text(model, arguments):
    with pytest.raises(bf.DataError, match="sequential"):
        bf.quantize_checkpoint(model, model.parent / "out.gguf", "q4_0", sequential=True, **arguments)


def test_command(model, capsys):
    out, text = str(model.parent / "out.gguf"), str(model.parent / "text.txt")
    command = ["quantize", str(model), out, "--format", "q4_0", "--method", "gptq", "--calibrate", text]
    assert main(command) == 0
    assert "q4_0" in capsys.readouterr().out
    assert main([*command, "--no-sequential", "--force"]) == 0
    bf.quantize_checkpoint(
        model, model.parent / "other.gguf", "q4_0", method="gptq", calibrate=text, sequential=False, progress=False
    )
    assert Path(out).read_bytes() == (model.parent / "other.gguf").read_bytes()


def test_a_mix_gives_each_matrix_its_format(model, monkeypatch):
    """What is quantized in order is what the output gets."""
    seen, quantized = {}, calibrate_checkpoint.quantize

    def noted(w, format, **further):
        seen[w.tobytes()] = format.name
        return quantized(w, format, **further)

    monkeypatch.setattr(calibrate_checkpoint, "quantize", noted)
    text = model.parent / "text.txt"
    bf.quantize_checkpoint(model, model.parent / "out.gguf", "Q4_K_M", method="gptq", calibrate=text, progress=False)
    before, out = bf.load(model), bf.load(model.parent / "out.gguf")
    layers = [name for name in out if name.startswith("blk.") and len(out.describe(name).shape) == 2]
    assert {name: seen[before[name].tobytes()] for name in layers} == {name: out[name].format.name for name in layers}
    assert len({*seen.values()}) > 1


def planned(model: Path, out: Path, text: Path, format: str, **settings) -> Calibration:
    """What GPTQ in order would compute for an output."""
    sequential, found = Calibration.sequential, []

    def noted(*arguments):
        found.append(sequential(*arguments))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "sequential", noted)
        with pytest.raises(KeyboardInterrupt):
            bf.quantize_checkpoint(model, out, format, calibrate=text, **settings)
    return found[0]


def test_a_full_disk_is_seen_beforehand(model, monkeypatch):
    text = model.parent / "text.txt"
    settings = {"method": "gptq", "progress": False}
    in_order = planned(model, model.parent / "out.gguf", text, "q4_0", **settings)
    little = shutil.disk_usage(model.parent)._replace(free=in_order.disk_bytes - 1)
    monkeypatch.setattr(calibrate_checkpoint.shutil, "disk_usage", lambda _: little)
    before = {*model.parent.iterdir()}
    with pytest.raises(bf.DataError, match=r"GPTQ in order needs .* GB .*; .* GB are free.* Free some space"):
        bf.quantize_checkpoint(model, model.parent / "out.gguf", "q4_0", calibrate=text, **settings)
    assert {*model.parent.iterdir()} == before


def test_the_disk_space_is_what_is_written(model, monkeypatch):
    """Quantized matrices and mean squares, X^T X of the head's input, and beside the file what a layer needs."""
    text, out = model.parent / "text.txt", model.parent / "out.gguf"
    file, run_layer = Path(f"{out}.partial-statistics.safetensors"), CpuDecoder.run_layer
    settings = {"method": "gptq", "progress": False}
    expected, found = planned(model, out, text, "q4_0", **settings).disk_bytes, [0]

    def bytes_of(paths) -> int:
        return sum(path.stat().st_size for path in paths)

    def layer(*arguments):
        run_layer(*arguments)
        found[0] = max(found[0], bytes_of(file.with_name(f"{file.name}.partial").glob("states/*")))

    def exported(*arguments):
        assert [name for name, known in Statistics.load(file).items() if known.outer is not None] == ["output.weight"]
        found[0] += bytes_of([file])
        raise KeyboardInterrupt

    monkeypatch.setattr(CpuDecoder, "run_layer", layer)
    monkeypatch.setattr(quantize_checkpoint, "export", exported)
    with pytest.raises(KeyboardInterrupt):
        bf.quantize_checkpoint(model, out, "q4_0", calibrate=text, **settings)
    assert abs(expected - found[0]) < 0.1 * found[0]


@pytest.mark.parametrize(
    ("folder", "target"), first(2, [(True, "mlx"), (False, "billfish"), (True, "gguf"), (False, "gguf")])
)
def test_a_matrix_is_quantized_once(tmp_path, monkeypatch, folder, target):
    """Names and orders of rows are other ones in folders. The LM head comes after all layers."""
    source = tmp_path / "model.gguf"
    write_model(source, Small(layers=1, quantization="F32"))
    if folder:
        bf.convert(source, tmp_path / "folder", "plain", progress=False)
        source = tmp_path / "folder"
    format, q8_0 = ("affine4:32", "affine8:32") if target == "mlx" else ("q4_0", "q8_0")
    keep = {r"^(output|lm_head)\.": q8_0, r"attn_v|v_proj": q8_0}
    anew = quantized_after_the_text(source, format, monkeypatch, to=target, keep=keep)
    assert anew == ["output.weight" if target == "gguf" else "lm_head.weight"]


@pytest.mark.parametrize(
    ("name", "layers", "format", "keep", "anew"),
    first(
        3,
        [  # gate and up with one scale for all; columns that GGUF has in another order; a stack of one format
            ("granitehybrid", ["full_attention"], "nvfp4", {}, r"shared_mlp\.input_linear"),
            ("qwen35", ["linear_attention"], "q4_0", {}, r"linear_attn\.out_proj"),
            ("mixtral", ["full_attention"], "q4_0", {r"experts\.3\.w1": "q8_0"}, "w1"),
            ("granitehybrid-moe", [], "q4_0", {}, "nothing"),
            ("gpt-oss", [], "q4_0", {}, "nothing"),
            ("qwen3next", [], "q4_0", {}, "nothing"),
        ],
    ),
)
def test_what_cannot_be_taken_is_quantized_from_its_sums(tmp_path, monkeypatch, name, layers, format, keep, anew):
    more = {"layer_types": layers, "num_hidden_layers": len(layers)} if layers else {}
    write_architecture(tmp_path / "model", name, **more)
    found = quantized_after_the_text(tmp_path / "model", format, monkeypatch, to="billfish", keep=keep)
    out = bf.load(tmp_path / "out")
    names = [own for own in out if out.describe(own).format is not None]
    assert {*found} == {own for own in names if re.search(anew, own)}
    assert len({*found}) < len(names) / 2


def quantized_after_the_text(source: Path, format: str, monkeypatch, **how) -> list[str]:
    """The tensors that GPTQ in order quantizes when the text has run. All are those that X^T X and X^T Y of the same
    run give."""
    text = source.parent / "text.txt"
    text.write_text(TEXT[:66])
    suffix, how = ".gguf" if how["to"] == "gguf" else "", how | {"method": "gptq", "progress": False}
    out, truth, known = (text.with_name(name) for name in (f"out{suffix}", f"truth{suffix}", "known.safetensors"))
    replace(planned(source, out, text, format, **how), finished={}, summed=None).write(known, False)
    bf.quantize_checkpoint(source, truth, format, **how, statistics=known)
    again, anew = plan.quantize_matrix, []

    def noted(call, name, w, *arguments, **known):
        anew.extend([name] * (len(w) > 1))  # a row shows which arrays there will be
        return again(call, name, w, *arguments, **known)

    monkeypatch.setattr(plan, "quantize_matrix", noted)
    bf.quantize_checkpoint(source, out, format, **how, calibrate=text)
    assert contents(out) == contents(truth)
    return anew


def contents(path: Path) -> dict[str, bytes]:
    """Of a file, or of the files of a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name if path.is_dir() else "": file.read_bytes() for file in files}
