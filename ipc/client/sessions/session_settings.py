"""The keywords of a session in one structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....backends.errors import InvalidArgument
from ...payloads import Config, Priority
from ..wasi_calls import ProgressCallback


@dataclass(kw_only=True, slots=True)
class SessionSettings:
    """How a session is opened, and the defaults of its turns. Owned by the session, which changes
    `system` and `priority` with its calls.
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
                "resume without a session_id", hint="give the session an id to be found again by"
            )
