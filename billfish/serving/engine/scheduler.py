"""Which prompts are read in a step, and how much of each: a long one stops neither the answers nor other prompts."""

from __future__ import annotations

from collections.abc import Sequence

from billfish.llm.kv_cache import shared_length
from billfish.serving.engine.jobs import Answer, Job
from billfish.serving.engine.kv_slots import Cuts, Slots


def is_being_read(job: Job, running: Sequence[Job], slots: Slots, cuts: Cuts) -> bool:
    """Whether a running answer will soon have read more of the job's prompt than any cache holds."""
    if not isinstance(job, Answer):
        return False
    if job.waits_for is not None:  # found in an earlier step
        reader, length = job.waits_for
        if not reader.finished and len(reader.slot.cache.tokens) < length:
            return True
    job.waits_for, most = None, slots.reuse(job.prompt, job.tenant)
    for other in running:
        if isinstance(other, Answer) and other.left > 0 and other.tenant == job.tenant:
            length = cuts.reusable(shared_length(other.prompt, job.prompt), len(job.prompt))
            if length > most:
                job.waits_for, most = (other, length), length
    return job.waits_for is not None


def share_out(jobs: Sequence[Job], bound: int, smallest: int) -> dict[Job, int]:
    """Who reads how many tokens in this step: about `bound` together, about `smallest` each at least. Who has waited
    longest comes first; what a short prompt does not need goes to the longer ones."""
    served = sorted(jobs, key=lambda job: job.turn)[: max(1, bound // smallest)]
    parts, left = dict.fromkeys(served, 0), bound
    for i, job in enumerate(sorted(served, key=lambda job: job.left)):
        parts[job] = job.part(max(0, left) // (len(served) - i))
        left -= parts[job]
    return parts
