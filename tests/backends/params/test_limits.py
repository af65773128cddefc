"""Bounds on the work of reading parameters, each at its limit and one past it."""

from __future__ import annotations

import difflib
import json
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import InferdError, InvalidArgument, InvalidEncoding, TooLarge
from inferd.backends.params import (
    KEYS_MAX,
    Options,
    adjust_parameters,
    parse_json_options,
    read_options,
)
from inferd.backends.params.json_texts import (
    CONTAINERS_MAX,
    JSON_BYTES_MAX,
    JSON_ITEMS_MAX,
    SCHEMA_BYTES_MAX,
    decode_json,
    nests_deeper,
)
from inferd.backends.params.numbers_of_items import LIST_CHARACTERS_MAX
from inferd.backends.params.reading import (
    ERRORS_MAX,
    LIST_ITEMS_MAX,
    TEXT_CHARACTERS_MAX,
)


def misspelt(count: int) -> dict[str, Any]:
    return {f"temperatur{i}": 1 for i in range(count)}


def test_one_search_suggests_a_name_for_the_first_unknown_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches: list[str] = []

    def search(word: str, *arguments: Any, **keywords: Any) -> list[str]:
        searches.append(word)
        return ["temperature"]

    monkeypatch.setattr(difflib, "get_close_matches", search)
    with pytest.raises(InvalidArgument, match="did you mean 'temperature'") as caught:
        read_options({"top-q": 1, **misspelt(KEYS_MAX - 1)}, strict=True)
    assert searches == ["top-q"]
    assert len(caught.value.data["errors"]) == ERRORS_MAX


def test_reading_ends_at_the_bound_of_errors() -> None:
    wrong = {"temp"[:n].upper() + "temp"[n:]: "x" for n in range(4)}
    with pytest.raises(InvalidArgument) as caught:
        read_options(wrong | misspelt(ERRORS_MAX), strict=True)
    assert len(caught.value.data["errors"]) == ERRORS_MAX


@pytest.mark.parametrize("section", [None, "sampling"])
def test_an_object_and_its_sections_have_a_bounded_number_of_keys(section: str | None) -> None:
    def as_given(count: int) -> dict[str, Any]:
        return misspelt(count) if section is None else {section: misspelt(count)}

    assert len(read_options(as_given(KEYS_MAX)).ignored) == KEYS_MAX
    with pytest.raises(TooLarge) as caught:
        read_options(as_given(KEYS_MAX + 1))
    assert caught.value.data == {"keys_max": KEYS_MAX} and caught.value.hint


def test_a_long_key_is_reported_shortened() -> None:
    key = "k" * 100_000
    assert read_options({key: 1}).ignored == [key[:100]]
    with pytest.raises(InvalidArgument) as caught:
        read_options({key: 1, "temp": "x"}, strict=True)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "most", [["a" * (TEXT_CHARACTERS_MAX - 9_998), *["b"] * 9_998], ["a"] * LIST_ITEMS_MAX]
)
def test_a_list_of_texts_is_bounded_in_items_and_characters(most: list[str]) -> None:
    assert read_options({"stop": most}).values == {"stop": most}
    with pytest.raises(InvalidArgument, match=f"({LIST_ITEMS_MAX}|{TEXT_CHARACTERS_MAX}) at most"):
        read_options({"stop": [*most, "b"]})


def schema_of(size: int) -> str:
    return json.dumps({"const": "x" * (size - len('{"const": ""}'))})


def test_a_schema_is_bounded_in_bytes() -> None:
    assert read_options({"json-schema": schema_of(SCHEMA_BYTES_MAX)}).values
    with pytest.raises(TooLarge, match=f"json-schema: #/const: .* {SCHEMA_BYTES_MAX + 1} bytes"):
        read_options({"json-schema": schema_of(SCHEMA_BYTES_MAX + 1)})


