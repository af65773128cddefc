"""A fake daemon for the client's tests: it answers from a table and records all requests.

The prompt `hold` sends one event and then nothing until it is cancelled; `refuse N` is refused with
`Busy` N times. Any other prompt is echoed word by word; with `queue_events`, two places in the
queue come first. Channels are served by the same rules, from `channel_answers`.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from inferd.backends.errors import Busy, Cancelled, EndOfSequence, InferdError, SessionBusy
from inferd.wire.frames import FrameReader, pack_frame

HELLO: dict[str, Any] = {
    "protocol": [1, 0],
    "software": "fake",
    "instance": 7,
    "limits": {
        "frame_bytes_max": 1 << 20,
        "reply_bytes_max": 8 << 20,
        "nesting_max": 64,
        "requests_max": 256,
        "credit_default": 64,
        "credit_max": 1024,
        "tensor_bytes_max": 8 << 20,
        "sessions_max": 100,
    },
}
DISCONNECTED = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
METADATA = {"stop_reason": "eos", "output_tokens": 2}
CANCELLED = {"stop_reason": "Cancelled", "output_tokens": 1}


class Exchange:
    """A request at the server's end."""

    def __init__(self, server: FakeServer, peer: FakePeer, number: int, call: str, params: Any):
        self.server, self.peer, self.number = server, peer, number
        self.call, self.params = call, params
        self.credit = params.get("credit", 64)
        self.more_credit = anyio.Event()
        self.cancelled = anyio.Event()

    async def emit(self, event: dict[str, Any]) -> None:
        """Send an event; wait for credit, as the daemon does."""
        while self.credit == 0:
            self.more_credit = anyio.Event()
            await self.more_credit.wait()
        self.credit -= 1
        await self.peer.send([4, self.number, event])

    async def hold(self) -> dict[str, Any]:
        """Wait until the request is cancelled, then raise `Cancelled`."""
        await self.cancelled.wait()
        raise Cancelled("the request was cancelled", data={"metadata": CANCELLED})


class ChannelStream:
    """The socket of a channel at the server's end."""

    def __init__(self, descriptor: int):
        self.socket = socket.socket(fileno=descriptor)
        self.socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                await anyio.wait_writable(self.socket)
            except OSError as exc:
                raise anyio.BrokenResourceError from exc

    async def receive_fds(self, size: int, _: int) -> tuple[bytes, list[int]]:
        await anyio.wait_readable(self.socket)
        try:
            data = self.socket.recv(size)
        except OSError as exc:
            raise anyio.BrokenResourceError from exc
        if not data:
            raise anyio.EndOfStream
        return data, []

    async def aclose(self) -> None:
        self.socket.close()


class FakePeer:
    """A connection, or a channel, at the server's end: its answers, and the list of its calls."""

    def __init__(
        self,
        stream: anyio.abc.UNIXSocketStream | ChannelStream,
        answers: dict[str, Answer],
        calls: list[tuple[str, dict[str, Any]]],
    ):
        self.stream, self.answers, self.calls = stream, answers, calls
        self.ended = False
        self.requests: dict[int, Exchange] = {}
        self.descriptors: list[int] = []
        self._lock = anyio.Lock()

    async def send(self, message: Any) -> None:
        await self.send_bytes(pack_frame(message))

    async def send_bytes(self, data: bytes) -> None:
        async with self._lock:
            await self.stream.send(data)

    def shut_down(self) -> None:
        """End a channel."""
        assert isinstance(self.stream, ChannelStream)
        self.stream.socket.shutdown(socket.SHUT_RDWR)


Answer = Callable[[Exchange], Awaitable[dict[str, Any]]]


