"""The decision on one user's rights by the access rules, from user and group ids alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ...ipc.messages import Right
from ...scheduler import PRIORITIES, PRIORITY_MAX
from ...sessions import Quota, UsageLimits
from ..config.access_settings import (
    MEMBER_PRIORITY_MAX,
    MEMBER_RIGHTS,
    Rule,
    SharedState,
)

ROOT = 0
MEANINGS = {
    Right.USE: "use models",
    Right.MANAGE: "manage models",
    Right.SEE_ALL: "see the sessions and tasks of all users",
    Right.DRAIN: "drain the daemon",
    Right.DELEGATE: "act on behalf of other users",
}
"""The actions that each right allows, as messages name them after "may"."""


class Rights(msgspec.Struct, frozen=True):
    """The rights and the quota of one user, the states of others that the user may open, and the
    names of models that the user may use (None: all).
    """

    allowed: frozenset[Right]
    quota: Quota
    states: frozenset[SharedState] = frozenset()
    models: frozenset[str] | None = None


OPERATOR = Rights(frozenset(Right), Quota(priority_max=PRIORITY_MAX))
"""The rights of root and of the daemon's own user."""
MEMBER = Rights(MEMBER_RIGHTS, Quota(priority_max=PRIORITIES[MEMBER_PRIORITY_MAX]))
"""The rights of all other users that can connect."""


def rights_of(rules: Sequence[Rule], uid: int, gids: Collection[int], own: int) -> Rights:
    """Return the rights of a user in these groups, where the daemon runs as the user *own*.

    One rule applies: the rule that names the user, else the first that names one of the user's
    groups, else the rule for everybody else. To root and the daemon's own user only a rule that
    names them applies.
    """
    base = OPERATOR if uid in (ROOT, own) else MEMBER
    rule = next((rule for rule in rules if uid in rule.users), None)
    if rule is None and base is MEMBER:
        rule = next((rule for rule in rules if not rule.groups.isdisjoint(gids)), None)
        rule = rule or next((rule for rule in rules if rule.for_everybody_else), None)
    return base if rule is None else _apply_rule(base, rule)


def delegated_rights(gateway: Rights, named: Rights) -> Rights:
    """Return the rights of a connection on behalf of a user: those that both have, so that neither
    the gateway nor the user gains any. The quota and the shared states are those of the user.
    """
    highest = min(gateway.quota.priority_max, named.quota.priority_max)
    allowed = gateway.allowed & named.allowed - {Right.DELEGATE}
    quota = msgspec.structs.replace(named.quota, priority_max=highest)
    return Rights(allowed, quota, named.states, _common(gateway.models, named.models))


def _common(first: frozenset[str] | None, second: frozenset[str] | None) -> frozenset[str] | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def needs_groups(rules: Sequence[Rule], uid: int, own: int) -> bool:
    """Return whether `rights_of` depends on the groups of a user."""
    if uid in (ROOT, own) or any(uid in rule.users for rule in rules):
        return False
    return any(rule.groups for rule in rules)


def _apply_rule(base: Rights, rule: Rule) -> Rights:
    """Return *base*, changed by a rule."""
    highest = base.quota.priority_max
    if rule.priority_max is not None:
        highest = PRIORITIES[rule.priority_max]
    quota = Quota(
        rule=rule.name,
        connections_max=rule.connections_max,
        sessions_max=rule.sessions_max,
        session_bytes_max=rule.session_bytes_max,
        kept_sessions_max=rule.kept_sessions_max,
        descriptor_models_max=rule.descriptor_models_max,
        tasks_waiting_max=rule.tasks_waiting_max,
        tokens_per_minute=rule.tokens_per_minute,
        usage=UsageLimits(*(getattr(rule, name) for name in UsageLimits._fields)),
        reasoning_max=rule.reasoning_max or {},
        priority_max=highest,
    )
    allowed = base.allowed if rule.allow is None else rule.allow
    return Rights(allowed, quota, rule.states, rule.models)
