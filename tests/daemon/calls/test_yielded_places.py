"""Contexts that yield their place while they are idle, over real sockets to a real daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd.backends.errors import (
    Busy,
    Cancelled,
    InvalidArgument,
    SessionExpired,
    ShuttingDown,
    Timeout,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.calls.test_places import Guest, wait_until_empty
from tests.daemon.metrics.scraping import scrape_metrics
from tests.echo import echo_model
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

PLACES = 2
CONFIG = f"""
[daemon]
sessions-max = {PLACES}
idle-yield-ms = 0
dormant-sessions-max = 12
idle-timeout-ms = 400000

"""
MODELS = echo_model("echo", slots=PLACES + 1) + echo_model("slow", slots=PLACES + 1, step_ms=5)
GREEDY = '{"temp": 0, "n-predict": 12, "append": true}'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    directory = tmp_path_factory.mktemp("models")
    tiny = f'[models.tiny]\nfile = "{write_tiny("llama", directory).name}"\nslots = 1\n'
    with running_daemon(CONFIG + MODELS + tiny, models_dir=directory) as daemon:
        yield daemon


@pytest.fixture
def daemon(running: RunningDaemon) -> RunningDaemon:
    wait_until_empty(running)
    return running


class Crowd(Guest):
    """A connection whose turns occupy all places."""

    def __init__(self, daemon: RunningDaemon) -> None:
        super().__init__(daemon)
        self.contexts = [self.context("slow") for _ in range(PLACES)]
        for context in self.contexts:
            self.begin_stream(context, "x" * 2000)

    def __enter__(self) -> Crowd:
        return self


def begin_chat(client: Guest, context: int, **params: object) -> int:
    """Begin a chat on a yielded context; return the request's id once it waits."""
    waiting = client.stat("sessions_waiting")
    number = client.start_request("chat", context=context, prompt="hello", raw=True, **params)
    client.wait_for(sessions_waiting=waiting + 1)
    return number


