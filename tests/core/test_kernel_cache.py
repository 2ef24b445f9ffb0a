"""Compiled kernels are loaded from a folder that this user alone can write to, if they are what was put there."""

from __future__ import annotations

import os
import sys

import pytest

from billfish.core.kernel_cache import KernelCache

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no owners")
NOBODY = 65534
needs_root = pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("BILLFISH_CACHE", str(tmp_path))
    return tmp_path / "cuda"


def test_what_was_added_is_found(folder):
    cache = KernelCache("cuda")
    assert cache.find("a.cubin") is None
    assert cache.add("a.cubin", b"code") == folder / "a.cubin"
    found = KernelCache("cuda").find("a.cubin")
    assert found == folder / "a.cubin"
    assert found.read_bytes() == b"code"


def test_the_folder_is_for_this_user_alone(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    KernelCache("cuda")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.promise(
    "files", "compiled kernels are loaded only from a folder of the user's own, if their digest is right"
)
def test_what_is_not_what_was_added_is_missing(folder):
    cache = KernelCache("cuda")
    path = cache.add("a.cubin", b"code")
    for spoil in (
        lambda: path.write_bytes(b"codf"),
        lambda: path.write_bytes(b""),
        lambda: (folder / "a.cubin.sha256").write_bytes(b"0" * 64),
        lambda: (folder / "a.cubin.sha256").unlink(),
        lambda: (path.unlink(), os.mkfifo(path)),
    ):
        assert cache.find("a.cubin") is not None
        spoil()
        assert cache.find("a.cubin") is None
        path.unlink(missing_ok=True)
        cache.add("a.cubin", b"code")
    (folder / "planted.so").write_bytes(b"code")
    assert cache.find("planted.so") is None


@pytest.mark.promise(
    "files", "compiled kernels are loaded only from a folder of the user's own, if their digest is right"
)
@needs_root
def test_the_folder_of_another_user_is_not_used(folder):
    """Whoever made the shared folder first must not choose what others run."""
    planted = KernelCache("cuda").add("a.so", b"evil")
    for path in (planted, planted.with_name("a.so.sha256"), folder):
        os.chown(path, NOBODY, NOBODY)
    folder.chmod(0o777)
    cache = KernelCache("cuda")
    assert cache.folder == folder.with_name(f"cuda-{os.geteuid()}")
    assert cache.find("a.so") is None
    os.chown(cache.folder, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="another user"):
        KernelCache("cuda")


@needs_root
def test_the_file_or_link_of_another_user_is_missing(folder):
    cache = KernelCache("cuda")
    path = cache.add("a.so", b"evil")
    os.chown(path, NOBODY, NOBODY)
    assert cache.find("a.so") is None
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")
    assert KernelCache("cuda").folder != folder


@pytest.mark.promise(
    "files", "compiled kernels are loaded only from a folder of the user's own, if their digest is right"
)
@needs_root
def test_a_folder_whose_entries_others_may_rename_is_not_used(folder):
    """They could put another folder in the place of ours after we have looked at it."""
    shared = folder.parent
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="rename"):
        KernelCache("cuda")
    shared.chmod(0o1777)
    assert KernelCache("cuda").folder == folder
    shared.chmod(0o700)
    os.chown(shared, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="rename"):
        KernelCache("cuda")


@needs_root
def test_a_digest_of_another_user_is_missing(folder):
    cache = KernelCache("cuda")
    cache.add("a.so", b"code")
    os.chown(folder / "a.so.sha256", NOBODY, NOBODY)
    assert cache.find("a.so") is None
