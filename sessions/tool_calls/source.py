"""The text of an answer that arrives in pieces, and the text and calls that are read from it.

Generators read it. They wait, by a yield, only where they cannot continue without the next piece.
So the results at any place do not depend on how the text before it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from .calls import ToolCallPart

__all__ = ("AnswerEnded", "AnswerSource", "NotACall", "Reading")

CALL_CHARACTERS_MAX = 256 << 10
"""A longer call stays text."""
_SPACE = re.compile(r"\s*")

Reading = Generator[None, None, None]


class NotACall(Exception):
    """The text does not continue as a call."""


class AnswerEnded(Exception):
    """The answer has ended where a call could continue."""


class AnswerSource:
    """The text of one answer. Owned by its parser. *buffer* from *at* on was not read yet.

    To *pass* text is to add it to the text of the answer. White space beside calls is not part of
    that.
    """

    def __init__(self) -> None:
        self.parts: list[ToolCallPart] = []
        """Parts of calls that were not taken yet."""
        self.calls = 0
        """Complete calls so far."""
        self.buffer, self.at = "", 0
        self._ended = False
        self._text: list[str] = []
        self._space = ""
        """White space that is text unless a call follows."""
        self._after_call = False
        self._pending: list[str] = []
        """The text of a possible call so far."""
        self._pending_size = 0
        self._announced = False
        """Whether parts of the pending call were added to `parts`."""

    def add_text(self, text: str) -> None:
        """Add the answer's next piece."""
        self.buffer, self.at = self.buffer[self.at :] + text, 0

    def end(self) -> None:
        """Note that the answer has ended."""
        self._ended = True

    def take_text(self) -> str:
        """Return the text that was read and not taken yet."""
        text, self._text = "".join(self._text), []
        return text

    def take_parts(self) -> list[ToolCallPart]:
        """Return the parts of calls that were read and not taken yet."""
        parts, self.parts = self.parts, []
        return parts

    # Text.

    def text_until(self, *marks: str) -> Generator[None, None, str]:
        """Pass text up to the next of *marks*, which becomes pending; return the mark.

        :raises AnswerEnded: the answer has ended without one.
        """
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        while True:
            found = pattern.search(self.buffer, self.at)
            end = len(self.buffer)
            if found is not None:
                end = found.start()
            elif not self._ended:
                end -= self._partial_mark(marks)
            self._pass(self.buffer[self.at : end])
            self.at = end
            if found is not None:
                self.take(len(found.group()))
                return found.group()
            if self._ended:
                raise AnswerEnded
            yield

    def _partial_mark(self, marks: tuple[str, ...]) -> int:
        """Return the number of characters at the end that may begin a mark."""
        rest = self.buffer[max(self.at, len(self.buffer) - max(map(len, marks), default=0)) :]
        sizes = range(len(rest), 0, -1)
        return next((n for n in sizes if any(m.startswith(rest[-n:]) for m in marks)), 0)

    def _pass(self, text: str) -> None:
        """Pass *text*, but hold back white space at its end, and drop white space after a call."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._text.append(shown)

    def pass_space(self) -> None:
        """Pass the white space that is held back."""
        self._text.append(self._space)
        self._space = ""

    def pass_rest(self) -> None:
        """Pass all text that was not read, and the white space at its end."""
        self._pass(self.buffer[self.at :])
        self.at = len(self.buffer)
        self.pass_space()

    def pass_pending(self) -> None:
        """Pass the pending text, because it is not a call."""
        if self._announced:
            self.parts.append(ToolCallPart(self.calls, dropped=True))
        pending = "".join(self._pending)
        self.clear_pending()
        self._pass(pending)

    def clear_pending(self) -> None:
        """Clear the pending text: it was passed, has become a call, or is skipped as a mark."""
        self._pending.clear()
        self._pending_size, self._announced = 0, False

    # Calls.

    @contextmanager
    def possible_call(self) -> Iterator[None]:
        """Pass the pending text if the block finds that it is not a call."""
        try:
            yield
        except NotACall:
            self.pass_pending()

    def add_part(self, part: ToolCallPart) -> None:
        """Add a part of the pending call."""
        self.parts.append(part)
        self._announced = True

    def end_call(self) -> None:
        """Note that the pending call is complete."""
        self.calls += 1
        self.clear_pending()
        self._space, self._after_call = "", True

    def take(self, size: int) -> str:
        """Read the next *size* characters as a part of the pending call.

        :raises NotACall: the call is too long.
        """
        taken = self.buffer[self.at : self.at + size]
        self.at += size
        self._pending.append(taken)
        self._pending_size += size
        if self._pending_size > CALL_CHARACTERS_MAX:
            raise NotACall
        return taken

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it.

        :raises AnswerEnded: there is none.
        """
        while self.at == len(self.buffer):
            if self._ended:
                raise AnswerEnded
            yield
        return self.buffer[self.at]

    def starts_with(self, text: str) -> Generator[None, None, bool]:
        """Read *text* if it comes next; return whether it does."""
        while True:
            found = self.buffer[self.at : self.at + len(text)]
            if found == text:
                self.take(len(text))
                return True
            if self._ended or not text.startswith(found):
                return False
            yield

    def expect(self, text: str) -> Reading:
        """Read *text*.

        :raises NotACall: another text comes next.
        """
        if not (yield from self.starts_with(text)):
            raise NotACall

    def space(self) -> Reading:
        """Read white space."""
        yield from self.run(_SPACE)

    def run(
        self, pattern: re.Pattern[str], pass_on: Callable[[str], None] | None = None
    ) -> Generator[None, None, str]:
        """Read and return the characters that *pattern*, a repeated class of characters, matches;
        *pass_on* gets them as they arrive.

        :raises AnswerEnded: the answer ends with them.
        """
        read = []
        while True:
            found = pattern.match(self.buffer, self.at)
            size = 0 if found is None else found.end() - self.at
            if size:
                read.append(self.take(size))
                if pass_on is not None:
                    pass_on(read[-1])
            if self.at < len(self.buffer):
                return "".join(read)
            yield from self.peek()

    def until(self, mark: str) -> Generator[None, None, str]:
        """Read and return the text up to *mark*, which is read too.

        :raises AnswerEnded: the mark does not come.
        """
        read = []
        while True:
            end = self.buffer.find(mark, self.at)
            if end >= 0:
                read.append(self.take(end - self.at))
                self.take(len(mark))
                return "".join(read)
            read.append(self.take(len(self.buffer) - self._partial_mark((mark,)) - self.at))
            if self._ended:
                raise AnswerEnded
            yield
