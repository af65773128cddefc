"""The choice of the columns of a table that fit on a screen: a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len

from .view import Panel

PADDING = 2
"""The spaces around a cell."""
NAME_WIDTH_MIN = 9
"""Longer names are cut down to this width before a column is left out."""


def fit_columns(
    panel: Panel, columns: Mapping[str, Sequence[str]], available: int
) -> dict[str, int]:
    """Return the heads of the columns to show on *available* cells, with their widths, in the order
    of the panel. *columns* are the texts of each, by its head.

    The most important columns come first. Only names are cut, because half a number would be a
    wrong one.
    """
    full = {head: max(map(cell_len, (head, *columns[head]))) for head in panel.heads}
    chosen: dict[str, int] = {}
    for head in panel.importance:
        width = _width_min(columns[head], full[head]) if head in panel.names else full[head]
        if width + PADDING <= available:
            chosen[head] = width
            available -= width + PADDING
    for head in panel.importance:
        if head in panel.names and head in chosen:
            more = min(available, full[head] - chosen[head])
            chosen[head] += more
            available -= more
    return {head: chosen[head] for head in panel.heads if head in chosen}


def _width_min(names: Sequence[str], full: int) -> int:
    """Return the width to which a column of names may be cut; numbers of sessions stay whole."""
    numbers = [len(name) for name in names if name.isdigit()]
    return min(full, max(NAME_WIDTH_MIN, *numbers, 0))
