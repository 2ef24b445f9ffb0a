"""What must be true of a wheel before anybody installs it: its content, size, and what its modules ask of a system."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.wheels.platforms import PLATFORMS

MOST_BYTES = 4_000_000
# Not for users: tests, C++ sources, and what only those need who write kernels.
UNWANTED = re.compile(r"(^|/)(tests|emulator)/|/cpu/\w+/.*\.(h|cpp)$|/cuda/launch/|__pycache__")
WANTED = {"billfish/__init__.py", "billfish/py.typed", "billfish/backends/cuda/gemm_small.cu"}  # a file of each kind
# What the system brings. libgcc_s comes with every glibc that has threads.
LINUX = re.compile(
    r"(lib(c|m|dl|pthread|rt|gcc_s)\.so\.\d|ld-linux-(x86-64|aarch64)\.so\.\d|libc\.musl-\w+\.so\.1|libc\.so)"
)
MACOS = re.compile(r"/usr/lib/libSystem\.B\.dylib")
WINDOWS = re.compile(r"(kernel32|ntdll|api-ms-win-crt-[\w-]+|ucrtbase|python3\d*)\.dll", re.IGNORECASE)


def check_wheel(path: Path) -> None:
    """Raise SystemExit with what is wrong."""
    _, _, python, abi, tag = path.stem.split("-")
    platform = PLATFORMS[tag]
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        modules = {name: archive.read(name) for name in names if name.endswith(platform.suffix)}
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path.name} has {path.stat().st_size} bytes; the limit is {MOST_BYTES}")
    if unwanted := [name for name in names if UNWANTED.search(name)]:
        raise SystemExit(f"{path.name} holds {unwanted[0]}, which no user needs")
    if lacks := WANTED.difference(names):
        raise SystemExit(f"{path.name} lacks {min(lacks)}")
    expected = ["_cpu", "_cuda"] if platform.has_cuda else ["_cpu"]
    if sorted(Path(name).name.split(".")[0] for name in modules) != expected:
        raise SystemExit(f"{path.name} has the modules {sorted(modules)}, not {expected}")
    look = {"Linux": check_elf, "Darwin": check_mach_o, "Windows": check_pe}[platform.system]
    for name, data in modules.items():
        look(f"{path.name}: {name}", data, tag, python, abi)
    if tag.startswith("manylinux"):
        check_glibc(path, tag)
    if abi == "abi3":
        _run("abi3audit", [sys.executable, "-m", "abi3audit", "--strict", str(path)])


def check_elf(name: str, data: bytes, tag: str, python: str, abi: str) -> None:
    """The processor, and the libraries."""
    from elftools.elf.elffile import ELFFile

    file = ELFFile(io.BytesIO(data))
    machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}[file["e_machine"]]
    needed = [item.needed for item in file.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    _require(name, tag.endswith(machine), f"is for {machine}")
    _require(name, not [library for library in needed if not LINUX.fullmatch(library)], f"needs {needed}")


def check_glibc(path: Path, tag: str) -> None:
    """auditwheel's word that no symbol is newer than the tag says."""
    shown = _run("auditwheel", [sys.executable, "-m", "auditwheel", "show", str(path)])
    given = re.search(r'platform\s+tag:\s*"manylinux_2_(\d+)_', shown)
    most = int(tag.split("_")[2])
    _require(path.name, given is not None and int(given[1]) <= most, f"needs a newer glibc: {shown}")


def check_mach_o(name: str, data: bytes, tag: str, python: str, abi: str) -> None:
    """The processor, the oldest macOS, the libraries, the names, and a signature, without which nothing runs."""
    import tempfile

    from macholib.mach_o import CPU_TYPE_NAMES, LC_BUILD_VERSION, LC_CODE_SIGNATURE, LC_LOAD_DYLIB
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        macho = MachO(file.name)
        symbols = SymbolTable(macho)
    (header,) = macho.headers
    _require(name, CPU_TYPE_NAMES.get(header.header.cputype) == "ARM64", "is not for arm64")
    commands = {command[0].cmd: command for command in header.commands}
    oldest = commands[LC_BUILD_VERSION][1].minos
    _require(name, (oldest >> 16, oldest >> 8 & 255) <= (11, 0), f"needs macOS {oldest >> 16}.{oldest >> 8 & 255}")
    _require(name, LC_CODE_SIGNATURE in commands, "is not signed")
    loaded = [command[2].rstrip(b"\0").decode() for command in header.commands if command[0].cmd == LC_LOAD_DYLIB]
    _require(name, all(map(MACOS.fullmatch, loaded)), f"needs {loaded}")
    # What no library has is looked up when it is first used, and the linker does not say that it is missing.
    late = [text.decode() for symbol, text in symbols.undefsyms if symbol.n_desc >> 8 & 255 == 0]
    missing = [text for text in late if not text.startswith(("_Py", "__Py"))]
    _require(name, not missing, f"uses {missing}, which no library and no Python has")


def check_pe(name: str, data: bytes, tag: str, python: str, abi: str) -> None:
    """The processor, the libraries, and that it is Python's stable library that a stable module uses."""
    import pefile

    file = pefile.PE(data=data)
    imports = [entry.dll.decode() for entry in file.DIRECTORY_ENTRY_IMPORT]
    _require(name, file.FILE_HEADER.Machine == pefile.MACHINE_TYPE["IMAGE_FILE_MACHINE_AMD64"], "is not for x86_64")
    _require(name, all(map(WINDOWS.fullmatch, imports)), f"needs {imports}")
    library = "python3.dll" if abi == "abi3" else f"python{python.removeprefix('cp')}.dll"
    _require(name, [item for item in imports if item.startswith("python")] == [library], f"needs {imports}")
    exports = [symbol.name.decode() for symbol in file.DIRECTORY_ENTRY_EXPORT.symbols if symbol.name]
    module = Path(name).name.split(".")[0]
    _require(name, f"PyInit_{module}" in exports, f"exports {exports[:5]}")


def _require(name: str, holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"{name} {otherwise}")


def _run(name: str, command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check_wheel(Path(argument))
        print(f"{argument}: good")
