"""The table "Dequantize" of docs/cpu.md: weights to float32 in memory that exists, beside ggml's C code.

Both take turns in one process. ggml's dequantize_row_* knows no threads, so each thread gets its share of the rows. The
output, 64 MiB, goes through every cache between two turns, so that weights come from memory as well. The limit is what
the same threads reach with memset. ggml comes as in `benchmarks.products`: BILLFISH_GGML_LIB names the folder of its
libraries, or llama-cpp-python is installed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.peers import Case
from benchmarks.peers.ggml import SAME, TYPES, library_folder, open_library
from benchmarks.timing import Turns, timed

N, K = 4096, 4096
DEVIATION = 1 / 32  # of the weights, which are normally distributed
PASSES = 4  # in a turn, so that waking up threads does not show
FORMATS = "q4_0,q4_1,q5_0,q5_1,q8_0,iq4_nl,q2_k,q3_k,q4_k,q5_k,q6_k,mxfp4,nvfp4,u4b8,affine4"


class Ggml:
    """dequantize_row_* of ggml's library, on several threads: ctypes lets go of Python meanwhile."""

    def __init__(self, count: int) -> None:
        self.library, self.count = open_library(library_folder(), "ggml-base"), count
        cores = iter(sorted(os.sched_getaffinity(0))[:count])
        # A core each, or both might begin on that of whoever woke them.
        self.threads = ThreadPoolExecutor(count, initializer=lambda: os.sched_setaffinity(0, {next(cores)}))
        self.library.ggml_version.restype = ctypes.c_char_p
        self.version = self.library.ggml_version().decode()

    def run(self, name: str, blocks: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        row = getattr(self.library, "dequantize_row_" + name.removesuffix("_gguf").replace("_k", "_K"))
        row.restype, row.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

        return self.in_shares(
            len(out), lambda a, b: row(blocks[a:].ctypes.data, out[a:].ctypes.data, (b - a) * out.shape[1])
        )

    def memset(self, out: np.ndarray) -> Callable[[], None]:
        return self.in_shares(len(out), lambda a, b: ctypes.memset(out[a:].ctypes.data, 1, out[a:b].nbytes))

    def in_shares(self, rows: int, work: Callable[[int, int], Any]) -> Callable[[], None]:
        """work(first, last) for equal shares of the rows, PASSES times on each thread."""
        bounds = [rows * i // self.count for i in range(self.count + 1)]

        def repeat(first: int, last: int) -> None:
            for _ in range(PASSES):
                work(first, last)

        return lambda: list(self.threads.map(repeat, bounds[:-1], bounds[1:])) and None


def measure(name: str, ggml: Ggml, out: np.ndarray, rounds: int) -> dict[str, Any]:
    """Medians of a format, in seconds, and the output in GB/s."""
    format = bf.get_format(name)
    case = Case(format, format.default_group_size, K, N, "exact")
    distinct = bf.quantize(case.rows * DEVIATION, format, group_size=case.group_size, method="rtn").planes
    planes = {plane: values if values.ndim == 0 else case.repeated(values) for plane, values in distinct.items()}
    tensor = bf.QuantizedTensor.from_planes(format, planes, case.group_size)
    theirs = SAME.get((name, tensor.group_size), name)

    def ours() -> None:
        for _ in range(PASSES):
            bf.dequantize(tensor, out=out)

    runs: dict[str, Callable[[], Any]] = {"billfish": ours, "memset": ggml.memset(out)}
    if theirs in TYPES:
        planes = tensor.planes
        if name == "u8b128":
            planes["codes"] = planes["codes"] ^ np.uint8(0x80)
        blocks = bf.QuantizedTensor.from_planes(theirs, planes).storage["blocks"]
        runs["ggml"] = ggml.run(theirs, blocks, out)
    turns = {who: Turns(run, timed(run)) for who, run in runs.items()}
    if "ggml" in runs:  # a benchmark of wrong results is worth nothing
        expected = bf.dequantize(tensor)
        runs["ggml"]()
        # GGUF has the one scale of an NVFP4 tensor apart: for them it comes last and rounds once more.
        factor = np.float32(tensor.storage.get("global_scale", 1))
        np.testing.assert_allclose(out * factor, expected, rtol=0 if factor == 1 else 2e-7)
    for _ in range(rounds):
        for turn in turns.values():
            turn.take()
    seconds = {who: turn.median() / PASSES for who, turn in turns.items()}
    return {"format": name, "seconds": seconds, "gbps": {who: out.nbytes / s / 1e9 for who, s in seconds.items()}}


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2, rounds=7)
    parser.listed("--formats", "formats", FORMATS)
    flags = parser.parse_args()
    bf.set_threads(flags.threads)
    ggml, out, found = Ggml(flags.threads), np.ones((N, K), np.float32), []
    print("| format | billfish GB/s | ggml GB/s | times | of the limit |\n|---|---|---|---|---|")
    for name in flags.formats:
        found.append(measure(name, ggml, out, flags.rounds))
        gbps = found[-1]["gbps"]
        beside = [f"{gbps['ggml']:.1f}", f"{gbps['billfish'] / gbps['ggml']:.1f}"] if "ggml" in gbps else ["", ""]
        cells = [name, f"{gbps['billfish']:.1f}", *beside, f"{gbps['billfish'] / gbps['memset']:.0%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    about = machine.machine() | {"threads": flags.threads, "n": N, "k": K} | machine.today()
    versions = machine.versions() | {"ggml": ggml.version}
    records.write(flags.json, {"machine": about, "versions": versions, "records": found})


if __name__ == "__main__":
    main()
