"""Exit statuses of errors."""

from __future__ import annotations

from ...backends.errors import Busy, ConnectionLost, InferdError, InvalidArgument, Timeout
from .options import EXIT_BUSY, EXIT_NO_DAEMON, EXIT_REFUSED, EXIT_USAGE


def exit_code(error: InferdError) -> int:
    """Return the exit status of a command that fails with *error*."""
    if isinstance(error, ConnectionLost):
        return EXIT_NO_DAEMON
    if isinstance(error, Busy | Timeout):
        return EXIT_BUSY
    if isinstance(error, InvalidArgument):
        from ..config.sources import ConfigError

        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_REFUSED
    return EXIT_REFUSED
