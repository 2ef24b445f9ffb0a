"""The backends, fastest first, and how one is chosen."""

from __future__ import annotations

from billfish.backends.base import Backend, Problem
from billfish.backends.cpu import CpuBackend
from billfish.backends.cuda import CudaBackend
from billfish.backends.metal import EmulatorBackend, MetalBackend
from billfish.backends.reference import ReferenceBackend
from billfish.errors import BackendUnavailable, complaint

__all__ = ["BACKENDS", "Backend", "Problem", "choose"]

# The first that can run a problem does. The emulator comes after the reference, which can run all it can: by name only.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (MetalBackend(), CpuBackend(), CudaBackend(), ReferenceBackend(), EmulatorBackend())
}


def choose(call: str, problem: Problem, name: str | None = None) -> Backend:
    """The backend of that name, or without one the first that can run the problem."""
    if name is not None and (not isinstance(name, str) or name not in BACKENDS):
        raise BackendUnavailable(complaint(call, "backend", repr(name), f"one of {', '.join(BACKENDS)}"))
    reasons = []
    for backend in [BACKENDS[name]] if name is not None else BACKENDS.values():
        able, reason = backend.can_run(problem)
        if able:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise BackendUnavailable(f"[{call}] no backend can run this: {'; '.join(reasons)}")
