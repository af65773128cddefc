"""Memory estimates of models, kept as long as their files are unchanged."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ...backends import ModelSpec
from ...scheduler import messages as m
from .model_files import Signature

ESTIMATED_MODELS_MAX = 1000
SHAPES_MAX = 64
"""Of one model: each step down halves something."""


class _KnownReports(NamedTuple):
    signature: Signature
    reports: list[m.MemoryEstimate]


class EstimateCache:
    """Workers' reports by what was loaded, under whatever name. Lives on the daemon's event loop.

    A report on devices is not kept: it depends on their free memory.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _KnownReports] = {}

    def known_reports(self, spec: ModelSpec, signature: Signature) -> list[m.MemoryEstimate]:
        """Return what was reported of the same files for the same *spec*, first report first."""
        known = self._known.get(_key(spec))
        return list(known.reports) if known is not None and known.signature == signature else []

    def note_report(self, spec: ModelSpec, signature: Signature, report: m.MemoryEstimate) -> None:
        """Remember a report on files that were as *signature* says before it was made."""
        if spec.fd >= 0 or report.devices:
            return
        reports = self.known_reports(spec, signature)
        if len(reports) >= SHAPES_MAX or any(r.shape == report.shape for r in reports):
            return
        self._known.pop(_key(spec), None)
        while len(self._known) >= ESTIMATED_MODELS_MAX:
            del self._known[next(iter(self._known))]
        self._known[_key(spec)] = _KnownReports(signature, [*reports, report])


def _key(spec: ModelSpec) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(spec, name=""))
