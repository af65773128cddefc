"""Changes of sessions that are on their way to copies, and the answers that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....ipc.messages import CopiedChange


class PendingChange:
    """A change until the copy has it, or the session goes on without a copy."""

    def __init__(self, change: CopiedChange, home: str, deadline: float):
        self.change, self.home, self.deadline = change, home, deadline
        self.is_done = self.is_missed = False
        """Whether the change is done, and whether it ended without a copy."""
        self._listeners: list[Callable[[], object]] = []

    def call_when_done(self, listener: Callable[[], object]) -> None:
        """Call *listener* when the change is done; it must not be done yet."""
        self._listeners.append(listener)

    def finish(self, *, is_missed: bool = False) -> None:
        """Note that the change is done; with *is_missed*, no copy has it."""
        self.is_done, self.is_missed = True, is_missed
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


def call_after(changes: Iterable[PendingChange], listener: Callable[[], object]) -> bool:
    """Call *listener* once all changes are done, and return whether it has to wait. If all are done
    already, it is not called.
    """
    waiting = {change for change in changes if not change.is_done}
    for change in tuple(waiting):

        def note_done(change: PendingChange = change) -> None:
            waiting.discard(change)
            if not waiting:
                listener()

        change.call_when_done(note_done)
    return bool(waiting)
