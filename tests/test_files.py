"""Files that are written whole or not at all: with the permissions that the user wants, and nothing beside them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from billfish.files import replacing, write_atomically

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="permissions as POSIX has them")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_a_new_file_has_what_the_umask_leaves(tmp_path, mask):
    with umask(mask):
        write_atomically(tmp_path / "file", b"new")
    assert mode(tmp_path / "file") == 0o666 & ~mask


@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.parametrize("kept", [0o600, 0o664, 0o444, 0o755])
def test_a_replaced_file_keeps_its_permissions(tmp_path, kept, mask):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(kept)
    with umask(mask), replacing(path) as file:
        [temporary] = (p for p in tmp_path.iterdir() if p != path)
        assert mode(temporary) == kept  # already before the first byte
        file.write(b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", kept)


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, failing, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*arguments):
        raise error

    def attempt():
        with replacing(path) as file:
            file.write(b"new")
            if failing == "write":
                fail()

    if failing != "write":
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(error):
        attempt()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, original=original: (calls.append(name), original(*a)))
    write_atomically(tmp_path / "file", b"new")
    assert calls == ["fsync", "replace"]


def test_the_longest_name_there_is(tmp_path):
    write_atomically(tmp_path / ("x" * 255), b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x" * 255]


def test_a_pipe_stays_a_pipe(tmp_path):
    """So does /dev/null, which root could replace by a file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, b"new")
        assert stat.S_ISFIFO(path.stat().st_mode)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
