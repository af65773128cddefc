"""What a model thinks before it answers, split off from the answer: text between `<think>` tags.

A block counts where the answer begins with it, after white space at most, or where the prompt has
opened it; one that nobody closes goes on to the end. The tags alone are taken out: what was said
can be put together again.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...backends.errors import InvalidArgument

OPEN, CLOSE = b"<think>", b"</think>"
SPACE_BYTES = 64
"""White space that may stand before a block: so much is held back at most."""


class AnswerParts(NamedTuple):
    """Bytes of an answer, and of the reasoning before it."""

    text: bytes
    reasoning: bytes = b""


class _At(Enum):
    START, REASONING, ANSWER = range(3)


def opens_reasoning(prompt: str) -> bool:
    """Tell whether a prompt ends inside a block of reasoning."""
    return prompt.rstrip().endswith(OPEN.decode())


class ReasoningSplitter:
    """Splits one answer as it comes; however it is cut into pieces, the parts are the same. One
    that is not *on* takes everything for the answer.
    """

    def __init__(self, *, on: bool, opened: bool = False):
        self._at = _At.ANSWER if not on else _At.REASONING if opened else _At.START
        self._held = b""

    def split(self, data: bytes) -> AnswerParts:
        """Return the parts of what can be told now: of a tag's beginning nothing yet."""
        if self._at is _At.ANSWER:
            return AnswerParts(data)
        data, self._held = self._held + data, b""
        space = b""
        if self._at is _At.START:
            bare = data.lstrip()
            space = data[: len(data) - len(bare)]
            if len(space) > SPACE_BYTES or not (bare.startswith(OPEN) or OPEN.startswith(bare)):
                self._at = _At.ANSWER
                return AnswerParts(data)
            if len(bare) < len(OPEN):
                self._held = data
                return AnswerParts(b"")
            self._at, data = _At.REASONING, bare[len(OPEN) :]
        reasoning, closed, answer = data.partition(CLOSE)
        if closed:
            self._at = _At.ANSWER
            return AnswerParts(space + answer, reasoning)
        hold = _begun(data)
        self._held = data[len(data) - hold :]
        return AnswerParts(space, data[: len(data) - hold])

    def flush(self) -> AnswerParts:
        """Return the parts of what is still held back, at the end of the answer."""
        held, self._held = self._held, b""
        return AnswerParts(b"", held) if self._at is _At.REASONING else AnswerParts(held)

    def split_last(self, data: bytes) -> AnswerParts:
        """Return the parts of the answer's last piece."""
        said, rest = self.split(data), self.flush()
        return AnswerParts(said.text + rest.text, said.reasoning + rest.reasoning)

    def joined(self, more: AnswerParts) -> bytes:
        """Return a text that, fed from here on, would have these parts."""
        if self._at is _At.ANSWER:
            return more.text
        if self._at is _At.REASONING:
            return more.reasoning + (CLOSE + more.text if more.text else b"")
        if not more.reasoning:
            return more.text
        answer = more.text.lstrip()
        space = more.text[: len(more.text) - len(answer)]
        return space + OPEN + more.reasoning + (CLOSE + answer if answer else b"")

    @property
    def held(self) -> int:
        """How many bytes are held back."""
        return len(self._held)

    def skip_held(self) -> None:
        """Take what is held back for told: so it was no part of a tag."""
        if self._at is _At.START and self._held.strip():
            self._at = _At.ANSWER
        self._held = b""


def _begun(data: bytes) -> int:
    """Return how many bytes at the end of *data* may begin the closing tag."""
    sizes = range(min(len(data), len(CLOSE) - 1), 0, -1)
    return next((size for size in sizes if CLOSE.startswith(data[-size:])), 0)


def resume_splitting(
    told: bytes, has: AnswerParts, *, on: bool, opened: bool = False
) -> tuple[bytes, ReasoningSplitter]:
    """Return the text whose parts a reader *has*, where *told* was told, and what splits the rest:
    that text is a beginning of *told*, or all of it and what he has beyond.

    :raises InvalidArgument: he has something else.
    """
    text = _joined(told, has, ReasoningSplitter(on=on, opened=opened)) if on else has.text
    splitter = ReasoningSplitter(on=on, opened=opened)
    said = splitter.split(text)
    if said != has:  # he was told what is held back here, of a tag that was none
        splitter.skip_held()
    return text, splitter


def _joined(told: bytes, has: AnswerParts, splitter: ReasoningSplitter) -> bytes:
    text, reasoning = bytearray(), bytearray()
    for at in range(len(told)):
        said = splitter.split(told[at : at + 1])
        goes_past = len(text) + len(said.text) > len(has.text)
        if goes_past or len(reasoning) + len(said.reasoning) > len(has.reasoning):
            _check(AnswerParts(bytes(text), bytes(reasoning)) == has)
            return told[:at]
        text += said.text
        reasoning += said.reasoning
    _check(has.text.startswith(bytes(text)) and has.reasoning.startswith(bytes(reasoning)))
    more = AnswerParts(has.text[len(text) :], has.reasoning[len(reasoning) :])
    if not more.text and not more.reasoning:
        return told
    return told[: len(told) - splitter.held] + splitter.joined(more)


def _check(agrees: bool) -> None:
    if not agrees:
        raise InvalidArgument(
            "that is not what the interrupted turn has told",
            hint="give all its text and reasoning from the start, as its events told them",
        )
