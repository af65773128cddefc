"""Text of a turn from token pieces: whole characters only, without text that a stop may cut."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from .stopping import STOP_TEXT, Ending, Sentence, Sentences, Stop, TextConditions


class Released(NamedTuple):
    """The text that a piece releases, and the ending that it meets, if any."""

    text: bytes
    ending: Ending | None = None


def incomplete_utf8(data: bytes) -> int:
    """Return how many bytes at the end of *data* begin an incomplete character.

    Bytes that can never become a character count as text.
    """
    end = data[-3:]
    return len(end) - codecs.utf_8_decode(end, "replace")[1]


class TextAssembler:
    """Withholds undecided text, which is a part of a character or the beginning of a possible stop.

    *stop* texts are cut from the output, *keep* texts (reverse prompts) stay in it. *conditions*
    are the other conditions on the text. With *sentences*, each sentence that has ended is in
    `pending_sentence` until `stop_at_sentence` or `continue_text`. Text after a stop is never
    released, however the tokens split it.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        keep: Sequence[str] = (),
        conditions: TextConditions | None = None,
        sentences: Sentences | None = None,
    ):
        self._stops = [(s.encode(), s, False) for s in stop] + [(s.encode(), s, True) for s in keep]
        self._conditions = conditions
        self._sentences = sentences
        self._plain = not self._stops and conditions is None
        self._held = b""
        self._stopped = False

    def with_stops(self, stop: Sequence[str], keep: Sequence[str]) -> TextAssembler:
        """Return an assembler with other stop texts and the same withheld text."""
        other = TextAssembler(stop, keep, self._conditions, self._sentences)
        other._held, other._stopped = self._held, self._stopped
        return other

    @property
    def pending_sentence(self) -> Sentence | None:
        """The sentence to be compared. Text behind it is checked only after that."""
        return None if self._sentences is None or self._stopped else self._sentences.pending

    def stop_at_sentence(self) -> None:
        """End the text with the pending sentence."""
        self._stopped = True

    def continue_text(self) -> Released:
        """Check the text behind the pending sentence. The next piece releases what can be shown."""
        assert self._sentences is not None
        released = self._add_text(self._sentences.pass_sentence())
        self._held = released.text + self._held
        return released._replace(text=b"")

    def resume(self, sent: bytes, shown: int) -> Released:
        """Continue a turn after *sent*, the text of its tokens so far, of which *shown* bytes were
        released. Return the ending, if the turn has met one that was not reported.
        """
        self._held = b""
        if self._sentences is not None:
            sent = self._sentences.resume(sent, shown)
        stop = None if self._conditions is None else self._conditions.check_piece(sent)
        held = sent[shown:]
        found = _earliest(self._find(held), stop, shown)
        self._held = held if found is None else held[: max(0, found.end)]
        self._stopped = found is not None
        return Released(b"") if found is None else Released(b"", Ending(found.reason, found.detail))

    def add_piece(self, piece: bytes) -> Released:
        """Add the bytes of one token; return the text that can be shown now."""
        if self._stopped:
            return Released(b"")
        return self._add_text(
            piece if self._sentences is None else self._sentences.add_piece(piece)
        )

    def _add_text(self, piece: bytes) -> Released:
        if self._plain and not self._held and piece.isascii():
            return Released(piece)
        data, conditions = self._held + piece, self._conditions
        begin = 0 if conditions is None else conditions.size - len(self._held)
        stop = None if conditions is None else conditions.check_piece(piece)
        found = _earliest(self._find(data), stop, begin)
        if found is not None:
            self._stopped, self._held = True, b""
            return Released(data[: _boundary(data, found.end)], Ending(found.reason, found.detail))
        partial = max((_overlap(data, text) for text, _, _ in self._stops), default=0)
        size = len(data) - max(partial, incomplete_utf8(data))
        if conditions is not None:
            size = min(size, _boundary(data, conditions.undecided - begin))
        self._held = data[size:]
        return Released(data[:size])

    def flush(self) -> bytes:
        """Return the withheld text, at the end of the turn."""
        held, self._held = self._held, b""
        if self._sentences is not None and not self._stopped:
            held += self._sentences.rest()
        return held

    def _find(self, data: bytes) -> Stop | None:
        """Return the stop text in *data* that ends the output, if there is one.

        Of several it is the one that is complete first, and of those complete at the same byte the
        longest. So the result does not depend on the split into tokens.
        """
        hits = [
            (at + len(stop), at, at + len(stop) if keep else at, name)
            for stop, name, keep in self._stops
            if (at := data.find(stop)) >= 0
        ]
        if not hits:
            return None
        met, _, end, name = min(hits)
        return Stop(met, end, STOP_TEXT, name)


def _earliest(text: Stop | None, other: Stop | None, begin: int) -> Stop | None:
    """Return the stop that was met first, with its places in the data that begins at the byte
    *begin* of the answer; those of *other* are places in the answer.
    """
    if other is None:
        return text
    other = other._replace(met=other.met - begin, end=other.end - begin)
    return other if text is None else min(text, other)


def _boundary(data: bytes, place: int) -> int:
    """Return *place*, or the end of the character that it splits."""
    while 0 < place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place


def _overlap(data: bytes, stop: bytes) -> int:
    """Return the length of the longest end of *data* with which *stop* begins."""
    for size in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:size]):
            return size
    return 0
