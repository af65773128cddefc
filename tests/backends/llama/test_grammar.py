"""Answers follow their grammar, on a model with random weights, which would generate anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from inferd.backends import LanguageModel, ModelSpec, SamplingParams
from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner
from tests.backends.driving import prefill, sample_tokens
from tests.scheduler.doubles import iterate_engine
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

PROMPT = [1, *range(10, 40)]
YES = 'root ::= "yes" | "no"'
NUMBERS = 'root ::= "[" [0-9]+ ("," [0-9]+){3} "]"'
JSON = r"""
root   ::= object
object ::= "{" pair ("," pair){0,2} "}"
pair   ::= string ":" (string | "{" pair "}")
string ::= "\"" [a-z]{1,4} "\""
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=2, ctx_size=512, threads=1)
    model = load_llama(spec, lambda _: True)
    yield model
    model.close()


def answer(model: LanguageModel, grammar: str, **fields: object) -> str:
    """Return the text of one turn by the engine."""
    engine = Engine(model)
    params = SamplingParams(grammar=grammar, **fields)  # type: ignore[arg-type]
    spec = m.TaskSpec(
        id=1,
        owner=Owner(1),
        tokens=m.pack_tokens(PROMPT),
        sampling=params,
        n_predict=450,
        special=False,
    )
    reports = iterate_engine(engine, [m.Submit(spec)])
    while not isinstance(reports[-1], m.Finished | m.Failed):
        reports += iterate_engine(engine, [])
    end = reports[-1]
    assert isinstance(end, m.Finished), end
    assert end.stats.stop_reason == "eos", "the answer ends where the grammar ends"
    tokens = [r for r in reports if isinstance(r, m.Tokens)]
    return (b"".join(t.text for t in tokens) + end.text).decode()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temp", [0.0, 1.0, 5.0])
def test_answers_follow_their_grammar(model: LlamaModel, seed: int, temp: float) -> None:
    fields = {"seed": seed, "temp": temp, "top_k": 0, "min_p": 0.0, "top_p": 1.0}
    assert answer(model, YES, **fields) in ("yes", "no")
    value = json.loads(answer(model, JSON, **fields))
    assert isinstance(value, dict) and all(re.fullmatch("[a-z]{1,4}", key) for key in value)


def test_answers_follow_their_grammar_with_penalties_and_narrow_chains(model: LlamaModel) -> None:
    for fields in ({"top_k": 1}, {"min_p": 1.0}, {"repeat_penalty": 100.0}, {"mirostat": 2}):
        assert answer(model, YES, seed=1, temp=1.0, **fields) in ("yes", "no")


def test_an_answer_ends_where_all_allowed_tokens_are_suppressed(model: LlamaModel) -> None:
    tokens = model.tokenize(b"yn", special=False, bos=False)[-2:]
    biases = tuple((token, False) for token in tokens)
    assert answer(model, YES, temp=0.0, logit_bias=biases) == ""


def test_an_answer_continues_identically_in_another_sampler(model: LlamaModel) -> None:
    params = SamplingParams(grammar=JSON, seed=5, temp=2.0, top_k=0, min_p=0.0, top_p=1.0)

    def tokens_in_parts(parts: list[int]) -> list[int]:
        model.trim(0, 0)
        position, tokens = prefill(model, 0, PROMPT), list[int]()
        for part, count in enumerate(parts):
            if part:
                prefill(model, 0, tokens[-1:], position - 1)
            sampler = model.sampler(params, PROMPT, tokens)
            tokens += sample_tokens(model, 0, sampler, position, index=len(tokens), count=count)
            position += count
            sampler.close()
        return tokens

    whole = tokens_in_parts([12])
    assert tokens_in_parts([5, 7]) == tokens_in_parts([1, 1, 10]) == whole


def test_an_answer_outside_the_grammar_is_refused_without_an_abort(model: LlamaModel) -> None:
    tokens = model.tokenize(b"maybe", special=False, bos=False)
    with pytest.raises(InvalidArgument, match="does not follow"):
        model.sampler(SamplingParams(grammar=YES), PROMPT, tokens)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('root ::= "a" b', "Undefined rule identifier 'b'"),
        ('x ::= "a"', "'root' symbol"),
        ("root ::= (", "expecting '\\)'"),
        ("root ::= root", "no answer can satisfy it"),
        ("root ::= [a-", "unexpected end of input"),
        ('root ::= "a"{2,1}', "bounds run backwards"),
        ('root ::= "a"{2000000000}', "number of repetitions exceeds"),
        ("root ::= <no-such-token>", "not a token of the vocabulary"),
        ("root ::= <[999999]>", "not a token of the vocabulary"),
        ("\x01", "grammar: "),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_cause(
    model: LlamaModel, capfd: pytest.CaptureFixture[str], grammar: str, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        model.sampler(SamplingParams(grammar=grammar), ())
    assert "root" in caught.value.hint
    assert capfd.readouterr().err == "", "the client's text must not reach the log"
