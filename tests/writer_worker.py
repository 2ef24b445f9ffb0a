"""Processes that write outputs at the same time, or are killed at it; run by tests/test_checkpoints_processes.py.

A process of its own, because it forks: pytest's has threads. Prints what happened as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import billfish as bf
from billfish.checkpoints.writers.engine import Output, OutputFile, Piece, write
from billfish.errors import BillfishError

# What Python tells before it asks the system to change something.
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock")


def output(settings: str = "s", before: Callable[[], object] = lambda: None) -> Output:
    """A folder of two files with four pieces each; `before` is called before each is made."""

    def piece(name: str, *sizes: int) -> Piece:
        def make() -> list[np.ndarray]:
            before()
            return [np.full(size, ord(name), np.uint8) for size in sizes]

        return Piece(name, sizes, make)

    files = [
        OutputFile(name, b"header", tuple(piece(letter, 3, 70_000) for letter in letters))
        for name, letters in (("x", "abcd"), ("y", "efgh"))
    ]
    return Output(files, {"config.json": b"{}"}, True, {"settings": settings}, lambda: True)


def start(work: Callable[[], object]) -> int:
    """A process that does this; its exit status: 0, 3 for one of our errors, 4 for another."""
    process = os.fork()
    if process == 0:
        status = 4
        try:
            work()
            status = 0
        except BillfishError as error:
            print(error, file=sys.stderr)
            status = 3
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return process


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below a folder: digests, and "" for folders."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def race(source: Path, folder: Path, rounds: int) -> list[object]:
    """Two processes at a time that want one output, with the same settings or others: statuses, and what is there."""
    happened: list[object] = []
    for i in range(rounds):
        place = folder / str(i)
        place.mkdir()
        reader, writer = os.pipe()

        def run(format: str, place: Path = place, reader: int = reader, writer: int = writer) -> None:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes it, for all at once
            bf.quantize_checkpoint(source, place / "out", format, method="rtn")

        formats = ("u4b8", "u4b8" if i % 2 else "u8b128")
        processes = [start(lambda format=format: run(format)) for format in formats]
        os.close(reader)
        os.close(writer)
        happened.append([[status_of(process) for process in processes], contents(place)])
    return happened


def kill_at_every_call(folder: Path, earlier: str) -> list[object]:
    """Killed before the first call that changes something, before the second, ...: what the next run leaves.

    With `earlier` a run with these settings was killed before.
    """
    happened: list[object] = []
    for stop in range(200):
        if earlier:
            pieces = iter(range(2))

            def third_piece(pieces: Iterator[int] = pieces) -> None:
                if next(pieces, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            other = output(earlier, third_piece)
            status_of(start(lambda other=other: write("convert", folder / "out", other)))
            assert (folder / "out.partial" / "output" / "x").exists()
        calls = iter(range(stop))

        def hook(event: str, arguments: object, calls: Iterator[int] = calls) -> None:
            if event in CHANGES and next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        def run(hook: Callable[[str, object], None] = hook) -> None:
            sys.addaudithook(hook)
            write("convert", folder / "out", output())

        first = status_of(start(run))
        second = 0 if first == 0 else status_of(start(lambda: write("convert", folder / "out", output())))
        happened.append([[first, second], contents(folder)])
        shutil.rmtree(folder / "out")
        if first == 0:
            break
    return happened


def kill_at_random(folder: Path, rounds: int, seed: int) -> list[object]:
    """Killed from outside a random number of pieces after its start, again and again until one run comes to its end."""
    happened: list[object] = []
    rng = random.Random(seed)
    for i in range(rounds):
        place = folder / str(i)
        place.mkdir()
        statuses = [-signal.SIGKILL]
        while statuses[-1] == -signal.SIGKILL and len(statuses) < 100:
            reader, writer = os.pipe()

            def run(place: Path = place, reader: int = reader, writer: int = writer) -> None:
                os.close(reader)
                write("convert", place / "out", output(before=lambda: os.write(writer, b".")))

            process = start(run)
            os.close(writer)
            for _ in range(rng.randrange(1, 5)):  # so many pieces are begun; it goes on until the signal is there
                os.read(reader, 1)
            os.kill(process, signal.SIGKILL)
            os.close(reader)
            statuses.append(status_of(process))
        happened.append([statuses[1:], contents(place)])
    return happened


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "race":
        result = race(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))
    elif what == "kill-at-every-call":
        result = kill_at_every_call(Path(arguments[0]), arguments[1])
    else:
        result = kill_at_random(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
    json.dump(result, sys.stdout)
