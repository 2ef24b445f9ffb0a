"""The platforms and Pythons that wheels are built for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Platform:
    """A platform tag of wheels, and what CMake and zig call its target."""

    tag: str
    target: str  # of `zig c++ -target`
    system: str  # CMAKE_SYSTEM_NAME
    processor: str  # CMAKE_SYSTEM_PROCESSOR

    @property
    def suffix(self) -> str:
        """How the file name of an extension module ends, whatever Python it is for."""
        return ".pyd" if self.system == "Windows" else ".so"

    @property
    def kernels(self) -> str:
        """The target of kernels, which call nothing of a C library but memcpy and <math.h>: glibc's serve musl, too."""
        return self.target.replace("musl", "gnu.2.28")

    @property
    def has_cuda(self) -> bool:
        """Whether NVIDIA's driver exists there."""
        return self.system != "Darwin"


PLATFORMS = {
    platform.tag: platform
    for platform in (
        Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "Linux", "x86_64"),
        Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "Linux", "aarch64"),
        Platform("musllinux_1_2_x86_64", "x86_64-linux-musl", "Linux", "x86_64"),
        Platform("musllinux_1_2_aarch64", "aarch64-linux-musl", "Linux", "aarch64"),
        Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "Darwin", "arm64"),
        Platform("win_amd64", "x86_64-windows-gnu", "Windows", "AMD64"),
    )
}


@dataclass(frozen=True)
class Python:
    """A Python of this machine, whose headers are compiled with."""

    version: tuple[int, int]
    executable: str
    include: str

    # nanobind, linked into the module, needs the stable ABI of 3.12: older Pythons have wheels of their own.
    STABLE = (3, 12)

    @property
    def stable(self) -> bool:
        """Whether the wheel serves this Python and all later ones."""
        return self.version >= self.STABLE

    @property
    def tags(self) -> tuple[str, str]:
        """The interpreter and the ABI that a wheel names."""
        if self.stable:
            return "cp{}{}".format(*self.STABLE), "abi3"
        name = "cp{}{}".format(*self.version)
        return name, name

    def module_suffix(self, platform: Platform) -> str:
        """How a module is called behind its name. Windows has no name for the stable ABI."""
        return f".abi3{platform.suffix}" if self.stable and platform.system != "Windows" else platform.suffix


# The Python tags of a platform's wheels, which together serve Python 3.10 and later.
PYTHON_TAGS = ("cp310", "cp311", "cp312")

ASK = "import json, sys, sysconfig; print(json.dumps([sys.version_info[:2], sysconfig.get_path('include')]))"


def python_candidates(given: Sequence[str] = ()) -> list[str]:
    """`given`, or Pythons that may be there: this one, those of the PATH and of pyenv."""
    if given:
        return list(given)
    names = [f"python3.{minor}" for minor in range(10, 20)]
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3"))
    return [sys.executable, *filter(None, map(shutil.which, names)), *map(str, pyenv)]


def find_pythons(given: Sequence[str] = ()) -> list[Python]:
    """One Python with headers for each kind of wheel: 3.10, 3.11, and any from 3.12 on."""
    found: dict[tuple[str, str], Python] = {}
    for executable in python_candidates(given):
        answer = subprocess.run([executable, "-c", ASK], capture_output=True, text=True)
        if answer.returncode:  # a shim of pyenv for a version that is not installed
            continue
        (major, minor), include = json.loads(answer.stdout)
        python = Python((major, minor), executable, include)
        if python.version >= (3, 10) and Path(include, "Python.h").is_file():
            found.setdefault(python.tags, python)
    return sorted(found.values(), key=lambda python: python.version)


def choose_pythons(given: Sequence[str] = (), wanted: Sequence[str] = ()) -> list[Python]:
    """One Python for each wheel of `wanted`: by default all of PYTHON_TAGS, or those that `given` serves.

    Raises SystemExit, naming what is missing: only an explicit choice makes the set of wheels smaller.
    """
    found = {python.tags[0]: python for python in find_pythons(given)}
    tags = wanted or (given and [*found]) or PYTHON_TAGS
    if missing := [tag for tag in tags if tag not in found]:
        names = ["3.12 or later" if tag == "cp312" else f"3.{tag[3:]}" for tag in missing]
        place, version = f" in {', '.join(given)}" if given else "", f"3.{missing[0][3:]}"
        rest = f" Without: make wheels PYTHONS='{' '.join(found)}'." if found else ""
        raise SystemExit(
            f"No Python {' and no '.join(names)} with headers (Python.h) was found{place}. Install it "
            f"(pyenv install {version}; apt install python{version}-dev), or name one: --python PATH.{rest}"
        )
    return [found[tag] for tag in sorted(tags)]
