"""The request that gets a place among the open sessions, and the session that yields its own."""

from __future__ import annotations

import math

from inferd.scheduler.owner import Owner, Priority
from inferd.sessions.admission.bounds import OwnerCounts
from inferd.sessions.lifetimes.place_grants import (
    IN_USE_S,
    PLACE_S_MIN,
    Grant,
    Holder,
    PlaceRequest,
    PlaceState,
    PlaceUse,
    next_grant,
    next_yield_in_s,
)

ADA, BOB, EVE = Owner(1), Owner(2), Owner(3)
NOW = 100.0
LAG_S = 0.2
HIGH = Priority.HIGH


def places(
    *holders: Holder[str],
    limits: dict[Owner, int] | None = None,
    places_max: int = 3,
    strict: bool = False,
) -> PlaceState[str]:
    held = OwnerCounts()
    for holder in holders:
        held.add(holder.owner, 1)
    bounds = {owner.user: limit for owner, limit in (limits or {}).items()}
    return PlaceState(
        places_max,
        held,
        lambda: holders,
        lambda user: bounds.get(user, 1000),
        10.0,
        LAG_S,
        priority_strict=strict,
    )


def idle(owner: Owner, seconds: float, name: str = "") -> Holder[str]:
    return Holder(name or f"{owner} idle for {seconds}", owner, NOW - seconds)


def busy(owner: Owner) -> Holder[str]:
    return Holder("busy", owner, None)


def read(
    owner: Owner, name: str = "read", priority: Priority = Priority.NORMAL, since: float = 60.0
) -> Holder[str]:
    """Return a session whose turn has a reader, and its place for *since* seconds."""
    return Holder(name, owner, None, PlaceUse(NOW - since, priority))


def unread(
    owner: Owner,
    seconds: float,
    name: str = "unread",
    priority: Priority = Priority.NORMAL,
    *,
    ends: bool = False,
) -> Holder[str]:
    """Return a session whose turn nobody has read for some time."""
    return Holder(name, owner, None, PlaceUse(NOW - 60.0, priority, NOW - seconds, ends))


def granted(state: PlaceState[str], *requests: PlaceRequest) -> Grant[str] | None:
    return next_grant(requests, state, NOW)


def granted_in_turn(state: PlaceState[str], *requests: PlaceRequest) -> list[PlaceRequest]:
    """Return the requests in the order in which free places go to them."""
    waiting, order = list(requests), []
    while waiting:
        grant = granted(state, *waiting)
        assert grant is not None and grant.yielding is None
        waiting.remove(grant.request)
        order.append(grant.request)
    return order


def test_a_free_place_goes_to_the_user_with_fewest_places_and_a_user_s_own_by_class() -> None:
    first, second = PlaceRequest(ADA), PlaceRequest(ADA)
    low, fewer, high = PlaceRequest(BOB, Priority.LOW), PlaceRequest(EVE), PlaceRequest(ADA, HIGH)
    state = places(busy(ADA), busy(BOB))
    order = granted_in_turn(state, low, second, first, fewer, high)
    assert order == [fewer, low, high, first, second], "no class overtakes another user's request"


def test_a_class_wins_no_tie_between_users() -> None:
    """Else sessions that are opened and closed with the highest class would always be first."""
    old, bob, new = PlaceRequest(ADA, Priority.LOW), PlaceRequest(BOB), PlaceRequest(ADA, HIGH)
    assert granted(places(), old, new, bob) == Grant(bob)


def test_strict_classes_come_before_numbers_of_places() -> None:
    first, second = PlaceRequest(ADA), PlaceRequest(ADA)
    low, fewer, high = PlaceRequest(BOB, Priority.LOW), PlaceRequest(EVE), PlaceRequest(ADA, HIGH)
    state = places(busy(ADA), busy(BOB), strict=True)
    order = granted_in_turn(state, low, second, first, fewer, high)
    assert order == [high, fewer, first, second, low]


def test_a_user_at_their_own_bound_does_not_hold_up_others() -> None:
    ada, bob = PlaceRequest(ADA, Priority.URGENT), PlaceRequest(BOB)
    assert granted(places(busy(ADA), limits={ADA: 1}), ada, bob) == Grant(bob)
    assert granted(places(busy(ADA), limits={ADA: 1}), ada) is None


