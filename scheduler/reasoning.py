"""The reasoning of one answer, found by its marks as the tokens arrive, and its forced end.

An answer reasons from the begin of a block to its end. A begin anywhere in the answer counts, as in
llama.cpp (`common/reasoning-budget.cpp`), but not after the mark of a tool call, because arguments
may contain any text. Each thought has the whole budget. Once that is spent, or the end is
requested, the message and the end are added to the answer at the next whole character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from ..backends.answer_form import Block
from ..backends.errors import InvalidArgument
from .messages import ReasoningSpec
from .stopping import incomplete_utf8

CHARACTER_TOKENS_MAX = 8
"""A due end waits at most for this many tokens until a character is whole."""
_CHARACTER_BYTES_MAX = 4
_SHOWN_MAX = 100
Spell = Callable[[bytes, bool], Sequence[int]]
"""Returns tokens that make up a text within an answer, or none. If the flag is set, names of
special tokens in the text become these tokens.
"""


class EndOutcome(StrEnum):
    """The result of a request to end the reasoning of a turn."""

    ENDED = "ended"
    NOT_REASONING = "not_reasoning"
    GRAMMAR = "refused_by_grammar"
    """The answer's grammar does not allow the end here."""


class Reasoning:
    """The state after the tokens so far. Owned by the engine."""

    def __init__(self, spec: ReasoningSpec, spell: Spell):
        self._spec, self._spell = spec, spell
        self._blocks: dict[bytes, list[Block]] = {}
        """The blocks of reasoning by their begins, without white space around these."""
        for block in spec.blocks:
            self._blocks.setdefault(_bare(block.begin), []).append(block)
        self._calls = [_bare(mark) for mark in spec.calls]
        self._begins = [*filter(None, self._blocks), *self._calls]
        """The marks that count outside of a thought."""
        self._contents = [_bare(mark) for mark in spec.contents]
        marks = (*self._begins, *self._contents, *(_bare(block.end) for block in spec.blocks))
        self._overlap = max(map(len, marks), default=1) - 1
        self._tail = self._character = b""
        """The last bytes of the text, in which a mark or a character may be incomplete."""
        self._thought: list[Block] = self._blocks.get(b"", [])
        """The blocks that the present or last thought may be."""
        self.is_open = bool(self._thought)
        """Whether the answer so far ends within a thought."""
        self._end_tokens: dict[str, list[int]] = {}
        self._spent = self._waited = 0
        """Tokens of the present thought, and those since its end was due."""
        self._requested = self._refused = False
        self._answered = 0
        self.tokens = 0
        """Tokens of all thoughts, with those of their ends."""
        self.grammar_begin: int | None = None if spec.rests_grammar else 0
        """The number of the answer's tokens before its grammar begins; None: it still rests."""
        self.ending = deque[int]()
        """The tokens of a forced end that are still to be added."""
        self.ending_is_new = False
        """None of them was added yet."""
        self._find_marks(spec.opened.encode())

    def begin(self, pieces: Iterable[bytes], ending_left: int, *, end_requested: bool) -> None:
        """Continue after an answer of these *pieces*, whose forced end lacks *ending_left* tokens,
        or was requested and has not begun.

        :raises InvalidArgument: the vocabulary cannot spell an end that the budget may force.
        """
        if self._spec.budget >= 0:
            for blocks in self._blocks.values():
                self._tokens_of(blocks)
        for piece in pieces:
            self._read_token(piece)
        if ending_left:
            self.ending.extend(
                self._tokens_of(self._thought or [*self._spec.blocks])[-ending_left:]
            )
        elif not (end_requested and self.request_end()):
            self._plan_end()

    def add_token(self, piece: bytes) -> None:
        """Add the next token of the answer, with its text or its name."""
        if self.ending:
            self.ending.popleft()
            self.ending_is_new = False
            self._read_token(piece)
        else:
            self._read_token(piece)
            self._plan_end()

    def request_end(self) -> bool:
        """End the present thought at the next whole character. Return whether there is one.

        :raises InvalidArgument: the vocabulary cannot spell the end.
        """
        if self.is_open and not self.ending:
            self._tokens_of(self._thought)
            self._requested, self._refused = True, False
            self._plan_end()
        return self.is_open

    def cancel_end(self) -> None:
        """Leave the end of the present thought to the model; the answer's grammar refuses it."""
        self.ending.clear()
        self._requested, self._refused = False, True

    def _read_token(self, piece: bytes) -> None:
        self._answered += 1
        self._spent += 1
        self.tokens += self.is_open
        self._waited += self._is_due
        self._find_marks(piece)
        if self.grammar_begin is None and not (self.is_open or self.ending):
            self.grammar_begin = self._answered

    @property
    def _is_due(self) -> bool:
        spent = 0 <= self._spec.budget <= self._spent
        return self.is_open and not self._refused and (self._requested or spent)

    def _plan_end(self) -> None:
        """Plan the end of the present thought, if it is due."""
        whole = not incomplete_utf8(self._character) or self._waited >= CHARACTER_TOKENS_MAX
        if self._is_due and whole:
            self.ending.extend(self._tokens_of(self._thought))
            self.ending_is_new = True

    def _tokens_of(self, blocks: Sequence[Block]) -> list[int]:
        """Return the tokens of the message and of the end of the first of *blocks*. A grammar that
        has rested begins behind the mark, without white space.
        """
        end, message = blocks[0].end, self._spec.message
        end = end.rstrip() if self.grammar_begin is None else end
        if end not in self._end_tokens:
            if end.strip() in message:  # the answer would begin within the message
                raise InvalidArgument(
                    f"reasoning-budget-message: it contains {end.strip()!r}, which ends reasoning",
                    hint="leave the mark out; it is added behind the message",
                )
            tokens = self._spell_text(message, special=False)
            self._end_tokens[end] = tokens + self._spell_text(end, special=True)
        return self._end_tokens[end]

    def _spell_text(self, text: str, *, special: bool) -> list[int]:
        tokens = list(self._spell(text.encode(), special)) if text else []
        if text and not tokens:
            raise InvalidArgument(
                f"the model has no tokens for {text[:_SHOWN_MAX]!r}, with which reasoning ends",
                hint="use another reasoning-budget-message, or no reasoning-budget",
            )
        return tokens

    def _find_marks(self, text: bytes) -> None:
        """Find the marks that *text* completes."""
        self._character = (self._character + text)[-_CHARACTER_BYTES_MAX:]
        rest = self._tail + text
        while True:
            found = [(at, -len(m), m) for m in self._marks() if (at := rest.find(m)) >= 0]
            if not found:
                break
            at, _, mark = min(found)
            rest = rest[at + len(mark) :]
            if mark in self._begins and mark in self._calls:
                self._begins = []
            ends = self.is_open and mark in map(_bare, (block.end for block in self._thought))
            blocks = [] if ends or not self._begins else self._blocks.get(mark, [])
            self.is_open, self._thought = bool(blocks), blocks or self._thought
            self._spent = self._waited = 0
            self._requested = self._refused = False
        self._tail = rest[-self._overlap :] if self._overlap else b""

    def _marks(self) -> list[bytes]:
        """Return the marks that count at this place."""
        if not self.is_open:
            return self._begins
        ends = [_bare(block.end) for block in self._thought]
        others = any(block.anywhere for block in self._thought)
        return [*ends, *self._begins, *self._contents] if others else ends


def _bare(mark: str) -> bytes:
    return mark.strip().encode()
