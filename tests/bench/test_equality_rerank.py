"""docs/compare-rerank.md: every score is that of llama-server."""

from __future__ import annotations

from bench.equality.rerank import MODELS, PAGE, QUERIES, SPECIAL, TOLERANCE, Scores, compared, page
from bench.equality.rerank import load as load_comparison

COMMITTED = load_comparison()


def test_every_request_has_the_scores_of_llama_server() -> None:
    assert [(row.model, row.query) for row in COMMITTED.rows] == [
        (model, query) for model in MODELS for query in QUERIES
    ]
    assert all(row.equal for row in COMMITTED.rows)


def test_only_names_of_special_tokens_and_fields_in_a_template_differ() -> None:
    assert len(COMMITTED.special) == len(MODELS) * len(SPECIAL)
    assert all(row.equal == (row.model == "bert-rank") for row in COMMITTED.special)


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(COMMITTED)


def test_a_difference_is_found() -> None:
    own = Scores({0: 0.5, 1: 0.4}, 20)
    assert compared("m", "q", own, own).equal
    for other in (
        Scores({0: 0.5, 1: 0.4}, 21),
        Scores({0: 0.5, 1: 0.4 + 3 * TOLERANCE}, 20),
        Scores({0: 0.4, 1: 0.5}, 20),
    ):
        assert not compared("m", "q", own, other).equal