def test_the_hello_has_the_idle_timeout(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        assert client.server_hello[1]["limits"]["idle_timeout_ms"] == 400_000


def test_many_contexts_take_turns_in_few_places(daemon: RunningDaemon) -> None:
    with Guest(daemon) as guest:
        contexts = [guest.open() for _ in range(4 * PLACES)]
        for turn in (b"one", b"two"):
            for number, context in enumerate(contexts):
                guest.set_input(context, b"%d %s" % (number, turn))
                guest.call("compute", context=context)
            for number, context in enumerate(contexts):
                assert guest.output(context) == b"%d %s" % (number, turn)
        stats = guest.call("stats")["stats"]
        assert (stats["sessions"], stats["sessions_yielded"]) == (PLACES, 3 * PLACES)
        scraped = scrape_metrics(daemon)
        assert scraped("sessions_yielded") == 3 * PLACES
        assert scraped("session_yields_total") >= 7 * PLACES
        listed = guest.call("sessions", dormant=True)["sessions"]
        assert sorted(s["context"] for s in listed) == sorted(contexts)
        assert sorted(s["has_place"] for s in listed) == [False] * 3 * PLACES + [True] * PLACES


def test_a_call_on_a_yielded_context_waits_for_a_place_and_reading_it_does_not(
    daemon: RunningDaemon,
) -> None:
    with Guest(daemon) as guest:
        context = guest.open()
        guest.set_input(context, b"hello")
        guest.call("compute", context=context)
        with Crowd(daemon) as crowd:
            assert guest.output(context) == b"hello"
            assert guest.metadata(context)["input_tokens"] == len("hello") + 2
            guest.call("fini_single", context=context)
            with pytest.raises(Timeout) as caught:
                guest.call("chat", context=context, prompt="x", raw=True, queue_timeout_s=0.01)
            assert caught.value.data == {"timeout": "queue"}
            with pytest.raises(Timeout) as caught:
                guest.call("chat", context=context, prompt="x", raw=True, timeout_s=0.01)
            assert caught.value.data == {"timeout": "total"}
            request = begin_chat(guest, context)
            other = guest.start_request("set_options", context=context, options={"temp": 0})
            guest.wait_for(sessions_waiting=2)
            crowd.close_context(crowd.contexts[0])
            assert guest.wait_result(request)["text"] == b"hello"
            assert guest.wait_result(other) == {}
            assert guest.stat("sessions") == PLACES


@pytest.mark.parametrize("end", ["cancel", "delete", "close", "drop"])
def test_a_context_that_ends_while_a_call_waits(daemon: RunningDaemon, end: str) -> None:
    with Guest(daemon) as guest, Guest(daemon) as observer:
        context = guest.open()
        with Crowd(daemon):
            request = begin_chat(guest, context)
            if end == "drop":
                guest.socket.close()
            elif end == "cancel":
                assert guest.call("cancel", context=context)["cancelled"]
                with pytest.raises(Cancelled):
                    guest.wait_result(request)
            else:
                guest.call("delete_session" if end == "delete" else "close_execution_context",
                           context=context)  # fmt: skip
                with pytest.raises(InvalidArgument, match="there is no execution context"):
                    guest.wait_result(request)
            observer.wait_for(sessions_waiting=0, sessions_yielded=1 if end == "cancel" else 0)


def test_a_yielded_session_is_deleted_by_its_id(daemon: RunningDaemon) -> None:
    with Guest(daemon) as guest, Guest(daemon) as other:
        call, session = "init_execution_context_with_session_id", {"session_id": "diary"}
        context = guest.call(call, graph=guest.graph, **session)["context"]
        guest.set_input(context, b"dear diary")
        with Crowd(daemon):
            assert guest.call(call, graph=guest.graph, **session)["context"] == context
            with pytest.raises(Busy):
                other.call(call, graph=other.graph, **session)
            assert other.call("delete_session", **session)["deleted"]
            assert other.stat("sessions_yielded") == 0
            with pytest.raises(InvalidArgument):
                guest.output(context)


def test_a_yielded_session_with_an_id_can_be_opened_after_its_connection(
    daemon: RunningDaemon,
) -> None:
    call, session = "init_execution_context_with_session_id", {"session_id": "kept"}
    with Guest(daemon) as guest:
        context = guest.call(call, graph=guest.graph, **session)["context"]
        guest.call("chat", context=context, prompt="first", raw=True)
        with Crowd(daemon):
            guest.wait_for(sessions_yielded=1)
    wait_until_empty(daemon)
    with Guest(daemon) as guest:
        found = guest.call(call, graph=guest.graph, **session)
        assert found["attached"]
        assert guest.metadata(found["context"])["input_tokens"] > len("first")
        guest.close_context(found["context"])


def test_contexts_past_the_bound_of_dormant_sessions_expire(daemon: RunningDaemon) -> None:
    with Guest(daemon) as guest:
        contexts = [guest.open() for _ in range(PLACES + 12 + 1)]
        with pytest.raises(SessionExpired):
            guest.output(contexts[0])
        for context in contexts[1:]:
            assert guest.output(context) == b""


def test_a_daemon_that_shuts_down_refuses_calls_that_wait() -> None:
    with (
        running_daemon(CONFIG + MODELS) as daemon,
        Guest(daemon) as guest,
        Guest(daemon) as operator,
    ):
        context = guest.open()
        with Crowd(daemon):
            request = begin_chat(guest, context)
            operator.start_request("drain")
            with pytest.raises(ShuttingDown):
                guest.wait_result(request)


def test_a_restored_context_continues_as_one_that_never_yielded(daemon: RunningDaemon) -> None:
    prompts = [b"Once upon a time there was a king", b" who had three sons", b" and a bird."]

    def answers(guest: Guest, *, yields: bool) -> list[tuple[bytes, int]]:
        context, found = guest.context("tiny", GREEDY), []
        for number, prompt in enumerate(prompts):
            guest.set_input(context, prompt)
            guest.call("compute", context=context)
            found.append((guest.output(context), guest.metadata(context)["input_tokens"]))
            for other in range(PLACES if yields else 0):
                other_context = guest.context("tiny", GREEDY)
                guest.set_input(other_context, b"%d %d another text" % (other, number))
                guest.call("compute", context=other_context)
        return found

    with Guest(daemon) as guest:
        expected = answers(guest, yields=False)
    wait_until_empty(daemon)
    with Guest(daemon) as guest:
        yields = scrape_metrics(daemon)("session_yields_total")
        assert answers(guest, yields=True) == expected
        assert scrape_metrics(daemon)("session_yields_total") >= yields + 2 * len(prompts)
