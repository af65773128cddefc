"""Turns that no worker has: unread ones of an evicted model, and those of sessions without a place.

They continue once their clients read again, or their sessions have a place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from ...backends import ModelInfo
from ...backends.errors import Cancelled, InferdError, ReaderTimeout
from ...scheduler import messages as m
from ...sessions.worker_client import TaskReader


class EvictedTurns:
    """The `TaskClient` of turns that no worker has; a turn continues when its client reads again.
    Owned by the daemon's event loop.

    *move* loads the model and continues turns in its worker. *start* starts background work. A turn
    that is not read for *timeout_s* fails.
    """

    def __init__(
        self,
        move: Callable[[Mapping[int, TaskReader]], None],
        start: Callable[..., None],
        timeout_s: float,
    ):
        self._move, self._start, self._timeout_s = move, start, timeout_s
        self._readers: dict[int, TaskReader] = {}
        self._info: ModelInfo | None = None

    def __len__(self) -> int:
        return len(self._readers)

    def add_turns(self, readers: Mapping[int, TaskReader], info: ModelInfo) -> None:
        """Add turns that their worker no longer has; *info* describes its model."""
        self._info = info
        added = {number: r for number, r in readers.items() if r.continue_on(self) is not None}
        self._readers |= added
        if added:
            self._start(self._fail_unread, added)

    async def _fail_unread(self, added: Mapping[int, TaskReader]) -> None:
        await anyio.sleep(self._timeout_s)
        # Some may have been read since, whose sessions wait for a place.
        unread = {number: r for number, r in added.items() if r.unread_for(self._timeout_s)}
        self._fail(unread, ReaderTimeout(f"the stream was not read for {self._timeout_s:g} s"))

    def fail_swapped(self, model: str) -> None:
        """Fail all turns, because the next worker of *model* may have a different vocabulary."""
        error = Cancelled(
            f"the turn ended with its model: {model!r} was swapped",
            hint="send the next turn: the history is kept",
        )
        self._fail(dict(self._readers), error)

    def _fail(self, readers: Mapping[int, TaskReader], error: InferdError) -> None:
        for number, reader in readers.items():
            if self._readers.get(number) is reader:
                del self._readers[number]
                reader.report(m.Failed(number, error.to_wire()))

    # The methods of `TaskClient`.

    @property
    def info(self) -> ModelInfo:
        """Facts about the evicted model."""
        assert self._info is not None, "no turn was evicted"
        return self._info

    def submit(self, spec: m.TaskSpec, reader: TaskReader) -> None:
        """Start a turn in a worker."""
        self._move({spec.id: reader})

    def has_task(self, task_id: int, reader: TaskReader) -> bool:
        """Return whether a turn waits here for its reader."""
        return self._readers.get(task_id) is reader

    def withdraw_task(self, task_id: int) -> None:
        """Remove a turn."""
        del self._readers[task_id]

    def keep_turn(self, reader: TaskReader) -> None:
        """Add a turn whose session has no place."""
        self.add_turns({reader.spec.id: reader}, self.info)

    def send_command(self, command: m.Command) -> None:
        """Drop a cancelled turn. Continue a turn whose client reads again or requests a token.

        Other commands are ignored: a continued turn starts with its current parameters and requests
        the pending comparison of a sentence again.
        """
        if isinstance(command, m.Cancel | m.Credit | m.PullToken):
            reader = self._readers.pop(command.task_id, None)
            if reader is not None and not isinstance(command, m.Cancel):
                self._move({command.task_id: reader})
