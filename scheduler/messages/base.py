"""The bases of all messages on a worker's socket."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, tag=True):
    """A struct that is sent as an array without field names, tagged with its class name."""


class RequestMessage(Message):
    """A command that is answered with `CommandResult` or `Refused`, or such an answer."""

    id: int


class TaskMessage(Message):
    """A command or report about one task."""

    task_id: int
