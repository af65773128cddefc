"""The asynchronous client against a fake daemon, under asyncio and trio."""

from __future__ import annotations

import gc
import math
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from inferd import (
    AddAdapterResult,
    AddModelResult,
    AsyncClient,
    AsyncPull,
    AsyncSession,
    AsyncStream,
    Busy,
    ConnectionLost,
    EndReasoningResult,
    ForkResult,
    Graph,
    HistoryResult,
    InferdError,
    InvalidArgument,
    ProtocolError,
    Reply,
    RewindResult,
    SaveStateResult,
    SessionMediaResult,
    ShuttingDown,
    SwapResult,
    Tensor,
    Timeout,
    TooLarge,
    VersionMismatch,
    WorkerCrashed,
)
from inferd.ipc.client import (
    BufferResult,
    CopyModelResult,
    DrainResult,
    ExportModelResult,
    ExportResult,
    ImportModelResult,
    ImportResult,
    ReadCopyResult,
)
from inferd.testing import running_daemon
from tests.ipc.fake_server import Exchange, FakeServer, fake_server
from tests.processes import open_descriptors

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(folder: Path, **options: Any) -> AsyncIterator[tuple[FakeServer, AsyncClient]]:
    async with fake_server(folder) as server, AsyncClient(server.path, **options) as client:
        yield server, client


async def test_the_client_runs_on_the_loop_that_the_test_names(
    tmp_path: Path, anyio_backend_name: str
) -> None:
    async with connected(tmp_path) as (_, client):
        assert [model["name"] for model in await client.models()] == ["fake"]
        assert ("trio" if trio.lowlevel.in_trio_run() else "asyncio") == anyio_backend_name
        assert client.server.instance == 7


