"""Failed loads, remembered for a short time: the same request gets the same error at once.

A file that has changed since is tried again at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...backends.errors import InferdError, InvalidArgument, LoadFailed, OutOfMemory
from ...backends.errors import UnsupportedOperation as Unsupported
from ..residency.model_files import Signature, signature_of

FAILURES_MAX = 1000
_LASTING = (LoadFailed, Unsupported, InvalidArgument)


class _Failure(NamedTuple):
    error: InferdError
    at: float
    signature: Signature
    asked: object


class FailedLoads:
    """Failed loads by model name. Lives on the daemon's event loop."""

    def __init__(self, remember_s: float, seconds: Callable[[], float]):
        self._remember_s = remember_s
        self._seconds = seconds
        self._failures: dict[str, _Failure] = {}

    def note_load(self, name: str, files: list[Path], asked: object, error: InferdError) -> None:
        """Remember that the model *name* could not be loaded from *files* in the way that was
        *asked* for, if trying again would not help.
        """
        if not self._remember_s or not _lasts(error):
            return
        self._failures.pop(name, None)
        while len(self._failures) >= FAILURES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = _Failure(error, self._seconds(), signature_of(files), asked)

    def forget_load(self, name: str) -> None:
        """Forget that *name* could not be loaded."""
        self._failures.pop(name, None)

    def check_load(self, name: str, files: list[Path], asked: object) -> None:
        """Raise the error of the last load again, if the same is still to be expected.

        :raises InferdError: the error, with the time that has passed and what is left of it.
        """
        failure = self._failures.get(name)
        if failure is None or failure.asked != asked:
            return
        passed_s = self._seconds() - failure.at
        if passed_s >= self._remember_s or signature_of(files) != failure.signature:
            del self._failures[name]
            return
        error = failure.error
        raise type(error)(
            f"{error.message} (so it was {passed_s:.1f} s ago, and the file is the same)",
            hint=error.hint,
            data={
                **error.data,
                "failed_s_ago": passed_s,
                "retry_in_s": self._remember_s - passed_s,
            },
        )


def _lasts(error: InferdError) -> bool:
    """Tell whether the same load would fail again: memory may be free the next moment, but not more
    than there is, and neither a process that died nor an upgrade says anything about the file.
    """
    if error.data.get("cause") in ("died", "upgraded"):
        return False
    if isinstance(error, OutOfMemory):
        return int(error.data.get("needed_bytes", 0)) > int(error.data.get("total_bytes", 0))
    return isinstance(error, _LASTING)
