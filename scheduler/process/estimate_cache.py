"""Memory estimates of a model that the daemon has from earlier loads."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends import Device, MemoryEstimator, MemoryNeed, ModelSpec, Shape, estimate_memory
from .. import messages as m


class CachedEstimate:
    """A `MemoryEstimator` that reads the file only for shapes not *known*, the spec's own first."""

    def __init__(self, spec: ModelSpec, known: Sequence[m.MemoryEstimate]):
        self._spec = spec
        self._needs = {report.shape: report.need for report in known}
        self._estimate: MemoryEstimator | None = None
        self.shape = known[0].shape if known else self._read_estimate().shape

    @property
    def devices(self) -> list[Device]:
        """The devices that layers could run on; models that use devices are not cached."""
        return self._estimate.devices if self._estimate is not None else []

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the memory that the model needs in *shape*."""
        known = self._needs.get(shape)
        return known if known is not None else self._read_estimate().need(shape)

    def close(self) -> None:
        """Free the estimator, if the file was read."""
        if self._estimate is not None:
            self._estimate.close()

    def _read_estimate(self) -> MemoryEstimator:
        if self._estimate is None:
            self._estimate = estimate_memory(self._spec)
        return self._estimate
