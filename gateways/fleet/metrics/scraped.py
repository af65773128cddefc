"""The message to the child process that writes the metrics of a fleet."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Samples: TypeAlias = list[tuple[tuple[str, ...], float]]
"""The values of a family, by its labels."""


class ScrapedTexts(msgspec.Struct):
    """The entry's process, its own samples by family, all nodes, and the texts of those that have
    answered.
    """

    pid: int
    own: dict[str, Samples]
    nodes: list[str]
    texts: dict[str, str]
