"""Waits for a place among the open sessions, over real sockets to a real daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inferd import Client
from inferd.backends.errors import Busy, InvalidArgument, QuotaExceeded, ShuttingDown, Timeout
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.metrics.scraping import scrape_metrics
from tests.daemon.other_users import ADA, as_user, daemon_for_all
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

PLACES, WAITING_MAX, WAITING_USER_MAX = 3, 12, 8
SOON_S, ATTEMPTS = 0.1, 8
"""A free place is taken within this time. One such time is enough: other programs of the machine
may delay some.
"""
CONFIG = f"""
sessions-max = {PLACES}
sessions-waiting-max = {WAITING_MAX}
sessions-waiting-user-max = {WAITING_USER_MAX}
idle-yield-ms = 3600000
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all(CONFIG + echo_model("echo")) as running:
        yield running


class Guest(RawClient):
    """A connection with a graph."""

    def __init__(self, daemon: RunningDaemon) -> None:
        super().__init__(daemon.socket)
        self.graph = int(self.call("load_by_name", name="echo")["graph"])

    def __enter__(self) -> Guest:
        return self

    def open(self, **params: object) -> int:
        return int(self.call("init_execution_context", graph=self.graph, **params)["context"])

    def request_context(self, **params: object) -> int:
        """Request a context; return the request's id once it waits."""
        waiting, keywords = self.stat("sessions_waiting"), {"queue_timeout_s": 30.0, **params}
        number = self.start_request("init_execution_context", graph=self.graph, **keywords)
        self.wait_for(sessions_waiting=waiting + 1)
        return number

    def stat(self, name: str) -> int:
        return int(self.call("stats")["stats"][name])

    def wait_for(self, **stats: int) -> None:
        wait_until(lambda: all(self.stat(name) == value for name, value in stats.items()))

    def opened(self, number: int) -> int:
        return int(self.wait_result(number)["context"])

    def close_context(self, context: int) -> None:
        self.call("finalize_execution_context", context=context)


def wait_until_empty(daemon: RunningDaemon) -> None:
    """Wait until the connections of an earlier test have ended."""
    with Guest(daemon) as guest:
        guest.wait_for(sessions=0, sessions_waiting=0, connections=1)


@contextmanager
def crowd(daemon: RunningDaemon) -> Iterator[tuple[Guest, list[int]]]:
    """Open as many contexts as there are places, on a connection that ends with the block."""
    wait_until_empty(daemon)
    with Guest(daemon) as holder:
        yield holder, [holder.open() for _ in range(PLACES)]


def test_a_free_place_is_taken_within_100_ms(daemon: RunningDaemon) -> None:
    seconds = [seconds_until_opened(daemon)]
    while seconds[-1] >= SOON_S and len(seconds) < ATTEMPTS:
        seconds.append(seconds_until_opened(daemon))
    assert seconds[-1] < SOON_S, seconds
    waits = scrape_metrics(daemon).families["inferd_session_wait_seconds"].samples
    assert [s.value for s in waits if s.name.endswith("_count")] >= [1.0]


def seconds_until_opened(daemon: RunningDaemon) -> float:
    """Return the time in which a waiting request gets a place, after one became free."""
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        with pytest.raises(Busy):
            guest.open()
        request = guest.request_context()
        holder.close_context(contexts[0])
        freed_at = time.monotonic()
        context = guest.opened(request)
        seconds = time.monotonic() - freed_at
        guest.set_input(context, b"hello")
        guest.call("compute", context=context)
        assert guest.output(context) == b"hello"
    return seconds


