"""One version: billfish/core/version.py says it; packages and releases take it from there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import billfish as bf
from billfish.core import version

ROOT = Path(__file__).parents[2]


def test_the_package_reads_the_version_from_the_code():
    project = (ROOT / "pyproject.toml").read_text()
    (source,) = re.findall(r'^metadata\.version = .*input = "(.+)"', project, re.MULTILINE)
    assert ROOT / source == Path(version.__file__)
    assert "\nversion = " not in project
    assert bf.__version__ == version.__version__


def test_a_tag_is_compared_with_the_version_of_the_code():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (command,) = re.findall(r"v\$\((sed .*)\)", workflow)
    assert subprocess.check_output(command, shell=True, cwd=ROOT, text=True) == f"{bf.__version__}\n"
