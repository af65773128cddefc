"""A user whose turns hold all places of open sessions: others get theirs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import Busy, Cancelled, EndOfSequence, SessionExpired
from inferd.gateways.http.callers import new_key
from inferd.testing import RunningDaemon
from tests.daemon.metrics.scraping import until
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.own_paths import Caller
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

PLACES, OTHERS = 24, 5
KEYS_PLACES = 4
OTHER_CALLS = 3
SOME, SOME_KEPT = 16, 14
"""A maximum of sessions, and seven eighths of it."""
ENDLESS = {"n-predict": -1, "ignore-eos": True}
CONFIG = f"sessions-max = {PLACES}\nidle-yield-ms = 3600000\n"
FEW_PLACES = "sessions-max = 3\nidle-yield-ms = 3600000\n"
TEXT = "".join(f"{number} " for number in range(200))


@pytest.fixture
def shared() -> Iterator[RunningDaemon]:
    with daemon_for_all(CONFIG + echo_model("echo", slots=4, ctx_size=4096)) as daemon:
        yield daemon


@pytest.fixture
def few() -> Iterator[RunningDaemon]:
    with daemon_for_all(FEW_PLACES + echo_model("echo", slots=4)) as daemon:
        yield daemon


def graph_of(client: RawClient) -> int:
    return int(client.call("load_by_name", name="echo")["graph"])


def opened(client: RawClient, session_id: str = "", **params: Any) -> int:
    """Open a session, with an id if it is given; return its context."""
    call = "init_execution_context" + ("_with_session_id" if session_id else "")
    named = {"session_id": session_id} if session_id else {}
    return int(client.call(call, graph=graph_of(client), **named, **params)["context"])


def begin_unread(client: RawClient, context: int, prompt: str = TEXT) -> int:
    """Stream with credit for one event, which is read; return the request."""
    number = client.start_request("stream", context=context, prompt=prompt, raw=True, credit=1)
    before = len(client.events)
    while len(client.events) == before:
        client.events.append(client.read_message())
    return number


def hold_all_places(client: RawClient, count: int, **params: Any) -> dict[int, int]:
    """Open *count* contexts with a turn each; return the requests by context."""
    graph = graph_of(client)
    contexts = [
        int(client.call("init_execution_context", graph=graph, **params)["context"])
        for _ in range(count)
    ]
    return {
        context: client.start_request(
            "stream", context=context, prompt="x" * 500, raw=True, credit=1, options=ENDLESS
        )
        for context in contexts
    }


def has_place(client: RawClient, context: int) -> bool:
    found = {s["context"]: s["has_place"] for s in client.call("sessions")["sessions"]}
    return bool(found[context])


@pytest.mark.parametrize("wait", [{}, {"queue_timeout_s": 30.0}])
def test_unread_turns_of_one_user_do_not_shut_out_others(
    shared: RunningDaemon, wait: dict[str, float]
) -> None:
    with client_of(shared, ADA) as ada, ExitStack() as stack:
        hold_all_places(ada, PLACES, priority="low")
        assert ada.call("stats")["stats"]["sessions"] == PLACES
        for number in range(OTHERS):
            bob = stack.enter_context(client_of(shared, BOB + number))
            context = retried(bob, **wait)
            answer = bob.call("chat", context=context, prompt="hello", raw=True, timeout_s=20.0)
            assert answer["text"] == b"hello"
        assert ada.call("stats")["stats"]["sessions"] == PLACES


def retried(client: RawClient, **params: Any) -> int:
    """Open a session as a client does that retries when the daemon says."""
    for _ in range(5):
        try:
            return opened(client, **params)
        except Busy as error:
            assert error.retry_after_s <= 1.0
            time.sleep(error.retry_after_s)
    raise AssertionError("the daemon refused every try")


def text_of(client: RawClient, request: int) -> bytes:
    """Return the text that a stream's events have, whose offsets have no gap."""
    parts = [event[2] for event in client.events if event[1] == request]
    ends = [part.get("offset", 0) + len(part.get("tokens", ())) for part in parts]
    assert [part.get("offset", 0) for part in parts[1:]] == ends[:-1]
    return b"".join(part.get("text", b"") for part in parts)


