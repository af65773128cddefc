"""The right that each call needs, and the check of a connection's rights by the access rules.

Quotas are given out here and enforced by the owners of sessions and of the queue.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...backends.errors import PermissionDenied
from ...ipc.server.server_connection import Connection, Request
from ...scheduler import PRIORITIES
from ...sessions import Quota, check_priority
from ..config.access_settings import Right, Rule
from .rules import MEANINGS, Rights, rights_of

_USE = (
    *("load", "load_by_name", "load_by_name_with_config"),
    *("init_execution_context", "init_execution_context_with_session_id", "prompt_init"),
    *("set_input", "compute", "compute_single", "get_output", "get_output_single"),
    *("prompt_compute", "run_inference", "stream", "chat", "answers", "resume", "embed"),
    *("reset", "rewind", "fork_session", "set_options", "parameters"),
    *("tokenize", "detokenize", "apply_template"),
)
_MANAGE = (
    *("unload_model", "pin", "unpin", "swap", "add_adapter", "remove_adapter"),
    "log_level",
)
_FREE = (
    *("models", "show", "sessions", "queue", "stats"),
    *("cancel", "park", "fini_single", "finalize_execution_context", "close_execution_context"),
    *("forget", "unload", "init_backend", "deinit_backend"),
)
"""To look at what is one's own or nobody's, and to give up what one has; `Access.reaches` decides
on `cancel` and `park` of what another user has.
"""

NEEDS: dict[str, Right | None] = {
    **dict.fromkeys(_USE, Right.USE),
    **dict.fromkeys(_MANAGE, Right.MANAGE),
    **dict.fromkeys(_FREE, None),
    "drain": Right.DRAIN,
}
"""The right that each call takes; `sessions` and `queue` take one where they ask for `all`."""


def right_for(call: str, params: Any) -> Right | None:
    """Return the right that a call takes. One that is not in the table takes the highest."""
    if call in ("sessions", "queue") and params.all:
        return Right.SEE_ALL
    return NEEDS.get(call, Right.MANAGE)


class Access:
    """The rights of the connected users. Lives on the daemon's event loop.

    A call goes by the groups of its own connection, a quota, which is a user's, by those of the one
    that was opened last.
    """

    def __init__(self, rules: Sequence[Rule], own: int | None = None):
        self._rules = tuple(rules)
        self._own = os.getuid() if own is None else own
        self._open: dict[int, dict[Connection, Rights]] = {}

    def add_connection(self, connection: Connection) -> None:
        """Note a connection and its rights.

        :raises PermissionDenied: the user has no rights.
        """
        rights = self._decide(connection)
        self._open.setdefault(connection.peer.uid, {})[connection] = rights
        if not rights.may:
            raise PermissionDenied(f"user {connection.peer.uid} may do nothing here")

    def remove_connection(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        his = self._open.get(connection.peer.uid, {})
        his.pop(connection, None)
        if not his:
            self._open.pop(connection.peer.uid, None)

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Let other rules hold, for the connections that are open, too."""
        self._rules = tuple(rules)
        for his in self._open.values():
            for connection in his:
                his[connection] = self._decide(connection)

    def _decide(self, connection: Connection) -> Rights:
        peer = connection.peer
        return rights_of(self._rules, peer.uid, {peer.gid, *peer.groups}, self._own)

    def rights(self, connection: Connection) -> Rights:
        """Return what a connection's user may do."""
        known = self._open.get(connection.peer.uid, {}).get(connection)
        return self._decide(connection) if known is None else known

    def quota_of(self, uid: int) -> Quota:
        """Return the bounds of a user."""
        his = self._open.get(uid)
        if his:
            return next(reversed(his.values())).quota
        return rights_of(self._rules, uid, (), self._own).quota

    def check(self, request: Request) -> None:
        """Refuse a call that its user may not make, or not with this priority.

        :raises PermissionDenied: the user may not.
        """
        rights = self.rights(request.connection)
        right = right_for(request.call, request.params)
        if right is not None and right not in rights.may:
            raise _denied(request.connection, right, MEANINGS[right])
        priority = PRIORITIES.get(getattr(request.params, "priority", ""))
        if priority is not None:
            check_priority(rights.quota, priority)

    def reaches(self, connection: Connection, owner: int) -> bool:
        """Return whether a connection may cancel or park the turns of the user *owner*: it is that
        user's, or of an operator, who sees all and manages. For others these turns do not exist.

        :raises PermissionDenied: the user sees the turns, and may not manage.
        """
        if connection.peer.uid == owner:
            return True
        may = self.rights(connection).may
        if Right.SEE_ALL not in may:
            return False
        if Right.MANAGE not in may:
            raise _denied(connection, Right.MANAGE, "cancel or park the turns of other users")
        return True


def _denied(connection: Connection, right: Right, deed: str) -> PermissionDenied:
    return PermissionDenied(
        f"user {connection.peer.uid} may not {deed}",
        hint=f"whoever runs the daemon can allow it: allow = ['{right}'] in [access.NAME]",
        data={"right": right.value},
    )
