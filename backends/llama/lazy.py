"""A grammar that sleeps until a trigger is said: what wakes it, and where it then begins."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ..errors import InvalidArgument
from ..incremental_regex import Matcher, byte_size
from ..params import SamplingParams
from ..params.stop_options import trigger_pattern
from .grammar import Grammar
from .sampling.samplers import Prototypes
from .text.vocab import Vocab

__all__ = ("LazyGrammar",)


class LazyGrammar:
    """Hears one answer's tokens; `grammar` is what it follows from the trigger on, None before.

    The answer follows the grammar from the trigger's own text on, as in llama-server; where the
    grammar cannot begin with that text, behind it. A trigger that is a text or pattern wakes the
    grammar behind the token that completes it.

    llama.cpp has lazy grammars, too: it searches the whole answer with `std::regex` for each token,
    and ends the process over a trigger's text that the grammar does not take.

    :raises InvalidArgument: the grammar is none, a trigger is not in the vocabulary, or *answer*
        does not follow.
    """

    def __init__(
        self, vocab: Vocab, prototypes: Prototypes, params: SamplingParams, answer: Sequence[int]
    ):
        self.grammar: Grammar | None = None
        self._vocab, self._prototypes, self._params = vocab, prototypes, params
        self._grammar(()).close()  # refuses what is none
        self._wakers = {_known(vocab, v) for k, v in params.grammar_triggers if k == "token"}
        self._matchers = [
            Matcher(trigger_pattern(kind, str(value)))
            for kind, value in params.grammar_triggers
            if kind != "token"
        ]
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._decoded = 0
        self._said: list[tuple[int, int]] = []
        """Tokens so far, each with the byte of the answer where it begins."""
        self._size = 0
        for index, token in enumerate(answer):
            if self.hear(token):
                self._follow(answer[index + 1 :])
                break

    def hear(self, token: int) -> bool:
        """Take a token that was said while the grammar slept; tell whether it is awake now."""
        piece = self._vocab.piece(token)
        self._said.append((token, self._size))
        self._size += len(piece)
        text, at = self._decoder.decode(piece), self._decoded
        self._decoded += byte_size(text)
        found = [met for matcher in self._matchers if (met := matcher.feed(text, at)) is not None]
        if token in self._wakers:
            self._begin([token])
        elif found:
            begin, _ = min(found, key=lambda met: (met[1], met[0]))
            self._begin(self._since(begin))
        return self.grammar is not None

    def _since(self, begin: int) -> list[int]:
        """Return tokens that say the answer from the byte *begin* on; none where there are none."""
        whole = [token for token, at in self._said if at >= begin]
        cut = [(token, at) for token, at in self._said if at < begin]
        if not cut:
            return whole
        token, at = cut[-1]
        rest = self._vocab.piece(token)[begin - at :]
        head = self._vocab.spelled(rest)
        return [*head, *whole] if head or not rest else []

    def _begin(self, tokens: Sequence[int]) -> None:
        try:
            self.grammar = self._grammar(tokens)
        except InvalidArgument:  # it does not take the trigger
            self.grammar = self._grammar(())
        self._said.clear()

    def _follow(self, answer: Sequence[int]) -> None:
        assert self.grammar is not None
        for token in answer:
            if not self.grammar.allows(token):
                self.close()
                raise InvalidArgument("the answer so far does not follow the grammar")
            self.grammar.accept(token)

    def _grammar(self, answer: Sequence[int]) -> Grammar:
        return Grammar(self._vocab, self._prototypes, self._params, answer)

    def close(self) -> None:
        """Free the grammar; twice is once."""
        if self.grammar is not None:
            self.grammar.close()


def _known(vocab: Vocab, token: int | str) -> int:
    if not isinstance(token, int) or not 0 <= token < vocab.size:
        raise InvalidArgument(
            f"grammar-triggers: token {token} is not in the vocabulary of {vocab.size}",
            hint="`tokenize` tells the tokens of a text; a word can be given instead",
        )
    return token
