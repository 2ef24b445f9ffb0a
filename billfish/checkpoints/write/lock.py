"""One writer for each output.

A file beside the output, `.OUT.billfish-lock`, is locked before anything is looked at, made or removed, and until the
end. The system lets go of the lock when its holder dies, however it dies. The holder removes the file while it has the
lock. Whoever opened the file before then finds, with the lock in hand, that the name is gone or another file's, and
opens again.

The file says who holds it, from the moment at which it is locked, and names a scratch folder. Folders of ours are made
and removed under that random name, so that no half-made `OUT.partial` exists at any moment. A killed holder leaves the
file, and the next one removes the scratch folder that it names, and uses the name.

Windows has no `flock`: nothing is locked there.
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

from billfish.core.errors import CheckpointError, complaint

# What file systems without locks answer, such as Lustre the way it is mounted by default.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)

# How often, and how many seconds apart, a locked file is asked who holds it.
HOLDER_READS, HOLDER_WAIT = 20, 0.005


class Busy(CheckpointError):
    """Another process is writing the same output."""


@contextlib.contextmanager
def only_writer(call: str, out: Path) -> Iterator[Path]:
    """Nobody else writes `out` until the end. Yields where a folder may be made, which is removed at the end."""
    scratch = out.parent / f".{out.name}.billfish-{os.urandom(16).hex()}"
    if sys.platform == "win32":
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return
    path = lock_path(out)
    with _open_locked(call, out, path) as file:
        earlier = _record(file)
        if earlier is None:
            takes = "a name that is free: move this file, or choose another OUT"
            raise CheckpointError(complaint(call, str(path), "a file that is not ours", takes))
        scratch = _scratch_of(out, earlier) or scratch
        try:
            _write_record(file, {"billfish": "lock", "pid": os.getpid(), "call": call, "scratch": scratch.name})
            if scratch.is_dir():
                shutil.rmtree(scratch)
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            with contextlib.suppress(OSError):
                if not scratch.exists():  # else the next holder has to know of it
                    path.unlink()


def lock_path(out: Path) -> Path:
    return out.parent / f".{out.name}.billfish-lock"


def _open_locked(call: str, out: Path, path: Path) -> IO[bytes]:
    """The lock file, locked and still the one of this name."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            if not _lock(file):
                takes = "one that nobody else writes: wait for the end, or choose another name"
                raise Busy(complaint(call, str(out), f"an output that {_holder(file)} is writing", takes))
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: IO[bytes]) -> bool:
    """Lock a file; False if another process has it."""
    import fcntl  # here, because Windows has none

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn("no locks on this file system: do not write one output twice at a time", stacklevel=2)
    return True


def _holder(file: IO[bytes]) -> str:
    """Who has locked a file, in words."""
    record: dict[str, Any] = {}
    for _ in range(HOLDER_READS):
        record = _record(file) or {}
        if record and _runs(record["pid"]):
            break
        time.sleep(HOLDER_WAIT)  # it has the lock, and does not yet say so
    return f"process {record['pid']} ({record['call']})" if record else "another process"


def _runs(process: int) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(process, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # somebody else's
    return True


def _record(file: IO[bytes]) -> dict[str, Any] | None:
    """What a lock file says, in its first line; {} if nothing yet, None if it is no lock file of ours."""
    file.seek(0)
    content = file.read(10_000).split(b"\n")[0]
    if not content:
        return {}
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kinds = {"billfish": str, "pid": int, "call": str, "scratch": str}
    ours = isinstance(record, dict) and all(isinstance(record.get(key), kind) for key, kind in kinds.items())
    return record if ours and record["billfish"] == "lock" and record["pid"] > 0 else None


def _write_record(file: IO[bytes], record: dict[str, Any]) -> None:
    """At no moment there is no record, or half of one: what is left of a longer one is behind the first line."""
    file.seek(0)
    file.truncate(file.write(json.dumps(record).encode() + b"\n"))


def _scratch_of(out: Path, record: dict[str, Any]) -> Path | None:
    """The scratch folder of a holder that was killed. Its name is checked: a lock file must not point elsewhere."""
    name = record.get("scratch", "")
    known = re.fullmatch(re.escape(f".{out.name}.billfish-") + "[0-9a-f]{32}", name)
    return out.parent / name if known else None
