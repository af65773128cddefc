"""The labels of open connections, bounded for each user."""

from __future__ import annotations

from ...backends.errors import QuotaExceeded
from ...ipc.server.connection import ServerConnection

BOUND = "labels-user-max"
RETRY_S = 1.0


class Labels:
    """The labels that open connections have, by user. Lives on the daemon's event loop."""

    def __init__(self) -> None:
        self._users: dict[int, dict[str, set[ServerConnection]]] = {}

    def __len__(self) -> int:
        """The number of labels in use, counted for each user."""
        return sum(map(len, self._users.values()))

    def add_connection(self, connection: ServerConnection, labels_max: int) -> None:
        """Add a connection whose owner is known.

        :raises QuotaExceeded: connections of its user have *labels_max* other labels.
        """
        user, label = connection.owner
        labels = self._users.get(user, {})
        if not label:
            return
        if label not in labels and len(labels) >= labels_max:
            connection.owner = connection.owner._replace(label="")
            raise QuotaExceeded(
                f"connections of user {user} have {len(labels)} labels; the limit is {labels_max}",
                hint=f"close connections, share a label, or raise {BOUND}",
                data={
                    "bound": BOUND,
                    "labels": len(labels),
                    "labels_max": labels_max,
                    "retry_after_s": RETRY_S,
                },
            )
        self._users.setdefault(user, {}).setdefault(label, set()).add(connection)

    def remove_connection(self, connection: ServerConnection) -> None:
        """Remove a connection that was closed."""
        user, label = connection.owner
        labels = self._users.get(user, {})
        connections = labels.get(label, set())
        connections.discard(connection)
        if not connections:
            labels.pop(label, None)
        if not labels:
            self._users.pop(user, None)
