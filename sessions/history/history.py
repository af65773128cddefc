"""A conversation's past: its token ids, the chat messages that say the same, where turns began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from ...backends import Rendering
from ...backends.base import PLAIN_RENDERING
from ...backends.errors import InvalidArgument
from ...scheduler.messages import pack_tokens, unpack_tokens
from ..journal.entries import HistoryEntry, Replay, StoredSession, TurnPiece, decode_history, encode
from ..worker_client import WorkerClient
from .reasoning import opens_reasoning
from .recomputing import NOTHING, Recomputed, why

MARKS_MAX = 1000
"""Turns that can be gone back; older ones stay in the history."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a turn's input began: so many tokens and messages stood before it."""

    tokens: int
    messages: int


class TurnOutput(Protocol):
    """What a turn has sent: a `Turn`, or a `Replay` of one."""

    @property
    def text(self) -> bytes | bytearray:
        """What it has said."""

    @property
    def shifts(self) -> Sequence[tuple[int, int]]:
        """Its context shifts, in order: tokens kept, then dropped."""

    @property
    def says(self) -> bool:
        """Tell whether it answers."""

    @property
    def stopped_by_text(self) -> bool:
        """Tell whether text was cut from the answer whose tokens are still there."""

    def history(self) -> list[int]:
        """Return the token ids of the prompt and of what was told, less what shifts dropped."""


