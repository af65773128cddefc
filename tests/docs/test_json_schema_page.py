"""docs/json-schema.md lists the keywords and bounds of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.json_schema import (
    FORMATS,
    SCHEMA_BYTES_MAX,
    gbnf_of,
    keywords,
    merging,
    patterns,
    rules,
    writing,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "json-schema.md").read_text()
PARTS = dict(zip(["", "Kept", "Narrowed", "Refused"], PAGE.split("\n## "), strict=True))


def named(part: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", PARTS[part]))


def test_every_keyword_is_in_its_list() -> None:
    known = set(keywords._FORMS) - {"uniqueItems"}
    assert known <= named("Kept")
    assert set(keywords._REFUSED) | {"uniqueItems"} <= named("Refused")
    assert not set(keywords._REFUSED) & named("Kept")


@pytest.mark.parametrize("keyword", keywords._REFUSED)
def test_keywords_that_the_page_refuses_are_refused(keyword: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"#/{keyword}")):
        gbnf_of(json.dumps({keyword: {}}))


def test_formats_and_bounds_match_the_code() -> None:
    formats = PARTS["Kept"].split("Formats: ")[1].split(".\n")[0]
    assert re.findall(r"`([^`]+)`", formats) == list(FORMATS)
    bounds = re.findall(r"\d+", PARTS["Refused"].split("\n- ")[-1])
    assert list(map(int, bounds)) == [
        SCHEMA_BYTES_MAX,
        rules.DEPTH_MAX,
        writing.PROPERTIES_MAX,
        writing.ITEMS_MAX,
        patterns.LENGTH_MAX,
        patterns.PATTERN_CHARACTERS_MAX,
        merging.ALTERNATIVES_MAX,
        rules.RULES_MAX,
    ]


def test_the_example_is_accepted() -> None:
    example = json.loads(PAGE.split("```json\n")[1].split("```")[0])
    assert gbnf_of(json.dumps(example["json-schema"])).startswith("root ::= ")
