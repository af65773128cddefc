"""The rule that applies to a user and its effects, for every row of a table."""

from __future__ import annotations

import pwd
import threading
from itertools import chain, combinations
from typing import Any

import pytest

from inferd.daemon.access.rights import Access, UserGroups, right_for
from inferd.daemon.access.rules import (
    MEANINGS,
    MEMBER,
    OPERATOR,
    Rights,
    delegated_rights,
    rights_of,
)
from inferd.daemon.config.access_settings import Rule, SharedState
from inferd.ipc.messages import CALLS, QueueParams, Right, SessionsParams
from inferd.scheduler import PRIORITIES, Priority
from inferd.sessions import Quota
from tests.daemon.other_users import Stranger
from tests.waiting import wait_until

ROOT, OWN, ADA, BOB = 0, 990, 1000, 1001
STAFF, GUESTS, OTHER = 50, 60, 70
RULES = {
    "rest": Rule(name="rest"),
    "staff": Rule(name="staff", groups=frozenset({STAFF})),
    "guests": Rule(name="guests", groups=frozenset({GUESTS, OTHER})),
    "named": Rule(name="named", users=frozenset({ROOT, OWN, ADA})),
}
"""In the order of a file, which matters among those for groups alone."""
SETS = list(chain.from_iterable(combinations(RULES, size) for size in range(len(RULES) + 1)))
IN_GROUPS = {
    (): [],
    (STAFF,): ["staff"],
    (GUESTS,): ["guests"],
    (GUESTS, STAFF): ["staff", "guests"],
}


@pytest.mark.parametrize("present", SETS, ids="+".join)
@pytest.mark.parametrize("gids", IN_GROUPS, ids=str)
@pytest.mark.parametrize("uid", [ROOT, OWN, ADA, BOB])
def test_the_rule_that_names_the_user_holds_then_that_of_a_group_then_the_rest(
    uid: int, gids: tuple[int, ...], present: tuple[str, ...]
) -> None:
    candidates = {
        ROOT: ["named"],
        OWN: ["named"],
        ADA: ["named", *IN_GROUPS[gids], "rest"],
        BOB: [*IN_GROUPS[gids], "rest"],
    }[uid]
    holds = next((name for name in candidates if name in present), "")

    rights = rights_of([RULES[name] for name in RULES if name in present], uid, gids, OWN)

    assert rights.quota.rule == holds
    assert rights.allowed == (OPERATOR if uid in (ROOT, OWN) else MEMBER).allowed


def test_without_rules_root_and_the_daemons_user_may_everything_and_others_use_it() -> None:
    for uid in (ROOT, OWN):
        rights = rights_of((), uid, (), OWN)
        assert rights.allowed == set(Right)
        assert rights.quota == Quota(priority_max=Priority.URGENT)
    rights = rights_of((), ADA, (STAFF,), OWN)
    assert rights.allowed == {Right.USE}
    assert rights.quota == Quota(priority_max=Priority.HIGH)


@pytest.mark.parametrize(
    ("uid", "may", "highest"),
    [(ADA, {Right.USE}, "high"), (ROOT, set(Right), "urgent"), (OWN, set(Right), "urgent")],
)
def test_what_a_rule_does_not_say_stays_as_it_is(uid: int, may: set[Right], highest: str) -> None:
    rule = Rule(name="r", users=frozenset({uid}), sessions_max=3, tokens_per_minute=100)
    rights = rights_of([rule], uid, (), OWN)
    assert rights.allowed == may
    assert rights.quota == Quota(
        rule="r", sessions_max=3, tokens_per_minute=100, priority_max=PRIORITIES[highest]
    )


@pytest.mark.parametrize("uid", [ROOT, OWN, ADA])
def test_what_a_rule_says_holds_even_for_operators(uid: int) -> None:
    rule = Rule(
        name="r",
        users=frozenset({uid}),
        allow=frozenset({Right.SEE_ALL}),
        priority_max="low",
        sessions_max=1,
        tasks_waiting_max=2,
        tokens_per_minute=3,
    )
    rights = rights_of([rule], uid, (), OWN)
    assert rights.allowed == {Right.SEE_ALL}
    assert rights.quota == Quota(
        rule="r",
        sessions_max=1,
        tasks_waiting_max=2,
        tokens_per_minute=3,
        priority_max=Priority.LOW,
    )


def test_only_the_rule_that_applies_shares_states() -> None:
    story, notes = SharedState("1/story", 1, "", "story"), SharedState("1/notes", 1, "", "notes")
    rules = [
        Rule(name="ada", users=frozenset({ADA}), states=frozenset({story})),
        Rule(name="staff", groups=frozenset({STAFF}), states=frozenset({notes})),
    ]
    assert rights_of(rules, ADA, (STAFF,), OWN).states == {story}
    assert rights_of(rules, BOB, (STAFF,), OWN).states == {notes}
    for uid in (ROOT, OWN, BOB):
        assert not rights_of(rules, uid, (), OWN).states


def test_a_gateway_opens_the_states_that_are_shared_with_the_user_for_whom_it_acts() -> None:
    story, notes = SharedState("1/story", 1, "", "story"), SharedState("1/notes", 1, "", "notes")
    gateway = Rights(MEMBER.allowed, Quota(), frozenset({story}))
    named = Rights(MEMBER.allowed, Quota(), frozenset({notes}))
    assert delegated_rights(gateway, named).states == {notes}


