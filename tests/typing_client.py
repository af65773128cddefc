"""The types that the client's users see; mypy checks this file, which is never run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_type

from msgspec import Struct
from numpy.typing import NDArray

from inferd import (
    Answer,
    AsyncClient,
    AsyncPull,
    AsyncSession,
    AsyncStream,
    AsyncTensorGraph,
    Audio,
    Client,
    ComputeResult,
    Context,
    Graph,
    Image,
    InferdError,
    Message,
    Metadata,
    ModelInfo,
    Options,
    ParameterInfo,
    Piece,
    Priority,
    Pull,
    QueueEvent,
    Rendered,
    Reply,
    RewindResult,
    Session,
    SessionInfo,
    SessionMediaResult,
    ShownModel,
    StateInfo,
    Stream,
    Tensor,
    TensorGraph,
    TensorInfo,
    ToolCall,
    ToolCallPart,
    __version__,
)

assert_type(__version__, str)


PARTS: Message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
CLASS: Priority = "high"


async def asynchronous() -> None:
    async with AsyncClient("path", timeout=5, retries=1) as client:
        assert_type(client, AsyncClient)
        graph = await client.load_by_name("m", on_progress=print, timeout=3)
        assert_type(graph, Graph)
        assert_type(graph.not_applied, dict[str, Any])
        assert_type(await client.init_execution_context(graph), Context)
        await client.set_input(12, 0, memoryview(b"x"))
        await client.set_input(12, 0, Tensor(data=b"x", dimensions=[1], type="u8"))
        assert_type(await client.compute(12, {"x": "text", "y": b"bytes"}), ComputeResult)
        assert_type(await client.compute_single(12, priority="low"), bytes)
        assert_type(await client.models(), list[ModelInfo])
        assert_type((await client.show("m"))["size_bytes"], int)
        assert_type(await client.show("m"), ShownModel)
        assert_type(await client.sessions(), list[SessionInfo])
        assert_type((await client.queue())[0]["effective_priority"], Priority | None)
        assert_type(await client.list_states(), list[StateInfo])
        assert_type(await client.parameters(12), list[ParameterInfo])
        assert_type((await client.stats())["uptime_s"], float)
        (await client.stats())["uptime"]  # type: ignore[typeddict-item]
        assert_type(await client.chat("m", "x"), Reply)
        assert_type((await client.chat("m", "x")).tool_calls, list[ToolCall])
        assert_type(ToolCall("i", "f", "{}").values, dict[str, Any])
        assert_type(Piece("x").tool_calls, Sequence[ToolCallPart])
        assert_type(client.stream(12, "x"), AsyncStream)
        assert_type(client.graph("m"), AsyncTensorGraph)
        async with client.graph("m") as tensors:
            assert_type(tensors.inputs, tuple[TensorInfo, ...])
            assert_type(await tensors.run({"x": [[1.0]]}), dict[str, NDArray[Any]])
            assert_type(await tensors.run({"x": [[1.0]]}, keep=["y"]), dict[str, Any])
        assert_type(await client.chat(12, [{"role": "user", "content": "x"}]), Reply)
        await client.compute_single(12, priority="lowest")  # type: ignore[arg-type]
        client.session("m", session_id="diary", resume=True, on_loss=print)
        client.session("m", graph=await client.load_by_name("m"))
        async with client.session("m", priority="high", options={"temp": 0}) as session:
            assert_type(session, AsyncSession)
            async with session.stream("x") as stream:
                assert_type(stream, AsyncStream)
                async for piece in stream:
                    assert_type(piece, str)
                    if isinstance(piece, Piece):
                        assert_type(piece.reasoning, str)
                assert_type(stream.reasoning, str)
            assert_type(session.pull("x"), AsyncPull)
            assert_type(await session.fork(2, session_ids=["a", "b"]), list[AsyncSession])
            answers = await session.answers("x", n=3)
            assert_type(answers, list[Answer])
            assert_type(answers[0].error, InferdError | None)
            assert_type((await session.rewind(1)).cached_tokens, int)
            session.stream("x", on_queue=_on_queue)
            reply = await session.chat("x")
            assert_type(reply.upper(), str)
            assert_type(reply.metadata, Metadata)
            assert_type(reply.metadata["output_tokens"], int)
            reply.metadata["tokens"]  # type: ignore[typeddict-item]
            assert_type(reply.reasoning, str)
        prompt = await client.apply_template(graph, [{"role": "user", "content": "x"}], tools=[{}])
        assert_type(prompt, Rendered)
        assert_type(prompt.tokens, int)


OPTIONS: Options = {"n-predict": 24, "overflow": "drop-turns"}
MISSPELT: Options = {"n-predikt": 24}  # type: ignore[typeddict-unknown-key]
OF_ANOTHER_TYPE: Options = {"n-predict": "many"}  # type: ignore[typeddict-item]
ANY: dict[str, Any] = {"n-predict": 24}


async def parameters(client: AsyncClient) -> None:
    async with client.session("m", options=OPTIONS, temp=0, stop=["."]) as session:
        await session.chat("x", n_predict=24, json_schema={}, overflow="shift", lora={"a": 1})
        session.stream("x", options=OPTIONS, seed=1)
        await session.answers("x", 2, options=ANY, top_k=3)
        await session.set_options(mirostat=2)
        await session.chat("x", n_predikt=24)  # type: ignore[call-overload]
        session.stream("x", overflow="shifts")  # type: ignore[arg-type]
        await session.set_options(temp="hot")  # type: ignore[arg-type]
        session.resume(temp=0)  # type: ignore[call-arg]
    client.session("m", temperatur=0)  # type: ignore[call-arg]
    await client.embed("m", "x", temp=0)  # type: ignore[call-arg]


async def images(client: AsyncClient, blocking: Client, picture: Image) -> None:
    path, data = Path("a.png"), bytearray(b"x")
    photo = Image(path, detail="low", tokens_max=70, alt="a dot")
    sound = Audio(memoryview(data), alt="a tone")
    async with client.session("m") as session:
        assert_type(await session.chat(["What?", photo, sound]), Reply)
        assert_type(await session.chat(picture), Reply)
        assert_type(session.stream([Image(data), "What?"]), AsyncStream)
        await session.answers([{"role": "user", "content": ["What?", Image("a.png")]}], 2)
        assert_type(await session.media("0a"), SessionMediaResult)
        await session.chat([5.5, photo])  # type: ignore[list-item]
    with blocking.session("m") as other:
        assert_type(other.chat(["What?", photo]), Reply)
        assert_type(other.media("0a").data, bytes)
    assert_type(blocking.session_media("0a", session_id="s").media_type, str)
    Image(path, detail="most")  # type: ignore[arg-type]
    Image(5)  # type: ignore[arg-type]
    Audio(photo)  # type: ignore[arg-type]


class Weather(Struct):
    city: str


def add(a: int) -> int:
    return a


async def fetch(key: str) -> str:
    return key


async def typed_answers_and_tools(client: AsyncClient) -> None:
    async with client.session("m") as session:
        assert_type(await session.chat("x", schema=Weather), Weather)
        assert_type(await client.chat("m", "x", schema=Weather, temp=0), Weather)
        _ = (await session.chat("x", schema=Weather)).town  # type: ignore[attr-defined]
        await session.chat("x", schema="Weather")  # type: ignore[call-overload]
        assert_type(await session.chat("x", tools=[add, fetch], tool_rounds_max=2), Reply)
        session.stream("x", tools=[add, {"type": "function"}])
        await session.chat("x", tools=[1])  # type: ignore[list-item]
        assert_type(await session.open(), AsyncSession)
        await session.aclose()


def _on_queue(place: QueueEvent) -> None:
    assert_type(place.position, int)


def synchronous() -> None:
    with Client("path", timeout=5, retries=1, reconnect=True) as client:
        assert_type(client, Client)
        graph = client.load_by_name("m", on_progress=print, timeout=3)
        assert_type(graph, Graph)
        assert_type(client.init_execution_context(graph), Context)
        client.set_input(12, 0, "x")
        assert_type(client.compute(12, {"x": "text", "y": b"bytes"}), ComputeResult)
        assert_type(client.compute_single(12, priority="low"), bytes)
        assert_type(client.models(), list[ModelInfo])
        assert_type(client.chat("m", "x", priority="low"), Reply)
        assert_type(client.stream(12, "x"), Stream)
        assert_type(client.graph("m").run({"x": b"1"}, timeout=3), dict[str, NDArray[Any]])
        assert_type(client.graph("m").run_tensors({"x": 1}), dict[str, Tensor])
        assert_type(client.graph("m").run({"x": 1}, keep=["y"]), dict[str, Any])
        client.graph("m").run({"x": None})  # type: ignore[dict-item]
        client.graph("m").run({"x": 1}, raw=True)  # type: ignore[call-overload]
        with client.graph("m") as graph_of_tensors:
            assert_type(graph_of_tensors, TensorGraph)
            assert_type(graph_of_tensors.outputs[0].shape, tuple[int | str, ...] | None)
        assert_type(client.chat(12, "x"), Reply)
        client.set_input(12, 0)  # type: ignore[call-arg]
        client.compute_single(12, priority="lowest")  # type: ignore[arg-type]
        with client.session("m", priority="high", options={"temp": 0}) as session:
            assert_type(session, Session)
            with session.stream("x") as stream:
                assert_type(stream, Stream)
                for piece in stream:
                    assert_type(piece, str)
            assert_type(session.pull("x"), Pull)
            assert_type(session.fork(2), list[Session])
            assert_type(session.answers("x", 3), list[Answer])
            assert_type(session.rewind(tokens=5), RewindResult)
            session.stream("x", on_queue=1)  # type: ignore[arg-type]
            assert_type(session.chat("x", raw=True), Reply)
            assert_type(session.cancel(), bool)
            assert_type(session.chat("x", temp=0), Reply)
            assert_type(session.chat("x", schema=Weather), Weather)
            assert_type(client.chat("m", "x", schema=Weather), Weather)
            assert_type(session.chat("x", tools=[add]), Reply)
            _ = session.chat("x", schema=Weather).town  # type: ignore[attr-defined]
            assert_type(session.open(), Session)
            session.close()
            session.chat("x", cooked=True)  # type: ignore[call-overload]
            session.chat("x", n_predikt=24)  # type: ignore[call-overload]
