"""A conversation's history: token ids, chat messages with the same content, starts of turns."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import msgspec

from ...backends import Rendering
from ...backends.base import PLAIN_RENDERING
from ...backends.errors import InvalidArgument, PromptTooLong
from ...backends.media import MarkedMedia, MediaItem, cut_point, item_size
from ...scheduler.messages import pack_tokens, unpack_tokens
from ...scheduler.prefix import common_prefix
from ..answers.calls import NO_TOOLS, ToolUse
from ..answers.messages import (
    answer_message,
    new_parser,
    raw_answer,
    without_raw_answer,
)
from ..answers.parser import AnswerParser, is_plain, opened_by
from ..entries import (
    NOTHING_DROPPED,
    DroppedPart,
    HistoryEntry,
    Mark,
    Replay,
    StoredSession,
    TurnPiece,
    decode_history,
    encode,
)
from ..memory import TOKEN_BYTES, memory_bytes
from ..worker_client import ChatTokens, TextClient
from .continuing import answer_beginning, check_place, split_final, tokens_within
from .media import (
    ITEM_BYTES,
    NO_ITEMS,
    KnownItems,
    Readings,
    contents_of,
    is_text,
    mark_messages,
    new_nonce,
    read_media,
)
from .overflow import (
    DROPPED_BYTES_MAX,
    UNLIMITED,
    ContextLimit,
    KeptMessages,
    TokenCut,
    TurnDrops,
    as_dropped,
    as_read,
    dropped_bytes,
    is_dropped,
    system_messages,
    turn_starts,
)

MARKS_MAX = 1000
"""Turns that can be rewound; older ones stay in the history."""
MARK_BYTES = 120
"""Memory of a `Mark` with its numbers."""
EXCERPT_CHARACTERS = 24
NOTHING_KEPT = 0
"""The number of tokens that have to stay in front of the part that a long text loses."""
_DROPPED_CAUSE = "old turns were dropped, because the context was full"
_MEDIA_CAUSE = "the model reads the images or sounds of the history in another way now"


class TurnOutput(Protocol):
    """The output of a turn on a history: of a `Turn`, or of a `Replay` of stored pieces."""

    @property
    def generates(self) -> bool:
        """Whether it is text, not an embedding."""

    @property
    def seed(self) -> int:
        """The seed at the turn's beginning."""

    @property
    def text(self) -> bytes | bytearray:
        """The text that was sent to the reader."""

    @property
    def shifts(self) -> Sequence[tuple[int, int]]:
        """The context shifts: tokens kept, then dropped."""

    @property
    def stopped_by_text(self) -> bool:
        """Whether the answer's text was cut, while its tokens are complete."""

    def history(self) -> list[int]:
        """Return the token ids of prompt and output, less those that shifts dropped."""


class Recomputed(NamedTuple):
    """Tokens of a history that the template renders anew, and the cause, as users read it."""

    tokens: int = 0
    why: str = ""


NOT_RECOMPUTED = Recomputed()


class FittingText(NamedTuple):
    """The text of a chat that fits its context."""

    prompt: ChatTokens
    end: int
    """The end of the dropped messages, or 0."""
    whole_tokens: int
    """The number of tokens of the whole chat, or the least number that it can have."""
    extended: list[int]
    """The tokens of the whole chat; empty if it does not extend the present history."""


