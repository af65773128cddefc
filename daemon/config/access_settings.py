"""The configuration's rules of access, ``[access.NAME]``: for whom each is, and what it says.

Users and groups are looked up here, once: rules hold their numbers. Every reader takes the list
that it adds its errors to; none raises.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, get_args

import msgspec

from ...backends.params import nearest
from ...ipc import Priority
from .model_settings import MODEL_NAME, hyphens, table_of

__all__ = (
    "ACCESS_BOUNDS",
    "ACCESS_KEYS",
    "CLASSES",
    "MEMBER_CLASS",
    "MEMBER_MAY",
    "NAMES_MAX",
    "RULES_MAX",
    "Right",
    "Rule",
    "gid_of",
    "read_access",
)

RULES_MAX = 256
NAMES_MAX = 1024
"""Users, or groups, of one rule."""
ID_MAX = (1 << 32) - 2
"""The last number is nobody's: to the kernel it means "as it is"."""
CLASSES: tuple[Priority, ...] = get_args(Priority)
"""The classes of turns from the lowest on: a class's number is its place."""


class Right(StrEnum):
    """What a rule may allow."""

    USE = "use"
    MANAGE = "manage"
    SEE_ALL = "see-all"
    DRAIN = "drain"


MEMBER_MAY = frozenset({Right.USE})
MEMBER_CLASS: Priority = "high"
"""What everybody may who is neither root nor the daemon's user, where no rule says otherwise."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One table. What is None there stays as it is without the rule."""

    name: str
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    may: frozenset[Right] | None = None
    priority_max: Priority | None = None
    sessions_max: int | None = None
    tasks_waiting_max: int | None = None
    tokens_per_minute: int | None = None

    @property
    def for_everybody_else(self) -> bool:
        """Tell whether it is for all whom no other rule is for."""
        return not (self.users or self.groups)


ACCESS_KEYS = {
    "users": "users whom it is for, by name or number",
    "groups": "groups whose members it is for, by name or number",
    "may": "what they may",
    "top-priority": "the highest class of their turns",
    "sessions-max": "sessions that each of them may have open at once",
    "tasks-waiting-max": "tasks that may wait for each of them",
    "tokens-per-minute": "tokens that each of them may have computed: of prompts and of answers",
}
"""The keys of a rule, and what they mean."""
ACCESS_BOUNDS = {
    "sessions-max": 100_000,
    "tasks-waiting-max": 1_000_000,
    "tokens-per-minute": 1_000_000_000,
}
"""What each is at most; 1 at least."""
_FIELDS = {key: key.replace("-", "_") for key in ACCESS_KEYS} | {"top-priority": "priority_max"}
_Reader = Callable[[Any, str, list[str]], Any]


def read_access(document: Mapping[str, Any], place: str, errors: list[str]) -> tuple[Rule, ...]:
    """Read the rules, in the order of the file."""
    tables = table_of(document, "access", place, errors)
    if len(tables) > RULES_MAX:
        errors.append(f"{place}[access]: {len(tables)} rules, {RULES_MAX} at most")
        return ()
    read = [_read_rule(n, t, f"{place}[access.{n}] ", errors) for n, t in tables.items()]
    rules = [rule for rule in read if rule is not None]
    _check_apart(rules, place, errors)
    return tuple(rules)


def _read_rule(name: str, table: Any, place: str, errors: list[str]) -> Rule | None:
    if not MODEL_NAME.fullmatch(name):
        errors.append(f"{place}{name!r} is no name for a rule: use letters, digits, . _ -")
        return None
    if not isinstance(table, dict):
        errors.append(f"{place}is {_short(table)}, not a table")
        return None
    values: dict[str, Any] = {}
    errors_before = len(errors)
    for key, value in table.items():
        known = hyphens(key)
        if known not in _READERS:
            close = nearest(known, ACCESS_KEYS)
            errors.append(f"{place}unknown key {key!r}; {close}".rstrip("; "))
        elif _FIELDS[known] in values:
            errors.append(f"{place}{key}: given twice, in two spellings")
        else:
            values[_FIELDS[known]] = _READERS[known](value, f"{place}{key}: ", errors)
    return Rule(name=name, **values) if len(errors) == errors_before else None


