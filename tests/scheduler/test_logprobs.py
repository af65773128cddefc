"""Logprobs of sampled tokens, from the model to the client that requested them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.backends import LanguageModel, ModelSpec, SamplingParams
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.logprobs import describe_logprobs
from inferd.scheduler.owner import Owner
from tests.backends.driving import load_language_model
from tests.models import smollm2
from tests.scheduler.doubles import iterate_engine

REQUEST: dict[str, Any] = {"temp": 0.0, "n_probs": 3}


def reports_of(
    model: LanguageModel, text: bytes = b"Rome is the", count: int = 6, **fields: object
) -> list[m.Tokens]:
    """Return the reported logprobs of one turn."""
    engine = Engine(model)
    prompt = model.tokenize(text, special=False, bos=True)
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    spec = m.TaskSpec(
        id=1, owner=Owner(1), tokens=m.pack_tokens(prompt), sampling=params, n_predict=count
    )
    reports = iterate_engine(engine, [m.Submit(spec)])
    while not isinstance(reports[-1], m.Finished | m.Failed):
        reports += iterate_engine(engine, [])
    assert isinstance(reports[-1], m.Finished), reports[-1]
    return [report for report in reports if isinstance(report, m.Tokens)]


@pytest.fixture(scope="module")
def real() -> Iterator[LanguageModel]:
    spec = ModelSpec(name="smollm2", path=str(smollm2()), slots=1, ctx_size=128, threads=1)
    model = load_language_model(spec)
    yield model
    model.close()


def test_no_logprobs_are_reported_without_a_request() -> None:
    echo = load_language_model(ModelSpec(name="echo", backend="echo"))
    assert all(not report.logprobs for report in reports_of(echo))
    [one] = reports_of(echo, count=1, **REQUEST)[0].logprobs
    assert (one.token, one.value, len(one.top)) == (ord("R"), 0.0, 1)


@pytest.mark.model
def test_each_greedy_token_is_the_top_token_and_logprobs_descend(real: LanguageModel) -> None:
    reports = reports_of(real, **REQUEST)
    assert len(reports) == 6
    for report in reports:
        [one] = report.logprobs
        values = [other.value for other in one.top]
        assert [one.token] == report.tokens and one.token == one.top[0].token
        assert one.value == values[0] and len(values) == 3
        assert values == sorted(values, reverse=True) and values[0] <= 0
        assert sum(map(math.exp, values)) <= 1.0 + 1e-6
        assert one.piece == real.piece(one.token)


@pytest.mark.model
def test_probabilities_after_sampling_add_up_to_one(real: LanguageModel) -> None:
    reports = reports_of(real, temp=1.0, top_k=5, seed=3, n_probs=5, post_sampling_probs=True)
    for report in reports:
        [one] = report.logprobs
        assert sum(other.value for other in one.top) == pytest.approx(1.0, abs=1e-5)
        assert one.value in [other.value for other in one.top]


@pytest.mark.model
def test_a_grammar_changes_the_sampled_tokens_and_not_the_logprobs(real: LanguageModel) -> None:
    free, bound = (
        reports_of(real, **REQUEST),
        reports_of(real, **REQUEST, grammar='root ::= "zebra"'),
    )
    assert bound[0].logprobs[0].top == free[0].logprobs[0].top
    assert bound[0].logprobs[0].value < free[0].logprobs[0].value


def test_logprobs_have_the_form_of_llama_server() -> None:
    other = m.TokenLogprob(8, "é".encode()[:1], -3.5)
    one = m.TokenLogprob(7, b"a", -0.5, [m.TokenLogprob(7, b"a", -0.5), other])
    assert describe_logprobs([one], after_sampling=False) == [
        {
            "id": 7,
            "token": "a",
            "bytes": [97],
            "logprob": -0.5,
            "top_logprobs": [
                {"id": 7, "token": "a", "bytes": [97], "logprob": -0.5},
                {"id": 8, "token": "", "bytes": [195], "logprob": -3.5},
            ],
        }
    ]
    [after] = describe_logprobs([m.TokenLogprob(7, b"a", 1.0)], after_sampling=True)
    assert after == {"id": 7, "token": "a", "bytes": [97], "prob": 1.0, "top_probs": []}
