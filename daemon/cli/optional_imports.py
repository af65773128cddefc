"""Imports of optional dependencies, with one sentence where they are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...backends.errors import UnsupportedOperation


@contextmanager
def optional_import(need: str, hint: str) -> Iterator[None]:
    """Convert a failed import of another package to an error that states the *need*.

    :raises UnsupportedOperation: the package is not installed; *hint* names what to install.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("inferd"):
            raise
        raise UnsupportedOperation(f"{need}; {exc.name} is missing", hint=hint) from exc
