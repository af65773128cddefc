"""docs/compare.md: every listed difference has its explanation, in figures."""

from __future__ import annotations

import pytest

from bench.equality import results
from bench.equality.bare import SHAPES, sizes_of
from bench.equality.corpus import MODELS, PROMPTS, SETS, digest, request_of
from bench.equality.evidence import Evidence, Noise, first_difference
from bench.equality.page import PAGE, page
from bench.equality.results import Comparison, Row
from inferd.backends.params import read_options

COMMITTED = results.load()
NOISE = Noise(most=0.5, median=0.1, prompts=50)


def test_every_difference_that_is_listed_has_its_explanation() -> None:
    assert COMMITTED.unexplained() == []


def test_the_figures_behind_an_explanation_are_complete() -> None:
    for row in COMMITTED.rows:
        assert row.same == (row.evidence is None)
        if row.evidence is not None:
            assert tuple(row.evidence.gaps) == SHAPES
            assert row.evidence.inferd != row.evidence.llama_server
            assert tuple(row.evidence.sampled) == (() if row.evidence.flips else SHAPES)


def test_every_prompt_was_sent_with_every_set_to_every_model() -> None:
    requests_digest = [(row.model, row.set, row.prompt) for row in COMMITTED.rows]
    assert requests_digest == [(m, s, n) for m in MODELS for s in SETS for n in range(len(PROMPTS))]
    assert len(PROMPTS) == 50
    assert COMMITTED.requests_digest == digest(), "the corpus has changed: run `make compare`"


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(COMMITTED)


@pytest.mark.parametrize("name", SETS)
def test_inferd_knows_every_parameter_that_is_sent_to_llama_server(name: str) -> None:
    assert read_options(request_of(name), strict=True).ignored == []


def comparison(row: Row) -> Comparison:
    return Comparison(requests_digest="", facts={}, noise={"m": NOISE}, rows=[row])


def different(gaps: dict[str, float] | None) -> Row:
    found = None if gaps is None else Evidence(at=3, inferd="a", llama_server="b", gaps=gaps)
    return Row(
        model="m", set="greedy", prompt=0, text="xa", end="length", tokens=4,
        llama_server="xb", llama_server_end="length", evidence=found,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gaps", "explained"),
    [
        ({"whole": 0.5, "ones": 2.0}, True),
        ({"whole": 0.501, "ones": 2.0}, False),
        ({"whole": -0.501, "ones": -2.0}, False),
        ({"whole": -3.0, "ones": 3.0}, True),
        (None, False),
    ],
)
def test_a_near_tie_is_closer_than_the_noise_or_flips(
    gaps: dict[str, float] | None, explained: bool
) -> None:
    found = comparison(different(gaps))
    assert found.explained(found.rows[0]) is explained
    assert found.unexplained() == ([] if explained else found.rows)


def test_a_chain_that_samples_another_token_in_another_shape_explains_a_difference() -> None:
    for sampled, explained in (
        ({"whole": "a", "ones": "b"}, True),
        ({"whole": "a", "ones": "c"}, False),
        ({"whole": "b", "ones": "b"}, False),
    ):
        found = Evidence(at=0, inferd="a", llama_server="b", gaps={"x": 9.0}, sampled=sampled)
        assert found.is_near_tie(NOISE) is explained


def test_the_first_difference_may_be_an_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 4]) == 2
    assert first_difference([], [1]) == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("prompt", "answer"), [(1, 0), (2, 3), (4, 0), (30, 5)])
def test_a_shape_divides_all_tokens_into_batches(shape: str, prompt: int, answer: int) -> None:
    sizes = sizes_of(shape, prompt, answer)
    assert sum(sizes) == prompt + answer and min(sizes) > 0
