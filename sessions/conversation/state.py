"""A session's settings, its tensors, and its state, history and last turn as one value."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ...backends.errors import ErrorFields, PromptTooLong
from ...backends.tensors import NamedTensor, Tensor
from ...scheduler.messages import SharedKv
from ...scheduler.owner import Priority
from ..entries import TurnBegin, TurnEnd
from ..history.history import History
from ..history.state import HistoryState, HistoryVocabulary
from ..journal.journal import Shift
from ..memory import memory_bytes
from ..table import SessionState
from ..turn.options import Parameters, TurnParameters
from ..turn.turn import Turn


@dataclass
class SessionTensors:
    """The tensors that `set_input` has set and `get_output` returns. New text drops them, and
    neither the history nor the journal has them. Owned by its session.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    computation: asyncio.Event | None = None
    """Set at the end of the computation that is under way. Not made by anyio, whose events take as
    long as a short computation.
    """

    @property
    def kept_bytes(self) -> int:
        """The memory that they take."""
        return sum(
            len(tensor.data) + memory_bytes(tensor.dimensions)
            for tensor in (*self.inputs.values(), *self.outputs)
        )

    def set_input(self, index: int, tensor: Tensor) -> None:
        """Set the input of an index, and drop the outputs."""
        self.inputs[index], self.outputs = tensor, []

    def named_inputs(self) -> list[NamedTensor]:
        """Return the inputs by their indices as names."""
        return [(str(index), tensor) for index, tensor in sorted(self.inputs.items())]

    def clear(self) -> None:
        """Drop all tensors."""
        self.inputs, self.outputs = {}, []


TITLE_BYTES = 4
"""The most memory of a character."""
TURN_SPARE_BYTES = 16 << 10
"""Memory left for a turn's options and answer, where dropped messages would take it."""


@dataclass
class SessionSettings:
    """Settings that hold until a client changes them; a branch gets a copy.

    With *persist*, the history of a session with an id may be written to disk by `recording`, and
    its KV state by the worker.
    """

    parameters: Parameters
    priority: Priority = Priority.NORMAL
    persist: bool = True
    adapters: tuple[str, ...] = ()
    """The keys of the last turn's adapters, by which its KV state is found."""
    shared_kv: SharedKv | None = None
    """The KV state of another user's named state, if the session began with that."""
    lora: dict[str, float] = field(default_factory=dict)
    """The scales of the last turn's adapters by their names, as users see them."""
    on_behalf_of: str = ""
    """The owner's name, if a gateway opened the session."""
    key: str = ""
    """The gateway's key with which its connection was opened, by which usage is counted."""
    note: bytes = b""
    """Bytes that a client has stored with the session, and reads itself."""
    title: str = ""
    """The title that a client has set; empty: the beginning of the first message."""
    opening: str = ""
    """The beginning of the first message of a dormant session, whose history is packed."""
    kept: bool = False
    """Whether it is not deleted while it is dormant."""
    undo_s: float = 0.0
    """The time for which it can be restored after its deletion; 0: it is not deleted."""

    def copy(self) -> SessionSettings:
        """Return the same settings, for another session, without those of this one alone."""
        return replace(
            self,
            parameters=self.parameters.copy(),
            lora=dict(self.lora),
            note=b"",
            title="",
            opening="",
            kept=False,
        )


class Overlong(NamedTuple):
    """A prompt with more bytes than any context of the model holds. It was not tokenized, and has
    at least this number of *tokens*.
    """

    size: int
    tokens: int
    ctx_size: int
    """The tokens of the model's contexts."""

    def error(self, history_tokens: int, requested_ctx_size: int = 0) -> PromptTooLong:
        """Return the error of a turn on a history with this prompt."""
        tokens = history_tokens + self.tokens
        ctx_size = min(self.ctx_size, requested_ctx_size or self.ctx_size)
        return PromptTooLong(
            f"the prompt has {self.size} bytes, and with its history at least {tokens} tokens; the"
            f" context holds {ctx_size - 1} and one for the answer",
            data={"prompt_tokens": tokens, "ctx_size": ctx_size, "prompt_bytes": self.size},
        )


@dataclass
class LastTurn:
    """The last turn on a history; new input replaces this object."""

    turn: Turn | None = None
    begin: TurnBegin = field(default_factory=TurnBegin)
    piece: bytes = b""
    """The text of the token that `compute_single` returned last."""
    end: TurnEnd | None = None
    """The turn's end, kept if the session has an id. It is None before the end, and for an
    interrupted turn.
    """
    reader_left: bool = False
    """The turn was cancelled because its reader has disconnected."""
    output_cleared: bool = False
    """`fini_single` was called: the output was deleted, the history is unchanged."""
    ending_read: bool = False
    before: BeforeInput | None = None
    """The session before the turn's input, which is restored if the turn is refused."""
    overlong: Overlong | None = None
    """Input that is not in the history, because no context of the model holds it."""
    failure: ErrorFields | None = None
    """The error of the last call of wasi-nn for a turn, in the form of the protocol; None if there
    is none. It may have refused the turn.
    """

    @cached_property
    def options_bytes(self) -> int:
        return memory_bytes(self.begin.options)


@dataclass
class Conversation:
    """The state, history and last turn of a session. `copy` copies each part, whose own parts are
    values or are replaced, never changed.
    """

    state: SessionState = SessionState.EMPTY
    history_state: HistoryState = field(default_factory=HistoryState)
    vocabulary: HistoryVocabulary = field(default_factory=HistoryVocabulary)
    last: LastTurn = field(default_factory=LastTurn)

    def copy(self) -> Conversation:
        """Return a copy that later changes do not affect."""
        return Conversation(**{name: copy(value) for name, value in vars(self).items()})

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
        return len(self.history_state.now.marks)

    @property
    def size(self) -> int:
        """The length of the history in tokens, also of a dormant session."""
        dormant_tokens = self.history_state.dormant_tokens
        if dormant_tokens is not None:
            return dormant_tokens
        return len(self.prompt) if self.last.turn is None else self.last.turn.history_size

    @property
    def shifted(self) -> bool:
        """Whether a context shift has dropped tokens of the history."""
        turn = self.last.turn
        return self.history_state.now.shifted or (turn is not None and bool(turn.shifts))

    @property
    def kept_bytes(self) -> int:
        last = self.last
        total = self.history_state.kept_bytes + self.vocabulary.kept_bytes + len(last.piece)
        total += last.options_bytes + (0 if last.end is None else len(last.end.metadata))
        total += 0 if last.before is None else last.before.kept_bytes
        total += memory_bytes(last.failure)
        return total if last.turn is None else total + last.turn.kept_bytes

    def tokens(self) -> list[int]:
        """Return the prompt and the output tokens that were sent to the reader."""
        return self.prompt if self.last.turn is None else self.last.turn.history()

    def current_history(self) -> History:
        """Return a new history with the output of the last turn."""
        return self.history_state.now.after(self.last.turn)


class BeforeInput(NamedTuple):
    """The part of a session that the input and the start of a turn change."""

    conversation: Conversation
    shifts: tuple[Shift, ...]
    turn_parameters: TurnParameters
    adapters: tuple[str, ...]
    lora: dict[str, float]
    unused: Mapping[str, str]
    rested_at: float | None
    turns_begun: int

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes beside the present conversation, which has the messages too."""
        return self.conversation.kept_bytes - self.conversation.history_state.now.messages_bytes
