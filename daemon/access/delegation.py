"""Users on whose behalf gateways act: system users, and users that only the gateway knows.

A gateway names a system user by name or number. A name after ``@`` is one of its own users: its
number is derived from the name and the gateway's user, lies above all numbers of the system, and
is the same after a restart.
"""

from __future__ import annotations

import pwd
from collections import OrderedDict
from typing import NamedTuple

from ...backends.errors import NotFound, PermissionDenied, Timeout
from ...ipc.names import OWN_USER
from ...ipc.peer import groups_of_user
from ...ipc.server.connection import ServerConnection
from ..config.access_settings import ID_MAX, OWN_USERS_MIN, own_user_number
from .rules import ROOT

NAMES_MAX = 4096
"""Names of gateways' own users that lists show."""
DELEGATED_MAX = 4096
"""Users of all gateways that are remembered."""


class NamedUser(NamedTuple):
    """A user on behalf of whom a connection acts, with the user's groups."""

    number: int
    groups: frozenset[int] = frozenset()


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
        self._names: OrderedDict[int, str] = OrderedDict()

    def add_name(self, number: int, name: str) -> None:
        """Store a name, unless it is not that of a gateway's own user."""
        if name and is_own_user(number):
            self._names[number] = name
            self._names.move_to_end(number)
            if len(self._names) > NAMES_MAX:
                self._names.popitem(last=False)

    def name_of(self, number: int) -> str:
        """Return the name of a gateway's own user, or an empty text for any other number."""
        return self._names.get(number, "")


class DelegatedUsers:
    """The latest `DELEGATED_MAX` users on whose behalf gateways have connected. Lives on the event
    loop.
    """

    def __init__(self) -> None:
        self._users: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._gateways: OrderedDict[int, int] = OrderedDict()
        """The gateways' users, by the numbers of their own users."""

    def add_user(self, gateway: int, name: str, number: int) -> None:
        """Store a user by the name that the *gateway*'s user has given."""
        self._users[gateway, name] = number
        self._users.move_to_end((gateway, name))
        if len(self._users) > DELEGATED_MAX:
            self._users.popitem(last=False)
        if is_own_user(number):
            self._gateways[number] = gateway
            self._gateways.move_to_end(number)
            if len(self._gateways) > DELEGATED_MAX:
                self._gateways.popitem(last=False)

    def gateway_of(self, number: int) -> int:
        """Return the user of the gateway whose own user has this number; -1 if there is none."""
        return self._gateways.get(number, -1)

    def numbers_by_name(self, gateway: int) -> dict[str, int]:
        """Return the numbers, by name, of the users for whom a *gateway*'s user has connected."""
        return {name: number for (by, name), number in self._users.items() if by == gateway}
