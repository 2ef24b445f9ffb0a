"""The backends, fastest first, and how one is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping

from billfish.backends.base import Backend, Problem
from billfish.errors import BackendUnavailable, complaint

__all__ = ["BACKENDS", "Backend", "Problem", "choose"]


class Backends(MutableMapping[str, Backend]):
    """Backends by name, each imported when it is first looked up: nobody waits for those of other machines."""

    def __init__(self, classes: dict[str, str]) -> None:
        self._classes = classes
        self._made: dict[str, Backend | None] = dict.fromkeys(classes)

    def __getitem__(self, name: str) -> Backend:
        backend = self._made[name]
        if backend is None:
            module, _, kind = self._classes[name].rpartition(".")
            backend = self._made[name] = getattr(importlib.import_module(module), kind)()
        return backend

    def __setitem__(self, name: str, backend: Backend) -> None:
        self._made[name] = backend

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


# The first that can run a problem does. The emulator comes after the reference, which can run all it can: by name only.
BACKENDS = Backends(
    {
        "metal": "billfish.backends.metal.MetalBackend",
        "cpu": "billfish.backends.cpu.CpuBackend",
        "cuda": "billfish.backends.cuda.CudaBackend",
        "reference": "billfish.backends.reference.ReferenceBackend",
        "metal-emulator": "billfish.backends.metal.EmulatorBackend",
    }
)


def choose(call: str, problem: Problem, name: str | None = None) -> Backend:
    """The backend of that name, or without one the first that can run the problem."""
    if name is not None and (not isinstance(name, str) or name not in BACKENDS):
        raise BackendUnavailable(complaint(call, "backend", repr(name), f"one of {', '.join(BACKENDS)}"))
    names = list(BACKENDS) if name is None else [name]
    for candidate in names:
        if name is not None or _concerns(candidate, problem):
            backend = BACKENDS[candidate]
            if backend.can_run(problem)[0]:
                return backend
    reasons = [f"{candidate}: {BACKENDS[candidate].can_run(problem)[1]}" for candidate in names]
    raise BackendUnavailable(f"[{call}] no backend can run this: {'; '.join(reasons)}")


def _concerns(name: str, problem: Problem) -> bool:
    """Whether a backend is worth asking, and importing: those of GPUs only for what is there."""
    if name == "metal":
        return problem.kind == "mlx"
    return name != "cuda" or problem.device == "cuda"
