"""The rows of the tables of metric families."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec


class Family(msgspec.Struct, frozen=True):
    """One family. *name* is without the prefix, and without the suffix `_total` of a counter."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    doc: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = ()
    """Upper bounds of the buckets; one more bucket has the rest."""

    def exposed_name(self, prefix: str) -> str:
        """Return the name in the exposition."""
        return prefix + self.name + ("_total" if self.kind == "counter" else "")


counter = partial(Family, "counter")
gauge = partial(Family, "gauge")
histogram = partial(Family, "histogram")