class FakeServer:
    """A server that answers from `answers`; `calls` lists all requests so far, in order."""

    def __init__(self, path: Path):
        self.path = path
        self.hello: dict[str, Any] | None = msgspec.json.decode(msgspec.json.encode(HELLO))
        self.answers: dict[str, Answer] = dict(ANSWERS)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.credits: list[int] = []
        self.peers: list[FakePeer] = []
        self.channel_answers: dict[str, Answer] = {"compute": _compute, "cancel": _cancel}
        self.channel_calls: list[tuple[str, dict[str, Any]]] = []
        self.channels: list[FakePeer] = []
        self.refusals: dict[str, int] = {}
        self.inputs: dict[int, bytes] = {}
        self.remaining_words: dict[int, list[str]] = {}
        self.busy: set[int] = set()
        self.reading = anyio.Event()
        self.reading.set()
        self._changed = anyio.Event()

    def names(self) -> list[str]:
        """Return the names of all calls so far."""
        return [name for name, _ in self.calls]

    async def await_call(self, call: str, count: int = 1) -> None:
        """Wait until *call* has arrived *count* times."""
        while self.names().count(call) < count:
            await self._changed.wait()

    async def await_channel_call(self, call: str, count: int = 1) -> None:
        """Wait until *call* has arrived *count* times in channels."""
        while [name for name, _ in self.channel_calls].count(call) < count:
            await self._changed.wait()

    async def await_channel_end(self) -> None:
        """Wait until all channels have ended."""
        while not all(channel.ended for channel in self.channels):
            await self._changed.wait()

    async def await_held_turn(self) -> None:
        """Wait until a turn is held."""
        while not self.busy:
            await self._changed.wait()

    async def await_idle(self) -> None:
        """Wait until no request is in flight."""
        while any(peer.requests for peer in (*self.peers, *self.channels)):
            await self._changed.wait()

    async def stop_reading(self) -> None:
        """Receive at most one more part of the data, until `reading` is set."""
        self.reading = anyio.Event()

    async def cancel_all(self) -> None:
        """Cancel all requests."""
        for peer in self.peers:
            for exchange in peer.requests.values():
                exchange.cancelled.set()

    def change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def serve(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        listener = await anyio.create_unix_listener(self.path)
        async with listener, anyio.create_task_group() as self._group:
            task_status.started()
            await listener.serve(self._serve_one)

    def open_channel(self, descriptor: int) -> None:
        """Serve a channel, which does not end with a connection."""
        channel = FakePeer(ChannelStream(descriptor), self.channel_answers, self.channel_calls)
        self.channels.append(channel)
        self._group.start_soon(self._serve_channel, channel)

    async def _serve_channel(self, channel: FakePeer) -> None:
        assert isinstance(channel.stream, ChannelStream)
        with channel.stream.socket:
            await self._serve_requests(channel)

    async def _serve_one(self, stream: anyio.abc.SocketStream) -> None:
        assert isinstance(stream, anyio.abc.UNIXSocketStream)
        peer = FakePeer(stream, self.answers, self.calls)
        self.peers.append(peer)
        async with stream:
            if self.hello is not None:
                await peer.send([0, self.hello])
            await self._serve_requests(peer)

    async def _serve_requests(self, peer: FakePeer) -> None:
        try:
            async with anyio.create_task_group() as group:
                with suppress(*DISCONNECTED):
                    await self._read(peer, group)
                group.cancel_scope.cancel()
        finally:
            peer.ended = True
            peer.requests.clear()
            self.change()

    async def _read(self, peer: FakePeer, group: anyio.abc.TaskGroup) -> None:
        frames = FrameReader()
        while True:
            await self.reading.wait()
            data, fds = await peer.stream.receive_fds(1 << 16, 16)
            peer.descriptors += fds
            for frame in frames.read_frames(data):
                self._handle_message(peer, msgspec.msgpack.decode(frame), group)

    def _handle_message(
        self, peer: FakePeer, message: list[Any], group: anyio.abc.TaskGroup
    ) -> None:
        if message[0] == 5:
            self.credits.append(message[2])
            request = peer.requests.get(message[1])
            if request is not None:
                request.credit += message[2]
                request.more_credit.set()
        elif message[0] == 1:
            _, number, call, params = message
            exchange = peer.requests[number] = Exchange(self, peer, number, call, params)
            peer.calls.append((call, params))
            group.start_soon(self._answer, exchange)
        self.change()

    async def _answer(self, exchange: Exchange) -> None:
        peer, number = exchange.peer, exchange.number
        try:
            message: list[Any] = [2, number, await peer.answers[exchange.call](exchange)]
        except InferdError as exc:
            message = [3, number, exc.to_wire()]
        peer.requests.pop(number, None)
        with suppress(*DISCONNECTED):
            await peer.send(message)
        self.change()


async def _empty(_: Exchange) -> dict[str, Any]:
    return {}


async def _load(exchange: Exchange) -> dict[str, Any]:
    if exchange.params.get("progress"):
        for fraction in (0.25, 0.5, 1.0):
            await exchange.emit({"progress": fraction})
    return {"graph": 11, "model": exchange.params.get("name", ""), "ctx_size": 4096}


async def _init(exchange: Exchange) -> dict[str, Any]:
    return {"context": 12, "attached": exchange.params.get("session_id") == "known"}


def _words(text: str) -> list[str]:
    return [word + " " for word in text.split()]


def _prompt(exchange: Exchange) -> str:
    params = exchange.params
    if params.get("messages"):
        return str(params["messages"][-1]["content"])
    if params.get("prompt") is None:
        return exchange.server.inputs[params["context"]].decode()
    return str(params["prompt"])


async def _turn(exchange: Exchange) -> str:
    """Return the prompt of a turn, after the checks, refusals and holding common to all turns."""
    server, prompt = exchange.server, _prompt(exchange)
    context = exchange.params["context"]
    if context in server.busy:
        raise SessionBusy("a turn is under way")
    if prompt.startswith("refuse"):
        done = server.refusals.get(prompt, 0)
        if done < int(prompt.split()[1]):
            server.refusals[prompt] = done + 1
            raise Busy("full", data={"retry_after_s": 0.001})
    if prompt.startswith("hold"):
        server.busy.add(context)
        server.change()
        try:
            if exchange.call == "stream":
                await exchange.emit({"tokens": [1], "text": b"held "})
            await exchange.hold()
        finally:
            server.busy.discard(context)
    return prompt


async def _send_places(exchange: Exchange) -> None:
    for position in (2, 1) if exchange.params.get("queue_events") else ():
        place = {"position": position, "waiting": 5, "starts_in_s": 0.5}
        await exchange.peer.send([4, exchange.number, place])


async def _stream(exchange: Exchange) -> dict[str, Any]:
    await _send_places(exchange)
    for offset, word in enumerate(_words(await _turn(exchange))):
        await exchange.emit({"tokens": [offset], "text": word.encode(), "offset": offset})
    return {"text": b".", "metadata": METADATA}


async def _chat(exchange: Exchange) -> dict[str, Any]:
    await _send_places(exchange)
    return {"text": (await _turn(exchange)).encode(), "metadata": METADATA}


async def _cancel(exchange: Exchange) -> dict[str, Any]:
    number = exchange.params.get("request")
    others = [r for r in exchange.peer.requests.values() if r is not exchange]
    found = [r for r in others if number is None or r.number == number]
    for request in found:
        request.cancelled.set()
    return {"cancelled": bool(found)}


async def _fork(exchange: Exchange) -> dict[str, Any]:
    return {"contexts": list(range(13, 13 + exchange.params.get("n", 1))), "tokens": 7}


async def _set_input(exchange: Exchange) -> dict[str, Any]:
    params = exchange.params
    if params["index"] != 1:
        data = params["tensor"].get("data", b"")
        exchange.server.inputs[params["context"]] = data
        exchange.server.remaining_words[params["context"]] = _words(data.decode(errors="replace"))
    return {}


async def _compute_single(exchange: Exchange) -> dict[str, Any]:
    remaining = exchange.server.remaining_words[exchange.params["context"]]
    if not remaining:
        raise EndOfSequence("the turn has ended")
    return {"piece": remaining.pop(0).encode()}


async def _get_output(exchange: Exchange) -> dict[str, Any]:
    if exchange.params.get("index") == 1:
        return {"data": msgspec.json.encode(METADATA)}
    return {"data": exchange.server.inputs.get(exchange.params["context"], b"")}


async def _compute(exchange: Exchange) -> dict[str, Any]:
    inputs = exchange.params.get("inputs")
    return {"outputs": inputs, "metadata": METADATA} if inputs else {}


async def _open_channel(exchange: Exchange) -> dict[str, Any]:
    exchange.server.open_channel(exchange.peer.descriptors.pop())
    return {}


def fixed(**fields: Any) -> Answer:
    """Return an answer with these fields."""

    async def answer(_: Exchange) -> dict[str, Any]:
        return fields

    return answer


ANSWERS: dict[str, Answer] = {
    **dict.fromkeys(("load", "load_by_name", "load_by_name_with_config"), _load),
    **dict.fromkeys(
        ("init_execution_context", "init_execution_context_with_session_id", "prompt_init"), _init
    ),
    **dict.fromkeys(
        ("fini_single", "finalize_execution_context", "close_execution_context", "unload",
         "deinit_backend", "reset", "set_options", "unload_model", "pin", "unpin", "drain",
         "remove_adapter", "free_tensors", "write_buffer", "free_buffers"), _empty
    ),
    **dict.fromkeys(("get_output", "get_output_single"), _get_output),
    "register_buffer": fixed(buffer=13, size=9),
    "read_buffer": fixed(data=b"part"),
    "open_channel": _open_channel,
    "swap": fixed(fingerprint="f", previous_fingerprint="g"),
    "add_adapter": fixed(loaded=True, id="a", size_bytes=7),
    "set_input": _set_input,
    "compute": _compute,
    "compute_single": _compute_single,
    "prompt_compute": fixed(text="answer"),
    "run_inference": fixed(text=b"answer", metadata=METADATA),
    "init_backend": fixed(ignored=["device"]),
    "stream": _stream,
    "chat": _chat,
    "cancel": _cancel,
    "park": fixed(parked=True),
    "end_reasoning": fixed(ended=True),
    "fork_session": _fork,
    "rewind": fixed(tokens=5, turns=1, cached_tokens=2, kv="recomputed"),
    "history": fixed(messages=[{"role": "user"}], turns=[0], session={"context": 12}),
    "session_media": fixed(data=b"image", size=5, media_type="image/png"),
    "delete_session": fixed(deleted=True),
    "update_session": fixed(session={"context": 12}),
    "restore_session": fixed(session={"context": 12}),
    "list_deletions": fixed(deletions=[{"session_id": "old"}]),
    "end_transfer": fixed(),
    "add_model": fixed(file="/models/m.gguf", size_bytes=9, sha256="f"),
    "export_model": fixed(data=b"part", size=9),
    "import_model": fixed(arrived=True),
    "end_model_transfer": fixed(),
    "copy_model": fixed(source="a", size_bytes=9),
    "exchange_served": fixed(served={"fake": {"@ada": 5}}),
    "export_session": fixed(data=b"part", size=9),
    "import_session": fixed(size=9),
    "read_copy": fixed(stream="t", number=3, data=b"all", model="echo"),
    "store_copy": fixed(),
    "save_state": fixed(tokens=5, stored_tokens=5),
    "list_states": fixed(states=[{"name": "story"}]),
    "delete_state": fixed(deleted=True),
    "models": fixed(models=[{"name": "fake"}]),
    "show": fixed(models=[{"name": "fake"}]),
    "sessions": fixed(sessions=[{"context": 12}]),
    "queue": fixed(tasks=[{"id": 1}]),
    "usage": fixed(usage=[{"requests": 1}]),
    "stats": fixed(stats={"waiting": 0}),
    "metrics": fixed(text="inferd_cores 2.0\n"),
    "log_level": fixed(levels={"llama": "debug"}),
    "tokenize": fixed(tokens=[1, 2]),
    "detokenize": fixed(text=b"\xc3"),
    "apply_template": fixed(text="<user>é".encode(), tokens=3),
}  # fmt: skip


@asynccontextmanager
async def fake_server(folder: Path) -> AsyncIterator[FakeServer]:
    """Run a fake server on the running loop."""
    server = FakeServer(folder / "fake.sock")
    async with anyio.create_task_group() as group:
        await group.start(server.serve)
        yield server
        group.cancel_scope.cancel()


@contextmanager
def fake_server_thread(folder: Path) -> Iterator[tuple[FakeServer, BlockingPortal]]:
    """Run a fake server on a loop in a thread; the portal gives access to the loop."""
    with start_blocking_portal() as portal:

        async def make() -> FakeServer:
            return FakeServer(folder / "fake.sock")

        server = portal.call(make)
        future, _ = portal.start_task(server.serve)
        try:
            yield server, portal
        finally:
            future.cancel()
