"""The deadlines of a task and the errors or endings that they cause: pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from ...backends.errors import InferdError, ReaderTimeout, Timeout
from ..settings import EngineSettings
from ..task import Task, TaskState


def deadlines(task: Task, settings: EngineSettings, *, others_wait: bool) -> Iterator[float]:
    """Yield the moments, in the engine's seconds, at which *task* needs attention."""
    spec = task.spec
    if spec.total_timeout_s:
        yield task.arrived_at + spec.total_timeout_s
    if spec.queue_timeout_s and task.started_at is None:
        yield task.arrived_at + spec.queue_timeout_s
    yield from (moment for moment, _ in _time_bounds(task))
    if task.unread_since is not None:
        yield task.unread_since + settings.reader_timeout_s
        if others_wait and task.state is TaskState.RUNNING:
            yield task.unread_since + settings.reader_lag_s


def expired_timeout(task: Task, settings: EngineSettings, now: float) -> InferdError | None:
    """Return the error of a timeout that has passed for *task*, if one has."""
    spec = task.spec
    if spec.total_timeout_s and now >= task.arrived_at + spec.total_timeout_s:
        text = f"the timeout of {spec.total_timeout_s:g} s has passed"
        return Timeout(text, data={"timeout": "total"})
    waits = task.started_at is None
    if waits and spec.queue_timeout_s and now >= task.arrived_at + spec.queue_timeout_s:
        text = f"the queue timeout of {spec.queue_timeout_s:g} s has passed"
        return Timeout(text, data={"timeout": "queue"})
    if task.unread_since is not None and now >= task.unread_since + settings.reader_timeout_s:
        return ReaderTimeout(f"nobody has read the stream for {settings.reader_timeout_s:g} s")
    return None


def expired_bound(task: Task, now: float) -> str | None:
    """Return the bound on its own time that ends *task* now; None while a sentence is judged."""
    if task.conditions is None or task.checking_since is not None:
        return None
    return next((bound for moment, bound in _time_bounds(task) if now >= moment), None)


def _time_bounds(task: Task) -> Iterator[tuple[float, str]]:
    """Yield when the bounds on its time since its first slot, parked or not, end a task."""
    if task.conditions is None or task.started_at is None:
        return
    stopping = task.spec.stopping
    if stopping.t_max_prompt_ms > 0 and task.prompt_done_at is None and not task.generated:
        moment = task.started_at + stopping.t_max_prompt_ms / 1000
        yield moment, f"t-max-prompt-ms {stopping.t_max_prompt_ms}"
    if stopping.timeout_base_ms >= 0:
        tokens = task.prompt_size + task.generated
        limit_ms = stopping.timeout_base_ms + stopping.timeout_token_ms * tokens
        if stopping.timeout_max_ms >= 0:
            limit_ms = min(limit_ms, stopping.timeout_max_ms)
        yield task.started_at + limit_ms / 1000, f"timeout {limit_ms:.0f} ms"
