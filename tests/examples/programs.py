"""Small programs of each kind, synchronous and asynchronous, as users write them.

mypy and pyright check them in strict mode; `test_programs.py` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import pydantic

from inferd import AsyncClient, Client, InvalidAnswer, Options, SessionInfo, Tool

OPTIONS: Options = {"n-predict": 64, "temp": 0, "stop": ["END"]}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
WEATHER = '{"city": "Oslo", "degrees": -4}'


@dataclass
class Weather:
    city: str
    degrees: Annotated[int, msgspec.Meta(ge=-60, le=60)]


class Report(msgspec.Struct):
    city: str
    degrees: int


class Model(pydantic.BaseModel):
    city: str
    degrees: int


def add(a: int, b: int = 0, unit: Literal["", "apples"] = "") -> str:
    """Add two integers.

    Args:
        a: The first number.
        b: The second number.
        unit: The name of the things.
    """
    return f"{a + b} {unit}".strip()


async def fetch(key: Annotated[str, "The key of the text."]) -> str:
    """Return a stored text."""
    return f"the text of {key}"


def complete(client: Client, model: str) -> str:
    reply = client.chat(model, "Once upon a time", raw=True, n_predict=8)
    words: list[str] = reply.split()
    return f"{len(words)} words, {reply.metadata['output_tokens']} tokens"


async def complete_async(client: AsyncClient, model: str) -> str:
    reply = await client.chat(model, "Once upon a time", raw=True, n_predict=8)
    words: list[str] = reply.split()
    return f"{len(words)} words, {reply.metadata['output_tokens']} tokens"


def talk(client: Client, model: str) -> str:
    session = client.session(model, system="Be brief.", options=OPTIONS).open()
    session.chat("hello")
    session.chat("and again", seed=1)
    dropped = session.rewind(1)
    with session.fork(1)[0] as branch:
        branch.chat("another way")
    roles = [str(message["role"]) for message in session.history().messages]
    session.close()
    return f"{' '.join(roles)}, {dropped.turns} turns"


async def talk_async(client: AsyncClient, model: str) -> str:
    session = await client.session(model, system="Be brief.", options=OPTIONS).open()
    await session.chat("hello")
    await session.chat("and again", seed=1)
    dropped = await session.rewind(1)
    async with (await session.fork(1))[0] as branch:
        await branch.chat("another way")
    roles = [str(message["role"]) for message in (await session.history()).messages]
    await session.aclose()
    return f"{' '.join(roles)}, {dropped.turns} turns"


def stream(client: Client, model: str) -> str:
    places: list[int] = []
    with client.session(model) as session:
        pieces = session.stream("tell me", on_queue=lambda place: places.append(place.position))
        text = "".join(pieces)
        found = pieces.metadata
        assert found["ttft_ms"] >= 0 and len(pieces.tokens) <= found["output_tokens"]
    return f"{text}, {found['stop_reason']}"


async def stream_async(client: AsyncClient, model: str) -> str:
    places: list[int] = []
    async with client.session(model) as session:
        pieces = session.stream("tell me", on_queue=lambda place: places.append(place.position))
        text = "".join([piece async for piece in pieces])
        found = pieces.metadata
        assert found["ttft_ms"] >= 0 and len(pieces.tokens) <= found["output_tokens"]
    return f"{text}, {found['stop_reason']}"


def embed(client: Client, model: str) -> str:
    vectors = client.embed(model, ["one", "two"], priority="high")
    best = max(range(len(vectors)), key=lambda number: vectors[number][0])
    return f"{len(vectors)} of {vectors.size}, {best < 2}, {sum(vectors.tokens) > 0}"


async def embed_async(client: AsyncClient, model: str) -> str:
    vectors = await client.embed(model, ["one", "two"], priority="high")
    best = max(range(len(vectors)), key=lambda number: vectors[number][0])
    return f"{len(vectors)} of {vectors.size}, {best < 2}, {sum(vectors.tokens) > 0}"


def use_tools(client: Client, model: str) -> str:
    with client.session(model) as session:
        reply = session.chat(CALL, tools=[add], tool_rounds_max=2)
        assert not reply.tool_calls
        called = session.chat(CALL, tools=[{"type": "function", "function": {"name": "add"}}])
        names = [f"{call.name} {call.values['a']}" for call in called.tool_calls]
    return f"{reply}, {', '.join(names)}"


async def use_tools_async(client: AsyncClient, model: str) -> str:
    tools: list[Tool] = [add, fetch]
    async with client.session(model) as session:
        reply = await session.chat(CALL, tools=tools, tool_rounds_max=2)
        assert not reply.tool_calls
        called = await session.chat(CALL, tools=[{"type": "function", "function": {"name": "add"}}])
        names = [f"{call.name} {call.values['a']}" for call in called.tool_calls]
    return f"{reply}, {', '.join(names)}"


def extract(client: Client, model: str) -> str:
    with client.session(model) as session:
        weather = session.chat(WEATHER, schema=Weather)
        report = session.chat(WEATHER, schema=Report)
        found = client.chat(model, WEATHER, schema=Model)
        try:
            session.chat("It snows.", schema=Weather)
        except InvalidAnswer as exc:
            text = str(exc.data["text"])
        else:
            raise AssertionError
    return f"{weather.city} {report.degrees} {found.city.upper()} {text}"


async def extract_async(client: AsyncClient, model: str) -> str:
    async with client.session(model) as session:
        weather = await session.chat(WEATHER, schema=Weather)
        report = await session.chat(WEATHER, schema=Report)
        found = await client.chat(model, WEATHER, schema=Model)
        try:
            await session.chat("It snows.", schema=Weather)
        except InvalidAnswer as exc:
            text = str(exc.data["text"])
        else:
            raise AssertionError
    return f"{weather.city} {report.degrees} {found.city.upper()} {text}"


def manage(client: Client, model: str) -> str:
    names = [info["name"] for info in client.models() if info["state"] != "failed"]
    shown = client.show(model)
    tokens = client.tokenize(client.load_by_name(model), "one two")
    sessions: list[SessionInfo] = client.sessions(dormant=True)
    ids = [session["session_id"] or "none" for session in sessions]
    waiting = sum(task["state"] == "waiting" for task in client.queue())
    stats = client.stats()
    client.unload_model(model, force=True)
    return (
        f"{model in names} {shown['backend']} {len(tokens) > 2} {ids} {waiting}"
        f" {stats['draining']} {len(shown['options']) >= 0}"
    )


async def manage_async(client: AsyncClient, model: str) -> str:
    names = [info["name"] for info in await client.models() if info["state"] != "failed"]
    shown = await client.show(model)
    tokens = await client.tokenize(await client.load_by_name(model), "one two")
    sessions: list[SessionInfo] = await client.sessions(dormant=True)
    ids = [session["session_id"] or "none" for session in sessions]
    waiting = sum(task["state"] == "waiting" for task in await client.queue())
    stats = await client.stats()
    await client.unload_model(model, force=True)
    return (
        f"{model in names} {shown['backend']} {len(tokens) > 2} {ids} {waiting}"
        f" {stats['draining']} {len(shown['options']) >= 0}"
    )
