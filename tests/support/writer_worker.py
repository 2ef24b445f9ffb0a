"""Processes that write outputs at the same time, or are ended while they do; :func:`ask` runs it as a script.

A process of its own, because it forks: pytest's has threads. Everything is imported before, so that a round takes some
milliseconds. Prints what happened as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import billfish as bf
from billfish.checkpoints.write.resumable_writer import Output, write
from billfish.checkpoints.write.target import OutputFile, Piece
from billfish.cli.start import interrupt_again
from billfish.core.errors import BillfishError

# What Python tells before it asks the system to change something.
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
REFUSED, FAILED, INTERRUPTED = 3, 4, 130  # exit statuses: an error of ours, another, Ctrl-C
# What becomes of a source, by the name of the output and what is asked for.
JOBS: dict[tuple[str, str], Callable[[Path, Path, Any], object]] = {
    ("out", "u4b8"): lambda a, b, tell: bf.quantize_checkpoint(a, b, "u4b8", method="rtn", progress=tell),
    ("out", "u8b128"): lambda a, b, tell: bf.quantize_checkpoint(a, b, "u8b128", method="rtn", progress=tell),
    ("out", "plain"): lambda a, b, tell: bf.convert(a, b, "plain", progress=tell),
    ("out.gguf", "q8_0"): lambda a, b, tell: bf.quantize_checkpoint(a, b, "q8_0", method="rtn", progress=tell),
    ("out.gguf", "gguf"): lambda a, b, tell: bf.convert(a, b, "gguf", progress=tell),
    ("out.safetensors", "billfish"): lambda a, b, tell: bf.convert(a, b, "billfish", progress=tell),
}


def ask(*arguments: object, script: str = __file__) -> Any:
    """What the worker, or another script, prints, run with these arguments."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def output(settings: str = "s", before: Callable[[], object] = lambda: None, name: str = "y") -> Output:
    """A folder of two files with four pieces each; `before` is called before each is made."""

    def piece(name: str, *sizes: int) -> Piece:
        def make() -> list[np.ndarray]:
            before()
            return [np.full(size, ord(name), np.uint8) for size in sizes]

        return Piece(name, sizes, make)

    files = [
        OutputFile(name, b"header", tuple(piece(letter, 3, 70_000) for letter in letters))
        for name, letters in (("x", "abcd"), (name, "efgh"))
    ]
    return Output(files, {"config.json": b"{}"}, True, {"settings": settings}, lambda: True)