def test_places_go_by_class_and_then_by_arrival(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        low, first, second, high = (
            guest.request_context(priority=name) for name in ("low", "normal", "normal", "high")
        )
        opened = []
        for request, others in ((high, [low, first, second]), (first, [low, second])):
            holder.close_context(contexts.pop())
            opened.append(guest.opened(request))
            assert not any(map(guest.has_answer, others))
        holder.close_context(contexts.pop())
        assert guest.opened(second) and not guest.has_answer(low)
        found = {s["context"]: s["priority"] for s in guest.call("sessions")["sessions"]}
        assert [found[context] for context in opened] == ["high", "normal"]


def test_a_connection_that_ends_frees_its_places_for_those_who_wait(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, _), Guest(daemon) as guest:
        requests = [guest.request_context() for _ in range(PLACES)]
        holder.socket.close()
        assert len({guest.opened(request) for request in requests}) == PLACES


def test_a_graph_that_is_unloaded_meanwhile_gets_no_context(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        request = guest.request_context()
        guest.call("unload", graph=guest.graph)
        holder.close_context(contexts[0])
        with pytest.raises(InvalidArgument, match="graph"):
            guest.wait_result(request)
        assert guest.stat("sessions") == PLACES - 1


def test_a_wait_ends_with_its_timeout(daemon: RunningDaemon) -> None:
    with crowd(daemon), Guest(daemon) as guest:
        with pytest.raises(Timeout, match="no place for the session was free") as caught:
            guest.open(queue_timeout_s=0.01)
        assert caught.value.data == {"timeout": "queue"} and caught.value.hint
        assert guest.stat("sessions_waiting") == 0


def test_a_client_that_vanishes_leaves_the_queue(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        with Guest(daemon) as vanishing:
            vanishing.request_context(priority="urgent")
        guest.wait_for(sessions_waiting=0)
        request = guest.request_context()
        holder.close_context(contexts[0])
        assert guest.opened(request)


def test_a_cancelled_request_leaves_the_queue(daemon: RunningDaemon) -> None:
    with crowd(daemon), Guest(daemon) as guest:
        request = guest.request_context()
        assert guest.call("cancel", request=request)["cancelled"]
        assert guest.stat("sessions_waiting") == 0


def test_a_user_cannot_fill_the_queue_and_another_with_fewer_places_goes_first(
    daemon: RunningDaemon,
) -> None:
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        for _ in range(WAITING_USER_MAX):
            guest.request_context()
        with pytest.raises(Busy, match=f"{WAITING_USER_MAX} requests already wait") as caught:
            guest.open(queue_timeout_s=30.0)
        assert caught.value.data["bound"] == "sessions-waiting-user-max"
        assert caught.value.retry_after_s > 0 and caught.value.hint
        with as_user(ADA):
            ada = Guest(daemon)
        with ada:
            request = ada.request_context()
            holder.close_context(contexts[0])
            assert ada.opened(request)
            for _ in range(WAITING_MAX - WAITING_USER_MAX):
                ada.request_context()
            with pytest.raises(Busy) as caught:
                ada.open(queue_timeout_s=30.0)
            assert caught.value.data["bound"] == "sessions-waiting-max"


def test_a_session_with_an_id_waits_and_finds_its_history(daemon: RunningDaemon) -> None:
    wait_until_empty(daemon)
    opening = {"session_id": "waits", "persist": False}
    call = "init_execution_context_with_session_id"
    with Guest(daemon) as guest:
        context = guest.call(call, graph=guest.graph, **opening)["context"]
        guest.set_input(context, b"kept")
        guest.call("finalize_execution_context", context=context, keep=True)
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        request = guest.start_request(call, graph=guest.graph, queue_timeout_s=30.0, **opening)
        guest.wait_for(sessions_waiting=1)
        holder.close_context(contexts[0])
        result = guest.wait_result(request)
        assert result["attached"]
        again = guest.call(call, graph=guest.graph, queue_timeout_s=30.0, **opening)
        assert again == result, "it needs no other place"
        guest.call("compute", context=result["context"])
        assert guest.output(result["context"]) == b"kept"
        guest.close_context(result["context"])


def test_branches_wait_for_all_their_places(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        fork = {"context": contexts[0], "n": PLACES - 1, "priority": "high"}
        with pytest.raises(Timeout, match="no place"):
            holder.call("fork_session", queue_timeout_s=0.01, **fork)
        with pytest.raises(Busy):
            holder.call("fork_session", **fork)
        request = holder.start_request("fork_session", queue_timeout_s=30.0, **fork)
        guest.wait_for(sessions_waiting=1)
        other = guest.request_context()
        for context in contexts[1:]:
            assert not holder.has_answer(request)
            holder.close_context(context)
        branches = holder.wait_result(request)["contexts"]
        assert len(branches) == PLACES - 1 and not guest.has_answer(other)
        holder.close_context(branches[0])
        assert guest.opened(other)


def test_branches_that_can_never_have_places_do_not_wait(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, contexts), pytest.raises((Busy, QuotaExceeded)):
        holder.call("fork_session", context=contexts[0], n=PLACES, queue_timeout_s=30.0)


def test_a_fork_whose_session_ends_meanwhile_makes_no_branch(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, contexts), Guest(daemon) as guest:
        request = holder.start_request("fork_session", context=contexts[0], queue_timeout_s=30.0)
        guest.wait_for(sessions_waiting=1)
        holder.start_request("finalize_execution_context", context=contexts[0])
        with pytest.raises(InvalidArgument):
            holder.wait_result(request)
        guest.wait_for(sessions=PLACES - 1, sessions_waiting=0)


@pytest.mark.parametrize(
    "params", [{"queue_timeout_s": -1.0}, {"priority": "highest", "queue_timeout_s": 1.0}]
)
def test_bad_values_are_refused(daemon: RunningDaemon, params: dict[str, object]) -> None:
    with Guest(daemon) as guest, pytest.raises(InvalidArgument):
        guest.open(**params)


def test_the_client_s_sessions_wait(daemon: RunningDaemon) -> None:
    with crowd(daemon) as (holder, contexts), Client(daemon.socket) as client:
        with pytest.raises(Timeout), client.session("echo", queue_timeout=0.01):
            pass
        graph = client.load_by_name("echo")
        with pytest.raises(Timeout):
            client.init_execution_context(graph, queue_timeout=0.01, priority="high")
        holder.close_context(contexts[0])
        with client.session("echo", queue_timeout=30.0, priority="high") as session:
            assert str(session.chat("hello")) == "hello"
            with pytest.raises(Timeout):
                client.fork_session(session.context, queue_timeout=0.01, priority="high")


def test_a_daemon_that_shuts_down_refuses_those_who_wait() -> None:
    with (
        running_daemon("[daemon]\nsessions-max = 1\n" + echo_model("echo")) as daemon,
        Guest(daemon) as holder,
        Guest(daemon) as guest,
    ):
        holder.open()
        request = guest.request_context()
        holder.call("drain")
        with pytest.raises(ShuttingDown):
            guest.wait_result(request)
