"""The decision which connection gets a place, and which one is closed for it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from inferd.backends.errors import Busy
from inferd.ipc.server.connection_places import OPERATOR_PLACES, Places

ADA, BOB, ROOT = 1, 2, 0


@dataclass(eq=False)
class Connection:
    uid: int
    idle_since_s: float | None = 0.0
    is_operator: bool = False


def fill(places: Places[Connection], uid: int, idle_since_s: float | None = 0.0) -> int:
    """Open connections of a user until one is refused; return how many were accepted."""
    count = 0
    while True:
        try:
            places.take_place(Connection(uid, idle_since_s, uid == ROOT))
        except Busy:
            return count
        count += 1


def held(places: Places[Connection], uid: int) -> int:
    return sum(connection.uid == uid for connection in places.holders)


@pytest.mark.parametrize("idle_since_s", [None, 0.0])
def test_one_user_cannot_take_all_places(idle_since_s: float | None) -> None:
    places = Places[Connection](256)
    assert fill(places, ADA, idle_since_s) == 217
    assert places.take_place(Connection(BOB)) is None


def test_places_stay_free_for_operators_though_all_users_take_what_they_can() -> None:
    places = Places[Connection](256)
    for uid in range(1, 100):
        fill(places, uid, None)
    assert len(places.holders) == 256 - OPERATOR_PLACES
    assert fill(places, ROOT, None) == OPERATOR_PLACES


@pytest.mark.parametrize("connections_max", range(1, 20))
def test_a_small_maximum_still_has_places_for_users(connections_max: int) -> None:
    assert fill(Places[Connection](connections_max), ADA) >= max(1, connections_max // 2)


def test_the_connection_longest_without_a_request_is_closed_for_a_user_with_few() -> None:
    places = Places[Connection](256)
    for idle_since_s in (None, 5.0, 2.0, 3.0):
        places.take_place(Connection(ADA, idle_since_s))
    fill(places, ADA, 9.0)
    given = [places.take_place(Connection(BOB)) for _ in range(60)]

    closed = [connection for connection in given if connection is not None]
    assert given.index(closed[0]) > 20, "free places are taken first"
    assert [connection.idle_since_s for connection in closed[:4]] == [2.0, 3.0, 5.0, 9.0]
    assert {connection.uid for connection in closed} == {ADA}
    assert held(places, ADA) + held(places, BOB) <= 248


def test_a_user_cannot_close_connections_of_one_who_has_less_than_twice_as_many() -> None:
    places = Places[Connection](256)
    fill(places, ADA)
    fill(places, BOB)
    assert held(places, ADA) >= 2 * (held(places, BOB) - 1)
    with pytest.raises(Busy):
        places.take_place(Connection(BOB))


def test_connections_with_requests_are_not_closed() -> None:
    places = Places[Connection](256)
    fill(places, ADA, None)
    fill(places, BOB)
    assert held(places, ADA) == 217


def test_operators_connections_are_closed_only_for_operators() -> None:
    places = Places[Connection](16)
    fill(places, ROOT)
    with pytest.raises(Busy):
        places.take_place(Connection(ADA))
    closed = places.take_place(Connection(BOB, is_operator=True))
    assert closed is not None and closed.uid == ROOT


def test_the_errors_say_what_is_full_and_what_to_do() -> None:
    places = Places[Connection](256)
    fill(places, ADA)
    with pytest.raises(Busy, match="user 1 has 217 connections") as refused:
        places.take_place(Connection(ADA))
    assert refused.value.data == {
        "connections_max": 256, "connections": 217, "retry_after_s": 1.0
    }  # fmt: skip
    assert "connections-max" in refused.value.hint


def test_a_released_place_is_free_and_releasing_twice_changes_nothing() -> None:
    places = Places[Connection](1)
    one = Connection(ADA)
    places.take_place(one)
    places.release_place(one)
    places.release_place(one)
    assert places.take_place(Connection(ADA)) is None


def test_a_changed_maximum_applies_to_the_next_connection() -> None:
    places = Places[Connection](256)
    fill(places, ADA)
    places.connections_max = 512
    assert fill(places, ADA) == 441 - 217
