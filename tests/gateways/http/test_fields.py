"""The tables of fields against the types of the official clients."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from inferd.backends.errors import InvalidArgument, UnsupportedOperation
from inferd.backends.params import BY_NAME, BY_SPELLING
from inferd.gateways.http.fields import OTHER_SERVERS, FieldTable, Use
from inferd.gateways.http.limits import UnknownFields
from inferd.gateways.http.server import APIS
from tests.slow_imports import loaded

TABLES = {table.path: table for api in APIS for table in api.tables}
BODIES = [table for api in APIS for table in api.tables if table.method == "POST"]
OPEN = [table for table in BODIES if not table.own_path]
TYPES = [
    (
        "/v1/chat/completions",
        "openai.types.chat.completion_create_params",
        "CompletionCreateParamsBase",
    ),
    ("/v1/completions", "openai.types.completion_create_params", "CompletionCreateParamsBase"),
    ("/v1/embeddings", "openai.types.embedding_create_params", "EmbeddingCreateParams"),
    ("/v1/responses", "openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    ("/v1/messages", "anthropic.types.message_create_params", "MessageCreateParamsBase"),
    ("/v1/messages", "anthropic.types.beta.message_create_params", "MessageCreateParamsBase"),
    ("/v1/messages/count_tokens", "anthropic.types", "MessageCountTokensParams"),
    (
        "/v1/messages/count_tokens",
        "anthropic.types.beta.message_count_tokens_params",
        "MessageCountTokensParams",
    ),
    ("/api/chat", "ollama._types", "ChatRequest"),
    ("/api/generate", "ollama._types", "GenerateRequest"),
    ("/api/embed", "ollama._types", "EmbedRequest"),
    ("/api/embeddings", "ollama._types", "EmbeddingsRequest"),
    ("/api/show", "ollama._types", "ShowRequest"),
    ("/api/chat and /api/generate: options", "ollama._types", "Options"),
]
HEADERS = {"betas"}
"""Fields of the clients that they send as headers."""


def names_of(kind: Any) -> set[str]:
    """Return the fields of a client's request: of a pydantic model, or of a typed dictionary."""
    return set(getattr(kind, "model_fields", None) or kind.__annotations__) - HEADERS


@pytest.mark.parametrize(("path", "module", "name"), TYPES)
def test_each_field_of_a_client_is_in_the_table_of_its_path(
    path: str, module: str, name: str
) -> None:
    loaded(module.partition(".")[0])
    names = names_of(pkgutil.resolve_name(f"{module}:{name}"))
    assert "model" in names or name == "Options"
    assert names <= {field.name for field in TABLES[path].fields}


