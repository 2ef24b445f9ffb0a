"""Compile billfish's modules for one platform and Python, with the clang of the PyPI package ziglang."""

from __future__ import annotations

import importlib.util
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

from tools.wheels.platforms import Platform, Python

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# glibc's pthread_exit, by which Python ends daemon threads, unwinds them with libgcc_s. Frames of a module that brings
# another unwinder would be taken for something else, so modules for glibc use that one, too. To link with it, its
# functions' names are enough.
UNWINDER = [
    "_Unwind_Backtrace",
    "_Unwind_DeleteException",
    "_Unwind_FindEnclosingFunction",
    "_Unwind_Find_FDE",
    "_Unwind_ForcedUnwind",
    "_Unwind_GetCFA",
    "_Unwind_GetDataRelBase",
    "_Unwind_GetGR",
    "_Unwind_GetIP",
    "_Unwind_GetIPInfo",
    "_Unwind_GetLanguageSpecificData",
    "_Unwind_GetRegionStart",
    "_Unwind_GetTextRelBase",
    "_Unwind_RaiseException",
    "_Unwind_Resume",
    "_Unwind_Resume_or_Rethrow",
    "_Unwind_SetGR",
    "_Unwind_SetIP",
]

# Of Apple's linker, zig's knows neither bundles, where Python takes libraries as well, nor nanobind's list of the names
# that Python will have, so that all unknown names are left to be found by Python's.
MACOS_LINKER = """
for word; do
  shift
  case $word in -bundle) word=-dynamiclib;; -Wl,@*) word=-Wl,-undefined,dynamic_lookup;; esac
  set -- "$@" "$word"
done"""


def zig() -> str:
    """The compiler's path."""
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("ziglang is not installed. Run: pip install -r tools/wheels/requirements.txt")
    return str(Path(found.submodule_search_locations[0], "zig"))


