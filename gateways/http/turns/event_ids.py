"""Ids of the events of a streamed turn, by which a reader continues after the part that it has."""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple, Self

from ....backends.errors import InvalidArgument

PARAM = "last-event-id"
_FORM = re.compile(
    r"(\d{1,10})\.(\d{1,10})\.([0-9a-f]{8})\.(\d{1,10})\.([0-9a-f]{8})\.(\d{1,4})(\.end)?",
    re.ASCII,
)


class EventId(NamedTuple):
    """The part of an answer that a reader has after an event: the number of the session's turn, the
    bytes of text and reasoning with their checksums, and the number of tool calls. An answer that
    was computed again may differ, which the checksums show.
    """

    turn: int
    text: int = 0
    text_crc: int = 0
    reasoning: int = 0
    reasoning_crc: int = 0
    calls: int = 0
    ended: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the id that a client has sent.

        :raises InvalidArgument: it is not an id of an event.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise InvalidArgument(
                f"{text[:100]!r} is not the id of an event of a turn",
                hint="read the answer from its start, without an id",
                data={"param": PARAM},
            )
        turn, size, crc, reasoning, reasoning_crc, calls, end = found.groups()
        return cls(
            int(turn),
            int(size),
            int(crc, 16),
            int(reasoning),
            int(reasoning_crc, 16),
            int(calls),
            bool(end),
        )

    def __str__(self) -> str:
        end = ".end" if self.ended else ""
        return (
            f"{self.turn}.{self.text}.{self.text_crc:08x}"
            f".{self.reasoning}.{self.reasoning_crc:08x}.{self.calls}{end}"
        )

    def after(self, text: bytes, reasoning: bytes = b"", calls: int = 0) -> Self:
        """Return the id after more of the answer."""
        return self._replace(
            text=self.text + len(text),
            text_crc=zlib.crc32(text, self.text_crc),
            reasoning=self.reasoning + len(reasoning),
            reasoning_crc=zlib.crc32(reasoning, self.reasoning_crc),
            calls=self.calls + calls,
        )

    @property
    def line(self) -> bytes:
        """The line of an event with this id."""
        return b"id: %s\n" % str(self).encode()


def other_turn(after: EventId, turn: int) -> InvalidArgument:
    """Return the error for an id of another turn than the session's last one."""
    return InvalidArgument(
        f"the id belongs to turn {after.turn} of the session, whose last turn is {turn}",
        hint="read the session, or the last answer from its start, without an id",
        data={"param": PARAM, "turn": turn},
    )


def other_answer() -> InvalidArgument:
    """Return the error for an id after which the stored answer does not continue."""
    return InvalidArgument(
        "the answer differs from the part that was read",
        hint="read the answer from its start, without an id",
        data={"param": PARAM},
    )
