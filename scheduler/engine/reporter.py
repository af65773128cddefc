"""A worker's reports, with its log events among them, and the library's log lines on stderr."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Literal

from ...backends import InferdError, LanguageModel
from ...backends.errors import Cancelled
from ...backends.library import LEVELS, SYSLOG_PRIORITIES, library_log
from .. import messages as m
from ..stopping import Ending
from ..task import Task

SILENT = 1 + max(LEVELS.values())
TEXT_CHARACTERS_MAX = 10_000
"""Bound on a logged prompt or answer."""
LINE_BYTES_MAX = 4096
"""PIPE_BUF of Linux. Lines of several threads do not mix if they are no longer."""
_STDERR = 2


class Reporter:
    """Collects reports and log events in their order until the engine sends them. Owned by the
    engine. It logs nothing before `configure_log`.
    """

    def __init__(self, model: LanguageModel):
        self._model = model
        self._outbox: list[m.Report] = []
        self._levels: dict[str, int] = {}
        self._texts = False

    def send(self, *reports: m.Report) -> None:
        """Add reports."""
        self._outbox.extend(reports)

    def take_reports(self) -> list[m.Report]:
        """Return the reports since the last call."""
        reports, self._outbox = self._outbox, []
        return reports

    def report_started(self, task: Task) -> None:
        """Report a task that got a slot."""
        self._report_state(task)
        self._log_task("task.started", task, slot=task.slot, cached_tokens=task.cached)

    def _report_state(self, task: Task) -> None:
        started_at = task.started_at or 0.0
        self.send(m.StateChanged(task.spec.id, task.state.value, task.cached, started_at))

    def report_prompt(self, task: Task, now: float) -> None:
        """Report the progress of a task's prompt, if that was requested and it has not ended."""
        if not task.spec.watch_prompt or task.started_at is None or task.generated:
            return
        processed = min(task.computed + task.dropped, task.prompt_size)
        ms = 1000 * (now - task.started_at)
        counts = task.prompt_size, task.cached, processed
        self.send(m.PromptProgress(task.spec.id, *counts, ms))

    def report_parked(self, task: Task) -> None:
        """Report a task that lost its slot."""
        self._report_state(task)
        self._log_task("task.parked", task, output_tokens=task.generated)

    def report_finished(self, task: Task, ending: Ending, now: float) -> m.TurnStats:
        """Report that a task has ended without error; return its statistics."""
        stats = task.stats(ending.reason, ending.detail, now)
        self._log_task(
            "task.finished",
            task,
            stop_reason=stats.stop_reason,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            output_tokens=stats.output_tokens,
            queue_ms=round(stats.queue_ms, 1),
            ttft_ms=round(stats.ttft_ms, 1),
            predicted_ms=round(stats.predicted_ms, 1),
            **self._text(task, "answer"),
        )
        text, end = task.text.flush(), task.end_logprobs
        self.send(m.Finished(task.spec.id, text, ending.piece, stats, end))
        return stats

    def report_failed(self, spec: m.TaskSpec, error: InferdError) -> None:
        """Report that a task has failed. Unless texts are logged, the log gets only the error's
        name, because the error's message may quote a text.
        """
        level = "debug" if isinstance(error, Cancelled) else "info"
        fields = {"task": spec.id, "request": spec.request, "error": error.name}
        if self._texts:
            fields["cause"] = error.message
        self._log(level, "scheduler", "task.failed", fields)
        self.send(m.Failed(spec.id, error.to_wire()))

    # The log.

    def configure_log(self, logging: m.Logging) -> None:
        """Set the levels, and whether texts are logged."""
        self._levels = {logger: LEVELS[level] for logger, level in logging.levels.items()}
        self._texts = logging.texts
        set_library_level(logging)

    def log_queued(self, task: Task) -> None:
        """Log a task that was queued."""
        self._log_task(
            "task.queued",
            task,
            uid=task.spec.owner.user,
            **({"label": task.spec.owner.label} if task.spec.owner.label else {}),
            priority=task.spec.priority.label,
            prompt_tokens=task.prompt_size,
            **self._text(task, "prompt"),
        )

    def log_step_failed(self, tasks: Sequence[Task], error: InferdError) -> None:
        """Log a step that the backend failed to compute."""
        fields = {
            "tasks": [task.spec.id for task in tasks],
            "requests": [task.spec.request for task in tasks],
            "error": error.name,
            "cause": error.message,
        }
        self._log("error", "backends", "step.failed", fields)

    def log_drafting_failed(self, tasks: Sequence[Task], error: InferdError) -> None:
        """Log that the draft model or the NextN layers failed, and are no longer used."""
        fields = {
            "tasks": [task.spec.id for task in tasks],
            "requests": [task.spec.request for task in tasks],
            "cause": error.message,
        }
        self._log("error", "backends", "draft_model.failed", fields)

    def log_compilation_failed(self, task: Task, error: InferdError) -> None:
        """Log that a grammar could not be compiled for a reason other than the grammar itself."""
        fields = {"task": task.spec.id, "request": task.spec.request}
        fields |= {"error": error.name, "cause": error.message}
        self._log("error", "backends", "grammar.failed", fields)

    def _logs(self, level: str, logger: str) -> bool:
        return LEVELS[level] >= self._levels.get(logger, SILENT)

    def _log(self, level: str, logger: str, event: str, fields: dict[str, Any]) -> None:
        if self._logs(level, logger):
            self.send(m.LogEvent(level, logger, event, fields))

    def _log_task(self, event: str, task: Task, **fields: Any) -> None:
        logged = {"task": task.spec.id, "request": task.spec.request, **fields}
        self._log("debug", "scheduler", event, logged)

    def _text(self, task: Task, name: Literal["prompt", "answer"]) -> dict[str, str]:
        """Return a field with the beginning of the task's prompt or answer, if texts are logged."""
        if not self._texts or not self._logs("debug", "scheduler"):
            return {}
        prompt, answer = task.prompt_and_answer
        pieces, size = [], 0
        for token in prompt if name == "prompt" else answer:
            pieces.append(self._model.piece(token))
            size += len(pieces[-1])
            if size >= TEXT_CHARACTERS_MAX:
                break
        text = b"".join(pieces).decode("utf-8", "replace")
        return {name: text[:TEXT_CHARACTERS_MAX]}


def set_library_level(logging: m.Logging) -> None:
    """Set the level from which on the library logs lines."""
    level = logging.levels.get("llama")
    library_log.least = LEVELS[level] if level is not None else SILENT


def write_library_line(level: str, text: str) -> None:
    """Write a line of the library to standard error, with its priority."""
    line = f"<{SYSLOG_PRIORITIES[level]}>{' '.join(text.splitlines())}".encode()
    with contextlib.suppress(OSError):  # if the daemon does not read now, no step waits for it
        os.write(_STDERR, line[: LINE_BYTES_MAX - 1] + b"\n")
