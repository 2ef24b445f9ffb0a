"""The built site, made once for all tests of a run, and a browser to look at it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from build_cache import kept

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "site"))

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --force-prefers-reduced-motion"
QUIET = "--disable-background-networking --disable-component-update --disable-sync"


@cache
def built_site() -> Path:
    """The folder with the pages. They depend on docs/, on the README and on the code, whose docstrings they show."""
    files = [*(ROOT / "docs").rglob("*"), *(ROOT / "billfish").rglob("*.py"), ROOT / "README.md"]
    made_of = [(str(path), path.read_bytes()) for path in sorted(files) if path.is_file() and path.suffix != ".pyc"]
    return kept("site", made_of, _build)


def _build(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    command = [sys.executable, ROOT / "docs" / "site" / "build.py", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def browser(profile: Path, width: int = 1280, height: int = 1000) -> Any:
    """Chromium without a window, with a new profile; it keeps what it logs and which addresses it asks for."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS.split(), *QUIET.split(), f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(driver))
