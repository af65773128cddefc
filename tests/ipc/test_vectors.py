"""The vectors of docs/protocol-vectors.json, run against the daemon and against our client."""

from __future__ import annotations

import array
import json
import math
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest

from inferd import AsyncClient, Image
from inferd.backends.errors import (
    EndOfSequence,
    InferdError,
    InvalidArgument,
    UnsupportedOperation,
)
from inferd.ipc import messages as w
from inferd.ipc.client.connection.core import InFlight
from inferd.ipc.client.streams import AsyncStream, StreamedTurn
from inferd.ipc.payloads import pack_message
from inferd.testing import running_daemon
from tools.vectors.exchanges import PNG
from tools.vectors.file import PATH, text

ROOT = Path(__file__).resolve().parents[2]
VECTORS: dict[str, Any] = json.loads((ROOT / "docs" / "protocol-vectors.json").read_text())
EXCHANGES = {exchange["name"]: exchange["frames"] for exchange in VECTORS["exchanges"]}


def named(section: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in VECTORS[section]]


def plain(value: Any) -> Any:
    """Return *value* in the form of the file."""
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def decode(frame: bytes) -> Any:
    (size,) = struct.unpack_from("<I", frame)
    assert size == len(frame) - 4
    return msgspec.msgpack.decode(frame[4:])


def without(message: Any, pointers: list[str]) -> Any:
    """Return *message* with the values at *pointers* set to None."""
    message = json.loads(json.dumps(message))
    for pointer in pointers:
        *path, last = pointer.split("/")[1:]
        part = message
        for key in path:
            part = part[int(key)] if isinstance(part, list) else part.get(key, {})
        if last in part:
            part[last] = None
    return message


def test_the_file_is_what_the_tool_writes() -> None:
    assert PATH.read_text() == text()


@pytest.mark.parametrize("name", EXCHANGES)
def test_each_frame_has_the_written_meaning(name: str) -> None:
    for frame in EXCHANGES[name]:
        assert plain(decode(bytes.fromhex(frame["hex"]))) == frame["means"]


# The daemon.


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_daemon_answers_as_in_the_exchange(name: str) -> None:
    with running_daemon() as daemon, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(daemon.socket)
        for frame in EXCHANGES[name]:
            data = bytes.fromhex(frame["hex"])
            if frame["from"] == "client":
                send(sock, data, frame.get("descriptors", []))
            else:
                answered = plain(decode(read_frame(sock)))
                varies = frame.get("varies", [])
                assert without(answered, varies) == without(frame["means"], varies)


def send(sock: socket.socket, data: bytes, contents: list[str]) -> None:
    fds = [os.memfd_create("vector") for _ in contents]
    try:
        for fd, content in zip(fds, contents, strict=True):
            os.write(fd, bytes.fromhex(content))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        assert sock.sendmsg([data], rights) == len(data)
    finally:
        for fd in fds:
            os.close(fd)


def read_frame(sock: socket.socket) -> bytes:
    head = sock.recv(4, socket.MSG_WAITALL)
    return head + sock.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)


# Our client.


@asynccontextmanager
async def scripted(
    script: Callable[[anyio.abc.SocketStream], Awaitable[None]], directory: Path
) -> AsyncIterator[str]:
    """Serve one connection by *script*; whatever fails in it fails the test."""
    path = str(directory / "vectors.sock")

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await script(stream)

    listener = await anyio.create_unix_listener(path)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield path
        group.cancel_scope.cancel()


