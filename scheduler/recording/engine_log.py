"""A worker's log: the engine's events among its reports, and the library's lines on stderr."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...backends import InferdError, Model
from ...backends.errors import Cancelled
from ...backends.library_log import LEVELS, SYSLOG_PRIORITIES, library_log
from .. import messages as m
from ..task import Task

SILENT = 1 + max(LEVELS.values())
TEXT_CHARACTERS_MAX = 10_000
"""Bound on a logged prompt or answer."""
LINE_BYTES_MAX = 4096
"""PIPE_BUF of Linux: shorter lines of several threads do not mix."""
_STDERR = 2


class EngineLog:
    """Emits the events of tasks; none before `configure`. Owned by the engine's thread."""

    def __init__(self, model: Model, send: Callable[[m.LogEvent], None]):
        self._model, self._send = model, send
        self._levels: dict[str, int] = {}
        self._texts = False

    def configure(self, logging: m.Logging) -> None:
        """Set the levels, and whether texts are logged."""
        self._levels = {logger: LEVELS[level] for logger, level in logging.levels.items()}
        self._texts = logging.texts
        set_library_level(logging)

    def log_queued(self, task: Task) -> None:
        """Log a task that was queued."""
        if self._wants("debug"):
            self._emit(
                "task.queued",
                task,
                owner=task.spec.owner,
                priority=task.spec.priority.label,
                prompt_tokens=task.prompt_size,
                **self._text("prompt", task.prompt_and_answer[0]),
            )

    def log_started(self, task: Task) -> None:
        """Log a task that got a slot."""
        if self._wants("debug"):
            self._emit("task.started", task, slot=task.slot, cached_tokens=task.cached)

    def log_parked(self, task: Task) -> None:
        """Log a task that lost its slot."""
        if self._wants("debug"):
            self._emit("task.parked", task, output_tokens=task.generated)

    def log_finished(self, task: Task, stats: m.TurnStats) -> None:
        """Log a task that ended without error."""
        if self._wants("debug"):
            self._emit(
                "task.finished",
                task,
                stop_reason=stats.stop_reason,
                prompt_tokens=stats.prompt_tokens,
                cached_tokens=stats.cached_tokens,
                output_tokens=stats.output_tokens,
                queue_ms=round(stats.queue_ms, 1),
                ttft_ms=round(stats.ttft_ms, 1),
                predicted_ms=round(stats.predicted_ms, 1),
                **self._text("answer", task.prompt_and_answer[1]),
            )

    def log_failed(self, spec: m.TaskSpec, error: InferdError) -> None:
        """Log a task that failed, by the error's name, as its message may quote a text."""
        level = "debug" if isinstance(error, Cancelled) else "info"
        if self._wants(level):
            cause = {"cause": error.message} if self._texts else {}
            fields = {"task": spec.id, "request": spec.request, "error": error.name, **cause}
            self._send(m.LogEvent(level, "scheduler", "task.failed", fields))

    def log_step_failed(self, tasks: Sequence[Task], error: InferdError) -> None:
        """Log a step that the backend failed to compute."""
        if self._wants("error", "backends"):
            fields = {
                "tasks": [task.spec.id for task in tasks],
                "requests": [task.spec.request for task in tasks],
                "error": error.name,
                "cause": error.message,
            }
            self._send(m.LogEvent("error", "backends", "step.failed", fields))

    def _wants(self, level: str, logger: str = "scheduler") -> bool:
        return LEVELS[level] >= self._levels.get(logger, SILENT)

    def _emit(self, event: str, task: Task, **fields: Any) -> None:
        logged = {"task": task.spec.id, "request": task.spec.request, **fields}
        self._send(m.LogEvent("debug", "scheduler", event, logged))

    def _text(self, name: str, tokens: Iterable[int]) -> dict[str, str]:
        """Return a field with the beginning of the text of *tokens*, if texts are logged."""
        if not self._texts:
            return {}
        pieces, size = [], 0
        for token in tokens:
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


def log_library() -> None:
    """Write each line of the library to standard error, with its priority."""
    library_log.write_line = _to_stderr


def _to_stderr(level: str, text: str) -> None:
    line = f"<{SYSLOG_PRIORITIES[level]}>{' '.join(text.splitlines())}".encode()
    with contextlib.suppress(OSError):  # the daemon does not read now: no step waits for it
        os.write(_STDERR, line[: LINE_BYTES_MAX - 1] + b"\n")
