"""The request that gets a place among the open sessions, and the session that yields its own."""

from __future__ import annotations

import math

from inferd.scheduler.owner import Owner
from inferd.scheduler.priority import Priority
from inferd.sessions.admission.label_shares import OwnerCounts
from inferd.sessions.admission.place_grants import (
    IN_USE_S,
    Grant,
    Holder,
    PlaceRequest,
    PlaceState,
    next_grant,
    next_yield_in_s,
)

ADA, BOB, EVE = Owner(1), Owner(2), Owner(3)
NOW = 100.0


def places(
    *holders: Holder[str], limits: dict[Owner, int] | None = None, places_max: int = 3
) -> PlaceState[str]:
    held = OwnerCounts()
    for holder in holders:
        held.add(holder.owner, 1)
    bounds = {owner.user: limit for owner, limit in (limits or {}).items()}
    return PlaceState(places_max, held, lambda: holders, lambda user: bounds.get(user, 1000), 10.0)


def idle(owner: Owner, seconds: float, name: str = "") -> Holder[str]:
    return Holder(name or f"{owner} idle for {seconds}", owner, NOW - seconds)


def busy(owner: Owner) -> Holder[str]:
    return Holder("busy", owner, None)


def granted(state: PlaceState[str], *requests: PlaceRequest) -> Grant[str] | None:
    return next_grant(requests, state, NOW)


def test_a_free_place_goes_by_class_then_to_the_user_with_fewest_places_then_by_arrival() -> None:
    low, first, second = PlaceRequest(BOB, Priority.LOW), PlaceRequest(ADA), PlaceRequest(ADA)
    fewer, high = PlaceRequest(EVE), PlaceRequest(ADA, Priority.HIGH)
    state, order = places(busy(ADA), busy(BOB)), []
    waiting = [low, second, first, fewer, high]
    while waiting:
        grant = granted(state, *waiting)
        assert grant is not None and grant.yielding is None
        waiting.remove(grant.request)
        order.append(grant.request)
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
