"""A grammar that a trigger starts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ..errors import InvalidArgument
from ..grammars.compiler import GrammarState
from ..incremental_regex import RegexMatcher, byte_size
from ..params import SamplingParams
from ..params.sampler_options import trigger_pattern
from .text.vocab import Vocab

__all__ = ("LazyGrammar",)


class LazyGrammar:
    """A grammar that has no effect on an answer until a trigger occurs.

    `grammar` is None before the trigger. From then on the answer follows it, from the beginning of
    the trigger's own text as in llama-server; or, if the grammar cannot begin with that text, after
    the token that completed the trigger.

    :raises InvalidArgument: a trigger is not in the vocabulary, or *answer* does not follow the
        grammar after a trigger.
    """

    def __init__(
        self, vocab: Vocab, begin: GrammarState, params: SamplingParams, answer: Sequence[int]
    ):
        self.grammar: GrammarState | None = None
        self._vocab, self._at_begin = vocab, begin
        self._tokens = {_known(vocab, v) for k, v in params.grammar_triggers if k == "token"}
        self._matchers = [
            RegexMatcher(trigger_pattern(kind, str(value)))
            for kind, value in params.grammar_triggers
            if kind != "token"
        ]
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._decoded = 0
        self._generated: list[tuple[int, int]] = []
        """Tokens so far, each with the byte of the answer where it begins."""
        self._size = 0
        for index, token in enumerate(answer):
            self.add_token(token)
            if self.grammar is not None:
                self.grammar.replay(answer[index + 1 :])
                break

    def add_token(self, token: int) -> None:
        """Add a token generated before any trigger; start the grammar if it completes a trigger."""
        piece = self._vocab.piece(token)
        self._generated.append((token, self._size))
        self._size += len(piece)
        text, at = self._decoder.decode(piece), self._decoded
        self._decoded += byte_size(text)
        found = [
            met for matcher in self._matchers if (met := matcher.match_text(text, at)) is not None
        ]
        if token in self._tokens:
            self._start([token])
        elif found:
            begin, _ = min(found, key=lambda met: (met[1], met[0]))
            self._start(self._since(begin))

    def _since(self, begin: int) -> list[int]:
        """Return tokens that spell the answer from the byte *begin* on; none if that fails."""
        whole = [token for token, at in self._generated if at >= begin]
        cut = [(token, at) for token, at in self._generated if at < begin]
        if not cut:
            return whole
        token, at = cut[-1]
        rest = self._vocab.piece(token)[begin - at :]
        head = self._vocab.spelled(rest)
        return [*head, *whole] if head or not rest else []

    def _start(self, tokens: Sequence[int]) -> None:
        """Start the grammar with the trigger's *tokens*. If it cannot begin with them, start it
        with their texts, because it cannot spell control tokens; or else after them.
        """
        for trigger in (tokens, self._as_text(tokens), ()):
            self.grammar = self._at_begin.copy()
            try:
                self.grammar.replay(trigger)
                break
            except InvalidArgument:  # the grammar does not begin with it
                continue
        self._generated.clear()

    def _as_text(self, tokens: Sequence[int]) -> list[int]:
        vocab = self._vocab
        texts = [vocab.spelled(vocab.piece(t)) if vocab.is_control(t) else [t] for t in tokens]
        return [token for text in texts for token in text]


def _known(vocab: Vocab, token: int | str) -> int:
    if not isinstance(token, int) or not 0 <= token < vocab.size:
        raise InvalidArgument(
            f"grammar-triggers: token {token} is not in the vocabulary of {vocab.size}",
            hint="`tokenize` returns the tokens of a text; a word can be given instead",
        )
    return token
