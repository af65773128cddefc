"""Tasks in whose steps workers have died, and their trials."""

from __future__ import annotations

from collections.abc import Callable

from ....scheduler import messages as m
from ....sessions.worker_client import TaskClient, TaskReader

TRIAL_GROWTH, TRIAL_TOKENS_MAX = 4, 256
"""Each trial is longer than the previous one, as an input may crash the worker only at times."""


class Suspect:
    """A task in whose steps workers have died."""

    def __init__(self) -> None:
        self.deaths = 0
        """Deaths since it last passed a trial."""
        self.trial_tokens = 1
        """Tokens that it is to sample alone in the next trial."""
        self._left = 0

    @property
    def on_trial(self) -> bool:
        """Whether it is to be computed alone."""
        return self.deaths > 0

    def note_death(self) -> None:
        """Note another death; a new trial begins, unless one is under way."""
        self.deaths += 1
        if self._left == 0:
            self._left = self.trial_tokens
            self.trial_tokens = min(self.trial_tokens * TRIAL_GROWTH, TRIAL_TOKENS_MAX)

    @property
    def tokens_left(self) -> int:
        """The tokens of the present trial that are left."""
        return self._left

    def note_tokens(self, count: int) -> None:
        """Note sampled tokens; the last one of the trial clears the task."""
        self._left = max(0, self._left - count)
        if self._left == 0:
            self.deaths = 0


class SuspectReader:
    """A suspect's reader, which counts the task's tokens. *ended* gets the task's id at its end."""

    begun = True

    def __init__(self, reader: TaskReader, suspect: Suspect, ended: Callable[[int], object]):
        self.reader, self.spec = reader, reader.spec
        self._suspect, self._ended = suspect, ended

    def report(self, report: m.Report) -> None:
        """Pass a report on; see `TaskReader.report`."""
        self.reader.report(report)
        if isinstance(report, m.Tokens):
            self._suspect.note_tokens(len(report.tokens))
        elif isinstance(report, m.Finished | m.Failed):
            self._ended(self.spec.id)

    def continue_on(self, client: TaskClient) -> m.TaskSpec | None:
        """Continue in another worker; see `TaskReader.continue_on`."""
        return self.reader.continue_on(client)

    def unread_for(self, seconds: float) -> bool:
        """Return whether nobody has read its output; see `TaskReader.unread_for`."""
        return self.reader.unread_for(seconds)
