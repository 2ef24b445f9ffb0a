"""As many threads as a worker has cores.

vLLM binds a worker to cores by the variables of OpenMP, and OpenMP binds the main thread to the first of them. So this
thread may use one core, and the kernels' usual number of threads is one, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache

import billfish as bf
from billfish.backends.cpu.torch_threads import share_torch_threads

# Where vLLM writes a worker's cores, for GNU's, LLVM's and Intel's OpenMP: "0 1", "{0,1}", "...,proclist=[0,1]".
VARIABLES = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY")


def cores_of_worker(environment: Mapping[str, str]) -> set[int]:
    """The cores that vLLM gave to this process; none where it gave none."""
    said = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    return {int(core) for core in re.findall(r"\b\d+\b", said)}


@cache
def use_all_cores() -> None:
    """Once in a process: as many threads as the worker has cores, those of torch's OpenMP, which are bound to them."""
    cores = cores_of_worker(os.environ)
    if cores:
        bf.set_threads(len(cores))
    share_torch_threads()
