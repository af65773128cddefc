"""The report of a starting daemon to its starter: readiness, or the error that ends it.

The starter passes a descriptor by `--ready-fd`, usually the write end of a pipe, as s6 and dinit
do. The daemon writes one newline when it is ready. If it ends before, it writes its error as JSON
without a newline, for `inferd start`; other starters only see the end of the pipe.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...backends.errors import InferdError, InvalidArgument, error_from_wire

READY = b"\n"
REPORT_BYTES_MAX = 64 << 10
"""A pipe has space for as many bytes, so the daemon never waits for its starter."""


class ReadinessReport:
    """Writes the report to *descriptor*, which may be None, and then closes it.

    :raises InvalidArgument: the descriptor is not open.
    """

    def __init__(self, descriptor: int | None = None):
        self._descriptor = descriptor
        if descriptor is not None:
            try:
                os.set_inheritable(descriptor, False)  # no child may keep the pipe open
            except OSError:
                raise InvalidArgument(
                    f"--ready-fd {descriptor} is not an open file",
                    hint="pass the number of a pipe that the daemon inherits",
                ) from None

    def send_ready(self) -> bool:
        """Report that the daemon is ready; return False if the starter has ended."""
        return self._send(READY)

    @contextlib.contextmanager
    def errors_sent(self) -> Iterator[None]:
        """Report an error that leaves this block, and raise it again."""
        try:
            yield
        except InferdError as exc:
            self.send_error(exc)
            raise

    def send_error(self, error: InferdError) -> None:
        """Report the error that ends the daemon before it is ready."""
        self._send(msgspec.json.encode(error.to_wire())[:REPORT_BYTES_MAX])

    def _send(self, data: bytes) -> bool:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return True
        try:
            os.write(descriptor, data)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def error_of_report(report: bytes) -> InferdError | None:
    """Return the error in a report without readiness, or None if the daemon has sent none."""
    with contextlib.suppress(msgspec.DecodeError):
        fields = msgspec.json.decode(report)
        if isinstance(fields, Mapping):
            return error_from_wire(dict[str, Any](fields))
    return None
