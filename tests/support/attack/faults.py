"""System calls that fail while an output is written: EIO, ENOSPC, half a write, or half a write and SIGKILL.

The run says so, or comes to its end; the next one leaves what an undisturbed one does, to the byte. `faults.c` is
compiled here and loaded before the C library, in a process that forks for each run.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS)]

from writer_worker import JOBS, REFUSED, contents, start, status_of, undisturbed  # noqa: E402

from attack.rounds import Rounds, two_models  # noqa: E402

SOURCE = Path(__file__).with_suffix(".c")
KINDS = ("once", "for good", "short", "kill")  # as in faults.c
KILLED = -9
FAULTS_PER_OUTPUT = 3  # at most, before a run is left alone


def compiled(folder: Path) -> Path:
    """The library."""
    library = folder / "faults.so"
    command = [
        shutil.which("cc") or "gcc",
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        str(SOURCE),
        "-o",
        str(library),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return library


def faults(count: int, seed: int = 0) -> Rounds:
    """So many failed calls, over as many outputs as it takes."""
    with two_models() as (sources, folder), tempfile.TemporaryDirectory() as place:
        library = compiled(Path(place))
        environment = os.environ | {"LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *map(str, (library, sources, folder, count, seed))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
    row = Rounds("faults")
    for number, found in enumerate(told):
        row.cases += found["faults"]
        row.refused += found["statuses"].count(REFUSED)
        row.accepted += not found["mistake"]
        row.worst_seconds = max(row.worst_seconds, found["seconds"])
        if found["mistake"]:
            row.failures.append(f"faults({count}, {seed}), output {number}: {found['mistake']}")
    return row


# ---- in the process whose calls fail ---------------------------------------------------------------------------------


def run_all(library: str, sources: list[Path], folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """What happened to each output."""
    shim = ctypes.CDLL(library)
    shim.fault_calls.restype = ctypes.c_long
    rng, happened, done = random.Random(seed), list[dict[str, Any]](), 0
    expected = undisturbed(sources, folder)
    calls = {job: _calls(shim, job, sources[0], folder) for job in JOBS}
    while done < count:
        job, place = rng.choice(list(JOBS)), folder / str(len(happened))
        found = _output(shim, rng, rng.choice(sources), job, place, expected, calls[job])
        happened.append(found)
        done += found["faults"]
    return happened


def _calls(shim: Any, job: tuple[str, str], source: Path, folder: Path) -> int:
    """How many calls of a run could fail."""
    place, told = folder / "calls", folder / "count"
    place.mkdir()

    def run() -> None:
        shim.fault_arm(os.fsencode(place), ctypes.c_long(1 << 40), 0, 0)
        JOBS[job](source, place / job[0], False)
        told.write_text(str(shim.fault_calls()))

    assert status_of(start(run)) == 0
    shutil.rmtree(place)
    count = int(told.read_text())
    told.unlink()
    return count


def _output(
    shim: Any,
    rng: random.Random,
    source: Path,
    job: tuple[str, str],
    place: Path,
    expected: dict[str, dict[str, str]],
    calls: int,
) -> dict[str, Any]:
    """One output: runs whose calls fail, then one that nothing happens to."""
    place.mkdir()
    begun, statuses, told = time.perf_counter(), list[int](), list[str]()
    wanted, mistake = expected[f"{source.name} {job[0]} {job[1]}"], ""
    message = place.with_suffix(".message")
    faults = rng.randrange(1, FAULTS_PER_OUTPUT + 1)
    for _ in range(faults):
        at, kind = rng.randrange(calls), rng.randrange(len(KINDS))
        number = rng.choice([errno.EIO, errno.ENOSPC])

        def run(at: int = at, number: int = number, kind: int = kind) -> None:
            shim.fault_arm(os.fsencode(place), ctypes.c_long(at), number, kind)
            JOBS[job](source, place / job[0], False)

        status = status_of(start(run, message))
        statuses.append(status)
        told.append(f"{KINDS[kind]} {errno.errorcode[number]} at call {at}: {status}")
        if status not in (0, REFUSED, KILLED):
            mistake = mistake or f"a foreign error: {told}"
        if (place / job[0]).exists() and _below(place, job[0]) != wanted:
            mistake = mistake or f"half an output under its name: {told}"
        if status == 0 and not (place / job[0]).exists():
            mistake = mistake or f"no output after a run that said nothing: {told}"
    last = status_of(start(lambda: JOBS[job](source, place / job[0], False), message))
    statuses.append(last)
    exists = 0 in statuses[:-1] or (last == REFUSED and "exists" in message.read_text())
    if last not in ((0, REFUSED) if exists else (0,)):
        mistake = mistake or f"the next run ended with {last}: {message.read_text()}; {told}"
    elif contents(place) != wanted:
        left = {name for name, digest in contents(place).items() if wanted.get(name) != digest}
        mistake = mistake or f"other bytes, or what is left over: {sorted(left)}; {told}"
    message.unlink(missing_ok=True)
    shutil.rmtree(place)
    return {"faults": faults, "statuses": statuses, "mistake": mistake, "seconds": time.perf_counter() - begun}


def _below(place: Path, out: str) -> dict[str, str]:
    """What the output is, without what belongs to an unfinished run."""
    return {name: digest for name, digest in contents(place).items() if name.partition(os.sep)[0] == out}


if __name__ == "__main__":
    library, sources, folder, count, seed = sys.argv[1:]
    json.dump(run_all(library, sorted(Path(sources).iterdir()), Path(folder), int(count), int(seed)), sys.stdout)
