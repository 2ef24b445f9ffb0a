"""As many threads as a worker has cores.

vLLM binds a worker to cores by the variables of OpenMP, and OpenMP binds the main thread to the first of them. So this
thread may use one core, and the kernels' usual number of threads is one, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache

from billfish.backends.cpu.backend import set_threads
from billfish.backends.cpu.torch_threads import share_torch_threads


def cores_of_worker(environment: Mapping[str, str]) -> set[int]:
    """The cores that vLLM, or the user, gave to this process; none where no variable lists any."""
    found = (read(environment.get(name, "")) for name, read in READERS.items())
    return next((cores for cores in found if cores), set())


def _cores_of_list(text: str) -> set[int]:
    """GNU's: "0 3 8-15 16-31:2", the last with a step."""
    found = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", text)
    return {core for first, last, step in found for core in range(int(first), int(last or first) + 1, int(step or 1))}


def _cores_of_places(text: str) -> set[int]:
    """OpenMP's: "{0,1},{2,3}", "{0:16}" or "{0:4:2}" with a length and a step, "{0:4}:8:4" for eight such places."""
    cores = set[int]()
    for inside, count, stride in re.findall(r"\{([\d:,\s]*)\}(?::(\d+)(?::(\d+))?)?", text):
        place = set[int]()
        for first, length, step in re.findall(r"(\d+)(?::(\d+)(?::(\d+))?)?", inside):
            place |= set(range(int(first), int(first) + int(length or 1) * int(step or 1), int(step or 1)))
        cores |= {core + i * int(stride or 1) for i in range(int(count or 1)) for core in place}
    return cores


def _cores_of_proclist(text: str) -> set[int]:
    """Intel's: "granularity=fine,proclist=[0,2-5,{6,7}],explicit". "compact,1,0" lists no cores."""
    listed = re.search(r"proclist=\[([^\]]*)\]", text)
    return _cores_of_list(listed[1]) if listed else set()


# Where vLLM writes a worker's cores, for GNU's, LLVM's and Intel's OpenMP.
READERS = {
    "GOMP_CPU_AFFINITY": _cores_of_list,
    "OMP_PLACES": _cores_of_places,
    "KMP_AFFINITY": _cores_of_proclist,
}


@cache
def use_all_cores() -> None:
    """Once in a process: as many threads as the worker has cores, those of torch's OpenMP, which are bound to them."""
    cores = cores_of_worker(os.environ)
    if cores:
        set_threads(len(cores))
    share_torch_threads()
