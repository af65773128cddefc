"""The compiled grammars of one vocabulary, and their states after the tokens of answers."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLParserLimits
from numpy.typing import NDArray

from ..errors import InvalidArgument, TooLarge
from ..params import GRAMMAR_FIELDS, SamplingParams
from .formats import VocabularyFacts, check_request
from .limits import CACHED_BYTES_MAX, CACHED_MAX, MATCHING_LIMITS, SMALLER_HINT
from .native import Matcher
from .trial import GrammarChecker

__all__ = (
    "GrammarCompiler",
    "GrammarState",
)


class GrammarState:
    """The tokens that may come next; used by one thread at a time.

    llguidance never raises. After an error, such as a limit that was met, all results of its
    matcher are wrong, so each call is followed by a check. *dropped* has the paths of those
    constraints of the schema that the grammar does not keep.
    """

    def __init__(
        self,
        matcher: Matcher,
        vocab_size: int,
        ends: Sequence[int],
        dropped: tuple[str, ...] = (),
    ):
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends
        self.dropped = dropped
        self._forced: deque[int] | None = None
        """The next tokens, as far as the grammar forces them; None: not computed yet."""

    def copy(self) -> GrammarState:
        """Return an equal state, which changes independently."""
        matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self._vocab_size, self._ends, self.dropped)

    def allows(self, token: int) -> bool:
        """Return whether *token* may come next.

        :raises TooLarge: a limit of the grammar was met.
        """
        if token in self._ends:  # a matcher where nothing can follow does not validate them
            return self.complete
        found = self._matcher.allows(token)
        self._check()
        return found

    def allowed(self) -> NDArray[np.intp]:
        """Return tokens that may come next, ascending.

        Where the grammar forces a text, these are the tokens of the tokenized text.

        :raises TooLarge: a limit of the grammar was met.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        bits = np.unpackbits(mask, count=self._vocab_size, bitorder="little")
        return np.flatnonzero(bits)

    @property
    def forced(self) -> int | None:
        """The next token, if the grammar leaves no choice; None if the model chooses.

        A forced text is tokenized, without those last tokens that the text behind them could still
        change. Where nothing can follow, the first end token is forced.

        :raises TooLarge: a limit of the grammar was met.
        """
        if self._forced is None:
            forced = deque(self._matcher.compute_ff_tokens())
            if not forced and self._matcher.is_stopped():
                forced.extend(self._ends[:1])
            self._check()
            self._forced = forced
        return self._forced[0] if self._forced else None

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        accepting = self._matcher.is_accepting()
        self._check()
        return accepting

    def accept(self, token: int) -> None:
        """Continue after *token*, which is allowed.

        :raises TooLarge: a limit of the grammar was met.
        """
        self._matcher.consume_token(token)
        self._check()
        # A long forced text is tokenized once, not again for each of its tokens.
        if not (self._forced and self._forced.popleft() == token and self._forced):
            self._forced = deque() if token in self._ends else None

    def replay(self, answer: Iterable[int]) -> None:
        """Continue after the tokens of *answer*.

        :raises InvalidArgument: *answer* does not follow the grammar.
        """
        for token in answer:
            if not self.allows(token):
                raise InvalidArgument("the answer so far does not follow the grammar")
            self.accept(token)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _failure_of(self._matcher)


def _failure_of(matcher: Matcher) -> TooLarge:
    """Return the error for a matcher that has failed on an answer, without the answer's text."""
    return TooLarge(
        f"the grammar became too large for its answer ({matcher.get_error()})",
        hint="use a smaller grammar or JSON schema: fewer alternatives, shorter texts",
    )


_Key = tuple[object, ...]
_KEY = tuple(name for name in GRAMMAR_FIELDS if name != "grammar_triggers")
"""The parameters that a compiled grammar depends on; the triggers only start it."""


class GrammarCompiler:
    """Compiles grammars, and keeps those used last. Its methods may be called in any thread.

    A grammar is kept for its owner alone, because the time that a turn takes must not reveal which
    grammars others used.
    """

    def __init__(self, vocabulary: VocabularyFacts, limits: LLParserLimits = MATCHING_LIMITS):
        self._vocabulary, self._limits = vocabulary, limits
        self._checker = GrammarChecker()
        self._kept: OrderedDict[_Key, tuple[GrammarState, int]] = OrderedDict()
        """States at the beginning, with the memory that they take."""
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams, owner: int) -> GrammarState:
        """Return the grammar of *params* at its beginning. The caller owns it.

        :raises InvalidArgument: *params* have no valid grammar, or a schema that is not supported.
        :raises TooLarge: the grammar is past a limit on its text, or on its compilation.
        :raises Timeout: the machine is too busy.
        """
        key = (owner, *(getattr(params, name) for name in _KEY))
        with self._lock:
            if key not in self._kept:
                self._keep(key, *self._compile(params))
            self._kept.move_to_end(key)
            return self._kept[key][0].copy()

    def _compile(self, params: SamplingParams) -> tuple[GrammarState, int]:
        vocabulary = self._vocabulary
        checked = self._checker.check(check_request(params, vocabulary))
        matcher = Matcher.compile(vocabulary.tokenizer(), checked.grammar, self._limits)
        if matcher.is_error():  # the trial compiled it with another vocabulary
            raise TooLarge(
                f"the grammar cannot be compiled for this vocabulary ({matcher.get_error()})",
                hint=SMALLER_HINT,
            )
        dropped = tuple(checked.dropped)
        state = GrammarState(matcher, vocabulary.size, vocabulary.ends(), dropped)
        return state, checked.memory_bytes

    def _keep(self, key: _Key, state: GrammarState, size: int) -> None:
        self._kept[key] = state, size
        while len(self._kept) > 1 and (
            len(self._kept) > CACHED_MAX
            or sum(size for _, size in self._kept.values()) > CACHED_BYTES_MAX
        ):
            self._kept.popitem(last=False)

    def close(self) -> None:
        """Free all grammars, and end the process that checks them."""
        with self._lock:
            self._kept.clear()
            self._checker.close()
