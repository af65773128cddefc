"""Sums of the metrics in a reply to `stats`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class MetricSums:
    """The metrics in a daemon's `stats`; a family that the daemon does not have is empty.

    docs/metrics.md lists the families.
    """

    def __init__(self, stats: Mapping[str, Any]):
        self._families: Mapping[str, list[dict[str, Any]]] = stats.get("metrics", {})

    def total(self, family: str, **labels: str) -> float:
        """Return the sum of a family's values that have *labels*."""
        return sum((float(sample["value"]) for sample in self._with(family, labels)), 0.0)

    def by(self, family: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums of a family's values that have *labels*, by the value of *label*."""
        sums: dict[str, float] = {}
        for sample in self._with(family, labels):
            sums[sample[label]] = sums.get(sample[label], 0) + sample["value"]
        return sums

    def _with(self, family: str, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        for sample in self._families.get(family, ()):
            if labels.items() <= sample.items():
                yield sample
