"""The tensors that stay in the daemon for its clients, by connection and handle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..backends.errors import Busy, Cancelled, InvalidArgument, NotFound, QuotaExceeded
from ..backends.tensors import Tensor
from ..ipc.server.connection import ServerConnection
from ..sessions.memory import memory_bytes
from .models.registry import Lease

HOLDER_BYTES = 512
"""The memory of a kept tensor without its elements."""
RETRY_AFTER_S = 1.0


class KeptLimits(NamedTuple):
    """The bounds of one user's kept tensors, and of all users' (*bytes_max*)."""

    user_max: int = 1000
    user_bytes_max: int = 256 << 20
    bytes_max: int = 1 << 30


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
        self.limits = KeptLimits()
        self._new_handle = new_handle
        self._tensors: dict[ServerConnection, dict[int, KeptTensor]] = {}
        self._counts: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()
        """The number of tensors by user, and their bytes."""

    def check_growth(self, user: int, tensors: int, size: int = 0) -> None:
        """Check that a user may keep so many more *tensors*, of *size* bytes together.

        :raises QuotaExceeded: they would be too many or too large.
        :raises Busy: those of all users would be too large.
        """
        limits, count, held = self.limits, self._counts[user], self._bytes[user]
        if count + tensors > limits.user_max:
            bound = "kept-tensors-user-max"
            raise QuotaExceeded(
                f"{count} of your tensors stay in the daemon; the limit is {limits.user_max}",
                hint=f"free those that are done, or raise {bound}",
                data={"bound": bound, "tensors": count, "tensors_max": limits.user_max},
            )
        if held + size > limits.user_bytes_max:
            bound = "kept-tensor-bytes-user-max"
            raise QuotaExceeded(
                f"your tensors in the daemon have {held} bytes; {size} more would exceed the limit"
                f" of {limits.user_bytes_max}",
                hint=f"free those that are done, or raise {bound}",
                data=_sizes(bound, held, size, limits.user_bytes_max),
            )
        if (total := self._bytes.total()) + size > limits.bytes_max:
            bound = "kept-tensor-bytes-max"
            raise Busy(
                f"the tensors of all users in the daemon have {total} bytes; {size} more would"
                f" exceed the limit of {limits.bytes_max}",
                hint=f"try again later, or raise {bound}",
                data=_sizes(bound, total, size, limits.bytes_max)
                | {"retry_after_s": RETRY_AFTER_S},
            )

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
        size = sum(one.size_bytes for one in kept)
        self.check_growth(user, len(kept), size)
        # There is no `await` between the check and these lines.
        self._counts[user] += len(kept)
        self._bytes[user] += size
        for one in kept:
            self._tensors.setdefault(connection, {})[one.handle] = one
        return kept

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
        self._counts[kept.user] -= 1
        self._bytes[kept.user] -= kept.size_bytes
        if not self._counts[kept.user]:
            del self._counts[kept.user], self._bytes[kept.user]


def _sizes(bound: str, held: int, more: int, bytes_max: int) -> dict[str, Any]:
    return {"bound": bound, "bytes": held, "more": more, "bytes_max": bytes_max}
