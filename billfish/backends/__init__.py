"""The backends, and how one is chosen. A backend is a folder here and a line in BACKENDS."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import NamedTuple

from billfish.backends.base import Backend, Problem
from billfish.core.errors import BackendUnavailable, DTypeError, bad_argument, failure, type_of

__all__ = ["BACKENDS", "Backend", "BackendEntry", "Problem", "choose"]


class BackendEntry(NamedTuple):
    """A backend, before anybody needs it."""

    name: str
    path: str  # module and class, imported when first looked up; empty for a backend that was assigned
    priority: int  # of those that can run a problem, the highest does; below 0, it is only run by name
    concerns: Callable[[Problem], bool]  # whether it is worth asking, and importing


def _anything(problem: Problem) -> bool:
    return True


class Backends(MutableMapping[str, Backend]):
    """Backends by name, the highest priority first."""

    def __init__(self, *entries: BackendEntry) -> None:
        self.entries: dict[str, BackendEntry] = {}
        self._made: dict[str, Backend] = {}
        for entry in entries:
            self.register(entry)

    def register(self, entry: BackendEntry) -> None:
        """One more backend, whoever wrote it."""
        entries = [*self.entries.values(), entry]
        self.entries = {entry.name: entry for entry in sorted(entries, key=lambda entry: -entry.priority)}
        self._made.pop(entry.name, None)

    def __getitem__(self, name: str) -> Backend:
        if name not in self._made:
            module, _, kind = self.entries[name].path.rpartition(".")
            self._made[name] = getattr(importlib.import_module(module), kind)()
        return self._made[name]

    def __setitem__(self, name: str, backend: Backend) -> None:
        """Replace a backend, or add one that runs when `backend=` names it. `register` adds one with a priority."""
        if not isinstance(backend, Backend):
            raise DTypeError(bad_argument("BACKENDS", repr(name), type_of(backend), "a Backend object"))
        if name not in self.entries:
            self.register(BackendEntry(name, "", -1, _anything))
        self._made[name] = backend

    def __delitem__(self, name: str) -> None:
        del self.entries[name]
        self._made.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


BACKENDS = Backends(
    BackendEntry("metal", "billfish.backends.metal.MetalBackend", 30, lambda problem: problem.kind == "mlx"),
    BackendEntry("mps", "billfish.backends.metal.mps.MpsBackend", 25, lambda problem: problem.device == "mps"),
    BackendEntry("cuda", "billfish.backends.cuda.backend.CudaBackend", 20, lambda problem: problem.device == "cuda"),
    BackendEntry("cpu", "billfish.backends.cpu.backend.CpuBackend", 10, _anything),
    BackendEntry("reference", "billfish.backends.reference.ReferenceBackend", 0, _anything),
    BackendEntry("metal-emulator", "billfish.backends.metal.EmulatorBackend", -1, _anything),
)
"""The backends by name, the highest priority first. `backend=` takes these names."""


def choose(call: str, problem: Problem, name: str | None = None) -> Backend:
    """The backend of that name, or without one the first that can run the problem."""
    if name is not None:
        return _named(call, problem, name)
    reasons = []
    for entry in BACKENDS.entries.values():
        if entry.priority >= 0 and entry.concerns(problem):
            backend = BACKENDS[entry.name]
            able, reason = backend.can_run(problem)
            if able:
                return backend
            reasons.append(f"{entry.name}: {reason}")
    raise BackendUnavailable(failure(call, f"no backend can run this. {'. '.join(reasons)}"))


def _named(call: str, problem: Problem, name: str) -> Backend:
    if not isinstance(name, str) or name not in BACKENDS:
        expected = f"one of {', '.join(BACKENDS)}. `billfish info` lists the backends"
        raise BackendUnavailable(bad_argument(call, "backend", repr(name), expected))
    backend = BACKENDS[name]
    able, reason = backend.can_run(problem)
    if not able:
        usable, about = backend.usable()  # without the hardware, no other input helps
        why = f"cannot run this: {reason}" if usable else f"cannot run on this machine: {about}"
        fix = "Choose another, or leave backend= out to use the best one. `billfish info` lists the backends."
        raise BackendUnavailable(failure(call, f"backend {name!r} {why}", fix))
    return backend
