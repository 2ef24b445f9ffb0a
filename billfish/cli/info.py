"""`billfish info`: the CPU, backends and packages of this machine, and why a backend is not usable.

Packages are looked up, not imported: some take seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from billfish.backends import BACKENDS, Problem, choose
from billfish.backends.cpu import _cpu
from billfish.core.errors import BackendUnavailable
from billfish.core.extras import how_to_install
from billfish.core.format import get_format
from billfish.core.machine import allowed_cores
from billfish.core.tables import terminal_width
from billfish.core.version import __version__

# Packages, and the extra that brings each; without one, it comes along or is the user's own choice.
PACKAGES = {
    "numpy": "",
    "ml_dtypes": "",
    "torch": "",
    "mlx": "metal" if sys.platform == "darwin" else "",
    "transformers": "transformers",
    "safetensors": "checkpoints",
    "tokenizers": "llm",
    "jinja2": "llm",
    "cuda-core": "cuda",
    "cuda-bindings": "cuda",
    "nvidia-cuda-nvrtc": "cuda",
    "ziglang": "metal-emulator",
    "matplotlib": "bench",
    "onnxruntime": "bench",
    "llama-cpp-python": "bench",
}
VARIABLES = (
    "BILLFISH_DEVICE",
    "BILLFISH_ISA",
    "OMP_NUM_THREADS",
    "BILLFISH_CACHE",
    "BILLFISH_ACTIVATIONS",
    "BILLFISH_GGML_LIB",
)
LABEL = 20  # columns of the names at the left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else (default: off)")


def run(arguments: argparse.Namespace) -> None:
    print_info(sys.stdout, arguments.json)


def found() -> dict[str, Any]:
    """Everything that `billfish info --json` prints."""
    return {
        "billfish": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "backends": backends(),
        "chosen": _chosen(),
        "levels": list(_cpu.levels()),
        "threads": threads(),
        "memory": memory(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": {name: version_of(name) for name in PACKAGES},
    }


def backends() -> dict[str, dict[str, Any]]:
    """Each backend, the first choice first: whether it is usable here, and with what or why not."""
    answers = {}
    for entry in BACKENDS.entries.values():
        try:
            usable, about = BACKENDS[entry.name].usable()
        except BackendUnavailable as error:  # such as a BILLFISH_ISA that this machine does not have
            usable, about = False, str(error)
        answers[entry.name] = {"usable": usable, "about": about, "by_name_only": entry.priority < 0}
    return answers


def _chosen() -> str:
    """The backend of a product of NumPy arrays."""
    try:
        return choose("info", Problem("matmul", get_format("q4_0"), 32, 1, 32, 32, np.dtype(np.float32))).name
    except BackendUnavailable:  # what `backends` says of the CPU's
        return ""


def threads() -> dict[str, Any]:
    """How many compute, of how many cores, and why so many."""
    cores, allowed = os.cpu_count() or 1, allowed_cores()
    used = int(_cpu.threads())
    if "OMP_NUM_THREADS" in os.environ:
        why = "OMP_NUM_THREADS"
    elif used < allowed:
        quota = 0 < _cpu.quota_cores("") <= used
        why = "the CPU quota of this process" if quota else "hyperthreads of a core count once"
    else:
        why = "all cores" if used == cores else "the cores that this process may use"
    return {"used": used, "cores": cores, "allowed_cores": allowed, "why": why}


def memory(meminfo: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Bytes of memory; "available" only where the system tells it."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return {name: int(lines[f"Mem{name.title()}"].split()[0]) << 10 for name in ("total", "available")}
    except (OSError, KeyError, ValueError):  # no Linux
        if sys.platform == "win32":
            status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its length, then the total and what is available
            ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
            return {"total": status[1], "available": status[2]}
        return {"total": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def version_of(package: str) -> str | None:
    """Of an installed package, which is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The model, such as "Neoverse-N1"; the architecture if nobody knows more."""
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    # /proc/cpuinfo has numbers instead of names on ARM; lscpu has the table that goes with them.
    for line in output("lscpu").splitlines():
        if line.lower().startswith("model name:"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def output(*command: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# ---- printing ---------------------------------------------------------------------------------------------------


def print_info(out: TextIO, as_json: bool = False) -> None:
    """All of it, as text that fits the terminal or as JSON."""
    facts = found()
    if as_json:
        print(json.dumps(facts, indent=1), file=out)
        return
    width = terminal_width(out)
    for label, text in _lines(facts):
        start = f"{label:<{LABEL}}"
        if width is not None:
            text = textwrap.fill(text, max(width - LABEL, 20)).replace("\n", "\n" + " " * LABEL)
        print((start + text).rstrip(), file=out)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    threads, memory = facts["threads"], facts["memory"]
    lines = [
        ("billfish", f"{facts['billfish']}, Python {facts['python']}, {facts['system']}, {facts['cpu']}"),
        ("ISA levels", ", ".join(facts["levels"])),
        ("threads", f"{threads['used']} of {threads['cores']} cores: {threads['why']}"),
        ("memory", ", ".join(f"{size / 1e9:.1f} GB {name}" for name, size in memory.items())),
    ]
    lines += [("environment", f"{name}={value}") for name, value in facts["environment"].items()]
    lines += [("", ""), ("backends", "the first usable one that supports a matmul runs it")]
    for name, answer in facts["backends"].items():
        usable = "no" if not answer["usable"] else "by name only" if answer["by_name_only"] else "yes"
        lines.append((f"  {name}", f"{usable}: {answer['about']}" if answer["about"] else usable))
    if facts["chosen"]:
        lines.append(("chosen", f"{facts['chosen']}, for NumPy arrays"))
    lines += [("", ""), ("packages", "")]
    for name, version in facts["packages"].items():
        extra = PACKAGES[name]
        lines.append((f"  {name}", version or ("-" if not extra else f"-   {how_to_install(extra)}")))
    return lines
