"""A model's need of memory, told from what was reckoned before, as far as it was."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends import Device, MemoryNeed, ModelSpec, Reckoning, Shape, reckon_model
from .. import messages as m

__all__ = ("Remembered",)


class Remembered:
    """A `Reckoning` that looks at the file only for what it does not know. The first of *known* is
    of the shape that the spec asks for.
    """

    def __init__(self, spec: ModelSpec, known: Sequence[m.Reckoned]):
        self._spec = spec
        self._needs = {report.shape: report.need for report in known}
        self._looked: Reckoning | None = None
        self.shape = known[0].shape if known else self._look().shape

    @property
    def devices(self) -> list[Device]:
        """The devices that layers could run on: of what runs on some, nothing is remembered."""
        return self._looked.devices if self._looked is not None else []

    def need(self, shape: Shape) -> MemoryNeed:
        """Return what the model needs in *shape*."""
        known = self._needs.get(shape)
        return known if known is not None else self._look().need(shape)

    def close(self) -> None:
        """Free what looking took."""
        if self._looked is not None:
            self._looked.close()

    def _look(self) -> Reckoning:
        if self._looked is None:
            self._looked = reckon_model(self._spec)
        return self._looked
