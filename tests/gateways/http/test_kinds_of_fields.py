"""Neutral, ignored and refused fields, nulls and whole floats, over HTTP on the echo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inferd.testing import RunningDaemon
from tests.gateways.http.driver import CALL_S_MAX, gateway

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
FUNCTION = {"name": "look", "description": "d", "parameters": {"type": "object"}, "strict": False}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "echo", "messages": HELLO},
    COMPLETIONS: {"model": "echo", "prompt": "hello"},
    RESPONSES: {"model": "echo", "input": "hello", "store": False},
    "/v1/messages": {"model": "echo", "messages": HELLO, "max_tokens": 20},
    "/v1/messages/count_tokens": {"model": "echo", "messages": HELLO},
    "/v1/embeddings": {"model": "echo", "input": "hello"},
    "/api/chat": {"model": "echo", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "echo", "prompt": "hello", "stream": False},
    "/api/embed": {"model": "echo", "input": "hello"},
    "/api/embeddings": {"model": "echo", "prompt": "hello"},
    "/api/show": {"model": "echo"},
}
GENERATING = [CHAT, COMPLETIONS, RESPONSES, "/v1/messages"]


@pytest.mark.parametrize("path", BODIES)
def test_an_ignored_field_is_named_in_a_header(web: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "colour, or\nnot": {"x": 1}, "ttl": 300, "shade": None}
    found = web.post(path, json=body)
    assert found.status_code == 200
    assert found.headers["inferd-ignored"] == "colour%2C%20or%0Anot, ttl"
    assert "inferd-ignored" not in web.post(path, json=BODIES[path]).headers


@pytest.mark.parametrize("path", GENERATING)
def test_a_stream_and_an_error_have_the_header_too(web: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "stream": True, "keep_alive": "5m"}
    found = web.post(path, json=body)
    assert (found.status_code, found.headers["inferd-ignored"]) == (200, "keep_alive")
    assert "data: " in found.text and '"error":{' not in found.text
    failed = web.post(path, json={**body, "model": "nobody"})
    assert (failed.status_code, failed.headers["inferd-ignored"]) == (404, "keep_alive")


def test_the_header_is_bounded(web: httpx.Client) -> None:
    many = {"x" * 1_000_000: 1, **{f"n{number}": 1 for number in range(1000)}}
    found = web.post(CHAT, json={**BODIES[CHAT], **many})
    assert found.status_code == 200
    names = found.headers["inferd-ignored"].split(", ")
    assert len(names) == 32 and names[0] == "x" * 64 and names[1] == "n0"


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "field",
    [
        *({"add_generation_prompt": True}, {"continue_final_message": False}, {"echo": False}),
        *({"id_slot": -1}, {"best_of": 1}, {"best_of": 1.0}, {"min_tokens": 0}),
        *({"functions": []}, {"function_call": "auto"}, {"function_call": "none"}),
        *({"verbosity": "medium"}, {"extra_body": {}}, {"use_beam_search": False}),
        *({"skip_special_tokens": True}, {"length_penalty": 1.0}, {"priority": 0}),
        *({"mmproj": ""}, {"chat_template": ""}, {"stop": None}),
    ],
    ids=str,
)
def test_a_neutral_value_counts_as_absent(
    web: httpx.Client, path: str, field: dict[str, Any]
) -> None:
    found = web.post(path, json={**BODIES[path], **field})
    assert found.status_code == 200, found.text
    assert "inferd-ignored" not in found.headers


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "field",
    [
        *({"add_generation_prompt": False}, {"continue_final_message": True}, {"best_of": 2}),
        *({"functions": [{"name": "f"}]}, {"function_call": {"name": "f"}}, {"min_tokens": 5}),
        *({"verbosity": "low"}, {"extra_body": {"top_k": 1}}, {"use_beam_search": True}),
        *({"best_of": True}, {"skip_special_tokens": False}, {"image": "x"}, {"num_predict": 3}),
        *({"raw": True}, {"images": ["x"]}, {"template": "x"}),
        *({"rope_freq_base": 1e4}, {"prompt_embeds": "x"}, {"skip_special_tokens": 1}),
    ],
    ids=str,
)
def test_a_field_that_changes_the_answer_is_refused_by_name(
    web: httpx.Client, path: str, field: dict[str, Any]
) -> None:
    found = web.post(path, json={**BODIES[path], **field})
    assert found.status_code == 400
    [name] = field
    assert name in found.json()["error"]["message"]


def test_ollamas_paths_ignore_unknown_fields_and_options(web: httpx.Client) -> None:
    fields = {
        **{"max_output_tokens": 1, "tool_choice": "required", "truncate": True, "shift": False},
        **{"temperature": 0.5, "image": "x", "functions": [{"name": "f"}]},
        "options": {"colour": 1, "threads": 2, "num_ctx": 64, "num_predict": 2.0, "mmap": None},
    }
    for path in ("/api/chat", "/api/generate"):
        found = web.post(path, json={**BODIES[path], **fields})
        assert found.status_code == 200
        assert found.headers["inferd-ignored"] == (
            "max_output_tokens, tool_choice, temperature, image, functions,"
            " options.colour, options.threads, options.num_ctx"
        )
        assert found.json()["eval_count"] == 2
    stream = web.post("/api/chat", json={**BODIES["/api/chat"], "stream": True, "colour": 1})
    assert stream.headers["inferd-ignored"] == "colour"
    wrong = web.post("/api/chat", json={**BODIES["/api/chat"], "options": {"num_predict": 2.5}})
    assert wrong.status_code == 400


def test_unknown_fields_can_be_refused(daemon: RunningDaemon) -> None:
    with (
        gateway(daemon, "--unknown-fields", "refuse") as running,
        httpx.Client(base_url=running.url, timeout=CALL_S_MAX) as web,
    ):
        for path, body in BODIES.items():
            found = web.post(path, json={**body, "colour": "red"})
            assert found.status_code == 400 and "unknown field 'colour'" in found.text
            assert web.post(path, json={**body, "colour": None}).status_code == 200
        options = {**BODIES["/api/chat"], "options": {"num_predic": 2}}
        found = web.post("/api/chat", json=options)
        assert found.status_code == 400 and "num_predict" in found.text
        assert web.post(CHAT, json={**BODIES[CHAT], "ttl": 3}).status_code == 400
        named = web.post(CHAT, json={**BODIES[CHAT], "user": "ada", "best_of": 1})
        assert (named.status_code, named.headers["inferd-ignored"]) == (200, "user")


def test_ignored_fields_are_logged_at_debug(daemon: RunningDaemon) -> None:
    with gateway(daemon, "--log-level", "DEBUG") as running:
        body = {**BODIES[CHAT], "colour": 1, "stream_options": {"shade": 2}}
        httpx.post(f"{running.url}{CHAT}", json=body, timeout=CALL_S_MAX)
        assert running.process.stderr is not None
        line = running.process.stderr.readline().decode()
    assert line == f"fields.ignored path={CHAT} fields=colour,stream_options.shade\n"


FULL: dict[str, tuple[dict[str, Any], set[str]]] = {
    CHAT: (
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}], "name": "n"},
                {"role": "user", "content": "hello", "name": "n"},
                {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": "r"},
                {"role": "tool", "content": "x", "tool_call_id": "c1"},
                {"role": "user", "content": "hello"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "response_format": {"type": "text", "json_schema": {"description": "d"}},
            "stream_options": {"include_usage": False, "include_obfuscation": False},
            "chat_template_kwargs": {},
            "logit_bias": {"5": 1},
        },
        {"role", "content", "type", "text", "name", "arguments", "function", "id", "tool_call_id"},
    ),
    RESPONSES: (
        {
            "input": [
                {"type": "message", "role": "user", "content": "hello", "status": "completed"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x", "id": "i"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "text", "name": "n", "description": "d", "strict": False}},
            "reasoning": {"effort": "low", "summary": "auto"},
        },
        {"role", "content", "call_id", "name", "arguments", "output", "type"},
    ),
    "/v1/messages": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "c", "name": "look", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": "x"},
                        {"type": "text", "text": "hello", "citations": []},
                    ],
                },
            ],
            "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": None},
        },
        {"role", "content", "type", "text", "id", "name", "tool_use_id"},
    ),
    "/api/chat": (
        {
            "messages": [
                {"role": "user", "content": "hello", "images": [], "thinking": ""},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": {}, "index": 0}}],
                },
                {"role": "tool", "content": "x", "tool_name": "look"},
                {"role": "user", "content": "hello"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "options": {"num_predict": 9, "temperature": 0.5, "stop": [], "colour": 1},
        },
        {"role", "name", "function"},
    ),
}
"""By path, a request with its optional fields within fields, and the names of required ones."""


def places(value: Any, required: set[str], at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of the optional fields in a value."""
    items: Any = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        items = value.items()
    for name, item in items:
        if isinstance(value, dict) and not (at and name in required):
            yield (*at, name)
        yield from places(item, required, (*at, name))


