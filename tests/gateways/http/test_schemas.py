"""Schemas of answers in the forms of all APIs, on the echo model, which checks their grammars."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

HELLO = [{"role": "user", "content": "hello"}]
NAME = "a, \u00e9\nb"
UNIQUE = {"type": "array", "uniqueItems": True}
UNKEPT = {"type": "object", "properties": {NAME: UNIQUE}}
PATH = "#/properties/a, \u00e9\nb/uniqueItems"
IN_HEADER = "#/properties/a, %C3%A9%0Ab/uniqueItems"


def form(schema: Any, strict: bool | None) -> dict[str, Any]:
    return {"name": "x", "schema": schema, **({} if strict is None else {"strict": strict})}


def chat(schema: Any, strict: bool | None) -> dict[str, Any]:
    kind = {"type": "json_schema", "json_schema": form(schema, strict)}
    return {"model": "echo", "messages": HELLO, "response_format": kind}


def response(schema: Any, strict: bool | None) -> dict[str, Any]:
    kind = {"type": "json_schema", **form(schema, strict)}
    return {"model": "echo", "input": "hello", "store": False, "text": {"format": kind}}


def ollama(schema: Any, strict: bool | None) -> dict[str, Any]:
    return {"model": "echo", "messages": HELLO, "format": schema, "stream": False}


def anthropic(schema: Any, strict: bool | None) -> dict[str, Any]:
    config = {"format": {"type": "json_schema", "schema": schema}}
    return {"model": "echo", "messages": HELLO, "max_tokens": 20, "output_config": config}


def parameter(schema: Any, strict: bool | None) -> dict[str, Any]:
    return {"model": "echo", "prompt": "hello", "json_schema": schema, "schema_lenient": not strict}


DOORS: dict[str, tuple[str, Any, tuple[bool | None, ...]]] = {
    "chat": ("/v1/chat/completions", chat, (None, False, True)),
    "completion": ("/v1/completions", parameter, (False, True)),
    "response": ("/v1/responses", response, (None, False, True)),
    "message": ("/v1/messages", anthropic, (True,)),
    "Ollama": ("/api/chat", ollama, (False,)),
}
REQUESTS = [(name, strict) for name, (_, _, stricts) in DOORS.items() for strict in stricts]
LENIENT = [(name, strict) for name, strict in REQUESTS if not strict]
MALFORMED = [
    {"type": "int"},
    {"$ref": "#/$defs/none"},
    {"type": "string", "pattern": "("},
    {"type": "object", "required": "a"},
]


def send(
    web: httpx.Client, name: str, strict: bool | None, schema: Any, **more: Any
) -> httpx.Response:
    path, body, _ = DOORS[name]
    return web.post(path, json={**body(schema, strict), **more})


@pytest.mark.parametrize("schema", MALFORMED, ids=json.dumps)
@pytest.mark.parametrize(("name", "strict"), REQUESTS)
def test_an_error_in_a_schema_is_400_strict_or_not(
    web: httpx.Client, name: str, strict: bool | None, schema: Any
) -> None:
    for stream in (False, True):
        found = send(web, name, strict, schema, stream=stream)
        assert found.status_code == 400, found.text
        assert "json-schema: #/" in found.text or "json_schema: #/" in found.text


@pytest.mark.parametrize(("name", "strict"), REQUESTS)
def test_a_constraint_that_no_grammar_keeps_is_refused_or_reported(
    web: httpx.Client, name: str, strict: bool | None
) -> None:
    found = send(web, name, strict, UNKEPT)
    assert (found.status_code == 400) == bool(strict), found.text
    if strict:
        assert "uniqueItems" in found.text
        return
    assert "json-schema: " in found.headers["inferd-adjusted"]
    assert found.headers["inferd-adjusted"].endswith(IN_HEADER)
    assert reported(found.json())["json-schema"].endswith(PATH)


@pytest.mark.parametrize(("name", "strict"), LENIENT)
def test_the_end_of_a_stream_reports_it(web: httpx.Client, name: str, strict: bool | None) -> None:
    found = send(web, name, strict, UNKEPT, stream=True)
    lines = [line.removeprefix("data: ") for line in found.text.splitlines()]
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    [report] = filter(None, map(reported, objects))
    assert report["json-schema"].endswith(PATH)


@pytest.mark.parametrize(("name", "strict"), REQUESTS)
def test_nothing_is_reported_of_a_schema_that_is_kept(
    web: httpx.Client, name: str, strict: bool | None
) -> None:
    found = send(web, name, strict, {"type": "object", "properties": {"a": {"type": "integer"}}})
    assert found.status_code == 200
    assert "constraints" not in found.headers.get("inferd-adjusted", "")
    assert "constraints" not in reported(found.json()).get("json-schema", "")


def test_the_header_is_bounded(web: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"\u00e9" * 290 + str(n): UNIQUE for n in range(50)}}
    found = send(web, "chat", None, schema)
    assert found.status_code == 200
    assert 1000 <= len(found.headers["inferd-adjusted"]) <= 6000


def reported(value: dict[str, Any]) -> dict[str, str]:
    """Return the field with the parameters that were not applied, wherever an API has it."""
    places = [value, value.get("response") or {}, *value.get("choices", ())]
    return next((place["adjusted"] for place in places if "adjusted" in place), {})
