"""What is fed in a step: a token of each answer, and prompts in the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence

from billfish.serving.engine.jobs import Answer, Job
from billfish.serving.engine.kv_slots import Cuts
from billfish.serving.engine.prefix_index import PrefixIndex


def share_out(jobs: Sequence[Job], budget: int, smallest: int) -> dict[Job, int]:
    """How many tokens each job is fed in this step, of those that are fed at all. jobs: first come, first served.

    Each answer gets its next token. Prompts get about `budget` tokens together, and each `smallest` at least: the first
    one is read as far as possible, and what it leaves goes to the next.
    """
    parts, left = dict[Job, int](), max(budget, smallest)
    for job in jobs:
        if job.decodes:
            parts[job] = 1
        elif job.left > 0 and left >= smallest:
            parts[job] = job.part(left)
            left -= parts[job]
    return parts


class PromptsInReading:
    """Prompts that are being read. One that begins alike waits for the rest, instead of reading it a second time."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts, self._index = cuts, PrefixIndex[Answer]()

    def add(self, job: Answer) -> None:
        self._index.extend(job, job.hashes)

    def remove(self, job: Answer) -> None:
        self._index.cut(job, 0)

    def has_more_of(self, job: Answer, cached: int) -> bool:
        """Whether somebody will soon have read more of the job's prompt than the `cached` tokens that a cache holds."""
        job.waits_for = None
        for blocks, readers in self._index.longest(job.hashes):
            length = self._cuts.reusable(blocks * self._cuts.smallest, len(job.prompt))
            if length <= cached:
                break
            reader = next((reader for reader in readers if len(reader.slot.cache.tokens) < length), None)
            if reader is not None:
                job.waits_for = reader, length
                break
        return job.waits_for is not None

    def still_waits(self, job: Answer) -> bool:
        """Whether the one that the job waits for, as found in an earlier step, is still reading."""
        if job.waits_for is None:
            return False
        reader, length = job.waits_for
        return bool(self._index.hashes(reader)) and len(reader.slot.cache.tokens) < length
