"""A turn as a caller has requested it, independent of the API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ....ipc.payloads import Prompt
from ....ipc.priorities import Priority
from .answers import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A model's answers to a prompt.

    *options* are parameters of docs/parameters.md. Without a *session_id* the turn has a session of
    its own, and the daemon reuses the KV state of an equal beginning. With one, *prompt* is added
    to the session's history. With *branch_of* too, the session begins as a branch of the session
    with that id. *note* returns the note that is stored with the session, from the end of the
    turn's only answer, before this is written.
    """

    model: str
    prompt: Prompt
    raw: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    answers: int = 1
    priority: Priority = "normal"
    keeps_priority: bool = False
    """Whether a session that exists has its own class instead of *priority*."""
    session_id: str | None = None
    branch_of: str | None = None
    note: Callable[[Answer], bytes] | None = None
    progress: bool = False
    """Pass the progress of a streamed answer's prompt to its reader."""
    on_turn: Callable[[int], None] | None = None
    """Called with the number of the turn of a session with an id, once this is open. Further
    readers can then read the only answer of the streamed turn.
    """
    on_prompt: Callable[[int, list[dict[str, Any]]], None] | None = None
    """Called before the first piece of a streamed answer with its number and the logprobs of the
    prompt, if there are any.
    """
