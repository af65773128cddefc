"""Outcomes of earlier loads, valid while the model's files are unchanged: estimates and failures.

Both live on the daemon's event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...backends import ModelSpec
from ...backends.errors import (
    InferdError,
    InvalidArgument,
    LoadFailed,
    OutOfMemory,
    UnsupportedOperation,
)
from ...scheduler import messages as m
from ..residency.model_files import Signature, signature_of

ESTIMATED_MODELS_MAX = 1000
SHAPES_MAX = 64
"""Estimates per model: each smaller shape halves something."""
FAILURES_MAX = 1000
_PERMANENT = (LoadFailed, UnsupportedOperation, InvalidArgument)


class _KnownReports(NamedTuple):
    signature: Signature
    reports: list[m.MemoryEstimate]


class EstimateCache:
    """Memory estimates by spec, whatever the model's name.

    Estimates that name devices are not stored: they depend on the devices' free memory.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _KnownReports] = {}

    def known_reports(self, spec: ModelSpec, signature: Signature) -> list[m.MemoryEstimate]:
        """Return the estimates for *spec* and files with *signature*, oldest first."""
        known = self._known.get(_key(spec))
        return list(known.reports) if known is not None and known.signature == signature else []

    def note_report(self, spec: ModelSpec, signature: Signature, report: m.MemoryEstimate) -> None:
        """Store an estimate for files whose *signature* was taken before the estimate."""
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


class _FailedLoad(NamedTuple):
    error: InferdError
    at: float
    signature: Signature
    conditions: object


class FailedLoads:
    """Failed loads by model name, kept for *remember_s* (0: none are kept)."""

    def __init__(self, remember_s: float, seconds: Callable[[], float]):
        self._remember_s = remember_s
        self._seconds = seconds
        self._failures: dict[str, _FailedLoad] = {}

    def note_load(
        self, name: str, files: list[Path], conditions: object, error: InferdError
    ) -> None:
        """Store the failed load of *name* if the same load would fail again."""
        if not self._remember_s or not _is_permanent(error):
            return
        self._failures.pop(name, None)
        while len(self._failures) >= FAILURES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = _FailedLoad(error, self._seconds(), signature_of(files), conditions)

    def forget_load(self, name: str) -> None:
        """Forget that *name* could not be loaded."""
        self._failures.pop(name, None)

    def check_load(self, name: str, files: list[Path], conditions: object) -> None:
        """Raise the error of the last load again if it is recent and neither the files nor the
        *conditions* have changed.

        :raises InferdError: that error, with the seconds since and the seconds until a retry.
        """
        failure = self._failures.get(name)
        if failure is None or failure.conditions != conditions:
            return
        passed_s = self._seconds() - failure.at
        if passed_s >= self._remember_s or signature_of(files) != failure.signature:
            del self._failures[name]
            return
        error = failure.error
        raise type(error)(
            f"{error.message} (failed {passed_s:.1f} s ago, and the file is unchanged)",
            hint=error.hint,
            data={
                **error.data,
                "failed_s_ago": passed_s,
                "retry_in_s": self._remember_s - passed_s,
            },
        )


def _is_permanent(error: InferdError) -> bool:
    """Return whether the same load would fail again. Memory may become free at any time, but not
    more than the total. A process that died or an upgrade proves nothing about the file.
    """
    if error.data.get("cause") in ("died", "upgraded"):
        return False
    if isinstance(error, OutOfMemory):
        return int(error.data.get("needed_bytes", 0)) > int(error.data.get("total_bytes", 0))
    return isinstance(error, _PERMANENT)
