"""A reply that is larger than a client accepts becomes an error, and the connection stays open."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from inferd import AsyncClient, Client
from inferd.backends import SamplingParams
from inferd.backends.errors import InferdError, InvalidArgument, TooLarge
from inferd.ipc import messages as w
from inferd.ipc.client.embeddings import TEXTS_BYTES_MAX, TEXTS_PER_CALL, in_batches
from inferd.ipc.server.connection import Request, ServerConnection
from inferd.ipc.server.server import Server
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from inferd.sessions.turn.turn import PROBABILITIES_MAX, Turn
from inferd.testing import running_daemon
from inferd.wire.frames import FRAME_BYTES_MAX, NESTING_MAX, REPLY_BYTES_MAX, pack_frame
from tests.raw import RawClient

ENVELOPE_BYTES = len(pack_frame([2, 1, w.OutputResult(data=bytes(1 << 20))])) - 4 - (1 << 20)


class SizedReplies:
    """A handler whose replies have as many bytes as the request says."""

    def __init__(self, *, at_once: bool):
        self.at_once = at_once

    def server_hello(self) -> w.ServerHello:
        limits = w.Limits(
            frame_bytes_max=FRAME_BYTES_MAX,
            reply_bytes_max=REPLY_BYTES_MAX,
            nesting_max=NESTING_MAX,
            requests_max=8,
            credit_default=1,
            credit_max=1,
            tensor_bytes_max=1,
            sessions_max=1,
        )
        return w.ServerHello(
            protocol=w.PROTOCOL_VERSION, software="sized", instance=1, limits=limits
        )

    def may_begin_call(self, request: Request) -> bool:
        return False

    def begin_call(self, request: Request, end: Any) -> bool:
        raise AssertionError("no call may begin")

    def runs_at_once(self, request: Request) -> bool:
        return self.at_once

    def run_at_once(self, request: Request) -> Any:
        return w.OutputResult(data=bytes(request.params.size_max))

    async def run_call(self, request: Request) -> Any:
        return self.run_at_once(request)

    def admit_connection(self, connection: ServerConnection) -> bool:
        return False

    def connection_greeted(self, connection: ServerConnection, hello: w.ClientHello) -> None:
        return

    async def connection_delegated(
        self, connection: ServerConnection, hello: w.ClientHello
    ) -> None:
        return

    def connection_ended(self, connection: ServerConnection) -> None: ...

    def connection_refused(self, connection: ServerConnection, error: InferdError) -> None: ...

    def accept_failed(self, error: OSError) -> None: ...

    def call_refused(self, call: str, error: InferdError) -> None:
        raise error

    def call_failed(self, operation: str, error: Exception) -> None:
        raise error


@asynccontextmanager
async def sized_replies(path: Path, *, at_once: bool) -> AsyncIterator[AsyncClient]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        async with anyio.create_task_group() as group:
            handler = SizedReplies(at_once=at_once)
            await group.start(Server(handler, handler).serve, listener)
            async with AsyncClient(path) as client:
                yield client
            group.cancel_scope.cancel()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_reply_past_the_limit_is_refused_and_one_at_the_limit_is_sent(
    tmp_path: Path, at_once: bool
) -> None:
    anyio.run(get_replies_at_the_limit, tmp_path, at_once)


async def get_replies_at_the_limit(tmp_path: Path, at_once: bool) -> None:
    most = REPLY_BYTES_MAX - ENVELOPE_BYTES
    async with sized_replies(tmp_path / "socket", at_once=at_once) as client:
        assert len(await client.get_output(1, size_max=most)) == most
        with pytest.raises(TooLarge) as caught:
            await client.get_output(1, size_max=most + 1)
        assert caught.value.data == {
            "bytes": REPLY_BYTES_MAX + 1,
            "reply_bytes_max": REPLY_BYTES_MAX,
        }
        assert await client.get_output(1, size_max=1) == b"\0"


def test_many_tokens_are_detokenized_in_several_calls() -> None:
    tokens = [*b"hello world, "] * 20_000
    with running_daemon() as daemon:
        with Client(daemon.socket) as client:
            graph = client.load_by_name("echo")
            assert client.detokenize(graph, tokens) == bytes(tokens)
            assert client.detokenize(graph, []) == b""
        with RawClient(daemon.socket) as raw:
            graph = raw.call("load_by_name", name="echo")["graph"]
            with pytest.raises(InvalidArgument, match="65536"):
                raw.call("detokenize", graph=graph, tokens=[1] * (w.DETOKENIZE_TOKENS_MAX + 1))
            for bad in (-1, 1 << 20):
                with pytest.raises(InvalidArgument, match=f"token {bad} is not in"):
                    raw.call("detokenize", graph=graph, tokens=[97, bad, 98])


def test_texts_to_embed_are_sent_in_calls_that_fit_a_frame() -> None:
    texts = ["a" * 300_000, *["\u65e5" * 100_000] * 3, *["b"] * 200, "c" * 2_000_000, "d"]
    batches = list(in_batches(texts, TEXTS_PER_CALL, TEXTS_BYTES_MAX))

    assert [text for batch in batches for text in batch] == texts
    for batch in batches:
        size = sum(len(text.encode()) for text in batch)
        assert len(batch) <= TEXTS_PER_CALL and (size <= TEXTS_BYTES_MAX or len(batch) == 1)
    assert len(batches) == 7


def test_probabilities_of_all_answers_of_a_call_fit_a_reply() -> None:
    spec = m.TaskSpec(id=1, owner=Owner(1), tokens=b"", sampling=SamplingParams(n_probs=99))
    one = m.TokenLogprob(7, b"a", -1.0, [m.TokenLogprob(7, b"a", -1.0)] * 99)
    turns = [Turn(None, spec, lambda _: None) for _ in range(16)]  # type: ignore[arg-type]
    for turn in turns:
        turn.probabilities_max //= len(turns)
        for _ in range(100):
            turn.report(m.Tokens(1, [7], b"a", logprobs=[one]))
    assert sum(100 * len(turn.logprobs) for turn in turns) <= PROBABILITIES_MAX
