"""Ends of sentences, and an answer's text that waits there until the sentence was compared."""

from __future__ import annotations

import codecs
from collections import deque
from typing import NamedTuple

from ....backends.texts.incremental_regex import byte_size
from .ending import StopReason

SENTENCE_CHARACTERS_MAX = 4096
"""Of a longer sentence only this many characters count, the first ones."""
_TERMINATORS = ".!?…"
_WIDE_TERMINATORS = "。！？｡"
_CLOSERS = "\"'”’»)]}」』）*_`"


class SentenceEnds:
    """A sentence ends at `.`, `!`, `?` or `…` behind a letter or digit, perhaps followed by closing
    quotes and brackets, and then white space; behind `。`, `！` and `？` at any other character.
    (These are the boundaries of Unicode's UAX #29, rules SB6 to SB11, as far as they need neither a
    dictionary nor later text. So there is one after `e.g. `.)
    """

    def __init__(self) -> None:
        self._worded = self._ended = self._wide = False

    def add_character(self, character: str) -> bool:
        """Add the next character; return whether a sentence has ended before it."""
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
    """Passes an answer's text up to the end of a sentence. However the tokens split it, later text
    waits until the sentence is compared: it is not released, and no other condition checks it.
    """

    reason = StopReason("similarity", cuts_text=True)

    def __init__(self) -> None:
        self.pending: Sentence | None = None
        """The sentence to be compared."""
        self._ends = SentenceEnds()
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._found: deque[Sentence] = deque()
        self._sentence = ""
        self._waiting = b""
        self._decoded = self._passed = 0
        """Bytes of the answer that were decoded, and that have passed."""

    def add_piece(self, piece: bytes) -> bytes:
        """Add the bytes of one token; return those that pass."""
        assert self.pending is None, "the pending sentence must be compared first"
        self._waiting += piece
        self._find_sentences(self._decoder.decode(piece))
        return self._pass()

    def pass_sentence(self) -> bytes:
        """Continue after the pending sentence; return the bytes that pass behind it."""
        self.pending = None
        return self._pass()

    def resume(self, sent: bytes, shown: int) -> bytes:
        """Restore an answer whose sentences before byte *shown* were compared. Return the bytes
        that pass.
        """
        self._waiting = sent
        self._find_sentences(self._decoder.decode(sent))
        while self._found and self._found[0].end < shown:
            self._found.popleft()
        return self._pass()

    def rest(self) -> bytes:
        """Return the incomplete character that ends the answer, unless a sentence is pending."""
        if self.pending is not None:
            return b""
        rest, self._waiting = self._waiting, b""
        return rest

    def _find_sentences(self, text: str) -> None:
        for character in text:
            if self._ends.add_character(character):
                self._found.append(Sentence(self._decoded, _readable(self._sentence)))
                self._sentence = ""
            begins = self._sentence or not character.isspace()
            if begins and len(self._sentence) < SENTENCE_CHARACTERS_MAX:
                self._sentence += character
            self._decoded += byte_size(character)

    def _pass(self) -> bytes:
        if self._found:
            self.pending = self._found.popleft()
        end = self._decoded if self.pending is None else self.pending.end
        size = end - self._passed
        passing, self._waiting = self._waiting[:size], self._waiting[size:]
        self._passed = end
        return passing


def _readable(text: str) -> str:
    """Return *text* with a mark for each invalid byte."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