class History:
    """A value: `after` returns a new one, which is changed and then put in the old one's place.

    Token ids stay as they are: nothing that was generated is ever tokenised again. `rendered` is
    the chat template's text of the history, where ids and text agree. In a *loose* history they no
    longer do, since ids were dropped (context shift) or cut off (rewind): the next messages are
    then added by what the template's text gains with them.
    """

    def __init__(self, system: str | None = None) -> None:
        self.prompt: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.marks: list[Mark] = []
        self.shifted = False
        """Ids were dropped by a context shift: the engine's state is this session's alone."""
        self.rendering = PLAIN_RENDERING
        """What the template was told beside the messages, the last time."""
        self.recomputed = NOTHING
        """What of the history before the last messages does not stand any more."""
        self._rendered: str | None = None
        self._loose = False
        self._open = False
        """Input was taken that no turn has computed yet: more of it belongs to the same turn."""
        if system:
            self.messages.append({"role": "system", "content": system})

    def copy(self) -> History:
        """Return the same history, to be changed on its own."""
        new = History()
        new.prompt, new.messages = list(self.prompt), list(self.messages)
        new.marks, new._rendered = list(self.marks), self._rendered
        new._loose, new._open = self._loose, self._open
        new.shifted, new.rendering = self.shifted, self.rendering
        return new

    def entry(self, told: TurnPiece | None = None) -> HistoryEntry:
        """Return what is written down of it, where a turn on it has *told* this without an end."""
        return HistoryEntry(
            tokens=pack_tokens(self.prompt),
            messages=self.messages,
            marks=[(mark.tokens, mark.messages) for mark in self.marks],
            rendered=self._rendered,
            loose=self._loose,
            open=self._open,
            shifted=self.shifted,
            rendering=self.rendering,
            told=told,
        )

    @classmethod
    def from_entry(cls, entry: HistoryEntry) -> History:
        """Return the history that was written down."""
        new = cls()
        new.prompt, new.messages = unpack_tokens(entry.tokens), list(entry.messages)
        new.marks = [Mark(*mark) for mark in entry.marks]
        new._rendered, new._loose, new._open = entry.rendered, entry.loose, entry.open
        new.shifted, new.rendering = entry.shifted, entry.rendering
        return new

    def after(self, turn: TurnOutput | None) -> History:
        """Return the history with what the reader of *turn* was told."""
        new = self.copy()
        if turn is None or not turn.says:
            return new
        new._open, new.prompt = False, turn.history()
        if self._rendered is not None:
            answer = turn.text.decode(errors="replace")
            new.messages.append({"role": "assistant", "content": answer})
            # The ids then hold what was cut from the answer: they say more.
            new._rendered = None if turn.stopped_by_text else self._rendered + answer
        for keep, discard in turn.shifts:
            new._shift(keep, discard)
        return new

    # Input.

    def replace(self, tokens: list[int]) -> None:
        """Begin anew with raw text."""
        self.marks, self.prompt, self._open = [Mark(0, 0)], tokens, True
        self._end_chat()

    def extend(self, tokens: list[int]) -> None:
        """Add raw text: the chat before it, if there was one, is over."""
        self._begin_turn()
        self.prompt = self.prompt + tokens
        self.marks = [Mark(mark.tokens, 0) for mark in self.marks]
        self._end_chat()

    async def add_messages(
        self,
        client: WorkerClient,
        messages: Sequence[dict[str, Any]],
        rendering: Rendering = PLAIN_RENDERING,
    ) -> None:
        """Add messages by the model's template; after raw text, begin anew.

        Where the template's text begins with what stands already, only the rest is tokenised.
        """
        everything, chatted = [*self.messages, *messages], bool(self.messages)
        said, answer = await self._said(client), self._answer()
        text, tokens, appended = await client.chat_prompt(
            everything, said, answer, rendering, turn=True
        )
        self._begin_turn()
        if appended:
            self.prompt = self.prompt + tokens
        else:
            shared = _shared(self.prompt, tokens)
            lost, other = len(self.prompt) - shared, rendering != self.rendering
            if lost:
                cause = why(said, text, chatted=chatted, told_otherwise=other)
                self.recomputed = Recomputed(lost, cause)
            self.marks = [Mark(min(m.tokens, shared), m.messages) for m in self.marks]
            self.prompt = tokens
        self.messages, self._rendered, self._loose = everything, text, False
        self.rendering = rendering

    @property
    def opens_reasoning(self) -> bool:
        """Tell whether the prompt ends inside a block of reasoning: its answer begins there."""
        return opens_reasoning(self._rendered or "")

    def _answer(self) -> str:
        """Return the chat's last answer; empty: it ends with something else."""
        last = self.messages[-1] if self.messages else {"role": ""}
        return str(last["content"]) if last["role"] == "assistant" else ""

    async def retokenize(self, client: WorkerClient, text: bytes) -> None:
        """Retokenize all for another vocabulary: the messages by its template, or else *text*.
        Earlier turns cannot be rewound by their tokens any more.
        """
        answer = ""
        before = self.messages
        if before and before[-1]["role"] == "assistant":
            before, answer = before[:-1], before[-1]["content"]
        if before:
            said, self.prompt, _ = await client.chat_prompt(before, rendering=self.rendering)
            self.prompt += await client.tokenize(answer.encode(), special=True, bos=False)
            self._rendered, self._loose = said + answer, False
            self.marks = [Mark(0, mark.messages) for mark in self.marks]
        else:
            self.prompt, self.marks = await client.tokenize(text, special=True, bos=True), []
        self.shifted = False

    async def _said(self, client: WorkerClient) -> str:
        """Return the template's text of what stands; empty: all is to be tokenised anew."""
        if not self._loose:
            return self._rendered or ""
        answer = ""
        before = self.messages
        if before[-1]["role"] == "assistant":
            before, answer = before[:-1], before[-1]["content"]
        if not before:
            return ""
        text, _, _ = await client.chat_prompt(before, rendering=self.rendering)
        return text + answer

    def _begin_turn(self) -> None:
        if not self._open:
            self.marks.append(Mark(len(self.prompt), len(self.messages)))
            del self.marks[:-MARKS_MAX]
        self._open = True

    def _end_chat(self) -> None:
        self.messages, self._rendered, self._loose = [], None, False

    # Going back, and dropping what is old.

    def rewind_turns(self, turns: int) -> None:
        """Go back to where the last but *turns* turn ended.

        :raises InvalidArgument: there are not so many.
        """
        if not 1 <= turns <= len(self.marks):
            raise InvalidArgument(
                f"{turns} turns back in a history of {len(self.marks)}",
                hint="go back at least one turn, at most to the first one that is remembered",
                data={"turns": len(self.marks)},
            )
        mark = self.marks[-turns]
        self._cut(mark.tokens, mark.messages)
        del self.marks[-turns:]

    def rewind_tokens(self, tokens: int) -> None:
        """Keep the first *tokens* tokens, and the messages of the turns that are whole.

        :raises InvalidArgument: there are not so many.
        """
        if not 0 <= tokens <= len(self.prompt):
            raise InvalidArgument(
                f"{tokens} tokens to keep of {len(self.prompt)}", data={"tokens": len(self.prompt)}
            )
        if tokens < len(self.prompt):
            whole = [mark.messages for mark in self.marks if mark.tokens <= tokens]
            self._cut(tokens, whole[-1] if whole else 0)
            self.marks = [mark for mark in self.marks if mark.tokens < tokens]

    def _cut(self, tokens: int, messages: int) -> None:
        self.prompt, self.messages = self.prompt[:tokens], self.messages[:messages]
        self._open = False
        self._loosen()

    def _shift(self, keep: int, discard: int) -> None:
        """Move the marks as a context shift has moved the tokens; turns that were dropped whole
        leave with their messages.
        """
        self.shifted = True
        end = keep + discard
        first = self.marks[0].messages if self.marks else len(self.messages)
        messages, marks = self.messages[:first], []
        for mark, after in pairwise([*self.marks, Mark(end + 1, len(self.messages))]):
            if mark.tokens < keep or after.tokens > end:
                place = mark.tokens - discard if mark.tokens >= end else min(mark.tokens, keep)
                marks.append(Mark(place, len(messages)))
                messages += self.messages[mark.messages : after.messages]
        self.messages, self.marks = messages, marks
        self._loosen()

    def _loosen(self) -> None:
        self._rendered, self._loose = None, bool(self.prompt and self.messages)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def packed_history(stored: StoredSession) -> bytes:
    """Return the past of a session in the journal, with what its last turn told."""
    if not stored.pieces:
        return stored.past
    past = History.from_entry(decode_history(stored.past))
    replay = Replay(past.prompt, stored.pieces)
    if replay.interrupted is not None:
        return encode(past.entry(replay.interrupted))
    return encode(past.after(replay).entry())