def _check_apart(rules: Sequence[Rule], place: str, errors: list[str]) -> None:
    """Have nobody named by two rules: which of them holds should need no thought."""
    seen: dict[str, str] = {}
    for rule in rules:
        named = [f"user {n}" for n in sorted(rule.users)]
        named += [f"group {n}" for n in sorted(rule.groups)]
        for one in named or ["everybody else"]:
            first = seen.setdefault(one, rule.name)
            if first != rule.name:
                errors.append(f"{place}[access.{rule.name}] is for {one}, as [access.{first}] is")


# Values.


def _each(convert: Callable[[Any], Any]) -> _Reader:
    """Return what reads a list item by item, and tells of each that is wrong."""

    def read(value: Any, place: str, errors: list[str]) -> frozenset[Any]:
        if not isinstance(value, list) or len(value) > NAMES_MAX:
            errors.append(f"{place}{_short(value)} is no list, or one of more than {NAMES_MAX}")
            return frozenset()
        found = set()
        for item in value:
            try:
                found.add(convert(item))
            except ValueError as exc:
                errors.append(f"{place}{exc}")
        return frozenset(found)

    return read


def _names(convert: Callable[[Any], int]) -> _Reader:
    """Return what reads names or numbers, one at least."""
    read_each = _each(convert)

    def read(value: Any, place: str, errors: list[str]) -> frozenset[int]:
        if value == []:
            errors.append(f"{place}names nobody; without the key the rule is for everybody else")
        found: frozenset[int] = read_each(value, place, errors)
        return found

    return read


def _right_of(value: Any) -> Right:
    if value in list(Right):
        return Right(value)
    raise ValueError(f"{_short(value)} is none of {', '.join(Right)}")


def _priority(value: Any, place: str, errors: list[str]) -> Priority | None:
    for name in CLASSES:
        if value == name:
            return name
    errors.append(f"{place}{_short(value)} is none of {', '.join(CLASSES)}")
    return None


def _bound(high: int) -> _Reader:
    def read(value: Any, place: str, errors: list[str]) -> int | None:
        if not isinstance(value, int) or isinstance(value, bool):
            errors.append(f"{place}{_short(value)} is no whole number")
        elif not 1 <= value <= high:
            errors.append(f"{place}{value} is outside 1 … {high}")
        else:
            return value
        return None

    return read


def _uid_of(value: Any) -> int:
    return _id_of(
        value, "user", lambda n: pwd.getpwnam(n).pw_uid, lambda: [p[0] for p in pwd.getpwall()]
    )


def gid_of(value: Any) -> int:
    """Return the number of a group that is given by name or number.

    :raises ValueError: there is none of that name.
    """
    return _id_of(
        value,
        "group",
        lambda n: grp.getgrnam(n).gr_gid,
        lambda: [g[0] for g in grp.getgrall()],
    )


def _id_of(
    value: Any, what: str, look_up: Callable[[str], int], known: Callable[[], list[str]]
) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value <= ID_MAX:
            return value
        raise ValueError(f"{value} is no {what}'s number")
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{_short(value)} is no {what}'s name or number")
    try:
        return look_up(value)
    except KeyError:
        close = nearest(value, known())
        raise ValueError(f"there is no {what} {_short(value)}; {close}".rstrip("; ")) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:50]}…"


_READERS: dict[str, _Reader] = {
    "users": _names(_uid_of),
    "groups": _names(gid_of),
    "may": _each(_right_of),
    "top-priority": _priority,
    **{key: _bound(high) for key, high in ACCESS_BOUNDS.items()},
}
