"""Turns that nobody reads, whose model has left for another: they go on once they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from ...backends import ModelInfo
from ...backends.errors import Cancelled, InferdError, ReaderTimeout
from ...scheduler import messages as m
from ...sessions.worker_client import TaskReader

__all__ = ("Aside",)


class Aside:
    """The line of turns without a worker: a `sessions.Line` that waits for what readers do.

    *move* lets turns go on in a worker, loading the model; *start* does work in the background.
    A turn that is not read for *timeout_s* fails.
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

    def take(self, readers: Mapping[int, TaskReader], info: ModelInfo) -> None:
        """Take the turns of a worker that leaves, with *info* on its model."""
        self._info = info
        taken = {number: r for number, r in readers.items() if r.go_on(self) is not None}
        self._readers |= taken
        if taken:
            self._start(self._give_up, taken)

    async def _give_up(self, taken: Mapping[int, TaskReader]) -> None:
        await anyio.sleep(self._timeout_s)
        self._fail(taken, ReaderTimeout(f"nobody has read the stream for {self._timeout_s:g} s"))

    def swapped(self, model: str) -> None:
        """Let all turns end: the next worker of *model* may have other tokens."""
        error = Cancelled(
            f"the turn ended with its model: {model!r} was swapped",
            hint="go on with the next turn: the history is there",
        )
        self._fail(dict(self._readers), error)

    def _fail(self, readers: Mapping[int, TaskReader], error: InferdError) -> None:
        for number, reader in readers.items():
            if self._readers.get(number) is reader:
                del self._readers[number]
                reader.report(m.Failed(number, error.to_wire()))

    def _go_on(self, task_id: int) -> None:
        reader = self._readers.pop(task_id, None)
        if reader is not None:
            self._move({task_id: reader})

    # The line.

    @property
    def info(self) -> ModelInfo:
        """Facts about the model that has left."""
        assert self._info is not None, "no turn was set aside"
        return self._info

    def submit(self, spec: m.TaskSpec, reader: TaskReader) -> None:
        """Let a turn begin in a worker."""
        self._move({spec.id: reader})

    def cancel(self, task_id: int) -> None:
        """Forget a turn."""
        self._readers.pop(task_id, None)

    def credit(self, task_id: int, events: int) -> None:
        """Let a turn go on: its reader is back."""
        self._go_on(task_id)

    def pull(self, task_id: int) -> None:
        """Let a turn go on: its next token is asked for."""
        self._go_on(task_id)

    def adjust(self, command: m.Adjust) -> None:
        """Do nothing: the turn knows its parameters when it goes on."""

    def judge(self, verdict: m.Verdict) -> None:
        """Do nothing: the turn asks again when it goes on."""
