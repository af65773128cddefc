"""Anthropic's API on the echo model, with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway

CONFIG = "".join(
    (
        echo_model("echo", tool_format="hermes"),
        echo_model("late", load_ms=2000),
        echo_model("broken", fail_at_step=6),
    )
)
CALL = '<tool_call>{"name": "weather", "arguments": {"at": "Rome"}}</tool_call>'
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def api(http: RunningGateway) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=http.url, api_key="none", timeout=CALL_S_MAX, max_retries=0
    ) as client:
        yield client


def test_a_whole_message_has_its_text_its_end_and_its_usage(api: Any) -> None:
    done = api.messages.create(model="echo", max_tokens=100, messages=HELLO)
    assert [(block.type, block.text) for block in done.content] == [("text", "hello")]
    assert (done.role, done.model, done.stop_reason) == ("assistant", "echo", "end_turn")
    assert done.usage.input_tokens + done.usage.cache_read_input_tokens == 7
    assert done.usage.output_tokens == 6


def test_a_stream_becomes_the_whole_message(api: Any) -> None:
    with api.messages.stream(model="echo", max_tokens=100, messages=HELLO) as stream:
        pieces = list(stream.text_stream)
        done = stream.get_final_message()
    assert "".join(pieces) == "hello" and len(pieces) > 1
    assert done.content[0].text == "hello" and done.stop_reason == "end_turn"
    assert done.usage.output_tokens == 6 and done.usage.input_tokens > 0


def test_the_events_of_a_stream_are_in_order(web: httpx.Client) -> None:
    body = {"model": "echo", "max_tokens": 9, "messages": HELLO, "stream": True}
    text = web.post("/v1/messages", json=body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line[:6] == "event:"]
    order = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert order == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.asyncio
async def test_the_asynchronous_client_streams(http: RunningGateway) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=http.url, api_key="none") as client,
        client.messages.stream(model="echo", max_tokens=100, messages=HELLO) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == "hello"


def test_the_reason_of_an_end_is_reported(api: Any) -> None:
    short = api.messages.create(model="echo", max_tokens=2, messages=HELLO)
    assert (short.content[0].text, short.stop_reason) == ("he", "max_tokens")
    stopped = api.messages.create(
        model="echo", max_tokens=100, messages=HELLO, stop_sequences=["l"]
    )
    assert stopped.content[0].text == "he"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "l")


def test_blocks_of_text_are_one_text(api: Any) -> None:
    cached = {"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}}
    content = [cached, {"type": "text", "text": "lo"}]
    done = api.messages.create(
        model="echo",
        max_tokens=100,
        messages=[{"role": "user", "content": content}],
        system=[{"type": "text", "text": "Repeat."}],
        metadata={"user_id": "ada"},
    )
    assert done.content[0].text == "hello"


def test_a_history_with_calls_and_their_results_is_read(api: Any) -> None:
    history: list[Any] = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a tool", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"at": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "sunny"}],
                },
                {"type": "text", "text": "hello"},
            ],
        },
    ]
    done = api.messages.create(model="echo", max_tokens=100, messages=history)
    assert done.content[0].text == "hello"


def test_the_tokens_of_a_prompt_are_counted(api: Any) -> None:
    counted = api.messages.count_tokens(model="echo", messages=HELLO)
    done = api.messages.create(model="echo", max_tokens=1, messages=HELLO)
    assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens
    longer = api.messages.count_tokens(model="echo", messages=HELLO, system="Repeat.")
    assert longer.input_tokens >= counted.input_tokens


def test_models_have_the_shape_that_the_header_asks_for(api: Any, web: httpx.Client) -> None:
    assert ("echo", "model") in [(model.id, model.type) for model in api.models.list()]
    assert api.models.retrieve("echo").display_name == "echo"
    assert web.get("/v1/models").json()["object"] == "list"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(api: Any, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError, match="missing") as found:
        api.messages.create(model="missing", max_tokens=1, messages=HELLO, stream=stream)
    assert found.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content.0.text"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {
                "system": "s",
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}
                ],
            },
            "messages.0.content.0",
        ),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"output_format": {"type": "text"}}, "output_format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_config.format"),
        ({"container": "x"}, "container"),
        ({"documents": [{"text": "x"}]}, "documents"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(
    body: dict[str, Any], named: str, web: httpx.Client
) -> None:
    whole = {"model": "echo", "max_tokens": 9, "messages": HELLO, **body}
    reply = web.post("/v1/messages", json=whole)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and named in error["message"]


@pytest.mark.parametrize("text", ["", "so "])
def test_a_call_is_a_block_of_its_own(text: str, api: Any) -> None:
    keywords: Any = {"model": "echo", "max_tokens": 200, "tools": [TOOL]}
    messages = [{"role": "user", "content": text + CALL}]
    done = api.messages.create(**keywords, messages=messages)
    with api.messages.stream(**keywords, messages=messages) as stream:
        list(stream)
        streamed = stream.get_final_message()
    for message in (done, streamed):
        *before, call = message.content
        assert [block.text.strip() for block in before] == [text.strip()] * bool(text)
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"at": "Rome"})
        assert call.id and message.stop_reason == "tool_use"


def events_of(reply: httpx.Response) -> list[Any]:
    lines = list(reply.iter_lines())
    return [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]


def test_a_turn_that_waits_sends_pings(daemon: RunningDaemon) -> None:
    body = {"model": "late", "max_tokens": 9, "messages": HELLO, "stream": True}
    with (
        gateway(daemon) as running,
        httpx.stream("POST", f"{running.url}/v1/messages", json=body, timeout=CALL_S_MAX) as reply,
    ):
        events = events_of(reply)
    assert events[0]["type"] == "ping" and events[-1]["type"] == "message_stop"


def test_a_late_error_is_an_event(api: Any, web: httpx.Client) -> None:
    body = {"model": "broken", "max_tokens": 100, "messages": HELLO, "stream": True}
    with web.stream("POST", "/v1/messages", json=body) as reply:
        events = events_of(reply)
    assert reply.status_code == 200 and events[0]["type"] in ("ping", "message_start")
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"]