LONG = "x" * 300_000
TOO_LARGE: dict[str, tuple[Any, str]] = {
    "a constant": ({"properties": {"a/b": {"const": LONG}}}, "#/properties/a~1b/const"),
    "a value of an enum": ({"items": {"enum": ["x", LONG]}}, "#/items/enum/1"),
    "a name": ({"properties": {LONG: {}}}, "#/properties"),
    "many short ones": ({"enum": [f"{n:09}" for n in range(9_000)]}, "#"),
    "a long path": ({"n" * 30_000: {"const": LONG}}, f"#/{'n' * 298}"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_the_error_of_a_too_large_schema_has_the_path_of_the_cause(name: str) -> None:
    schema, path = TOO_LARGE[name]
    forms = [
        {"json-schema": schema},
        {"json-schema": json.dumps(schema)},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ]
    for options in forms:
        with pytest.raises(TooLarge) as caught:
            read_options(options)
        assert caught.value.data["path"] == path and caught.value.hint
        assert caught.value.data["bytes"] > caught.value.data["bytes_max"] == SCHEMA_BYTES_MAX
        assert len(caught.value.message) < 500


@pytest.mark.parametrize("name", ["samplers", "tensor-split"])
def test_a_text_that_stands_for_a_list_is_short(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{LIST_CHARACTERS_MAX} at most"):
        read_options({name: "k" * (LIST_CHARACTERS_MAX + 1)})


def test_a_json_text_has_a_bounded_size_and_number_of_values() -> None:
    assert decode_json(b" " * (JSON_BYTES_MAX - 1) + b"1") == 1
    assert len(decode_json("[" + "1," * (JSON_ITEMS_MAX - 1) + "1]")) == JSON_ITEMS_MAX
    for text, unit in (
        (" " * JSON_BYTES_MAX + "1", "bytes"),
        ("[" + "1," * JSON_ITEMS_MAX + "1]", "commas"),
        ("[" * (JSON_ITEMS_MAX + 1), "commas"),
        ("{}" * (JSON_ITEMS_MAX + 1), "commas"),
    ):
        with pytest.raises(TooLarge, match=unit) as caught:
            decode_json(text)
        assert caught.value.data["count"] > caught.value.data["most"] and caught.value.hint


def test_a_too_large_json_text_of_options_keeps_its_error() -> None:
    assert parse_json_options(" " * JSON_BYTES_MAX) == Options()
    with pytest.raises(TooLarge):
        parse_json_options(" " * (JSON_BYTES_MAX + 1))
    with pytest.raises(TooLarge):
        read_options({"tools": "[" + "1," * JSON_ITEMS_MAX + "1]"})
    with pytest.raises(InvalidArgument, match=f"brackets; {CONTAINERS_MAX} at most"):
        read_options({"tools": "[" + "{}," * CONTAINERS_MAX + "{}]"})
    with pytest.raises(InvalidEncoding):
        parse_json_options("[" * 1000)


@pytest.mark.parametrize("depth", range(5))
def test_nesting_is_found_through_lists_and_maps(depth: int) -> None:
    value: Any = 1
    for level in range(depth):
        value = {"a": value, "b": 2} if level % 2 else [0, value, "x"]
    assert [nests_deeper(value, most) for most in range(5)] == [most < depth for most in range(5)]


def test_patterns_share_the_steps_of_one() -> None:
    repeats = [f"{i}(?:){{2900}}" for i in range(8)]
    adjust_parameters({"stop-patterns": repeats[:1]})
    with pytest.raises(InferdError, match="repeat too much"):
        adjust_parameters({"stop-patterns": repeats})


def test_nothing_that_a_client_legitimately_sends_is_near_the_bounds() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "search_files",
            "description": "Search files by a pattern, in a folder and below it.",
            "parameters": {
                "type": "object",
                "properties": {
                    name: {"type": "string", "description": f"The {name}, as a text."}
                    for name in ("pattern", "folder", "encoding", "sort_by")
                },
                "required": ["pattern"],
            },
        },
    }
    options = {"tools": [tool] * 128, "stop": ["\n\n"] * 100, "logit-bias": [[1, 1.0]] * 2500}
    values = read_options(msgspec.msgpack.decode(msgspec.msgpack.encode(options))).values
    assert parse_json_options(json.dumps(options)).values == values
