"""The rights of one user by the access rules: a decision about numbers alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ...scheduler import PRIORITIES, Priority
from ...sessions import Quota
from ..config.access_settings import MEMBER_CLASS, MEMBER_MAY, Right, Rule

ROOT = 0
MEANINGS = {
    Right.USE: "use models",
    Right.MANAGE: "manage models",
    Right.SEE_ALL: "see the sessions and tasks of all users",
    Right.DRAIN: "drain the daemon",
}
"""The deeds that each right allows, after "may"."""


class Rights(msgspec.Struct, frozen=True):
    """The rights and the bounds of one user."""

    may: frozenset[Right]
    quota: Quota


OPERATOR = Rights(frozenset(Right), Quota(priority_max=Priority.URGENT))
"""Root's rights, and those of the daemon's own user."""
MEMBER = Rights(MEMBER_MAY, Quota(priority_max=PRIORITIES[MEMBER_CLASS]))
"""Those of everybody else who can connect."""


def rights_of(rules: Sequence[Rule], uid: int, gids: Collection[int], own: int) -> Rights:
    """Return what a user in these groups may do where the daemon runs as the user *own*.

    One rule holds: the one that names the user; else the first that names one of the user's groups;
    else the one for everybody else. Root and the daemon's own
    user go by a rule that names them, and by no other.
    """
    base = OPERATOR if uid in (ROOT, own) else MEMBER
    rule = next((rule for rule in rules if uid in rule.users), None)
    if rule is None and base is MEMBER:
        rule = next((rule for rule in rules if not rule.groups.isdisjoint(gids)), None)
        rule = rule or next((rule for rule in rules if rule.for_everybody_else), None)
    return base if rule is None else _ruled(base, rule)


def _ruled(base: Rights, rule: Rule) -> Rights:
    """Return *base* with what a rule says in its place."""
    highest = base.quota.priority_max
    if rule.priority_max is not None:
        highest = PRIORITIES[rule.priority_max]
    quota = Quota(
        rule=rule.name,
        sessions_max=rule.sessions_max,
        tasks_waiting_max=rule.tasks_waiting_max,
        tokens_per_minute=rule.tokens_per_minute,
        priority_max=highest,
    )
    return Rights(base.may if rule.allow is None else rule.allow, quota)
