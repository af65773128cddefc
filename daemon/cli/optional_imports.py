"""What a command needs beside the client: one sentence where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...backends.errors import UnsupportedOperation


@contextmanager
def needed(what: str, hint: str) -> Iterator[None]:
    """Import inside what may not be installed.

    :raises UnsupportedOperation: it is not; *what* says who needs it, *hint* what to install.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("inferd"):
            raise
        raise UnsupportedOperation(f"{what}; {exc.name} is missing", hint=hint) from exc
