"""The input of `convert` and `quantize`: what of it is copied, and what happens if it changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import checkpoint_samples as samples
import numpy as np
import pytest
from common import assert_same_bits
from safetensors.numpy import save_file

import billfish as bf
from billfish.checkpoints.safetensors_files import MappedFile
from billfish.checkpoints.write import export
from billfish.checkpoints.write import resumable_writer as engine
from billfish.checkpoints.write.resumable_writer import identity

# ---- what belongs to a model --------------------------------------------------------------------------------------

COMPANIONS = {"tokenizer.json", "tokenizer.model", "LICENSE"}


def write_model(folder: Path) -> None:
    samples.write_config(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "LICENSE").write_text("as you like")
    save_file({"norm.weight": np.ones(8, np.float32)}, folder / "model.safetensors")


@pytest.mark.promise(
    "inputs", "links out of the model's folder are not followed for config, tokenizer and other small files"
)
def test_links_out_of_the_folder_are_not_followed(tmp_path):
    """A model that was downloaded must not put a file of the user's into an output that is published."""
    write_model(tmp_path / "in")
    (tmp_path / "key").write_text("secret")
    (tmp_path / "in" / "README.md").symlink_to(tmp_path / "key")
    (tmp_path / "in" / "NOTICE").symlink_to("../key")
    (tmp_path / "in" / "chat.jinja").symlink_to("LICENSE")
    report = bf.convert(tmp_path / "in", tmp_path / "out", "billfish")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "chat.jinja", *COMPANIONS}
    reason = "left out: a link that leads out of the model's folder"
    assert report.notes == (("NOTICE", reason), ("README.md", reason))


@pytest.mark.promise(
    "inputs", "links out of the model's folder are not followed for config, tokenizer and other small files"
)
@pytest.mark.parametrize("name", export.CONFIGURATION)
@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_a_configuration_that_is_a_link_out_of_the_folder_is_left_out(tmp_path, name, out):
    write_model(tmp_path / "in")
    (tmp_path / "key").write_text('{"token": "secret"}')
    (tmp_path / "in" / name).unlink(missing_ok=True)
    (tmp_path / "in" / name).symlink_to("../key")
    target = "gguf" if out.endswith("gguf") else "billfish"
    report = bf.convert(tmp_path / "in", tmp_path / out, target, raw_names=True)
    assert (name, f"left out: {export.LINK}") in report.notes
    outputs = [tmp_path / out] if target == "gguf" else list((tmp_path / out).iterdir())
    assert not any(b"secret" in path.read_bytes() for path in outputs)


@pytest.mark.torch
@pytest.mark.promise(
    "inputs", "links out of the model's folder are not followed for config, tokenizer and other small files"
)
@pytest.mark.parametrize("name", export.TOKENIZER)
def test_a_tokenizer_that_is_a_link_out_of_the_folder_is_not_put_into_gguf(tmp_path, name):
    """Such as a chat template, which could be any text. Without the link the tokenizer is there."""
    import llm_folders

    llm_folders.write_random(tmp_path / "in", "llama")
    bf.convert(tmp_path / "in", tmp_path / "own.gguf", "gguf")
    assert "tokenizer.ggml.tokens" in bf.load(tmp_path / "own.gguf").metadata
    path = tmp_path / "in" / name
    if path.exists():
        path.rename(tmp_path / "key")
    else:
        (tmp_path / "key").write_text("{}")
    path.symlink_to("../key")
    with pytest.raises(bf.CheckpointError, match=rf"{name}.*link that leads out of the model's folder"):
        bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    (note,) = bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf", raw_names=True).notes
    assert export.LINK in note.reason
    assert not any(field.startswith("tokenizer") for field in bf.load(tmp_path / "out.gguf").metadata)


def test_large_companions_are_left_out_by_name(tmp_path, monkeypatch):
    write_model(tmp_path / "in")
    monkeypatch.setattr(export, "MAX_COMPANION_BYTES", 255)
    (note,) = bf.convert(tmp_path / "in", tmp_path / "out", "billfish").notes
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    assert note == ("tokenizer.model", "left out: larger than 0 MB")


@pytest.mark.parametrize("cached", [True, False])
def test_a_snapshot_in_the_cache_of_hugging_face_keeps_its_tokenizer(tmp_path, cached):
    """All its files are links to ../../blobs, which count as the model's own; in other folders they do not."""
    model = tmp_path / ("models--org--name" if cached else "name")
    snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    write_model(snapshot)
    blobs.mkdir()
    (tmp_path / "key").write_text("secret")
    (snapshot / "README.md").symlink_to("../../../key")
    for path in snapshot.iterdir():
        if not path.is_symlink():
            path.rename(blobs / path.name)
            path.symlink_to(f"../../blobs/{path.name}")
    report = bf.convert(snapshot, tmp_path / "out", "billfish")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", *(COMPANIONS if cached else ())}
    assert "README.md" in [note.name for note in report.notes]
    assert ("model_type" in (tmp_path / "out" / "config.json").read_text()) == cached