def test_an_idle_session_yields_from_its_tenth_second_on() -> None:
    request = PlaceRequest(BOB)
    for seconds, yields in ((0.0, False), (9.99, False), (10.0, True), (60.0, True)):
        grant = granted(places(busy(BOB), busy(EVE), idle(ADA, seconds)), request)
        assert (grant is not None) == yields
    assert granted(places(busy(ADA), busy(ADA), busy(ADA)), request) is None


def test_the_user_with_most_places_yields_the_longest_idle_one() -> None:
    state = places(idle(EVE, 90), idle(ADA, 20), idle(ADA, 30, "oldest"), busy(ADA), places_max=4)
    assert granted(state, request := PlaceRequest(BOB)) == Grant(request, "oldest")


def test_nothing_yields_while_a_place_is_free() -> None:
    request = PlaceRequest(BOB)
    assert granted(places(idle(ADA, 90), busy(ADA)), request) == Grant(request)


def test_calls_every_nine_seconds_do_not_keep_more_places_than_others_have() -> None:
    request = PlaceRequest(BOB)
    hoard = [idle(ADA, 0.9), idle(ADA, 1.0, "yields"), idle(ADA, 0.5)]
    assert granted(places(*hoard), request) == Grant(request, "yields")
    assert granted(places(idle(ADA, 9), idle(ADA, 9), busy(BOB)), request) is None
    assert granted(places(*hoard), PlaceRequest(ADA)) is None, "a user's own are not over a share"


def test_at_their_own_bound_only_their_own_sessions_yield() -> None:
    request = PlaceRequest(ADA)
    others = [idle(BOB, 90), idle(BOB, 90)]
    state = places(*others, idle(ADA, 20, "own"), limits={ADA: 1}, places_max=9)
    assert granted(state, request) == Grant(request, "own")
    assert granted(places(*others, busy(ADA), limits={ADA: 1}, places_max=9), request) is None


def test_one_session_does_not_yield_where_a_bound_was_lowered_by_more() -> None:
    request = PlaceRequest(ADA)
    assert granted(places(*[idle(BOB, 90)] * 4), request) is None
    assert granted(places(*[idle(ADA, 90)] * 3, limits={ADA: 2}, places_max=9), request) is None


def test_the_next_yield_is_that_of_the_longest_idle_one() -> None:
    bob, waits = PlaceRequest(BOB), places(idle(ADA, 4), idle(EVE, 3), busy(EVE))
    assert next_yield_in_s([bob], waits, NOW) == 0.0, "Ada has more than Bob"
    waits = places(idle(ADA, 4), busy(BOB), busy(EVE))
    assert next_yield_in_s([bob], waits, NOW) == 6.0
    assert next_yield_in_s([bob], places(busy(ADA), busy(BOB)), NOW) == 10.0, "idle now at earliest"
    assert next_yield_in_s([bob], places(), NOW) == math.inf
    assert next_yield_in_s([], waits, NOW) == math.inf
    lowered = places(*[idle(ADA, 90)] * 4)
    assert next_yield_in_s([bob], lowered, NOW) == math.inf, "else it would be polled"
    held = OwnerCounts()
    held.add(ADA, 1)
    at_once = PlaceState(1, held, lambda: [busy(ADA)], lambda _: 9, yield_after_s=0.0)
    assert next_yield_in_s([bob], at_once, NOW) == IN_USE_S and granted(at_once, bob) is None


def test_labels_share_their_user_s_places() -> None:
    one, other = Owner(1, "one"), Owner(1, "other")
    first, second = PlaceRequest(one), PlaceRequest(other)
    state = places(busy(one), busy(ADA), places_max=9)
    assert granted(state, first, second) == Grant(second), "the label with fewer places"
    hoard = places(idle(one, 20, "own"), idle(one, 20), idle(BOB, 90), places_max=4)
    assert granted(hoard, first) == Grant(first, "own"), "past its share only its own yield"
    assert granted(hoard, second) == Grant(second)
    full = places(idle(one, 1, "over"), busy(one), busy(one))
    assert granted(full, second) == Grant(second, "over"), "over the share of the other label"


