"""What models were reckoned to take of memory: a file that is the same is not looked at again."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ...backends import ModelSpec
from ...scheduler import messages as m
from .model_files import Signature

__all__ = ("Reckonings",)

MODELS_MAX = 1000
SHAPES_MAX = 64
"""Of one model: each step down halves something."""


class _Known(NamedTuple):
    signature: Signature
    reports: list[m.MemoryEstimate]


class Reckonings:
    """Reports of workers, by what was to be loaded, under whatever name. Lives on the daemon's
    event loop.

    What runs on devices is not remembered: it depends on what they have free.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}

    def known(self, spec: ModelSpec, signature: Signature) -> list[m.MemoryEstimate]:
        """Return what was reported of the same files for the same *spec*, first report first."""
        known = self._known.get(_key(spec))
        return list(known.reports) if known is not None and known.signature == signature else []

    def note(self, spec: ModelSpec, signature: Signature, report: m.MemoryEstimate) -> None:
        """Remember a report on files that were as *signature* says before it was made."""
        if spec.fd >= 0 or report.devices:
            return
        reports = self.known(spec, signature)
        if len(reports) >= SHAPES_MAX or any(r.shape == report.shape for r in reports):
            return
        self._known.pop(_key(spec), None)
        while len(self._known) >= MODELS_MAX:
            del self._known[next(iter(self._known))]
        self._known[_key(spec)] = _Known(signature, [*reports, report])


def _key(spec: ModelSpec) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(spec, name=""))
