"""The configuration's access rules, ``[access.NAME]``: their users and groups, rights and limits.

Users and groups are looked up once, when the rules are read; a rule holds their numeric ids.
"""

from __future__ import annotations

import grp
import hashlib
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ...backends.errors import InvalidArgument
from ...backends.params import as_whole, nearest
from ...backends.texts import shorten
from ...ipc.messages.calls import Right
from ...ipc.model_names import MODEL_NAME
from ...ipc.names import OWN_USER, Priority, check_label, is_user_name
from .ceilings import REASONING_CEILINGS
from .declaration import (
    BYTES_MAX,
    ErrorList,
    Form,
    Schema,
    one_of,
    read_table,
    setting,
    settings_of,
    table_of,
)
from .model_settings import named_tables

RULES_MAX = 256
NAMES_MAX = 1024
"""Maximum number of users, or of groups, in one rule."""
STATE_CHARACTERS_MAX = 128
USAGE_MAX = 1_000_000_000_000
ID_MAX = (1 << 32) - 2
"""The last 32-bit number is not an id: to the kernel it means "leave unchanged"."""

OWN_USERS_MIN = 1 << 32
"""The first number of gateways' own users; the system's numbers have 32 bits."""
_OWN_USERS = 1 << 62


def own_user_number(name: str, gateway: int) -> int:
    """Return the number of a user that only the gateway knows; *name* begins with ``@``."""
    digest = hashlib.sha256(f"{gateway} {name}".encode()).digest()
    return OWN_USERS_MIN + int.from_bytes(digest[:8]) % (_OWN_USERS - OWN_USERS_MIN)


class SharedState(NamedTuple):
    """A named state that a rule shares, by its *name* in the rule: `OWNER/STATE`, or
    `OWNER/LABEL/STATE` for a state of a label. *user* is the owner's number.
    """

    name: str
    user: int
    label: str
    state: str

    @property
    def numbered_name(self) -> str:
        """The name with the owner's number."""
        return f"{self.user}/{self.name.partition('/')[2]}"


MEMBER_RIGHTS = frozenset({Right.USE})
MEMBER_PRIORITY_MAX: Priority = "high"
"""The defaults of users who are neither root nor the daemon's user."""


def _each(convert: Callable[[Any], Any], value: Any) -> frozenset[Any]:
    """Convert a list item by item; the error has a line for each invalid item."""
    if not isinstance(value, list) or len(value) > NAMES_MAX:
        raise ValueError(f"{shorten(value)} is not a list of at most {NAMES_MAX}")
    found, wrong = set(), []
    for item in value:
        try:
            found.add(convert(item))
        except ValueError as exc:
            wrong.append(str(exc))
    if wrong:
        raise ValueError("\n".join(wrong))
    return frozenset(found)


def _names(convert: Callable[[Any], int], value: Any) -> frozenset[int]:
    if value == []:
        raise ValueError("is empty; without the key the rule applies to all other users")
    return _each(convert, value)


def _uid_of(value: Any) -> int:
    """Return the number of a user of the system, or of a gateway's own user, ``GATEWAY@NAME``."""
    try:
        return _id_of(value, "user", pwd.getpwnam, pwd.getpwall)
    except ValueError:
        # Names of the system may contain an @, too, as in a directory with several domains.
        gateway, at, name = value.partition(OWN_USER) if isinstance(value, str) else ("", "", "")
        if not at or not is_user_name(OWN_USER + name):
            raise
        if not gateway:
            raise ValueError(f"{shorten(value)} has no gateway; write 'GATEWAY{value}'") from None
        number = int(gateway) if gateway.isascii() and gateway.isdigit() else gateway
        return own_user_number(OWN_USER + name, _uid_of(number))


def gid_of(value: Any) -> int:
    """Return the id of a group that is given by name or id.

    :raises ValueError: there is no such group.
    """
    return _id_of(value, "group", grp.getgrnam, grp.getgrall)


def _id_of(
    value: Any, kind: str, entry: Callable[[str], Any], entries: Callable[[], list[Any]]
) -> int:
    """Return an id. The fields of an entry begin with the name, the password and the id."""
    value = as_whole(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value <= ID_MAX:
            return value
        raise ValueError(f"{value} is not the number of a {kind}")
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{shorten(value)} is not the name or number of a {kind}")
    try:
        return int(entry(value)[2])
    except KeyError:
        close = nearest(value, [known[0] for known in entries()])
        raise ValueError(f"there is no {kind} {shorten(value)}; {close}".rstrip("; ")) from None


def _right_of(value: Any) -> Right:
    return Right(one_of(value, [*Right]))


def _state_of(value: Any) -> SharedState:
    user, slash, rest = value.partition("/") if isinstance(value, str) else ("", "", "")
    label, second, state = rest.partition("/")
    if not second:
        label, state = "", rest
    if not slash or not 0 < len(state) <= STATE_CHARACTERS_MAX:
        raise ValueError(
            f"{shorten(value)} is not 'OWNER/STATE' or 'OWNER/LABEL/STATE', with 1 to"
            f" {STATE_CHARACTERS_MAX} characters of the state's name"
        )
    try:
        check_label(label)
    except InvalidArgument as exc:
        raise ValueError(f"{shorten(value)}: {exc.message}") from None
    number = int(user) if user.isascii() and user.isdigit() else user
    return SharedState(value, _uid_of(number), label, state)


_NAMES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": NAMES_MAX,
    "items": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "integer", "minimum": 0, "maximum": ID_MAX},
        ]
    },
}
USERS = Form(partial(_names, _uid_of), _NAMES)
GROUPS = Form(partial(_names, gid_of), _NAMES)
RIGHTS = Form(
    partial(_each, _right_of), {"type": "array", "items": {"enum": [r.value for r in Right]}}
)

