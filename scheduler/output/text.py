"""From token pieces to text: whole characters only, nothing shown that a stop might cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .stopping import Ending, Stop, TextConditions
from .stopping.ending import STOP_TEXT
from .stopping.sentences import Sentence, Sentences


class Released(NamedTuple):
    """The text that a piece releases, and the end that it meets, if it does."""

    text: bytes
    ending: Ending | None = None


def incomplete_utf8(data: bytes) -> int:
    """Return how many bytes at the end of *data* begin a character that is not complete.

    Bytes that can never become a character count as text: they are let through.
    """
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 2 if 0xC2 <= byte < 0xE0 else 3 if byte & 0xF0 == 0xE0 else 4
        return back if 0xC2 <= byte < 0xF5 and back < need else 0
    return 0


class TextAssembler:
    """Holds back what is undecided: half a character, or the beginning of what a stop may cut.

    *stop* texts are cut from the output, *keep* texts (reverse prompts) stay in it; *watch* has
    the other conditions on the text; with *sentences* each of these is in `question` once it has
    ended, until `stop` or `go_on`. Text after a stop is never released, however the tokens split
    it.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        keep: Sequence[str] = (),
        watch: TextConditions | None = None,
        sentences: Sentences | None = None,
    ):
        self._stops = [(s.encode(), s, False) for s in stop] + [(s.encode(), s, True) for s in keep]
        self._watch = watch
        self._sentences = sentences
        self._plain = not self._stops and watch is None
        self._held = b""
        self._stopped = False

    def with_stops(self, stop: Sequence[str], keep: Sequence[str]) -> TextAssembler:
        """Return an assembler with other stop texts that holds what this one holds."""
        other = TextAssembler(stop, keep, self._watch, self._sentences)
        other._held, other._stopped = self._held, self._stopped
        return other

    @property
    def question(self) -> Sentence | None:
        """The sentence that may end the text: nothing behind it is looked at before."""
        return None if self._sentences is None or self._stopped else self._sentences.question

    def stop(self) -> None:
        """Let the text end with the sentence in question."""
        self._stopped = True

    def go_on(self) -> Released:
        """Look at what follows the sentence in question. What can be shown of it comes with the
        next piece.
        """
        assert self._sentences is not None
        released = self._feed(self._sentences.go_on())
        self._held = released.text + self._held
        return released._replace(text=b"")

    def resume(self, sent: bytes, shown: int) -> Released:
        """Go on after *sent*, the text of the tokens so far, of which *shown* bytes were released.

        Where the turn had met its end, and only that was not sent, it is sent again.
        """
        self._held = b""
        if self._sentences is not None:
            sent = self._sentences.resume(sent, shown)
        stop = None if self._watch is None else self._watch.feed(sent)
        held = sent[shown:]
        found = _earliest(self._find(held), stop, shown)
        self._held = held if found is None else held[: max(0, found.end)]
        self._stopped = found is not None
        return Released(b"") if found is None else Released(b"", Ending(found.reason, found.detail))

    def feed(self, piece: bytes) -> Released:
        """Take the bytes of one token, return what can be shown now."""
        if self._stopped:
            return Released(b"")
        return self._feed(piece if self._sentences is None else self._sentences.feed(piece))

    def _feed(self, piece: bytes) -> Released:
        if self._plain and not self._held and piece.isascii():
            return Released(piece)
        data, watch = self._held + piece, self._watch
        begin = 0 if watch is None else watch.size - len(self._held)
        stop = None if watch is None else watch.feed(piece)
        found = _earliest(self._find(data), stop, begin)
        if found is not None:
            self._stopped, self._held = True, b""
            return Released(data[: _boundary(data, found.end)], Ending(found.reason, found.detail))
        size = len(data) - self._hold(data)
        if watch is not None:
            size = min(size, _boundary(data, watch.undecided - begin))
        self._held = data[size:]
        return Released(data[:size])

    def flush(self) -> bytes:
        """Return what is still held back, at the end of the turn."""
        held, self._held = self._held, b""
        if self._sentences is not None and not self._stopped:
            held += self._sentences.rest()
        return held

    def _find(self, data: bytes) -> Stop | None:
        """Return the stop text that ends the output, and where in *data* that ends.

        It is the one that is complete first, then the longest: so it does not matter how the
        tokens split the text.
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

    def _hold(self, data: bytes) -> int:
        """Return how many bytes at the end of *data* cannot be shown yet."""
        return max(self._undecided(data), incomplete_utf8(data))

    def _undecided(self, data: bytes) -> int:
        """Return the length of the longest end of *data* with which a stop text begins."""
        return max((_overlap(data, stop) for stop, _, _ in self._stops), default=0)


def _earliest(text: Stop | None, watched: Stop | None, begin: int) -> Stop | None:
    """Return the stop that was met first, its places counted from the byte *begin*, as those of
    *text* are.
    """
    if watched is None:
        return text
    watched = watched._replace(met=watched.met - begin, end=watched.end - begin)
    return watched if text is None else min(text, watched)


def _boundary(data: bytes, place: int) -> int:
    """Return *place*, or where the character ends in whose middle that is."""
    while 0 < place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place


def _overlap(data: bytes, stop: bytes) -> int:
    for size in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:size]):
            return size
    return 0
