"""Tool calls of a streamed answer, each as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence

from ....ipc.client import ToolCall, ToolCallPart


class WholeCalls:
    """The tool calls of an answer, put together from their parts.

    A part can report that its call is not a tool call after all, and APIs cannot take back a call
    that was sent. A call is certain when the next one begins, or the answer ends.
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
        """End the answer: return the last call, if it was not returned or dropped."""
        certain = [] if self._open is None else [self._open[1]]
        self._open = None
        self.calls += len(certain)
        return certain
