"""Compare two installations of billfish: the bits of all matmuls on the CPU, and their times.

    python -m tools.wheels.compare PYTHON_A PYTHON_B

A is a Python with a native build, B one with a wheel. Every ISA level, format and type of activations is multiplied,
with one row and with several. The exit status is 1 where a bit differs, or where B takes more than 1.03 times as long.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT = 1.03  # of the time of A
PAIRS = 15  # of processes that time a case above the limit

Case = tuple[str, str, int]  # a format, a type of activations, rows

PRODUCTS = """
import hashlib, json
import numpy as np
import billfish as bf
from billfish.backends.cpu.backend import CpuBackend

digests, rng = {}, np.random.default_rng(7)
w, x = rng.standard_normal((96, 512), np.float32), rng.standard_normal((70, 512), np.float32)
for name, format in bf.FORMATS.items():
    try:
        q = bf.quantize(w, name)
    except bf.BillfishError as error:
        digests[name] = str(error)
        continue
    for activations in ("exact", "q16", "q8"):
        for rows in (1, 4, 70):
            try:
                y = bf.quantized_linear(x[:rows], q, activations=activations, backend="cpu")
                digest = hashlib.sha256(np.ascontiguousarray(y).tobytes()).hexdigest()
            except bf.BillfishError as error:
                digest = str(error)
            digests[f"{name} {activations} {rows}"] = digest
    digests[f"{name} dequantize"] = hashlib.sha256(bf.dequantize(q, backend="cpu").tobytes()).hexdigest()
print(json.dumps([CpuBackend().level, digests]))
"""

# A process that multiplies when it is told to. One line asks for a case, which is prepared; an empty line for the
# shortest time of a few milliseconds of it.
WORKER = """
import json, sys, time
import numpy as np
import billfish as bf

bf.set_threads(1)
rng, packed, of = np.random.default_rng(7), None, None
for line in sys.stdin:
    if line.strip():
        name, activations, rows = json.loads(line)
        if of != name:
            packed, of = bf.prepack(bf.quantize(rng.standard_normal((512, 4096), np.float32), name)), name
        x = rng.standard_normal((rows, 4096), np.float32)
    best, end = 1e9, time.perf_counter() + 0.004
    while True:
        start = time.perf_counter()
        bf.quantized_linear(x, packed, activations=activations, backend="cpu")
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    print(best, flush=True)
"""
CASES = "import json, billfish as bf; print(json.dumps(list(bf.FORMATS)))"

LEVELS = "import json; from billfish.backends.cpu import _cpu; print(json.dumps(_cpu.levels()))"


def main() -> None:
    """Print what differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels.compare", description=__doc__.split("\n")[0])
    parser.add_argument("pythons", nargs=2, metavar="PYTHON", help="one of the two installations")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of timing (default: 0)")
    parser.add_argument("--cores", type=int, default=1, help="cores that time cases, each its own (default: 1)")
    parser.add_argument("--level", action="append", help="an ISA level (default: all that both have)")
    parser.add_argument("--format", action="append", help="a format whose products are timed (default: all)")
    arguments = parser.parse_args()
    first, second = arguments.pythons = [os.path.abspath(python) for python in arguments.pythons]
    common = [level for level in ask(first, LEVELS) if level in ask(second, LEVELS)]
    levels = [level for level in common if level in (arguments.level or common)]
    different = 0
    with ThreadPoolExecutor() as pool:
        asked = [
            [pool.submit(ask, python, PRODUCTS, BILLFISH_ISA=level) for python in (first, second)] for level in levels
        ]
    for level, (answer_a, answer_b) in zip(levels, asked, strict=True):
        (_, a), (_, b) = answer_a.result(), answer_b.result()
        wrong = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
        different += len(wrong)
        print(f"{level}: {len(a)} results, {len(wrong)} differ {wrong[:6]}", flush=True)
    slow = 0
    for level in levels if arguments.rounds else ():
        if level == "portable":  # no machine that people have chooses it
            continue
        ratios = time_level(arguments.pythons, level, arguments.format, arguments.rounds, arguments.cores)
        values = sorted(ratio for ratio, _ in ratios.values())
        above = {name: both for name, both in sorted(ratios.items()) if both[0] > LIMIT}
        slow += len(above)
        middle = values[len(values) // 2]
        print(f"{level}: {len(values)} times of B / A: median {middle:.3f}, {len(above)} above {LIMIT}", flush=True)
        for name, (ratio, seconds) in above.items():
            print(f"  {name}: {ratio:.3f} of {seconds * 1e6:.0f} us")
    sys.exit(different + slow > 0)


def time_level(
    pythons: list[str], level: str, formats: list[str] | None, rounds: int, cores: int
) -> dict[str, tuple[float, float]]:
    """The ratio of times, and the time of A, of every case. Each core has a share of the cases.

    Where the memory of a process lies may cost a case 10 %, on either side. One above the limit is therefore measured
    again in further pairs of processes, and the median of all pairs counts.
    """
    names = formats or ask(pythons[0], CASES)
    cases: list[Case] = list(itertools.product(names, ("exact", "q16", "q8"), (1, 4, 64)))
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    with ThreadPoolExecutor(cores) as pool:
        for pair in range(PAIRS):
            again = [case for case in cases if not pair or found[case][0][0] > LIMIT]
            shares = [
                pool.submit(time_share, pythons, level, again[core::cores], rounds, core, pair % 2)
                for core in range(cores)
            ]
            for share in shares:
                for case, result in share.result().items():
                    found[case].append(result)
    return {
        f"{name} {activations} {rows}": (statistics.median(r for r, _ in results), results[0][1])
        for (name, activations, rows), results in found.items()
    }


def time_share(
    pythons: list[str], level: str, cases: list[Case], rounds: int, core: int, second_first: int
) -> dict[Case, tuple[float, float]]:
    """Both sides take turns of a few milliseconds on one core, so that a slow moment of the machine is one of both."""
    if not cases:
        return {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"BILLFISH_ISA": level, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for python in pythons[::-1] if second_first else pythons:
            pin = (lambda: os.sched_setaffinity(0, [core])) if hasattr(os, "sched_setaffinity") else None
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            workers.append(
                subprocess.Popen([python, "-c", WORKER], env=environment, cwd=folder, preexec_fn=pin, **pipes)
            )
        for case in cases:
            asked = json.dumps(case)
            best = [tell(worker, asked) for worker in workers]
            for _ in range(rounds):
                best = [min(known, tell(worker, "")) for known, worker in zip(best, workers, strict=True)]
            a, b = best[::-1] if second_first else best
            results[case] = b / a, a
        for worker in workers:
            worker.communicate()
    return results


def tell(worker: subprocess.Popen[str], line: str) -> float:
    """What a worker answers to a line."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def ask(python: str, code: str, **settings: str) -> Any:
    """What a program prints, in JSON. It runs where Python finds no other billfish than the installed one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(subprocess.check_output([python, "-c", code], env=environment | settings, cwd=folder))


if __name__ == "__main__":
    main()
