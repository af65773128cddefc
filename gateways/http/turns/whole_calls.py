"""Tool calls of a streamed answer, each as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence

from ....ipc.client import ToolCall, ToolCallPart


class WholeCalls:
    """Puts the parts of tool calls together.

    A part can say that its call is not one after all, which APIs cannot take back once it is sent.
    A call is certain when the next one begins, or the answer ends.
    """

    def __init__(self) -> None:
        self._open: tuple[int, ToolCall] | None = None
        self.calls = 0
        """The number of calls that were returned."""

    def add_parts(self, parts: Sequence[ToolCallPart]) -> list[ToolCall]:
        """Add the next parts, and return the calls that are certain now."""
        certain = []
        for part in parts:
            if self._open is None or self._open[0] != part.index:
                certain += self.finish()
                self._open = part.index, ToolCall(part.id, part.name, "")
            index, call = self._open
            self._open = index, call._replace(arguments=call.arguments + part.arguments)
            if part.dropped:
                self._open = None
        return certain

    def finish(self) -> list[ToolCall]:
        """Return the call whose end was awaited, if any."""
        certain = [] if self._open is None else [self._open[1]]
        self._open = None
        self.calls += len(certain)
        return certain
