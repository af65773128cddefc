"""A session's keyword arguments in one structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....backends.errors import InvalidArgument
from ...payloads import Config, Priority
from ..wasi_calls import ProgressCallback


@dataclass(kw_only=True, slots=True)
class SessionSettings:
    """How a session is opened, and the defaults of its turns.

    The session owns it; its calls change `system` and `priority`.
    """

    model: str
    session_id: str | None = None
    system: str | None = None
    persist: bool = True
    resume: bool = False
    raw: bool = False
    priority: Priority = "normal"
    options: dict[str, Any] | None = None
    config: Config | None = None
    on_progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        if self.resume and self.session_id is None:
            raise InvalidArgument(
                "resume needs a session_id", hint="pass a session_id, by which to attach again"
            )
