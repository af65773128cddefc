"""docs/json-schema.md: each keyword of its table is treated as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.grammars.json_schema.keyword_table import KEYWORDS, SchemaKeyword
from inferd.backends.grammars.json_schema.rewriting import FORMATS
from inferd.backends.grammars.trial import CheckRequest, GrammarChecker
from tests.backends.walking import Walker, compiler_of, vocabulary
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "json-schema.md").read_text()
BY_NAME = {keyword.name: keyword for keyword in KEYWORDS}
ACCEPTED = [name for name, keyword in BY_NAME.items() if keyword.treatment != "refused"]
REFUSED = [name for name, keyword in BY_NAME.items() if keyword.refused is not None]


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Walker(vocab, compiler)


def check_schema(checker: GrammarChecker, schema: object) -> None:
    checker.check(CheckRequest(schema=json.dumps(schema), infer="none"))


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_grammar_keeps_the_keyword_as_the_table_says(walker: Walker, name: str) -> None:
    keyword = BY_NAME[name]
    allows = [
        value
        for value in _values(keyword)
        if walker.fits(keyword.example, json.dumps(value, ensure_ascii=False))
    ]
    assert allows == list(keyword.allowed) and keyword.allowed and keyword.unfit


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_answers_of_the_table_fit_and_do_not_fit_as_it_says(name: str) -> None:
    keyword = BY_NAME[name]
    kind = (
        jsonschema.Draft7Validator if "additionalItems" in name else jsonschema.Draft202012Validator
    )
    validator = kind(keyword.example, format_checker=kind.FORMAT_CHECKER)
    fitting = [value for value in _values(keyword) if validator.is_valid(value)]
    assert fitting == [*keyword.allowed, *keyword.lost]


def _values(keyword: SchemaKeyword) -> list[object]:
    return [*keyword.allowed, *keyword.lost, *keyword.unfit]


@pytest.mark.parametrize("name", REFUSED)
def test_the_keyword_is_refused_as_the_table_says(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidArgument, match="json-schema: #") as caught:
        check_schema(checker, BY_NAME[name].refused)
    assert caught.value.data == {"path": f"#/{name}"} and caught.value.hint


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_kept_or_refused_as_the_table_says(checker: GrammarChecker, name: str) -> None:
    schema = {"type": "string", "format": name}
    if FORMATS[name]:
        check_schema(checker, schema)
    else:
        with pytest.raises(InvalidArgument, match="#/format"):
            check_schema(checker, schema)
    listed = PAGE.split("Formats: ")[1].split(". ")[0]
    assert (f"`{name}`" in listed) is FORMATS[name]


def test_each_keyword_is_on_the_page_once() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", PAGE, re.MULTILINE)
    assert rows == [(keyword.name, keyword.treatment) for keyword in KEYWORDS]
    assert len(rows) == len(BY_NAME)


def test_the_example_is_accepted(checker: GrammarChecker) -> None:
    example = json.loads(PAGE.split("```json\n")[1].split("```")[0])
    check_schema(checker, example["json-schema"])
