"""/metrics of several models: what each engine counts, with the model's name as a label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from billfish.serving.http.metrics import http_metrics, text_of
from billfish.serving.ipc.session import ServerState

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from billfish.serving.models.pool_entry import Entry


def pool_metrics_text(state: ServerState, engines: Mapping[str, bytes], entries: Sequence[Entry]) -> bytes:
    """engines: the text of each loaded model's."""
    return text_of([*_labelled(engines), *_of_entries(entries), *http_metrics(state)])


def _labelled(engines: Mapping[str, bytes]) -> Iterator[Metric]:
    from prometheus_client.parser import text_string_to_metric_families

    found = dict[str, "Metric"]()
    for model, text in engines.items():
        for family in text_string_to_metric_families(text.decode()):
            samples = [sample._replace(labels={"model": model, **sample.labels}) for sample in family.samples]
            family.samples = [*found[family.name].samples, *samples] if family.name in found else samples
            found[family.name] = family
    yield from found.values()


def _of_entries(entries: Sequence[Entry]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    about = "Memory of a loaded model in bytes: weights, and the KV cache at most."
    memory = GaugeMetricFamily("billfish_model_bytes", about, labels=["model"])
    waiting = GaugeMetricFamily(
        "billfish_requests_waiting_for_load", "Requests that wait for a model.", labels=["model"]
    )
    loads = CounterMetricFamily("billfish_model_loads_total", "How often a model was loaded.", labels=["model"])
    for entry in entries:
        memory.add_metric([entry.name], 0 if entry.service is None else entry.size)
        waiting.add_metric([entry.name], entry.waiting)
        loads.add_metric([entry.name], entry.loads)
    yield from (memory, waiting, loads)
