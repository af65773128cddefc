"""Where sentences end, and an answer's text that waits there until the sentence is judged."""

from __future__ import annotations

import codecs
from collections import deque
from typing import NamedTuple

from ....backends.incremental_regex import byte_size
from .ending import StopReason

SENTENCE_CHARACTERS_MAX = 4096
"""Of a longer sentence the first ones count."""
_TERMINATORS = ".!?…"
_WIDE_TERMINATORS = "。！？｡"
_CLOSERS = "\"'”’»)]}」』）*_`"


class SentenceEnds:
    """Behind a letter or digit come `.`, `!`, `?` or `…`, perhaps closing quotes and brackets, and
    a blank; behind `。`, `！` and `？` any other character. (The boundaries of Unicode's UAX #29,
    rules SB6 to SB11, as far as they need no dictionary and no text that follows: so `e.g. ` has
    one.)
    """

    def __init__(self) -> None:
        self._worded = self._ended = self._wide = False

    def take(self, character: str) -> bool:
        """Take the next character; tell whether a sentence has ended before it."""
        if character in _TERMINATORS or character in _WIDE_TERMINATORS:
            self._ended = self._worded
            self._wide = self._ended and character in _WIDE_TERMINATORS
        elif self._ended and character not in _CLOSERS:
            ends = self._wide or character.isspace()
            self._ended = self._wide = False
            if ends:
                self._worded = character.isalnum()
                return True
        self._worded |= character.isalnum()
        return False


class Sentence(NamedTuple):
    """A sentence that has ended, before the byte *end* of the answer."""

    end: int
    text: str


class Sentences:
    """Lets an answer's text pass up to the end of a sentence. What follows waits until that is
    judged, whatever tokens it came in: so it cannot be said, and no other condition looks at it.
    """

    reason = StopReason("similarity", cuts_text=True)

    def __init__(self) -> None:
        self.question: Sentence | None = None
        """The sentence that is to be judged."""
        self._ends = SentenceEnds()
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._found: deque[Sentence] = deque()
        self._begun = ""
        self._waiting = b""
        self._decoded = self._passed = 0
        """Bytes of the answer that were looked at, and that have passed."""

    def feed(self, piece: bytes) -> bytes:
        """Take the bytes of one token; return those that pass."""
        assert self.question is None, "a sentence is to be judged before"
        self._waiting += piece
        self._look(self._decoder.decode(piece))
        return self._pass()

    def go_on(self) -> bytes:
        """Let the sentence in question be one of many; return the bytes that pass behind it."""
        self.question = None
        return self._pass()

    def resume(self, sent: bytes, shown: int) -> bytes:
        """Take an answer so far, of which *shown* bytes were sent: sentences before these were
        judged. Return those that pass.
        """
        self._waiting = sent
        self._look(self._decoder.decode(sent))
        while self._found and self._found[0].end < shown:
            self._found.popleft()
        return self._pass()

    def rest(self) -> bytes:
        """Return the half character that the answer ends with."""
        if self.question is not None:
            return b""
        rest, self._waiting = self._waiting, b""
        return rest

    def _look(self, text: str) -> None:
        for character in text:
            if self._ends.take(character):
                self._found.append(Sentence(self._decoded, _readable(self._begun)))
                self._begun = ""
            begins = self._begun or not character.isspace()
            if begins and len(self._begun) < SENTENCE_CHARACTERS_MAX:
                self._begun += character
            self._decoded += byte_size(character)

    def _pass(self) -> bytes:
        if self._found:
            self.question = self._found.popleft()
        end = self._decoded if self.question is None else self.question.end
        size = end - self._passed
        passing, self._waiting = self._waiting[:size], self._waiting[size:]
        self._passed = end
        return passing


def _readable(text: str) -> str:
    """Return *text* with a mark for what is no character."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