def least(kind: inspect.Type) -> Any:
    """Return a valid value of a type, with as few fields as possible."""
    match kind:
        case inspect.Metadata(type=inner):
            return least(inner)
        case inspect.UnionType(types=types):
            return least(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.StructType(fields=fields):
            return {f.encode_name: least(f.type) for f in fields if f.required}
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.ListType(item_type=inner, min_length=length):
            return [least(inner)] * (length or 0)
        case inspect.IntType(ge=low):
            return low or 1
        case inspect.StrType(pattern=pattern):
            return "a" if pattern is None else "resp_" + "0" * 40
    return {inspect.BoolType: True, inspect.FloatType: 0.5}.get(type(kind), {})


def with_nulls(kind: inspect.Type) -> Iterator[Any]:
    """Yield values of a type, each with a null in one of its optional fields, at each depth."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from with_nulls(inner)
        case inspect.UnionType(types=types):
            for each in types:
                yield from with_nulls(each)
        case inspect.ListType(item_type=inner):
            yield from ([value] for value in with_nulls(inner))
        case inspect.DictType(value_type=inner) if not isinstance(inner, inspect.AnyType):
            yield {"1": None}
        case inspect.StructType(fields=fields):
            for field in fields:
                values = [*([] if field.required else [None]), *with_nulls(field.type)]
                yield from ({**least(kind), field.encode_name: value} for value in values)


def present(value: Any) -> Any:
    """Return a value without its nulls."""
    if isinstance(value, list):
        return [present(each) for each in value]
    if isinstance(value, dict):
        return {name: present(each) for name, each in value.items() if each is not None}
    return value


@pytest.mark.parametrize("table", BODIES, ids=lambda t: t.path)
def test_a_null_counts_as_absent_at_each_depth(table: FieldTable[Any]) -> None:
    kind = inspect.type_info(table.kind)
    bodies = list(with_nulls(kind))
    names = {each.name for each in (*table.fields, *table.others)} - set(least(kind))
    bodies += [{**least(kind), name: None} for name in names]
    wrong = [body for body in bodies if table.read(body) != table.read(present(body))]
    assert not wrong and (bodies or not table.fields)


def test_the_fuzz_of_nulls_reaches_the_inner_fields() -> None:
    chat = list(with_nulls(inspect.type_info(TABLES["/v1/chat/completions"].kind)))
    places: list[dict[str, Any]] = [
        {"stream_options": {"include_usage": None}},
        {"response_format": {"type": "json_object", "json_schema": {"description": None}}},
        {"top_logprobs": None},
    ]
    for place in places:
        assert any(place.items() <= body.items() for body in chat)
    responses = list(with_nulls(inspect.type_info(TABLES["/v1/responses"].kind)))
    assert any(body.get("text") == {"format": None} for body in responses)


def test_a_required_field_that_is_null_is_missing() -> None:
    table = TABLES["/v1/chat/completions"]
    with pytest.raises(InvalidArgument) as caught:
        table.read(b'{"model": null, "messages": [{}]}')
    assert caught.value.data["param"] == "model" and "missing" in caught.value.message


@pytest.mark.parametrize("table", BODIES, ids=lambda t: t.path)
def test_neutral_values_and_only_these_count_as_absent(table: FieldTable[Any]) -> None:
    least_body = least(inspect.type_info(table.kind))
    alone = table.read(dict(least_body))
    for field in {each.name: each for each in (*table.others, *table.fields)}.values():
        for value in field.neutral:
            assert table.read({**least_body, field.name: value}) == alone
        if field.use is Use.REFUSED:
            with pytest.raises(UnsupportedOperation) as caught:
                table.read({**least_body, field.name: {"a": [1]}})
            assert caught.value.data["param"] == field.name
        elif field.use is Use.IGNORED:
            assert table.read({**least_body, field.name: {"a": [1]}}).ignored == [field.name]


@pytest.mark.parametrize("table", OPEN, ids=lambda t: t.path)
def test_an_unknown_field_is_named_and_ignored_or_refused(table: FieldTable[Any]) -> None:
    body = {**least(inspect.type_info(table.kind)), "colour": "red", "nothing": None}
    read = table.read(body, place="x.")
    assert read.ignored == ["x.colour"] and "colour" not in read.options
    with pytest.raises(InvalidArgument, match="unknown field 'colour'") as caught:
        table.read(body, UnknownFields.REFUSE)
    assert caught.value.data["param"] == "colour"


@pytest.mark.parametrize(
    "table", [table for table in BODIES if table.own_path], ids=lambda t: t.path
)
def test_the_gateways_own_paths_refuse_unknown_fields(table: FieldTable[Any]) -> None:
    with pytest.raises(InvalidArgument, match="unknown field 'colour'"):
        table.read({**least(inspect.type_info(table.kind)), "colour": "red"})


@pytest.mark.parametrize(
    ("path", "typed", "suggested"),
    [
        ("/v1/chat/completions", "max_token", "max_tokens"),
        ("/v1/chat/completions", "temprature", "temperature"),
        ("/v1/chat/completions", "max_completion_token", "max_completion_tokens"),
        ("/v1/chat/completions", "repetition_penalt", "repeat_penalty"),
        ("/v1/responses", "max_tokenz", "max_output_tokens"),
        ("/v1/messages", "stop_sequence", "stop_sequences"),
        ("/v1/messages", "max_completion_token", "max_tokens"),
        ("/api/chat", "tool_choice", ""),
        ("/api/chat and /api/generate: options", "num_predic", "num_predict"),
    ],
)
def test_a_misspelled_field_has_a_suggestion(path: str, typed: str, suggested: str) -> None:
    table = TABLES[path]
    assert suggestion_for(table, least_body(table), typed) == suggested


def least_body(table: FieldTable[Any]) -> dict[str, Any]:
    body: dict[str, Any] = least(inspect.type_info(table.kind))
    return body


def suggestion_for(table: FieldTable[Any], body: dict[str, Any], typed: str) -> str:
    """Return the name that is suggested for an unknown field of *body*."""
    with pytest.raises(InvalidArgument) as caught:
        table.read({**body, typed: 1}, UnknownFields.REFUSE)
    _, _, question = caught.value.message.partition("; did you mean ")
    return question.strip("'?")


@pytest.mark.parametrize("table", OPEN, ids=lambda t: t.path)
def test_no_suggestion_names_another_apis_field(table: FieldTable[Any]) -> None:
    own = {field.name for field in table.fields if field.use is Use.HONOURED}
    own |= {name.replace("-", "_") for name in BY_NAME} if table.parameters else set()
    others = {field.name for each in BODIES for field in each.fields} | set(BY_SPELLING)
    body = least_body(table)
    suggested = {suggestion_for(table, body, f"{name}z") for name in others}
    assert suggested and suggested - {""} <= own


@pytest.mark.parametrize("table", BODIES, ids=lambda t: t.path)
def test_a_whole_number_may_be_a_float_in_each_field(table: FieldTable[Any]) -> None:
    kind = inspect.type_info(table.kind)
    assert isinstance(kind, inspect.StructType)
    for field in kind.fields:
        value = least(field.type)
        if type(value) is int:
            body = {**least(kind), field.encode_name: value}
            read = table.read({**body, field.encode_name: float(value)}).own
            assert read == table.read(body).own
            assert type(getattr(read, field.name)) is int
            if "FloatType" not in repr(field.type):
                with pytest.raises(InvalidArgument):
                    table.read({**body, field.encode_name: value + 0.5})


def test_fields_within_fields_that_are_unknown_are_named() -> None:
    body = {
        **{"model": "a", "messages": [{"role": "user", "content": "x", "cache": 1}]},
        "stream_options": {"include_usage": True, "chunks": 3},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"x": 1}, "y": 2}},
    }
    read = TABLES["/v1/chat/completions"].read(body)
    assert read.ignored == ["stream_options.chunks", "response_format.json_schema.y"]


@pytest.mark.parametrize("seed", [5 + (1 << 32), 5 - (1 << 40), 5 + (1 << 64), 10**40, 7.0, -1])
def test_a_seed_of_any_size_fits_into_a_frame(seed: float) -> None:
    table = TABLES["/v1/chat/completions"]
    found = table.read({"model": "a", "messages": [{}], "seed": seed}).options["seed"]
    assert type(found) is int and -(1 << 63) <= found < 1 << 63
    assert found % (1 << 32) == seed % (1 << 32)


def test_no_field_of_other_servers_has_a_second_entry() -> None:
    names = [field.name for field in OTHER_SERVERS]
    assert len(names) == len(set(names))


def test_the_refusal_of_each_field_is_shown_as_it_is() -> None:
    for api in APIS:
        for table in api.tables:
            for field in (*table.fields, *table.others):
                error = UnsupportedOperation(f"{field.name}: {field.note}")
                assert error.message_for_people == error.message
