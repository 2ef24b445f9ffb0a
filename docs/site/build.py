"""Builds the site: python docs/site/build.py FOLDER. A warning is an error, and nothing is fetched from anywhere."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main

HERE = Path(__file__).parent


def build(out: Path) -> int:
    """The exit status. Pages are always read anew: the reference and the page "Bits" depend on all of the code."""
    with tempfile.TemporaryDirectory() as doctrees:
        options = ["--quiet", "--fail-on-warning", "--keep-going", "--builder", "html"]
        return main([*options, "--conf-dir", str(HERE), "--doctree-dir", doctrees, str(HERE.parent), str(out)])


if __name__ == "__main__":
    status = build(Path(sys.argv[1]))
    if not status:
        print(f"The site is built. Open {Path(sys.argv[1], 'index.html').absolute()}")
    sys.exit(status)
