"""Texts of one user beside the stream and the cheap calls of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import Closed, RawClient

TOKENS = 100
MODEL = echo_model("echo", ctx_size=200_000, step_ms=4, tokenize_ms=1)
"""A text of 1000 bytes takes 1 ms."""


class Sender:
    """A user who sends one text after another over several connections, and counts the answers."""

    def __init__(self, daemon: RunningDaemon, uid: int, text: str, connections: int):
        self.answers = 0
        self.first = threading.Event()
        self._lock = threading.Lock()
        self._clients = [client_of(daemon, uid) for _ in range(connections)]
        graphs = [c.call("load_by_name", name="echo")["graph"] for c in self._clients]
        self._threads = [
            threading.Thread(target=self._send, args=(client, graph, text))
            for client, graph in zip(self._clients, graphs, strict=True)
        ]

    def _send(self, client: RawClient, graph: int, text: str) -> None:
        try:
            while True:
                client.call("tokenize", graph=graph, text=text)
                with self._lock:
                    self.answers += 1
                self.first.set()
        except (Closed, OSError):
            return  # the test is over

    @contextmanager
    def sending(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        assert self.first.wait(60)
        try:
            yield
        finally:
            for client in self._clients:
                client.socket.shutdown(2)
            for thread in self._threads:
                thread.join()
            for client in self._clients:
                client.socket.close()


def read_tokens(client: RawClient, count: int) -> None:
    """Read so many tokens of a client's stream."""
    before = len(client.streamed_text)
    while len(client.streamed_text) < before + count:
        client.events.append(client.read_message())


@pytest.mark.parametrize(
    ("text_bytes", "connections", "answers_max"),
    [(12_000, 4, TOKENS // 3), (40_000, 1, TOKENS // 3)],
    ids=["short texts", "a long text"],
)
def test_a_stream_keeps_its_pace_beside_texts(
    text_bytes: int, connections: int, answers_max: int
) -> None:
    with daemon_for_all(MODEL) as daemon, client_of(daemon, ADA) as ada:
        ada.begin_stream(ada.context(), "x" * 4000)
        sender = Sender(daemon, BOB, "y" * text_bytes, connections)
        with sender.sending():
            read_tokens(ada, 20)
            before = sender.answers
            read_tokens(ada, TOKENS)
            assert sender.answers - before <= answers_max


def test_a_cheap_call_overtakes_texts_that_wait() -> None:
    with daemon_for_all(MODEL) as daemon, client_of(daemon, ADA) as ada:
        ada.begin_stream(ada.context(), "x" * 4000)
        graph = ada.call("load_by_name", name="echo")["graph"]
        sender = Sender(daemon, BOB, "y" * 12_000, connections=8)
        with sender.sending():
            before = sender.answers
            for _ in range(10):
                ada.call("tokenize", graph=graph, text="hello")
            assert sender.answers - before <= 20


def test_the_tokens_of_a_long_text_are_those_of_the_whole_text() -> None:
    with daemon_for_all(MODEL) as daemon, client_of(daemon, ADA) as ada:
        graph = ada.call("load_by_name", name="echo")["graph"]
        text = "".join(chr(65 + i % 50) for i in range(50_000))
        assert bytes(ada.call("tokenize", graph=graph, text=text)["tokens"]) == text.encode()
