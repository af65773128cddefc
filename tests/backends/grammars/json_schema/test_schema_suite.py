"""The official test suite of JSON schemas (draft 2020-12), and schemas that programs use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.grammars.json_schema.schema_suite import groups_in, judge
from tests.backends.walking import Walker, compiler_of, vocabulary
from tests.repetitions import FACTOR
from tests.tiny_gguf import write_tiny
from tools.get_schemas import MISSING, store, suite
from tools.schema_coverage import measure, small_schemas

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Walker(vocab, compiler)


def folder_of(folder: Path | None) -> Path:
    assert folder is not None, MISSING
    return folder


@pytest.mark.parametrize("whitespace", ["spaced", "any"])
def test_the_suite_is_judged_rightly(walker: Walker, whitespace: str) -> None:
    """llguidance alone accepts 164 of the schemas, judges 567 instances rightly, and rejects 22
    valid ones.
    """

    def fits(schema: Any, text: str) -> bool:
        return walker.fits(schema, text, json_whitespace=whitespace)

    counts, wrong = judge(groups_in(folder_of(suite())), fits)
    assert counts["schemas"] == 368
    assert counts["invalid accepted"] == 0, wrong
    assert counts["accepted"] >= 230 and counts["right"] >= 793 and counts["valid rejected"] <= 30


@pytest.mark.timeout(300)
def test_schemas_that_programs_use_are_accepted() -> None:
    """llguidance alone accepts 199 of them. Of all, 243 are accepted, of a sixth 44, and with
    `schema-lenient` 72: on a busy machine, some large ones are not compiled in time.
    """
    texts = small_schemas(folder_of(store()))
    assert len(texts) == 443
    texts, strict, lenient = (texts[::6], 42, 70) if FACTOR == 1 else (texts, 235, 425)
    assert measure(texts, lenient=False).accepted >= strict
    assert measure(texts, lenient=True).accepted >= lenient