# ---- the input changes --------------------------------------------------------------------------------------------


def interrupt(monkeypatch: pytest.MonkeyPatch, source: Path, out: Path) -> None:
    """A run that is stopped after two tensors."""
    original, calls = engine._write_piece, []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_write_piece", stop)
        with pytest.raises(KeyboardInterrupt):
            bf.convert(source, out, "billfish")


def put_in_place(source: Path, content: bytes) -> None:
    """Other bytes, with the times of the old."""
    about = source.stat()
    source.write_bytes(content)
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.promise("files", "no output is continued with another input")
@pytest.mark.parametrize("where", ["begin", "end"])
def test_another_model_of_the_same_name_size_and_time_is_not_continued(tmp_path, monkeypatch, where):
    source, out = tmp_path / "m.safetensors", tmp_path / "out"
    save_file({f"t{i}": np.full((8, 64), i, np.float32) for i in range(4)}, source)
    interrupt(monkeypatch, source, out)
    content = bytearray(source.read_bytes())
    at = len(content) - (
        4 * 8 * 64 * 4 if where == "begin" else 1
    )  # in the first tensor, which is written; in the last
    content[at] ^= 1
    put_in_place(source, bytes(content))
    bf.convert(source, out, "billfish")
    found = bf.load(out)
    for name, array in bf.load(source).items():
        assert_same_bits(found[name], array)


def test_samples_find_another_model_among_large_files(tmp_path):
    """Of a large file its beginning and 64 places are looked at; all of these, when it is another model."""
    path = tmp_path / "file"
    size = (1 << 22) + (1 << 21)
    path.write_bytes(bytes(size))
    [known] = identity([MappedFile(path)])
    for at in (0, 10_000, (1 << 22) - 1, 1 << 22, size - 1, (1 << 22) + 16_000):
        content = bytearray(size)
        content[at] = 1
        put_in_place(path, bytes(content))
        [other] = identity([MappedFile(path)])
        assert (other[:3], other[3] != known[3]) == (known[:3], True)


@pytest.mark.promise("files", "an input that changes while it is read gives no output")
@pytest.mark.parametrize("change", ["rewritten", "replaced", "touched", "removed"])
def test_an_input_that_changes_while_it_is_read_is_not_written(tmp_path, monkeypatch, change):
    source, out = tmp_path / "m.safetensors", tmp_path / "out"
    save_file({f"t{i}": np.full((8, 64), i, np.float32) for i in range(4)}, source)
    original, calls = engine._write_piece, []

    def changing(*arguments):
        calls.append(arguments)
        if len(calls) == 2 and change == "rewritten":
            put_in_place(source, source.read_bytes()[:-1] + b"\1")
        elif len(calls) == 2 and change == "replaced":
            (tmp_path / "other").write_bytes(source.read_bytes()[:-1] + b"\1")
            os.utime(tmp_path / "other", ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
            (tmp_path / "other").rename(source)
        elif len(calls) == 2 and change == "touched":
            os.utime(source, ns=(0, 0))
        elif len(calls) == 2:
            source.unlink()
        return original(*arguments)

    monkeypatch.setattr(engine, "_write_piece", changing)
    with pytest.raises(bf.CheckpointError, match="changed while they were read"):
        bf.convert(source, out, "billfish")
    assert os.listdir(tmp_path) == ([] if change == "removed" else ["m.safetensors"])


CUT = """
import os, sys
import billfish as bf

def cut(done, total, label):
    if done > total // 4:
        os.truncate("in.safetensors", 4096)

try:
    if sys.argv[1] == "copied":
        bf.convert("in.safetensors", "out", "billfish", progress=cut)
    else:
        bf.quantize_checkpoint("in.safetensors", "out", "q4_0", progress=cut)
except bf.CheckpointError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.promise("files", "an input that changes while it is read gives no output")
@pytest.mark.skipif(sys.platform != "linux", reason="what a mapped page of a file that was cut does")
@pytest.mark.parametrize("way", ["copied", "computed"])
def test_an_input_that_is_cut_while_it_is_read_makes_no_output(tmp_path, way):
    """The system refuses to copy what is no longer there. To whoever computes with it, it sends SIGBUS, which a library
    cannot turn into an error. The same command starts anew with what is whole again."""
    source = tmp_path / "in.safetensors"
    save_file({f"layers.{i}.weight": np.full((256, 1024), i, np.float32) for i in range(4)}, source)
    content = source.read_bytes()
    done = subprocess.run([sys.executable, "-c", CUT, way], cwd=tmp_path, capture_output=True, text=True)
    if way == "copied":
        assert (done.returncode, "changed while they were read" in done.stdout) == (3, True)
        assert os.listdir(tmp_path) == ["in.safetensors"]
    else:
        assert done.returncode == -signal.SIGBUS
        assert not (tmp_path / "out").exists()
    source.write_bytes(content)
    for out in ("out", "undisturbed"):
        bf.quantize_checkpoint(source, tmp_path / out, "q4_0")
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "out", "undisturbed"]
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "undisturbed" / path.name).read_bytes()
