"""Processes that write one output at the same time, and processes that are killed: real ones."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import checkpoint_samples as samples
import pytest
from safetensors.numpy import save_file
from support import gaussian
from writer_worker import contents, output

import billfish as bf
from billfish.checkpoints.writers import lock
from billfish.checkpoints.writers.engine import write
from billfish.checkpoints.writers.lock import Busy, only_writer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks and signals as POSIX has them")

WORKER = Path(__file__).parent / "writer_worker.py"


def worker(*arguments: object) -> list[tuple[list[int], dict[str, str]]]:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_one_of_two_wins_and_the_other_says_why(tmp_path):
    """50 rounds of two processes that start together. Every second round they want different outputs."""
    source = tmp_path / "in"
    samples.write_config(source)
    save_file({f"layers.{i}.weight": gaussian((16, 128), i) for i in range(4)}, source / "model.safetensors")
    expected = {}
    for format in ("u4b8", "u8b128"):
        (tmp_path / format).mkdir()
        bf.quantize_checkpoint(source, tmp_path / format / "out", format, method="rtn")
        expected[format] = contents(tmp_path / format)
    (tmp_path / "race").mkdir()
    rounds = worker("race", source, tmp_path / "race", 50)
    assert len(rounds) == 50
    for i, (statuses, found) in enumerate(rounds):
        assert sorted(statuses) == [0, 3]  # one succeeded, one had an error of ours
        other = "u4b8" if i % 2 else "u8b128"
        assert found == expected["u4b8" if statuses[0] == 0 else other]


@pytest.mark.parametrize("earlier", ["", "s", "other"])
def test_killed_at_every_call_the_next_run_ends_with_the_same_bytes(tmp_path, earlier):
    """A first run, one that goes on with what an earlier one left, and one that removes it."""
    (tmp_path / "whole").mkdir()
    write("convert", tmp_path / "whole" / "out", output())
    expected = contents(tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    rounds = worker("kill-at-every-call", tmp_path / "killed", earlier)
    assert all(found == expected for _, found in rounds)
    statuses = [status for status, _ in rounds]
    assert statuses.pop() == [0, 0]  # it was not killed any more
    while statuses[-1] == [-signal.SIGKILL, 3]:  # all was done and OUT.partial gone: the next run says that OUT exists
        statuses.pop()
    assert statuses == [[-signal.SIGKILL, 0]] * len(statuses)
    assert len(statuses) > 8


def test_killed_at_random_the_last_run_ends_with_the_same_bytes(tmp_path):
    (tmp_path / "whole").mkdir()
    write("convert", tmp_path / "whole" / "out", output())
    expected = contents(tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    rounds = worker("kill-at-random", tmp_path / "killed", 10, 1)
    assert sum(len(statuses) - 1 for statuses, _ in rounds) > 10  # so often it was killed
    for statuses, found in rounds:
        assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + statuses[-1:]
        assert statuses[-1] in (0, 3)  # 3: killed when all was done, and then OUT exists
        assert found == expected


# ---- the lock -----------------------------------------------------------------------------------------------------


def test_the_second_is_told_who_has_it(tmp_path):
    with only_writer("quantize", tmp_path / "out"):
        before = contents(tmp_path)
        with pytest.raises(Busy, match=rf"process {os.getpid()} \(quantize\) is writing; takes one that nobody else"):
            write("convert", tmp_path / "out", output())
        assert contents(tmp_path) == before
        write("convert", tmp_path / "elsewhere", output())
    write("convert", tmp_path / "out", output())
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out"]


def test_a_lock_file_that_is_removed_before_it_is_locked_is_not_enough(tmp_path, monkeypatch):
    """Its holder came to the end between our opening and our locking: another might have made a new one by now."""
    locks = []

    def late(file):
        locks.append(os.fstat(file.fileno()).st_ino)
        if len(locks) < 3:
            lock.lock_path(tmp_path / "out").unlink()
        if len(locks) == 2:
            lock.lock_path(tmp_path / "out").touch()
        return original(file)

    original = lock._lock
    monkeypatch.setattr(lock, "_lock", late)
    with only_writer("convert", tmp_path / "out"):
        assert len(locks) == 3
        assert lock.lock_path(tmp_path / "out").stat().st_ino == locks[-1]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", ["mine", "{}", '{"billfish": "lock"}', "[1]"])
def test_a_lock_file_of_somebody_else_is_left_alone(tmp_path, content):
    path = lock.lock_path(tmp_path / "out")
    path.write_text(content)
    with pytest.raises(bf.CheckpointError, match=r"\.out\.billfish-lock: got a file that is not ours; takes .* move"):
        write("convert", tmp_path / "out", output())
    assert path.read_text() == content
    assert os.listdir(tmp_path) == [path.name]


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").touch()
    lock.lock_path(tmp_path / "out").symlink_to("mine")
    with pytest.raises(bf.CheckpointError, match="billfish-lock"):
        write("convert", tmp_path / "out", output())
    assert (tmp_path / "mine").read_bytes() == b""
    assert len(os.listdir(tmp_path)) == 2


def test_a_lock_file_cannot_make_us_remove_another_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    record = {"billfish": "lock", "pid": 1, "call": "convert", "scratch": "mine"}
    lock.lock_path(tmp_path / "out").write_text(json.dumps(record))
    write("convert", tmp_path / "out", output())
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="no locks on this file system"):
        write("convert", tmp_path / "out", output())
    assert os.listdir(tmp_path) == ["out"]
