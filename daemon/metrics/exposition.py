"""The metrics in Prometheus's text format.

It is imported by the first scrape, because the import of `prometheus_client` would take a tenth of
the daemon's start.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache
from itertools import accumulate, chain, starmap
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...scheduler.record import Histogram
from .collector import Labels, Samples, families, sliced
from .families import FAMILIES, PREFIX

if TYPE_CHECKING:
    from ..core import Daemon

_KINDS: dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_process = ProcessCollector(registry=None)
_Key = tuple[tuple[Labels, Hashable], ...]


class Exposition:
    """Writes a daemon's families as text. A family whose samples are those of the last scrape
    keeps its text, because writing numbers and labels takes most of a scrape's time.
    """

    def __init__(self, daemon: Daemon):
        self._daemon = daemon
        self._texts: dict[str, tuple[_Key, bytes]] = {}

    async def scrape(self) -> bytes:
        """Return all families as text, each read just before it is written."""
        texts = chain(
            starmap(self._text, families(self._daemon)), map(_written, _process.collect())
        )
        return b"".join([text async for text in sliced(texts)])

    def _text(self, name: str, samples: Samples) -> bytes:
        key = tuple((labels, _key(value)) for labels, value in samples.items())
        before = self._texts.get(name)
        if before is not None and before[0] == key:
            return before[1]
        text = _written(_metric(name, samples))
        self._texts[name] = key, text
        return text


def _key(value: float | Histogram) -> Hashable:
    return (*value.counts, value.sum) if isinstance(value, Histogram) else value


def _written(metric: Metric) -> bytes:
    return generate_latest(_One(metric))


class _One(Collector):
    """A registry of one family, for `generate_latest`."""

    def __init__(self, metric: Metric):
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def _metric(name: str, samples: Samples) -> Metric:
    """Return a family with its samples."""
    family = FAMILIES[name]
    made = _KINDS[family.kind](PREFIX + name, family.doc.replace("`", ""), labels=family.labels)
    for labels, value in samples.items():
        assert len(labels) == len(family.labels), f"{name}{labels}"
        if isinstance(made, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            made.add_metric(labels, _buckets(value), value.sum)
        else:
            assert not isinstance(value, Histogram)
            made.add_metric(labels, value)
    return made


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    names = _bucket_names(tuple(histogram.bounds))
    return list(zip(names, accumulate(histogram.counts), strict=True))


@cache
def _bucket_names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(floatToGoString, bounds), "+Inf")
