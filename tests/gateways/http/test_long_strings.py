"""Long bodies: their strings are neither decoded as JSON nor copied, and cost the loop little."""

from __future__ import annotations

import json
import threading
import tracemalloc
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.gateways.http.anthropic.fields import MESSAGES
from inferd.gateways.http.fields import FieldTable
from inferd.gateways.http.long_strings import STRING_BYTES_MIN, LongBody
from inferd.gateways.http.media import RequestMedia
from inferd.gateways.http.ollama.fields import CHAT as OLLAMA_CHAT
from inferd.gateways.http.ollama.fields import GENERATE
from inferd.gateways.http.openai.chat_fields import CHAT, read_messages
from inferd.gateways.http.openai.responses.fields import INPUT_TOKENS, RESPONSES

LONG = "A" * STRING_BYTES_MIN
URI = f"data:image/png;base64,{LONG}"
PLACES = ("found.*.url", "found.*.data.*")


def long_body(value: Any) -> LongBody:
    return LongBody(bytearray(json.dumps(value).encode()))


def decoded(body: LongBody, *places: str) -> tuple[Any, bool]:
    fields = json.loads(body.text)
    return fields, body.put_strings(fields, places)


def bare(value: Any) -> Any:
    """Return a value with views as texts."""
    if isinstance(value, memoryview):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {name: bare(each) for name, each in value.items()}
    return [bare(each) for each in value] if isinstance(value, list) else value


def test_a_long_string_at_a_known_place_is_a_view_of_the_body() -> None:
    value = {"found": [{"url": URI, "x": "short"}, {"data": [LONG, "b"]}], "more": [1, None]}
    body = long_body(value)
    assert len(body.text) < 400
    fields, whole = decoded(body, *PLACES)
    assert whole and bare(fields) == value
    for view in (fields["found"][0]["url"], fields["found"][1]["data"][0]):
        assert isinstance(view, memoryview) and view.obj is body.body


@pytest.mark.parametrize(
    "value",
    [
        {"text": LONG},
        {"found": {"url": LONG}},
        {"found": [{"url": [LONG]}]},
        {"found": [LONG]},
        {LONG: 1},
        {"found": [{"data": {"x": LONG}}]},
        {"found": [{"url": f'{LONG}"'}]},
        {"found": [{"url": f'"{LONG}'}, {"url": LONG}, {"url": f"\\{LONG}"}]},
    ],
    ids=lambda value: json.dumps(value).replace(LONG, "LONG")[:60],
)
def test_a_long_string_elsewhere_is_read_with_the_whole_body(value: dict[str, Any]) -> None:
    body = long_body(value)
    fields, whole = decoded(body, *PLACES)
    assert bare(fields) == value if whole else json.loads(body.body) == value


def test_numbers_between_two_strings_are_not_taken_for_one() -> None:
    value = {"a": [*range(20_000)], "model": "m", "messages": [{"role": "user", "content": "x"}]}
    own, _, ignored = CHAT.read(long_body(value))
    assert own.model == "m" and ignored == ["a"]


def test_the_last_of_two_equal_names_counts() -> None:
    data = f'{{"model":"m","messages":[{{"role":"user","content":"{LONG}","content":"x"}}]}}'
    own, _, _ = CHAT.read(LongBody(bytearray(data.encode())))
    assert own.messages == [{"role": "user", "content": "x"}]


@given(
    st.recursive(
        st.sampled_from(("", "x", 'a"b', "\\", LONG, f"{LONG}\\", f"é{LONG}", f'{LONG}"{LONG}')),
        lambda items: (
            st.lists(items, max_size=3)
            | st.dictionaries(st.sampled_from(("found", "url", "data", LONG)), items, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_any_body_reads_as_without_long_strings(value: Any) -> None:
    for text in (json.dumps({"found": value}), json.dumps({"found": value}, ensure_ascii=False)):
        body = LongBody(bytearray(text.encode()))
        fields, whole = decoded(body, "found", *PLACES)
        assert not whole or bare(fields) == {"found": value}


def part(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [content]}]}


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": LONG}}
SOUND = {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}
RESULT = {"type": "function_call_output", "call_id": "a", "output": [{"image_url": URI}]}


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        (CHAT, part({"type": "image_url", "image_url": {"url": URI}})),
        (CHAT, part({"type": "image_url", "image_url": URI})),
        (CHAT, part(SOUND)),
        (RESPONSES, {"input": [{"role": "user", "content": [{"image_url": URI}]}]}),
        (RESPONSES, {"input": [RESULT]}),
        (INPUT_TOKENS, {"input": [{"role": "user", "content": [SOUND]}]}),
        (MESSAGES, part(BLOCK) | {"max_tokens": 1}),
        (MESSAGES, part({"type": "tool_result", "content": [BLOCK]}) | {"max_tokens": 1}),
        (OLLAMA_CHAT, {"messages": [{"role": "user", "images": [LONG]}]}),
        (GENERATE, {"images": [LONG]}),
    ],
)
def test_every_api_keeps_images_and_sounds_out_of_its_json(
    table: FieldTable[Any], fields: dict[str, Any]
) -> None:
    value = {"model": "m"} | fields
    body = long_body(value)
    body.body = bytearray(b"not decoded again")
    own, _, _ = table.read(body)
    assert {name: bare(getattr(own, name)) for name in value} == value


MB = 1 << 20


@pytest.mark.asyncio
async def test_a_long_body_is_neither_copied_nor_decoded_on_the_loop() -> None:
    """Its image is in memory as base64 in the body, and as bytes once."""
    data = bytes(range(256)) * (20 * MB // 256)
    text = json.dumps({"model": "m"} | part({"type": "image_url", "image_url": "URI"}))
    uri = b"data:image/png;base64," + b64encode(data)
    received = bytearray(text.encode().replace(b"URI", uri))
    threads: list[threading.Thread] = []

    def noted(function: Callable[..., Any], *args: Any) -> Any:
        threads.append(threading.current_thread())
        return function(*args)

    async def run_in_thread(function: Callable[..., Any], *args: Any) -> Any:
        return await anyio.to_thread.run_sync(noted, function, *args)

    tracemalloc.start()
    try:
        own, _, _ = CHAT.read(await run_in_thread(LongBody, received))
        media = RequestMedia()
        [message] = read_messages(own.messages, media)
        assert tracemalloc.get_traced_memory()[1] < MB
        await media.decode(run_in_thread)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * len(data) + MB
    finally:
        tracemalloc.stop()
    assert message["content"][0]["data"] == data
    assert len(threads) == 2 and threading.current_thread() not in threads


@pytest.mark.asyncio
async def test_short_contents_need_no_thread() -> None:
    media = RequestMedia()
    found = media.add_image("images.0", b64encode(b"abc").decode())
    await media.decode(anyio.to_thread.run_sync)
    assert found["data"] == b"abc"
