"""What the emulator raises: a kernel that does not compile, and a kernel that does what it must not."""

from __future__ import annotations

from dataclasses import dataclass

from billfish.core.errors import BillfishError


class CompileError(BillfishError, ValueError):
    """The kernel is not valid Metal, as far as clang and the shim can tell."""


@dataclass(frozen=True)
class Site:
    """A line of a kernel. `file` is the kernel's name, or says which header."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        shown = f": `{self.text.strip()}`" if self.text.strip() else ""
        return f"{self.file}, line {self.line}{shown}"


class KernelFault(BillfishError, RuntimeError):
    """A fault in a kernel that was run: what kind, where, by which thread, on which buffer.

    `kind` is one of `KINDS`; `site` and `other_site` are lines, `thread` and `threadgroup` positions, each None where
    there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str,
        kind: str,
        site: Site | None = None,
        other_site: Site | None = None,
        thread: tuple[int, int, int] | None = None,
        threadgroup: tuple[int, int, int] | None = None,
        buffer: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel, self.kind, self.site, self.other_site = kernel, kind, site, other_site
        self.thread, self.threadgroup, self.buffer = thread, threadgroup, buffer


# In the order of FaultKind in runtime/fault.h; the last is found before the kernel runs.
KINDS = (
    "none",
    "race",
    "cross-threadgroup",
    "out-of-bounds",
    "uninitialised",
    "read-only",
    "misaligned",
    "divergent-barrier",
    "divergent-simdgroup",
    "non-uniform",
    "endless",
    "stack-overflow",
    "threadgroup-memory",
)
