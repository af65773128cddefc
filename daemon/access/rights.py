"""The rights that calls need, and the rights of the connected users by the access rules.

Quotas are looked up here; the owners of sessions and of the queue enforce them.

A gateway names the system user on whose behalf it acts by name or number. A name after ``@`` is one
of its own users, whom only the gateway knows: its number is derived from the name and the gateway's
user, lies above all numbers of the system, and is the same after a restart.

The groups of users without a connection are those in the system's database, which may be a server
on the network that takes minutes. It is therefore read in a thread. Until it answers, the previous
answer counts, if there is one.
"""

from __future__ import annotations

import os
import pwd
import queue
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from ...backends.errors import NotFound, PermissionDenied, Timeout
from ...backends.recent_dict import RecentDict
from ...ipc.messages import Call, Right
from ...ipc.names import OWN_USER, check_user_name
from ...ipc.peer import Peer, groups_of_user
from ...ipc.server.connection import Request, ServerConnection
from ...ipc.server.descriptors import BlockingThread
from ...scheduler import PRIORITIES, Owner
from ...sessions import Quota, check_connections, check_priority
from ..config.access_settings import ID_MAX, OWN_USERS_MIN, Rule, SharedState, own_user_number
from .rules import (
    MEANINGS,
    MEMBER,
    ROOT,
    Rights,
    delegated_rights,
    needs_groups,
    rights_of,
)

USERS_MAX = 4096
"""Users whose groups are remembered."""


class UserGroups:
    """The groups of users by uid. Lives on the daemon's event loop; no method waits."""

    def __init__(self, read_groups: Callable[[int], Collection[int]] = groups_of_user):
        self._read_groups = read_groups
        self._groups: dict[int, Collection[int]] = {}
        self._outdated: set[int] = set()
        self._reading: set[int] = set()
        self._results: queue.SimpleQueue[tuple[int, Collection[int]]] = queue.SimpleQueue()
        self._thread = BlockingThread("user-groups")

    def note_groups(self, uid: int, groups: Collection[int]) -> None:
        """Remember the groups of a user's last connection."""
        self._groups.pop(uid, None)
        self._groups[uid] = groups
        self._outdated.discard(uid)
        if len(self._groups) > USERS_MAX:
            first = next(iter(self._groups))
            del self._groups[first]
            self._outdated.discard(first)

    def groups_of(self, uid: int) -> Collection[int] | None:
        """Return the groups of a user, or None while the database has not answered."""
        while not self._results.empty():
            read, groups = self._results.get()
            self._reading.discard(read)
            self.note_groups(read, groups)
        if uid not in self._groups or uid in self._outdated:
            self._begin_reading(uid)
        return self._groups.get(uid)

    def _begin_reading(self, uid: int) -> None:
        if uid not in self._reading and len(self._reading) < USERS_MAX:
            self._reading.add(uid)
            self._thread.submit(lambda: self._results.put((uid, self._read_groups(uid))))

    def read_again(self) -> None:
        """Read the groups of all users again when they are needed."""
        self._outdated.update(self._groups)


NAMES_MAX = 4096
"""Names of gateways' own users that lists show."""
DELEGATED_MAX = 4096
"""Users of all gateways that are remembered."""


class NamedUser(NamedTuple):
    """A user on behalf of whom a connection acts, with the user's groups."""

    number: int
    groups: frozenset[int] = frozenset()
    gateway: NamedUser | None = None
    """The user who submitted the job for which a connection acts; None if it acts for none."""


def is_own_user(number: int) -> bool:
    """Return whether a number is that of a gateway's own user."""
    return number >= OWN_USERS_MIN


def find_user(name: str, gateway: int) -> NamedUser:
    """Return the user that the *gateway*'s user calls *name*. The system's database may take long.

    :raises NotFound: the system does not know the user.
    """
    if name.startswith(OWN_USER):
        return NamedUser(own_user_number(name, gateway))
    number = int(name) if name.isascii() and name.isdigit() and len(name) <= 10 else None
    if number is None or number > ID_MAX:
        try:
            number = pwd.getpwnam(name).pw_uid
        except (KeyError, OSError):
            raise NotFound(
                f"this system has no user {name!r}",
                hint=f"a gateway names a user of its own as '{OWN_USER}{name}'",
            ) from None
    return NamedUser(number, frozenset(groups_of_user(number)))


def find_job_user(name: str) -> NamedUser:
    """Return the user of a job, which the daemon's own process names by the numbers of the job's
    user and gateway. The system's database may take long.
    """
    user, gateway = map(int, name.split("."))
    return NamedUser(user, _known_groups(user), NamedUser(gateway, _known_groups(gateway)))


def _known_groups(number: int) -> frozenset[int]:
    return frozenset() if is_own_user(number) else frozenset(groups_of_user(number))


