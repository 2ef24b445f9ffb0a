"""Benchmarks, each a module: `python -m benchmarks.NAME --help`, from a checkout."""

import sys
from pathlib import Path

# `python -m` puts the checkout first, where billfish has no compiled modules; an installed billfish has them.
if sys.argv[:1] == ["-m"] and Path(sys.path[0]) == Path(__file__).parents[1]:
    sys.path.append(sys.path.pop(0))
