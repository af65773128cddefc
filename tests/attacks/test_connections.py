"""A user with as many connections as possible, beside another user and beside root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from inferd.backends.errors import Busy, QuotaExceeded
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, as_user, client_of, daemon_for_all
from tests.raw import HELLO, RawClient

CONNECTIONS_MAX = 64
ADA_MAX = 49
"""Seven times as many as are free of the 56 that are not for operators."""
CONFIG = f"connections-max = {CONNECTIONS_MAX}\n"


@pytest.fixture
def shared() -> Iterator[RunningDaemon]:
    with daemon_for_all(CONFIG) as daemon:
        yield daemon


def opened(daemon: RunningDaemon, uid: int, count: int, stack: ExitStack) -> list[RawClient]:
    """Open *count* connections, or as many as the daemon accepts; each has made one call."""
    clients: list[RawClient] = []
    for _ in range(count):
        with as_user(uid):
            client = stack.enter_context(RawClient(daemon.socket, hello=False))
        try:
            client.write(HELLO)
            client.call("models")
        except (Busy, BrokenPipeError):
            break
        clients.append(client)
    return clients


def test_idle_connections_of_one_user_do_not_lock_out_others(shared: RunningDaemon) -> None:
    with ExitStack() as stack:
        victim = stack.enter_context(client_of(shared, BOB))
        context = victim.context()
        stream = victim.begin_stream(context, "one two three four five six")
        adas = opened(shared, ADA, CONNECTIONS_MAX, stack)
        assert len(adas) == ADA_MAX

        with client_of(shared, BOB) as another:
            assert another.call("models")
        with RawClient(shared.socket) as root:
            assert root.call("stats")["stats"]["connections"] >= ADA_MAX
        assert victim.wait_result(stream)


def test_the_longest_idle_connection_is_closed_for_a_user_with_few(shared: RunningDaemon) -> None:
    with ExitStack() as stack:
        adas = opened(shared, ADA, CONNECTIONS_MAX, stack)
        context = adas[0].context()
        streaming = adas[0].start_request("stream", context=context, prompt="xyz", credit=1)
        adas[0].read_message()
        bobs = opened(shared, BOB, 12, stack)
        assert len(bobs) == 12, "more than are free"

        error = adas[1].goodbye()
        assert isinstance(error, Busy)
        assert error.data["connections_max"] == CONNECTIONS_MAX and error.hint
        adas[0].write([5, streaming, 1000])
        assert adas[0].wait_result(streaming), "a connection with a request stays"
        assert adas[-1].call("models"), "so does the one used last"


def test_all_places_of_other_users_leave_some_for_root(shared: RunningDaemon) -> None:
    with ExitStack() as stack:
        for uid in range(ADA, ADA + 20):
            opened(shared, uid, CONNECTIONS_MAX, stack)
        assert opened(shared, 0, 4, stack)


def test_a_rule_bounds_the_connections_of_each_user() -> None:
    config = f"[access.ada]\nusers = [{ADA}]\nconnections-max = 2\n"
    with daemon_for_all(config) as daemon, ExitStack() as stack:
        assert len(opened(daemon, ADA, 2, stack)) == 2
        with as_user(ADA), RawClient(daemon.socket, hello=False) as third:
            error = third.goodbye()
        assert isinstance(error, QuotaExceeded)
        assert error.data["bound"] == "access.ada.connections-max"
        assert error.data["connections_max"] == 2
        assert len(opened(daemon, BOB, 4, stack)) == 4