def replaced(value: Any, place: tuple[Any, ...]) -> Any:
    """Return a copy of a value with a null at a place."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = None
    return copy


@pytest.mark.parametrize("path", FULL)
def test_a_null_within_a_field_counts_as_absent(web: httpx.Client, path: str) -> None:
    fields, required = FULL[path]
    body = {**BODIES[path], **fields}
    assert web.post(path, json=body).status_code == 200, web.post(path, json=body).text
    found = [p for p in places(fields, required) if p not in {("messages",), ("input",)}]
    wrong = {}
    for place in found:
        reply = web.post(path, json=replaced(body, place))
        if reply.status_code != 200:
            wrong[place] = reply.text
    assert len(found) > 12 and not wrong


@pytest.mark.parametrize(
    ("path", "field", "used"),
    [
        (CHAT, {"max_tokens": 3.0}, ("usage", "completion_tokens")),
        (CHAT, {"max_completion_tokens": 3e0}, ("usage", "completion_tokens")),
        (CHAT, {"n_predict": 3.0}, ("usage", "completion_tokens")),
        (COMPLETIONS, {"max_tokens": 3.0}, ("usage", "completion_tokens")),
        (RESPONSES, {"max_output_tokens": 3.0}, ("usage", "output_tokens")),
        ("/v1/messages", {"max_tokens": 3.0}, ("usage", "output_tokens")),
        ("/api/chat", {"options": {"num_predict": 3.0}}, ("eval_count",)),
        ("/api/generate", {"options": {"num_predict": 3.0}}, ("eval_count",)),
    ],
)
def test_a_whole_number_may_be_a_float(
    web: httpx.Client, path: str, field: dict[str, Any], used: tuple[str, ...]
) -> None:
    found = web.post(path, json={**BODIES[path], **field}).json()
    for name in used:
        found = found[name]
    assert found == 3
    half = json.loads(json.dumps(field).replace("3.0", "3.5"))
    assert web.post(path, json={**BODIES[path], **half}).status_code == 400


@pytest.mark.parametrize("seed", [1 << 32, (1 << 63) - 1, (1 << 64) - 1, -5, 10**40, 7.0])
@pytest.mark.parametrize("path", GENERATING)
def test_a_seed_of_any_size_is_accepted(web: httpx.Client, path: str, seed: float) -> None:
    assert web.post(path, json={**BODIES[path], "seed": seed}).status_code == 200
    assert web.post(path, json={**BODIES[path], "seed": 0.5}).status_code == 400