class History:
    """Used as a value: `after` returns a copy, which is changed and then replaces the old one.

    Token ids stay as they are: generated tokens are never tokenized again. `_rendered` is the chat
    template's text of the history, if that is known. In a *loose* history ids and text do not
    agree, because a context shift or a rewind has removed ids. The next messages then add the
    difference between the template's texts with and without them.

    `messages` is the whole chat. The model reads `read_messages`, which lacks the turns that were
    dropped because the context was full. Dropped messages use at most `DROPPED_BYTES_MAX`.

    Images and sounds are parts of messages. In the rendered text a mark stands for each, and among
    the token ids the entries of its items (`backends/media.py`).
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
        self.dropped = NOTHING_DROPPED
        """The part of the history that was dropped for the last input."""
        self.dropped_bytes = 0
        """The memory of dropped messages, which are among `messages`."""
        self.unread = ""
        """Why the model cannot read images or sounds of the last rendered text, or empty."""
        self._message_contents = frozenset[bytes]()
        """The contents of the images and sounds in `messages`."""
        self._known_items = NO_ITEMS
        """The items in `prompt`."""
        self._nonce = ""
        """The part of its marks that no text contains; empty until there are marks."""
        self._rendering_bytes = 0
        self._rendered: str | None = None
        self.continued = ""
        """The beginning of the answer, with which the prompt ends behind the rendered text."""
        self.continued_tokens = 0
        """The number of its tokens."""
        self._loose = False
        self._open = False
        """No turn has computed the last input yet, so that more input belongs to the same turn."""
        if system:
            self._append_messages([{"role": "system", "content": system}])

    def copy(self) -> History:
        new = copy(self)
        new.prompt = list(self.prompt)
        new.marks = list(self.marks)
        new.recomputed, new.dropped = NOT_RECOMPUTED, NOTHING_DROPPED
        return new

    def entry(self, resumable: TurnPiece | None = None) -> HistoryEntry:
        """Return the stored form, with the output of the last turn on it, if it is *resumable*."""
        return HistoryEntry(
            tokens=pack_tokens(self.prompt),
            messages=self.messages,
            marks=self.marks,
            rendered=self._rendered,
            loose=self._loose,
            open=self._open,
            shifted=self.shifted,
            rendering=self.rendering,
            tool_use=self.tool_use,
            dropped=self.dropped,
            resumable=resumable,
            nonce=self._nonce,
            items=self._known_items.with_items((), self.prompt).all,
            continued=self.continued,
            continued_tokens=self.continued_tokens,
        )

    @property
    def kept_bytes(self) -> int:
        texts = self.messages_bytes + memory_bytes(self._rendered) + self._rendering_bytes
        texts += len(self.continued)
        lists = TOKEN_BYTES * len(self.prompt) + MARK_BYTES * len(self.marks)
        return texts + lists + ITEM_BYTES * len(self._known_items)

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """The items of the images and sounds in the prompt, in their order."""
        return self._known_items.items_in(self.prompt)

    @property
    def contents(self) -> frozenset[bytes]:
        """The hashes of the contents of its images and sounds, which the media store must keep."""
        return self._message_contents | self._known_items.contents

    @classmethod
    def from_entry(cls, entry: HistoryEntry) -> History:
        new = cls()
        new.prompt = unpack_tokens(entry.tokens)
        new._replace_messages(entry.messages)
        new.marks = list(entry.marks)
        new._rendered, new._loose, new._open = entry.rendered, entry.loose, entry.open
        new.shifted, new.tool_use, new.dropped = entry.shifted, entry.tool_use, entry.dropped
        new._set_rendering(entry.rendering)
        new._nonce, new._known_items = entry.nonce, KnownItems(entry.items)
        new.continued, new.continued_tokens = entry.continued, entry.continued_tokens
        return new

    def after(self, turn: TurnOutput | None) -> History:
        """Return the history with the output of *turn* that was sent to its reader."""
        new = self.copy()
        if turn is None or not turn.generates:
            return new
        new._open, new.prompt = False, turn.history()
        if self._rendered is not None:
            answer = self.continued + turn.text.decode(errors="replace")
            apart = not is_plain(self.tool_use.answers)
            parser = self.new_parser(turn.seed, reasoning=apart)
            new._append_messages([answer_message(answer, parser)])
            # The ids include text that a stop text cut from the answer.
            cut = self._loose or turn.stopped_by_text
            new._rendered = None if cut else self._rendered + answer
        new.continued, new.continued_tokens = "", 0
        for keep, discard in turn.shifts:
            new._shift(keep, discard)
        return new

    def new_parser(
        self, seed: int, *, reasoning: bool = False, finds_calls: bool = True
    ) -> AnswerParser | None:
        """Return the parser of the answer, if not all of it is text; *seed* is its turn's. An
        answer on the same history with the same seed has calls with the same ids. *reasoning* is
        split off only if that is set.
        """
        prompt = self.prompt
        return new_parser(
            self.tool_use,
            self.rendering,
            self._rendered or "",
            lambda: b"%d %b" % (seed, pack_tokens(prompt)),
            reasoning=reasoning,
            finds_calls=finds_calls,
        )

    def _append_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        self.messages = [*self.messages, *messages]
        self.messages_bytes += memory_bytes(*messages)
        self._message_contents |= contents_of(messages)

    def _replace_messages(self, messages: list[dict[str, Any]]) -> None:
        self.messages, self.messages_bytes = messages, memory_bytes(*messages)
        self.dropped_bytes = dropped_bytes(messages)
        self._message_contents = contents_of(messages)

    def _set_rendering(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self._rendering_bytes = memory_bytes(rendering.tools, rendering.arguments)

    # Input.

    def replace_tokens(self, tokens: list[int], items: Sequence[MediaItem] = ()) -> None:
        """Replace the history by raw text with these *items*."""
        self.marks, self.prompt, self._open = [Mark(0, 0)], tokens, True
        self._know_items(items)
        self._end_chat()

    def append_tokens(self, tokens: list[int], items: Sequence[MediaItem] = ()) -> None:
        """Append raw text with these *items*, which ends a chat before it."""
        self._begin_turn()
        self.prompt = self.prompt + tokens
        self._know_items(items)
        self.marks = [Mark(mark.tokens, 0, mark.exact) for mark in self.marks]
        self._end_chat()

    async def add_messages(
        self,
        client: TextClient,
        messages: Sequence[dict[str, Any]],
        rendering: Rendering = PLAIN_RENDERING,
        tool_use: ToolUse = NO_TOOLS,
        limit: ContextLimit = UNLIMITED,
        *,
        refuses_unread: bool = False,
        continues: bool = False,
    ) -> None:
        """Add messages by the model's template; with *continues* the last one begins the answer.
        After raw text, begin a new history. The answer may
        have tool calls as *tool_use* says. Drop the oldest turns as *limit* says. Images and sounds
        of earlier messages that the model cannot read are texts, unless *refuses_unread*.

        If the template's text begins with the present text, only the rest is tokenized.

        :raises PromptTooLong: no context holds the text, and *limit* does not shorten it.
        :raises InferdError: an image or sound cannot be read; see `read_media`.
        """
        self._end_continued()
        final = None
        if continues:
            messages, final = split_final(messages)
        added = [as_read(without_raw_answer(message)) for message in messages]
        readings = await read_media(
            client, self.read_messages, added, refuses_unread=refuses_unread
        )
        # Another projector reads the same image in another way: its old entries are obsolete.
        reads_anew = not set(self.items) <= set(readings.items)
        was_chat = bool(self.messages)
        previous = "" if reads_anew else await self._rendered_text(client, readings)
        drops = TurnDrops(self.read_messages, added, limit, readings.size_of)
        fitting = await self._fitting_text(client, drops, rendering, previous, limit, readings)
        prompt, end = fitting.prompt, fitting.end
        self._begin_turn()
        if prompt.appended:
            self.prompt = self.prompt + prompt.tokens
        else:
            shared = common_prefix(self.prompt, prompt.tokens)
            self.marks = self._marks_in(prompt.tokens, shared, fitting.extended)
            if obsolete := len(self.prompt) - shared:
                other = rendering != self.rendering
                cause = _recompute_cause(
                    *(previous, prompt.text),
                    was_chat=was_chat,
                    other_arguments=other,
                    reads_anew=reads_anew,
                )
                self.recomputed = Recomputed(obsolete, _DROPPED_CAUSE if end else cause)
            self.prompt = prompt.tokens
        self._know_items(readings.items)
        self.unread = readings.unread
        forms = drops.kept(end).forms
        if len(forms) > 1:
            self._replace_messages([*self.messages[:-1], forms[prompt.form]])
        if end:
            self._add_and_drop(added, drops, end)
            dropped_tokens = max(0, fitting.whole_tokens - len(self.prompt))
            self.dropped = DroppedPart(dropped_tokens, drops.turns(end))
        else:
            self._append_messages(added)
        self._rendered, self._loose = prompt.text, False
        self._set_rendering(rendering)
        self.tool_use = tool_use
        if final is not None:
            await self._continue_message(client, final, readings)

    async def _continue_message(
        self, client: TextClient, message: dict[str, Any], readings: Readings
    ) -> None:
        """Append the beginning of the answer, a *message* of the assistant.

        :raises UnsupportedOperation: the template does not show where an answer begins.
        """
        text = self._rendered or ""
        rendering = msgspec.structs.replace(self.rendering, add_generation_prompt=False)
        texts = []
        for messages in (self.read_messages, [*self.read_messages, message]):
            shown, media = self._marked(messages, readings)
            found = await client.chat_prompt(
                shown, rendering=rendering, cut_behind=NOTHING_KEPT, media=media
            )
            texts.append(found.text)
        ended, whole = texts
        check_place(text, ended, whole, message)
        self.continued = answer_beginning(message, self.tool_use.answers, self.opened)
        tokens = await tokens_within(client, self.continued) if self.continued else []
        self.prompt, self.continued_tokens = self.prompt + tokens, len(tokens)

    def _end_continued(self) -> None:
        """Let the beginning of an answer that no turn has continued be an answer."""
        if not self.continued:
            return
        parser = self.new_parser(0, reasoning=not is_plain(self.tool_use.answers))
        self._append_messages([answer_message(self.continued, parser)])
        self._rendered = None if self._rendered is None else self._rendered + self.continued
        self.continued, self.continued_tokens = "", 0

    async def _fitting_text(
        self,
        client: TextClient,
        drops: TurnDrops,
        rendering: Rendering,
        previous: str,
        limit: ContextLimit,
        readings: Readings,
    ) -> FittingText:
        """Return the text of a chat without the oldest turns that *limit* drops.

        :raises PromptTooLong: no context holds it.
        """
        whole = refusal = None
        extended = list[int]()
        try:
            whole = await self._render_input(
                client, drops.kept(0), rendering, readings, previous, limit
            )
            extended = self.prompt + whole.tokens if whole.appended else []
            tokens = len(extended or whole.tokens)
        except PromptTooLong as exc:
            refusal, tokens = exc, exc.data["prompt_tokens"]
        if whole is not None and not limit.needs_drop(tokens):
            return FittingText(whole, 0, tokens, extended)
        found = None if whole is None else (whole, 0)
        end = drops.next_end(0, tokens, tokens) if limit.drops_turns else None
        while end is not None:
            left = tokens
            try:
                prompt = await self._render_input(client, drops.kept(end), rendering, readings)
                found, left = (prompt, end), len(prompt.tokens)
                if limit.enough_dropped(tokens, left):
                    break
            except PromptTooLong as exc:
                refusal = exc
            end = drops.next_end(end, tokens, left)
        if found is None:
            assert refusal is not None
            raise refusal
        return FittingText(*found, tokens, extended)

    async def _render_input(
        self,
        client: TextClient,
        kept: KeptMessages,
        rendering: Rendering,
        readings: Readings,
        previous: str | None = None,
        limit: ContextLimit = UNLIMITED,
    ) -> ChatTokens:
        """Return the template's text of a chat with new messages. With *previous*, the present
        text, it may only have the part that extends this.
        """
        messages, media = self._marked([*kept.before, *kept.forms[:1], *kept.added], readings)
        return await client.chat_prompt(
            messages,
            previous or "",
            self._split_answer()[1] if previous else "",
            rendering,
            turn=previous is not None,
            answer_at=len(kept.before),
            forms=list(map(without_raw_answer, kept.forms[1:])),
            cut_behind=limit.cut_behind,
            media=media,
        )

    def _marked(
        self, messages: Sequence[dict[str, Any]], readings: Readings
    ) -> tuple[list[dict[str, Any]], list[MarkedMedia]]:
        """Return messages as a template has them, and the images and sounds for their marks."""
        if readings and not self._nonce:
            self._nonce = new_nonce()
        return mark_messages(list(map(without_raw_answer, messages)), self._nonce, readings)

    def _know_items(self, items: Sequence[MediaItem]) -> None:
        """Know the items in the prompt, which are these or known ones."""
        if items or self._known_items:
            self._known_items = self._known_items.with_items(items, self.prompt)

    def _marks_in(self, tokens: list[int], shared: int, extended: list[int]) -> list[Mark]:
        """Return the marks in the *tokens* of a chat that was rendered anew behind its first
        *shared* tokens. The kept turns at the end have the same tokens as in the *extended*
        history, if that is not empty; their marks stay exact.
        """
        same_end = common_prefix(extended[::-1], tokens[::-1])
        end_begins, moved = len(extended) - same_end, len(tokens) - len(extended)

        def moved_mark(mark: Mark) -> Mark:
            if mark.tokens <= shared:
                return mark
            if same_end and mark.exact and mark.tokens >= end_begins:
                return Mark(mark.tokens + moved, mark.messages)
            return Mark(shared, mark.messages, exact=False)

        return list(map(moved_mark, self.marks))

    def _add_and_drop(self, added: Sequence[dict[str, Any]], drops: TurnDrops, end: int) -> None:
        """Append messages, and mark those that *drops* drops up to *end*."""
        messages = [*self.messages, *added]
        read = [at for at, message in enumerate(messages) if not is_dropped(message)]
        for at in read[drops.first : end]:
            messages[at] = as_dropped(messages[at])
        self._replace_messages(messages)
        self.delete_dropped(DROPPED_BYTES_MAX)

    def delete_dropped(self, bytes_max: int) -> None:
        """Delete the oldest dropped turns until the others have at most *bytes_max* bytes. Turns
        that begin in the deleted part can no longer be rewound.
        """
        excess = self.dropped_bytes - bytes_max
        if excess <= 0:
            return
        deleted = set[int]()
        starts = set(turn_starts(self.messages, system_messages(self.messages)))
        for at, message in enumerate(self.messages):
            if excess <= 0 and at in starts:
                break
            if is_dropped(message):
                deleted.add(at)
                excess -= memory_bytes(message)
        places = list(
            accumulate((at not in deleted for at in range(len(self.messages))), initial=0)
        )
        self._replace_messages([x for at, x in enumerate(self.messages) if at not in deleted])
        self.marks = [
            Mark(mark.tokens, places[mark.messages], mark.exact)
            for mark in self.marks
            if mark.messages not in deleted
        ]

    # Reading.

    @property
    def read_messages(self) -> list[dict[str, Any]]:
        """The messages of the chat that the model reads."""
        if not self.dropped_bytes:
            return self.messages
        return [message for message in self.messages if not is_dropped(message)]

    @property
    def client_messages(self) -> list[dict[str, Any]]:
        return list(map(without_raw_answer, self.messages))

    @property
    def prompt_text(self) -> str:
        """The text of the prompt of a chat, with the beginning of the answer."""
        return (self._rendered or "") + self.continued

    @property
    def opened(self) -> str:
        """The mark of the answer with which the prompt ends, or empty."""
        return opened_by(self.tool_use.answers, self._rendered or "")

    def _split_answer(self) -> tuple[list[dict[str, Any]], str]:
        """Return the read messages before the chat's last answer, and the answer. Without an
        answer, return all read messages and an empty text.
        """
        messages = self.read_messages
        if messages and messages[-1]["role"] == "assistant" and is_text(messages[-1]):
            return messages[:-1], raw_answer(messages[-1])
        return messages, ""

    async def retokenize(
        self, client: TextClient, text: bytes, *, refuses_unread: bool = False
    ) -> None:
        """Retokenize the history for another vocabulary: the messages by its template, or else
        *text*. Earlier turns can no longer be rewound by their tokens. A text that is too long for
        any context loses its middle, but stays too long: the next turn shortens or refuses it.
        Images and sounds are read by the model; those that it cannot read are texts, unless
        *refuses_unread*.

        :raises UnsupportedOperation: the model cannot read one, and *refuses_unread*.
        """
        self._end_continued()
        before, answer = self._split_answer()
        if before:
            readings = await read_media(client, before, refuses_unread=refuses_unread)
            prompt = await self._render(client, before, readings)
            rest = await client.tokenize(
                answer.encode(), special=True, bos=False, cut_behind=NOTHING_KEPT
            )
            self.prompt = prompt.tokens + rest
            self._know_items(readings.items)
            self.unread = readings.unread
            self._rendered, self._loose = prompt.text + answer, False
            self.marks = [Mark(0, mark.messages, exact=False) for mark in self.marks]
        else:
            tokens = await client.tokenize(text, special=True, bos=True, cut_behind=NOTHING_KEPT)
            self.prompt, self.marks = tokens, []
            if self._known_items:
                self.unread = "those of raw text are texts for another model"
            self._known_items = NO_ITEMS
        self.shifted = False

    async def _rendered_text(self, client: TextClient, readings: Readings) -> str:
        """Return the template's text of the history, or an empty text if all of the history must
        be tokenized again.
        """
        if not self._loose:
            return self._rendered or ""
        before, answer = self._split_answer()
        if not before:
            return ""
        return (await self._render(client, before, readings)).text + answer

    async def _render(
        self, client: TextClient, messages: list[dict[str, Any]], readings: Readings
    ) -> ChatTokens:
        """Return the template's text, whose middle has no tokens if no context holds it."""
        shown, media = self._marked(messages, readings)
        return await client.chat_prompt(
            shown, rendering=self.rendering, cut_behind=NOTHING_KEPT, media=media
        )

    def _begin_turn(self) -> None:
        if not self._open:
            self.marks.append(Mark(len(self.prompt), len(self.messages)))
            del self.marks[:-MARKS_MAX]
        self._open = True

    def _end_chat(self) -> None:
        self._replace_messages([])
        self._rendered, self._loose, self.tool_use = None, False, NO_TOOLS
        self.continued, self.continued_tokens = "", 0

    # Rewinding and shifting.

    def rewind_turns(self, turns: int) -> None:
        """Remove the last *turns* turns. If the model read none of those before them, it reads all
        of them from the next messages on.

        :raises InvalidArgument: the history has fewer.
        """
        if not 1 <= turns <= len(self.marks):
            raise InvalidArgument(
                f"{turns} turns back in a history of {len(self.marks)}",
                hint="go back at least one turn, at most to the first one that is remembered",
                data={"turns": len(self.marks)},
            )
        mark = self.marks[-turns]
        self._cut(mark.tokens if mark.exact else 0, mark.messages)
        del self.marks[-turns:]
        if self.messages and is_dropped(self.messages[-1]):  # the model reads dropped turns again
            self._replace_messages(list(map(as_read, self.messages)))
            self.prompt, self._loose, self._known_items = [], False, NO_ITEMS

    def rewind_tokens(self, tokens: int) -> None:
        """Keep the first *tokens* tokens, and the messages of the complete turns. An image or sound
        of which not all would be kept is removed.

        :raises InvalidArgument: the history has fewer.
        """
        if not 0 <= tokens <= len(self.prompt):
            raise InvalidArgument(
                f"{tokens} tokens to keep of {len(self.prompt)}", data={"tokens": len(self.prompt)}
            )
        tokens = cut_point(self.prompt, tokens)
        if tokens < len(self.prompt):
            whole = [mark.messages for mark in self.marks if mark.tokens <= tokens]
            self._cut(tokens, whole[-1] if whole else 0)
            self.marks = [mark for mark in self.marks if mark.tokens < tokens]

    def _cut(self, tokens: int, messages: int) -> None:
        self.prompt = self.prompt[:tokens]
        self._know_items(())
        self._replace_messages(self.messages[:messages])
        self._open = False
        self._loosen()

    def fitted(self, limit: ContextLimit) -> History:
        """Return the history without the tokens that *limit* drops before a turn, or this one.
        Whole turns of a chat were dropped when messages were added.
        """
        if self.messages and limit.drops_turns:
            return self
        starts = [mark.tokens for mark in self.marks if mark.exact]
        cut = limit.cut(len(self.prompt), starts)
        cut = None if cut is None else _cut_of_whole_items(self.prompt, cut)
        if cut is None:
            return self
        new = self.copy()
        new.recomputed = self.recomputed
        new.prompt = self.prompt[: cut.keep] + self.prompt[cut.keep + cut.discard :]
        new._know_items(())
        turns = new._drop_marks(cut.keep, cut.discard)
        new.dropped = DroppedPart(self.dropped.tokens + cut.discard, self.dropped.turns + turns)
        new._rendered = self._rendered  # its end shows the form of the answer
        new.continued, new.continued_tokens = self.continued, self.continued_tokens
        return new

    def _shift(self, keep: int, discard: int) -> None:
        """Note a context shift, which has moved the tokens."""
        self.shifted = True
        self._drop_marks(keep, discard)

    def _drop_marks(self, keep: int, discard: int) -> int:
        """Move the marks as the dropped tokens have moved the others. A turn with at most one
        token left is dropped: the model no longer reads its messages, and a rewind of raw text
        cannot reach it. Return the number of dropped turns.
        """
        end, marks, messages = keep + discard, list[Mark](), list(self.messages)
        first, turns = system_messages(messages), 0
        for mark, after in pairwise([*self.marks, Mark(end + 1, len(messages))]):
            if mark.tokens + 1 < keep or after.tokens > end:
                tokens = mark.tokens - discard if mark.tokens >= end else min(mark.tokens, keep)
                marks.append(Mark(tokens, mark.messages, mark.exact))
                continue
            turns += mark.exact
            if messages:
                marks.append(Mark(keep, mark.messages, exact=False))
                for at in range(max(mark.messages, first), after.messages):
                    messages[at] = as_dropped(messages[at])
        self._replace_messages(messages)
        self.marks = marks
        self.delete_dropped(DROPPED_BYTES_MAX)
        self._loosen()
        return turns

    def _loosen(self) -> None:
        self.continued, self.continued_tokens = "", 0
        self._rendered, self._loose = None, bool(self.prompt and self.messages)


def _cut_of_whole_items(prompt: Sequence[int], cut: TokenCut) -> TokenCut | None:
    """Return the next cut of a prompt that begins and ends at no place within an item, or None if
    there is none. The last token or item stays.
    """
    keep, end = cut_point(prompt, cut.keep), cut.keep + cut.discard
    begin = cut_point(prompt, end)
    if begin < end:
        after = begin + item_size(prompt, begin)
        end = after if after < len(prompt) else begin
    return TokenCut(keep, end - keep) if end > keep else None


def _recompute_cause(
    previous: str, text: str, *, was_chat: bool, other_arguments: bool, reads_anew: bool
) -> str:
    """Return why the template's *text* does not begin with the *previous* text, which is empty if
    ids and text disagree. With *was_chat* the history was a chat, with *other_arguments* it was
    rendered with other tools or arguments, and with *reads_anew* its images have other items.
    """
    if not was_chat:
        return "a chat after raw text begins a new history"
    if reads_anew:
        return _MEDIA_CAUSE
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
