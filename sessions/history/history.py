"""A conversation's history: token ids, chat messages with the same content, starts of turns."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ...backends import Rendering
from ...backends.base import PLAIN_RENDERING
from ...backends.errors import InvalidArgument
from ...scheduler.messages import pack_tokens, unpack_tokens
from ...scheduler.prefix import common_prefix
from ..admission.kept_bytes import TOKEN_BYTES, memory_bytes
from ..journal.entries import HistoryEntry, Replay, StoredSession, TurnPiece, decode_history, encode
from ..tool_calls.calls import NO_TOOLS, ToolUse
from ..tool_calls.messages import (
    answer_forms,
    answer_message,
    new_parser,
    opens_call,
    raw_answer,
    without_raw_answer,
)
from ..tool_calls.parser import ToolCallParser
from ..turn import Turn
from ..worker_client import ChatTokens, TextClient
from .reasoning import opens_reasoning

MARKS_MAX = 1000
"""Turns that can be rewound; older ones stay in the history."""
MARK_BYTES = 112
"""Memory of a `Mark` with its numbers."""
EXCERPT_CHARACTERS = 24


class Recomputed(NamedTuple):
    """Tokens of a history that the template renders anew, and the cause, as users read it."""

    tokens: int = 0
    why: str = ""


NOT_RECOMPUTED = Recomputed()


@dataclass(frozen=True, slots=True)
class Mark:
    """The start of a turn's input: the number of tokens and messages before it."""

    tokens: int
    messages: int


