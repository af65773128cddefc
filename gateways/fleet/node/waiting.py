"""Waits for the end of processes that are not children, by their descriptors."""

from __future__ import annotations

import select


def has_ended_within(process: int, seconds: float | None, *others: int) -> bool:
    """Wait until the process of the descriptor *process* (pidfd) has ended, or one of the *others*
    can be read, and return whether it has ended.
    """
    return process in _readable(seconds, process, *others)


def wait_readable(seconds: float, descriptor: int) -> bool:
    """Wait until *descriptor* can be read, and return whether it can."""
    return bool(_readable(seconds, descriptor))


def _readable(seconds: float | None, *descriptors: int) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    return [descriptor for descriptor, _ in found]