async def identify_user(connection: ServerConnection, name: str, own: int) -> NamedUser:
    """Return the user on whose behalf a connection acts. *own* is the daemon's own user.

    :raises PermissionDenied: the user is root or the daemon's own, and the connection is not that
        user's.
    :raises Timeout: the system's database does not answer.
    """
    gateway = connection.peer.uid
    try:
        found = await connection.user.run(find_user, name, gateway)
    except Timeout as exc:
        raise Timeout(
            f"the system's database of users did not answer for {name!r}",
            hint="check the machine's name service (nsswitch.conf)",
            data=exc.data,
        ) from None
    if found.number in (ROOT, own) and found.number != gateway:
        raise PermissionDenied(
            f"a gateway may not act on behalf of {name!r}, root or the daemon's user",
            hint="name an ordinary user, or one of the gateway's own as '@NAME'",
        )
    return found


class OwnUserNames:
    """The latest `NAMES_MAX` names of gateways' own users, for lists. Lives on the event loop."""

    def __init__(self) -> None:
        self._names = RecentDict[int, str](NAMES_MAX)

    def add_name(self, number: int, name: str) -> None:
        """Store a name, unless it is not that of a gateway's own user."""
        if name and is_own_user(number):
            self._names[number] = name

    def name_of(self, number: int) -> str:
        """Return the name of a gateway's own user, or an empty text for any other number."""
        return self._names.get(number, "")


class DelegatedUsers:
    """The latest `DELEGATED_MAX` users on whose behalf gateways have connected. Lives on the event
    loop.
    """

    def __init__(self) -> None:
        self._users = RecentDict[tuple[int, str], int](DELEGATED_MAX)
        self._gateways = RecentDict[int, int](DELEGATED_MAX)
        """The gateways' users, by the numbers of their own users."""

    def add_user(self, gateway: int, name: str, number: int) -> None:
        """Store a user by the name that the *gateway*'s user has given."""
        self._users[gateway, name] = number
        if is_own_user(number):
            self._gateways[number] = gateway

    def gateway_of(self, number: int) -> int:
        """Return the user of the gateway whose own user has this number; -1 if there is none."""
        return self._gateways.get(number, -1)

    def numbers_by_name(self, gateway: int) -> dict[str, int]:
        """Return the numbers, by name, of the users for whom a *gateway*'s user has connected."""
        return {name: number for (by, name), number in self._users.items() if by == gateway}


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
        self._job_process = 0

    def note_job_process(self, pid: int) -> None:
        """Note the process that computes the requests of jobs, or 0 when it has ended. Its
        connections act for the users of jobs, with the rights that these have now.
        """
        self._job_process = pid

    def is_job_process(self, connection: ServerConnection) -> bool:
        """Return whether a connection is one of the process that computes the requests of jobs."""
        peer = connection.peer
        return self._job_process != 0 and (peer.pid, peer.uid) == (self._job_process, os.getuid())

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
        if self.is_job_process(connection):
            named = await connection.user.run(find_job_user, name)
        else:
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
        if named.gateway is None:
            self.delegated_users.add_user(connection.peer.uid, name, named.number)
            self.own_user_names.add_name(named.number, name)
        else:
            name = self.own_user_names.name_of(named.number) or name
            self.delegated_users.add_user(named.gateway.number, name, named.number)
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
        if (gateway := named.gateway) is None:
            return delegated_rights(self._rights_by_rules(connection), own)
        return delegated_rights(
            rights_of(self._rules, gateway.number, gateway.groups, self._own), own
        )

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

    def models_of(self, connection: ServerConnection) -> Collection[str] | None:
        """Return the names of models that a connection's user may use; None: all."""
        return self.rights_of_connection(connection).models

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
        """Return whether a connection may control the turns of *owner*: cancel or park them, or end
        their reasoning. It may if *owner* is its own label or user, or if it has the rights
        `SEE_ALL` and `MANAGE`. Without `SEE_ALL` the connection does not learn of other users'
        turns.

        :raises PermissionDenied: the user has `SEE_ALL` without `MANAGE`.
        """
        if connection.owner.includes(owner):
            return True
        allowed = self.rights_of_connection(connection).allowed
        if Right.SEE_ALL not in allowed:
            return False
        if Right.MANAGE not in allowed:
            raise _denied(connection, Right.MANAGE, "control the turns of other users")
        return True


def _groups_of(peer: Peer) -> Collection[int]:
    return {peer.gid, *peer.groups}


def _denied(connection: ServerConnection, right: Right, action: str) -> PermissionDenied:
    return PermissionDenied(
        f"user {connection.owner.user} may not {action}",
        hint=f"the daemon's operator can allow it: allow = ['{right}'] in [access.NAME]",
        data={"right": right.value},
    )
