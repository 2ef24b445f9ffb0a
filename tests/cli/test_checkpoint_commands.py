"""`billfish inspect`, `quantize`, `convert` and `verify`; killed and started again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_samples as samples
import numpy as np
import pytest
import torch
from common import gaussian
from llm_models import Small, write_model
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

import billfish as bf
from billfish.cli.main import main

BILLFISH = [sys.executable, "-m", "billfish"]


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder with weights of 2 x 256 x 512, and what belongs to them."""
    folder = tmp_path / "model"
    samples.write_config(folder, torch_dtype="bfloat16")
    (folder / "tokenizer.json").write_text("{}")
    tensors = {f"layers.{i}.mlp.weight": torch.from_numpy(gaussian((256, 512), i)).bfloat16() for i in range(2)}
    save_torch({**tensors, "norm.weight": torch.ones(512)}, folder / "model.safetensors")
    return folder


def test_inspect(model, capsys):
    assert main(["inspect", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["tensor", "layout", "format", "shape", "group", "bits/weight", "MB"] in [line.split() for line in lines]
    assert ["layers.1.mlp.weight", "plain", "bf16", "256x512", "16.000", "0.262"] in [line.split() for line in lines]
    assert lines[-1].split() == ["all", "3", "262656", "16.031", "0.526"]


def test_inspect_json(tmp_path, capsys):
    samples.gptq(tmp_path, act_order=True)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"] == ["gptq", "plain"]
    weight = next(t for t in found["tensors"] if t["format"])
    assert (weight["format"], weight["shape"], weight["group_size"]) == ("u4", [24, 256], 64)
    assert weight["act_order"]
    assert weight["bits_per_weight"] == 8 * weight["bytes"] / (24 * 256)


def test_inspect_shows_the_model_of_a_gguf_file(tmp_path, capsys):
    for template, has in (("{{ messages }}", True), ("", False)):
        write_model(tmp_path / "small.gguf", Small(template=template))
        assert main(["inspect", str(tmp_path / "small.gguf"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        expected = {"architecture": "llama", "context_length": 128, "chat_template": has, "name": "small llama"}
        assert {name: found[name] for name in expected} == expected
        assert main(["inspect", str(tmp_path / "small.gguf")]) == 0
        rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.split("\n\n")[0].splitlines())
        assert rows["architecture"] == "llama"
        assert rows["chat"] == f"template   {'yes' if has else 'no'}"
        assert rows["tokenizer"] == f"{found['tokenizer']}, {found['vocabulary']} tokens"
        (tmp_path / "small.gguf").unlink()


def test_inspect_shows_the_file_type_and_the_files_of_a_folder(tmp_path, capsys):
    write_model(tmp_path / "f32.gguf", Small(quantization="F32", hidden=256, heads=4, feed_forward=256))
    assert main(["quantize", str(tmp_path / "f32.gguf"), str(tmp_path / "q.gguf"), "--format", "Q4_K_M"]) == 0
    assert main(["convert", str(tmp_path / "q.gguf"), str(tmp_path / "folder"), "--to", "plain"]) == 0
    capsys.readouterr()
    found = {}
    for name in ("q.gguf", "folder"):
        assert main(["inspect", str(tmp_path / name), "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert found["q.gguf"]["file_type"] == "Q4_K_M"
    assert found["folder"]["file_type"] is None
    assert found["folder"]["tokenizer"] == "tokenizer.json"
    for fact in ("architecture", "context_length", "vocabulary", "chat_template"):
        assert found["folder"][fact] == found["q.gguf"][fact]
    (tmp_path / "folder" / "tokenizer_config.json").write_text("damaged")
    (tmp_path / "folder" / "chat_template.jinja").unlink(missing_ok=True)
    assert main(["inspect", str(tmp_path / "folder"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chat_template"] is None


def test_inspect_lists_what_cannot_be_read(tmp_path, capsys):
    samples.mlx(tmp_path, bits=3, group=32)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "not supported: MLX's affine with 3 bits" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert "3 bits" in json.loads(capsys.readouterr().out)["tensors"][0]["unsupported"]


def test_quantize_convert_verify(model, tmp_path, capsys):
    out = tmp_path / "fp4"
    command = ["quantize", str(model), str(out), "--format", "fp4", "--group-size", "128", "--keep", r"layers\.1=q8_0"]
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "fp4: 3 tensors, 526.3 kB -> 208.9 kB, 16.03 -> 6.36 bits per weight\n"
        "  quantized  bf16 -> fp4   1  262.1 kB -> 67.6 kB   4.12 bits\n"
        "  quantized  bf16 -> q8_0  1  262.1 kB -> 139.3 kB  8.50 bits\n"
        "  copied     f32           1  2.0 kB                32.00 bits\n"
        "left as they were: 1 tensor\n"
        "  1: not quantized by default (embeddings, LM head, norms, routers); --keep\n"
        "    REGEX=FORMAT quantizes them\n"
        "      norm.weight\n"
    )
    ck = bf.load(out)
    assert {n: ck[n].format.name for n in ck if n != "norm.weight"} == {
        "layers.0.mlp.weight": "fp4",
        "layers.1.mlp.weight": "q8_0",
    }
    assert (out / "tokenizer.json").exists()
    assert main(["verify", str(out), str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the same values"
    assert main(["verify", str(model), str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "different"
    assert "norm.weight: equal bits" in lines
    [line] = [line for line in lines if line.startswith("layers.0.mlp.weight: relative error 0.")]
    assert line.endswith("bf16 and fp4")
    # fp4 with float16 scales is nobody else's format; q8_0 alone goes everywhere.
    assert main(["convert", str(out), str(tmp_path / "mlx"), "--to", "mlx"]) == 2
    error = capsys.readouterr().err
    assert "layers.0.mlp.weight: " in error
    assert "layers.1" not in error
    assert "--requantize" in error
    assert main(["convert", str(out), str(tmp_path / "mlx"), "--to", "mlx", "--requantize"]) == 0
    assert "layers.0.mlp.weight: quantized again, to affine4" in capsys.readouterr().out


def test_quantize_to_gguf_by_its_name(model, tmp_path, capsys):
    command = ["quantize", str(model), str(tmp_path / "m.gguf"), "--format", "q4_k", "--method", "rtn"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "GGUF has no names for" in error
    assert "--raw-names" in error
    assert os.listdir(tmp_path) == ["model"]
    assert main([*command, "--raw-names"]) == 0
    assert bf.load(tmp_path / "m.gguf")["layers.0.mlp.weight"].format.name == "q4_k"


def test_a_gptq_folder_for_mlx(tmp_path, capsys):
    """mlx-lm cannot load one; converted it can, bit for bit."""
    samples.gptq(tmp_path / "in", symmetric=True)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "mlx"]) == 0
    assert main(["verify", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "equal values, u4b8 and affine4" in capsys.readouterr().out


def test_verify_finds_every_kind_of_difference(tmp_path, capsys):
    arrays = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float32), "c": np.zeros(2, np.float32)}
    nan = np.array([np.nan, 1], np.float32)
    for name, content in (
        ("x", {**arrays, "nan": nan}),
        ("y", {"a": arrays["a"].reshape(2, 3), "b": arrays["b"] + np.float32(1e-3), "d": arrays["c"], "nan": nan}),
    ):
        save_file(content, tmp_path / f"{name}.safetensors")
    assert main(["verify", str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors")]) == 1
    text = capsys.readouterr().out
    assert text == f"{bf.verify(tmp_path / 'x.safetensors', tmp_path / 'y.safetensors')}\n"
    assert text.endswith(
        "\n\n5 tensors:\n"
        "  equal bits    1\n"
        "  equal values  0\n"
        "  different     2  relative error up to 0.001,\n"
        "                   in b\n"
        "  only in A     1\n"
        "  only in B     1\n"
        "different\n"
    )
    for line in (
        "a: shape (6,) and (2, 3)",
        "b: relative error 0.001, largest difference 0.001, f32 and f32",
        f"c: only in {tmp_path / 'x.safetensors'}",
        f"d: only in {tmp_path / 'y.safetensors'}",
        "nan: equal bits",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("quantize IN OUT --format fp5", ["format", "'fp5'", "fp4"]),
        ("quantize IN OUT --format fp4 --group-size 48", ["group_size", "48", "16, 32"]),
        ("quantize IN OUT --format fp4 --method best", ["method", "'best'"]),
        ("quantize IN OUT --format fp4 --keep x", ["--keep", "x", "REGEX=FORMAT"]),
        ("quantize IN OUT --format fp4 --keep (=q8_0", ["keep", "'('"]),
        ("quantize IN OUT --format fp4 --keep x=q8_0:64", ["64", "32"]),
        ("quantize IN OUT --format fp4 --to mlx", ["format", "fp4", "affine4"]),
        ("quantize IN OUT --format nvfp4 --to mlx", ["format", "nvfp4"]),
        ("quantize IN OUT --format q4_0 --to gguf", ["OUT", "a folder", "gguf", ".gguf"]),
        ("quantize IN OUT --format F16", ["F16", "billfish convert IN OUT --to plain --dtype float16"]),
        ("quantize IN OUT.gguf --format bf16", ["bf16", "billfish convert IN OUT.gguf --to gguf --dtype bfloat16"]),
        ("quantize IN OUT --format q4_0 --plan FILE", ["--plan", "--bits", "--format"]),
        ("convert IN OUT.gguf --to mlx", ["OUT.gguf", "mlx", "a folder"]),
        ("convert IN OUT --to onnx", ["'onnx'", "billfish"]),
        ("convert IN OUT.safetensors --to mlx", ["OUT.safetensors", "mlx", "a folder"]),
        ("quantize IN OUT --format fp4 --keep lm_haed=q8_0", ["keep", "'lm_haed'", "no tensor"]),
        ("quantize IN OUT --format fp4 --only mlp --only attn", ["only", "'attn'", "no tensor"]),
        ("quantize IN OUT --format fp4 --only [", ["only", "'['"]),
        (
            "quantize IN OUT --format fp4 --only norm",
            ["nothing to quantize", "norm.weight", "not quantized by default"],
        ),
        ("convert IN IN --to mlx", ["IN exists", "another output"]),
        ("convert missing OUT --to mlx", ["no such file", "missing", "hf download ORG/NAME"]),
        ("quantize missing OUT --format q4_0", ["no such file", "missing", "hf download ORG/NAME"]),
        ("verify IN missing", ["no such file", "missing"]),
        ("inspect dir/model.gguf", ["no such file", "dir/model.gguf", "hf download ORG/NAME"]),
        ("inspect org/name-8B", ["no such file", "org/name-8B.", "hf download org/name-8B --local-dir DIR"]),
        ("run https://huggingface.co/org/name/x -p a", ["https://huggingface.co/org/name/x", "hf:USER/MODEL"]),
        ("eval IN --text missing", ["--text", "missing"]),
    ],
)
def test_wrong_arguments_get_one_line_and_leave_nothing(model, monkeypatch, capsys, line, facts):
    model.rename(model.with_name("IN"))
    monkeypatch.chdir(model.parent)
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("billfish: ")
    assert [fact for fact in facts if fact not in captured.err] == []
    assert captured.err.count("\n") == 1
    assert os.listdir() == ["IN"]


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch, capsys):
    """safetensors files need one; GGUF is read and written without any."""
    samples.gguf_file(tmp_path / "m.gguf", ("Q4_0",))
    save_file({"a": np.ones(2)}, tmp_path / "m.safetensors")
    for package in ("gguf", "safetensors"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    assert main(["inspect", str(tmp_path / "m.gguf")]) == 0
    assert main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "out.gguf"), "--to", "gguf"]) == 0
    assert main(["inspect", str(tmp_path / "m.safetensors")]) == 2
    error = capsys.readouterr().err
    assert "safetensors is not installed" in error
    assert "pip install '.[checkpoints]'" in error


def test_ctrl_c_says_how_to_go_on(model, tmp_path, monkeypatch, capsys):
    from billfish.checkpoints.write import resumable_writer as engine

    original = engine._write_piece
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(engine, "_write_piece", interrupted)
    command = ["quantize", str(model), str(tmp_path / "out"), "--format", "u4b8"]
    assert main(command) == 130
    assert "continues" in capsys.readouterr().err
    assert main(command) == 0
    assert len(calls) == 4  # three pieces, one of them twice
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_ctrl_c_shows_no_traceback(model, monkeypatch, capsys, command):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bf.Checkpoint, "describe", interrupted)
    assert main([command, str(model), *([str(model)] if command == "verify" else [])]) == 130
    assert capsys.readouterr().err == "billfish: stopped\n"


ENDLESS = """
import sys
from billfish.checkpoints.write import resumable_writer as engine
from billfish.cli.main import main

write_piece = engine._write_piece

def write_first_piece(file, output, piece):
    while file.tell() > len(output.header):  # quantizes the second piece again and again
        piece.make()
    return write_piece(file, output, piece)

engine._write_piece = write_first_piece
sys.exit(main(sys.argv[1:]))
"""


def heed_ctrl_c() -> None:
    """`nohup` and shells that start something in the background make their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.promise("threads", "Ctrl-C shows no traceback; `convert` and `quantize` say how to continue")
@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT")
def test_a_real_ctrl_c(tmp_path):
    """The signal itself, while tensors are quantized on all threads."""
    tensors = {f"layers.{i}.weight": gaussian((256, 512), i) for i in range(20)}
    save_file(tensors, tmp_path / "in.safetensors")
    command = ["quantize", str(tmp_path / "in.safetensors"), str(tmp_path / "out"), "--format", "u4"]
    endless = [sys.executable, "-c", ENDLESS, *command]
    with subprocess.Popen(
        endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as process:
        try:
            while process.poll() is None and written(tmp_path / "out.partial") == 0:
                time.sleep(0.001)
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, ""), error
    assert "stopped" in error.splitlines()[-1]
    assert "same command continues" in error.splitlines()[-1]
    assert main(command) == 0
    assert len(bf.load(tmp_path / "out")) == 20


def in_a_terminal(columns: int, *arguments: str) -> list[str]:
    """The lines that a command writes to a terminal of so many columns."""
    here, there = os.openpty()
    environment = {**os.environ, "COLUMNS": str(columns)}
    process = subprocess.Popen([*BILLFISH, *arguments], stdout=there, stderr=subprocess.DEVNULL, env=environment)
    os.close(there)
    written = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other side is closed
        while part := os.read(here, 10_000):
            written += part
    process.wait()
    os.close(here)
    return written.decode().splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_long_names_fit_a_terminal_and_stay_whole_in_a_pipe(tmp_path, capsys, command):
    name = f"model.{'language_model.' * 6}layers.0.mlp.up_proj.weight"
    for i in range(2):
        save_file({name: gaussian((8, 32), i), "b": np.ones(3, np.float32)}, tmp_path / f"{i}.safetensors")
    paths = [str(tmp_path / f"{i}.safetensors") for i in range(2 if command == "verify" else 1)]
    main([command, *paths])
    assert name in capsys.readouterr().out
    lines = in_a_terminal(80, command, *paths)
    assert max(map(len, lines)) <= 80
    (line,) = (line for line in lines if line.startswith("model."))
    assert "..." in line
    assert "proj.weight" in line
    assert in_a_terminal(200, command, *paths)[:-1] != lines[:-1]  # wider ones show more


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_a_folder_that_is_not_ours_is_left_alone(model, tmp_path, capsys, command):
    mine = tmp_path / "out.partial"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    arguments = [command, str(model), str(tmp_path / "out"), *(["--format", "u4b8"] if command == "quantize" else [])]
    assert main([*arguments, "--to", "compressed-tensors"]) == 2
    error = capsys.readouterr().err
    assert f"{command}: {mine} was not written by billfish. Move it" in error
    assert (mine / "thesis.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["model", "out.partial"]


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files as POSIX does")
def test_a_file_that_may_not_grow_is_continued(model, tmp_path):
    """A limit of the system, met in the middle of writing, as a full disk is."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    command = [*BILLFISH, "quantize", str(model), str(tmp_path / "out"), "--format", "u8b128", "--method", "rtn"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert "2 of 3 tensors are kept" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["model", "out.partial"]
    whole = ["quantize", str(model), str(tmp_path / "whole"), *command[6:]]
    assert main(command[3:]) == main(whole) == 0
    assert sorted(os.listdir(tmp_path)) == ["model", "out", "whole"]
    assert list(digests(tmp_path / "out").values()) == list(digests(tmp_path / "whole").values())


# ---- killed -----------------------------------------------------------------------------------------------------


def digests(path: Path) -> dict[Path, str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def written(partial: Path) -> int:
    try:
        return sum(path.stat().st_size for path in (partial / "output").iterdir())
    except FileNotFoundError:
        return 0


def run_and_kill(command: list[str], partial: Path, at_bytes: int) -> bool:
    """Start a command and kill it as soon as so much is written; whether it was still running."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if written(partial) >= at_bytes:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    return process.wait() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize(("kind", "seed"), [("folder", 1), pytest.param("gguf", 2, marks=pytest.mark.full)])
def test_killed_three_times_it_ends_with_the_same_bytes(tmp_path, kind, seed):
    """Three random moments for each kind. Each run goes on where the one before was killed.

    tests/checkpoints/test_processes.py kills what writes, without the rest of the program, at more moments.
    """
    samples.write_config(tmp_path / "in")
    tensors = {f"layers.{i}.weight": gaussian((96, 512), i) for i in range(20)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    options, suffix = (["u4"], "") if kind == "folder" else (["q4_k", "--raw-names"], ".gguf")
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    command = [*BILLFISH, "quantize", str(tmp_path / "in"), str(out), "--format", *options]
    subprocess.run([*command[:5], str(whole), *command[6:]], check=True, capture_output=True)
    expected = {path.name.replace("whole", "out"): digest for path, digest in digests(whole).items()}
    total = sum(path.stat().st_size for path in digests(whole))
    rng, partial = random.Random(seed), tmp_path / f"out{suffix}.partial"
    moments = sorted(rng.randrange(total) for _ in range(3))
    for moment in moments:
        while not run_and_kill(command, partial, moment):  # it was done before the signal got there: once more
            assert {path.name: digest for path, digest in digests(out).items()} == expected
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    if not out.exists():  # the last may have been killed after its renaming
        assert written(partial) > 0
        subprocess.run(command, check=True, capture_output=True)
    assert {path.name: digest for path, digest in digests(out).items()} == expected
    assert not partial.exists()
