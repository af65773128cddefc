"""GBNF keeps its language: in lock step with llama.cpp, both allow the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from inferd.backends import SamplingParams
from inferd.backends.grammars.compiler import GrammarCompiler, GrammarState
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.grammars.languages.corpus import GRAMMARS
from tests.backends.grammars.languages.llama_cpp import Reference
from tests.backends.walking import compiler_of, vocabulary
from tests.models import smollm2
from tests.repetitions import FACTOR, repetitions

pytestmark = pytest.mark.process  # the trial of grammars

STEPS_MAX = 8
SHARE = 64 if FACTOR == 1 else 1
"""After the first step of a walk, `allows` is called for every 64th token, and for each token
on which llama.cpp and our mask differ."""
FULL_STEPS = 1
ALPHABET = "abcé\n"
STEPS_OF_GENERATED = 12


class Both:
    """Both matchers over one vocabulary."""

    def __init__(self, vocab: Vocab, compiler: GrammarCompiler):
        self.vocab, self.compiler = vocab, compiler
        self.ends = vocab.eog()
        self.texts = [t for t in range(vocab.size) if not vocab.is_control(t) and vocab.piece(t)[0]]
        """llama.cpp takes the names of control tokens for text, which answers do not show, and
        never allows a NUL."""
        alphabet = frozenset(ALPHABET.encode())
        self.few = [t for t in self.texts if alphabet.issuperset(vocab.piece(t))]

    def walk(self, grammar: str, tokens: Sequence[int], seed: int, steps: int) -> bool:
        """Walk through *grammar* at random; return whether llama.cpp accepts it at all."""
        reference = Reference(self.vocab, grammar)
        if reference.refused:
            return False
        try:
            state = self.compiler.compile(SamplingParams(grammar=grammar), owner=seed)
            self._compare(reference, state, tokens, random.Random(seed), steps)
        finally:
            reference.close()
        return True

    def _compare(
        self,
        reference: Reference,
        state: GrammarState,
        tokens: Sequence[int],
        source: random.Random,
        steps: int,
    ) -> None:
        text = b""
        for step in range(steps):
            possible = reference.allowed(tokens)
            tried, theirs = set(tokens), set(possible)
            if len(tokens) == len(self.texts):
                allowed = set(state.allowed().tolist())
                assert allowed or not theirs, text
                if step >= FULL_STEPS:
                    tried &= {*tokens[step % SHARE :: SHARE], *(theirs ^ allowed)}
                theirs &= tried
            ours = {token for token in tried if state.allows(token)}
            differ = {self.vocab.piece(t) for t in ours ^ theirs}
            assert theirs <= ours, (text, differ)
            # Of a letter that a token begins, llama.cpp refuses all if the class excludes one.
            assert not any(map(_is_whole, (text + piece for piece in differ))), (text, differ)
            assert state.complete == bool(reference.allowed(self.ends)), text
            if len(tokens) == len(self.texts):
                assert allowed & tried <= ours, text
                assert allowed or not ours, text
            if not possible:
                return
            token = source.choice(possible)
            reference.accept(token)
            state.accept(token)
            text += self.vocab.piece(token)


def _is_whole(text: bytes) -> bool:
    try:
        return bool(text.decode())
    except UnicodeDecodeError:
        return False


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with vocabulary(smollm2()) as vocab, compiler_of(vocab) as compiler:
        yield Both(vocab, compiler)


@pytest.mark.parametrize("name", GRAMMARS)
def test_both_allow_the_same_tokens_along_a_grammar_of_the_corpus(both: Both, name: str) -> None:
    assert both.walk(GRAMMARS[name], both.texts, seed=1, steps=STEPS_MAX), "a reference is needed"


def _literal(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


_TEXTS = st.text(ALPHABET, min_size=1, max_size=3)
_CLASSES = st.sampled_from(["[ab]", "[^a]", "[a-c]", "[^\\n]", "[é]", "[^é]", ".", "[\\u00e9b]"])
_SIGNS = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}", "{1,3}"])


def _sequences(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(items, min_size=1, max_size=3).map(" ".join)


def _choices(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(_sequences(items) | st.just('""'), min_size=1, max_size=3).map(" | ".join)


_LEAVES = _TEXTS.map(_literal) | _CLASSES
_GROUPS = st.lists(_sequences(_LEAVES), min_size=1, max_size=3).map(lambda s: f"({' | '.join(s)})")
# With a repetition of what may be empty, llama.cpp takes minutes.
_REPEATED = st.tuples(_LEAVES | _GROUPS, _SIGNS).map("".join)


def _bodies(*names: str) -> st.SearchStrategy[str]:
    """Return the bodies of rules that refer to *names*. None refers to itself: llama.cpp does not
    end on some rules that begin with themselves behind an empty text.
    """
    items = st.recursive(
        st.one_of(_LEAVES, _REPEATED, *map(st.just, names)),
        lambda items: _choices(items).map(lambda choice: f"({choice})"),
        max_leaves=5,
    )
    return _choices(items)


_GENERATED = st.tuples(_bodies("x", "y-1"), _bodies("y-1"), _bodies()).map(
    lambda bodies: "root ::= {}\nx ::= {}\ny-1 ::= {}\n".format(*bodies)
)


@settings(
    max_examples=repetitions(40),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(grammar=_GENERATED, seed=st.integers(0, 1000))
def test_both_allow_the_same_tokens_along_generated_grammars(
    both: Both, grammar: str, seed: int
) -> None:
    assume(both.walk(grammar, both.few, seed, STEPS_OF_GENERATED))
