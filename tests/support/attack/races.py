"""Processes that write one output at the same time: one of them does, to the byte, and the others say who."""

from __future__ import annotations

import re
from typing import Any

from writer_worker import REFUSED, ask

from attack.rounds import Rounds, two_models


def races(count: int, seed: int = 0) -> Rounds:
    """So many rounds of two or three processes with sources and settings of their own."""
    with two_models() as (sources, folder):
        told = ask("race", sources, folder, count, seed)
    row = Rounds("races", count)
    for number, found in enumerate(told["rounds"]):
        row.accepted += found["statuses"].count(0)
        row.refused += found["statuses"].count(REFUSED)
        row.worst_seconds = max(row.worst_seconds, found["seconds"])
        if why := _mistake(found, told["expected"]):
            row.failures.append(f"races({count}, {seed}), round {number}: {why}")
    return row


def _mistake(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What is wrong with a round; nothing if all is right."""
    statuses, processes = found["statuses"], found["processes"]
    if sorted(statuses) != [0] + [REFUSED] * (len(statuses) - 1):
        return f"statuses {statuses}, {found['messages']}"
    winner = statuses.index(0)
    if found["found"] != expected[found["wanted"][winner]]:
        return f"{found['wanted'][winner]} is not what is there"
    for i, message in enumerate(found["messages"]):
        others = "|".join(str(process) for j, process in enumerate(processes) if j != i)
        if i != winner and not re.search(rf"process ({others}) \((quantize|convert)\) is writing| exists", message):
            return f"it is not said who won: {message}"
    return ""
