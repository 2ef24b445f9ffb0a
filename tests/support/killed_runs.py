"""Processes that quantize or tune a model and are ended by SIGKILL; :func:`ended` runs this file as a script.

A process of its own, because it forks, with one thread. Prints what each of its processes did, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import writer_worker

import billfish as bf
from billfish.llm.cpu import CpuDecoder

Reached = Callable[[int], None]


def in_order(folder: Path, reached: Reached) -> None:
    """GPTQ in order of `folder`/model.gguf, to cut.gguf. Tells of each layer that runs, each time."""
    run_layer = CpuDecoder.run_layer

    def telling(self: CpuDecoder, layer: int, *arguments: Any) -> None:
        reached(layer)
        run_layer(self, layer, *arguments)

    CpuDecoder.run_layer = telling  # type: ignore[method-assign]
    settings: Any = {"method": "gptq", "calibrate": folder / "text.txt", "progress": False}
    bf.quantize_checkpoint(folder / "model.gguf", folder / "cut.gguf", "q4_0", **settings)


def tuned(folder: Path, reached: Reached) -> None:
    """`folder`/quantized.gguf tuned, to cut.gguf. Tells of each step before it begins, by the window that it reads."""
    from billfish.quantizing import tune_checkpoint as tuning

    tuning.SAVE_SECONDS = 0.0
    gradients = tuning.Training._gradients

    def telling(self: tuning.Training, window: int) -> float:
        reached(window)
        return gradients(self, window)

    tuning.Training._gradients = telling  # type: ignore[method-assign]
    settings: Any = {"tokens": 160, "window": 40, "epochs": 1, "device": "cpu", "progress": False}
    settings |= {"against": folder / "model.gguf", "text": folder / "text.txt"}
    bf.tune_checkpoint(folder / "quantized.gguf", folder / "cut.gguf", **settings)


RUNS = {"in_order": in_order, "tuned": tuned}


def run(what: str, folder: Path, number: int, times: int) -> tuple[int, list[int]]:
    """A process that is killed when it has reached a number so many times: its status, and what it reached."""
    reader, writer = os.pipe()

    def work() -> None:
        left = [times]

        def reached(found: int) -> None:
            os.write(writer, bytes([found]))
            left[0] -= found == number
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        RUNS[what](folder, reached)

    process = writer_worker.start(work)
    os.close(writer)
    found = b"".join(iter(lambda: os.read(reader, 4096), b""))
    os.close(reader)
    return writer_worker.status_of(process), [*found]


def ended(what: str, folder: Path, kills: list[tuple[int, int]]) -> Any:
    """Runs that are killed, each at (number, times), and one that is not: [[status, what it reached], ...]."""
    return writer_worker.ask(what, folder, json.dumps(kills), script=__file__)


if __name__ == "__main__":
    if sys.argv[1] == "tuned":
        import torch

        torch.set_num_threads(1)
    places = [*json.loads(sys.argv[3]), (-1, 1)]
    json.dump([run(sys.argv[1], Path(sys.argv[2]), *place) for place in places], sys.stdout)
