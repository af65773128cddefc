"""The state of a grammar after the tokens of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument, TooLarge
from .native import Matcher

__all__ = ("GrammarState",)


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