# Call, arguments, keyword arguments; the params sent; the result.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any], Any]] = [
    (
        "load",
        (["preload:m"], "ggml", "cpu"),
        {},
        {"builders": [b"preload:m"], "encoding": "ggml", "target": "cpu"},
        11,
    ),
    ("load_by_name", ("m",), {}, {"name": "m"}, 11),
    (
        "load_by_name_with_config",
        ("m", {"ctx-size": 5}),
        {},
        {"name": "m", "config": '{"ctx-size":5}'},
        11,
    ),
    ("init_execution_context", (11,), {}, {"graph": 11}, 12),
    (
        "init_execution_context_with_session_id",
        (11, "known"),
        {"persist": False},
        {"graph": 11, "session_id": "known", "persist": False},
        12,
    ),
    (
        "set_input",
        (12, 0, "hé"),
        {},
        {"context": 12, "index": 0, "tensor": {"data": "hé".encode(), "dimensions": [3]}},
        None,
    ),
    (
        "compute_single",
        (12,),
        {"priority": "high"},
        {"context": 12, "priority": "high"},
        "hé ".encode(),
    ),
    ("get_output", (12,), {"size_max": 9}, {"context": 12, "size_max": 9}, "hé".encode()),
    (
        "get_output_single",
        (12, 1),
        {},
        {"context": 12, "index": 1},
        b'{"stop_reason":"eos","output_tokens":2}',
    ),
    ("fini_single", (12,), {}, {"context": 12}, None),
    ("finalize_execution_context", (12,), {}, {"context": 12}, None),
    ("close_execution_context", (12,), {}, {"context": 12}, None),
    ("unload", (11,), {}, {"graph": 11}, None),
    ("prompt_init", (11,), {}, {"graph": 11}, 12),
    (
        "prompt_compute",
        (12, "p"),
        {"timeout": 9},
        {"context": 12, "prompt": "p", "timeout_s": 9},
        "answer",
    ),
    ("init_backend", ('{"device":1}',), {}, {"config": '{"device":1}'}, ["device"]),
    ("deinit_backend", (), {}, {}, None),
    (
        "run_inference",
        (12, b"p"),
        {"config": {"temp": 0}},
        {
            "context": 12,
            "tensor": {"data": b"p", "dimensions": [1]},
            "config": '{"temp":0}',
            "timeout_s": 600,
        },
        "answer",
    ),
    (
        "chat",
        (12, "p"),
        {"raw": True, "options": {"temp": 0}, "queue_timeout": 3},
        {
            "context": 12,
            "prompt": "p",
            "raw": True,
            "options": {"temp": 0},
            "queue_timeout_s": 3,
            "timeout_s": 600,
        },
        "p",
    ),
    ("cancel", (12,), {}, {"context": 12}, False),
    ("free_tensors", ([7, 8],), {}, {"tensors": [7, 8]}, None),
    ("register_buffer", (9,), {}, {"size": 9}, BufferResult(buffer=13, size=9)),
    ("write_buffer", (13, 3, b"x"), {}, {"buffer": 13, "offset": 3, "data": b"x"}, None),
    ("read_buffer", (13, 3, 4), {}, {"buffer": 13, "offset": 3, "size": 4}, b"part"),
    ("free_buffers", ([13],), {}, {"buffers": [13]}, None),
    ("reset", (12, "be kind"), {}, {"context": 12, "system": "be kind"}, None),
    (
        "set_options",
        (12, {"temp": 1}),
        {"priority": "low"},
        {"context": 12, "options": {"temp": 1}, "priority": "low"},
        None,
    ),
    (
        "fork_session",
        (12, 2),
        {"session_ids": ("a", "b")},
        {"context": 12, "n": 2, "session_ids": ["a", "b"]},
        ForkResult(contexts=[13, 14], tokens=7),
    ),
    (
        "rewind",
        (12,),
        {"turns": 3},
        {"context": 12, "turns": 3},
        RewindResult(tokens=5, turns=1, cached_tokens=2, kv="recomputed"),
    ),
    (
        "history",
        (),
        {"session_id": "known"},
        {"session_id": "known"},
        HistoryResult(messages=[{"role": "user"}], turns=[0], session={"context": 12}),
    ),
    (
        "session_media",
        ("0a",),
        {"session_id": "known"},
        {"session_id": "known", "sha256": "0a"},
        SessionMediaResult(data=b"image", size=5, media_type="image/png"),
    ),
    ("delete_session", (12,), {}, {"context": 12}, True),
    ("delete_session", (), {"session_id": "known"}, {"session_id": "known"}, True),
    (
        "update_session",
        ("known",),
        {"title": "Diary", "kept": True, "options": {"temp": 0}, "unset": ["seed"]},
        {
            "session_id": "known",
            "title": "Diary",
            "kept": True,
            "options": {"temp": 0},
            "unset": ["seed"],
        },
        {"context": 12},
    ),
    ("restore_session", ("known",), {}, {"session_id": "known"}, {"context": 12}),
    ("list_deletions", (), {"clear": True}, {"clear": True}, [{"session_id": "old"}]),
    (
        "save_state",
        (12, "story"),
        {"replace": True},
        {"context": 12, "name": "story", "replace": True},
        SaveStateResult(tokens=5, stored_tokens=5),
    ),
    ("list_states", (), {}, {}, [{"name": "story"}]),
    ("delete_state", ("story",), {}, {"name": "story"}, True),
    ("park", (12,), {}, {"context": 12}, True),
    ("end_reasoning", (12,), {}, {"context": 12}, EndReasoningResult(ended=True)),
    ("models", (), {}, {}, [{"name": "fake"}]),
    ("show", ("m",), {}, {"name": "m"}, {"name": "fake"}),
    ("unload_model", ("m",), {"force": True}, {"name": "m", "force": True}, None),
    ("pin", ("m",), {}, {"name": "m"}, None),
    ("unpin", ("m",), {}, {"name": "m"}, None),
    (
        "swap",
        ("m", "n"),
        {},
        {"name": "m", "to": "n"},
        SwapResult(fingerprint="f", previous_fingerprint="g"),
    ),
    (
        "swap",
        ("m", "n"),
        {"mode": "drain"},
        {"name": "m", "to": "n", "mode": "drain"},
        SwapResult(fingerprint="f", previous_fingerprint="g"),
    ),
    (
        "add_adapter",
        ("m", "style", "style.gguf"),
        {"scale": 0.5},
        {"name": "m", "adapter": "style", "file": "style.gguf", "scale": 0.5},
        AddAdapterResult(loaded=True, id="a", size_bytes=7),
    ),
    ("remove_adapter", ("m", "style"), {}, {"name": "m", "adapter": "style"}, None),
    ("sessions", (), {}, {}, [{"context": 12}]),
    ("queue", (), {}, {}, [{"id": 1}]),
    ("queue", (), {"all_users": True}, {"all": True}, [{"id": 1}]),
    (
        "usage",
        (["user", "hour"],),
        {"since": 60.0, "all_users": True},
        {"by": ["user", "hour"], "since_s": 60.0, "all": True},
        [{"requests": 1}],
    ),
    ("stats", (), {}, {}, {"waiting": 0}),
    ("metrics", (), {}, {}, "inferd_cores 2.0\n"),
    (
        "log_level",
        ({"llama": "debug"},),
        {},
        {"levels": {"llama": "debug"}},
        {"llama": "debug"},
    ),
    ("tokenize", (11, "t"), {"bos": True}, {"graph": 11, "text": "t", "bos": True}, [1, 2]),
    ("detokenize", (11, (1, 2)), {}, {"graph": 11, "tokens": [1, 2]}, b"\xc3"),
    (
        "apply_template",
        (11, [{"role": "user", "content": "x"}]),
        {},
        {"graph": 11, "messages": [{"role": "user", "content": "x"}]},
        "<user>é",
    ),
    (
        "apply_template",
        (11, [{"role": "user", "content": "x"}]),
        {"tools": [{"type": "function"}], "arguments": {"a": 1}, "add_generation_prompt": False},
        {
            "graph": 11,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function"}],
            "arguments": {"a": 1},
            "add_generation_prompt": False,
        },
        "<user>é",
    ),
    ("drain", (), {"stop": True}, {"stop": True}, DrainResult()),
    (
        "copy_model",
        ("m", "b"),
        {"sha256": "f" * 64},
        {"name": "m", "to": "b", "sha256": "f" * 64},
        CopyModelResult(source="a", size_bytes=9),
    ),
    (
        "add_model",
        ("m",),
        {},
        {"name": "m"},
        AddModelResult(file="/models/m.gguf", size_bytes=9, sha256="f"),
    ),
    (
        "export_model",
        ("m", "t"),
        {"offset": 5},
        {"name": "m", "transfer": "t", "offset": 5},
        ExportModelResult(data=b"part", size=9),
    ),
    (
        "import_model",
        ("m", "t", b"part", 9),
        {"offset": 5, "sha256": "f" * 64},
        {
            "name": "m",
            "transfer": "t",
            "data": b"part",
            "size": 9,
            "offset": 5,
            "sha256": "f" * 64,
        },
        ImportModelResult(arrived=True),
    ),
    ("end_model_transfer", ("t",), {}, {"transfer": "t"}, None),
    (
        "export_session",
        ("s", "t"),
        {"uid": 7, "offset": 5},
        {"session_id": "s", "transfer": "t", "uid": 7, "offset": 5},
        ExportResult(data=b"part", size=9),
    ),
    (
        "import_session",
        ("s", "t", b"part", 9),
        {"offset": 5},
        {"session_id": "s", "transfer": "t", "data": b"part", "size": 9, "offset": 5},
        ImportResult(size=9),
    ),
    (
        "read_copy",
        ("s",),
        {"label": "home"},
        {"session_id": "s", "label": "home"},
        ReadCopyResult(stream="t", number=3, data=b"all", model="echo"),
    ),
    (
        "store_copy",
        ("s", "t", 3, b"part"),
        {"peer": "a"},
        {"session_id": "s", "stream": "t", "number": 3, "data": b"part", "size": 4, "peer": "a"},
        None,
    ),
    (
        "end_transfer",
        ("t", "keep"),
        {},
        {"transfer": "t", "outcome": "keep"},
        None,
    ),
    (
        "exchange_served",
        ({"fake": {"@ada": 3}},),
        {},
        {"elsewhere": {"fake": {"@ada": 3}}},
        {"fake": {"@ada": 5}},
    ),
]


