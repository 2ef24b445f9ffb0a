"""Makes the modules of benchmarks/ importable: some of them write a page's tables, and so know how a row looks."""

from __future__ import annotations

import sys

from pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
