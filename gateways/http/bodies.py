"""The memory for long bodies of requests, those with images and sounds, and the thread that reads
them. All callers share both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import anyio

from ...backends.errors import Busy


@dataclass(slots=True, eq=False)
class _Wanted:
    """The memory that a request waits for, or has."""

    caller: str
    size: int
    granted: anyio.Event = field(default_factory=anyio.Event)


class BodyMemory:
    """At most *bytes_max* bytes of long bodies at once. Requests get memory in their order. A
    caller with a key has at most half of it, so that no caller's requests shut out another's. Lives
    on the event loop; all decisions are synchronous.
    """

    def __init__(self, bytes_max: int):
        self.thread = anyio.CapacityLimiter(1)
        """The thread for work on long bodies: two would compete with the event loop for the
        interpreter's lock, and would not be faster.
        """
        self._bytes_max = bytes_max
        self._held: Counter[str] = Counter()
        self._waiting: list[_Wanted] = []

    @property
    def held_bytes(self) -> int:
        """The bytes that requests have."""
        return self._held.total()

    async def take(self, caller: str, size: int, wait_s: float) -> None:
        """Take *size* bytes for a request, until `give_back`. Wait until they are free.

        :raises Busy: they did not become free in *wait_s*.
        """
        wanted = _Wanted(caller, min(size, self._bytes_max_of(caller)))
        self._waiting.append(wanted)
        self._grant()
        try:
            if not wanted.granted.is_set():
                with anyio.move_on_after(wait_s):
                    await wanted.granted.wait()
        except BaseException:
            self._withdraw(wanted)
            raise
        if not wanted.granted.is_set():
            self._withdraw(wanted)
            raise Busy(
                "the gateway has no memory for another long request now",
                data={"bound": "bodies-bytes-max", "bodies_bytes_max": self._bytes_max},
            )

    def give_back(self, caller: str, size: int) -> None:
        """Give back *size* bytes that `take` has taken."""
        self._held[caller] -= min(size, self._bytes_max_of(caller))
        if not self._held[caller]:
            del self._held[caller]
        self._grant()

    def shrink(self, caller: str, size: int, left: int) -> None:
        """Give back the part of *size* bytes that a request does not need for *left*."""
        most = self._bytes_max_of(caller)
        self._held[caller] -= min(size, most) - min(left, most)
        self._grant()

    def _withdraw(self, wanted: _Wanted) -> None:
        if wanted.granted.is_set():
            self.give_back(wanted.caller, wanted.size)
        else:
            self._waiting.remove(wanted)
            self._grant()

    def _grant(self) -> None:
        """Grant what is free in the order of requests. A caller that has its part is skipped; a
        request for which too little is free is not overtaken, so that it gets its memory too.
        """
        for wanted in [*self._waiting]:
            held = self._held[wanted.caller] + wanted.size
            if wanted.caller and held > self._bytes_max_of(wanted.caller):
                continue
            if self.held_bytes + wanted.size > self._bytes_max:
                return
            self._held[wanted.caller] = held
            self._waiting.remove(wanted)
            wanted.granted.set()

    def _bytes_max_of(self, caller: str) -> int:
        return self._bytes_max // 2 if caller else self._bytes_max
