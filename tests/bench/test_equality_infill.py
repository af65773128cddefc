"""docs/compare-infill.md: every text between two others is that of llama-server."""

from __future__ import annotations

import msgspec

from bench.equality.infill import CASES, PAGE, TOKENS, Filled, Row, page
from bench.equality.infill import load as load_comparison

COMMITTED = load_comparison()


def test_every_answer_is_that_of_llama_server() -> None:
    assert [(row.case, row.suffix_first) for row in COMMITTED.rows] == [
        (case, suffix_first) for suffix_first in (False, True) for case in CASES
    ]
    assert all(row.equal for row in COMMITTED.rows)
    assert {len(answer.tokens) for row in COMMITTED.rows for answer in row.answers} == {TOKENS}


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(COMMITTED)


def test_a_difference_is_found() -> None:
    own = Filled("x", [5, 6], 20)
    assert Row("c", False, (own, own)).equal
    for change in ({"text": "y"}, {"tokens": [5, 7]}, {"input_tokens": 21}):
        other = msgspec.structs.replace(own, **change)
        assert not Row("c", False, (own, other)).equal
    nothing = Filled("", [], 20)
    assert not Row("c", False, (nothing, nothing)).equal
