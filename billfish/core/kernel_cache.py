"""Compiled kernels on the disk. They are code: only the user who compiled them may have written them.

The folder is the user's own, with mode 0700, and beside each file lies the digest of its content. What another user has
put there, or what a disk has damaged, is not loaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path

from billfish.core.files import read_whole, write_atomically
from billfish.core.machine import cache_folder


class KernelCache:
    """The compiled kernels of a backend. Names are digests of all that a kernel is made of."""

    def __init__(self, backend: str) -> None:
        """Raises OSError where there is no folder that this user alone can write to."""
        folder = cache_folder(backend)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_parent(folder.parent)
        try:
            self.folder = _own(folder)
        except PermissionError:  # a shared BILLFISH_CACHE: another user was first
            self.folder = _own(folder.with_name(f"{backend}-{_user()}"))

    def find(self, name: str) -> Path | None:
        """A file whose content is what was added under this name. Anything else counts as missing."""
        path = self.folder / name
        try:
            if not (_is_own(os.lstat(path)) and _is_own(os.lstat(self._digest_path(name)))):
                return None
            said = read_whole(self._digest_path(name), 64).decode("ascii", "replace")
            return path if _digest(read_whole(path)) == said else None
        except OSError:
            return None

    def add(self, name: str, content: bytes) -> Path:
        """Keep a file. Whoever adds the same name at the same time has the same content."""
        write_atomically(self.folder / name, content)
        write_atomically(self._digest_path(name), _digest(content).encode())
        return self.folder / name

    def _digest_path(self, name: str) -> Path:
        return self.folder / f"{name}.sha256"


def _check_parent(parent: Path) -> None:
    """Raises PermissionError for a folder whose entries another user may rename: ours could be another one between a
    look at it and its use. Those of a folder with the sticky bit, such as /tmp, are safe."""
    about = os.stat(parent)
    trusted = sys.platform == "win32" or about.st_uid in (0, os.geteuid())
    if not trusted or (about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX and sys.platform != "win32"):
        fix = "Set BILLFISH_CACHE to a folder of your own."
        raise PermissionError(f"other users may rename what is in {parent}. {fix}")


def _own(folder: Path) -> Path:
    """A folder that belongs to this user, and that nobody else can write to. It is made if it is not there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = os.lstat(folder)
    if not _is_own(about) or not stat.S_ISDIR(about.st_mode):
        raise PermissionError(f"{folder} belongs to another user, or is no folder")
    if sys.platform != "win32" and stat.S_IMODE(about.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _is_own(about: os.stat_result) -> bool:
    return sys.platform == "win32" or about.st_uid == os.geteuid()


def _user() -> int:
    return 0 if sys.platform == "win32" else os.geteuid()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
