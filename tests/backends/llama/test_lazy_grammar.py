"""A lazy grammar starts at its trigger, on a model with random weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.llama.sampling.chain import LlamaSampler
from inferd.backends.params import StoppingParams
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner
from tests.backends.driving import prefill
from tests.scheduler.doubles import iterate_engine
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

PROMPT = [1, *range(10, 40)]
CALL = 'root ::= "<call>" [a-z]{2} "</call>"'
REST = 'root ::= [a-z]{2} "!"'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=2, ctx_size=512, threads=1)
    model = load_llama(spec, lambda _: True)
    yield model
    model.close()


def tokens_of(model: LlamaModel, text: str) -> list[int]:
    """Return the tiny model's tokens: one for each byte."""
    tokens = [3 + byte for byte in text.encode()]
    assert b"".join(map(model.piece, tokens)) == text.encode()
    return tokens


def sampler_of(
    model: LlamaModel, grammar: str, triggers: Sequence[tuple[str, str | int]], answer: list[int]
) -> LlamaSampler:
    params = SamplingParams(temp=0, grammar=grammar, grammar_triggers=tuple(triggers))
    sampler = model.sampler(params, PROMPT, answer)
    assert isinstance(sampler, LlamaSampler)
    return sampler


def allowed(model: LlamaModel, sampler: LlamaSampler, text: str) -> bool:
    """Return whether *text* may follow."""
    assert sampler.grammar is not None
    for token in tokens_of(model, text):
        if not sampler.grammar.allows(token):
            return False
        sampler.grammar.accept(token)
    return True


@pytest.mark.parametrize(
    ("trigger", "answer"),
    [
        (("word", "<call>"), "I say <call>"),
        (("pattern", "<c[a-l]+>"), "I say <call>"),
        (("pattern-full", r"[^<]*<call>"), "I say <call>"),
    ],
)
def test_a_grammar_is_inactive_until_its_trigger_is_generated(
    model: LlamaModel, trigger: tuple[str, str], answer: str
) -> None:
    grammar = CALL if trigger[0] != "pattern-full" else REST
    sampler = sampler_of(model, grammar, [trigger], tokens_of(model, answer)[:-1])
    assert sampler.awaits_trigger and sampler.grammar is None and not sampler.complete
    sampler.try_trigger(tokens_of(model, answer)[-1])
    assert not sampler.awaits_trigger and not sampler.complete
    rest = "ab</call>" if grammar is CALL else "ab!"
    assert not allowed(model, sampler, "1")
    assert allowed(model, sampler, rest)
    assert sampler.complete
    sampler.close()


def test_a_grammar_that_cannot_begin_with_the_trigger_begins_after_it(model: LlamaModel) -> None:
    sampler = sampler_of(model, REST, [("word", "GO")], tokens_of(model, "now GO"))
    assert allowed(model, sampler, "ab!")
    sampler.close()


def test_a_schema_may_be_lazy_too_and_begins_after_the_trigger(model: LlamaModel) -> None:
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    params = SamplingParams(temp=0, json_schema=schema, grammar_triggers=(("pattern", "<c[al]+>"),))
    sampler = model.sampler(params, PROMPT, tokens_of(model, "I say {<call>"))
    assert isinstance(sampler, LlamaSampler)
    assert allowed(model, sampler, '{"a": 7}') and sampler.complete
    sampler.close()


def test_a_token_starts_a_grammar(model: LlamaModel) -> None:
    [token] = tokens_of(model, "Z")
    sampler = sampler_of(model, REST, [("token", token)], [*tokens_of(model, "abc"), token])
    assert allowed(model, sampler, "ab!")
    sampler.close()
    sampler = sampler_of(model, 'root ::= "Z" [0-9]', [("token", token)], [token])
    assert allowed(model, sampler, "7") and sampler.complete
    sampler.close()


def test_a_trigger_may_begin_within_a_token(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a, b] = tokens_of(model, "ab")
    real = model._vocab.piece
    monkeypatch.setattr(model._vocab, "piece", lambda t: b"x<ca" if t == a else real(t))
    answer = [b, a, *tokens_of(model, "ll>")]
    sampler = sampler_of(model, CALL, [("word", "<call>")], answer)
    assert allowed(model, sampler, "xy</call>")
    sampler.close()


def test_an_answer_continues_identically_in_another_sampler(model: LlamaModel) -> None:
    answer = tokens_of(model, "so <call>ab</c")
    sampler = sampler_of(model, CALL, [("word", "<call>")], answer)
    assert allowed(model, sampler, "all>") and sampler.complete
    sampler.close()
    with pytest.raises(InvalidArgument, match="does not follow"):
        sampler_of(model, CALL, [("word", "<call>")], tokens_of(model, "so <call>12"))


@pytest.mark.parametrize(
    ("grammar", "trigger", "says"),
    [
        ("root ::= (", ("word", "a"), "expecting"),
        (REST, ("token", 10_000_000), "not in the vocabulary"),
        (REST, ("pattern", "("), "pattern"),
    ],
)
def test_invalid_triggers_are_refused(
    model: LlamaModel, grammar: str, trigger: tuple[str, str | int], says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        sampler_of(model, grammar, [trigger], [])


def text_and_end(model: LlamaModel, params: SamplingParams, **stopping: object) -> tuple[str, str]:
    """Return the text of one turn by the engine, and why it ended."""
    engine = Engine(model)
    spec = m.TaskSpec(
        id=1,
        owner=Owner(1),
        tokens=m.pack_tokens(PROMPT),
        sampling=params,
        n_predict=200,
        stopping=StoppingParams(**stopping),  # type: ignore[arg-type]
    )
    reports = iterate_engine(engine, [m.Submit(spec)])
    while not isinstance(reports[-1], m.Finished | m.Failed):
        reports += iterate_engine(engine, [])
    end = reports[-1]
    assert isinstance(end, m.Finished), end
    text = b"".join(r.text for r in reports if isinstance(r, m.Tokens)) + end.text
    return text.decode(errors="replace"), end.stats.stop_reason


@pytest.mark.parametrize("seed", range(4))
def test_a_turn_follows_its_grammar_from_the_first_letter(model: LlamaModel, seed: int) -> None:
    params = SamplingParams(
        seed=seed,
        temp=2.0,
        top_k=0,
        min_p=0.0,
        top_p=1.0,
        grammar='root ::= [a-z] "=" [0-9] [0-9]',
        grammar_triggers=(("pattern", "[a-z]"),),
    )
    text, reason = text_and_end(model, params)
    assert reason == "eos", "the answer ends where the grammar ends"
    assert re.fullmatch("(?s)[^a-z]*[a-z]=[0-9]{2}", text), text


def test_a_turn_ends_as_soon_as_its_grammar_may_be_complete(model: LlamaModel) -> None:
    params = SamplingParams(seed=1, temp=1.0, grammar="root ::= [a-z]+")
    assert len(text_and_end(model, params, stop_grammar=True)[0]) == 1
    assert text_and_end(model, params, stop_grammar=True)[1] == "grammar"


def test_the_surprisal_of_a_token_is_its_negative_log_probability(model: LlamaModel) -> None:
    model.trim(0, 0)
    prefill(model, 0, PROMPT)
    surprisal = model.surprisal(0)
    logits = model.logits(0).astype("float64")
    expected = np.log(np.exp(logits).sum()) - logits
    for token in (0, 5, int(logits.argmax())):
        assert surprisal(token) == pytest.approx(expected[token], abs=1e-4)
    model.hold_logits(0)
    assert model.surprisal(0)(5) == pytest.approx(expected[5], abs=1e-4)
