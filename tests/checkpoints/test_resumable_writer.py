"""The engine that writes: at whatever byte it was stopped, it goes on and ends with the same bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import billfish as bf
from billfish.checkpoints.write import resumable_writer as engine
from billfish.checkpoints.write.resumable_writer import Output, plan_text, write
from billfish.checkpoints.write.target import OutputFile, Piece


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
    return Output(files, {"config.json": b"{}"} if folder else {}, folder, {"settings": settings}, lambda: True)


def contents(path: Path) -> dict[str, bytes] | bytes:
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else path.read_bytes()


def leave(partial: Path, plan: Output, files: dict[str, bytes], whole: dict[str, bytes]) -> None:
    """The folder of a run that was stopped: these files so far, and the digests of the pieces of whole ones."""
    (partial / "output").mkdir(parents=True)
    (partial / "plan.json").write_text(plan.plan())
    for name, content in files.items():
        (partial / "output" / name).write_bytes(content)
    pieces = [whole[f.name][a:b] for f in plan.files if f.name in whole for a, b in pairwise(f.ends())]
    (partial / "digests").write_bytes(b"".join(hashlib.sha256(piece).digest() for piece in pieces))


@pytest.mark.parametrize("folder", [True, False])
def test_it_writes_what_was_planned(tmp_path, folder):
    told = []
    write("convert", tmp_path / "out", output([], folder), lambda *step: told.append(step))
    x = b"header xaaa\0\0\0\0\0bbbbb\0\0\0bb\0\0\0\0\0\0c\0\0\0\0\0\0\0"
    y = b"header of yddddfffffffff"
    assert contents(tmp_path / "out") == ({"x": x, "y": y, "config.json": b"{}"} if folder else x)
    total = len(x) + (len(y) + len(b"{}") if folder else 0)
    assert {step[1] for step in told} == {total}
    assert [step[0] for step in told] == sorted(step[0] for step in told)
    assert told[-1] == ((total, total, "config.json") if folder else (total, total, "c"))
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.promise("files", "stopped at any byte, likewise")
@pytest.mark.parametrize("folder", [True, False])
def test_stopped_at_every_byte_it_goes_on(tmp_path, folder):
    """A stopped run leaves a prefix of each file: every such prefix, made by hand."""
    write("convert", tmp_path / "whole", output([], folder))
    expected = contents(tmp_path / "whole")
    files = expected if folder else {"x": expected}
    partial = tmp_path / "out.partial"
    for file in output([], folder).files:
        for length in range(len(files[file.name]) + 1):
            before = {} if file.name == "x" else {"x": files["x"]}
            leave(partial, output([], folder), before | {file.name: files[file.name][:length]}, files)
            made: list[str] = []
            write("convert", tmp_path / "out", output(made, folder))
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


@pytest.mark.promise("files", "bytes lost in a power cut are written again")
@pytest.mark.parametrize("damage", ["zeros", "flipped", "cut in the middle", "header", "digests", "no digests"])
def test_bytes_that_were_lost_are_written_again(tmp_path, damage):
    """After a power cut a file may be as long as it was, with zeros where nothing had reached the disk."""
    write("convert", tmp_path / "whole", output([]))
    whole = contents(tmp_path / "whole")
    leave(tmp_path / "out.partial", output([]), whole, whole)
    file, digests = tmp_path / "out.partial" / "output" / "x", tmp_path / "out.partial" / "digests"
    content = bytearray(whole["x"])
    if damage == "zeros":
        content[16:] = bytes(len(content) - 16)  # all behind the first piece
    elif damage == "flipped":
        content[16] ^= 1
    elif damage == "cut in the middle":
        content = content[:20]
    elif damage == "header":
        content[0] ^= 1
    file.write_bytes(content)
    if damage == "digests":
        digests.write_bytes(digests.read_bytes()[:40])
    elif damage == "no digests":
        digests.unlink()
    made: list[str] = []
    write("convert", tmp_path / "out", output(made))
    assert made == list("abcdef" if damage in ("header", "no digests") else "bcdef")
    assert contents(tmp_path / "out") == whole


def test_another_plan_starts_over(tmp_path):
    write("convert", tmp_path / "whole", output([]))
    whole = contents(tmp_path / "whole")
    leave(tmp_path / "out.partial", output([], settings="other"), whole, whole)
    made: list[str] = []
    write("convert", tmp_path / "out", output(made))
    assert made == list("abcdef")
    assert contents(tmp_path / "out") == whole


@pytest.mark.promise("files", "an existing OUT is not touched without `--force`")
def test_an_existing_output_is_not_touched(tmp_path):
    for out in ("file", "folder", "link"):
        path = tmp_path / out
        if out == "file":
            path.write_text("mine")
        elif out == "folder":
            path.mkdir()
        else:
            path.symlink_to("nowhere")
        with pytest.raises(bf.CheckpointError, match=" exists"):
            write("convert", path, output([]))
        assert not (tmp_path / f"{out}.partial").exists()
    assert (tmp_path / "file").read_text() == "mine"
    for path in (".", "/"):
        with pytest.raises(bf.CheckpointError, match=" exists"):
            write("convert", Path(path), output([]))


@pytest.mark.parametrize("folder", [True, False])
def test_an_existing_output_is_replaced_when_the_new_one_is_whole(tmp_path, folder):
    out = tmp_path / "out"
    write("convert", out, output([], folder, alignment=16))
    if folder:
        (out / "README.md").write_text("of the old one")
    before, seen = contents(out), []
    plan = replace(output([], folder), is_current=lambda: (seen.append(contents(out)), True)[1])
    write("convert", tmp_path / "new", output([], folder))
    with pytest.raises(bf.CheckpointError, match="overwrite=True"):
        write("convert", out, plan, overwrite=False)
    write("convert", out, plan, overwrite=True)
    assert seen == [before]
    assert contents(out) == contents(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["new", "out"]


@pytest.mark.promise("files", "an existing OUT is not touched without `--force`")
@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("continues", [True, False])
def test_an_error_leaves_the_output_that_was_to_be_replaced(tmp_path, monkeypatch, folder, error, continues):
    """Also one between the two moments at which the old folder loses its name and the new one gets it."""
    out = tmp_path / "out"
    write("convert", out, output([], folder, alignment=16))
    before, plan = contents(out), replace(output([], folder), continues=continues)

    def fail(self, target):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises((KeyboardInterrupt, bf.CheckpointError)):
            write("convert", out, plan, overwrite=True)
    if folder and continues:
        assert os.listdir(tmp_path) == ["out.partial"]  # for the next run, whatever it is
        with pytest.raises(bf.CheckpointError, match=" exists"):
            write("convert", out, output([], folder, settings="another"))
    assert contents(out) == before
    made: list[str] = []
    write("convert", out, output(made, folder), overwrite=True)
    assert made == ([] if continues else list("abcdef" if folder else "abc"))
    assert contents(out) != before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("what", ["subfolder", "no model", "link", "file", "folder for a file"])
def test_nothing_but_an_earlier_output_is_replaced(tmp_path, what):
    mine = tmp_path / "out"
    if what == "file":
        mine.write_text("mine")
    elif what == "link":
        (tmp_path / "mine").mkdir()
        mine.symlink_to("mine")
    else:
        mine.mkdir()
        (mine / ("thesis.txt" if what == "no model" else "config.json")).write_text("mine")
        if what == "subfolder":
            (mine / "photos").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(bf.CheckpointError, match="out"):
        write("convert", mine, output([], folder=what != "folder for a file"), overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_parent_that_is_not_there_or_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for parent in ("missing", "file"):
        with pytest.raises(bf.CheckpointError, match="can be written to"):
            write("convert", tmp_path / parent / "out", output([]))
    assert os.listdir(tmp_path) == ["file"]


def test_no_permission(tmp_path, monkeypatch):
    """As root may write everywhere, the refusal is made up."""

    def refuse(self, *arguments, **settings):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(bf.CheckpointError, match="Permission denied"):
        write("convert", tmp_path / "out", output([]))
    assert os.listdir(tmp_path) == []


def test_no_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda path: usage._replace(free=10))
    made: list[str] = []
    with pytest.raises(bf.CheckpointError, match=rf"{re.escape(str(tmp_path))}.*10 bytes.*needs \d+ bytes"):
        write("convert", tmp_path / "out", output(made))
    assert (made, os.listdir(tmp_path)) == ([], [])


# ---- what an error leaves -----------------------------------------------------------------------------------------


def fill_up(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """A disk that has room for so many bytes of each file: a write that needs more writes what fits, and fails."""
    original = engine._write_piece

    def write_piece(file, output, piece):
        digest = original(file, output, piece)
        if file.tell() > room:
            file.truncate(room)
            raise OSError(errno.ENOSPC, "No space left on device")
        return digest

    monkeypatch.setattr(engine, "_write_piece", write_piece)


@pytest.mark.promise("files", "after a full disk the same command continues")
@pytest.mark.parametrize("room", [8, 10, 15, 16, 33, 39])  # of 40 bytes of the first file
@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_leaves_what_is_whole(tmp_path, monkeypatch, room, earlier):
    """The same command continues when there is room; what was whole is not made again."""
    write("convert", tmp_path / "whole", output([]))
    if earlier and room >= 16:  # a run that was killed after its first tensor
        leave(tmp_path / "out.partial", output([]), {"x": b"header xaaa\0\0\0\0\0"}, contents(tmp_path / "whole"))
    ends = output([]).files[0].ends()[1:]
    whole = sum(end <= room for end in ends)
    with monkeypatch.context() as patch:
        fill_up(patch, room)
        with pytest.raises(bf.CheckpointError, match="No space left on device") as caught:
            write("convert", tmp_path / "out", output([]))
    kept = f"{whole} of 6 tensors are kept in {tmp_path / 'out.partial'}, and the same command continues"
    assert (kept in str(caught.value)) == (whole > 0)
    assert sorted(os.listdir(tmp_path)) == (["out.partial", "whole"] if whole else ["whole"])
    made: list[str] = []
    write("convert", tmp_path / "out", output(made))
    assert made == list("abcdef")[whole:]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


@pytest.mark.parametrize("at", ["c", "sync"])
def test_what_did_not_reach_the_disk_is_not_kept(tmp_path, monkeypatch, at):
    """NFS and quotas may tell of a full disk only when the file is synced: its length says nothing then."""
    write("convert", tmp_path / "whole", output([]))
    leave(tmp_path / "out.partial", output([]), {"x": b"header xaaa\0\0\0\0\0"}, contents(tmp_path / "whole"))
    original = engine._write_piece

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    def write_piece(file, output, piece):
        digest = original(file, output, piece)
        if piece.label == at:  # what is buffered now must not be written behind a gap when the file is closed
            full(file)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(engine, "_write_piece", write_piece)
        with pytest.raises(bf.CheckpointError, match="1 of 6 tensors are kept"):
            write("convert", tmp_path / "out", output([]))
    made: list[str] = []
    write("convert", tmp_path / "out", output(made))
    assert made == list("bcdef")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def broken(error: BaseException, at: str = "d") -> Output:
    """The same output, but one tensor cannot be made."""

    def fail() -> list[np.ndarray]:
        raise error

    plan = output([])
    files = [
        replace(f, pieces=tuple(replace(p, make=fail) if p.label == at else p for p in f.pieces)) for f in plan.files
    ]
    return replace(plan, files=files)


@pytest.mark.parametrize("error", [bf.CheckpointError("damaged"), RuntimeError("a mistake of ours")])
def test_an_error_that_would_come_again_leaves_nothing_of_a_first_run(tmp_path, error):
    with pytest.raises(type(error)):
        write("convert", tmp_path / "out", broken(error))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [bf.CheckpointError("damaged"), RuntimeError("a mistake of ours")])
def test_no_error_removes_what_an_earlier_run_left(tmp_path, error):
    with pytest.raises(KeyboardInterrupt):
        write("convert", tmp_path / "out", broken(KeyboardInterrupt(), at="b"))
    with pytest.raises(type(error)):
        write("convert", tmp_path / "out", broken(error))
    made: list[str] = []
    write("convert", tmp_path / "out", output(made))
    assert made == list("def")


def test_out_of_memory_leaves_what_is_whole(tmp_path):
    with pytest.raises(MemoryError):
        write("convert", tmp_path / "out", broken(MemoryError()))
    made: list[str] = []
    write("convert", tmp_path / "out", output(made))
    assert made == list("def")


@pytest.mark.parametrize("earlier", [False, True])
def test_an_input_that_changed_is_not_written(tmp_path, earlier):
    if earlier:
        with pytest.raises(KeyboardInterrupt):
            write("convert", tmp_path / "out", broken(KeyboardInterrupt()))
    made: list[str] = []
    with pytest.raises(bf.CheckpointError, match="files of the input changed while they were read"):
        write("convert", tmp_path / "out", replace(output(made), is_current=lambda: False))
    assert len(made) == (3 if earlier else 6)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("folder", [True, False])
def test_an_output_that_somebody_made_meanwhile_is_not_replaced(tmp_path, folder):
    """Renaming would replace a file, or an empty folder."""
    out = tmp_path / "out"
    plan = replace(
        output([], folder), is_current=lambda: (out.mkdir(exist_ok=True) if folder else out.write_text("mine"), True)[1]
    )
    with pytest.raises(bf.CheckpointError, match=r"File exists .* tensors are kept"):
        write("convert", out, plan)
    assert contents(out) == ({} if folder else b"mine")
    with pytest.raises(bf.CheckpointError, match=" exists"):
        write("convert", out, output([], folder))
    out.rename(tmp_path / "mine")
    made: list[str] = []
    write("convert", out, output(made, folder))
    assert made == []


# ---- what is not ours ---------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder; None for folders, the target of links."""
    return {
        str(p.relative_to(folder)): str(p.readlink()) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")


def foreign_plan(path: Path) -> None:
    foreign_folder(path)
    (path / "plan.json").write_text('{"settings": {}, "files": [], "small": {}}')  # ours of old; anybody's


def edited_plan(path: Path) -> None:
    path.mkdir()
    (path / "plan.json").write_text(json.dumps(json.loads(output([]).plan()), indent=1))


# Each could be a plan of ours, down to the last space, if nobody looked at what is in it.
ODD_PLANS = {
    "no text": b"\xff\xfe",
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "a long number": b"9" * 10_000,
    "files are a text": plan_text("xyz", {}, {}).encode(),
    "files are an object": plan_text({"x": 1}, {}, {}).encode(),
    "files are numbers": plan_text([[1, "d", 2]], {}, {}).encode(),
    "files are pairs": plan_text([["x", "d"]], {}, {}).encode(),
    "a name is a list": plan_text([[["x"], "d", 2]], {}, {}).encode(),
    "a name is nothing": plan_text([[None, "d", 2]], {}, {}).encode(),
    "settings are NaN": plan_text([], {}, {"a": float("nan")}).encode().replace(b"NaN", b"nan"),
}


def odd_plan(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / "plan.json").write_bytes(content)

    return make


def a_pipe_for_digests(path: Path) -> None:
    ours(path)
    os.mkfifo(path / "digests")


def linked_plan(path: Path) -> None:
    path.mkdir()
    (path.parent / "plan").write_text(output([]).plan())
    (path / "plan.json").symlink_to("../plan")


def linked_folder(path: Path) -> None:
    ours(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def ours(path: Path) -> None:
    (path / "output").mkdir(parents=True)
    (path / "plan.json").write_text(output([]).plan())


def something_beside_the_plan(path: Path) -> None:
    ours(path)
    (path / "thesis.txt").write_text("mine")


def something_in_the_output(path: Path) -> None:
    ours(path)
    (path / "output" / "thesis.txt").write_text("mine")


def a_link_in_the_output(path: Path) -> None:
    ours(path)
    (path.parent / "thesis.txt").write_text("mine")
    (path / "output" / "x").symlink_to("../../thesis.txt")


def a_linked_output(path: Path) -> None:
    path.mkdir()
    (path / "plan.json").write_text(output([]).plan())
    (path.parent / "elsewhere").mkdir()
    (path / "output").symlink_to("../elsewhere")


@pytest.mark.promise("files", "`OUT.partial` and lock files of others are left alone")
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("mine"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("nowhere"),
        foreign_folder,
        foreign_plan,
        edited_plan,
        linked_plan,
        linked_folder,
        something_beside_the_plan,
        something_in_the_output,
        a_link_in_the_output,
        a_linked_output,
        *(pytest.param(odd_plan(content), id=name) for name, content in ODD_PLANS.items()),
        pytest.param(a_pipe_for_digests, marks=pytest.mark.skipif(sys.platform == "win32", reason="no pipes")),
    ],
)
@pytest.mark.parametrize("settings", ["s", "other"])
def test_what_is_not_ours_is_left_alone(tmp_path, make, settings):
    make(tmp_path / "out.partial")
    before = tree(tmp_path)
    made: list[str] = []
    with pytest.raises(bf.CheckpointError, match=r"out\.partial .* not written by billfish") as caught:
        write("convert", tmp_path / "out", output(made, settings=settings))
    assert str(tmp_path / "out.partial") in str(caught.value)
    assert (made, tree(tmp_path)) == ([], before)


@pytest.mark.promise("files", "an existing OUT is not touched without `--force`")
def test_a_finished_output_of_somebody_else_is_not_taken_for_ours(tmp_path):
    """OUT with our plan beside it, and no file of ours left to rename: it must be this very output."""
    ours(tmp_path / "out.partial")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("mine")
    with pytest.raises(bf.CheckpointError, match=" exists"):
        write("convert", tmp_path / "out", output([]))
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "out.partial")
    write("convert", tmp_path / "out", output([]))
    whole = contents(tmp_path / "out")
    for file in whole:  # one byte of it is not
        leave(tmp_path / "out.partial", output([]), {}, whole)
        (tmp_path / "out" / file).write_bytes(whole[file][:-1] + b"?")
        with pytest.raises(bf.CheckpointError, match=" exists"):
            write("convert", tmp_path / "out", output([]))
        (tmp_path / "out" / file).write_bytes(whole[file])
        shutil.rmtree(tmp_path / "out.partial")
    leave(tmp_path / "out.partial", output([]), {}, whole)
    write("convert", tmp_path / "out", output([]))
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.promise("files", "files respect the umask and replace old ones atomically")
@pytest.mark.skipif(sys.platform == "win32", reason="permissions as POSIX has them")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
@pytest.mark.parametrize("folder", [True, False])
def test_the_umask_is_kept(tmp_path, mask, folder):
    before = os.umask(mask)
    try:
        write("convert", tmp_path / "out", output([], folder))
    finally:
        os.umask(before)
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask


def test_the_plan_tells_outputs_apart():
    def digest(**changes) -> str:
        return json.dumps(json.loads(output([], **changes).plan()))

    assert len({digest(), digest(settings="t"), digest(folder=False), digest(alignment=4)}) == 4
