"""The vector instructions that a program really contains, read from its machine code by objdump."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

# Best last. x86_64 (registers are named in AT&T's syntax), then aarch64.
INSTRUCTIONS = {
    "AVX2": r"\bvpmaddubsw\b.*%ymm",
    "AVX-VNNI": r"\bvpdpbusds?\b.*%ymm",
    "AVX-512": r"\bvpmadd(ubsw|wd)\b.*%zmm",
    "AVX-512 VNNI": r"\bvpdpbusds?\b.*%zmm",
    "AMX": r"\btdpb[su]{2}d\b",
    "dotprod": r"\b[su]dot\b.*\bv\d+\.16b",
    "i8mm": r"\b[su]mmla\b.*\bv\d+\.16b",
    "SVE": r"\b[su]dot\b.*\bz\d+\.[sb]\b",
}


def instructions_of(libraries: Iterable[Path]) -> list[str]:
    """Those of INSTRUCTIONS that occur in some library; raises OSError where there is no objdump."""
    wanted = {name: re.compile(pattern) for name, pattern in INSTRUCTIONS.items()}
    found = set[str]()
    for path in libraries:
        command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found.update(name for name in wanted.keys() - found if wanted[name].search(line))
    return [name for name in INSTRUCTIONS if name in found]
