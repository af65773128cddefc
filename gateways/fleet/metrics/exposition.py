"""The program that writes the metrics of a fleet as one text, a child process of the entry.

Parsing and writing the texts of many nodes takes seconds of CPU time, and the entry's event loop
passes on tokens meanwhile. The child reads a `ScrapedTexts` and writes the text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from .families import FAMILIES, NODE_UP, PREFIX
from .scraped import Samples, ScrapedTexts

NODE_LABEL = "node"
CHILD_NICE = 5
"""On a busy machine, the tokens that the entry passes on come first."""
_KINDS: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class FleetFamilies(Collector):
    """The families of the entry and of its nodes, by name."""

    def __init__(self, scraped: ScrapedTexts):
        self._families: dict[str, Metric] = {}
        parsed = {n: p for n, text in scraped.texts.items() if (p := _parsed(text)) is not None}
        up: Samples = [((node,), float(node in parsed)) for node in scraped.nodes]
        for metric in _own_families({NODE_UP: up, **scraped.own}):
            self._families[metric.name] = metric
        for metric in ProcessCollector(pid=lambda: scraped.pid, registry=None).collect():
            self._families[metric.name] = metric
        for node, families in parsed.items():
            for family in families:
                self._add(node, family)

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families.values()

    def _add(self, node: str, family: Metric) -> None:
        """Add a node's family. If a node of another version has it with another kind, only the
        samples of the first kind remain.
        """
        if family.name.startswith(PREFIX):
            return
        found = self._families.get(family.name)
        if found is None:
            found = Metric(family.name, family.documentation, family.type)
            self._families[family.name] = found
        if found.type == family.type:
            found.samples.extend(
                sample._replace(labels={**sample.labels, NODE_LABEL: node})
                for sample in family.samples
            )


def _parsed(text: str) -> list[Metric] | None:
    """Return the families in a node's text; None if it cannot be parsed."""
    try:
        return list(text_string_to_metric_families(text))
    except (ValueError, IndexError, KeyError):
        return None


def _own_families(own: Mapping[str, Samples]) -> Iterator[Metric]:
    for name, samples in own.items():
        family = FAMILIES[name]
        made = _KINDS[family.kind](PREFIX + name, family.doc.replace("`", ""), labels=family.labels)
        for labels, value in samples:
            made.add_metric(labels, value)
        yield made


def fleet_text(scraped: ScrapedTexts) -> bytes:
    """Return all metrics in Prometheus's text format."""
    return generate_latest(FleetFamilies(scraped))


def main() -> None:
    """Read the texts from the standard input, and write one text to the standard output."""
    with suppress(PermissionError):  # systemd's units may forbid it
        os.nice(CHILD_NICE)
    scraped = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ScrapedTexts)
    sys.stdout.buffer.write(fleet_text(scraped))


if __name__ == "__main__":
    main()
