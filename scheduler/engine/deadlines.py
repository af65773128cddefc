"""The deadlines of a task, and the errors or endings that they cause: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...backends.errors import InferdError, ReaderTimeout, Timeout
from ..output.stopping.ending import TIME, Ending
from ..settings import EngineSettings
from ..task import Task, TaskState


def deadlines(task: Task, settings: EngineSettings, *, others_wait: bool) -> Iterator[float]:
    """Yield the moments, in the engine's seconds, at which *task* needs attention."""
    yield from (moment for moment, _, _ in _time_bounds(task, settings))
    if task.unread_since is not None and others_wait and task.state is TaskState.RUNNING:
        yield task.unread_since + settings.reader_lag_s


def expired_bound(task: Task, settings: EngineSettings, now: float) -> InferdError | Ending | None:
    """Return the error or the ending of a time bound that *task* has reached. The bounds on its own
    time end a task only after its last sentence was compared.
    """
    for moment, bound, described in _time_bounds(task, settings):
        if now >= moment:
            text = described()
            if bound == "reader":
                return ReaderTimeout(text)
            if bound in ("total", "queue"):
                return Timeout(text, data={"timeout": bound})
            if task.comparing_since is None:
                return Ending(TIME, text)
    return None


def _time_bounds(
    task: Task, settings: EngineSettings
) -> Iterator[tuple[float, str, Callable[[], str]]]:
    """Yield the time bounds of *task*: the moment at which the bound ends the task, its name, and
    a function that returns the error's message or the ending's detail.
    """
    spec, stopping, started = task.spec, task.spec.stopping, task.started_at
    if spec.total_timeout_s:
        moment = task.arrived_at + spec.total_timeout_s
        yield moment, "total", lambda: f"the timeout of {spec.total_timeout_s:g} s has passed"
    if spec.queue_timeout_s and started is None:
        moment = task.arrived_at + spec.queue_timeout_s
        yield moment, "queue", lambda: f"the queue timeout of {spec.queue_timeout_s:g} s has passed"
    if task.unread_since is not None:
        seconds = settings.reader_timeout_s
        moment = task.unread_since + seconds
        yield moment, "reader", lambda: f"the stream was not read for {seconds:g} s"
    if task.conditions is None or started is None:
        return
    # Bounds on its own time, which counts from its first slot, parked or not.
    if stopping.t_max_prompt_ms > 0 and task.prompt_done_at is None and not task.generated:
        moment = started + stopping.t_max_prompt_ms / 1000
        yield moment, "prompt", lambda: f"t-max-prompt-ms {stopping.t_max_prompt_ms}"
    if stopping.timeout_base_ms >= 0:
        tokens = task.prompt_size + task.generated
        limit_ms = stopping.timeout_base_ms + stopping.timeout_token_ms * tokens
        if stopping.timeout_max_ms >= 0:
            limit_ms = min(limit_ms, stopping.timeout_max_ms)
        yield started + limit_ms / 1000, "turn", lambda: f"timeout {limit_ms:.0f} ms"
