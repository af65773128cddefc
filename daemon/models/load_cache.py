"""Memory estimates and failures of earlier loads, valid while the model's files are unchanged.

No file holds them. Both caches live on the daemon's event loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...backends import ModelSpec
from ...backends.errors import (
    InferdError,
    InvalidArgument,
    LoadFailed,
    OutOfMemory,
    UnsupportedOperation,
)
from ...scheduler.messages import MemoryEstimate
from .model_files import Signature, signature_of

ESTIMATED_MODELS_MAX = 1000
SHAPES_MAX = 64
"""Estimates per model; each smaller shape halves the slots, the context or the batch."""
FAILURES_MAX = 1000
_PERMANENT = (LoadFailed, UnsupportedOperation, InvalidArgument)


class EstimateCache:
    """Memory estimates by spec, whatever the model's name.

    Estimates that name devices are not stored, because they depend on the devices' free memory.
    """

    def __init__(self) -> None:
        self._by_spec: dict[bytes, tuple[Signature, list[MemoryEstimate]]] = {}

    def estimates_of(self, spec: ModelSpec, signature: Signature) -> list[MemoryEstimate]:
        """Return the estimates for *spec* and files with *signature*, oldest first."""
        stored_for, estimates = self._by_spec.get(_key(spec), ((), []))
        return list(estimates) if stored_for == signature else []

    def store_estimate(
        self, spec: ModelSpec, signature: Signature, estimate: MemoryEstimate
    ) -> None:
        """Store an estimate for files that had *signature* before it was made."""
        if spec.fd >= 0 or estimate.devices:
            return
        estimates = self.estimates_of(spec, signature)
        if len(estimates) < SHAPES_MAX and all(e.shape != estimate.shape for e in estimates):
            self._by_spec.pop(_key(spec), None)
            while len(self._by_spec) >= ESTIMATED_MODELS_MAX:
                del self._by_spec[next(iter(self._by_spec))]
            self._by_spec[_key(spec)] = signature, [*estimates, estimate]


def _key(spec: ModelSpec) -> bytes:
    """Return a digest, because the records of measured settings in a spec can have many bytes."""
    packed = msgspec.msgpack.encode(msgspec.structs.replace(spec, name=""))
    return hashlib.sha256(packed).digest()


class FailedLoads:
    """Failed loads by model name, kept for *retry_s*; with 0, none are kept."""

    def __init__(self, retry_s: float, seconds: Callable[[], float]):
        self._retry_s, self._seconds = retry_s, seconds
        self._failures: dict[str, tuple[InferdError, float, Signature, object]] = {}
        """Each with its error, time, files and conditions."""

    def note_load(
        self, name: str, files: list[Path], conditions: object, error: InferdError
    ) -> None:
        """Store the failed load of *name* if the same load would fail again."""
        if not self._retry_s or not _is_permanent(error):
            return
        self._failures.pop(name, None)
        while len(self._failures) >= FAILURES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = error, self._seconds(), signature_of(files), conditions

    def forget_load(self, name: str) -> None:
        """Forget that *name* could not be loaded."""
        self._failures.pop(name, None)

    def check_load(self, name: str, files: list[Path], conditions: object) -> None:
        """Raise the error of the last load again if it is recent and neither the files nor the
        *conditions* have changed.

        :raises InferdError: that error, with the seconds since and the seconds until a retry.
        """
        if name not in self._failures:
            return
        error, failed_at, signature, failed_conditions = self._failures[name]
        passed_s = self._seconds() - failed_at
        if passed_s >= self._retry_s or signature_of(files) != signature:
            del self._failures[name]
        elif failed_conditions == conditions:
            times = {"failed_s_ago": passed_s, "retry_in_s": self._retry_s - passed_s}
            raise type(error)(
                f"{error.message} (failed {passed_s:.1f} s ago; tried again after"
                f" {self._retry_s:.15g} s, or when its file changes)",
                hint=error.hint,
                data=error.data | times,
                retryable=error.retryable,
            )


def _is_permanent(error: InferdError) -> bool:
    """Return whether the same load would fail again. Memory may become free, but never more than
    the total. Death or silence of the process and an upgrade prove nothing about the file.
    """
    if error.data.get("cause") in ("died", "upgraded", "silent"):
        return False
    if isinstance(error, OutOfMemory):
        return int(error.data.get("needed_bytes", 0)) > int(error.data.get("total_bytes", 0))
    return isinstance(error, _PERMANENT)
