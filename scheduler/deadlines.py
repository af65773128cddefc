"""When a task's time is up, and what it then fails with: pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from ..backends.errors import InferdError, ReaderTimeout, Timeout
from .plan import Limits
from .task import Task, TaskState

__all__ = ("deadlines", "timeout")


def deadlines(task: Task, limits: Limits, *, others_wait: bool) -> Iterator[float]:
    """Yield the moments, in the engine's seconds, at which something is to be done for *task*."""
    spec = task.spec
    if spec.total_timeout_s:
        yield task.now + spec.total_timeout_s
    if spec.queue_timeout_s and task.admitted_at is None:
        yield task.now + spec.queue_timeout_s
    if task.unread_since is not None:
        yield task.unread_since + limits.reader_timeout_s
        if others_wait and task.state is TaskState.RUNNING:
            yield task.unread_since + limits.reader_wait_s


def timeout(task: Task, limits: Limits, now: float) -> InferdError | None:
    """Return the timeout that has passed for *task*, if one has."""
    spec = task.spec
    if spec.total_timeout_s and now >= task.now + spec.total_timeout_s:
        text = f"the timeout of {spec.total_timeout_s:g} s has passed"
        return Timeout(text, data={"timeout": "total"})
    waits = task.admitted_at is None
    if waits and spec.queue_timeout_s and now >= task.now + spec.queue_timeout_s:
        text = f"the queue timeout of {spec.queue_timeout_s:g} s has passed"
        return Timeout(text, data={"timeout": "queue"})
    if task.unread_since is not None and now >= task.unread_since + limits.reader_timeout_s:
        return ReaderTimeout(f"nobody has read the stream for {limits.reader_timeout_s:g} s")
    return None
