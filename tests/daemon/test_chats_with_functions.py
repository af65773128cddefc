"""Chats with functions as tools and with typed answers, on the model `echo`: it repeats the last
message, so that a prompt that is a call of a tool is one, and a tool's result the next answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import pydantic
import pytest

import inferd
from inferd import AsyncClient, InvalidAnswer, InvalidArgument
from inferd.testing import RunningDaemon
from tests.echo import echo_model

REMOVE = {"type": "function", "function": {"name": "remove"}}
CONFIG = echo_model("echo") + echo_model("hermes", tool_format="hermes")


def call_of(name: str, **arguments: object) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def roles(session: inferd.Session) -> list[str]:
    return [message["role"] for message in session.history().messages]


def test_a_function_is_called_and_its_result_is_answered(client: inferd.Client) -> None:
    threads: list[int] = []

    def add(a: int, b: int = 2) -> str:
        """Add two integers."""
        threads.append(threading.get_ident())
        return f"the sum is {a + b}"

    with client.session("hermes") as session:
        reply = session.chat(call_of("add", a=1), tools=[add])
        assert reply == "the sum is 3" and reply.tool_calls == []
        assert reply.metadata == session.metadata
        assert roles(session) == ["user", "assistant", "tool", "assistant"]
        [call] = session.history().messages[1]["tool_calls"]
        result = session.history().messages[2]
        assert (result["tool_call_id"], result["name"]) == (call["id"], "add")
    assert threads == [threading.get_ident()], "the calling thread runs it"
    assert client.chat("hermes", call_of("add", a=1, b=1), tools=[add]) == "the sum is 2"


def test_functions_are_called_for_a_context_too(client: inferd.Client) -> None:
    def name() -> str:
        return "Ada"

    context = client.init_execution_context(client.load_by_name("hermes"))
    assert client.chat(context, call_of("name"), tools=[name]) == "Ada"


def test_several_calls_of_an_answer_are_made_in_order(client: inferd.Client) -> None:
    made: list[int] = []

    def note(number: int) -> str:
        made.append(number)
        return f"noted {number}"

    with client.session("hermes") as session:
        session.chat(call_of("note", number=1) + call_of("note", number=2), tools=[note])
        assert made == [1, 2]
        assert roles(session) == ["user", "assistant", "tool", "tool", "assistant"]


def test_a_call_that_a_limit_cuts_is_returned_and_not_made(client: inferd.Client) -> None:
    """With the arguments that have come so far, or none, the function could do something else."""

    def remove(path: str = "/") -> str:
        raise AssertionError(path)

    prompt = call_of("remove", path="/tmp/x")
    for cut, arguments in ((30, ""), (prompt.index("/x"), '{"path": "/tmp')):
        reply = client.chat("hermes", prompt, tools=[remove], options={"n-predict": cut})
        [call] = reply.tool_calls
        assert (str(reply), call.name) == ("", "remove")
        assert call.arguments == arguments, call.arguments
        with client.session("hermes", options={"n-predict": cut, "tools": [REMOVE]}) as session:
            stream = session.stream(prompt)
            assert "".join(stream) == "" and stream.tool_calls[0].arguments == arguments


def test_errors_are_answered_to_the_model_and_the_chat_goes_on(client: inferd.Client) -> None:
    def divide(a: int, b: int) -> float:
        return a / b

    with client.session("hermes") as session:

        def chat(text: str) -> str:
            return session.chat(text, tools=[divide])

        assert chat(call_of("divide", a=1, b=0)) == "error: ZeroDivisionError: division by zero"
        assert "Expected `int`, got `str`" in chat(call_of("divide", a="one", b=1))
        assert chat(call_of("multiply")).startswith("error: there is no function 'multiply'")
        assert chat(call_of("divide", a=1, b=2)) == "0.5"


def test_rounds_are_bounded_and_the_last_answer_is_a_text(client: inferd.Client) -> None:
    rounds: list[int] = []

    def again() -> str:
        """Return another call, which the model then makes."""
        rounds.append(1)
        return call_of("again")

    with client.session("hermes") as session:
        reply = session.chat(call_of("again"), tools=[again], tool_rounds_max=3)
        assert len(rounds) == 3
        assert reply == call_of("again") and reply.tool_calls == []
        assert len(rounds) == 3
        with pytest.raises(InvalidArgument, match="tool_rounds_max is -1"):
            session.chat("x", tools=[again], tool_rounds_max=-1)
        reply = session.chat(call_of("again"), tools=[again], tool_rounds_max=0)
        assert [call.name for call in reply.tool_calls] == ["again"], "the program calls it"


def test_calls_of_a_definition_are_returned_to_the_program(client: inferd.Client) -> None:
    function = {"name": "theirs", "parameters": {"type": "object", "properties": {}}}
    called: list[str] = []

    def ours() -> None:
        called.append("ours")

    tools: list[inferd.Tool] = [ours, {"type": "function", "function": function}]
    with client.session("hermes") as session:
        reply = session.chat(call_of("ours") + call_of("theirs"), tools=tools)
        assert [call.name for call in reply.tool_calls] == ["ours", "theirs"]
        assert called == [], "the program answers all calls of an answer, or none"


def test_a_stream_describes_functions_and_leaves_calling_to_the_program(
    client: inferd.Client,
) -> None:
    def add(a: int) -> int:
        raise AssertionError

    with client.session("hermes") as session, session.stream(call_of("add", a=1), tools=[add]) as s:
        assert "".join(s) == ""
        assert [call.name for call in s.tool_calls] == ["add"]


def test_coroutine_functions_need_the_asynchronous_client(client: inferd.Client) -> None:
    async def fetch() -> str:
        raise AssertionError

    with client.session("hermes") as session:
        with pytest.raises(InvalidArgument, match="fetch is a coroutine function"):
            session.chat("x", tools=[fetch])
        assert not session.metadata, "no turn began"


@asynccontextmanager
async def asynchronous(daemon: RunningDaemon) -> AsyncIterator[inferd.AsyncSession]:
    async with AsyncClient(daemon.socket) as client, client.session("hermes") as session:
        yield session


@pytest.mark.anyio
async def test_the_asynchronous_client_awaits_functions_and_runs_others_in_a_thread(
    daemon: RunningDaemon, anyio_backend: str
) -> None:
    threads: list[int] = []

    async def fetch(text: str) -> str:
        await anyio.lowlevel.checkpoint()
        threads.append(threading.get_ident())
        return text.upper()

    def count(text: str) -> int:
        threads.append(threading.get_ident())
        return len(text)

    async with asynchronous(daemon) as session:
        tools = [fetch, count]
        assert await session.chat(call_of("fetch", text="abc"), tools=tools) == "ABC"
        assert await session.chat(call_of("count", text="abc"), tools=tools) == "3"
    own = threading.get_ident()
    assert [thread == own for thread in threads] == [True, False]


@pytest.mark.anyio
async def test_a_cancelled_chat_cancels_its_function(
    daemon: RunningDaemon, anyio_backend: str
) -> None:
    ended: list[str] = []

    async def wait() -> None:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("wait")

    async with asynchronous(daemon) as session:
        with anyio.CancelScope() as scope:
            await session.chat(call_of("wait"), tools=[wait])
        assert scope.cancelled_caught and ended == ["wait"]
        assert await session.chat("go on") == "go on"


class Weather(msgspec.Struct):
    city: str
    degrees: int


@dataclass
class WeatherData:
    city: str
    degrees: int


class WeatherModel(pydantic.BaseModel):
    city: str
    degrees: int


KINDS: list[type[Any]] = [Weather, WeatherData, WeatherModel]
OSLO = '{"city": "Oslo", "degrees": -4}'


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_an_instance_of_its_schema(kind: type[Any], client: inferd.Client) -> None:
    with client.session("echo") as session:
        found = session.chat(OSLO, schema=kind)
        assert found == kind(city="Oslo", degrees=-4) and type(found) is kind
        assert "json-schema" in session.metadata["adjusted"], "echo names what it cannot follow"
    assert client.chat("echo", OSLO, schema=kind) == found
    context = client.init_execution_context(client.load_by_name("echo"))
    assert client.chat(context, OSLO, schema=kind) == found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "options", "reason", "message"),
    [
        ('{"city": "Oslo"}', {}, "eos", "the answer is not a Weather.*degrees"),
        ("It snows.", {}, "eos", "the answer is not a Weather"),
        (OSLO, {"n-predict": 9}, "length", r"was cut off \(length\) and is not a Weather"),
    ],
    ids=["field", "text", "cut"],
)
def test_an_answer_that_does_not_fit_is_an_error_with_its_text(
    kind: type[Any],
    text: str,
    options: dict[str, Any],
    reason: str,
    message: str,
    client: inferd.Client,
) -> None:
    with client.session("echo") as session:
        with pytest.raises(InvalidAnswer, match=message) as caught:
            session.chat(text, schema=kind, options=options)
        error = caught.value
        assert error.data == {"text": text[:9] if options else text, "stop_reason": reason}
        assert not error.retryable and error.hint
        assert session.chat("go on") == "go on"


@pytest.mark.anyio
async def test_the_asynchronous_client_returns_instances_too(
    daemon: RunningDaemon, anyio_backend: str
) -> None:
    async with AsyncClient(daemon.socket) as client:
        assert await client.chat("echo", OSLO, schema=Weather) == Weather("Oslo", -4)


def no_schema() -> None: ...


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (lambda s: s.chat("x", schema=Callable), "has no JSON schema"),
        (lambda s: s.chat("x", schema=Weather, tools=[no_schema]), "exclude each other"),
    ],
)
def test_what_cannot_be_a_schema_is_refused_before_the_turn(
    chat: Callable[[inferd.Session], object], message: str, client: inferd.Client
) -> None:
    with client.session("echo") as session:
        with pytest.raises(InvalidArgument, match=message):
            chat(session)
        assert not session.metadata
