"""The process that answers the requests of jobs for the daemon, by which it was started.

It runs the gateway's application without a listener: the requests come from the daemon over the
standard input, a socket, and are answered as those of HTTP clients. For each owner of jobs it is a
client of the daemon, which knows it by its process id. It ends with the standard input.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.abc
import msgspec

from ...ipc import job_messages as j
from ...ipc.names import Priority
from ...wire.frames import ANY_LENGTH, FrameReader, pack_frame
from .app import Gateway
from .callers import Caller, DaemonUser, UsageLimits
from .exchange import Exchange
from .exchange.exchange import LINK, Message
from .heads import Origins
from .limits import Limits
from .openai import OPENAI
from .turns import ConnectionPool, TurnRunner, new_client

DAY_S = 86_400.0
LIMITS = Limits(queue_s_max=DAY_S, turn_s_max=DAY_S, receive_s_max=DAY_S, hold_s=0.0)
"""The daemon bounds the requests, and cancels those of jobs that have ended."""
NICENESS = 10
"""The process leaves the cores to the daemon and to models, which compute for others too."""
_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCaller(Caller):
    """The owner of a job, whose requests have the job's class unless they name a lower one."""

    def class_of(self, priority: Priority | None, default: Priority = "normal") -> Priority:
        return self.priority_max if priority is None else priority


class JobLink:
    """The place of a client's connection, for a request of a job."""

    unread = blocked = False
    uid: int | None = None

    def __init__(self, caller: Caller, response_id: str):
        self.caller = caller
        self.response_id: str | None = response_id

    def take_place(self, caller: str) -> None:
        """Do nothing: the daemon bounds the requests."""

    def withdraw_place(self) -> None:
        """Do nothing."""

    def linger(self) -> None:
        """Do nothing."""

    def write_now(self, data: bytes) -> bool:
        """Have the part written by the exchange."""
        return False

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Do nothing: a request is cancelled by its task."""

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Do nothing."""


class JobGateway(Gateway):
    """The gateway's application, for requests whose caller is known."""

    async def run(self) -> None:
        """Show the places of waiting streams, until cancelled."""
        await self._waiting.run()

    def _identify(self, exchange: Exchange) -> Caller:
        assert isinstance(exchange.link, JobLink), "only this process makes exchanges"
        return exchange.link.caller


class Events:
    """Splits a stream of server-sent events into their data."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete with *data*; comments have none."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        lines = [line for block in blocks for line in block.split(b"\n")]
        found = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
        return [each for each in found if each.startswith(b"{")]


class JobProcess:
    """Answers the daemon's requests, each in a task. Lives on the event loop."""

    def __init__(self, stream: anyio.abc.SocketStream, socket_path: str):
        self._stream = stream
        self._writing = anyio.Lock()
        self._scopes: dict[int, anyio.CancelScope] = {}
        connect = partial(new_client, socket=socket_path, timeout_s=DAY_S, software="inferd jobs")
        pool = ConnectionPool(connect, LIMITS.connections_max)
        self._app = JobGateway(
            [OPENAI], TurnRunner(pool, LIMITS), LIMITS, Origins((), (), any_host=True)
        )

    async def run(self) -> None:
        """Answer requests until the daemon closes the socket."""
        frames = FrameReader(ANY_LENGTH)
        decoder = msgspec.msgpack.Decoder(j.Command)
        async with anyio.create_task_group() as group:
            group.start_soon(self._app.run)
            while True:
                try:
                    data = await self._stream.receive(_READ_BYTES)
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    os._exit(0)  # it has nothing to save, and the daemon nobody to wait for it
                for frame in frames.read_frames(data):
                    command = decoder.decode(frame)
                    if isinstance(command, j.Compute):
                        scope = self._scopes[command.number] = anyio.CancelScope()
                        group.start_soon(self._answer, command, scope)
                    elif command.number in self._scopes:
                        self._scopes[command.number].cancel()

    async def _write(self, answer: j.Answer) -> None:
        async with self._writing:
            with anyio.CancelScope(shield=True):  # half a frame could not be read
                await self._stream.send(pack_frame(answer))

    async def _answer(self, command: j.Compute, scope: anyio.CancelScope) -> None:
        with scope:
            done = await self._compute(command)
            await self._write(done)
        del self._scopes[command.number]

    async def _compute(self, command: j.Compute) -> j.Done:
        """Run a request through the application, and return its response."""
        body, events, parts = command.body, Events(), list[bytes]()
        status, retry_after_s, is_stream = 500, None, False
        if command.response_id:
            body = msgspec.json.encode({**msgspec.json.decode(body), "stream": True})

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, retry_after_s, is_stream
            if message["type"] == "http.response.start":
                headers = {bytes(k).lower(): bytes(v) for k, v in message["headers"]}
                status, is_stream = message["status"], b"event-stream" in headers[b"content-type"]
                if (text := headers.get(b"retry-after", b"")).isdigit():
                    retry_after_s = float(text)
            elif is_stream:
                for data in events.add(message["body"]):
                    await self._write(j.Event(number=command.number, data=data))
            else:
                parts.append(message["body"])

        await self._app(self._scope(command, len(body)), receive, send)
        return j.Done(
            number=command.number,
            status=status,
            body=b"".join(parts),
            retry_after_s=retry_after_s,
        )

    def _scope(self, command: j.Compute, size: int) -> Message:
        models = None if command.models is None else frozenset(command.models)
        limits = UsageLimits(**command.key_limits)
        caller = JobCaller(
            name=command.user,
            user=DaemonUser(command.user, command.label, command.key, limits),
            priority_max=command.priority,
            models=models,
        )
        headers = {"host": "localhost", "content-type": "application/json"}
        headers["content-length"] = str(size)
        return {
            "type": "http",
            "method": "POST",
            "path": command.url,
            "raw_path": command.url.encode(),
            "query_string": b"",
            "scheme": "http",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": None,
            "extensions": {LINK: JobLink(caller, command.response_id)},
        }


async def answer_requests(socket_path: str) -> None:
    """Answer requests over the standard input."""
    os.nice(NICENESS)
    sock = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    sock.setblocking(False)
    stream = await anyio.abc.UNIXSocketStream.from_socket(sock)
    await JobProcess(stream, socket_path).run()


def main() -> None:
    """Answer requests until the standard input ends."""
    logging.basicConfig(format="%(message)s", level="WARNING")
    anyio.run(answer_requests, sys.argv[1])


if __name__ == "__main__":
    main()
