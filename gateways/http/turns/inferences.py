"""Counts of the gateway's inferences of graphs, for statistics of the Open Inference Protocol."""

from __future__ import annotations

import time
from dataclasses import dataclass

MODELS_MAX = 1000
"""Models whose inferences are counted; the first one is then forgotten."""


@dataclass(slots=True)
class ModelCounts:
    """The inferences of one model, and the seconds from request to result of those that succeeded
    and of those that failed.
    """

    succeeded: int = 0
    failed: int = 0
    succeeded_s: float = 0.0
    failed_s: float = 0.0
    last_at_s: float = 0.0
    """The Unix time of the last one that succeeded; 0 without one."""


class InferenceCounts:
    """The counts by models. Owned by the gateway's event loop."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCounts] = {}

    def counts_of(self, model: str) -> ModelCounts:
        """Return the counts of a model."""
        return self._models.get(model) or ModelCounts()

    def count_success(self, model: str, seconds: float) -> None:
        """Count an inference that has succeeded."""
        counts = self._take(model)
        counts.succeeded += 1
        counts.succeeded_s += seconds
        counts.last_at_s = time.time()

    def count_failure(self, model: str, seconds: float) -> None:
        """Count an inference that has failed."""
        counts = self._take(model)
        counts.failed += 1
        counts.failed_s += seconds

    def _take(self, model: str) -> ModelCounts:
        if model not in self._models and len(self._models) >= MODELS_MAX:
            del self._models[next(iter(self._models))]
        return self._models.setdefault(model, ModelCounts())