@pytest.mark.parametrize(
    ("gateway", "named", "both"),
    [
        (None, None, None),
        ({"a"}, None, {"a"}),
        (None, {"b"}, {"b"}),
        ({"a", "b"}, {"b", "c"}, {"b"}),
        ({"a"}, {"b"}, set[str]()),
    ],
)
def test_a_gateway_uses_the_models_that_both_may_use(
    gateway: set[str] | None, named: set[str] | None, both: set[str] | None
) -> None:
    def rights(models: set[str] | None) -> Rights:
        allowed = None if models is None else frozenset(models)
        return rights_of([Rule(name="r", users=frozenset({ADA}), models=allowed)], ADA, (), OWN)

    assert delegated_rights(rights(gateway), rights(named)).models == both


def test_a_rule_may_allow_nothing() -> None:
    assert rights_of([Rule(name="r", allow=frozenset())], ADA, (), OWN).allowed == frozenset()


def test_every_right_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Right)


OPERATORS = {
    "unload_model": Right.MANAGE,
    "pin": Right.MANAGE,
    "unpin": Right.MANAGE,
    "swap": Right.MANAGE,
    "add_adapter": Right.MANAGE,
    "remove_adapter": Right.MANAGE,
    "log_level": Right.MANAGE,
    "add_model": Right.MANAGE,
    "export_model": Right.MANAGE,
    "import_model": Right.MANAGE,
    "end_model_transfer": Right.MANAGE,
    "copy_model": Right.MANAGE,
    "export_session": Right.MANAGE,
    "read_copy": Right.MANAGE,
    "store_copy": Right.MANAGE,
    "import_session": Right.MANAGE,
    "end_transfer": Right.MANAGE,
    "drain": Right.DRAIN,
    "exchange_served": Right.DELEGATE,
}


def test_what_changes_things_for_all_takes_more_than_using_them() -> None:
    reported = {name: c.right for name, c in CALLS.items() if c.right not in (None, Right.USE)}
    assert reported == OPERATORS


@pytest.mark.parametrize(("call", "params"), [("sessions", SessionsParams), ("queue", QueueParams)])
def test_a_list_takes_a_right_where_it_is_of_all_users(
    call: str, params: type[SessionsParams] | type[QueueParams]
) -> None:
    assert right_for(CALLS[call], params(all=True)) is Right.SEE_ALL
    assert right_for(CALLS[call], params()) is None


def test_a_quota_goes_by_the_connection_opened_last_of_those_that_are_open() -> None:
    rules = [
        Rule(name="staff", groups=frozenset({STAFF}), sessions_max=7),
        Rule(name="guests", groups=frozenset({GUESTS}), sessions_max=2),
        Rule(name="rest", sessions_max=1),
    ]
    access = Access(rules, OWN)
    connections: dict[int, Any] = {group: Stranger(ADA, [group]) for group in (STAFF, GUESTS)}

    def sessions_max() -> int | None:
        return access.quota_of(ADA).sessions_max

    assert sessions_max() is None, "it bounds nothing while the groups are being read"
    wait_until(lambda: sessions_max() is not None)
    assert sessions_max() == 1, "the system knows no groups of this number"
    access.add_connection(connections[STAFF])
    assert sessions_max() == 7
    access.add_connection(connections[GUESTS])
    assert sessions_max() == 2
    access.set_rules(rules[:1])
    assert (sessions_max(), access.rights_of_connection(connections[STAFF]).quota.sessions_max) == (
        None,
        7,
    )
    access.set_rules(rules)
    access.remove_connection(connections[GUESTS])
    assert sessions_max() == 7
    access.remove_connection(connections[STAFF])
    access.remove_connection(connections[STAFF])
    assert sessions_max() == 7, "its dormant sessions stay within the same bound"
    access.set_rules(rules)
    wait_until(lambda: sessions_max() != 7)  # the system is asked again after a reload
    assert sessions_max() == 1


def test_the_system_names_the_groups_of_a_user_who_was_never_connected() -> None:
    user = next(u for u in pwd.getpwall() if u.pw_uid not in (ROOT, OWN))
    access = Access([Rule(name="r", groups=frozenset({user.pw_gid}), sessions_max=3)], OWN)
    wait_until(lambda: access.quota_of(user.pw_uid).sessions_max is not None)
    assert access.quota_of(user.pw_uid).sessions_max == 3
    assert access.quota_of(1 << 30).sessions_max is None


def test_a_database_of_users_that_does_not_answer_delays_nobody() -> None:
    answers, asked = threading.Event(), list[int]()

    def read_groups(uid: int) -> list[int]:
        asked.append(uid)
        assert answers.wait(60)
        return [STAFF]

    rules = [
        Rule(name="staff", groups=frozenset({STAFF}), sessions_max=7),
        Rule(name="ada", users=frozenset({ADA}), sessions_max=5),
        Rule(name="rest", sessions_max=1),
    ]
    access = Access(rules, OWN, UserGroups(read_groups))
    assert access.quota_of(ADA).sessions_max == 5, "a rule names her"
    assert [access.quota_of(BOB).sessions_max for _ in range(3)] == [None] * 3
    answers.set()
    wait_until(lambda: access.quota_of(BOB).sessions_max is not None)
    assert access.quota_of(BOB).sessions_max == 7 and asked == [BOB]
    answers.clear()
    access.set_rules(rules)
    assert access.quota_of(BOB).sessions_max == 7, "the earlier answer counts until the next one"
    answers.set()


def test_the_groups_of_few_users_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.daemon.access.rights.USERS_MAX", 2)
    access = Access([Rule(name="r", groups=frozenset({STAFF}), sessions_max=3)], OWN)
    for uid in (ADA, BOB, ADA, BOB + 1):
        connection: Any = Stranger(uid, [STAFF])
        access.add_connection(connection)
        access.remove_connection(connection)
    assert [access.quota_of(uid).sessions_max for uid in (ADA, BOB, BOB + 1)] == [3, None, 3]
