"""The engine that writes: at whatever byte it was stopped, it goes on and ends with the same bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import billfish as bf
from billfish.checkpoints.writers import engine
from billfish.checkpoints.writers.engine import Output, OutputFile, Piece, write


class Stopped(BaseException):
    """As SIGKILL: nothing of ours gets to run."""


def output(made: list[str], folder: bool = True, settings: str = "s", alignment: int = 8) -> Output:
    """Two files of three pieces of odd sizes; `made` tells which pieces were made."""

    def piece(name: str, *sizes: int) -> Piece:
        def make() -> list[np.ndarray]:
            made.append(name)
            return [np.full(size, ord(name), np.uint8) for size in sizes]

        return Piece(name, sizes, make)

    files = [OutputFile("x", b"header x", (piece("a", 3), piece("b", 5, 2), piece("c", 1)), alignment)]
    if folder:
        files.append(OutputFile("y", b"header of y", (piece("d", 4), piece("e", 0), piece("f", 9)), 1))
    return Output(files, {"config.json": b"{}"} if folder else {}, folder, {"settings": settings})


def contents(path: Path) -> dict[str, bytes] | bytes:
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else path.read_bytes()


def quiet(total: int) -> Callable[[int, str], None]:
    return lambda amount, label: None


@pytest.mark.parametrize("folder", [True, False])
def test_it_writes_what_was_planned(tmp_path, folder):
    done = []
    totals = []

    def start(total: int) -> Callable[[int, str], None]:
        totals.append(total)
        return lambda amount, label: done.append(amount)

    write("convert", tmp_path / "out", output([], folder), start)
    x = b"header xaaa\0\0\0\0\0bbbbb\0\0\0bb\0\0\0\0\0\0c\0\0\0\0\0\0\0"
    y = b"header of yddddfffffffff"
    assert contents(tmp_path / "out") == ({"x": x, "y": y, "config.json": b"{}"} if folder else x)
    assert sum(done) == len(x) + (len(y) if folder else 0)
    assert totals == [sum(done) + (2 if folder else 0)]  # config.json
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("folder", [True, False])
def test_stopped_at_every_byte_it_goes_on(tmp_path, folder):
    """A stopped run leaves a prefix of each file: every such prefix, made by hand."""
    write("convert", tmp_path / "whole", output([], folder), quiet)
    expected = contents(tmp_path / "whole")
    files = expected if folder else {"x": expected}
    partial = tmp_path / "out.partial"
    for file in output([], folder).files:
        for length in range(len(files[file.name]) + 1):
            (partial / "output").mkdir(parents=True)
            (partial / "plan.json").write_text(output([], folder).plan())
            for other in output([], folder).files:
                if other.name == file.name:
                    (partial / "output" / file.name).write_bytes(files[file.name][:length])
                    break
                (partial / "output" / other.name).write_bytes(files[other.name])
            made: list[str] = []
            write("convert", tmp_path / "out", output(made, folder), quiet)
            assert contents(tmp_path / "out") == expected
            # What was whole was not made again.
            ends = file.ends()
            whole = {piece.label for piece, end in zip(file.pieces, ends[1:], strict=True) if end <= length}
            assert not whole & set(made)
            assert len(made) == sum(len(f.pieces) for f in output([], folder).files) - len(whole) - (
                3 if file.name == "y" else 0
            )
            assert not partial.exists()
            shutil.rmtree(tmp_path / "out") if folder else (tmp_path / "out").unlink()


@pytest.mark.parametrize("folder", [True, False])
def test_stopped_at_every_call_it_goes_on(tmp_path, folder, monkeypatch):
    """Stopped before each of the system calls that change something, the renaming at the end among them."""
    write("convert", tmp_path / "whole", output([], folder), quiet)
    expected = contents(tmp_path / "whole")
    originals = {name: getattr(Path, name) for name in ("rename", "mkdir", "open")}
    originals_shutil = shutil.rmtree
    for stop in range(40):
        left = iter(range(stop))

        def stopping(original, left=left):
            def call(*arguments, **settings):
                if next(left, None) is None:
                    raise Stopped
                return original(*arguments, **settings)

            return call

        with monkeypatch.context() as patch:
            for name, original in originals.items():
                patch.setattr(Path, name, stopping(original))
            patch.setattr(engine.shutil, "rmtree", stopping(originals_shutil))
            try:
                write("convert", tmp_path / "out", output([], folder), quiet)
                finished = True
            except Stopped:
                finished = False
        if not finished:
            write("convert", tmp_path / "out", output([], folder), quiet)
        assert contents(tmp_path / "out") == expected
        assert sorted(os.listdir(tmp_path)) == ["out", "whole"]
        shutil.rmtree(tmp_path / "out") if folder else (tmp_path / "out").unlink()
        if finished:
            break
    assert finished
    assert stop > 5


def test_another_plan_starts_over(tmp_path):
    partial = tmp_path / "out.partial"
    (partial / "output").mkdir(parents=True)
    (partial / "plan.json").write_text(output([], settings="other").plan())
    (partial / "output" / "x").write_bytes(b"header xzzz")
    made: list[str] = []
    write("convert", tmp_path / "out", output(made), quiet)
    assert made == list("abcdef")
    assert (tmp_path / "out" / "x").read_bytes().startswith(b"header xaaa")


def test_an_existing_output_is_not_touched(tmp_path):
    for out in ("file", "folder", "link"):
        path = tmp_path / out
        if out == "file":
            path.write_text("mine")
        elif out == "folder":
            path.mkdir()
        else:
            path.symlink_to("nowhere")
        with pytest.raises(bf.CheckpointError, match="a path that exists"):
            write("convert", path, output([]), quiet)
        assert not (tmp_path / f"{out}.partial").exists()
    assert (tmp_path / "file").read_text() == "mine"
    for path in (".", "/"):
        with pytest.raises(bf.CheckpointError, match="a path that exists"):
            write("convert", Path(path), output([]), quiet)


def test_a_parent_that_is_not_there_or_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for parent in ("missing", "file"):
        with pytest.raises(bf.CheckpointError, match="can be written to"):
            write("convert", tmp_path / parent / "out", output([]), quiet)
    assert os.listdir(tmp_path) == ["file"]


def test_no_permission(tmp_path, monkeypatch):
    """As root may write everywhere, the refusal is made up."""

    def refuse(self, *arguments, **settings):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(bf.CheckpointError, match="Permission denied"):
        write("convert", tmp_path / "out", output([]), quiet)
    assert os.listdir(tmp_path) == []


def test_no_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda path: usage._replace(free=10))
    made: list[str] = []
    with pytest.raises(bf.CheckpointError, match=r"0\.00 GB free; takes room for"):
        write("convert", tmp_path / "out", output(made), quiet)
    assert (made, os.listdir(tmp_path)) == ([], [])


def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    def full() -> list[np.ndarray]:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = output([])
    broken = OutputFile("z", b"z", (Piece("g", (1,), full),))
    plan = Output([*plan.files, broken], plan.small, True, plan.settings)
    with pytest.raises(bf.CheckpointError, match="No space left on device"):
        write("convert", tmp_path / "out", plan, quiet)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="locks as POSIX does")
def test_two_at_once(tmp_path):
    """The second is turned away, whatever it wants to write, and does not take the first one's work with it."""
    import fcntl

    partial = tmp_path / "out.partial"
    (partial / "output").mkdir(parents=True)
    (partial / "plan.json").write_text(output([]).plan())
    with (partial / "plan.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for settings in ("s", "other"):
            with pytest.raises(bf.CheckpointError, match="a folder in use"):
                write("convert", tmp_path / "out", output([], settings=settings), quiet)
            assert (partial / "plan.json").read_text() == output([]).plan()
    write("convert", tmp_path / "out", output([]), quiet)
    assert (tmp_path / "out" / "x").exists()


def test_the_plan_tells_outputs_apart():
    def digest(**changes) -> str:
        return json.dumps(json.loads(output([], **changes).plan()))

    assert len({digest(), digest(settings="t"), digest(folder=False), digest(alignment=4)}) == 4