def finished(client: RawClient, request: int) -> bytes:
    """Read a stream to its end, and return its whole text."""
    client.write([5, request, 1000])
    result = client.wait_result(request)
    return text_of(client, request) + bytes(result.get("text", b""))


def without_place(client: RawClient, contexts: Iterable[int]) -> int:
    """Return the context that has yielded its place."""
    [found] = [context for context in contexts if not has_place(client, context)]
    return found


def test_a_session_with_an_id_yields_and_continues_once_it_is_read(few: RunningDaemon) -> None:
    with client_of(few, ADA) as ada, client_of(few, BOB) as bob:
        contexts = [opened(ada, f"diary {number}") for number in range(3)]
        requests = {context: begin_unread(ada, context) for context in contexts}
        bobs = retried(bob)
        yielded = without_place(ada, requests)
        busy = begin_unread(bob, bobs)
        ada.write([5, requests[yielded], 1])
        wait_until(lambda: bob.call("stats")["stats"]["sessions_waiting"] == 1)
        assert not has_place(ada, yielded) and not ada.has_answer(requests[yielded])
        bob.call("close_execution_context", context=bobs)
        with pytest.raises(Cancelled):
            bob.wait_result(busy)
        for request in requests.values():
            assert finished(ada, request).decode() == TEXT


def test_a_sampled_answer_that_yielded_is_the_same_as_one_that_did_not(tmp_path: Path) -> None:
    model = f'[models.echo]\nfile = "{write_tiny("llama", tmp_path)}"\nslots = 2\nctx-size = 512\n'
    options = {"n-predict": 60, "seed": 7, "temp": 1.0, "ignore-eos": True}
    tmp_path.chmod(0o755)
    with daemon_for_all("sessions-max = 1\n" + model) as daemon, client_of(daemon, ADA) as ada:
        context = opened(ada, "story")
        begin = {"context": context, "prompt": "Once upon", "raw": True, "options": options}
        expected = finished(ada, ada.start_request("stream", credit=1, **begin))
        ada.call("reset", context=context)
        request = ada.start_request("stream", credit=9, **begin)
        while len([e for e in ada.events if e[1] == request]) < 9:
            ada.events.append(ada.read_message())
        with client_of(daemon, BOB) as bob:
            bobs = retried(bob)
            assert not has_place(ada, context)
            assert bob.call("chat", context=bobs, prompt="hello", options={"n-predict": 9})
            bob.call("close_execution_context", context=bobs)
        assert finished(ada, request) == expected != b""


def test_a_context_without_an_id_ends_with_an_error_that_says_what_to_do(
    few: RunningDaemon,
) -> None:
    with client_of(few, ADA) as ada, client_of(few, BOB) as bob:
        lost, kept, other = opened(ada), opened(ada, "diary"), opened(ada)
        requests = {context: begin_unread(ada, context) for context in (lost, kept)}
        requests[other] = ada.start_request(
            "stream", context=other, prompt="x" * 400, raw=True, credit=1000, options=ENDLESS
        )
        bob_context = retried(bob)
        with pytest.raises(Busy, match="nobody read") as caught:
            ada.wait_result(requests[lost])
        assert caught.value.retryable and "open the session with an id" in caught.value.hint
        assert caught.value.data["bound"] == "sessions-max" and caught.value.retry_after_s > 0
        with pytest.raises(SessionExpired, match="another user") as expired:
            ada.output(lost)
        assert expired.value.hint
        assert has_place(ada, kept) and has_place(ada, other)
        assert bob.call("chat", context=bob_context, prompt="hi", raw=True)["text"] == b"hi"


def test_a_pulled_turn_yields_between_two_tokens_and_continues(few: RunningDaemon) -> None:
    with client_of(few, ADA) as ada, client_of(few, BOB) as bob:
        contexts = [opened(ada) for _ in range(3)]
        texts = {}
        for context in contexts:
            ada.set_input(context, TEXT.encode())
            texts[context] = ada.compute_single(context)
        bobs = retried(bob)
        yielded = without_place(ada, texts)
        bob.call("close_execution_context", context=bobs)
        while True:
            try:
                texts[yielded] += ada.compute_single(yielded)
            except EndOfSequence:
                break
        assert texts[yielded].decode() == TEXT