def test_a_turn_that_nobody_reads_yields_to_a_user_with_fewer_places_after_the_lag() -> None:
    request = PlaceRequest(BOB)
    for seconds, yields in ((0.0, False), (0.19, False), (LAG_S, True), (9.0, True)):
        grant = granted(places(unread(ADA, seconds), busy(ADA), busy(ADA)), request)
        assert (grant == Grant(request, "unread")) == yields
    state = places(unread(ADA, 0.1), busy(EVE), places_max=2)
    assert abs(next_yield_in_s([request], state, NOW) - 0.1) < 1e-9, "a timer finds it"


def test_users_with_similar_numbers_of_places_do_not_interrupt_each_other() -> None:
    request = PlaceRequest(BOB)
    for adas, bobs, yields in ((1, 0, True), (2, 1, False), (3, 1, True), (4, 2, False)):
        holders = [*[unread(ADA, 9)] * adas, *[busy(BOB)] * bobs]
        grant = granted(places(*holders, places_max=adas + bobs), request)
        assert (grant is not None) == yields
    assert granted(places(*[unread(ADA, 9)] * 3), PlaceRequest(ADA)) is None, "nor does a user"


def test_a_user_keeps_seven_eighths_of_the_places_for_turns_that_are_read() -> None:
    for places_max, kept in ((1, 1), (2, 1), (3, 2), (8, 7), (16, 14), (100, 87)):
        adas, bobs = places_max, 0
        while granted(
            places(*[read(ADA)] * adas, *[busy(BOB)] * bobs, places_max=places_max),
            PlaceRequest(BOB),
        ):
            adas, bobs = adas - 1, bobs + 1
        assert adas == kept


def test_two_users_together_leave_some_places_to_a_third() -> None:
    adas, bobs, eves = 50, 50, 0
    while grant := granted(
        places(*[read(ADA, "a")] * adas, *[read(BOB, "b")] * bobs, *[busy(EVE)] * eves,
               places_max=100),
        PlaceRequest(EVE),
    ):  # fmt: skip
        adas, bobs, eves = adas - (grant.yielding == "a"), bobs - (grant.yielding == "b"), eves + 1
    assert eves >= 6


def test_a_turn_that_is_read_has_its_place_for_a_while() -> None:
    request = PlaceRequest(BOB)
    for since, yields in ((0.0, False), (PLACE_S_MIN - 0.1, False), (PLACE_S_MIN, True)):
        grant = granted(places(*[read(ADA, since=since)] * 3), request)
        assert (grant is not None) == yields


def test_sessions_without_a_reader_yield_before_others_and_first_those_that_end() -> None:
    request = PlaceRequest(BOB)
    order = [
        idle(ADA, 2, "idle"),
        unread(ADA, 1, "ends", HIGH, ends=True),
        unread(ADA, 9, "low", Priority.LOW),
        unread(ADA, 8, "longest"),
        unread(ADA, 7, "unread"),
        read(ADA, "low and read", Priority.LOW),
        read(ADA, "latest", since=2.0),
        read(ADA, "first"),
    ]
    for number, holder in enumerate(order):
        left = [*order[number:], *[busy(ADA)] * number]
        state = places(*left, places_max=len(order))
        assert granted(state, request) == Grant(request, holder.session)


def test_with_strict_classes_a_lower_class_yields_whatever_its_user_has() -> None:
    low, high = PlaceRequest(BOB, Priority.LOW), PlaceRequest(BOB, HIGH)
    for strict in (False, True):
        state = places(read(ADA), read(EVE, "low", Priority.LOW), busy(BOB), strict=strict)
        assert granted(state, low) is None
        assert granted(state, high) == (Grant(high, "low") if strict else None)


def test_turns_yield_to_no_user_at_their_own_bound() -> None:
    state = places(*[unread(ADA, 9)] * 3, busy(BOB), limits={BOB: 1}, places_max=4)
    assert granted(state, PlaceRequest(BOB)) is None


def test_labels_share_the_places_that_turns_yield() -> None:
    one, other = Owner(2, "one"), Owner(2, "other")
    hoard = [*[unread(ADA, 9)] * 7]
    state = places(*hoard, busy(one), limits={BOB: 4}, places_max=8)
    first, second = PlaceRequest(one), PlaceRequest(other)
    assert granted(state, first, second) == Grant(second, "unread"), "the label with fewer"
    state = places(*hoard, busy(one), busy(one), limits={BOB: 4}, places_max=9)
    assert granted(state, first) is None, "a label has at most what is left of its user's bound"
