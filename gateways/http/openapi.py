"""The OpenAPI document of the gateway, from the endpoints and the tables of requests' fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...backends.params import BY_SPELLING
from ...backends.params.parameter_table import json_schema
from .exchange import Api, Endpoint, Exchange
from .fields import IN_QUERY, Field, FieldTable, Use

PATH = "/openapi.json"
Table = FieldTable[Any]
_COMPONENTS = "#/components/schemas/"


def openapi_endpoint(apis: Sequence[Api]) -> Endpoint:
    """Return the endpoint that publishes the document."""
    body = b""

    async def answer(exchange: Exchange) -> None:
        nonlocal body
        body = body or msgspec.json.encode(document(apis))
        await exchange.send_whole(body)

    return Endpoint(method="GET", path=PATH, answer=answer, public=True)


def document(apis: Sequence[Api]) -> dict[str, Any]:
    """Return the document. Of two endpoints with the same path and method, the one that requires a
    header is left out.
    """
    paths: dict[str, dict[str, Any]] = {}
    for api in reversed(apis):
        for endpoint in api.endpoints:
            path = re.sub(r":path(?=})", "", endpoint.path)
            operation = _operation(api, endpoint)
            paths.setdefault(path, {}).setdefault(endpoint.method.lower(), operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "inferd gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": _schemas(apis)},
    }


def _operation(api: Api, endpoint: Endpoint) -> dict[str, Any]:
    """Return the operation of an endpoint. Its answers are not described further."""
    error = {"application/json": {"schema": {"$ref": f"{_COMPONENTS}{api.title}Error"}}}
    operation: dict[str, Any] = {
        "tags": [api.title],
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error", "content": error},
        },
    }
    if names := re.findall(r"{(\w+)", endpoint.path):
        text = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in names
        ]
    for table in api.tables:
        if (table.path, table.method) != (endpoint.path, endpoint.method):
            continue
        if table.method in IN_QUERY:
            operation["parameters"] = [*operation.get("parameters", ()), *_query(table)]
        else:
            schema = {"$ref": _COMPONENTS + _name(api, table)}
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
    return operation


def _query(table: Table) -> list[dict[str, Any]]:
    """Return the parameters of a query that are not refused. Those without effect are texts."""
    fields = msgspec.json.schema(table.kind)["$defs"][table.kind.__name__]["properties"]
    return [
        {
            "name": field.name,
            "in": "query",
            "schema": fields.get(field.name, {"type": "string"}),
            "description": field.note,
        }
        for field in table.fields
        if field.use is not Use.REFUSED
    ]


def _name(api: Api, table: Table) -> str:
    """Return the name of a table's schema, such as `OpenAIChatCompletions`."""
    words = re.findall(r"[a-z]+", table.path.removeprefix("/v1").removeprefix("/api"))
    return api.title + "".join(word.capitalize() for word in words)


def _schemas(apis: Sequence[Api]) -> dict[str, Any]:
    bodies = {
        table: _name(api, table)
        for api in apis
        for table in api.tables
        if (table.path, table.method) in {(e.path, e.method) for e in api.endpoints}
        and table.method not in IN_QUERY
    }
    kinds = [table.kind for table in bodies]
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=_COMPONENTS + "{name}")
    own = {
        kind: ref["$ref"].removeprefix(_COMPONENTS) for kind, ref in zip(kinds, refs, strict=True)
    }
    parameters = json_schema()["properties"]
    found: dict[str, Any] = {}
    for table, name in bodies.items():
        found[name] = _request(table, schemas[own[table.kind]], parameters)
    found |= {f"{api.title}Error": api.error_schema for api in apis}
    return {name: schema for name, schema in schemas.items() if name not in own.values()} | found


def _request(table: Table, own: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a path's requests."""
    properties = dict(_properties(table.fields, own["properties"], parameters))
    return {
        "type": "object",
        "properties": properties,
        "required": own.get("required", []),
        "additionalProperties": not table.own_path or table.parameters,
    }


def _properties(
    fields: Sequence[Field], own: dict[str, Any], parameters: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for field in fields:
        if field.use is Use.REFUSED:
            schema: dict[str, Any] = {"enum": [None, *field.neutral]}
        elif field.option:
            found = BY_SPELLING.get(field.option.replace("_", "-"))
            schema = parameters[found.name] if found else {}
        else:
            schema = own.get(field.name, {})
        note = "; ".join(filter(None, (field.use, field.note)))
        yield field.name, {**schema, "description": note}
