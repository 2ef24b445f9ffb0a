"""Which line of the kernel a return address belongs to.

The compiler's assembly says before every instruction which line it comes from. We put a label behind each call, and a
table of labels and lines at the end: {offset of the label from the entry, file, line}, three 32-bit numbers each.
"""

from __future__ import annotations

import ctypes
import re
import sys

_CALL = re.compile(r"^\s+(?:bl|blr|call|callq)\s")
_LOCATION = re.compile(r"^\s+\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s+\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')

_DARWIN = sys.platform == "darwin"
_LOCAL = "L" if _DARWIN else ".L"
_SECTION = "__DATA,emu_sites" if _DARWIN else 'emu_sites,"a"'
_SYMBOL = "_" if _DARWIN else ""


def annotate(assembly: str) -> str:
    """The same assembly with the table; its symbols are emulator_sites and emulator_files."""
    out: list[str] = []
    table: list[str] = []
    files: dict[int, str] = {}
    file = line = 0
    for text in assembly.splitlines():
        out.append(text)
        if found := _LOCATION.match(text):
            if int(found[2]):  # line 0: the compiler does not know
                file, line = int(found[1]), int(found[2])
        elif found := _FILE.match(text):
            files[int(found[1])] = found[3] or found[2]
        elif _CALL.match(text):
            label = f"{_LOCAL}emu_site{len(table)}"
            out.append(f"{label}:")
            entry = f"{_LOCAL}emu_entry{len(table)}"
            table.append(f"{entry}:\n .long {label} - {entry}\n .long {file}\n .long {line}")
    names = "\n".join(files.get(i, "") for i in range(max(files, default=0) + 1))
    out += [f" .section {_SECTION}", " .p2align 2"]
    out += [f" .globl {_SYMBOL}emulator_sites", f"{_SYMBOL}emulator_sites:", f" .long {len(table)}", *table]
    escaped = names.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    out += [f" .globl {_SYMBOL}emulator_files", f"{_SYMBOL}emulator_files:", f' .asciz "{escaped}"', ""]
    return "\n".join(out)


class Sites:
    """The table of a loaded kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        count = ctypes.c_uint32.in_dll(library, "emulator_sites").value
        start = ctypes.addressof(ctypes.c_uint32.in_dll(library, "emulator_sites")) + 4
        self._table = (ctypes.c_int32 * (3 * count)).from_address(start)
        self._start = start
        self._library = library

    def find(self, address: int | None) -> tuple[str, int] | None:
        """File and line, or None for an address that is no call of the kernel's."""
        names = ctypes.addressof(ctypes.c_char.in_dll(self._library, "emulator_files"))
        files = ctypes.string_at(names).decode().split("\n")
        for i in range(0, len(self._table), 3):
            if self._start + 4 * i + self._table[i] == address and self._table[i + 2]:
                return files[self._table[i + 1]], self._table[i + 2]
        return None
