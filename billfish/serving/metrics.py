"""/metrics: what Prometheus reads. Names, kinds and sentences are in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from billfish.serving.requests import EngineCounts

PREFIX = "billfish"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Of EngineCounts: its name in Prometheus, its kind, and what it says.
ENGINE = {
    "running": ("requests_running", "gauge", "Answers that are being generated."),
    "waiting": ("requests_waiting", "gauge", "Requests in the queue."),
    "refused": ("requests_refused_total", "counter", "Requests that found the queue full."),
    "finished": ("requests_finished_total", "counter", "Answers by the reason of their end."),
    "steps": ("steps_total", "counter", "Calls of the decoder."),
    "generated_tokens": ("generated_tokens_total", "counter", "Tokens of answers."),
    "prompt_tokens": ("prompt_tokens_total", "counter", "Tokens of prompts, with those that were cached."),
    "cached_tokens": ("cached_tokens_total", "counter", "Tokens of prompts that were not computed again."),
    "cache_bytes": ("cache_bytes", "gauge", "Keys and values that are held."),
    "cache_bytes_bound": ("cache_bytes_bound", "gauge", "What cache_bytes never exceeds."),
}


class Watch:
    """What the HTTP side counts. It is the loop's alone."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._firsts = 0
        self._first_seconds = 0.0

    def answered(self, path: str, status: int) -> None:
        """An HTTP answer has begun. path: of a route, not of a client."""
        self._answers[path, status] += 1

    def first_token(self, seconds: float) -> None:
        """The first piece has come, so long after its request was read."""
        self._firsts += 1
        self._first_seconds += seconds

    def text(self, counts: EngineCounts) -> str:
        """All of it, in Prometheus' text format."""
        return "\n".join([*_engine(counts), *self._http()]) + "\n"

    def _http(self) -> Iterator[str]:
        yield from _about("http_responses_total", "counter", "HTTP answers by path and status.")
        for (path, status), count in sorted(self._answers.items()):
            yield _sample("http_responses_total", count, path=path, status=status)
        yield from _about("first_token_seconds", "summary", "From a request to the first piece of its answer.")
        yield _sample("first_token_seconds_sum", round(self._first_seconds, 6))
        yield _sample("first_token_seconds_count", self._firsts)


def _engine(counts: EngineCounts) -> Iterator[str]:
    for field, (name, kind, about) in ENGINE.items():
        yield from _about(name, kind, about)
        value = getattr(counts, field)
        if field == "finished":
            yield from (_sample(name, count, reason=reason) for reason, count in value.items())
        else:
            yield _sample(name, value)


def _about(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {PREFIX}_{name} {about}", f"# TYPE {PREFIX}_{name} {kind}"]


def _sample(name: str, value: float, **labels: Any) -> str:
    inside = ",".join(f'{label}="{each}"' for label, each in labels.items())
    return f"{PREFIX}_{name}{'{' + inside + '}' if inside else ''} {value}"
