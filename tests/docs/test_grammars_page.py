"""docs/grammars.md has the formats, the examples and the limits of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends.grammars import limits
from inferd.backends.grammars.formats import NO_VOCABULARY, check_request
from inferd.backends.grammars.trial import GrammarChecker
from inferd.backends.params import FORMATS, read_options, sampling_params
from inferd.backends.params import structural_tags as tags
from inferd.backends.params.reading import TEXT_CHARACTERS_MAX

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "grammars.md").read_text()
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def test_the_page_lists_the_formats() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.M) == [
        "json-schema", "regex", "grammar", "lark", "structural-tag",
    ]  # fmt: skip
    assert set(FORMATS) == set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.M))


@pytest.mark.process
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text[:12])
def test_the_examples_are_accepted(checker: GrammarChecker, example: str) -> None:
    values = read_options(json.loads(example), strict=True).values
    checker.check(check_request(sampling_params(values, 0), NO_VOCABULARY))


def test_the_limits_are_those_of_the_code() -> None:
    cells = re.findall(r"\| ([0-9 and]+) \|$", PAGE.split("## Limits")[1], re.M)
    assert [int(number) for cell in cells for number in re.findall("[0-9]+", cell)] == [
        TEXT_CHARACTERS_MAX,
        limits.RULES_MAX,
        limits.LITERAL_BYTES_MAX,
        limits.REGEX_BYTES_MAX,
        tags.TAGS_BYTES_MAX,
        tags.TAGS_MAX,
        tags.TRIGGERS_MAX,
        tags.MARK_BYTES_MAX,
        limits.CPU_S_MAX,
        limits.MEMORY_BYTES_MAX >> 20,
        limits.MATCHING_LIMITS.max_items_in_row,
    ]
