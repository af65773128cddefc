"""Changes of sessions that are on their way to copies, and the answers that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....ipc.messages import CopiedChange


class PendingChange:
    """A change until the copy has it, or the session goes on without."""

    def __init__(self, change: CopiedChange, home: str, deadline: float):
        self.change, self.home, self.deadline = change, home, deadline
        self.is_done = self.is_missed = False
        """Whether it is done, and whether that is without a copy."""
        self._listeners: list[Callable[[], object]] = []

    def call_when_done(self, listener: Callable[[], object]) -> None:
        """Call a listener once it is done, which it is not yet."""
        self._listeners.append(listener)

    def finish(self, *, is_missed: bool = False) -> None:
        """Note that it is done, or that no copy has it."""
        self.is_done, self.is_missed = True, is_missed
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


def call_after(changes: Iterable[PendingChange], listener: Callable[[], object]) -> bool:
    """Call a listener once all changes are done; return whether it has to wait. It is not called
    if they are done already.
    """
    waiting = {change for change in changes if not change.is_done}
    for change in tuple(waiting):

        def note_done(change: PendingChange = change) -> None:
            waiting.discard(change)
            if not waiting:
                listener()

        change.call_when_done(note_done)
    return bool(waiting)
