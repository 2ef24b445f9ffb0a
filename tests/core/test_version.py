"""One version: billfish/core/version.py says it, pyproject.toml repeats it."""

from __future__ import annotations

import re
from pathlib import Path

import billfish as bf
from billfish.core import version


def test_the_package_has_the_version_that_the_code_has():
    # pyproject.toml has its own copy: how scikit-build-core reads a version from a file changed between its versions.
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.+)"$', project, re.MULTILINE) == [bf.__version__] == [version.__version__]
