"""Types the commands of commands.txt in a new folder and looks for what each must print. `make docs-commands` runs it.

python run.py BIN     BIN: where `billfish` and `python` of the installed package are
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

COMMANDS = Path(__file__).with_name("commands.txt")


class Command(NamedTuple):
    page: str
    text: str
    prints: tuple[str, ...]


def commands(script: str) -> list[Command]:
    """The commands of a script, each with the page that it is from."""
    found: list[Command] = []
    page = ""
    for line in script.splitlines():
        if line.startswith("page "):
            page = line.removeprefix("page ")
        elif line.startswith("$ "):
            found.append(Command(page, line.removeprefix("$ "), ()))
        elif line.startswith("> "):
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{line.removeprefix('> ')}")
        elif line and not line.startswith("#"):
            found[-1] = found[-1]._replace(prints=(*found[-1].prints, line))
    return found


def missing(command: Command, folder: Path, environment: dict[str, str]) -> tuple[list[str], str]:
    """What a command should have done and did not, and all that it printed."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    lacking = [repr(text) for text in command.prints if text not in done.stdout]
    return lacking + ([f"success, instead of status {done.returncode}"] if done.returncode else []), done.stdout


def main(binaries: Path, folder: Path) -> int:
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}
    environment.pop("PYTHONPATH", None)
    find = "import billfish as bf; print(bf.llm.default_model()); print(bf.__file__)"
    model, package = subprocess.check_output(
        [binaries / "python", "-c", find], env=environment, cwd=folder, text=True
    ).split()
    if binaries.parent not in Path(package).parents:
        print(f"billfish is {package}, not the one that was installed beside {binaries}")
        return 1
    environment["MODEL"] = model
    failed = 0
    script = commands(COMMANDS.read_text())
    for number, command in enumerate(script, 1):
        start = time.monotonic()
        lacking, output = missing(command, folder, environment)
        failed += bool(lacking)
        took = time.monotonic() - start
        print(
            f"{'FAILED' if lacking else 'ok':6} {number:2}/{len(script)} {took:5.1f} s  {command.text.splitlines()[0]}",
            flush=True,
        )
        if lacking:
            print(f"{output}\nlacks {', '.join(lacking)}: see {command.page}", flush=True)
    print(f"{len(script) - failed} of {len(script)} commands print what their pages say")
    return 1 if failed else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        raise SystemExit(main(Path(sys.argv[1]).absolute(), Path(scratch)))