async def exactly(stream: anyio.abc.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await stream.receive(size - len(data))
    return data


async def compute(client: AsyncClient) -> None:
    graph = await client.load_by_name("echo")
    context = await client.init_execution_context(graph)
    await client.set_input(context, 0, b"hi")
    await client.compute(context)
    assert await client.get_output(context) == b"hi"
    await client.finalize_execution_context(context)
    await client.unload(graph)


async def stream(client: AsyncClient) -> None:
    context = await client.init_execution_context(await client.load_by_name("echo"))

    async def start(deadline: float) -> InFlight:
        request = InFlight("stream", deadline)
        params = w.StreamParams(context=context, prompt="hé!", credit=2)
        await client._open_connection.start_request(request, params)
        return request

    turn = StreamedTurn(start, client._driver, timeout_s=math.inf, retries=0, credit=2)
    stream = AsyncStream(turn)
    assert [piece async for piece in stream] == ["h", "é", "!"]
    assert stream.tokens == [104, 195, 169, 33]
    assert stream.metadata["stop_reason"] == "eos"


async def compute_single(client: AsyncClient) -> None:
    context = await client.init_execution_context(await client.load_by_name("echo"))
    await client.set_input(context, 0, b"ab")
    assert await client.compute_single(context) == b"a"
    assert await client.get_output_single(context) == b"a"
    assert await client.compute_single(context) == b"b"
    with pytest.raises(EndOfSequence) as raised:
        await client.compute_single(context)
    assert raised.value.data == {"stop_reason": "eos"}
    assert await client.get_output(context) == b"ab"
    await client.fini_single(context)


async def named_tensors(client: AsyncClient) -> None:
    context = await client.init_execution_context(await client.load_by_name("echo"))
    inputs = {"metadata": b'{"seed":7,"n-predict":8}', "prompt": b"hey"}
    result = await client.compute(context, inputs)
    (first, _), (name, tensor) = result.outputs
    assert (first, name, tensor.data, tensor.dimensions) == ("metadata", "prompt", b"hey", [3])
    assert result.metadata["seed"] == 7


async def session_with_an_id(client: AsyncClient) -> None:
    graph = await client.load_by_name("echo")
    await client.init_execution_context(graph)
    context = await client.init_execution_context_with_session_id(graph, "notes")
    assert not context.attached
    await client.reset(context, "Be brief.")
    await client.set_options(context, {"temp": 0, "stop": ["."]}, priority="high")
    reply = await client.chat(context, "yes.")
    assert reply == "yes" and reply.metadata["session_id"] == "notes"
    assert not await client.cancel(context)
    assert not await client.park(context)
    assert (await client.end_reasoning(context)).reason == "no_turn"
    assert await client.queue() == []
    assert await client.tokenize(graph, "hi", special=True) == [258, 104, 105, 257]
    assert await client.detokenize(graph, [104, 105]) == b"hi"
    prompt = await client.apply_template(graph, [{"role": "user", "content": "hi"}])
    assert (prompt, prompt.tokens) == ("hi", 4)


async def embeddings(client: AsyncClient) -> None:
    graph = await client.load_by_name("echo")
    context = await client.init_execution_context(graph)
    vectors = await client.embed(graph, ["hi", "you"], pooling="last", normalize=-1)
    assert (len(vectors), vectors.size, vectors.tokens) == (2, 16, [4, 5])
    switch = b'{"embedding":true,"pooling":"last","embd-normalize":-1}'
    await client.set_input(context, 1, switch)
    await client.set_input(context, 0, b"hi")
    await client.compute(context)
    output = json.loads(await client.get_output(context))
    assert output == {"n_embedding": 16, "embedding": pytest.approx(vectors[0], rel=1e-8)}


async def refused_documents(client: AsyncClient) -> None:
    graph = await client.load_by_name("echo")
    await client.init_execution_context(graph)
    with pytest.raises(UnsupportedOperation, match="ranks no documents"):
        await client.rerank(graph, "q", ["a", "b"], top_n=1)


async def branches(client: AsyncClient) -> None:
    context = await client.init_execution_context(await client.load_by_name("echo"))
    assert await client.chat(context, "hi", raw=True) == "hi"
    forked = await client.fork_session(context, 2, session_ids=["a", "b"])
    assert (forked.tokens, forked.cached_tokens, forked.kv) == (6, 6, "cached")
    one, two = forked.contexts
    assert (await client.rewind(one, turns=1)).tokens == 0
    assert (await client.rewind(two, tokens=3)).turns == 1
    assert await client.delete_session(session_id="b", undo_s=59.5)
    assert await client.delete_session(session_id="b")
    assert await client.list_deletions(clear=True) == []
    assert await client.delete_session(one)
    assert not await client.delete_session(session_id="b")


async def named_state(client: AsyncClient) -> None:
    graph = await client.load_by_name("echo")
    context = await client.init_execution_context(graph)
    assert await client.chat(context, "hi", raw=True) == "hi"
    assert (await client.save_state(context, "greeting")).tokens == 6
    await client.init_execution_context(graph, from_state="greeting")
    assert await client.delete_state("greeting")


async def resumed_turn(client: AsyncClient) -> None:
    graph = await client.load_by_name("echo")
    await client.init_execution_context(graph)
    context = await client.init_execution_context_with_session_id(graph, "notes")
    await client.set_input(context, 0, b"abcd")
    assert [await client.compute_single(context) for _ in "ab"] == [b"a", b"b"]
    await client.finalize_execution_context(context, keep=True)
    again = await client.init_execution_context_with_session_id(graph, "notes")
    assert again.attached
    stream = client.resume(again, [97], "a")
    assert [piece async for piece in stream] == ["b", "c", "d"]
    assert stream.metadata["stop_reason"] == "eos"


async def watched(client: AsyncClient) -> None:
    graph = await client.load_by_name("echo")
    contexts = [await client.init_execution_context(graph) for _ in range(5)]
    for context in contexts[:4]:
        await client.set_input(context, 0, b"ab")
        assert await client.compute_single(context) == b"a"
    places: list[w.QueueEvent] = []
    stream = client.stream(contexts[4], "hi", on_queue=places.append)
    assert [piece async for piece in stream] == ["h", "i"]
    assert [(place.position, place.waiting) for place in places] == [(1, 1)]


async def tool_call(client: AsyncClient) -> None:
    now = {"type": "function", "function": {"name": "now"}}
    options = {"tools": [now], "tool-choice": "required", "seed": 7}
    graph = await client.load_by_name("echo")
    context = await client.init_execution_context(graph)
    reply = await client.chat(context, '{"name": "now", "arguments": {}}', options=options)
    assert [(call.name, call.values) for call in reply.tool_calls] == [("now", {})]
    assert len(reply.tool_calls[0].id) == 9 and reply == ""


async def refused_images(client: AsyncClient) -> None:
    context = await client.init_execution_context(await client.load_by_name("echo"))
    for image, kind in (
        (Image(b"a text", alt="a dot"), InvalidArgument),
        (Image(PNG, detail="low"), UnsupportedOperation),
    ):
        with pytest.raises(kind) as raised:
            await client.chat(context, ["What is this?", image])
        assert raised.value.data["item"] == 0


CALLS: dict[str, Callable[[AsyncClient], Awaitable[None]]] = {
    "compute": compute,
    "stream": stream,
    "compute_single": compute_single,
    "compute with named tensors": named_tensors,
    "chat in a session with an id": session_with_an_id,
    "a tool call": tool_call,
    "embeddings": embeddings,
    "branches": branches,
    "a named state": named_state,
    "a turn that is resumed": resumed_turn,
    "a place in the queue": watched,
    "images that are refused": refused_images,
    "documents that are not ranked": refused_documents,
}


def with_defaults(message: Any) -> Any:
    """Return a client's message with its params as a struct: defaults may be sent or omitted."""
    if message[0] != w.Kind.REQUEST:
        return message
    kind, number, call, params = message
    return [kind, number, call, msgspec.convert(params, w.CALLS[call].params)]


@pytest.mark.parametrize("name", EXCHANGES)
def test_our_encoder_makes_exactly_these_bytes(name: str) -> None:
    for frame in EXCHANGES[name]:
        data = bytes.fromhex(frame["hex"])
        if frame["from"] == "client" and frame["means"][0] == w.Kind.REQUEST:
            assert pack_message(with_defaults(decode(data))) == data


@pytest.mark.anyio
@pytest.mark.parametrize("name", CALLS)
async def test_our_client_sends_the_requests_of_the_exchange_and_reads_the_answers(
    name: str, tmp_path: Path
) -> None:
    async def play(stream: anyio.abc.SocketStream) -> None:
        for frame in EXCHANGES[name]:
            data = bytes.fromhex(frame["hex"])
            if frame["from"] == "daemon":
                await stream.send(data)
            else:
                (size,) = struct.unpack("<I", await exactly(stream, 4))
                sent = msgspec.msgpack.decode(await exactly(stream, size))
                assert with_defaults(sent) == with_defaults(decode(data))
        await anyio.sleep_forever()

    with anyio.fail_after(60):
        async with scripted(play, tmp_path) as path:
            client = AsyncClient(path, timeout=math.inf, software=VECTORS["software"])
            async with client:
                await CALLS[name](client)


def test_only_the_descriptor_needs_the_raw_client() -> None:
    """Our client passes a memfd only for an input that does not fit into a frame."""
    assert set(EXCHANGES) - set(CALLS) == {"a prompt in a descriptor"}


@pytest.mark.anyio
@pytest.mark.parametrize("case", named("malformed_daemon"))
async def test_our_client_handles_a_malformed_daemon_as_in_the_vector(
    case: dict[str, Any], tmp_path: Path
) -> None:
    frames = b"".join(map(bytes.fromhex, case["frames"]))
    hello = bytes.fromhex(EXCHANGES["compute"][0]["hex"])

    async def play(stream: anyio.abc.SocketStream) -> None:
        await stream.send(hello if case["hello"] else frames)
        for _ in range(2 if case["hello"] else 1):
            (size,) = struct.unpack("<I", await exactly(stream, 4))
            await exactly(stream, size)
        if case["hello"]:
            await stream.send(frames)
        await anyio.sleep_forever()

    outcome = case["outcome"]
    got: dict[str, Any] = {}
    with anyio.fail_after(60):
        async with scripted(play, tmp_path) as path:
            try:
                async with AsyncClient(path) as client:
                    got = {"reply": {"tasks": await client.queue()}}
            except InferdError as error:
                got = {"error": error.name}
    assert got == outcome