async def test_every_call_has_its_wire_name_and_params(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        for name, args, kwargs, params, result in CALLS:
            assert await getattr(client, name)(*args, **kwargs) == result, name
            call, sent = server.calls[-1]
            assert call == name
            assert {k: v for k, v in sent.items() if v or k in params} == params, name


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            AsyncClient,
            "aclose buffer connected graph jobs load_file open open_channel server session",
        ),
        (
            AsyncSession,
            " ".join(
                (
                    "aclose answers attached cancel chat context delete end_reasoning fork",
                    "graph history media metadata model open parameters pull reset resume",
                    "rewind save_state session_id set_options stream",
                )
            ),
        ),
        (
            AsyncStream,
            """aclose metadata pass_pieces probabilities prompt_logprobs raw_text reasoning tokens
            tool_calls""",
        ),
        (AsyncPull, "aclose"),
    ],
)
async def test_only_what_users_need_is_public(kind: type, names: str) -> None:
    public = {name for name in dir(kind) if not name.startswith("_")}
    calls = {name for name, *_ in CALLS} | {"compute", "stream", "resume", "embed", "parameters"}
    calls |= {
        "rerank",
        "files_not_offered",
        "infill",
        "list_sessions",
        "token_pieces",
        "usage_and_limits",
    }
    assert public - (calls if kind is AsyncClient else set()) == set(names.split())


