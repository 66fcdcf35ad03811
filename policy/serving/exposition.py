"""A server's counts in Prometheus' text format."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from rollflow.policy.serving.batcher import Batcher
from rollflow.policy.serving.shelf import Shelf
from rollflow.policy.serving.tally import Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LABELS = ("policy", "version")
_COUNTERS: dict[str, tuple[str, Callable[[Batcher], float]]] = {
    "rollflow_serve_actions": ("actions chosen", lambda batcher: batcher.tally.acted.value),
    "rollflow_serve_failed": ("requests whose forward pass failed", lambda batcher: batcher.tally.failed.value),
    "rollflow_serve_refused": ("requests refused since too many wait", lambda batcher: batcher.tally.refused.value),
}
_GAUGES: dict[str, tuple[str, Callable[[Batcher], float]]] = {
    "rollflow_serve_waiting": ("requests that wait for a batch", lambda batcher: batcher.num_waiting),
    "rollflow_serve_sessions": ("sessions with a memory", lambda batcher: batcher.num_sessions),
}
_HISTOGRAMS: dict[str, tuple[str, Callable[[Batcher], Histogram]]] = {
    "rollflow_serve_batch_size": ("requests in a forward pass", lambda batcher: batcher.tally.batch_sizes),
    "rollflow_serve_batch_seconds": ("time of a forward pass", lambda batcher: batcher.tally.batch_seconds),
}


def exposition(shelf: Shelf) -> bytes:
    """All counts of a shelf's policies, by name and version."""
    registry = CollectorRegistry()
    registry.register(_Counts(shelf))
    return generate_latest(registry)


class _Counts:
    """Collector of a shelf's counts."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def collect(self) -> Iterator[Any]:
        """The families of metrics."""
        batchers = [
            ((name, version), batcher)
            for name in self._shelf.names
            for version, batcher in self._shelf.versions(name).items()
        ]
        for name, (text, count) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, batcher in batchers:
                counter.add_metric(labels, count(batcher))
            yield counter
        for name, (text, level) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, batcher in batchers:
                gauge.add_metric(labels, level(batcher))
            yield gauge
        for name, (text, values) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            for labels, batcher in batchers:
                histogram = values(batcher)
                family.add_metric(labels, list(_cumulated(histogram)), histogram.total)
            yield family


def _cumulated(histogram: Histogram) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.buckets, strict=True):
        total += count
        yield bound, total
