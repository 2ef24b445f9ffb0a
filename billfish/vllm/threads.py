"""The kernels' threads on all cores of a worker.

vLLM binds a worker to cores by the variables of OpenMP, and OpenMP binds the main thread to the first of them. Threads
inherit the cores of the one that starts them: started by the main thread, all of ours would share one core.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from functools import cache

import numpy as np

import billfish as bf

# Where vLLM writes a worker's cores, for GNU's, LLVM's and Intel's OpenMP: "0 1", "{0,1}", "...,proclist=[0,1]".
VARIABLES = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY")


def cores_of_worker(environment: Mapping[str, str]) -> set[int]:
    """The cores that vLLM gave to this process; none where it gave none."""
    said = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    return {int(core) for core in re.findall(r"\b\d+\b", said)}


@cache
def start_threads() -> None:
    """Once in a process: start the kernels' threads from a thread that may use all cores of the worker."""
    cores = cores_of_worker(os.environ)
    if len(cores) < 2 or not hasattr(os, "sched_setaffinity"):
        return

    def start() -> None:
        os.sched_setaffinity(0, cores)  # of this thread alone
        bf.set_threads(len(cores))
        bf.prepack(bf.quantize(np.ones((512, 256), np.float32), "q4_0"))  # work enough for all of them

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
