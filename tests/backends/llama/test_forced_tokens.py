"""The tokens that a grammar forces, by the vocabularies of real models and of a tiny one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from inferd.backends import Sampler, SamplingParams
from inferd.backends.grammars.compiler import GrammarCompiler, GrammarState
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.driving import prefill
from tests.backends.tiny import tiny_spec
from tests.backends.walking import compiler_of, vocabulary
from tests.models import gemma3, smollm2
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

OBJECT = {
    "type": "object",
    "properties": {
        "delivery_address": {"type": "string"},
        "preferred_language": {"enum": ["English", "French"]},
        "has_accepted_the_terms": {"type": "boolean"},
    },
    "required": ["delivery_address", "preferred_language", "has_accepted_the_terms"],
    "additionalProperties": False,
}
ANSWER = (
    '{"delivery_address": "Main Street", "preferred_language": "French",'
    ' "has_accepted_the_terms": true}'
)
YES = 'root ::= "yes, certainly" | "yes, perhaps" | "no"'
PROMPT = [1, *range(10, 40)]


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> Iterator[tuple[Vocab, GrammarCompiler]]:
    with vocabulary(request.param()) as vocab, compiler_of(vocab) as compiler:
        yield vocab, compiler


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    model = load_llama(tiny_spec(path, slots=2, ctx_size=512), lambda _: True)
    yield model
    model.close()


def forced_text(vocab: Vocab, grammar: GrammarState) -> str:
    """Accept all tokens that are forced now; return their text."""
    text = b""
    while (token := grammar.forced) is not None and not vocab.is_eog(token):
        assert grammar.allows(token)
        grammar.accept(token)
        text += vocab.piece(token)
    return text.decode()


def accept_text(vocab: Vocab, grammar: GrammarState, text: str) -> None:
    for token in vocab.tokenize(text.encode(), special=False, bos=False):
        assert grammar.forced is None
        grammar.accept(token)


def test_names_are_forced_and_values_are_not(real: tuple[Vocab, GrammarCompiler]) -> None:
    vocab, compiler = real
    grammar = compiler.compile(SamplingParams(json_schema=json.dumps(OBJECT)), owner=1)
    text = forced_text(vocab, grammar)
    assert '{"delivery_address":'.startswith(text) and len(text) > 15
    accept_text(vocab, grammar, '{"delivery_address": "Main Street",'[len(text) :])
    assert forced_text(vocab, grammar).startswith(' "preferred_language"')


def test_the_forced_tokens_are_those_of_the_text(real: tuple[Vocab, GrammarCompiler]) -> None:
    """Along the tokens of an answer, the grammar forces no other ones."""
    vocab, compiler = real
    grammar = compiler.compile(SamplingParams(json_schema=json.dumps(OBJECT)), owner=1)
    forced = 0
    for token in vocab.tokenize(ANSWER.encode(), special=False, bos=False):
        assert grammar.forced in (None, token)
        forced += grammar.forced is not None
        grammar.accept(token)
    assert forced > 10
    assert grammar.complete and vocab.is_eog(grammar.forced or 0)


def test_the_forced_end_is_the_one_that_the_file_names(real: tuple[Vocab, GrammarCompiler]) -> None:
    vocab, compiler = real
    grammar = compiler.compile(SamplingParams(grammar='root ::= "x"'), owner=1)
    assert forced_text(vocab, grammar) == "x"
    assert grammar.forced is not None
    assert vocab.piece(grammar.forced).decode() == vocab.eos
    assert len(vocab.eog()) > 1, "the choice shows nothing"


def test_a_long_forced_text_is_tokenized_in_short_calls(
    real: tuple[Vocab, GrammarCompiler],
) -> None:
    vocab, compiler = real
    word = "all work and no play "
    grammar = compiler.compile(SamplingParams(grammar=f'root ::= "{word * 1400}"'), owner=1)
    text, seconds = b"", list[float]()
    while True:
        started = time.thread_time()
        token = grammar.forced
        seconds.append(time.thread_time() - started)
        if token is None or vocab.is_eog(token):
            break
        grammar.accept(token)
        text += vocab.piece(token)
    assert text.decode() == word * 1400
    assert max(seconds) < 0.05
    quarter = len(seconds) // 4
    assert sum(seconds[:quarter]) < 5 * sum(seconds[-quarter:]), "the rest is not tokenized again"


# Samplers, on a model whose tokens are bytes.


def sampler_of(model: LlamaModel, **fields: object) -> Sampler:
    return model.sampler(SamplingParams(**{"grammar": YES, **fields}), PROMPT)  # type: ignore[arg-type]


def take_all(sampler: Sampler) -> list[int]:
    taken = []
    while (token := sampler.take_forced()) is not None:
        taken.append(token)
    return taken


def text_of(model: LlamaModel, tokens: list[int]) -> str:
    return b"".join(map(model.piece, tokens)).decode()


def answer_of(model: LlamaModel, **fields: object) -> tuple[list[int], int]:
    """Return the answer up to its end, and how many of its tokens were forced."""
    model.trim(0, 0)
    position, sampler = prefill(model, 0, PROMPT), sampler_of(model, **fields)
    tokens, forced = list[int](), 0
    while not tokens or not model.is_eog(tokens[-1]):
        token = sampler.take_forced()
        forced += token is not None
        tokens.append(model.sample(0, sampler, len(tokens)) if token is None else token)
        position = prefill(model, 0, tokens[-1:], position)
    sampler.close()
    return tokens, forced


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "fields",
    [
        {"temp": 0.0},
        {"temp": 3.0},
        {"temp": 3.0, "repeat_penalty": 5.0},
        {"temp": 3.0, "dry_multiplier": 2.0, "dry_allowed_length": 1},
        {"temp": 3.0, "xtc_probability": 0.5},
        {"temp": 3.0, "top_k": 5},
    ],
)
def test_forced_tokens_change_neither_the_penalties_nor_the_random_numbers_of_others(
    model: LlamaModel, seed: int, fields: dict[str, float]
) -> None:
    grammar = 'root ::= ([a-e] "=abcde=" [a-e] "!"){6} ("." | "end")'
    both = [answer_of(model, grammar=grammar, seed=seed, jump_forward=j, **fields) for j in (1, 0)]
    assert both[0][0] == both[1][0]
    assert both[0][1] >= 6 * 8 and both[1][1] == 0


def test_a_sampler_forces_what_its_grammar_leaves_no_choice_in(model: LlamaModel) -> None:
    sampler = sampler_of(model)
    assert take_all(sampler) == []
    begun = model.tokenize(b"n", special=False, bos=False)[-1:]
    sampler = model.sampler(SamplingParams(grammar=YES), PROMPT, begun)
    assert text_of(model, take_all(sampler)[:1]) == "o"


@pytest.mark.parametrize(
    "fields",
    [
        {"jump_forward": False},
        {"n_probs": 1},
        {"mirostat": 1},
        {"mirostat": 2},
        {"samplers": ("adaptive-p",), "adaptive_target": 0.5},
    ],
)
def test_samplers_that_need_each_token_force_none(
    model: LlamaModel, fields: dict[str, object]
) -> None:
    assert take_all(sampler_of(model, grammar='root ::= "abc"', **fields)) == []
    assert len(take_all(sampler_of(model, grammar='root ::= "abc"'))) == 4


def test_a_suppressed_token_is_never_forced(model: LlamaModel) -> None:
    b, end = model.tokenize(b"b", special=False, bos=False)[-1], 2
    biased = sampler_of(model, grammar='root ::= "abc"', logit_bias=((b, False),))
    assert text_of(model, take_all(biased)) == "a"
    endless = sampler_of(model, grammar='root ::= "abc"', ignore_eos=True)
    assert text_of(model, take_all(endless)) == "abc"
    assert take_all(sampler_of(model, grammar='root ::= "abc"'))[-1] == end


def test_a_lazy_grammar_forces_nothing_before_its_trigger(model: LlamaModel) -> None:
    params = SamplingParams(
        grammar='root ::= "<call>" [a-z] "</call>"', grammar_triggers=(("word", "<call>"),)
    )
    spelled = [3 + byte for byte in b"I say <call>x"]
    for size in range(len(spelled) + 1):
        sampler = model.sampler(params, PROMPT, spelled[:size])
        forced = text_of(model, [t for t in take_all(sampler) if not model.is_eog(t)])
        assert forced == ("</call>" if size == len(spelled) else "")
