"""The tensors that stay in the daemon for its clients, by connection and handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ..backends.errors import Cancelled, InvalidArgument, NotFound
from ..backends.tensors import Tensor
from ..ipc.server.connection import ServerConnection
from ..ipc.server.holdings import Holdings
from ..sessions.memory import memory_bytes
from .models.registry import Lease

HOLDER_BYTES = 512
"""The memory of a kept tensor without its elements."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTensor:
    """An output of the graph that *lease* is on, whose file had the *fingerprint*."""

    handle: int
    tensor: Tensor
    connection: ServerConnection
    user: int
    lease: Lease
    fingerprint: str

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        tensor = self.tensor
        return HOLDER_BYTES + len(tensor.data) + memory_bytes(tensor.dimensions)

    def check_model(self, source: object) -> None:
        """Check that the model of *source* is the graph that has computed it.

        :raises InvalidArgument: it is another model.
        """
        model = source.model if isinstance(source, Lease) else None
        if model is not self.lease.model:
            raise InvalidArgument(
                f"the kept tensor {self.handle} is an output of {self.lease.name!r}",
                hint="pass a kept tensor to the graph that has computed it",
            )

    def check_file(self, fingerprint: str) -> None:
        """Check that the graph still has the same file.

        :raises NotFound: it has been swapped, and its tensors were lost with it.
        """
        if fingerprint != self.fingerprint:
            raise NotFound(
                f"the kept tensor {self.handle} was lost: {self.lease.name!r} now has another file",
                hint="begin again with the first state",
                data={"kept": self.handle, "cause": "swap"},
            )


class KeptTensors:
    """The table of all of them. Owned by the daemon's event loop."""

    def __init__(self, new_handle: Callable[[], int]):
        self.held = Holdings("kept-tensor")
        self._new_handle = new_handle
        self._tensors: dict[ServerConnection, dict[int, KeptTensor]] = {}

    def keep_tensors(
        self,
        connection: ServerConnection,
        lease: Lease,
        fingerprint: str,
        tensors: Sequence[Tensor],
    ) -> list[KeptTensor]:
        """Keep outputs of the graph of *lease*: all of them, or none.

        :raises QuotaExceeded: they are too many, or too large; or `Busy`, with those of all users.
        :raises Cancelled: the graph was unloaded meanwhile.
        """
        if lease.closed:
            raise Cancelled("the graph was unloaded while it computed tensors to keep")
        user = connection.owner.user
        kept = [
            KeptTensor(self._new_handle(), one, connection, user, lease, fingerprint)
            for one in tensors
        ]
        self.held.add(user, len(kept), sum(one.size_bytes for one in kept))
        for one in kept:
            self._tensors.setdefault(connection, {})[one.handle] = one
        return kept

    def all_tensors(self) -> Iterator[KeptTensor]:
        """Yield the tensors of all connections."""
        return chain.from_iterable(held.values() for held in self._tensors.values())

    def get_tensor(self, connection: ServerConnection, handle: int) -> KeptTensor:
        """Return a tensor of a connection.

        :raises NotFound: the connection has no such tensor.
        """
        kept = self._tensors.get(connection, {}).get(handle)
        if kept is None:
            raise NotFound(
                f"there is no kept tensor {handle} on this connection",
                hint="begin again with the first state: tensors stay until they are freed, their"
                " graph is unloaded or their connection ends",
                data={"kept": handle},
            )
        return kept

    def free_tensors(self, connection: ServerConnection, handles: Sequence[int]) -> None:
        """Free tensors of a connection; those that it does not have are ignored."""
        tensors = self._tensors.get(connection, {})
        for handle in handles:
            if (kept := tensors.get(handle)) is not None:
                self._remove(kept)

    def end_lease(self, connection: ServerConnection, lease: Lease) -> None:
        """Free the outputs of a graph that its client unloads."""
        for kept in tuple(self._tensors.get(connection, {}).values()):
            if kept.lease is lease:
                self._remove(kept)

    def close_connection(self, connection: ServerConnection) -> None:
        """Free all tensors of a connection."""
        for kept in tuple(self._tensors.get(connection, {}).values()):
            self._remove(kept)

    def _remove(self, kept: KeptTensor) -> None:
        tensors = self._tensors[kept.connection]
        del tensors[kept.handle]
        if not tensors:
            del self._tensors[kept.connection]
        self.held.remove(kept.user, kept.size_bytes)
