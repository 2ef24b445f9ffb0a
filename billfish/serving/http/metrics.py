"""/metrics: what Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from billfish.serving.ipc.session import Host, ServerState

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Of EngineCounts: its name in Prometheus, and what it says. Those with _total are counters, the others gauges.
ENGINE = {
    "running": ("requests_running", "Requests that are being decoded."),
    "waiting": ("requests_waiting", "Requests in the queue."),
    "refused": ("requests_refused_total", "Requests that found the queue full."),
    "finished": ("requests_finished_total", "Finished requests, by finish_reason."),
    "steps": ("steps_total", "Steps of the engine; each runs one batch."),
    "generated_tokens": ("generated_tokens_total", "Tokens of answers."),
    "prompt_tokens": ("prompt_tokens_total", "Tokens of prompts, including cached ones."),
    "cached_tokens": ("cached_tokens_total", "Tokens of prompts that were not computed again."),
    "prefill_tokens": ("prefill_tokens_total", "Tokens that were read, not generated: again after a preemption, too."),
    "preemptions": ("preemptions_total", "How often a request lost its KV cache to earlier ones and went on later."),
    "drafts": ("drafts_total", "Steps of an answer that had a draft."),
    "drafted_tokens": ("drafted_tokens_total", "Tokens that were drafted."),
    "accepted_tokens": (
        "accepted_tokens_total",
        "Drafted tokens that were right. An answer has generated / (generated - accepted) tokens a step.",
    ),
    "captures": ("graph_captures_total", "CUDA graphs that were captured."),
    "cache_bytes": (
        "cache_bytes",
        "Part of the KV cache that holds tokens: of running requests, and of earlier ones for reuse, in bytes.",
    ),
    "cache_bytes_bound": (
        "cache_bytes_bound",
        "What the KV cache takes at most, in bytes.",
    ),
}

PAGES = "Pages of 64 positions of the KV cache. Shared ones are used by several requests or kept texts."
TIMES = {
    "first_token": "From a request's arrival in the queue to its first token, in the engine.",
    "between_tokens": "From each token of an answer to the next, in the engine.",
}


def metrics_text(host: Host) -> bytes:
    """All counts of the engine and of all fronts, in Prometheus' text format."""
    return text_of([*engine_metrics(host), *http_metrics(host)])


def engine_metrics_text(host: Host) -> bytes:
    """Those of the engine alone."""
    return text_of(engine_metrics(host))


def text_of(metrics: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    from prometheus_client import generate_latest  # here: importing it takes 50 ms

    return generate_latest(SimpleNamespace(collect=lambda: metrics))


def engine_metrics(host: Host) -> Iterator[Metric]:
    """The counts of an engine."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    counts = host.engine.counts()
    for field, (name, about) in ENGINE.items():
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        value = getattr(counts, field)
        if field != "finished":
            yield family(f"billfish_{name}", about, value)
            continue
        finished = family(f"billfish_{name}", about, labels=["reason"])
        for reason, count in value.items():
            finished.add_metric([reason], count)
        yield finished
    pages = GaugeMetricFamily("billfish_cache_pages", PAGES, labels=["state"])
    for state, count in counts.pages._asdict().items():
        pages.add_metric([state], count)
    yield pages
    for field, about in TIMES.items():
        times = getattr(counts.times, field)
        yield HistogramMetricFamily(f"billfish_{field}_time_seconds", about, times.buckets(), times.sum)


def http_metrics(state: ServerState) -> Iterator[Metric]:
    """The counts of HTTP answers."""
    from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

    answers = CounterMetricFamily(
        "billfish_http_responses", "HTTP answers by path and status.", labels=["path", "status"]
    )
    for (path, status), count in sorted(state.answers.items()):
        answers.add_metric([path, str(status)], count)
    yield answers
    about = "From a request to the first piece of its answer."
    yield SummaryMetricFamily("billfish_first_token_seconds", about, state.first_pieces, state.first_piece_seconds)
