"""Processes that write one output at the same time, and processes that are killed: real ones."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from attack.kills import kills
from attack.races import races
from cases import first
from writer_worker import ask, contents, output

import billfish as bf
from billfish.checkpoints.write import lock
from billfish.checkpoints.write.lock import Busy, only_writer
from billfish.checkpoints.write.resumable_writer import write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks and signals as POSIX has them")


@pytest.mark.promise("files", "of several processes with one OUT one writes, the others name it")
def test_one_of_several_wins_and_the_others_say_who():
    """`make attack` has 500 rounds."""
    row = races(6, seed=1)
    assert row.failures == []
    assert (row.cases, row.accepted) == (6, 6)
    assert row.refused > 6  # in some rounds there are three


@pytest.mark.promise("files", "killed at any system call, the same command ends with the same bytes")
@pytest.mark.parametrize("earlier", first(2, ["s", "replaced", "", "other"]))
def test_killed_at_every_call_the_next_run_ends_with_the_same_bytes(tmp_path, earlier):
    """A first run, one that goes on with what an earlier one left, one that removes it, and one that replaces OUT."""
    (tmp_path / "whole").mkdir()
    write("convert", tmp_path / "whole" / "out", output())
    expected = contents(tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    rounds = ask("kill-at-every-call", tmp_path / "killed", earlier)
    assert all(found == expected for _, found in rounds)
    statuses = [status for status, _ in rounds]
    assert statuses.pop() == [0, 0]  # it was not killed any more
    while earlier != "replaced" and statuses[-1] == [
        -signal.SIGKILL,
        3,
    ]:  # all was done and OUT.partial gone: the next run says that OUT exists
        statuses.pop()
    assert statuses == [[-signal.SIGKILL, 0]] * len(statuses)
    assert len(statuses) > 8


@pytest.mark.promise("files", "so it does after SIGKILL, SIGTERM or SIGINT at any moment")
def test_ended_at_random_the_last_run_ends_with_the_same_bytes():
    """`make attack` has 200 signals."""
    row = kills(12, seed=1)
    assert row.failures == []
    assert row.cases >= 12
    assert row.accepted > 0


# ---- the lock -----------------------------------------------------------------------------------------------------


TOKEN = "0" * 32
RECORD = {"billfish": "lock", "scratch": TOKEN, "pid": 1, "call": "convert"}


def written(record: dict[str, object]) -> str:
    return f" {json.dumps(record)}\n"


def test_the_second_is_told_who_has_it(tmp_path):
    with only_writer("quantize", tmp_path / "out"):
        before = contents(tmp_path)
        with pytest.raises(Busy, match=rf"process {os.getpid()} \(quantize\) is writing .*out\. Wait"):
            write("convert", tmp_path / "out", output())
        assert contents(tmp_path) == before
        write("convert", tmp_path / "elsewhere", output())
    write("convert", tmp_path / "out", output())
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out"]


@pytest.mark.parametrize("earlier", ["", "killed"])
def test_the_second_waits_until_the_first_says_who_it_is(tmp_path, monkeypatch, earlier):
    """Between taking the lock and writing who has it there is a moment. A killed holder's record may be there then."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record = {"billfish": "lock", "scratch": "", "pid": ended.pid, "call": "convert"}
    path = lock.lock_path(tmp_path / "out")
    path.write_text(written(record) if earlier else "")
    reads = iter([None, None, lambda: path.write_text(written(record | {"pid": os.getpid(), "call": "save"}))])
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: (next(reads, None) or (lambda: None))())
    with path.open("r+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(Busy, match=rf"process {os.getpid()} \(save\) is writing"):
            write("convert", tmp_path / "out", output())


def test_a_lock_file_that_is_removed_before_it_is_locked_is_not_enough(tmp_path, monkeypatch):
    """Its holder came to the end between our opening and our locking: another might have made a new one by now."""
    locks = []

    def late(descriptor):
        locks.append(os.fstat(descriptor).st_ino)
        if len(locks) < 3:
            lock.lock_path(tmp_path / "out").unlink()
        if len(locks) == 2:
            lock.lock_path(tmp_path / "out").touch()
        return original(descriptor)

    original = lock._lock
    monkeypatch.setattr(lock, "_lock", late)
    with only_writer("convert", tmp_path / "out"):
        assert len(locks) == 3
        assert lock.lock_path(tmp_path / "out").stat().st_ino == locks[-1]
    assert os.listdir(tmp_path) == []


@pytest.mark.promise("files", "`OUT.partial` and lock files of others are left alone")
@pytest.mark.parametrize(
    "content", ["mine", "{}", '{"billfish": "lock"}', "[1]", "[" * 9000, '"' + "x" * 20_000, "9" * 9000, "x"]
)
def test_a_lock_file_of_somebody_else_is_left_alone(tmp_path, content):
    path = lock.lock_path(tmp_path / "out")
    path.write_text(content)
    with pytest.raises(bf.CheckpointError, match=r"\.out\.billfish-lock .*did not write\. Move it"):
        write("convert", tmp_path / "out", output())
    assert path.read_text() == content
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("size", range(0, 95, 7))
def test_a_lock_file_that_a_kill_has_cut_blocks_nothing(tmp_path, size):
    """A write of half a record; and one over an earlier record, whose scratch folder is still there."""
    scratch = f".out.billfish-{TOKEN}"
    for earlier in ("", written(RECORD | {"pid": 123456, "call": "calibrate"})):
        lock.lock_path(tmp_path / "out").write_text(written(RECORD)[:size] + earlier[size:])
        if earlier:
            (tmp_path / scratch).mkdir()
        write("convert", tmp_path / "out", output())
        assert os.listdir(tmp_path) == ["out"]
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("change", [{"pid": "1"}, {"pid": -1}, {"call": []}, {"scratch": None}, {"pid": True}])
def test_a_lock_file_of_ours_with_an_odd_record_blocks_nothing(tmp_path, change):
    lock.lock_path(tmp_path / "out").write_text(written(RECORD | change))
    write("convert", tmp_path / "out", output())
    assert os.listdir(tmp_path) == ["out"]


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").touch()
    lock.lock_path(tmp_path / "out").symlink_to("mine")
    with pytest.raises(bf.CheckpointError, match="billfish-lock"):
        write("convert", tmp_path / "out", output())
    assert (tmp_path / "mine").read_bytes() == b""
    assert len(os.listdir(tmp_path)) == 2


def test_a_lock_file_cannot_make_us_remove_another_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    lock.lock_path(tmp_path / "out").write_text(written(RECORD | {"scratch": "/../mine"}))
    write("convert", tmp_path / "out", output())
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_the_scratch_folder_of_a_killed_holder_is_removed(tmp_path):
    scratch = f".out.billfish-{TOKEN}"
    (tmp_path / scratch).mkdir()
    (tmp_path / scratch / "plan.json").touch()
    lock.lock_path(tmp_path / "out").write_text(written(RECORD) + "the rest of a longer one")
    write("convert", tmp_path / "out", output())
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="file system has no locks"):
        write("convert", tmp_path / "out", output())
    assert os.listdir(tmp_path) == ["out"]
