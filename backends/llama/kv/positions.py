"""Positions in the slots of a model with M-RoPE, where an image takes fewer than it has entries.

Callers count the entries of histories. llama.cpp counts positions: the tokens behind an image of 12
entries in 3 rows and 4 columns continue 4 positions behind its first one. All cells of such an
image have one position in llama.cpp's memory, that of its first entry.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_COUNT = struct.Struct("<i")
_SPAN = struct.Struct("<5i")


class Span(NamedTuple):
    """The entries of one item in a slot: *done* of *size* so far, behind *begin* others. The item
    takes *positions*, and the cell of its last entry so far is *last* behind that of the first.
    """

    begin: int
    done: int
    size: int
    positions: int
    last: int

    @property
    def end(self) -> int:
        """The number of entries up to its last one so far."""
        return self.begin + self.done


class SlotPositions:
    """The items of one slot, in their order. Of the last one, a part may be missing."""

    def __init__(self, spans: Sequence[Span] = ()):
        self._spans = list(spans)

    def after(self, length: int) -> int:
        """Return the position of an entry with *length* others before it. That of an entry inside
        an item is the item's first one.
        """
        saved = 0
        for span in self._spans:
            if span.begin >= length:
                break
            if length < span.begin + span.size:
                return span.begin - saved
            saved += span.size - span.positions
        return length - saved

    def last_cell(self, length: int) -> int:
        """Return the position of the cell of the last one of *length* entries; −1 for none."""
        for span in self._spans:
            if span.begin < length <= span.end:
                return self.after(span.begin) + span.last
        return self.after(length) - 1

    def least_length(self, position: int) -> int:
        """Return the least number of entries whose next one is at *position* or behind it."""
        length = position
        for span in self._spans:
            if self.after(span.begin) >= position:
                break
            length = max(span.end, position + span.end - self.after(span.end))
        return length

    def is_border(self, length: int) -> bool:
        """Return whether no item continues behind the first *length* entries."""
        return not any(s.begin < length < s.begin + s.size for s in self._spans)

    def next_offset(self, length: int) -> int:
        """Return how many entries an item has that is not complete after *length* entries."""
        if self._spans and self._spans[-1].begin < length == self._spans[-1].end:
            span = self._spans[-1]
            return span.done if span.done < span.size else 0
        return 0

    def add(self, span: Span) -> None:
        """Add an item, or the next entries of the last one."""
        if span.done > 0 and self._spans and self._spans[-1].begin == span.begin:
            self._spans.pop()
        self._spans.append(span)

    def cut(self, length: int) -> None:
        """Drop the items behind the first *length* entries."""
        while self._spans and self._spans[-1].begin >= length:
            self._spans.pop()

    def pack(self) -> bytes:
        """Return the items for `unpack`."""
        return _COUNT.pack(len(self._spans)) + b"".join(_SPAN.pack(*s) for s in self._spans)

    @classmethod
    def unpack(cls, data: bytes, offset: int, length: int) -> tuple[SlotPositions, int] | None:
        """Return the items of a slot of *length* entries, and the place behind them in *data*;
        None if they are damaged.
        """
        if len(data) < offset + _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(data, offset)
        begin, end = offset + _COUNT.size, offset + _COUNT.size + count * _SPAN.size
        if not 0 <= count <= length or end > len(data):
            return None
        spans = [Span(*fields) for fields in _SPAN.iter_unpack(data[begin:end])]
        before = 0
        for span in spans:
            whole = span.done == span.size or (span is spans[-1] and span.end == length)
            if not (
                before <= span.begin < span.end <= length
                and whole
                and span.done <= span.size
                and 0 < span.positions <= span.size
                and 0 <= span.last < span.positions
            ):
                return None
            before = span.end
        return cls(spans), end
