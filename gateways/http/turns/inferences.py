"""Counts of the gateway's failed inferences of graphs, for the statistics of the Open Inference
Protocol. The engines count those that succeed.
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS_MAX = 1000
"""Models whose inferences are counted; the first one is then forgotten."""


@dataclass(slots=True)
class FailureCounts:
    """The failed inferences of one model, and the seconds from their request to the error."""

    failed: int = 0
    failed_s: float = 0.0


class InferenceCounts:
    """The counts by models. Owned by the gateway's event loop."""

    def __init__(self) -> None:
        self._models: dict[str, FailureCounts] = {}

    def counts_of(self, model: str) -> FailureCounts:
        """Return the counts of a model."""
        return self._models.get(model) or FailureCounts()

    def count_failure(self, model: str, seconds: float) -> None:
        """Count an inference that has failed."""
        if model not in self._models and len(self._models) >= MODELS_MAX:
            del self._models[next(iter(self._models))]
        counts = self._models.setdefault(model, FailureCounts())
        counts.failed += 1
        counts.failed_s += seconds
