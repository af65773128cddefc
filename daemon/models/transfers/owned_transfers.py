"""Transfers of models by their ids, each of which ends with the connection that began it."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from ....backends.errors import InvalidArgument


class OwnedTransfer(Protocol):
    """An export or an import. *owner* is the connection that began it."""

    @property
    def owner(self) -> object:
        """The connection that began it."""


T = TypeVar("T", bound=OwnedTransfer)


class OwnedTransfers(Generic[T]):
    """Transfers by their ids. Owned by the daemon's event loop."""

    def __init__(self) -> None:
        self._transfers: dict[str, T] = {}

    def find(self, transfer: str, owner: object) -> T:
        """Return a transfer of *owner*.

        :raises InvalidArgument: it has none with this id.
        """
        found = self._transfers.get(transfer)
        if found is None or found.owner is not owner:
            raise InvalidArgument("no transfer has this id", hint="begin it with a part at 0")
        return found

    def of_owner(self, owner: object) -> list[str]:
        """Return the ids of the transfers of *owner*."""
        return [name for name, found in self._transfers.items() if found.owner is owner]