STATES = Form(
    partial(_each, _state_of),
    {"type": "array", "maxItems": NAMES_MAX, "items": {"type": "string", "pattern": "^[^/]+/."}},
)


def _model_of(value: Any) -> str:
    if isinstance(value, str) and MODEL_NAME.fullmatch(value):
        return value
    raise ValueError(f"{shorten(value)} is not the name of a model")


MODELS = Form(
    partial(_each, _model_of),
    {
        "type": "array",
        "maxItems": NAMES_MAX,
        "items": {"type": "string", "pattern": f"^{MODEL_NAME.pattern}$"},
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One table; a field that is None leaves the default unchanged."""

    name: str
    users: frozenset[int] = setting(
        frozenset(),
        "users to whom the rule applies, by name or number, or `GATEWAY@NAME`",
        form=USERS,
    )
    groups: frozenset[int] = setting(
        frozenset(), "groups to whose members the rule applies, by name or number", form=GROUPS
    )
    allow: frozenset[Right] | None = setting(None, "rights of these users", form=RIGHTS)
    states: frozenset[SharedState] = setting(
        frozenset(),
        "named states of other users with which they may begin sessions: `OWNER/STATE`, or"
        " `OWNER/LABEL/STATE`",
        form=STATES,
    )
    models: frozenset[str] | None = setting(
        None,
        "names of models that they may use, also other names with `of`; without the key all",
        form=MODELS,
    )
    priority_max: Priority | None = setting(None, "highest priority of their turns")
    connections_max: int | None = setting(
        None, "maximum number of open connections of each user", 1, 100_000
    )
    sessions_max: int | None = setting(
        None, "maximum number of open sessions of each user", 1, 100_000
    )
    session_bytes_max: int | None = setting(
        None, "maximum memory of the sessions and graphs of each user, in bytes", 1, BYTES_MAX
    )
    kept_sessions_max: int | None = setting(
        None, "maximum number of sessions that each user keeps", 0, 100_000
    )
    descriptor_models_max: int | None = setting(
        None, "maximum number of models of each user that are loaded from descriptors", 0, 1000
    )
    tasks_waiting_max: int | None = setting(
        None, "maximum number of waiting tasks of each user", 1, 1_000_000
    )
    tokens_per_minute: int | None = setting(
        None,
        "tokens of prompts and answers computed for each user per minute",
        1,
        1_000_000_000,
    )
    tokens_per_day: int | None = setting(
        None, "the same per day of UTC, kept over restarts", 1, USAGE_MAX
    )
    tokens_per_month: int | None = setting(
        None, "the same per month of UTC, kept over restarts", 1, USAGE_MAX
    )
    seconds_per_day: int | None = setting(
        None, "seconds of compute for each user per day of UTC", 1, USAGE_MAX
    )
    seconds_per_month: int | None = setting(
        None, "seconds of compute for each user per month of UTC", 1, USAGE_MAX
    )
    reasoning_max: dict[str, int] | None = setting(
        None,
        "maximum number of tokens of a thought in their answers, for all turns or by class: a"
        " number, or a table as `{ low = 1000 }`",
        form=REASONING_CEILINGS,
    )

    @property
    def for_everybody_else(self) -> bool:
        """Whether the rule applies to all users to whom no other rule applies."""
        return not (self.users or self.groups)


ACCESS_KEYS = settings_of(Rule)


def read_access(document: Mapping[str, Any], errors: ErrorList) -> tuple[Rule, ...]:
    """Read the rules, in the order of the file."""
    tables = table_of(document, "access", errors)
    if len(tables) > RULES_MAX:
        errors.add(f"[access]: {len(tables)} rules, {RULES_MAX} at most")
        return ()
    rules = []
    for name, table, here in named_tables(tables, "access", "a rule", errors):
        errors_before = len(errors.lines)
        values = read_table(table, ACCESS_KEYS, here)
        if len(errors.lines) == errors_before:
            rules.append(Rule(name=name, **values))
    _check_disjoint(rules, errors)
    return tuple(rules)


def _check_disjoint(rules: Sequence[Rule], errors: ErrorList) -> None:
    """Check that no two rules name the same user or group, so that at most one applies by name."""
    seen: dict[str, str] = {}
    for rule in rules:
        named = [f"user {n}" for n in sorted(rule.users)]
        named += [f"group {n}" for n in sorted(rule.groups)]
        for one in named or ["everybody else"]:
            first = seen.setdefault(one, rule.name)
            if first != rule.name:
                errors.add(f"[access.{rule.name}] applies to {one}, as [access.{first}] does")
