"""An answer that is split into its text, its reasoning and its tool calls as it arrives.

Reasoning is the text between `<think>` tags. A block counts if the answer begins with it, after
white space at most, or if the prompt has opened it; a block without an end extends to the answer's
end. Only the tags are removed, so that the whole text can be restored.
"""

from __future__ import annotations

import codecs
from enum import Enum
from typing import NamedTuple

from ...backends.errors import InvalidArgument
from .calls import ToolCallPart
from .parser import ParsedText, ToolCallParser

OPEN, CLOSE = b"<think>", b"</think>"
SPACE_BYTES = 64
"""The most white space that may stand before a block; it is held back."""


class AnswerParts(NamedTuple):
    """Bytes of an answer, and of the reasoning before it; parts of the answer's tool calls."""

    text: bytes
    reasoning: bytes = b""
    calls: tuple[ToolCallPart, ...] = ()


class _At(Enum):
    START, REASONING, ANSWER = range(3)


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends inside a block of reasoning."""
    return prompt.rstrip().endswith(OPEN.decode())


class ReasoningSplitter:
    """Splits one answer as it arrives; the parts do not depend on how it is cut into pieces. A
    splitter that is not *on* treats everything as the answer.
    """

    def __init__(self, *, on: bool, opened: bool = False):
        self._at = _At.ANSWER if not on else _At.REASONING if opened else _At.START
        self.held = b""
        """Bytes that are held back."""

    def split(self, data: bytes) -> AnswerParts:
        """Return the parts that can be sent now; a possible beginning of a tag is held back."""
        if self._at is _At.ANSWER:
            return AnswerParts(data)
        data, self.held = self.held + data, b""
        space = b""
        if self._at is _At.START:
            bare = data.lstrip()
            space = data[: len(data) - len(bare)]
            if len(space) > SPACE_BYTES or not (bare.startswith(OPEN) or OPEN.startswith(bare)):
                self._at = _At.ANSWER
                return AnswerParts(data)
            if len(bare) < len(OPEN):
                self.held = data
                return AnswerParts(b"")
            self._at, data = _At.REASONING, bare[len(OPEN) :]
        reasoning, closed, answer = data.partition(CLOSE)
        if closed:
            self._at = _At.ANSWER
            return AnswerParts(space + answer, reasoning)
        tag_bytes = _tag_prefix_bytes(data)
        self.held = data[len(data) - tag_bytes :]
        return AnswerParts(space, data[: len(data) - tag_bytes])

    def flush(self) -> AnswerParts:
        """Return the parts that are held back, at the end of the answer."""
        held, self.held = self.held, b""
        return AnswerParts(b"", held) if self._at is _At.REASONING else AnswerParts(held)

    def split_last(self, data: bytes) -> AnswerParts:
        """Return the parts of the answer's last piece."""
        now, rest = self.split(data), self.flush()
        return AnswerParts(now.text + rest.text, now.reasoning + rest.reasoning)

    def joined(self, more: AnswerParts) -> bytes:
        """Return a text that `split` would split into these parts next."""
        if self._at is _At.ANSWER:
            return more.text
        if self._at is _At.REASONING:
            return more.reasoning + (CLOSE + more.text if more.text else b"")
        if not more.reasoning:
            return more.text
        answer = more.text.lstrip()
        space = more.text[: len(more.text) - len(answer)]
        return space + OPEN + more.reasoning + (CLOSE + answer if answer else b"")

    def skip_held(self) -> None:
        """Drop the bytes that are held back: they were sent, so they are not part of a tag."""
        if self._at is _At.START and self.held.strip():
            self._at = _At.ANSWER
        self.held = b""


def _tag_prefix_bytes(data: bytes) -> int:
    """Return the number of bytes at the end of *data* that may begin the closing tag."""
    sizes = range(min(len(data), len(CLOSE) - 1), 0, -1)
    return next((size for size in sizes if CLOSE.startswith(data[-size:])), 0)


def resume_splitting(
    sent: bytes, has: AnswerParts, *, on: bool, opened: bool = False
) -> tuple[bytes, ReasoningSplitter]:
    """Return the text of the parts that a reader *has*, and the splitter of the rest. The text is a
    prefix of *sent*, or *sent* and the reader's bytes beyond it.

    :raises InvalidArgument: the reader's parts differ.
    """
    text = _joined(sent, has, ReasoningSplitter(on=on, opened=opened)) if on else has.text
    splitter = ReasoningSplitter(on=on, opened=opened)
    if splitter.split(text) != has:  # the reader has bytes that are held back here: not a tag
        splitter.skip_held()
    return text, splitter


def _joined(sent: bytes, has: AnswerParts, splitter: ReasoningSplitter) -> bytes:
    text, reasoning = bytearray(), bytearray()
    for at in range(len(sent)):
        now = splitter.split(sent[at : at + 1])
        goes_past = len(text) + len(now.text) > len(has.text)
        if goes_past or len(reasoning) + len(now.reasoning) > len(has.reasoning):
            _check(AnswerParts(bytes(text), bytes(reasoning)) == has)
            return sent[:at]
        text += now.text
        reasoning += now.reasoning
    _check(has.text.startswith(bytes(text)) and has.reasoning.startswith(bytes(reasoning)))
    more = AnswerParts(has.text[len(text) :], has.reasoning[len(reasoning) :])
    if not more.text and not more.reasoning:
        return sent
    return sent[: len(sent) - len(splitter.held)] + splitter.joined(more)


def _check(agrees: bool) -> None:
    if not agrees:
        raise InvalidArgument(
            "text or reasoning differ from those that the interrupted turn sent",
            hint="give all its text and reasoning from the start, as its events had them",
        )


_BYTES = "surrogateescape"
"""Keeps bytes that are not UTF-8."""


class AnswerSplitter:
    """Splits one answer; the parts do not depend on how it is cut into pieces. Tool calls are found
    first, because `ToolCallParser` leaves reasoning alone.
    """

    def __init__(self, reasoning: ReasoningSplitter, parser: ToolCallParser | None = None):
        self._reasoning, self._parser = reasoning, parser
        self._decoder = codecs.getincrementaldecoder("utf-8")(_BYTES)

    @property
    def finds_calls(self) -> bool:
        return self._parser is not None

    def split(self, data: bytes) -> AnswerParts:
        """Return the parts that can be sent now."""
        if self._parser is None:
            return self._reasoning.split(data)
        found = self._parser.parse(self._decoder.decode(data))
        return self._reasoning.split(_bytes(found))._replace(calls=tuple(found.parts))

    def split_last(self, data: bytes) -> AnswerParts:
        """Return the parts of the answer's last piece."""
        if self._parser is None:
            return self._reasoning.split_last(data)
        first = self._parser.parse(self._decoder.decode(data, final=True))
        rest = self._parser.finish()
        parts = self._reasoning.split_last(_bytes(first) + _bytes(rest))
        return parts._replace(calls=(*first.parts, *rest.parts))


def _bytes(found: ParsedText) -> bytes:
    return found.text.encode(errors=_BYTES)
