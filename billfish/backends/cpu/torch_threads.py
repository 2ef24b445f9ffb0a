"""In a process with torch, one set of threads for torch's loops and ours: threads/openmp.h says why."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from billfish.backends.cpu import _cpu


@cache
def share_torch_threads() -> bool:
    """Once in a process, with the first tensor of torch's: loops run on the threads of its OpenMP from now on.

    False where torch was built without, or with one that has no GOMP_parallel. Our own threads stay then.
    """
    import torch

    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    return _cpu.share_threads_of(str(Path(torch.__file__).parent / "lib" / name))
