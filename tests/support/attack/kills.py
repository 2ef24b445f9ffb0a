"""Processes that are ended at random moments: the run that comes to its end leaves what an undisturbed one does."""

from __future__ import annotations

from typing import Any

from writer_worker import INTERRUPTED, REFUSED, SIGNALS, ask

from attack.rounds import Rounds, two_models

ENDED = {INTERRUPTED, *(-signal for signal in SIGNALS)}


def kills(count: int, seed: int = 0) -> Rounds:
    """So many signals (SIGKILL, SIGTERM, SIGINT), over as many outputs as it takes."""
    with two_models() as (sources, folder):
        told = ask("kill-at-random", sources, folder, count, seed)
    row = Rounds("kills")
    for number, found in enumerate(told["rounds"]):
        ended = sum(status in ENDED for status in found["statuses"])
        row.cases += ended
        row.refused += ended
        row.worst_seconds = max(row.worst_seconds, found["seconds"])
        if why := _mistake(found, told["expected"]):
            row.failures.append(f"kills({count}, {seed}), output {number}: {why}")
        else:
            row.accepted += 1
    return row


def _mistake(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What is wrong with an output; nothing if all is right."""
    *earlier, last = found["statuses"]
    # REFUSED: the signal came when all was done, and the next run says that the output exists.
    if not set(earlier) <= ENDED or last not in ((0, REFUSED) if earlier else (0,)):
        return f"statuses {found['statuses']}: {found['message']}"
    return "" if found["found"] == expected[found["wanted"]] else f"{found['wanted']} is not what is there"