def test_turns_that_are_read_keep_seven_eighths_of_the_places_and_lose_no_token() -> None:
    """`chat` has no credit: its reader is always there."""
    config = f"sessions-max = {SOME}\nidle-yield-ms = 3600000\n" + echo_model("echo", step_ms=2)
    with daemon_for_all(config) as some, client_of(some, ADA) as ada, ExitStack() as stack:
        graph = graph_of(ada)
        chats = []
        for _ in range(SOME):
            context = ada.call("init_execution_context", graph=graph)["context"]
            chats.append(ada.start_request("chat", context=context, prompt=TEXT, raw=True))
        contexts: list[int] = []
        while len(contexts) < SOME - SOME_KEPT:
            bob = stack.enter_context(client_of(some, BOB))
            contexts.append(retried(bob))
            answer = bob.call("chat", context=contexts[-1], prompt="hello", raw=True)
            assert answer["text"] == b"hello"
        stack.close()
        for chat in chats:
            assert ada.wait_result(chat)["text"].decode() == TEXT


def test_calls_that_wait_for_a_load_do_not_shut_out_others() -> None:
    """Their turns begin once their sessions have places again."""
    config = FEW_PLACES + echo_model("echo") + echo_model("late", load_ms=8000)
    with (
        daemon_for_all(config) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
        RawClient(daemon.socket) as root,
    ):
        contexts = [ada.context("late") for _ in range(3)]
        bob_graph = graph_of(bob)
        root.call("unload_model", name="late", force=True)
        chats = [
            ada.start_request("chat", context=context, prompt=TEXT, raw=True)
            for context in contexts
        ]
        bobs = bob.call("init_execution_context", graph=bob_graph, queue_timeout_s=30.0)["context"]
        assert sum(has_place(ada, context) for context in contexts) == 2
        assert not any(map(ada.has_answer, chats))
        bob.call("close_execution_context", context=bobs)
        for chat in chats:
            assert ada.wait_result(chat)["text"].decode() == TEXT


def unread_request(running: RunningGateway, key: str, stack: ExitStack) -> socket.socket:
    """Begin a streamed request whose response nobody reads."""
    fields = {"model": "echo", "prompt": "x" * 2000, "max_tokens": 2000, "logprobs": 5}
    body = json.dumps(fields | {"stream": True})
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30.0)
    sock.connect((running.host, running.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {running.address}\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return sock


def test_unread_streams_of_one_key_of_a_gateway_do_not_shut_out_other_keys(tmp_path: Path) -> None:
    keys = {name: new_key(name) for name in ("ada", "bob", "eve")}
    (tmp_path / "keys.toml").write_text("\n".join(entry for _, entry in keys.values()))
    config = f"sessions-max = {KEYS_PLACES}\n" + echo_model("echo", slots=1, ctx_size=9000)
    with (
        daemon_for_all(config) as daemon,
        gateway(daemon, "--keys", str(tmp_path / "keys.toml"), "--queue-timeout", "10") as http,
        ExitStack() as stack,
    ):
        socks = [unread_request(http, keys["ada"][0], stack) for _ in range(KEYS_PLACES)]
        unread = {"model_name": "echo", "reason": "reader"}
        reason = "num_requests_waiting_by_reason"
        until(daemon, lambda scraped: scraped(reason, **unread) == KEYS_PLACES - 1)
        for name in ("bob", "eve", "bob"):
            assert Caller(http, keys[name][0]).chat("echo", "hello") == "hello"
        with ThreadPoolExecutor(len(socks)) as threads:
            responses = list(threads.map(read_all, socks))
        errors = [response for response in responses if b"nobody read" in response]
        assert errors and len(errors) <= OTHER_CALLS
        assert sum(b"[DONE]" in response for response in responses) == KEYS_PLACES - len(errors)


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))
