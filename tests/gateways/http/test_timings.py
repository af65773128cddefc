"""`timings_per_token` and `return_progress`, in llama-server's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.echo import echo_model

CONFIG = echo_model("echo", **{"batch-size": 16}) + echo_model("tools", tool_format="hermes")
PROMPT = "a prompt of several steps, each of sixteen tokens"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "echo", "messages": [{"role": "user", "content": PROMPT}]},
    COMPLETIONS: {"model": "echo", "prompt": PROMPT},
}
TIMINGS = [
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
]


def chunks_of(web: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    reply = web.post(path, json={**BODIES[path], "stream": True, **fields})
    assert reply.status_code == 200 and "inferd-ignored" not in reply.headers, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if "data: " in line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]], number: int = 0) -> str:
    """Return the text of an answer."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [each for each in choices if each["index"] == number]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in parts)


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_has_its_times(web: httpx.Client, path: str) -> None:
    found = web.post(path, json={**BODIES[path], "max_tokens": 9, "timings_per_token": True}).json()
    timings, usage = found["timings"], found["usage"]
    assert list(timings) == TIMINGS
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 9
    for name, steps in (("prompt", timings["prompt_n"]), ("predicted", 8)):
        assert timings[f"{name}_per_token_ms"] == pytest.approx(timings[f"{name}_ms"] / steps)
        rate = 1000 * steps / timings[f"{name}_ms"]
        assert timings[f"{name}_per_second"] == pytest.approx(rate)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("usage", [False, True])
def test_each_chunk_with_tokens_has_the_times_so_far(
    web: httpx.Client, path: str, usage: bool
) -> None:
    options = {"stream_options": {"include_usage": usage}, "max_tokens": 9}
    plain = chunks_of(web, path, **options)
    assert not any("timings" in chunk or "prompt_progress" in chunk for chunk in plain)
    chunks = chunks_of(web, path, timings_per_token=True, **options)
    assert text_of(chunks) == text_of(plain) and len(chunks) == len(plain)
    timed = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    assert len(timed) == 9 + 1 + usage
    assert all(list(each) == TIMINGS for each in timed)
    counts = [each["predicted_n"] for each in timed]
    assert counts == [*range(1, 10), *[9] * (1 + usage)]
    assert len({(each["cache_n"], each["prompt_n"], each["prompt_ms"]) for each in timed}) == 1
    assert "timings" in chunks[-1]
    times = [each["predicted_ms"] for each in timed[:9]]
    assert times == sorted(times)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_with_the_progress_of_its_prompt(web: httpx.Client, path: str) -> None:
    prompt = f"{path} alone begins so: {PROMPT}"
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"messages": messages} if path == CHAT else {"prompt": prompt}
    for usage in (False, True):
        fields: dict[str, Any] = {**body, "stream_options": {"include_usage": usage}}
        chunks = chunks_of(web, path, return_progress=True, **fields)
        with_progress = [chunk for chunk in chunks if "prompt_progress" in chunk]
        progress = [chunk["prompt_progress"] for chunk in with_progress]
        assert all(list(each) == ["total", "cache", "processed", "time_ms"] for each in progress)
        assert all(type(value) is int for each in progress for value in each.values())
        processed = [each["processed"] for each in progress]
        assert processed == sorted(set(processed)) and len(processed) > 1
        assert processed[0] == progress[0]["cache"] and processed[-1] == progress[-1]["total"]
        first = next(n for n, c in enumerate(chunks) if text_of([c]))
        assert all(chunks.index(chunk) < first for chunk in with_progress)
        assert not any("timings" in chunk for chunk in chunks)
        assert text_of(chunks) == text_of(chunks_of(web, path, **fields)) != ""
        if path == CHAT:
            deltas = [chunk["choices"][0]["delta"] for chunk in with_progress]
            assert deltas == [{"role": "assistant", "content": None}] * len(deltas)


@pytest.mark.parametrize("path", BODIES)
def test_several_answers_have_their_own_times(web: httpx.Client, path: str) -> None:
    fields = {"timings_per_token": True, "return_progress": True, "n": 3, "max_tokens": 4}
    chunks = chunks_of(web, path, **fields)
    for number in range(3):
        assert text_of(chunks, number) == PROMPT[:4]
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == number]
        counts = [chunk["timings"]["predicted_n"] for chunk in own if "timings" in chunk]
        assert counts == [1, 2, 3, 4, 4]
        last = [chunk["prompt_progress"] for chunk in own if "prompt_progress" in chunk][-1]
        assert last["processed"] == last["total"]
    whole = web.post(path, json={**BODIES[path], **fields, "stream": False}).json()
    assert len(whole["choices"]) == 3 and whole["timings"]["predicted_n"] == 4


def test_chunks_of_tool_calls_have_times_too(web: httpx.Client) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": call}]
    fields = {"model": "tools", "messages": messages, "tools": tools, "timings_per_token": True}
    chunks = chunks_of(web, CHAT, **fields)
    assert any("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["timings"]["predicted_n"] == len(call) + 1


def test_an_error_of_a_turn_without_progress_has_its_own_status(web: httpx.Client) -> None:
    body = {**BODIES[CHAT], "stream": True, "timings_per_token": True, "temperature": 200}
    assert web.post(CHAT, json={**body, "return_progress": True}).status_code == 400
    for wrong in ({"timings_per_token": "yes"}, {"return_progress": 1}):
        assert web.post(CHAT, json={**BODIES[CHAT], **wrong}).status_code == 400
    for absent in (None, False):
        fields = {"timings_per_token": absent, "return_progress": absent}
        assert "timings" not in web.post(CHAT, json={**BODIES[CHAT], **fields}).json()
