"""Compiles translated kernels and the runtime with clang, and keeps the results on disk by what they were made of."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from billfish.backends.emulator.counting import add_counters
from billfish.backends.emulator.faults import CompileError
from billfish.backends.emulator.hostile import flush_halves
from billfish.backends.emulator.sites import annotate
from billfish.core.errors import BackendUnavailable, failure
from billfish.core.extras import how_to_install
from billfish.core.kernel_cache import KernelCache

HERE = Path(__file__).parent
SHIM, RUNTIME = HERE / "shim", HERE / "runtime"
# Before, clang does not compute in bfloat on aarch64: LLVM ends itself. Zig 0.14 is the first with that clang.
OLDEST_CLANG, OLDEST_ZIG = 19, (0, 14)

_DARWIN = sys.platform == "darwin"
_COMMON_FLAGS = ["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti"]
_COMMON_FLAGS += ["-fno-stack-protector", "-fno-sanitize=undefined"]
_RUNTIME_FLAGS = [*_COMMON_FLAGS, "-DEMULATOR_RUNTIME"]
_KERNEL_FLAGS = [*_COMMON_FLAGS, "-Wno-everything", "-fno-strict-aliasing", "-fno-math-errno", "-gline-tables-only"]
# Calls stay where they are in the source: a barrier is known by its address.
_KERNEL_FLAGS += ["-fconvergent-functions", "-fno-optimize-sibling-calls"]
# Half and bfloat are rounded after each operation, as on a GPU.
for _type in ("float16", "bfloat16"):
    _KERNEL_FLAGS += ["-Xclang", f"-f{_type}-excess-precision=none"]
# The sanitizer's calls come to our own functions, see runtime/memory.cpp.
_INSTRUMENTED_FLAGS = ["-DEMULATOR_INSTRUMENTED", "-fsanitize=thread", "-fno-vectorize", "-fno-slp-vectorize"]
for _option in ("func-entry-exit=0", "read-before-write=1"):
    _INSTRUMENTED_FLAGS += ["-mllvm", f"-tsan-instrument-{_option}"]
_INSTRUMENTED_FLAGS += ["-mllvm", "-tsan-handle-cxx-exceptions=0"]
# What is counted is as near to a GPU's code as this compiler can come: indices stay 32 bits wide, functions are
# inlined, loops of known length are unrolled whole, others not at all.
_COUNTED_FLAGS = [*_INSTRUMENTED_FLAGS, "-fno-signed-zeros"]
for _option in ("indvars-widen-indvars=false", "unroll-runtime=false", "unroll-allow-partial=false"):
    _COUNTED_FLAGS += ["-mllvm", f"-{_option}"]
for _option in ("inline-threshold=1000000", "unroll-threshold=2000", "disable-vector-combine"):
    _COUNTED_FLAGS += ["-mllvm", f"-{_option}"]
# Parameters of templates that are objects, as Metal 4's descriptors are.
_METAL_4_FLAGS = ["-std=c++20"]
_SAFE_MATH, _HOSTILE_MATH = ["-ffp-contract=off"], ["-ffast-math", "-ffp-contract=fast", "-fno-finite-math-only"]
# Without the C library's own libraries, which the process has anyway: zig would build stubs of them for half a minute.
_LINK_FLAGS = ["-shared", "-fPIC", *(["-undefined", "dynamic_lookup"] if _DARWIN else ["-nostdlib"])]


@dataclass(frozen=True)
class Compiler:
    """A clang, and how it is called."""

    command: tuple[str, ...]
    version: str
    target: tuple[str, ...]

    def run(self, arguments: Sequence[str | Path], folder: Path) -> None:
        """Runs it in `folder`; its complaints are the exception's message."""
        environment = os.environ | {
            "ZIG_GLOBAL_CACHE_DIR": str(libraries().folder / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(libraries().folder / "zig"),
        }
        command = [*self.command, *self.target, *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stderr.replace(str(HERE), "emulator").strip() or f"{command[0]} failed")


@cache
def find_compiler() -> Compiler:
    """`zig cc` of the package ziglang, or clang; either must be new enough."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.submodule_search_locations:
        zig = str(Path(spec.submodule_search_locations[0]) / "zig")
        version = subprocess.run([zig, "version"], capture_output=True, text=True, check=True).stdout.strip()
        if tuple(map(int, version.split(".")[:2])) >= OLDEST_ZIG:
            # Not the machine's own processor: the cache may lie on a disk that other machines share.
            return Compiler((zig, "cc"), f"zig {version}", ("-mcpu=x86_64_v3",) if x86 else ("-mcpu=generic",))
    for name in ["clang", *(f"clang-{version}" for version in range(40, OLDEST_CLANG - 1, -1))]:
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"clang version (\d+)", version)
        if found and int(found[1]) >= OLDEST_CLANG:
            return Compiler((path,), version.splitlines()[0], ("-march=x86-64-v3",) if x86 else ())
    raise BackendUnavailable(
        f"metal_kernel: the Metal emulator found no compiler: neither ziglang >= {'.'.join(map(str, OLDEST_ZIG))} "
        f"nor clang >= {OLDEST_CLANG}. Run: {how_to_install('metal-emulator')}"
    )


@cache
def libraries() -> KernelCache:
    """Compiled kernels."""
    try:
        return KernelCache("metal-emulator")
    except PermissionError as error:
        raise BackendUnavailable(failure("metal_kernel", f"cannot keep compiled kernels: {error}")) from None


@cache
def _own_sources() -> bytes:
    """All of the emulator, for the hash."""
    files = sorted(path for path in HERE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)


def _cached(key: Sequence[str], suffix: str, make: Callable[[Path, Path], None]) -> Path:
    """The file made of `key`; `make(folder, result)` makes it, in a folder of its own, if it is not there yet."""
    compiler = find_compiler()
    whole = [sys.platform, platform.machine(), compiler.version, *compiler.target, *key]
    digest = hashlib.sha256("\0".join(whole).encode() + b"\0" + _own_sources()).hexdigest()[:24]
    name = f"{digest}{suffix}"
    found = libraries().find(name)
    if found is None:
        with tempfile.TemporaryDirectory(dir=libraries().folder, prefix="making-") as folder:
            made = Path(folder) / name
            make(Path(folder), made)
            found = libraries().add(name, made.read_bytes())
    return found


@cache
def runtime_library() -> Path:
    """The emulator itself, compiled on first use."""
    compiler = find_compiler()

    def make(folder: Path, result: Path) -> None:
        name = ["-install_name", f"@rpath/{result.name}"] if _DARWIN else [f"-Wl,-soname,{result.name}"]
        compiler.run([*_RUNTIME_FLAGS, *_LINK_FLAGS, *name, *sorted(RUNTIME.glob("*.cpp")), "-o", result], folder)

    return _cached(["runtime", *_RUNTIME_FLAGS], ".so", make)


def _language(text: str) -> list[str]:
    """Which C++ a text is in."""
    return _METAL_4_FLAGS if "<metal_tensor>" in text or "<MetalPerformancePrimitives/" in text else []


def kernel_library(text: str, *, instrumented: bool, hostile: bool, counted: bool = False) -> Path:
    """A translated kernel as a shared library; `counted` with a counter for each of its blocks."""
    compiler = find_compiler()
    runtime = runtime_library()
    flags = _KERNEL_FLAGS + _language(text) + (_HOSTILE_MATH if hostile else _SAFE_MATH)
    flags += _COUNTED_FLAGS if counted else _INSTRUMENTED_FLAGS if instrumented else []

    def make(folder: Path, result: Path) -> None:
        source, code, assembly = (folder / f"kernel.{suffix}" for suffix in ("cpp", "ll", "s"))
        source.write_text(text, "utf-8")
        if hostile or counted:
            compiler.run([*flags, "-I", SHIM, "-S", "-emit-llvm", source.name, "-o", code], folder)
            for rewritten in [add_counters] * counted + [flush_halves] * hostile:
                code.write_text(rewritten(code.read_text("utf-8")), "utf-8")
            compiler.run(["-O2", "-fPIC", "-Wno-override-module", "-S", code, "-o", assembly], folder)
        else:
            compiler.run([*flags, "-I", SHIM, "-S", source.name, "-o", assembly], folder)
        assembly.write_text(annotate(assembly.read_text("utf-8")), "utf-8")
        origin = "@loader_path" if _DARWIN else "$ORIGIN"
        compiler.run([*_LINK_FLAGS, assembly, runtime, f"-Wl,-rpath,{origin}", "-o", result], folder)

    return _cached(["kernel", *flags, text], ".so", make)


def check_syntax(text: str, folder: Path, *, address_spaces: bool) -> str:
    """What the compiler says about a translated kernel; "" if nothing."""
    (folder / "kernel.cpp").write_text(text, "utf-8")
    flags = [
        *_KERNEL_FLAGS,
        *_language(text),
        *_SAFE_MATH,
        "-ferror-limit=0",
        *(["-DEMULATOR_LINT"] if address_spaces else []),
    ]
    flags += ["-O0"]  # what it says does not depend on it; zig has no -fsyntax-only
    try:
        find_compiler().run([*flags, "-I", SHIM, "-S", "kernel.cpp", "-o", "kernel.s"], folder)
    except CompileError as error:
        return str(error)
    return ""


@cache
def load(path: Path) -> ctypes.CDLL:
    """A library, loaded once."""
    if not _DARWIN and path != runtime_library():
        load(runtime_library())
    return ctypes.CDLL(str(path))