async def test_a_chat_with_a_model_is_a_turn_of_a_session_of_its_own(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        assert await client.chat("m", "hi", options={"temp": 0}) == "hi"
        assert server.names() == [
            *("load_by_name_with_config", "init_execution_context", "chat"),
            *("finalize_execution_context", "unload"),
        ]


async def test_named_tensors_go_in_and_come_out(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, client):
        tensor = Tensor(data=b"\0\0\x80?", dimensions=[1], type="fp32")
        result = await client.compute(12, {"x": tensor, "y": memoryview(b"text")})
        assert result.outputs[0] == ("x", tensor)
        assert result.outputs[1] == ("y", Tensor(data=b"text", dimensions=[4], type="u8"))
        assert (await client.compute(12)).outputs == []


async def test_handles_are_numbers_with_properties(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        graph = await client.load_by_name("m")
        assert isinstance(graph, Graph) and graph == 11
        assert (graph.model, graph.ctx_size, graph.ignored) == ("m", 4096, [])
        context = await client.init_execution_context_with_session_id(graph, "known")
        assert context.attached
        assert server.calls[-1][1] == {"graph": 11, "session_id": "known"}


async def test_a_load_reports_its_progress(tmp_path: Path) -> None:
    fractions: list[float] = []
    async with connected(tmp_path) as (_, client):
        await client.load_by_name("m", on_progress=fractions.append)
    assert fractions == [0.25, 0.5, 1.0]


async def test_an_error_in_on_progress_reaches_the_caller_and_leaves_the_client_usable(
    tmp_path: Path,
) -> None:
    def bad(fraction: float) -> None:
        raise LookupError(str(fraction))

    async with connected(tmp_path) as (_, client):
        with pytest.raises(LookupError, match=r"0\.25"):
            await client.load_by_name("m", on_progress=bad)
        assert await client.stats()


async def _load_fd(exchange: Exchange) -> dict[str, Any]:
    fd = exchange.peer.descriptors.pop(0)
    exchange.server.inputs[fd] = os.pread(fd, 1 << 25, 0)
    os.close(fd)
    return {"graph": fd}


async def test_a_model_is_sent_in_a_descriptor(tmp_path: Path) -> None:
    """By its bytes in a memfd, by an open descriptor, and by the path of a file."""
    async with connected(tmp_path) as (server, client):
        server.answers["load"] = _load_fd
        (tmp_path / "m.gguf").write_bytes(b"GGUF file")
        graph = await client.load([b"GGUF bytes", '{"temp":0}'])
        assert server.inputs[graph] == b"GGUF bytes"
        assert server.calls[-1][1] == {"builders": [b"", b'{"temp":0}'], "fd": 0}
        graph = await client.load_file(tmp_path / "m.gguf", config={"temp": 0})
        assert server.inputs[graph] == b"GGUF file"
        with (tmp_path / "m.gguf").open("rb") as file:
            graph = await client.load(fd=file.fileno())
        assert server.inputs[graph] == b"GGUF file"
        with pytest.raises(InvalidArgument, match="cannot be read"):
            await client.load_file(tmp_path / "absent")


async def _set_input_fd(exchange: Exchange) -> dict[str, Any]:
    tensor = exchange.params["tensor"]
    assert tensor["fd"] == 0 and "data" not in tensor
    return await _load_fd(exchange)


async def test_a_prompt_too_large_for_a_frame_is_sent_in_a_memfd(tmp_path: Path) -> None:
    prompt = bytes(range(256)) * (9 << 10)  # 2.25 MiB
    open_before = len(open_descriptors())
    async with connected(tmp_path) as (server, client):
        server.answers["set_input"] = _set_input_fd
        await client.set_input(12, 0, prompt)
        assert prompt in server.inputs.values()
    assert len(open_descriptors()) == open_before


async def test_an_argument_that_cannot_be_sent_is_refused_before_sending(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        with pytest.raises(TooLarge, match="the limit is 8388608"):
            await client.set_input(12, 0, bytes((8 << 20) + 1))
        with pytest.raises(TooLarge, match="send less"):
            await client.chat(12, "x" * (2 << 20))
        with pytest.raises(InvalidArgument, match="not a prompt"):
            await client.chat(12, 5)  # type: ignore[call-overload]
        assert server.calls == []
        assert await client.stats()


async def test_a_reply_can_be_sent_back_as_a_message(tmp_path: Path) -> None:
    """msgpack does not encode subclasses of text: they are sent as plain text."""
    async with connected(tmp_path) as (server, client):
        reply = await client.chat(12, "said")
        assert isinstance(reply, Reply)
        assert await client.chat(12, [{"role": "user", "content": reply}]) == "said"
        assert server.calls[-1][1]["messages"] == [{"role": "user", "content": "said"}]


# Errors of the connection.


async def test_without_a_daemon_the_error_says_so_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"no daemon answers at .*absent") as caught:
        async with AsyncClient(tmp_path / "absent"):
            pass
    assert "inferd start" in caught.value.hint
    with pytest.raises(InvalidArgument, match="cannot connect to"):
        async with AsyncClient(tmp_path / ("x" * 200)):
            pass


async def test_connecting_to_a_silent_daemon_fails_after_connect_timeout(
    tmp_path: Path,
) -> None:
    async with fake_server(tmp_path) as server:
        server.hello = None
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
            async with AsyncClient(server.path, connect_timeout=0.05):
                pass


async def test_a_full_backlog_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.2 s"):
            async with AsyncClient(path, connect_timeout=0.2):
                pass

        async def accept_both() -> None:
            await anyio.wait_all_tasks_blocked()
            for _ in range(2):
                accepted, _ = await anyio.to_thread.run_sync(listener.accept)
                accepted.close()

        async with anyio.create_task_group() as group:
            group.start_soon(accept_both)
            with pytest.raises(ConnectionLost, match=r"closed the connection|failed"):
                async with AsyncClient(path):
                    pass


async def test_another_major_version_is_refused_readably(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server:
        assert server.hello is not None
        server.hello["protocol"] = [2, 1]
        with pytest.raises(VersionMismatch, match=r"speaks version 2\.1 of the protocol, this"):
            async with AsyncClient(server.path):
                pass


async def test_a_lost_connection_fails_every_request(tmp_path: Path) -> None:
    errors: list[Exception] = []

    async def call_stats(client: AsyncClient) -> None:
        try:
            await client.chat(12, "hold")
        except ConnectionLost as exc:
            errors.append(exc)

    async with connected(tmp_path) as (server, client):
        async with anyio.create_task_group() as group:
            for number in range(3):
                server.answers["chat"] = Exchange.hold
                group.start_soon(call_stats, client)
                await server.await_call("chat", number + 1)
            await server.peers[0].stream.aclose()
        assert len(errors) == len({id(e) for e in errors}) == 3
        with pytest.raises(ConnectionLost):
            await client.stats()


async def test_a_goodbye_carries_its_reason(tmp_path: Path) -> None:
    async def leave(exchange: Exchange) -> dict[str, Any]:
        await exchange.peer.send([6, ShuttingDown("the daemon is shutting down").to_wire()])
        return {}

    async with connected(tmp_path) as (server, client):
        server.answers["chat"] = leave
        with pytest.raises(ShuttingDown):
            await client.chat(12, "x")
        with pytest.raises(ConnectionLost, match="has closed the connection: the daemon is") as end:
            await client.stats()
        assert not end.value.retryable
        assert "reconnect=True" in end.value.hint


@pytest.mark.parametrize(
    "message",
    [[], [2, 1], [2, 1, "text"], ["?"], [4, 1, 5]],
    ids=["empty", "short", "text", "kind", "event"],
)
async def test_a_frame_that_cannot_be_read_ends_the_connection(
    tmp_path: Path, message: list[Any]
) -> None:
    async def answer(exchange: Exchange) -> dict[str, Any]:
        await exchange.peer.send(message)
        return {}

    async with connected(tmp_path) as (server, client):
        server.answers["stats"] = answer
        if message == ["?"]:  # a kind that a later minor version may add: ignored
            assert await client.models()
        else:
            with pytest.raises(ProtocolError):
                await client.stats()


async def test_an_answer_of_another_shape_is_a_protocol_error(tmp_path: Path) -> None:
    async def answer(_: Exchange) -> dict[str, Any]:
        return {"tokens": "text"}

    async with connected(tmp_path) as (server, client):
        server.answers["tokenize"] = answer
        with pytest.raises(ProtocolError, match="the answer to tokenize cannot be read"):
            await client.tokenize(11, "x")
        assert await client.stats()


async def test_a_client_that_is_not_open_says_how_to_open_it(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="async with"):
        _ = AsyncClient(tmp_path / "s").server


async def test_a_client_opens_with_its_first_call_and_any_task_closes_it(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, anyio.create_task_group() as group:
        client = AsyncClient(server.path)
        async with client.session("m") as session:
            assert await session.chat("hi") == "hi"
        with pytest.raises(InvalidArgument, match="already open"):
            await client.__aenter__()
        group.start_soon(client.aclose)
        await server.await_idle()
        await client.aclose()
        with pytest.raises(ConnectionLost, match="closed"):
            await client.models()


async def test_closing_a_client_ends_its_calls(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, anyio.create_task_group() as group:
        client = AsyncClient(server.path)

        async def call() -> None:
            with pytest.raises(ConnectionLost, match="closed"):
                await client.chat(12, "hold")

        group.start_soon(call)
        await server.await_call("chat")
        await client.aclose()


async def test_an_unclosed_client_warns_and_is_closed(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server:
        client = AsyncClient(server.path)
        connection = (await client.open())._open_connection
        with pytest.warns(ResourceWarning, match="unclosed <AsyncClient"):
            del client
            gc.collect()
        with anyio.fail_after(60):
            await connection.wait_lost(math.inf)


LEFT_OPEN = """
import sys
import anyio
from inferd import AsyncClient

async def main():
    client = AsyncClient(sys.argv[1])
    await client.__aenter__()
    async with client.session("echo") as session:
        print(await session.chat("hello"))

anyio.run(main, backend=sys.argv[2])
"""


async def test_a_program_may_end_without_closing_its_client(
    tmp_path: Path, anyio_backend_name: str
) -> None:
    async with running_daemon() as daemon:
        words = (sys.executable, "-X", "dev", "-c", LEFT_OPEN, daemon.socket, anyio_backend_name)
        done = await anyio.run_process(words, check=False)
    said = done.stderr.decode()
    assert (done.returncode, done.stdout) == (0, b"hello\n"), said
    assert "ResourceWarning: unclosed <AsyncClient" in said
    assert "Traceback" not in said


async def test_an_error_in_the_clients_block_is_raised_unchanged(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server:
        with pytest.raises(LookupError, match="mine"):
            async with AsyncClient(server.path):
                raise LookupError("mine")


# Time, retries and limits.


async def test_a_late_call_is_a_timeout_and_is_cancelled_on_the_daemon(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        with pytest.raises(Timeout, match="chat took longer") as caught:
            await client.chat(12, "hold", timeout=0.02)
        assert caught.value.data == {"timeout": "total"}, "as from the daemon"
        assert not caught.value.retryable, "the daemon may have begun it"
        await server.await_call("cancel")
        await server.await_idle()
        assert server.calls[1] == ("cancel", {"request": 1})


async def test_a_call_without_a_timeout_has_the_clients(tmp_path: Path) -> None:
    async with connected(tmp_path, timeout=0.02) as (server, client):
        with pytest.raises(Timeout):
            await client.chat(12, "hold")
        assert server.calls[0][1]["timeout_s"] == 0.02
        await server.await_idle()
        assert await client.chat(12, "later", timeout=60) == "later"


async def test_a_cancelled_caller_cancels_its_call(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        async with anyio.create_task_group() as group:
            group.start_soon(client.chat, 12, "hold")
            await server.await_call("chat")
            group.cancel_scope.cancel()
        await server.await_call("cancel")
        await server.await_idle()
        assert await client.chat(12, "next") == "next"


async def test_busy_is_retried_as_often_as_retries_permits(tmp_path: Path) -> None:
    async with connected(tmp_path, retries=2) as (server, client):
        assert await client.chat(12, "refuse 2 times") == "refuse 2 times"
        assert server.names() == ["chat"] * 3
        with pytest.raises(Busy):
            await client.chat(12, "refuse 3 times")
        assert server.names() == ["chat"] * 6


async def test_the_daemon_says_which_errors_are_retried(tmp_path: Path) -> None:
    async with connected(tmp_path, retries=1) as (server, client):
        for error, calls in (
            (InferdError("of a newer daemon", retryable=True), 2),
            (WorkerCrashed("by this input", retryable=False), 1),
        ):

            async def fail(_: Exchange, error: InferdError = error) -> dict[str, Any]:
                raise error

            server.answers["stats"] = fail
            server.calls.clear()
            with pytest.raises(type(error)) as caught:
                await client.stats()
            assert (server.names(), caught.value.retryable) == (["stats"] * calls, calls > 1)


async def test_busy_is_an_error_without_retries(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        with pytest.raises(Busy) as caught:
            await client.chat(12, "refuse 1 time")
        assert caught.value.retry_after_s == 0.001
        assert server.names() == ["chat"]


async def test_a_retry_past_the_deadline_is_not_waited_for(tmp_path: Path) -> None:
    async def refuse(_: Exchange) -> dict[str, Any]:
        raise Busy("full", data={"retry_after_s": 20})

    async with connected(tmp_path, retries=5) as (server, client):
        server.answers["chat"] = refuse
        with pytest.raises(Busy):
            await client.chat(12, "x", timeout=10)
        assert server.names() == ["chat"]


async def test_no_more_requests_are_in_flight_than_the_daemon_allows(tmp_path: Path) -> None:
    """Some requests are reserved for cancels, which are still sent at the bound."""
    async with fake_server(tmp_path) as server:
        assert server.hello is not None
        server.hello["limits"]["requests_max"] = 18
        async with AsyncClient(server.path) as client, anyio.create_task_group() as group:
            scopes = [anyio.CancelScope(), anyio.CancelScope()]
            for context, scope in enumerate(scopes):
                group.start_soon(_held, client, context, scope)
            await server.await_call("chat", 2)
            with pytest.raises(Timeout, match="2 earlier calls are in flight") as caught:
                await client.stats(timeout=0.02)
            assert caught.value.data == {"timeout": "total"}
            assert caught.value.retryable, "the daemon has not received it"
            group.start_soon(client.stats)
            await anyio.wait_all_tasks_blocked()
            assert "stats" not in server.names()
            for scope in scopes:
                scope.cancel()
            await server.await_call("stats")
            assert server.names().count("cancel") == 2


async def _held(client: AsyncClient, context: int, scope: anyio.CancelScope) -> None:
    with scope:
        await client.chat(context, "hold")


async def test_a_daemon_that_does_not_read_gets_whole_frames_later(tmp_path: Path) -> None:
    """A caller that is cancelled in the middle of a large frame leaves no half frame behind."""
    async with connected(tmp_path) as (server, client):
        await client.stats()
        server.reading = anyio.Event()
        await server.peers[0].send([9, "wake the reader"])
        async with anyio.create_task_group() as group:
            group.start_soon(client.set_input, 12, 0, bytes(1_000_000))
            group.start_soon(client.set_input, 12, 0, bytes(1_000_000))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        server.reading.set()
        await server.await_call("cancel", 2)
        sizes = [len(p["tensor"]["data"]) for n, p in server.calls if n == "set_input"]
        assert sizes == [1_000_000] * 2
        assert await client.chat(12, "fine") == "fine"
