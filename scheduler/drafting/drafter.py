"""The protocol of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..task import Task


class Drafter(Protocol):
    """Proposes tokens that a task is expected to generate next. The engine's thread owns it.

    A drafter only predicts. Its proposals do not change the text, because each token is
    sampled as without drafts, and a draft is kept only if it equals the sampled token. It must not
    let one user's text show in the proposals for another, since the time of a step shows these.
    """

    def propose(self, task: Task, limit: int) -> Sequence[int]:
        """Return up to *limit* tokens that are expected behind all tokens of *task*; none if there
        is no proposal. Proposals of which less was computed than offered are compared with the
        tokens that follow, too, so a drafter should continue a proposal while it is right.
        """

    def forget(self, task_id: int) -> None:
        """Free the memory for a task that has ended or lost its slot. Nothing else is lost: the
        next proposal for it begins anew.
        """

    def forget_session(self, user: int, session: str) -> None:
        """Drop everything that is kept of a session, which is being deleted."""
