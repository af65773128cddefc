"""From token pieces to text: whole characters only, nothing shown that a stop text might cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ("Released", "TextAssembler", "incomplete_utf8")


class Released(NamedTuple):
    """What a piece releases; `stop` names the stop text that was met, or is None."""

    text: bytes
    stop: str | None = None


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
    """Holds back what is undecided: half a character, or the beginning of a stop text.

    *stop* texts are cut from the output, *keep* texts (reverse prompts) stay in it. Text after
    a stop is never released, however the tokens split it.
    """

    def __init__(self, stop: Sequence[str] = (), keep: Sequence[str] = ()):
        self._stops = [(s.encode(), s, False) for s in stop] + [(s.encode(), s, True) for s in keep]
        self._held = b""
        self._stopped = False

    def with_stops(self, stop: Sequence[str], keep: Sequence[str]) -> TextAssembler:
        """Return an assembler with other stop texts that holds what this one holds."""
        other = TextAssembler(stop, keep)
        other._held, other._stopped = self._held, self._stopped
        return other

    def take_up(self, told: bytes, shown: int | None) -> None:
        """Go on after *told*, the text of the tokens so far, of which *shown* bytes were released;
        None: all that nothing here holds back.
        """
        if shown is None:
            shown = len(told) - self._hold(told)
        self._held = told[shown:]

    def feed(self, piece: bytes) -> Released:
        """Take the bytes of one token, return what can be shown now."""
        if self._stopped:
            return Released(b"")
        if not self._held and not self._stops and piece.isascii():
            return Released(piece)
        data = self._held + piece
        found = self._find(data)
        if found is not None:
            end, name = found
            self._stopped, self._held = True, b""
            return Released(data[:end], name)
        hold = self._hold(data)
        self._held = data[len(data) - hold :]
        return Released(data[: len(data) - hold])

    def flush(self) -> bytes:
        """Return what is still held back, at the end of the turn."""
        held, self._held = self._held, b""
        return held

    def _find(self, data: bytes) -> tuple[int, str] | None:
        """Return where the output ends and the stop text that ends it.

        It is the one that is complete first, then the longest: so it does not matter how the
        tokens split the text.
        """
        hits = [
            (at + len(stop), at, at + len(stop) if keep else at, name)
            for stop, name, keep in self._stops
            if (at := data.find(stop)) >= 0
        ]
        return min(hits)[2:] if hits else None

    def _hold(self, data: bytes) -> int:
        """Return how many bytes at the end of *data* cannot be shown yet."""
        return max(self._undecided(data), incomplete_utf8(data))

    def _undecided(self, data: bytes) -> int:
        """Return the length of the longest end of *data* with which a stop text begins."""
        return max((_overlap(data, stop) for stop, _, _ in self._stops), default=0)


def _overlap(data: bytes, stop: bytes) -> int:
    for size in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:size]):
            return size
    return 0
