"""Files: which are read, and that they are written whole or not at all, with the permissions that the user wants."""

from __future__ import annotations

import os
import stat
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import billfish as bf
from billfish.core.files import (
    is_affordable,
    open_regular,
    path_of,
    read_arrays,
    read_whole,
    replacing,
    write_atomically,
)

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


@pytest.mark.promise("files", "files respect the umask and replace old ones atomically")
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


@pytest.mark.promise("files", "files respect the umask and replace old ones atomically")
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


@pytest.mark.promise("files", "files respect the umask and replace old ones atomically")
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


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("inputs", "only regular files are opened as models: no pipes, no devices")
def test_only_regular_files_are_opened(tmp_path):
    """A pipe would wait for a writer, a device for its end. A link to a regular file is one."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), ("/dev/zero", "a device")):
        with pytest.raises(OSError, match=f"{what}, not a regular file"):
            open_regular(path)
    for path in (tmp_path / "none", "\0"):
        with pytest.raises(OSError, match=r"No such file|null byte"):
            open_regular(path)


def test_nothing_is_left_open(tmp_path):
    before = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    with pytest.raises(OSError, match="a folder"):
        open_regular(tmp_path)
    assert before == (os.listdir("/proc/self/fd") if before else [])


def test_paths_are_strings_or_paths():
    assert path_of("load", "a") == Path("a")
    for odd in (None, 3, b"a", ["a"]):
        with pytest.raises(bf.DTypeError, match=r"load.*path.*\w+.*string or a path"):
            path_of("load", odd)


@pytest.mark.promise("inputs", "loading allocates at most 64 MB plus 8 times the file")
def test_memory_grows_with_the_file():
    assert is_affordable(64 << 20, 0)
    assert not is_affordable((64 << 20) + 1, 0)
    assert is_affordable((64 << 20) + 800, 100)


@pytest.mark.parametrize(
    "array", [np.array("text"), np.arange(6).reshape(2, 3), np.zeros((0, 4), np.float16), np.float32(2)]
)
def test_arrays_come_back(tmp_path, array):
    np.savez(tmp_path / "a.npz", one=array, two=np.arange(3))
    found = read_arrays(tmp_path / "a.npz")
    assert list(found) == ["one", "two"]
    assert (found["one"].dtype, found["one"].shape) == (np.asarray(array).dtype, np.shape(array))
    assert np.array_equal(found["one"], array)


@pytest.mark.parametrize(
    "odd", [{"a": np.array([None])}, {"a": np.asfortranarray(np.eye(3))}, {f"x{i}": 0 for i in range(9)}]
)
def test_arrays_of_other_kinds_are_refused(tmp_path, odd):
    np.savez(tmp_path / "a.npz", **odd)
    with pytest.raises(ValueError, match=r"npy array|more than 8 members"):
        read_arrays(tmp_path / "a.npz")


def test_compressed_arrays_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1000))
    with pytest.raises(ValueError, match="compressed members"):
        read_arrays(tmp_path / "a.npz")


def test_arrays_with_too_many_axes_are_refused(tmp_path):
    """Before their product is taken, which is quadratic in their number."""
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (" + b"0," * 101 + b"), }\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\1\0\0\0" + header)
    with pytest.raises(ValueError, match="npy array"):
        read_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize("limit", [zipfile.ZIP64_LIMIT, 10])
def test_the_number_of_members_is_not_believed(tmp_path, monkeypatch, limit):
    """Neither at the end nor in the record of 64 bits that large files have, and that is read like the other."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    np.savez(tmp_path / "few.npz", a=np.arange(3))
    assert {name: array.size for name, array in read_arrays(tmp_path / "few.npz").items()} == {"a": 3}
    np.savez(tmp_path / "many.npz", **{f"x{i}": np.zeros(0) for i in range(100)})
    content = bytearray((tmp_path / "many.npz").read_bytes())
    assert content[-42:-38] == b"PK\6\7" or limit > 10
    content[-14:-10] = b"\3\0\3\0"
    (tmp_path / "many.npz").write_bytes(content)
    with pytest.raises(ValueError, match="more than 8 members"):
        read_arrays(tmp_path / "many.npz")


@pytest.mark.parametrize("more", [b"x", bytes(22)])
def test_bytes_behind_the_end_of_an_archive_are_refused(tmp_path, more):
    np.savez(tmp_path / "a.npz", a=np.arange(3))
    with (tmp_path / "a.npz").open("ab") as file:
        file.write(more)
    with pytest.raises(ValueError, match="not a zip file"):
        read_arrays(tmp_path / "a.npz")


def test_small_files_are_small(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert read_whole(tmp_path / "file", 7) == b"content"
    with pytest.raises(OSError, match=r"7 bytes.*6"):
        read_whole(tmp_path / "file", 6)
