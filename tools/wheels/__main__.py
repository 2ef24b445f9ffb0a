"""`make wheels`: wheels for every platform, and the source distribution, into dist/."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tools.wheels.build import ROOT, compile_modules
from tools.wheels.check import check_wheel
from tools.wheels.pack import read_pure_wheel, write_wheel
from tools.wheels.platforms import PLATFORMS, PYTHON_TAGS, choose_pythons


def main() -> None:
    """Build, pack and check."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("--platform", action="append", choices=PLATFORMS, help="a platform tag (default: all)")
    parser.add_argument("--python", action="append", default=[], help="a Python for its wheels (default: those found)")
    parser.add_argument("--only", action="append", choices=PYTHON_TAGS, default=[], help="a Python tag (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for wheels (default: dist)")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "wheels", help="objects (default: build/wheels)")
    parser.add_argument("--levels", default="all", help="ISA levels, for tests of this tool (default: all)")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one for each core)")
    parser.add_argument("--no-sdist", action="store_true", help="only wheels")
    arguments = parser.parse_args()
    arguments.build, arguments.out = arguments.build.resolve(), arguments.out.resolve()
    pythons = choose_pythons(arguments.python, arguments.only)
    if not arguments.no_sdist:
        print(build_sdist(arguments.out).name, flush=True)
    files = read_pure_wheel()
    compiled: dict[str, Path] = {}  # by target
    for tag in arguments.platform or PLATFORMS:
        platform = PLATFORMS[tag]
        for python in pythons:
            start, used = time.monotonic(), processor_seconds()
            build = arguments.build / tag / python.tags[0]
            modules = compile_modules(
                platform,
                python,
                build,
                levels=arguments.levels,
                jobs=arguments.jobs,
                levels_of=compiled.get(platform.kernels),
                engine_of=compiled.get(platform.target),
            )
            compiled.setdefault(platform.kernels, build)
            compiled.setdefault(platform.target, build)
            wheel = write_wheel(files, modules, platform, python, arguments.out)
            check_wheel(wheel)
            size, seconds = wheel.stat().st_size / 1e6, time.monotonic() - start
            used = processor_seconds() - used
            print(f"{wheel.name}  {size:.2f} MB  {seconds:.0f} s, {used:.0f} s of processor time", flush=True)


def processor_seconds() -> float:
    """What all finished child processes have used."""
    times = os.times()
    return times.children_user + times.children_system


def build_sdist(out: Path) -> Path:
    """The sources, from which pip builds where no wheel fits. git is not needed for it."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(out)!r}))"
    environment = {"SOURCE_DATE_EPOCH": "315532800"} | os.environ
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("The source distribution could not be built.")
    return out / done.stdout.split()[-1]


if __name__ == "__main__":
    main()
