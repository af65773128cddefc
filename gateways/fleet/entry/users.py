"""The user as whom a client of the entry acts on the nodes."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ....backends.errors import PermissionDenied
from ....ipc.names import OWN_USER, check_user_name


@dataclass(frozen=True, slots=True)
class UserRules:
    """The entry's rules of users, by their names on this machine."""

    users: Literal["names", "accounts"] = "names"
    operators: Collection[str] = ()
    delegates: Collection[str] = ()


def name_of(uid: int) -> str:
    """Return the name of a user of this machine, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def is_operator(uid: int, name: str, rules: UserRules) -> bool:
    """Return whether a user manages the fleet: root, the entry's own user, or a named operator."""
    return uid in (0, os.getuid()) or name in rules.operators


def user_on_nodes(uid: int, name: str, on_behalf_of: str, rules: UserRules) -> str:
    """Return the `on_behalf_of` with which the entry connects to nodes for a client. It is empty
    for operators: they act as the relay's user.

    :raises PermissionDenied: the user may not act on behalf of others.
    :raises InvalidArgument: the name is too long.
    """
    operator = is_operator(uid, name, rules)
    if on_behalf_of:
        if not (operator or name in rules.delegates):
            raise PermissionDenied(
                f"user {name} may not act on behalf of others",
                hint="the fleet's operator can name the user in `delegates`",
                data={"right": "delegate"},
            )
        found = _delegated_user(name, on_behalf_of, rules)
    elif operator:
        found = ""
    else:
        found = name if rules.users == "accounts" else OWN_USER + name
    check_user_name(found)
    return found


def _delegated_user(gateway: str, on_behalf_of: str, rules: UserRules) -> str:
    """Return the user for whom a gateway acts. A gateway's own user never has the name of another
    gateway's own user, or of a user of this machine.
    """
    if on_behalf_of.startswith(OWN_USER):
        return f"{OWN_USER}{gateway}:{on_behalf_of.removeprefix(OWN_USER)}"
    if rules.users == "accounts":
        return on_behalf_of
    return OWN_USER + (name_of(int(on_behalf_of)) if on_behalf_of.isdecimal() else on_behalf_of)
