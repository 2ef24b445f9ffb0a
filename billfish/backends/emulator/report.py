"""Puts a fault into words."""

from __future__ import annotations

from collections.abc import Sequence

from billfish.backends.emulator.faults import KINDS, KernelFault, Site
from billfish.backends.emulator.runtime import Outcome, Party
from billfish.backends.emulator.sites import Sites


def _unfold(index: int, shape: Sequence[int]) -> tuple[int, int, int]:
    return index % shape[0], index // shape[0] % shape[1], index // (shape[0] * shape[1])


class _Places:
    """Positions and lines of one launch."""

    def __init__(
        self, name: str, source: str, header: str, sites: Sites, grid: Sequence[int], threadgroup: Sequence[int]
    ) -> None:
        self.texts = {name: source.split("\n"), f"{name} header": header.split("\n")}
        self.sites, self.most = sites, threadgroup
        self.grid = grid
        self.groups = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]

    def site(self, party: Party) -> Site | None:
        found = self.sites.find(party.site) if party.known else None
        if found is None:
            return None
        file, line = found
        lines = self.texts.get(file, [])
        return Site(file, line, lines[line - 1] if 0 < line <= len(lines) else "")

    def threadgroup(self, party: Party) -> tuple[int, int, int]:
        return _unfold(party.threadgroup, self.groups)

    def thread(self, party: Party) -> tuple[int, int, int]:
        """In its threadgroup, which is smaller at the edge of the grid."""
        at = self.threadgroup(party)
        sizes = [min(m, g - m * a) for m, g, a in zip(self.most, self.grid, at, strict=True)]
        return _unfold(party.thread, sizes)

    def who(self, party: Party) -> str:
        return f"thread {self.thread(party)} of threadgroup {self.threadgroup(party)}"


def describe(
    outcome: Outcome,
    name: str,
    source: str,
    header: str,
    sites: Sites,
    grid: Sequence[int],
    threadgroup: Sequence[int],
) -> KernelFault:
    """The exception for a launch that ended in a fault."""
    fault = outcome.fault
    assert fault is not None
    places = _Places(name, source, header, sites, grid, threadgroup)
    first, second, kind = fault.first, fault.second, KINDS[fault.kind]
    buffer = outcome.names[fault.range] if fault.range >= 0 else None
    here, there = places.site(first), places.site(second)
    detail = fault.detail.decode()
    where = f"bytes {fault.offset}..{fault.offset + fault.size - 1} of {buffer}"
    does = "writes" if first.writes else "reads"
    did = "wrote" if second.writes else "read"
    operation = (first.operation or b"").decode()
    other = (second.operation or b"").decode()
    at, at_other = f"at {here or 'an unknown line'}", f"at {there or 'an unknown line'}"
    who, who_other = places.who(first), places.who(second)

    if kind == "race":
        words = f"{who} {does} {where} {at}, which {who_other} {did} {at_other}, with no barrier between"
    elif kind == "cross-threadgroup":
        words = (
            f"{who} {does} {where} {at}, which {who_other} {did} {at_other}; between threadgroups that takes a "
            f"release fence and an atomic store there, an atomic load and an acquire fence here"
        )
    elif kind == "out-of-bounds":
        words = f"{who} {does} {where} {at}, out of bounds"
    elif kind == "uninitialised":
        words = f"{who} reads {where} {at}, which nobody has written"
    elif kind == "read-only":
        words = f"{who} writes {where} {at}, which is an input"
    elif kind == "misaligned":
        words = f"{who} {does} {where} {at}: an access of {fault.size} bytes at an address that is no multiple of it"
    elif kind == "divergent-barrier":
        end = f"is {at_other}, in {other}" if there else f"has come to {other or 'no barrier'}"
        words = f"{who} waits {at}, in {operation}, while {who_other} {end}"
    elif kind == "divergent-simdgroup":
        end = f"is {at_other}, in {other}" if there else f"has come to {other}"
        words = f"{who} is {at}, in {operation}, " + (detail if detail else f"while {who_other} {end}")
    elif kind == "non-uniform":
        words = f"{who} {at}: {detail} of {operation} is not the same in all lanes"
    else:
        words = f"{who} {at}: {detail}"
    return KernelFault(
        f"metal_kernel: {name}: {kind}: {words}",
        kernel=name,
        kind=kind,
        site=here,
        other_site=there,
        thread=places.thread(first),
        threadgroup=places.threadgroup(first),
        buffer=buffer,
    )
