"""The state of a conversation, which input replaces and a refused turn rolls back."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

from ..history.history import History
from ..history.retokenize import Vocabulary
from ..history.state import HistoryState
from ..journal.entries import TurnBegin
from ..table import SessionState
from ..turn import Turn


@dataclass
class LastTurn:
    """The last turn on a history; new input replaces this object."""

    turn: Turn | None = None
    begin: TurnBegin = field(default_factory=TurnBegin)
    piece: bytes = b""
    """The text of the token that `compute_single` returned last."""
    reader_left: bool = False
    """The turn was cancelled because its reader has disconnected."""
    output_cleared: bool = False
    """`fini_single` was called: the output was deleted, the history is unchanged."""
    ending_read: bool = False


@dataclass
class Conversation:
    """Copied as a whole; each part is a value or is replaced, except *history_state*."""

    state: SessionState = SessionState.EMPTY
    history_state: HistoryState = field(default_factory=HistoryState)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    last: LastTurn = field(default_factory=LastTurn)

    def copy(self) -> Conversation:
        """Return a copy that later changes do not affect."""
        return Conversation(**{name: copy(value) for name, value in vars(self).items()})

    def rolled_back(self, before: Conversation) -> Conversation:
        """Return the state *before*, with the text of a history retokenized since."""
        before.vocabulary = self.vocabulary.rolled_back(before.vocabulary)
        return before

    @property
    def prompt(self) -> list[int]:
        """The history up to the turn, in token ids."""
        return self.history_state.now.prompt

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat up to the turn; empty for raw text."""
        return self.history_state.now.messages

    @property
    def turns_back(self) -> int:
        """The number of turns that can be rewound."""
        return len(self.history_state.now.marks)

    @property
    def size(self) -> int:
        """The length of the history in tokens, also of a dormant session."""
        dormant_tokens = self.history_state.dormant_tokens
        return len(self.tokens()) if dormant_tokens is None else dormant_tokens

    def tokens(self) -> list[int]:
        """Return the prompt and the output tokens that were sent to the reader."""
        return self.prompt if self.last.turn is None else self.last.turn.history()

    def current_history(self) -> History:
        """Return a new history with the output of the last turn."""
        return self.history_state.now.after(self.last.turn)