def compile_modules(
    platform: Platform,
    python: Python,
    build: Path,
    *,
    levels: str = "all",
    jobs: int | None = None,
    levels_of: Path | None = None,
    engine_of: Path | None = None,
) -> list[Path]:
    """The extension modules, in `build`. levels_of, engine_of: earlier builds with objects that serve here."""
    tools = build.parent / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    toolchain = _write_toolchain(platform, tools)
    include = _write_headers(python, build)
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "wheels" / "zig-cache")}
    environment["ZIG_LOCAL_CACHE_DIR"] = environment["ZIG_GLOBAL_CACHE_DIR"]
    nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True).strip()
    defines = {
        "CMAKE_TOOLCHAIN_FILE": toolchain,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": _program("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "BILLFISH_PYTHON_VERSION": "{}.{}".format(*python.version),
        "Python_INCLUDE_DIR": include,
        "nanobind_DIR": nanobind,
        "SKBUILD_SOABI": f"cpython-{python.version[0]}{python.version[1]}-{platform.processor}",
        "SKBUILD_SOSABI": "" if platform.system == "Windows" else "abi3",
        "SKBUILD_SABI_COMPONENT": "Development.SABIModule" if python.stable else "",
        "BILLFISH_LEVELS": levels,
        "BILLFISH_LEVELS_OF": levels_of or "",
        "BILLFISH_ENGINE_OF": engine_of or "",
        "BILLFISH_MODULE_SUFFIX": python.module_suffix(platform),
    }
    if platform.system == "Windows":
        name = "python3" if python.stable else "python{}{}".format(*python.version)
        library = _import_library(name, Path(nanobind), build)
        defines["Python_LIBRARY"] = library
    if "linux-gnu" in platform.target:
        defines["CMAKE_MODULE_LINKER_FLAGS"] = _unwinder(platform, tools, environment)
    settings = [f"-D{key}={value}" for key, value in defines.items()]
    _run([_program("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *settings], environment)
    _run([_program("ninja"), "-C", str(build), *([f"-j{jobs}"] if jobs else [])], environment)
    return sorted(build.glob(f"_c*{python.module_suffix(platform)}"))


def _program(name: str) -> str:
    """A program of this environment, or of the PATH."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.exists() else name


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-20000:], file=sys.stderr)
        raise SystemExit(f"failed: {shlex.join(command)}")


def _write_toolchain(platform: Platform, tools: Path) -> str:
    """A file for CMake, and the programs that it names: zig with the target, as commands of one word."""
    # Paths of this machine are not to be in the modules: the same source gives the same bytes everywhere.
    flags = f"-g0 -ffile-prefix-map={ROOT}=. -ffile-prefix-map={Path(zig()).parent}=zig -fno-sanitize=undefined"
    flags += " -fomit-frame-pointer"  # zig keeps it, which takes a register from the kernels
    choose = f'case "$*" in *-DBILLFISH_ISA=*) target={platform.kernels};; *) target={platform.target};; esac'
    # CMake asks what compiler it has by linking a program, for which zig would compile a libc++ of its own.
    choose += '\ncase "$*" in *CompilerId.cpp*) set -- -c "$@";; esac'
    if platform.system == "Darwin":
        choose += MACOS_LINKER
    # nanobind's headers take <cstdio> for granted, which libc++ leaves out of others.
    commands = {
        "cxx": f'{choose}\nexec {shlex.quote(zig())} c++ -target "$target" {flags} -include stdio.h',
        "cc": f"exec {shlex.quote(zig())} cc -target {platform.target} {flags}",
        "ar": f"exec {shlex.quote(zig())} ar",
        "ranlib": f"exec {shlex.quote(zig())} ranlib",
        "rc": f"exec {shlex.quote(zig())} rc",
    }
    for name, command in commands.items():
        path = tools / name
        path.write_text(f'#!/bin/sh\n{command} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    lines = [
        f"set(CMAKE_SYSTEM_NAME {platform.system})",
        f"set(CMAKE_SYSTEM_PROCESSOR {platform.processor})",
        f"set(CMAKE_C_COMPILER {tools}/cc)",
        f"set(CMAKE_CXX_COMPILER {tools}/cxx)",
        f"set(CMAKE_AR {tools}/ar)",
        f"set(CMAKE_RANLIB {tools}/ranlib)",
        f"set(CMAKE_RC_COMPILER {tools}/rc)",
        "set(BILLFISH_ZIG ON)",
        # Questions about the compiler need no program that runs; linking one would compile libc++ first.
        "set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)",
        "set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)",
        "set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)",
        "set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)",
        "set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)",
    ]
    if platform.system == "Darwin":
        lines += ["set(CMAKE_OSX_DEPLOYMENT_TARGET 11.0)", 'set(CMAKE_OSX_SYSROOT "")']
        lines += [f"set(CMAKE_{name}_PROGRAM true)" for name in ("INSTALL_NAME_TOOL", "OTOOL")]
        lines += ["set(CMAKE_INSTALL_NAME_TOOL true)"]
    path = tools / "toolchain.cmake"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _write_headers(python: Python, build: Path) -> str:
    """Python's headers with the pyconfig.h of all platforms in place of this machine's."""
    include = build / "include"
    include.mkdir(parents=True, exist_ok=True)
    for header in Path(python.include).iterdir():
        link = include / header.name
        if not link.exists():
            link.symlink_to(HERE / "pyconfig.h" if header.name == "pyconfig.h" else header)
    return str(include)


def _import_library(name: str, nanobind: Path, build: Path) -> str:
    """What Windows modules are linked with to find the names of `name`.dll. nanobind lists Python's names for macOS."""
    lines = (nanobind / "darwin-ld-cpython.sym").read_text().split("\n")
    names = [line.removeprefix("-U _") for line in lines if line.startswith("-U _")]
    definition, library = build / f"{name}.def", build / f"{name}.lib"
    definition.write_text(f"LIBRARY {name}.dll\nEXPORTS\n" + "".join(f"  {symbol}\n" for symbol in names))
    _run([zig(), "dlltool", "-m", "i386:x86-64", "-d", str(definition), "-l", str(library)], dict(os.environ))
    return str(library)


def _unwinder(platform: Platform, tools: Path, environment: dict[str, str]) -> str:
    """A stand-in for libgcc_s.so.1 to link with."""
    source, library = tools / "unwinder.c", tools / "libgcc_s.so.1"
    if not library.exists():
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in UNWINDER))
        options = ["-shared", "-nostdlib", "-Wl,-soname,libgcc_s.so.1", "-o", str(library), str(source)]
        _run([zig(), "cc", "-target", platform.target, *options], environment)
    return str(library)
