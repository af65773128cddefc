"""The names of drained nodes, in a file of the entry's state directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....backends.errors import InvalidArgument
from ..certificates.folder import write_private


class DrainedNodes:
    """The nodes that get no new contexts. Owned by the entry's event loop."""

    def __init__(self, folder: Path):
        self._file = folder / "drained.json"
        self._names: set[str] = set()

    def __contains__(self, node: str) -> bool:
        return node in self._names

    def open(self) -> None:
        """Read the file.

        :raises InvalidArgument: it cannot be read.
        """
        try:
            if self._file.exists():
                self._names = msgspec.json.decode(self._file.read_bytes(), type=set[str])
        except (OSError, msgspec.DecodeError) as exc:
            raise InvalidArgument(
                f"the drained nodes in {self._file} cannot be read: {exc}",
                hint="delete the file if it is damaged, and drain the nodes again",
            ) from None

    def set_drained(self, node: str, *, is_drained: bool) -> None:
        """Drain a node, or use it again; the change is in the file before this returns.

        :raises OSError: it cannot be written.
        """
        names = self._names | {node} if is_drained else self._names - {node}
        write_private(self._file, msgspec.json.encode(sorted(names)))
        self._names = names
