"""The choice of a turn's adapters among those of its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...backends.adapter_keys import adapter_key, split_key
from ...backends.errors import InvalidArgument, error_from_wire
from ...backends.params import nearest
from ...scheduler.messages import AdapterReport

Reports = Mapping[str, AdapterReport]
"""A model's adapters by their names, in the order of the configuration."""


def chosen_keys(reports: Reports, lora: Sequence[Sequence[Any]] | None) -> tuple[str, ...]:
    """Return the sorted keys of a turn's adapters, without those at a scale of 0.

    *lora* are pairs of a name, or a place in the order, and a scale; None means the configured
    scales of the model's adapters.

    :raises InvalidArgument: the model has no such adapter.
    :raises LoadFailed: it could not be loaded; or the error that it has otherwise.
    """
    if lora is None:
        pairs = [(report, report.spec.scale) for report in reports.values()]
    else:
        pairs = [(_find(reports, which), scale) for which, scale in lora]
    scales: dict[str, float] = {}
    for report, scale in pairs:
        if not scale:
            continue
        if report.info is None:
            raise error_from_wire(report.error or {})
        scales[report.info.id] = scales.get(report.info.id, 0.0) + scale
    return tuple(sorted(adapter_key(i, scale) for i, scale in scales.items() if scale))


def _find(reports: Reports, which: str | int) -> AdapterReport:
    if isinstance(which, int) and 0 <= which < len(reports):
        return list(reports.values())[which]
    if isinstance(which, str) and which in reports:
        return reports[which]
    names = ", ".join(reports) or "none"
    close = nearest(which, reports) if isinstance(which, str) else ""
    raise InvalidArgument(
        f"the model has no adapter {which!r}",
        hint=f"{close + ' ' if close else ''}it has {names}; an operator adds one with"
        " `inferd add-adapter`",
        data={"adapters": list(reports)},
    )


def scales_by_name(reports: Reports, keys: Iterable[str]) -> dict[str, float]:
    """Return the scales of *keys* by the adapters' names, or by their ids if a name was removed."""
    names = {report.info.id: name for name, report in reports.items() if report.info is not None}
    pairs = [split_key(key) for key in keys]
    return {names.get(adapter_id, adapter_id): scale for adapter_id, scale in pairs}
