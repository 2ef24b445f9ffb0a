"""How wheels are packed and checked; what compiles them is in `make wheels` and `make test-wheels`."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tools.wheels import platforms, prove
from tools.wheels.check import UNWANTED, WANTED, WINDOWS, check_mach_o, check_wheel
from tools.wheels.pack import read_pure_wheel, write_wheel
from tools.wheels.platforms import PLATFORMS, Python, choose_pythons, find_pythons, python_candidates

FILES = {
    "billfish/__init__.py": b"x = 1\n",
    "billfish-1.0.dist-info/METADATA": b"Name: billfish\n",
    "billfish-1.0.dist-info/WHEEL": b"Tag: py3-none-any\n",
}
OLD, STABLE = (Python(version, "python", "include") for version in ((3, 10), (3, 13)))
LINUX, WIN = PLATFORMS["manylinux_2_28_aarch64"], PLATFORMS["win_amd64"]


def packed(folder: Path, python: Python = STABLE, platform: str = "manylinux_2_28_aarch64", size: int = 10) -> Path:
    """A wheel of two modules without sense."""
    modules = []
    for name in ("_cpu", "_cuda"):
        path = folder / f"{name}{python.module_suffix(PLATFORMS[platform])}"
        path.write_bytes(hashlib.sha256(name.encode()).digest() * size)
        modules.append(path)
    return write_wheel(FILES, modules, PLATFORMS[platform], python, folder / "dist")


def test_names_of_wheels_and_modules(tmp_path: Path) -> None:
    assert packed(tmp_path).name == "billfish-1.0-cp312-abi3-manylinux_2_28_aarch64.whl"
    assert packed(tmp_path, OLD, "win_amd64").name == "billfish-1.0-cp310-cp310-win_amd64.whl"
    suffixes = [python.module_suffix(platform) for python in (OLD, STABLE) for platform in (LINUX, WIN)]
    assert suffixes == [".so", ".pyd", ".abi3.so", ".pyd"]


def test_record_names_every_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(packed(tmp_path)) as archive:
        record = archive.read("billfish-1.0.dist-info/RECORD").decode()
        rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(record))}
        assert set(rows) == set(archive.namelist())
        for name, (digest, size) in rows.items():
            if digest:
                data = archive.read(name)
                expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                assert (digest, int(size)) == (f"sha256={expected}", len(data))
        assert b"Tag: cp312-abi3-manylinux_2_28_aarch64\n" in archive.read("billfish-1.0.dist-info/WHEEL")
        assert "billfish/backends/cpu/_cpu.abi3.so" in rows
        assert archive.namelist()[-1].startswith("billfish-1.0.dist-info/")


def test_the_same_bytes_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert packed(tmp_path / "a").read_bytes() == packed(tmp_path / "b").read_bytes()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    with zipfile.ZipFile(packed(tmp_path / "a")) as archive:
        assert {member.date_time for member in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_a_large_wheel_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path)
    with path.open("ab") as file:
        file.truncate(5_000_000)
    with zipfile.ZipFile(path, "a") as archive:  # a zip file is read from its end
        archive.writestr("billfish/backends/cpu/_cpu.abi3.so", b"")
    with pytest.raises(SystemExit, match="4000000"):
        check_wheel(path)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("billfish/backends/emulator/compiler.py", False),
        ("billfish/backends/cpu/gemm/tiles.h", False),
        ("billfish/backends/cuda/launch/bind.cpp", False),
        ("tests/test_imports.py", False),
        ("billfish/backends/cuda/gemm_small.cu", True),
        ("billfish/backends/cpu/backend.py", True),
    ],
)
def test_what_a_wheel_holds(name: str, wanted: bool) -> None:
    assert (UNWANTED.search(name) is None) == wanted


@pytest.mark.full
@pytest.mark.compile
@pytest.mark.parametrize("name", ["PyLong_Type", "missing"])
def test_a_macos_module_finds_every_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("macholib")
    source, module = tmp_path / "_cpu.c", tmp_path / "_cpu.so"
    source.write_text(f"extern int {name}; int PyInit__cpu(void) {{ return {name}; }}")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos.11.0", "-shared", "-undefined"]
    subprocess.run([*command, "dynamic_lookup", "-o", str(module), str(source)], check=True)
    check = partial(check_mach_o, "_cpu", module.read_bytes(), "macosx_11_0_arm64", "cp312", "abi3")
    if name == "missing":
        with pytest.raises(SystemExit, match="_missing"):
            check()
    else:
        check()


def test_what_windows_brings() -> None:
    libraries = ["KERNEL32.dll", "api-ms-win-crt-heap-l1-1-0.dll", "python3.dll", "python310.dll"]
    assert all(map(WINDOWS.fullmatch, libraries))
    assert not any(map(WINDOWS.fullmatch, ["VCRUNTIME140.dll", "libstdc++-6.dll", "libc++.dll"]))


def test_pythons_of_this_machine() -> None:
    pythons = find_pythons()
    assert len({python.tags for python in pythons}) == len(pythons)
    assert all(Path(python.include, "Python.h").is_file() for python in pythons)


def test_given_pythons_are_the_only_ones() -> None:
    assert python_candidates(["python3.12"]) == ["python3.12"]
    assert len(python_candidates()) > 0


def stand_ins(*minors: int) -> Callable[[Sequence[str]], list[Python]]:
    """find_pythons of a machine that has these versions."""
    return lambda given: [Python((3, minor), f"python3.{minor}", "include") for minor in minors]


def test_a_missing_python_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "find_pythons", stand_ins(11, 13))
    for chosen in ([], ["cp310", "cp312"]):
        with pytest.raises(SystemExit, match=r"3\.10 .*Python\.h.*python3\.10-dev.*PYTHONS='cp311 cp312'"):
            choose_pythons([], chosen)
    assert [python.tags[0] for python in choose_pythons([], ["cp312", "cp311"])] == ["cp311", "cp312"]


def test_given_pythons_need_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "find_pythons", stand_ins(13))
    assert [python.version for python in choose_pythons(["mine"])] == [(3, 13)]
    monkeypatch.setattr(platforms, "find_pythons", stand_ins())
    with pytest.raises(SystemExit, match=r"3\.10 and no 3\.11 and no 3\.12 or later .* in mine"):
        choose_pythons(["mine"])


def test_which_python_takes_which_wheel() -> None:
    stable, old = Path("billfish-1.0-cp312-abi3-win_amd64.whl"), Path("billfish-1.0-cp310-cp310-win_amd64.whl")
    assert [prove.fits(stable, (3, minor)) for minor in (10, 11, 12, 14)] == [False, False, True, True]
    assert [prove.fits(old, (3, minor)) for minor in (10, 11, 12)] == [True, False, False]


def test_tags_that_a_foreign_python_takes_beside_its_own() -> None:
    assert prove.older_tags("musllinux_1_2_aarch64") == ["musllinux_1_1_aarch64"]
    tags = prove.older_tags("manylinux_2_28_x86_64")
    assert (tags[0], tags[-2:]) == ("manylinux_2_27_x86_64", ["manylinux_2_17_x86_64", "manylinux2014_x86_64"])
    assert prove.older_tags("win_amd64") == []


def test_a_runner_without_a_wheel_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--runner", sys.executable, "--platform", "win_amd64"]
    monkeypatch.setattr(sys, "argv", ["prove", str(tmp_path), *options])
    with pytest.raises(SystemExit, match=r"No wheel for win_amd64.*make wheels"):
        prove.main()


@pytest.mark.process
def test_only_the_answer_of_the_last_command_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code, good in (("print('Paris')", True), ("print('Rome')", False), ("print('Paris'); exit(3)", False)):
        assert prove.take({"run": [sys.executable, "-c", code]}, str(tmp_path), "wheel") == good
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == ["good", "FAILED", "FAILED"]


@pytest.mark.process
def test_a_proof_takes_any_bytes_and_gives_no_input(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdin.read() + 'Paris', flush=True); os.write(2, b'\\xb7')"  # a dot on Windows
    assert prove.take({"run": [sys.executable, "-c", code]}, str(tmp_path), "wheel")


@pytest.mark.process
def test_a_runner_that_starts_no_python_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = f"{sys.executable} -c 'import sys; sys.exit(\"no such machine\")'"
    monkeypatch.setattr(sys, "argv", ["prove", str(tmp_path), "--runner", runner, "--platform", "win_amd64"])
    with pytest.raises(SystemExit, match=r"does not start a Python:\nno such machine"):
        prove.main()


@pytest.mark.full
@pytest.mark.process
def test_the_files_of_a_wheel_are_the_package() -> None:
    names = set(read_pure_wheel())
    assert [name for name in names if UNWANTED.search(name)] == []
    assert names >= WANTED


def test_a_wheel_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"lacks billfish/backends/cuda/gemm_small\.cu"):
        check_wheel(packed(tmp_path))
