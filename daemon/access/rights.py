"""The rights that calls need, and the rights of the connected users by the access rules.

Quotas are looked up here; the owners of sessions and of the queue enforce them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from ...backends.errors import PermissionDenied
from ...ipc.messages import Call, Right
from ...ipc.names import check_user_name
from ...ipc.peer import Peer
from ...ipc.server.connection import Request, ServerConnection
from ...scheduler import PRIORITIES, Owner
from ...sessions import Quota, check_connections, check_priority
from ..config.access_settings import Rule, SharedState
from .delegation import DelegatedUsers, NamedUser, OwnUserNames, identify_user, is_own_user
from .rules import (
    MEANINGS,
    MEMBER,
    ROOT,
    Rights,
    delegated_rights,
    needs_groups,
    rights_of,
)
from .user_groups import UserGroups


def right_for(row: Call, params: Any) -> Right | None:
    """Return the right that a call with these params needs."""
    return Right.SEE_ALL if getattr(params, "all", False) else row.right


class Access:
    """The rights of the connected users. Lives on the daemon's event loop.

    The groups of a connection decide on its calls. A quota belongs to a user. The groups of the
    user's latest connection decide on it, even after that connection was closed, because the user's
    dormant sessions stay.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        own: int | None = None,
        groups: UserGroups | None = None,
    ):
        self._rules = tuple(rules)
        self._own = os.getuid() if own is None else own
        self._open: dict[int, dict[ServerConnection, Rights]] = {}
        self._delegated: dict[ServerConnection, tuple[NamedUser, Rights]] = {}
        """Connections on behalf of another user, with that user and the rights of both."""
        self.own_user_names = OwnUserNames()
        self.delegated_users = DelegatedUsers()
        self._groups = groups or UserGroups()

    def add_connection(self, connection: ServerConnection) -> None:
        """Add a connection and determine its rights.

        :raises PermissionDenied: the user has no rights.
        :raises QuotaExceeded: the user has as many connections as the user's rule allows.
        """
        rights = self._rights_by_rules(connection)
        check_connections(rights.quota, len(self._open.get(connection.peer.uid, ())))
        self._open.setdefault(connection.peer.uid, {})[connection] = rights
        if not rights.allowed:
            raise PermissionDenied(f"user {connection.peer.uid} may do nothing here")

    @property
    def delegated_connections(self) -> int:
        """The number of connections on behalf of another user."""
        return len(self._delegated)

    def check_delegate(self, connection: ServerConnection) -> None:
        """Check that a connection may act on behalf of other users.

        :raises PermissionDenied: the connection may not.
        """
        if Right.DELEGATE not in self.rights_of_connection(connection).allowed:
            raise _denied(connection, Right.DELEGATE, MEANINGS[Right.DELEGATE])

    async def delegate(self, connection: ServerConnection, name: str) -> int:
        """Let a connection act on behalf of the user *name* from now on; return the user's number.

        :raises InferdError: the connection lacks the right, or the system does not know the user.
        """
        self.check_delegate(connection)
        named = await identify_user(connection, name, self._own)
        self.check_delegate(connection)  # the rules may have changed
        if connection not in self._open.get(connection.peer.uid, ()):
            return named.number  # it was closed meanwhile
        rights = self._rights_of_both(connection, named)
        if not rights.allowed:
            raise PermissionDenied(
                f"user {name!r} may do nothing here that user {connection.peer.uid} may do",
                hint="the daemon's operator can change both users' rights in [access.NAME]",
            )
        self._delegated[connection] = named, rights
        self.delegated_users.add_user(connection.peer.uid, name, named.number)
        self.own_user_names.add_name(named.number, name)
        if not is_own_user(named.number):
            self._groups.note_groups(named.number, named.groups)
        return named.number

    async def identify(self, connection: ServerConnection, name: str) -> int:
        """Return the number of the user *name* for a connection that may act on behalf of users.

        :raises InferdError: the connection may not, or the system does not know the user.
        """
        self.check_delegate(connection)
        check_user_name(name)
        number = (await identify_user(connection, name, self._own)).number
        self.own_user_names.add_name(number, name)
        return number

    def _rights_of_both(self, connection: ServerConnection, named: NamedUser) -> Rights:
        own = rights_of(self._rules, named.number, named.groups, self._own)
        return delegated_rights(self._rights_by_rules(connection), own)

    def remove_connection(self, connection: ServerConnection) -> None:
        """Remove a connection that was closed."""
        self._delegated.pop(connection, None)
        connections = self._open.get(connection.peer.uid, {})
        connections.pop(connection, None)
        if not connections and self._open.pop(connection.peer.uid, None) is not None:
            self._groups.note_groups(connection.peer.uid, _groups_of(connection.peer))

    def may_take_reserved_place(self, connection: ServerConnection) -> bool:
        """Return whether the user is root, the daemon's own user, or may manage models."""
        allowed = self.rights_of_connection(connection).allowed
        return connection.peer.uid in (ROOT, self._own) or Right.MANAGE in allowed

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replace the rules, also for the open connections."""
        self._rules = tuple(rules)
        self._groups.read_again()
        for connections in self._open.values():
            for connection in connections:
                connections[connection] = self._rights_by_rules(connection)
        for connection, (named, _) in self._delegated.items():
            self._delegated[connection] = named, self._rights_of_both(connection, named)

    def _rights_by_rules(self, connection: ServerConnection) -> Rights:
        peer = connection.peer
        return rights_of(self._rules, peer.uid, _groups_of(peer), self._own)

    def rights_of_connection(self, connection: ServerConnection) -> Rights:
        """Return the rights of a connection's user, or of both users if it acts for another."""
        if connection in self._delegated:
            return self._delegated[connection][1]
        rights = self._open.get(connection.peer.uid, {}).get(connection)
        return self._rights_by_rules(connection) if rights is None else rights

    def shared_states(self, connection: ServerConnection) -> Collection[SharedState]:
        """Return the named states that the access rules share with a connection's user."""
        return self.rights_of_connection(connection).states

    def quota_of(self, uid: int) -> Quota:
        """Return the quota of a user. It bounds nothing while the groups that decide on it are not
        known, so that no session is deleted because of a rule that does not apply to this user.
        """
        connections = self._open.get(uid)
        if connections:
            return next(reversed(connections.values())).quota
        if is_own_user(uid) or not needs_groups(self._rules, uid, self._own):
            return rights_of(self._rules, uid, (), self._own).quota
        groups = self._groups.groups_of(uid)
        return (
            MEMBER.quota if groups is None else rights_of(self._rules, uid, groups, self._own).quota
        )

    def check_request(self, request: Request) -> None:
        """Check that the user has the right to a call and to its priority.

        :raises PermissionDenied: the user lacks one of them.
        """
        rights = self.rights_of_connection(request.connection)
        right = right_for(request.row, request.params)
        if right is not None and right not in rights.allowed:
            raise _denied(request.connection, right, MEANINGS[right])
        priority = PRIORITIES.get(getattr(request.params, "priority", ""))
        if priority is not None:
            check_priority(rights.quota, priority)

    def may_control_turns_of(self, connection: ServerConnection, owner: Owner) -> bool:
        """Return whether a connection may cancel or park the turns of *owner*. It may if *owner* is
        its own label or user, or if it has the rights `SEE_ALL` and `MANAGE`. Without `SEE_ALL` the
        connection does not learn of other users' turns.

        :raises PermissionDenied: the user has `SEE_ALL` without `MANAGE`.
        """
        if connection.owner.includes(owner):
            return True
        allowed = self.rights_of_connection(connection).allowed
        if Right.SEE_ALL not in allowed:
            return False
        if Right.MANAGE not in allowed:
            raise _denied(connection, Right.MANAGE, "cancel or park the turns of other users")
        return True


def _groups_of(peer: Peer) -> Collection[int]:
    return {peer.gid, *peer.groups}


def _denied(connection: ServerConnection, right: Right, action: str) -> PermissionDenied:
    return PermissionDenied(
        f"user {connection.owner.user} may not {action}",
        hint=f"the daemon's operator can allow it: allow = ['{right}'] in [access.NAME]",
        data={"right": right.value},
    )
