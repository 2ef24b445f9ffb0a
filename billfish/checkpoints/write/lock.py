"""One writer for each output.

A file beside the output, `.OUT.billfish-lock`, is locked before anything is looked at, made or removed, and until the
end. The system lets go of the lock when its holder dies, however it dies. The holder removes the file while it has the
lock. Whoever opened the file before then finds, with the lock in hand, that the name is gone or another file's, and
opens again.

The file holds a space, the one byte that Windows locks and lets nobody read, and a line of JSON. It says who has the
lock and names a scratch folder. Folders of ours are made and removed under that random name, so that no half-made
`OUT.partial` exists at any moment. A killed holder leaves the file, and the next one removes the scratch folder that it
names, and uses the name. A file that begins as ours do is ours, even if a kill has cut it in half.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from billfish.core.errors import CheckpointError, readable

# What file systems without locks answer, such as Lustre the way it is mounted by default.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)

BEGINNING = b' {"billfish": "lock"'
SCRATCH = re.compile(rb'"scratch": "([0-9a-f]{32})"')  # behind the beginning, where every record has it

# How often, and how many seconds apart, a locked file is asked who holds it.
HOLDER_READS, HOLDER_WAIT = 20, 0.005


class Busy(CheckpointError):
    """Another process is writing the same output."""


@contextlib.contextmanager
def only_writer(call: str, out: Path) -> Iterator[Path]:
    """Nobody else writes `out` until the end. Yields where a folder may be made, which is removed at the end."""
    path = lock_path(out)
    with _open_locked(call, out, path) as file:
        earlier = _content(file, 0)
        if not (earlier.startswith(BEGINNING) or BEGINNING.startswith(earlier)):
            what = f"{readable(path)} is a file that billfish did not write"
            raise CheckpointError(f"{call}: {what}. Move it away, or choose another output.")
        known = SCRATCH.search(earlier)
        token = known[1].decode() if known else os.urandom(16).hex()
        scratch = out.parent / f".{out.name}.billfish-{token}"
        try:
            _write_record(file, {"billfish": "lock", "scratch": token, "pid": os.getpid(), "call": call})
            if scratch.is_dir():
                shutil.rmtree(scratch)
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if not scratch.exists():  # else the next holder has to know of it
                if sys.platform == "win32":
                    file.close()  # Windows removes no open file
                with contextlib.suppress(OSError):
                    path.unlink()


def lock_path(out: Path) -> Path:
    return out.parent / f".{out.name}.billfish-lock"


def _open_locked(call: str, out: Path, path: Path) -> IO[bytes]:
    """The lock file, locked and still the one of this name."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    while True:
        descriptor = os.open(path, flags, 0o666)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            if not _lock(descriptor):
                what = f"{_holder(file)} is writing {readable(out)}"
                raise Busy(f"{call}: {what}. Wait until it ends, or choose another output.")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(descriptor: int) -> bool:
    """Lock a file; False if another process has it."""
    from filelock import lock_descriptor  # here: it takes longer to import than to open a checkpoint

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn("This file system has no locks. Do not write the same output from two processes.", stacklevel=2)
    return True


def _holder(file: IO[bytes]) -> str:
    """Who has locked a file, in words."""
    record: dict[str, Any] = {}
    for _ in range(HOLDER_READS):
        record = _record(_content(file, 1))
        if record and _runs(record["pid"]):
            break
        time.sleep(HOLDER_WAIT)  # it has the lock, and does not yet say so
    return f"process {record['pid']} ({readable(record['call'])})" if record else "another process"


def _runs(process: int) -> bool:
    """Whether there is such a process on this machine."""
    if sys.platform == "win32":
        return True  # os.kill would end it
    try:
        os.kill(process, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # somebody else's
    return True


def _content(file: IO[bytes], start: int) -> bytes:
    file.seek(start)
    return file.read(10_000)


def _record(content: bytes) -> dict[str, Any]:
    """What a lock file says, in its first line; {} if it does not, or not yet."""
    try:
        record = json.loads(content.split(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    whole = isinstance(record, dict) and type(record.get("pid")) is int and record["pid"] > 0 and "call" in record
    return record if whole else {}


def _write_record(file: IO[bytes], record: dict[str, Any]) -> None:
    """What is left of a longer record is behind the first line until it is cut off."""
    file.seek(0)
    file.truncate(file.write(b" " + json.dumps(record).encode() + b"\n"))
