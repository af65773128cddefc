"""Losses of the daemon during a conversation: the line about the wait, and the daemon's restart."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Protocol

import typer

from ...backends.errors import ConnectionLost, InferdError
from ..output import note
from ..starting import start_on_demand

ResumeTimeout = Annotated[
    float,
    typer.Option(
        "--resume-timeout",
        metavar="SECONDS",
        min=0.001,
        help="How long a daemon that has ended is waited for; then the answer continues.",
    ),
]


class Interruptible(Protocol):
    """The output of an answer, between whose pieces a line is printed."""

    def interrupted(self) -> AbstractContextManager[None]:
        """Interrupt it for messages."""


class LossNotice:
    """The line that is printed each time a session has lost its daemon.

    *waits* is true from then on until `note_piece`.
    """

    def __init__(self, socket: Path | None, model: str, resume_s: float):
        self.model = model
        self.waits = False
        self.output: Interruptible | None = None
        self.socket, self._resume_s = socket, resume_s

    def print(self, error: InferdError) -> None:
        """Print the line. Start a daemon if the last one has crashed and commands may start one."""
        self.waits = True
        with nullcontext() if self.output is None else self.output.interrupted():
            note(loss_text(error, self._resume_s))
            if isinstance(error, ConnectionLost):
                start_on_demand(self.socket, self.model)

    def note_piece(self) -> None:
        """Note that the daemon has answered."""
        self.waits = False


def loss_text(error: InferdError, resume_s: float) -> str:
    """Return the line about a lost daemon, for which a conversation waits up to *resume_s*."""
    return (
        f"{error.message_for_people}; waiting up to {resume_s:g} s for its return,"
        " then this continues (Ctrl-C ends the wait)"
    )
