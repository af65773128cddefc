"""Tokens of GBNF grammars beside their own texts, as llama.cpp matches them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd.backends import SamplingParams
from inferd.backends.errors import InvalidArgument
from inferd.backends.grammars.compiler import GrammarCompiler
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.grammars.languages.llama_cpp import Reference
from tests.backends.walking import compiler_of, vocabulary
from tests.models import smollm2

pytestmark = pytest.mark.process  # the trial of grammars


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with vocabulary(smollm2()) as vocab:
        yield vocab


@pytest.fixture(scope="module")
def compiler(vocab: Vocab) -> Iterator[GrammarCompiler]:
    with compiler_of(vocab) as compiler:
        yield compiler


def number(vocab: Vocab, text: bytes) -> int:
    [token] = vocab.tokenize(text, special=True, bos=False)
    return token


def is_whole(piece: bytes) -> bool:
    """Return whether *piece* is whole characters; llama.cpp never allows other tokens or a NUL."""
    return piece.decode("utf-8", "ignore").encode() == piece and piece.strip(b"\0") != b""


def both(
    vocab: Vocab, compiler: GrammarCompiler, grammar: str, answer: list[int]
) -> tuple[bool, bool]:
    """Return whether llama.cpp and we allow *answer* as a whole."""
    reference = Reference(vocab, grammar)
    assert not reference.refused
    state, theirs, ours = compiler.compile(SamplingParams(grammar=grammar), owner=1), True, True
    for token in answer:
        theirs = theirs and reference.allowed([token]) == [token]
        ours = ours and state.allows(token)
        if theirs:
            reference.accept(token)
        if ours:
            state.accept(token)
    found = theirs and bool(reference.allowed(vocab.eog())), ours and state.complete
    reference.close()
    return found


TEXTS = ["a", "ax", "ay", "x", "ab", "aab", "aaab", "b", ""]


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" | {a} "x"',
        'root ::= {a} "x" | "a"',
        'root ::= "a" "y" | {a} "x"',
        'root ::= {a}* "ab"',
        "root ::= ({a} | [a-z])+",
        'root ::= item "b"\nitem ::= [a-c] | {a} "a" | {a}?',
        'root ::= "aab" | "a" {a} "ab"',
        'root ::= {a} [a-z]* | ""',
    ],
)
def test_a_token_by_its_number_keeps_its_text_as_an_alternative(
    vocab: Vocab, compiler: GrammarCompiler, grammar: str
) -> None:
    grammar = grammar.format(a=f"<[{number(vocab, b'a')}]>")
    for text in TEXTS:
        letters = [number(vocab, letter.encode()) for letter in text]
        theirs, ours = both(vocab, compiler, grammar, letters)
        assert theirs == ours, text


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= {a} "x" | "b"',
        'root ::= <|im_start|> [a-z]* <|im_end|>? | "a"',
        "root ::= <|im_start|> !<|im_end|>* <|im_end|>",
        "root ::= !{a}* {a}",
        'root ::= "b" {a} | "bc"',
    ],
)
def test_tokens_apart_from_their_texts_stay_tokens(
    vocab: Vocab, compiler: GrammarCompiler, grammar: str
) -> None:
    grammar = grammar.format(a=f"<[{number(vocab, b'a')}]>")
    state = compiler.compile(SamplingParams(grammar=grammar), owner=1)
    reference = Reference(vocab, grammar)
    tokens = [t for t in range(vocab.size) if is_whole(vocab.piece(t)) and t not in vocab.eog()]
    assert {t for t in tokens if state.allows(t)} == set(reference.allowed(tokens))
    reference.close()


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" | !{a} "x"',
        'root ::= !<|im_start|>* "b"',
        "root ::= <|im_start|> | !{a}",
        "root ::= !{a} | !<|im_start|> {a}",
        'root ::= x "c"\nx ::= [a-z]*\ny ::= "q"\nroot ::= x !{a}',
    ],
)
def test_a_negated_token_beside_texts_is_refused(
    vocab: Vocab, compiler: GrammarCompiler, grammar: str
) -> None:
    grammar = grammar.format(a=f"<[{number(vocab, b'a')}]>")
    with pytest.raises(InvalidArgument, match="where a text or another token may stand") as caught:
        compiler.compile(SamplingParams(grammar=grammar), owner=1)
    assert caught.value.hint
