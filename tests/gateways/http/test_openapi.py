"""The OpenAPI document, and random requests by it: those that follow it, and those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from inferd.gateways.http.fields import Use
from inferd.gateways.http.openapi import document
from inferd.gateways.http.server import APIS
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.repetitions import repetitions
from tests.slow_imports import loaded

CONFIG = echo_model("echo", tool_format="hermes")
TEXT = {"type": "string", "maxLength": 20}
PART = {"properties": {"type": {"const": "text"}, "text": TEXT}, "required": ["type", "text"]}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant"]},
        "content": {"anyOf": [TEXT, {"type": "array", "items": {"type": "object", **PART}}]},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
NARROW: dict[str, Any] = {
    "model": {"const": "echo"},
    "priority": {"enum": ["low", "normal"]},
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3},
    "tools": {"type": "array", "maxItems": 0},
    "chat_template_kwargs": {"type": "object", "maxProperties": 2},
    "options": {"type": "object", "properties": {"num_predict": {"type": "integer"}}},
}
"""Values that are more often valid than the document's, and so reach the model."""


def narrowed() -> dict[str, Any]:
    """Return the document with narrower schemas."""
    found = document(APIS)
    for schema in found["components"]["schemas"].values():
        properties = schema.get("properties", {})
        properties.update({name: NARROW[name] for name in NARROW if name in properties})
        if "model" in properties:
            schema["additionalProperties"] = False
    for path in found["paths"].values():
        for operation in path.values():
            for each in operation.get("parameters", []):
                each["schema"] = {"anyOf": [{"enum": ["echo", "a/b"]}, {"type": "string"}]}
    return found


DOCUMENT = narrowed()
OPERATIONS = [
    (path, method, mode)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    for mode in (("positive", "negative") if "requestBody" in operation else ("positive",))
]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.mount("http://", requests.adapters.HTTPAdapter())
        yield session


@pytest.fixture(scope="module")
def schema() -> Any:
    return schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def checks() -> Any:
    loaded("schemathesis")
    from schemathesis.specs.openapi import checks

    return [
        schemathesis.checks.not_a_server_error,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.status_code_conformance,
    ]


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_any_request_gets_its_answer_or_an_error_of_its_api(
    path: str,
    method: str,
    mode: str,
    http: RunningGateway,
    session: requests.Session,
    schema: Any,
    checks: Any,
) -> None:
    cases = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode))

    @given(case=cases)
    @settings(max_examples=repetitions(5), suppress_health_check=list(HealthCheck))
    def send(case: Any) -> None:
        reply = case.call(base_url=http.url, session=session, timeout=CALL_S_MAX)
        case.validate_response(reply, checks=checks)

    send()


def test_the_gateway_publishes_its_document(http: RunningGateway) -> None:
    published = httpx.get(f"{http.url}/openapi.json", timeout=CALL_S_MAX)
    assert published.json() == document(APIS)
    assert set(published.json()["paths"]) >= {"/v1/models/{model}", "/v1/messages", "/api/chat"}


@pytest.mark.parametrize(
    "table", [table for api in APIS for table in api.tables], ids=lambda t: t.path
)
def test_each_honoured_field_has_a_type(table: Any) -> None:
    own = {f.name for f in table.fields if f.use is Use.HONOURED and not f.option}
    names = {field.rstrip("_") for field in table.kind.__struct_fields__}
    assert own == names
