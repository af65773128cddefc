"""What a turn begins with: its task, its place in the ledger, and what is written down of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from structlog.contextvars import get_contextvars

from ...scheduler import messages as m
from ..admission.forecast import Ticket
from ..journal.entries import Begin
from ..worker_client import Port
from .adapter_choice import chosen
from .turn_options import NO_SAMPLING, TurnOptions

if TYPE_CHECKING:
    from ..session.session import Session

__all__ = ("begin_of", "task_of", "ticket_of")


def task_of(
    session: Session, port: Port, call: TurnOptions, task_id: int, now: float
) -> m.TaskSpec:
    """Return the task of a turn that begins *now* on the session's prompt.

    :raises InvalidArgument: an option is unknown, its value out of its range, or there is no such
        adapter.
    """
    session.parameters.begin_turn(call.options)
    spec = m.TaskSpec(
        id=task_id,
        owner=session.owner,
        tokens=m.pack_tokens(session.prompt),
        sampling=NO_SAMPLING,
        priority=session.priority if call.priority is None else call.priority,
        pull=call.pull,
        credit=call.credit,
        special=call.special,
        queue_timeout_s=call.queue_timeout_s,
        total_timeout_s=call.timeout_s,
        session=session.name,
        persist=session.persist and session.session_id is not None,
        watch=call.watch,
        request=str(get_contextvars().get("request", "")),
    )
    spec = session.parameters.fill(spec)
    return msgspec.structs.replace(
        spec,
        no_cache=_starts_fresh(session, now),
        adapters=chosen(port.adapters, session.parameters.get("lora")),
    )


def _starts_fresh(session: Session, now: float) -> bool:
    """Tell whether the turn may not use KV state that is there."""
    retention_ms = session.parameters.get("retention-ms")
    if not session.parameters.get("cache-prompt"):
        return True
    if retention_ms < 0 or session.turns == 0:
        return False
    rested = session.rested_at
    return rested is None or now > rested + retention_ms / 1000


def ticket_of(session: Session, spec: m.TaskSpec, slots: int, *, goes_on: bool = False) -> Ticket:
    """Return a turn's place in the ledger, where its model has so many slots."""
    return Ticket(
        session.owner,
        session.model.name,
        slots,
        spec.priority,
        len(session.prompt),
        spec.n_predict,
        goes_on=goes_on,
    )


def begin_of(session: Session, call: TurnOptions, spec: m.TaskSpec) -> Begin:
    """Return what is written down of how a turn began."""
    return Begin(
        options=call.options,
        seed=session.parameters.seed,
        priority=spec.priority.label,
        special=spec.special,
        turns=session.turns,
    )
