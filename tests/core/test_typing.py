"""Type checkers see real types in a user's program, and its mistakes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import typing
import venv
from pathlib import Path

import pytest

import billfish as bf
from billfish.checkpoints.write.export import TARGETS
from billfish.core import activations, arrays, format, mixture
from billfish.core import typing as names

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "typing"
Errors = dict[str, set[int]]  # the lines with errors, by the name of the program


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """A Python with nothing but these packages, billfish among them as a wheel would put it there.

    It stays in build/, and so does what mypy learns about the packages.
    """
    folder = ROOT / "build" / "tests" / "typing" / name
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in ("billfish", "ml_dtypes", "numpy", "typing_extensions", *packages):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        places = [Path(place) for place in spec.submodule_search_locations or [str(spec.origin)]]
        # An editable installation has a folder beside the sources, for what was compiled.
        source = next((place for place in places if (place / "__init__.py").is_file()), places[0])
        (site / source.name).unlink(missing_ok=True)
        (site / source.name).symlink_to(source)
    return folder


def bare_programs(names: list[str], folder: Path) -> list[Path]:
    """Copies of programs without the comments that silence `make lint`. They lie beside the environment: pyright looks
    into none."""
    copies = [folder.with_name(f"{folder.name}-programs") / name for name in names]
    for copy in copies:
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(re.sub(r"# type: ignore\S+  ", "", (PROGRAMS / copy.name).read_text()))
    return copies


def mypy(programs: list[Path], folder: Path) -> Errors:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={folder / 'cache'}"]
    run = subprocess.run(
        [*command, "--python-executable", folder / "bin" / "python", *programs],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found: Errors = {}
    for path, line in re.findall(r"^(\S+?):(\d+): error", run.stdout, re.MULTILINE):
        found.setdefault(Path(path).name, set()).add(int(line))
    return found


def pyright(programs: list[Path], folder: Path) -> Errors:
    """basedpyright, which brings its own node and needs no network, with pyright's own rules."""
    settings = {"typeCheckingMode": "standard", "include": [str(program) for program in programs]}
    project = folder / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", folder / "bin" / "python"]
    run = subprocess.run([*command, "-p", project], capture_output=True, text=True, check=False, cwd=folder)
    report = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] == len(programs), run.stdout + run.stderr
    found: Errors = {}
    for message in report["generalDiagnostics"]:
        if message["severity"] == "error":
            found.setdefault(Path(message["file"]).name, set()).add(message["range"]["start"]["line"] + 1)
    return found


@pytest.mark.full  # `make lint` has mypy look at the same programs, beside the package
@pytest.mark.parametrize("check", [mypy, pyright])
def test_a_users_program(check):
    """Not an error in the right one, and every mistake of the other."""
    lines = (PROGRAMS / "mistakes.py").read_text().splitlines()
    mistakes = {number for number, line in enumerate(lines, 1) if "  # " in line}
    assert len(mistakes) == 10
    folder = environment(f"{check.__name__}-torch-mlx", ("torch", "mlx"))
    assert check(bare_programs(["user.py", "mistakes.py"], folder), folder) == {"mistakes.py": mistakes}


@pytest.mark.full  # `make lint` has mypy look at this program, too, with torch and MLX there
@pytest.mark.parametrize("check", [mypy, pyright])
def test_a_user_without_torch_and_mlx(check):
    folder = environment(f"{check.__name__}-numpy", ())
    assert check(bare_programs(["numpy_alone.py"], folder), folder) == {}


def test_names_are_those_of_the_registries():
    assert set(typing.get_args(names.FormatName)) == set(bf.FORMATS)
    assert typing.get_args(names.Method) == format.METHODS
    assert typing.get_args(names.Activations) == activations.ACTIVATIONS
    assert typing.get_args(names.Gate) == mixture.GATES
    assert typing.get_args(names.FloatName) == tuple(arrays.FLOATS)
    assert set(typing.get_args(names.Layout)) == set(TARGETS)
    assert set(typing.get_args(names.Library)) == {adapter.kind for adapter in arrays.ADAPTERS} - {"cupy"}


def test_checkers_may_believe_the_package():
    assert (Path(bf.__file__).parent / "py.typed").is_file()


def test_the_package_shows_its_public_names_and_no_others():
    program = "import billfish as bf, json; print(json.dumps([dir(bf), bf.__all__]))"
    shown, public = json.loads(subprocess.check_output([sys.executable, "-c", program]))
    assert {name for name in shown if not (name.startswith("__") and name.endswith("__"))} == set(public)
    assert "__version__" in shown
