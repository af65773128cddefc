"""Walks through the grammar of a JSON schema, at random or along a text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferd.backends import SamplingParams
from inferd.backends.grammars.compiler import GrammarCompiler, GrammarState
from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.loading.opening import open_vocab
from inferd.backends.llama.text.matching import MatchingVocab
from inferd.backends.llama.text.vocab import Vocab

__all__ = ("Walker", "compiler_of", "vocabulary")

RANDOM_STEPS, STEPS_MAX = 40, 1500
TRIED = 100
"""Random tokens of the vocabulary that a step tries, in addition to those of one letter."""
CLOSERS = (b'"', b"}", b"]")
LETTERS = [bytes([byte]) for byte in range(32, 127)] + [b"\n"]


@contextmanager
def vocabulary(path: Path) -> Iterator[Vocab]:
    """Yield the vocabulary of a model's file; nothing else is loaded."""
    capture()
    with open_vocab(str(path)) as vocab:
        yield vocab


@contextmanager
def compiler_of(vocab: Vocab) -> Iterator[GrammarCompiler]:
    """Yield a compiler of grammars for *vocab*."""
    matching = MatchingVocab()
    compiler = GrammarCompiler(matching.attach(vocab))
    yield compiler
    compiler.close()
    matching.close()


class Walker:
    """Walks through grammars by the tokens of one vocabulary. Schemas mean what the standard says,
    unless the options of a call have another `schema_infer`.
    """

    def __init__(self, vocab: Vocab, compiler: GrammarCompiler):
        self._vocab, self._compiler = vocab, compiler
        self._ends = vocab.eog()
        pieces = {vocab.piece(token): token for token in reversed(range(vocab.size))}
        self._letters = {letter: pieces[letter] for letter in LETTERS}
        self._bytes = {piece[0]: token for piece, token in pieces.items() if len(piece) == 1}
        self._plain = [t for t in pieces.values() if self._is_text(t)]

    def _is_text(self, token: int) -> bool:
        """Return whether *token* is whole characters that an answer shows."""
        try:
            return bool(self._vocab.piece(token).decode()) and not self._vocab.is_control(token)
        except UnicodeDecodeError:
            return False

    def fits(self, schema: Any, text: str, **options: Any) -> bool:
        """Return whether the grammar of *schema* allows *text* as a whole. *options* are further
        parameters, as in `SamplingParams`.
        """
        grammar = self._grammar(schema, **options)
        for byte in text.encode():
            token = self._bytes[byte]
            if not grammar.allows(token):
                return False
            grammar.accept(token)
        return grammar.complete

    def walk(self, schema: Any, seed: int, **options: Any) -> str | None:
        """Return a random text that the grammar of *schema* allows; None if it did not end."""
        grammar, random_source, text = self._grammar(schema, **options), random.Random(seed), b""
        for step in range(STEPS_MAX):
            found = self._allowed(grammar, random_source)
            assert found, f"nothing can follow {text!r}"
            ends = not any(found) or (step > RANDOM_STEPS and b"" in found.values())
            token = self._chosen(found, random_source, hurried=step > RANDOM_STEPS)
            if ends or token in self._ends:
                return text.decode()
            grammar.accept(token)
            text += found[token]
        return None

    def _grammar(self, schema: Any, **options: Any) -> GrammarState:
        options = {"schema_infer": "none"} | options
        params = SamplingParams(json_schema=json.dumps(schema), **options)
        return self._compiler.compile(params, owner=1)

    def _allowed(self, grammar: GrammarState, random_source: random.Random) -> dict[int, bytes]:
        """Return some tokens that may come next, with their texts; an end token has none."""
        tried = {
            *random_source.sample(self._plain, min(TRIED, len(self._plain))),
            *self._letters.values(),
        }
        found = _kept(grammar, [*sorted(tried), *self._ends])
        found = found or _kept(grammar, range(self._vocab.size))  # a rare letter
        return {t: b"" if t in self._ends else self._vocab.piece(t) for t in found}

    def _chosen(
        self, found: dict[int, bytes], random_source: random.Random, *, hurried: bool
    ) -> int:
        closers = [t for t, piece in found.items() if piece in CLOSERS]
        quotes = [t for t in closers if found[t] == b'"']
        if closers and random_source.random() < (0.5 if hurried else 0.2):
            return random_source.choice(quotes or closers)
        tight = [t for t, piece in found.items() if piece.strip()]
        return random_source.choice(tight if hurried and tight else list(found))


def _kept(grammar: GrammarState, tokens: Sequence[int]) -> list[int]:
    """Return the *tokens* that *grammar* allows."""
    return [token for token in tokens if grammar.allows(token)]
