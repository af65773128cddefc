"""Numbers of the starts of the nodes' daemons, and the clients' handles that contain them.

A handle of a daemon has the daemon's start count in its upper half and a counter in its lower one.
An entry keeps the counter and replaces the count by a number of its own for the node and the count.
So a handle names its node, is never reused, and needs no table.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from .....backends.errors import InvalidArgument
from ...certificates.folder import write_private

_LOW = (1 << 32) - 1


class Incarnation(NamedTuple):
    """A start of a node's daemon."""

    node: str
    instance: int


class _Numbers(msgspec.Struct):
    starts: int = 0
    incarnations: list[tuple[str, int]] = []


class Incarnations:
    """The numbers, from 1, in a file of the state directory. Owned by the entry's event loop."""

    def __init__(self, folder: Path):
        self._file = folder / "incarnations.json"
        self._state = _Numbers()
        self._numbers: dict[Incarnation, int] = {}

    @property
    def starts(self) -> int:
        """The number of starts of the entry on this state directory."""
        return self._state.starts

    def open(self) -> None:
        """Read the file, and count this start in it.

        :raises InvalidArgument: the state directory cannot be used.
        """
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._file.exists():
                self._state = msgspec.json.decode(self._file.read_bytes(), type=_Numbers)
            self._state.starts += 1
            self._write()
        except (OSError, msgspec.DecodeError) as exc:
            raise InvalidArgument(
                f"the state of the fleet in {self._file} cannot be used: {exc}",
                hint="set state-dir to a folder that the entry can write; if the file is damaged,"
                " move it away while no client is connected",
            ) from None
        for number, pair in enumerate(self._state.incarnations, 1):
            self._numbers[Incarnation(*pair)] = number

    def _write(self) -> None:
        write_private(self._file, msgspec.json.encode(self._state))

    def number_of(self, node: str, instance: int) -> int:
        """Return the number of a start of a node's daemon; a new one is written first.

        :raises OSError: it cannot be written.
        """
        incarnation = Incarnation(node, instance)
        number = self._numbers.get(incarnation)
        if number is None:
            self._state.incarnations.append((node, instance))
            try:
                self._write()
            except OSError:
                self._state.incarnations.pop()
                raise
            number = self._numbers[incarnation] = len(self._state.incarnations)
        return number

    def find(self, handle: int) -> Incarnation | None:
        """Return the start of a daemon to which a client's handle belongs, if there was one."""
        number = handle >> 32
        if 0 < number <= len(self._state.incarnations):
            return Incarnation(*self._state.incarnations[number - 1])
        return None


def client_handle(number: int, handle: int) -> int:
    """Return the client's handle for a daemon's *handle*, by the number of the daemon's start."""
    return number << 32 | handle & _LOW


def daemon_handle(incarnation: Incarnation, handle: int) -> int:
    """Return the daemon's handle for a client's *handle*."""
    return incarnation.instance << 32 | handle & _LOW
