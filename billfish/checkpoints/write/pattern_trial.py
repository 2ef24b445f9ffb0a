"""Tries regular expressions in a process of its own, which can be ended: one may take for ever on a name.

`python pattern_trial.py` is that process. It reads JSON, [[pattern, ...], [name, ...]], and writes a line for each
pattern once it has searched all names.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable
from typing import IO

SECONDS = 5.0  # for one pattern and all names
QUANTIFIERS = "*+?{"  # without any of them a pattern takes no longer than a name is long


def _put_lines(stream: IO[bytes], done: queue.Queue[bytes]) -> None:
    for line in stream:
        done.put(line)


def endless_pattern(patterns: Iterable[str], names: Collection[str]) -> str | None:
    """The first pattern that does not come to an end within SECONDS; None if all do."""
    doubtful = [pattern for pattern in patterns if any(sign in pattern for sign in QUANTIFIERS)]
    if not doubtful or not sys.executable:
        return None
    command = [sys.executable, "-I", "-S", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        done: queue.Queue[bytes] = queue.Queue()
        reader = threading.Thread(target=_put_lines, args=(process.stdout, done), daemon=True)
        reader.start()
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps([doubtful, [*names]]).encode())
            for pattern in doubtful:
                try:
                    done.get(timeout=SECONDS)
                except queue.Empty:
                    return pattern
        finally:
            process.kill()
            reader.join()
    return None


def main() -> None:
    patterns, names = json.load(sys.stdin)
    for pattern in patterns:
        search = re.compile(pattern).search
        for name in names:
            search(name)
        print(flush=True)


if __name__ == "__main__":
    main()
