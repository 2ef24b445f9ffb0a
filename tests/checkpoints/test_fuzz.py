"""Damaged checkpoints of each container, and as many models, are refused or load. See checkpoint_fuzzer.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 36  # `make attack` has more


@pytest.mark.promise("inputs", "a damaged file is refused or loads; it never crashes or hangs")
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory and counts it as Linux does")
@pytest.mark.parametrize("container", ["gguf", "safetensors", "model"])
def test_damaged_files_are_refused_or_load(tmp_path, container):
    script = Path(__file__).parents[1] / "support" / "checkpoint_fuzzer.py"
    command = [sys.executable, str(script), str(tmp_path), container, "0", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts.values()) == CASES
    # Damage that never shows, or always, would be no test.
    assert counts["loaded"] >= CASES / 20
    assert counts["refused"] >= CASES * 3 / 10