class History:
    """Used as a value: `after` returns a copy, which is changed and then replaces the old one.

    Token ids stay as they are: generated tokens are never tokenized again. `_rendered` is the chat
    template's text of the history, if ids and text agree. In a *loose* history they do not, because
    a context shift or a rewind has removed ids. The next messages then add the difference between
    the template's texts with and without them.
    """

    def __init__(self, system: str | None = None) -> None:
        self.prompt: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.messages_bytes = 0
        """The memory of `messages`. Added messages alone are counted, because all may be many."""
        self.marks: list[Mark] = []
        self.shifted = False
        """A context shift has dropped ids, so that no other session can share the KV state."""
        self.rendering = PLAIN_RENDERING
        """The template's last arguments other than the messages."""
        self.tool_use = NO_TOOLS
        """The tool calls that the answer to the prompt may have."""
        self.recomputed = NOT_RECOMPUTED
        """The part of the history that the last messages have made obsolete."""
        self._rendering_bytes = 0
        self._rendered: str | None = None
        self._loose = False
        self._open = False
        """No turn has computed the last input yet, so that more input belongs to the same turn."""
        if system:
            self._append_messages([{"role": "system", "content": system}])

    def copy(self) -> History:
        """Return an independent copy."""
        new = copy(self)
        new.prompt = list(self.prompt)
        new.marks, new.recomputed = list(self.marks), NOT_RECOMPUTED
        return new

    def entry(self, resumable: TurnPiece | None = None) -> HistoryEntry:
        """Return the stored form, with the output of the last turn on it, if it is *resumable*."""
        return HistoryEntry(
            tokens=pack_tokens(self.prompt),
            messages=self.messages,
            marks=[(mark.tokens, mark.messages) for mark in self.marks],
            rendered=self._rendered,
            loose=self._loose,
            open=self._open,
            shifted=self.shifted,
            rendering=self.rendering,
            tool_use=self.tool_use,
            resumable=resumable,
        )

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes."""
        texts = self.messages_bytes + memory_bytes(self._rendered) + self._rendering_bytes
        return texts + TOKEN_BYTES * len(self.prompt) + MARK_BYTES * len(self.marks)

    @classmethod
    def from_entry(cls, entry: HistoryEntry) -> History:
        """Return a stored history."""
        new = cls()
        new.prompt = unpack_tokens(entry.tokens)
        new._replace_messages(entry.messages)
        new.marks = [Mark(*mark) for mark in entry.marks]
        new._rendered, new._loose, new._open = entry.rendered, entry.loose, entry.open
        new.shifted, new.tool_use = entry.shifted, entry.tool_use
        new._set_rendering(entry.rendering)
        return new

    def after(self, turn: Turn | Replay | None) -> History:
        """Return the history with the output of *turn* that was sent to its reader."""
        new = self.copy()
        if turn is None or not turn.generates:
            return new
        new._open, new.prompt = False, turn.history()
        if self._rendered is not None:
            answer = turn.text.decode(errors="replace")
            new._append_messages([answer_message(answer, self.new_parser(turn.seed))])
            # The ids include text that a stop text cut from the answer.
            new._rendered = None if turn.stopped_by_text else self._rendered + answer
        for keep, discard in turn.shifts:
            new._shift(keep, discard)
        return new

    def new_parser(self, seed: int) -> ToolCallParser | None:
        """Return the parser of the answer's tool calls, if it may have some; *seed* is its turn's.
        An answer on the same history with the same seed has calls with the same ids.
        """
        prompt = self.prompt
        return new_parser(
            self.tool_use,
            self.rendering,
            self._rendered or "",
            lambda: b"%d %b" % (seed, pack_tokens(prompt)),
        )

    def _append_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        self.messages = [*self.messages, *messages]
        self.messages_bytes += memory_bytes(*messages)

    def _replace_messages(self, messages: list[dict[str, Any]]) -> None:
        self.messages, self.messages_bytes = messages, memory_bytes(*messages)

    def _set_rendering(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self._rendering_bytes = memory_bytes(rendering.tools, rendering.arguments)

    # Input.

    def replace_tokens(self, tokens: list[int]) -> None:
        """Replace the history by raw text."""
        self.marks, self.prompt, self._open = [Mark(0, 0)], tokens, True
        self._end_chat()

    def append_tokens(self, tokens: list[int]) -> None:
        """Append raw text, which ends a chat before it."""
        self._begin_turn()
        self.prompt = self.prompt + tokens
        self.marks = [Mark(mark.tokens, 0) for mark in self.marks]
        self._end_chat()

    async def add_messages(
        self,
        client: TextClient,
        messages: Sequence[dict[str, Any]],
        rendering: Rendering = PLAIN_RENDERING,
        tool_use: ToolUse = NO_TOOLS,
    ) -> None:
        """Add messages by the model's template; after raw text, begin a new history. The answer may
        have tool calls as *tool_use* says.

        If the template's text begins with the present text, only the rest is tokenized.
        """
        was_chat, messages = bool(self.messages), list(map(without_raw_answer, messages))
        previous, (before, answer) = await self._rendered_text(client), self._split_answer()
        forms = [form for last in self.messages[len(before) :] for form in answer_forms(last)]
        prompt = await client.chat_prompt(
            [*map(without_raw_answer, before), *map(without_raw_answer, forms[:1]), *messages],
            previous, answer, rendering, turn=True,
            answer_at=len(before), forms=list(map(without_raw_answer, forms[1:])),
        )  # fmt: skip
        self._begin_turn()
        if prompt.appended:
            self.prompt = self.prompt + prompt.tokens
        else:
            shared = common_prefix(self.prompt, prompt.tokens)
            if obsolete := len(self.prompt) - shared:
                other = rendering != self.rendering
                cause = _recompute_cause(
                    previous, prompt.text, was_chat=was_chat, other_arguments=other
                )
                self.recomputed = Recomputed(obsolete, cause)
            self.marks = [Mark(min(m.tokens, shared), m.messages) for m in self.marks]
            self.prompt = prompt.tokens
        if len(forms) > 1:
            self._replace_messages([*before, forms[prompt.form]])
        self._append_messages(messages)
        self._rendered, self._loose = prompt.text, False
        self._set_rendering(rendering)
        self.tool_use = tool_use

    @property
    def client_messages(self) -> list[dict[str, Any]]:
        """The chat as clients have it."""
        return list(map(without_raw_answer, self.messages))

    @property
    def opens_call(self) -> bool:
        """Whether the prompt ends with the mark before a call, where its answer begins."""
        return opens_call(self._rendered or "")

    @property
    def opens_reasoning(self) -> bool:
        """Whether the prompt ends inside a block of reasoning, where its answer begins."""
        return opens_reasoning(self._rendered or "")

    def _split_answer(self) -> tuple[list[dict[str, Any]], str]:
        """Return the messages before the chat's last answer, and the answer. Without an answer,
        return all messages and an empty text.
        """
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[:-1], raw_answer(self.messages[-1])
        return self.messages, ""

    async def retokenize(self, client: TextClient, text: bytes) -> None:
        """Retokenize the history for another vocabulary: the messages by its template, or else
        *text*. Earlier turns can no longer be rewound by their tokens.
        """
        before, answer = self._split_answer()
        if before:
            prompt = await self._render(client, before)
            rest = await client.tokenize(answer.encode(), special=True, bos=False)
            self.prompt = prompt.tokens + rest
            self._rendered, self._loose = prompt.text + answer, False
            self.marks = [Mark(0, mark.messages) for mark in self.marks]
        else:
            self.prompt, self.marks = await client.tokenize(text, special=True, bos=True), []
        self.shifted = False

    async def _rendered_text(self, client: TextClient) -> str:
        """Return the template's text of the history, or an empty text if all of the history must
        be tokenized again.
        """
        if not self._loose:
            return self._rendered or ""
        before, answer = self._split_answer()
        if not before:
            return ""
        return (await self._render(client, before)).text + answer

    async def _render(self, client: TextClient, messages: list[dict[str, Any]]) -> ChatTokens:
        shown = list(map(without_raw_answer, messages))
        return await client.chat_prompt(shown, rendering=self.rendering)

    def _begin_turn(self) -> None:
        if not self._open:
            self.marks.append(Mark(len(self.prompt), len(self.messages)))
            del self.marks[:-MARKS_MAX]
        self._open = True

    def _end_chat(self) -> None:
        self._replace_messages([])
        self._rendered, self._loose, self.tool_use = None, False, NO_TOOLS

    # Rewinding and shifting.

    def rewind_turns(self, turns: int) -> None:
        """Remove the last *turns* turns.

        :raises InvalidArgument: the history has fewer.
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
        """Keep the first *tokens* tokens, and the messages of the complete turns.

        :raises InvalidArgument: the history has fewer.
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
        self.prompt = self.prompt[:tokens]
        self._replace_messages(self.messages[:messages])
        self._open = False
        self._loosen()

    def _shift(self, keep: int, discard: int) -> None:
        """Move the marks as a context shift has moved the tokens. Turns that were dropped whole
        lose their messages too.
        """
        self.shifted = True
        end = keep + discard
        first = self.marks[0].messages if self.marks else len(self.messages)
        messages, marks = self.messages[:first], []
        for mark, after in pairwise([*self.marks, Mark(end + 1, len(self.messages))]):
            if mark.tokens < keep or after.tokens > end:
                tokens = mark.tokens - discard if mark.tokens >= end else min(mark.tokens, keep)
                marks.append(Mark(tokens, len(messages)))
                messages += self.messages[mark.messages : after.messages]
        self._replace_messages(messages)
        self.marks = marks
        self._loosen()

    def _loosen(self) -> None:
        self._rendered, self._loose = None, bool(self.prompt and self.messages)


def _recompute_cause(previous: str, text: str, *, was_chat: bool, other_arguments: bool) -> str:
    """Return why the template's *text* does not begin with the *previous* text, which is empty if
    ids and text disagree. With *was_chat* the history was a chat, with *other_arguments* it was
    rendered with other tools or arguments.
    """
    if not was_chat:
        return "a chat after raw text begins a new history"
    if not previous:
        return "the last answer was cut at a stop text: its tokens contain more than its text"
    if other_arguments:
        return "tools or chat-template-kwargs differ from those of the previous turn"
    at = common_prefix(previous, text)
    before, now = (repr(t[at : at + EXCERPT_CHARACTERS]) for t in (previous, text))
    return f"the chat template changes earlier text: {now} where the history has {before}"


def packed_history(stored: StoredSession) -> bytes:
    """Return the history of a session in the journal, with its last turn."""
    if not stored.pieces:
        return stored.past
    past = History.from_entry(decode_history(stored.past))
    return encode(past.entry(Replay(past.prompt, stored.pieces).whole))
