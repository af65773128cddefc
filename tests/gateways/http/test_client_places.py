"""The decisions which connections stay open, and which ones are cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import Busy, InvalidArgument, QuotaExceeded
from inferd.gateways.http.clients import (
    READ_BYTES_MIN,
    STALLED_S,
    UNREAD_BYTES_MAX,
    UNREAD_MAX,
    ClientPlaces,
    UnreadClients,
    _network_of,
)
from inferd.gateways.http.limits import FILES_RESERVED, clients_max_of

Places = ClientPlaces[int]


def arrived(places: Places, address: str, count: int, first: int = 0) -> list[int | None]:
    """Add connections that are numbered from *first*; return those that are closed for them."""
    return [places.add_arriving(first + number, address) for number in range(count)]


def placed(places: Places, group: str, count: int, first: int = 0, *, busy: bool) -> None:
    for number in range(first, first + count):
        assert places.add_arriving(number, "address") is None
        if busy:
            places.note_busy(number)
        places.take_place(number, group)


def test_connections_without_a_place_close_none_that_has_one() -> None:
    places = Places(1024)
    assert (places.places_max, places.group_max) == (896, 784)
    placed(places, "key a", 784, busy=False)
    placed(places, "key b", 112, 800, busy=False)
    assert arrived(places, "attacker", 128, 1000) == [None] * 128, "an eighth is always theirs"
    assert arrived(places, "attacker", 1000, 2000) == [*range(1000, 1128), *range(2000, 2872)]
    assert all(places.has_place(number) for number in range(784))


def test_a_burst_of_newcomers_may_take_all_free_places() -> None:
    places = Places(1024)
    placed(places, "key a", 24, busy=False)
    assert arrived(places, "address", 1000, 100) == [None] * 1000
    assert arrived(places, "address", 1, 2000) == [100], "the oldest"
    for number in range(101, 861):
        assert places.take_place(number, "key a") is None
    assert places.take_place(861, "key a") == 0, "one group has at most 784"
    assert places.take_place(862, "key b") is None


def test_the_address_with_most_connections_without_a_place_loses_one() -> None:
    places = Places(8)
    arrived(places, "a", 2)
    arrived(places, "b", 6, 10)
    assert arrived(places, "a", 1, 20) == [10]
    assert arrived(places, "a", 1, 21) == [11]
    assert arrived(places, "a", 1, 22) == [0], "its own, when none has more"
    assert arrived(places, "b", 1, 23) == [12]


def test_a_connection_with_a_request_is_closed_only_if_all_have_one() -> None:
    places = Places(2)
    arrived(places, "a", 2)
    places.note_busy(0)
    assert arrived(places, "a", 1, 2) == [1]
    places.note_busy(2)
    assert arrived(places, "a", 1, 3) == [0]


def test_a_full_gateway_closes_the_longest_idle_connection_of_the_largest_group() -> None:
    places = Places(16)  # 14 places, of which one group gets 13
    placed(places, "key a", 10, busy=False)
    placed(places, "key b", 4, 20, busy=False)
    places.note_busy(0)
    places.note_idle(0)
    places.add_arriving(30, "address")
    assert places.take_place(30, "key c") == 1, "0 had a request since"
    places.note_busy(2)
    places.add_arriving(31, "address")
    assert places.take_place(31, "key b") == 3
    places.add_arriving(32, "address")
    assert places.take_place(32, "key a") == 4


def test_a_connection_with_a_place_and_a_request_stays() -> None:
    places = Places(16)
    placed(places, "key a", 10, busy=True)
    placed(places, "key b", 4, 20, busy=True)
    places.add_arriving(30, "address")
    with pytest.raises(Busy) as caught:
        places.take_place(30, "key c")
    assert caught.value.data["clients_max"] == 16 and "--clients-max" in str(caught.value)
    assert not places.has_place(30) and len(places) == 15
    places.note_idle(20)
    assert places.take_place(30, "key c") == 20


def test_one_group_leaves_an_eighth_of_the_places() -> None:
    places = Places(16)
    placed(places, "key a", 13, busy=True)
    places.add_arriving(30, "address")
    with pytest.raises(QuotaExceeded):
        places.take_place(30, "key a")
    assert places.take_place(30, "key b") is None
    places.note_idle(5)
    places.add_arriving(31, "address")
    assert places.take_place(31, "key a") == 5, "its own"


def test_a_place_is_taken_once_and_given_back() -> None:
    places = Places(16)
    placed(places, "key a", 1, busy=True)
    assert places.take_place(0, "key b") is None and places.group_of(0) == "key a"
    arrived(places, "x", 2, 10)
    places.withdraw_place(0, "x")
    assert not places.has_place(0) and places.group_of(0) == "x"
    places.withdraw_place(0, "x")
    places.remove(0)
    places.remove(0)
    places.note_idle(0)
    assert places.take_place(0, "key a") is None and len(places) == 2


CHANGES = st.sampled_from(["arrive", "take", "busy", "idle", "remove", "withdraw"])


@given(st.lists(st.tuples(CHANGES, st.integers(0, 30), st.sampled_from("abc")), max_size=200))
def test_no_place_is_lost_or_taken_twice(changes: list[tuple[str, int, str]]) -> None:
    places, open_ones = Places(10), set[int]()
    for change, number, group in changes:
        closed = None
        if change == "arrive" and number not in open_ones:
            closed = places.add_arriving(number, group)
            open_ones.add(number)
        elif change == "take":
            try:
                closed = places.take_place(number, f"key {group}")
            except Busy:
                assert not places.has_place(number)
        elif change == "withdraw":
            places.withdraw_place(number, group)
        elif change == "remove":
            places.remove(number)
            open_ones.discard(number)
        elif change == "busy":
            places.note_busy(number)
        else:
            places.note_idle(number)
        assert closed is None or (closed in open_ones and closed != number)
        open_ones.discard(closed if closed is not None else -1)
        assert len(places) == len(open_ones) <= places.clients_max
        assert all(number in places for number in open_ones)
        with_place = [each for each in open_ones if places.has_place(each)]
        assert len(with_place) <= places.places_max


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_client_has_one_network(host: str, network: str) -> None:
    assert _network_of(host) == network


def test_the_limit_of_open_files_bounds_the_connections() -> None:
    assert clients_max_of(None, 600, 1 << 20) == 1024
    assert clients_max_of(None, 1, 1 << 20) == 425
    assert clients_max_of(None, 600, 512) == 512 - FILES_RESERVED
    assert clients_max_of(384, 600, 512) == 384
    with pytest.raises(InvalidArgument) as caught:
        clients_max_of(385, 600, 512)
    assert "--clients-max" in str(caught.value)


# Clients that do not read.

MIB = 1 << 20


@pytest.fixture
def unread() -> Iterator[UnreadClients[int]]:
    yield UnreadClients(30.0)


def cut(unread: UnreadClients[int], now: float, size: int = MIB) -> dict[int, str]:
    return dict(unread.overdue(now, lambda _: size))


def test_a_client_that_reads_too_little_is_cut_off_after_a_time(unread: UnreadClients[int]) -> None:
    unread.add(1, "a", MIB, 0.0)
    assert not cut(unread, 29.0, MIB - READ_BYTES_MIN + 1)
    assert cut(unread, 30.0, MIB - READ_BYTES_MIN + 1) == {1: "time"}
    assert not cut(unread, 30.0, MIB - READ_BYTES_MIN)
    assert not cut(unread, 59.0, MIB - READ_BYTES_MIN)
    unread.remove(1)
    assert not cut(unread, 90.0)


def test_the_longest_unread_connections_of_a_group_are_cut_off(unread: UnreadClients[int]) -> None:
    for number in range(UNREAD_MAX + 3):
        unread.add(number, "a", 100_000, float(number) / 100)
    unread.add(50, "b", 100_000, 0.0)
    assert not cut(unread, STALLED_S / 2, 100_000), "they may still read"
    assert cut(unread, 2 * STALLED_S, 100_000) == dict.fromkeys(range(3), "connections")


def test_a_group_keeps_at_most_as_many_bytes_as_are_free(unread: UnreadClients[int]) -> None:
    for number in range(10):
        unread.add(number, "a", UNREAD_BYTES_MAX // 16, float(number) / 100)
    unread.add(50, "b", UNREAD_BYTES_MAX // 16, 0.0)
    found = cut(unread, 2.0, UNREAD_BYTES_MAX // 16)
    assert found == dict.fromkeys(range(3), "bytes"), "7 and 1 of 16 parts leave 8"
