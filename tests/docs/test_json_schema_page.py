"""docs/json-schema.md lists the keywords and limits of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.grammars import limits
from inferd.backends.grammars.checker import GrammarChecker
from inferd.backends.grammars.requests import CheckRequest
from inferd.backends.grammars.schema import LEVELS_MAX

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "json-schema.md").read_text()
PARTS = dict(zip(["", "Kept", "Narrowed", "Refused"], PAGE.split("\n## "), strict=True))
KEPT: dict[str, Any] = {
    "type": ["null", "integer"], "enum": [1, "a"], "const": [1], "$ref": "#/$defs/a",
    "allOf": [{"minimum": 1}, {"maximum": 2}], "anyOf": [{"type": "null"}, {"type": "integer"}],
    "oneOf": [{"type": "null"}, {"type": "integer"}],
    "minimum": 1, "maximum": 2, "exclusiveMinimum": 0, "exclusiveMaximum": 9, "multipleOf": 2,
    "minLength": 1, "maxLength": 2, "pattern": "^a", "format": "date",
    "items": {"type": "null"}, "prefixItems": [{"type": "null"}], "additionalItems": False,
    "minItems": 1, "maxItems": 2,
    "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False,
    "patternProperties": {"^a": {"type": "null"}}, "minProperties": 1, "maxProperties": 2,
}  # fmt: skip
"""The kept keywords with values."""


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def check_schema(checker: GrammarChecker, schema: object) -> None:
    checker.check(CheckRequest(schema=json.dumps(schema)))


def named(part: str) -> list[str]:
    """Return the keywords at the beginning of a part: in its table, or its first item."""
    table = "\n".join(line for line in PARTS[part].splitlines() if line.startswith("|"))
    first = PARTS[part].partition("- ")[2].partition("\n- ")[0]
    return re.findall(r"`([^`]+)`", table or first)


def test_the_page_lists_the_keywords_that_are_tested() -> None:
    assert named("Kept") == list(KEPT)


@pytest.mark.parametrize("keyword", KEPT)
def test_keywords_that_the_page_keeps_are_accepted(checker: GrammarChecker, keyword: str) -> None:
    check_schema(checker, {keyword: KEPT[keyword], "$defs": {"a": {"type": "null"}}})


@pytest.mark.parametrize("keyword", named("Refused"))
def test_keywords_that_the_page_refuses_are_refused(checker: GrammarChecker, keyword: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"#/{keyword}")):
        check_schema(checker, {keyword: {"type": "null"}})


def test_formats_and_limits_match_the_code(checker: GrammarChecker) -> None:
    formats = PARTS["Kept"].split("Formats: ")[1].split(".\n")[0]
    for name in re.findall(r"`([^`]+)`", formats):
        check_schema(checker, {"type": "string", "format": name})
    numbers = re.findall(r"\d+", PARTS["Refused"].split("\n- ")[-1])
    assert list(map(int, numbers)) == [
        limits.SCHEMA_BYTES_MAX,
        LEVELS_MAX,
        int(limits.CPU_S_MAX),
        limits.MEMORY_BYTES_MAX >> 20,
    ]


def test_the_example_is_accepted(checker: GrammarChecker) -> None:
    example = json.loads(PAGE.split("```json\n")[1].split("```")[0])
    check_schema(checker, example["json-schema"])
