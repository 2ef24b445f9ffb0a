"""Compare two installations of billfish: the bits of all matmuls on the CPU, and their times.

    python -m tools.wheels.compare PYTHON_A PYTHON_B

A is a Python with a native build, B one with a wheel. Every ISA level, format and type of activations is multiplied,
with one row and with several. The exit status is 1 where a bit differs. Times are the best of several rounds that
alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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

TIMES = """
import json, time
import numpy as np
import billfish as bf

rng, best = np.random.default_rng(7), {}
for name in ("q4_0", "q8_0", "mxfp4"):
    packed = bf.prepack(bf.quantize(rng.standard_normal((1024, 4096), np.float32), name))
    for activations in ("exact", "q16", "q8"):
        for rows in (1, 16, 256):
            x, fastest = rng.standard_normal((rows, 4096), np.float32), 1e9
            for _ in range(30 if rows < 256 else 8):
                start = time.perf_counter()
                bf.quantized_linear(x, packed, activations=activations)
                fastest = min(fastest, time.perf_counter() - start)
            best[f"{name} {activations} {rows}"] = fastest
print(json.dumps(best))
"""

LEVELS = "import json; from billfish.backends.cpu import _cpu; print(json.dumps(_cpu.levels()))"


def main() -> None:
    """Print what differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels.compare", description=__doc__.split("\n")[0])
    parser.add_argument("pythons", nargs=2, metavar="PYTHON", help="one of the two installations")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of timing (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="threads while timing (default: 1)")
    arguments = parser.parse_args()
    first, second = arguments.pythons = [os.path.abspath(python) for python in arguments.pythons]
    levels = [level for level in ask(first, LEVELS) if level in ask(second, LEVELS)]
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
    for level in levels if arguments.rounds else ():
        if level == "portable":  # no machine that people have chooses it
            continue
        times: list[dict[str, float]] = [{}, {}]
        for _ in range(arguments.rounds):
            for known, python in zip(times, arguments.pythons, strict=True):
                new = ask(python, TIMES, BILLFISH_ISA=level, OMP_NUM_THREADS=str(arguments.threads))
                known |= {name: min(seconds, known.get(name, seconds)) for name, seconds in new.items()}
        ratios = {name: times[1][name] / times[0][name] for name in times[0]}
        middle = sorted(ratios.values())[len(ratios) // 2]
        print(f"{level}: time of B / A: median {middle:.3f}, worst {max(ratios.values()):.3f}", flush=True)
        for name, ratio in sorted(ratios.items()):
            print(f"  {name}: {times[0][name] * 1e6:.0f} us, {times[1][name] * 1e6:.0f} us, {ratio:.3f}")
    sys.exit(different > 0)


def ask(python: str, code: str, **settings: str) -> Any:
    """What a program prints, in JSON. It runs where Python finds no other billfish than the installed one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(subprocess.check_output([python, "-c", code], env=environment | settings, cwd=folder))


if __name__ == "__main__":
    main()
