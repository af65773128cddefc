"""An answer that is split into its text, its reasoning and its tool calls as it arrives.

The marks around reasoning are removed. They can be restored from the parts of an answer in the form
of plain text; readers of other forms get the text as the model wrote it too (`keeps_raw_text`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import NamedTuple

from ...backends.answer_form import PLAIN_ANSWERS, THINK
from ...backends.errors import InvalidArgument
from .calls import ToolCallPart
from .parser import AnswerParser, ParsedText

_OPEN, _CLOSE = THINK.begin.encode(), THINK.end.encode()
_BYTES = "surrogateescape"
"""Keeps bytes that are not UTF-8."""


class AnswerParts(NamedTuple):
    """Bytes of an answer, and of its reasoning; parts of the answer's tool calls."""

    text: bytes
    reasoning: bytes = b""
    calls: tuple[ToolCallPart, ...] = ()


class AnswerSplitter:
    """Splits one answer; the parts do not depend on how it is cut into pieces. Without a parser,
    everything is text.
    """

    def __init__(self, parser: AnswerParser | None = None):
        self._parser = parser
        self.keeps_raw_text = parser is not None and parser.changes_text
        """Whether a reader needs the text as the model wrote it to resume the answer."""
        self._known = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(_BYTES)

    def begin(self, data: bytes) -> None:
        """Take the beginning of the answer, which its reader has."""
        self.split(data)
        self._known = self.held

    def split(self, data: bytes) -> AnswerParts:
        """Return the parts that can be sent now; a possible beginning of a mark is held back."""
        parser = self._parser
        if parser is None:
            return AnswerParts(data)
        found = parser.parse(self._decoder.decode(data))
        if parser.rest_is_text:
            return self._without_known(self._end_parsing(found))
        return self._without_known(_parts(found))

    def _without_known(self, parts: AnswerParts) -> AnswerParts:
        """Return *parts* without the held back text that its reader has."""
        known, text, reasoning = self._known, parts.text, parts.reasoning
        if not known or not (text or reasoning or parts.calls):
            return parts
        self._known = b""
        return parts._replace(
            text=text.removeprefix(known),
            reasoning=reasoning if text else reasoning.removeprefix(known),
        )

    def _end_parsing(self, found: ParsedText) -> AnswerParts:
        """Return the parts of what was *found*. From now on, everything is text."""
        incomplete, _ = self._decoder.getstate()
        self._parser = None
        return _parts(found, incomplete)

    def split_last(self, data: bytes, *, cut: bool = False) -> AnswerParts:
        """Return the parts of the answer's last piece. *cut* says that a limit has ended it."""
        parser = self._parser
        if parser is None:
            return AnswerParts(data)
        first = parser.parse(self._decoder.decode(data, final=True))
        rest = parser.finish(cut=cut)
        return self._without_known(
            _parts(
                ParsedText(
                    first.text + rest.text,
                    [*first.parts, *rest.parts],
                    first.reasoning + rest.reasoning,
                )
            )
        )

    @property
    def held(self) -> bytes:
        """The bytes that are held back."""
        return b"" if self._parser is None else self._parser.held.encode(errors=_BYTES)

    @property
    def in_reasoning(self) -> bool:
        """Whether the answer so far ends within reasoning."""
        return self._parser is not None and self._parser.in_reasoning

    @property
    def is_text(self) -> bool:
        """Whether all that follows is text."""
        return self._parser is None


def _parts(found: ParsedText, more: bytes = b"") -> AnswerParts:
    return AnswerParts(
        found.text.encode(errors=_BYTES) + more,
        found.reasoning.encode(errors=_BYTES),
        tuple(found.parts),
    )


def plain_splitter(prompt: str = "") -> AnswerSplitter:
    """Return the splitter of an answer in the form of plain text, without calls."""
    return AnswerSplitter(AnswerParser(PLAIN_ANSWERS, prompt=prompt, reasoning=True))


def resume_splitting(
    sent: bytes, has: AnswerParts, new: Callable[[], AnswerSplitter]
) -> tuple[bytes, AnswerSplitter]:
    """Return the text of the parts that a reader *has*, and the splitter of the rest. The text is a
    prefix of *sent*, or *sent* and the reader's bytes beyond it. *new* returns a splitter of the
    whole answer, whose form is that of plain text.

    :raises InvalidArgument: the reader's parts differ.
    """
    text = _joined(sent, has, new)
    splitter = new()
    if splitter.split(text) == has or splitter.is_text:
        return text, splitter
    # The reader has bytes that are held back here: they were sent, so they begin no mark.
    if splitter.in_reasoning:
        return text, plain_splitter(THINK.begin)
    if splitter.held.strip():
        return text, AnswerSplitter()
    return text, new()


def _joined(sent: bytes, has: AnswerParts, new: Callable[[], AnswerSplitter]) -> bytes:
    size, too_much = 0, len(sent) + 1
    while too_much - size > 1:  # the longest beginning that has no more than the reader
        middle = (size + too_much) // 2
        now = new().split(sent[:middle])
        fits = len(now.text) <= len(has.text) and len(now.reasoning) <= len(has.reasoning)
        size, too_much = (middle, too_much) if fits else (size, middle)
    splitter = new()
    text, reasoning, _ = splitter.split(sent[:size])
    if size < len(sent):
        _check((text, reasoning) == (has.text, has.reasoning))
        return sent[:size]
    _check(has.text.startswith(text) and has.reasoning.startswith(reasoning))
    more_text, more_reasoning = has.text[len(text) :], has.reasoning[len(reasoning) :]
    if not more_text and not more_reasoning:
        return sent
    known = sent[: len(sent) - len(splitter.held)]
    if splitter.is_text:
        return known + more_text
    if not splitter.in_reasoning:
        if not more_reasoning:
            return known + more_text
        answer = more_text.lstrip()
        known += more_text[: len(more_text) - len(answer)] + _OPEN
        more_text = answer
    return known + more_reasoning + (_CLOSE + more_text if more_text else b"")


def _check(agrees: bool) -> None:
    if not agrees:
        raise InvalidArgument(
            "text or reasoning differ from those that the interrupted turn sent",
            hint="give all its text and reasoning from the start, as its events had them",
        )