def start(work: Callable[[], object], message: Path | None = None) -> int:
    """A process that does this, and writes the error that it gets of us to `message`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = os.fork()
    if process == 0:
        status = FAILED
        try:
            status = _outcome(work, message)
        except BaseException:  # Ctrl-C, as late as can be
            status = INTERRUPTED
        finally:
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return process


def _outcome(work: Callable[[], object], message: Path | None) -> int:
    """The exit status of a process that does this. SIGINT raises KeyboardInterrupt within, and is held back after."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        work()
        return 0
    except BillfishError as error:
        if message is not None:
            message.write_text(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:
        traceback.print_exc()
        return FAILED
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        sys.stderr.flush()


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below a folder: digests, and "" for folders."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def undisturbed(sources: list[Path], folder: Path) -> dict[str, dict[str, str]]:
    """What each job leaves when nothing happens to it, by "SOURCE OUT KIND"."""
    found = {}
    for source in sources:
        for (out, kind), job in JOBS.items():
            place = folder / f"{source.name} {out} {kind}"
            place.mkdir()
            assert status_of(start(lambda job=job, source=source, to=place / out: job(source, to, False))) == 0
            found[place.name] = contents(place)
            shutil.rmtree(place)
    return found


def race(sources: list[Path], folder: Path, rounds: int, seed: int) -> object:
    """Two processes, or three, that want one output of different sources, at about the same time. In some rounds an
    earlier one was killed. Who wanted what, how they ended, and what is there."""
    happened: list[object] = []
    rng = random.Random(seed)
    expected = undisturbed(sources, folder)
    for i in range(rounds):
        place = folder / str(i)
        place.mkdir()
        out = rng.choice([out for out, _ in JOBS])
        kinds = [kind for name, kind in JOBS if name == out]
        wanted = [(rng.choice(sources), rng.choice(kinds)) for _ in range(rng.choice((2, 2, 2, 3)))]
        if rng.random() < 0.25:
            _leave(rng, rng.choice(sources), place / out, rng.choice(kinds))
        begun = time.perf_counter()
        reader, writer = os.pipe()

        def run(
            source: Path, kind: str, later: float, place: Path = place, out: str = out, pipe=(reader, writer)
        ) -> None:
            os.close(pipe[1])
            os.read(pipe[0], 1)  # until the parent closes it, for all at once
            time.sleep(later)
            JOBS[out, kind](source, place / out, False)

        messages = [folder / f"{i} {j}" for j in range(len(wanted))]
        delays = [rng.choice((0, rng.random() / 100)) for _ in wanted]
        processes = [
            start(lambda source=source, kind=kind, later=later: run(source, kind, later), message)
            for (source, kind), later, message in zip(wanted, delays, messages, strict=True)
        ]
        os.close(reader)
        os.close(writer)
        happened.append(
            {
                "wanted": [f"{source.name} {out} {kind}" for source, kind in wanted],
                "processes": processes,
                "statuses": [status_of(process) for process in processes],
                "messages": [path.read_text() if path.exists() else "" for path in messages],
                "found": contents(place),
                "seconds": time.perf_counter() - begun,
            }
        )
        shutil.rmtree(place)
    return {"expected": expected, "rounds": happened}


def _leave(rng: random.Random, source: Path, out: Path, kind: str) -> None:
    """What a process leaves that is killed in the middle of its work."""
    part = rng.random()

    def tell(done: int, total: int, label: str) -> None:
        if done > part * total:
            os.kill(os.getpid(), signal.SIGKILL)

    status_of(start(lambda: JOBS[out.name, kind](source, out, tell)))


def kill_at_every_call(folder: Path, earlier: str) -> list[object]:
    """Killed before the first call that changes something, before the second, ...: what the next run leaves.

    With `earlier` a run with these settings was killed before; "replaced": there is another output, to be replaced.
    """
    happened: list[object] = []
    replaces = earlier == "replaced"
    for stop in range(200):
        if replaces:
            write("convert", folder / "out", output("old", name="old"))
            earlier_names = set(os.listdir(folder / "out"))
        elif earlier:
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
            write("convert", folder / "out", output(), overwrite=replaces)

        def again() -> None:
            write("convert", folder / "out", output(), overwrite=replaces)

        first = status_of(start(run))
        if replaces and first != 0:  # the old one or the new one is there, whole
            place = folder / "out" if (folder / "out").exists() else folder / "out.partial" / "replaced"
            assert set(os.listdir(place)) in (earlier_names, {"x", "y", "config.json"})
        second = 0 if first == 0 else status_of(start(again))
        happened.append([[first, second], contents(folder)])
        shutil.rmtree(folder / "out")
        if first == 0:
            break
    return happened


def kill_at_random(sources: list[Path], folder: Path, kills: int, seed: int) -> object:
    """Ended by a signal at a random moment of its work, again and again until a run comes to its end; other outputs
    until there were so many signals. How the runs ended, what is there, and how many tensors the last run made."""
    happened: list[Any] = []
    rng = random.Random(seed)
    expected = undisturbed(sources, folder)
    count = 0
    while count < kills:
        source, (out, kind) = rng.choice(sources), rng.choice(list(JOBS))
        place = folder / str(len(happened))
        place.mkdir()
        begun, statuses, made = time.perf_counter(), list[int](), list[int]()
        message = folder / f"{len(happened)} message"
        while not statuses or statuses[-1] not in (0, REFUSED, FAILED):
            status, steps = _run_and_kill(
                rng,
                lambda tell: JOBS[out, kind](source, place / out, tell),  # noqa: B023
                count < kills,
                message,
            )
            statuses.append(status)
            made.append(steps)
            count += status not in (0, REFUSED, FAILED)
        found = contents(place)
        seconds = time.perf_counter() - begun
        wanted = f"{source.name} {out} {kind}"
        about = {"wanted": wanted, "statuses": statuses, "made": made, "found": found, "seconds": seconds}
        happened.append(about | {"message": message.read_text() if message.exists() else ""})
        shutil.rmtree(place)
    return {"expected": expected, "rounds": happened}


def _run_and_kill(rng: random.Random, job: Callable[[Any], object], kill: bool, message: Path) -> tuple[int, int]:
    """A run that gets a signal after some of its steps and some time more: its status, and its steps."""
    reader, writer = os.pipe()

    def run() -> None:
        os.close(reader)
        job(lambda done, total, label: os.write(writer, b"."))

    process = start(run, message)
    os.close(writer)
    steps = 0
    if kill:
        for _ in range(rng.choice((0, rng.randrange(10), rng.randrange(50)))):
            steps += len(os.read(reader, 1))
        time.sleep(rng.choice((0, rng.random() / 100, rng.random() / 20)))
        os.kill(process, rng.choice(SIGNALS))
    while content := os.read(reader, 4096):
        steps += len(content)
    os.close(reader)
    return status_of(process), steps


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sys.unraisablehook = interrupt_again  # as the command line has it
    what, *arguments = sys.argv[1:]
    if what == "race":
        result = race(sorted(Path(arguments[0]).iterdir()), Path(arguments[1]), int(arguments[2]), int(arguments[3]))
    elif what == "kill-at-every-call":
        result = kill_at_every_call(Path(arguments[0]), arguments[1])
    else:
        result = kill_at_random(
            sorted(Path(arguments[0]).iterdir()), Path(arguments[1]), int(arguments[2]), int(arguments[3])
        )
    json.dump(result, sys.stdout)
