"""CUDA C++ to machine code: NVRTC through cuda-core, once for each kernel and architecture, kept on disk.

No GPU and no toolkit is needed, only the extra `cuda`. The name of a file in the cache is a hash of all
that its content depends on. The folder is the user's own: :mod:`billfish.core.kernel_cache`.
"""

from __future__ import annotations

import hashlib
import importlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from billfish.core.errors import BackendUnavailable
from billfish.core.extras import how_to_install
from billfish.core.kernel_cache import KernelCache

SOURCES = Path(__file__).parent
INSTALL = how_to_install("cuda")


def cuda_module(name: str) -> Any:
    """A module of NVIDIA's Python packages."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailable(f"cuda: cannot import {name}: {error}. Run: {INSTALL}") from None


@cache
def _source_hash(source: str) -> bytes:
    """Of a file and of all that it may include."""
    digest = hashlib.sha256()
    for path in [SOURCES / source, *sorted(SOURCES.glob("*.cuh"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@cache
def _compiler_version() -> tuple[int, int]:
    nvrtc = cuda_module("cuda.bindings.nvrtc")
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the shared library is not there
        raise BackendUnavailable(f"cuda: NVRTC is not installed: {error}. Run: {INSTALL}") from None
    return int(major), int(minor)


def check_compiler() -> None:
    """Raises where NVRTC is not there."""
    _compiler_version()


def kernel_name(source: str, macros: dict[str, str], arch: str) -> str:
    """Of a compiled kernel: another one if anything is different that it is made of."""
    digest = hashlib.sha256(_source_hash(source))
    digest.update(repr((source, sorted(macros.items()), arch, _compiler_version())).encode())
    return f"{Path(source).stem}-{arch}-{digest.hexdigest()[:24]}"


def compile_kernel(source: str, macros: dict[str, str], arch: str) -> bytes:
    """The cubin of a .cu file for an architecture such as "sm_90a", from the cache if it is there."""
    name = f"{kernel_name(source, macros, arch)}.cubin"
    with suppress(OSError):  # a read-only home, or the folder of another user
        found = KernelCache("cuda").find(name)
        if found is not None:
            return found.read_bytes()
    code, _ = compile_fresh(source, macros, arch)
    with suppress(OSError):  # compiled again next time
        KernelCache("cuda").add(name, code)
    return code


def compile_fresh(source: str, macros: dict[str, str], arch: str, verbose: bool = False) -> tuple[bytes, str]:
    """The cubin and what the compiler said; with `verbose` that has registers and spills in it."""
    core = cuda_module("cuda.core")
    options = core.ProgramOptions(
        name=source,
        arch=arch,
        std="c++17",
        include_path=str(SOURCES),
        define_macro=sorted(macros.items()) or None,
        ptxas_options=["-v"] if verbose else None,
    )
    program = core.Program((SOURCES / source).read_text(), "c++", options)
    try:
        log = _Log()
        code = program.compile("cubin", logs=log).code
    finally:
        program.close()
    return bytes(code), log.text


class _Log:
    """What cuda-core writes the compiler's words to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text
