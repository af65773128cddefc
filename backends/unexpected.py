"""Errors of the tree for unexpected exceptions, with the exception's place, without its message."""

from __future__ import annotations

import traceback
from pathlib import Path

from .errors import BackendError, InferdError, OutOfMemory

__all__ = ("error_of", "failure_of", "place_of")


def place_of(exc: BaseException) -> str:
    """Return the type of *exc* and the place where it was raised, without its message, which may
    quote a user.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    if not frames:
        return type(exc).__name__
    frame = frames[-1]
    return f"{type(exc).__name__} at {Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def error_of(exc: BaseException, work: str) -> InferdError:
    """Return the error for *exc*, which ended *work*."""
    if isinstance(exc, InferdError):
        return exc
    if isinstance(exc, MemoryError):
        return OutOfMemory(
            f"there is too little memory for {work}",
            hint="unload models or end other programs and try again",
        )
    return failure_of(work, place_of(exc))


def failure_of(work: str, place: str) -> BackendError:
    """Return the error for an exception that ended *work*; *place* is the result of `place_of`."""
    return BackendError(
        f"{work} failed: {place}",
        hint="this is a defect of inferd: please report it with this message",
    )
