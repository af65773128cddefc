"""The open connections: their users, rights and labels, and the log of refused ones.

The labels of a user's open connections are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from ...backends.errors import InferdError, QuotaExceeded
from ...ipc.messages import ClientHello
from ...ipc.server.connection import ServerConnection
from ...scheduler.owner import Owner
from ..config.settings import Config
from ..logs.setup import RepeatLimit, logs
from ..users import Users
from .rights import Access, is_own_user

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


ipc_log = structlog.get_logger(logger_name="ipc")


class Connections:
    """Decides which connections are served, and for whom. Lives on the daemon's event loop.
    *count_refusal* counts an error of an operation.
    """

    def __init__(self, count_refusal: Callable[[str, InferdError], None]):
        self.access = Access()
        self._users = Users()
        self._labels = Labels()
        self._labels_max = 0
        self._refusals = RepeatLimit()
        self._count_refusal = count_refusal

    @property
    def labels(self) -> int:
        """The number of labels of the open connections."""
        return len(self._labels)

    def apply_config(self, config: Config) -> None:
        """Apply the access rules and the bound of labels, also to the open connections."""
        self.access.set_rules(config.access)
        self._labels_max = config.labels_user_max

    def admit_connection(self, connection: ServerConnection) -> bool:
        """Check that a connection's user can be identified and has access; return whether the user
        may take the places for operators.

        :raises PermissionDenied: the user cannot be identified, or has no access.
        :raises QuotaExceeded: the user has as many connections as their access rule allows.
        """
        self._users.check(connection.peer.uid)
        self.access.add_connection(connection)
        if logs.is_logged("ipc", "debug"):
            ipc_log.debug("connection.opened", **_fields(connection))
        return self.access.may_take_reserved_place(connection)

    def connection_greeted(self, connection: ServerConnection, hello: ClientHello) -> None:
        """Set the label of a connection.

        :raises QuotaExceeded: programs of its user have too many labels.
        """
        connection.owner = connection.owner._replace(label=hello.label)
        self._labels.add_connection(connection, self._labels_max)

    async def connection_delegated(self, connection: ServerConnection, hello: ClientHello) -> None:
        """Let a connection act on behalf of another user, with a label of that user.

        :raises InferdError: the connection lacks the right, or the system does not know the user.
        """
        user = await self.access.delegate(connection, hello.on_behalf_of)
        if not is_own_user(user):
            self._users.check(user)
        is_job = self.access.is_job_process(connection)
        name = self.access.own_user_names.name_of(user) if is_job else hello.on_behalf_of
        connection.owner, connection.on_behalf_of = Owner(user), name
        self.connection_greeted(connection, hello)
        ipc_log.info("connection.delegated", **_fields(connection), software=connection.software)

    def connection_refused(self, connection: ServerConnection, error: InferdError) -> None:
        """Count a connection that was refused, and log it unless its user has many of them."""
        self._count_refusal("connect", error)
        omitted = self._refusals.count_event(connection.uid, time.monotonic())
        if omitted is None:
            return
        ipc_log.warning(
            "connection.refused",
            **_fields(connection),
            software=connection.software,
            error=error.name,
            cause=error.message,
            **({"omitted": omitted} if omitted else {}),
        )

    def accept_failed(self, error: OSError) -> None:
        """Log that a connection could not be accepted."""
        ipc_log.error("connection.not_accepted", cause=str(error))

    def remove_connection(self, connection: ServerConnection) -> None:
        """Remove a connection that was closed."""
        if logs.is_logged("ipc", "debug"):
            ipc_log.debug("connection.closed", **_fields(connection))
        self._labels.remove_connection(connection)
        self.access.remove_connection(connection)


def _fields(connection: ServerConnection) -> dict[str, Any]:
    """Return the log fields of a connection."""
    peer, owner = connection.peer, connection.owner
    fields: dict[str, Any] = {"connection": connection.number, "uid": peer.uid, "pid": peer.pid}
    if connection.on_behalf_of:
        fields |= {"on_behalf_of": connection.on_behalf_of, "user": owner.user}
    return fields | ({"label": owner.label} if owner.label else {})
