"""1,000 damaged checkpoints: each gives a CheckpointError or loads. See checkpoint_fuzzer.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 1000
PROCESSES = 2


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory and counts it as Linux does")
@pytest.mark.parametrize("part", range(PROCESSES))
def test_damaged_files_are_refused_or_load(tmp_path, part):
    first, last = (CASES * i // PROCESSES for i in (part, part + 1))
    script = Path(__file__).with_name("checkpoint_fuzzer.py")
    command = [sys.executable, str(script), str(tmp_path), str(first), str(last)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts.values()) == last - first
    # Damage that never shows, or always, would be no test.
    assert counts["loaded"] >= 20
    assert counts["refused"] >= 100
