"""The task of a turn that begins, its ticket in the ledger, and its stored beginning."""

from __future__ import annotations

import msgspec
from structlog.contextvars import get_contextvars

from ...scheduler import messages as m
from ..admission.forecast import Ticket
from ..journal.entries import TurnBegin
from ..session.core import SessionCore
from ..worker_client import WorkerClient
from .adapter_choice import chosen_keys
from .turn_options import NO_SAMPLING, TurnOptions


def task_of(
    session: SessionCore, client: WorkerClient, call: TurnOptions, task_id: int, now: float
) -> m.TaskSpec:
    """Return the task of a turn that begins *now* on the session's prompt.

    :raises InvalidArgument: an option is unknown, its value out of its range, or there is no such
        adapter.
    """
    session.settings.parameters.begin_turn(call.options)
    spec = m.TaskSpec(
        id=task_id,
        owner=session.owner,
        tokens=m.pack_tokens(session.conversation.prompt),
        sampling=NO_SAMPLING,
        priority=session.settings.priority if call.priority is None else call.priority,
        pull=call.pull,
        credit=call.credit,
        special=call.special,
        queue_timeout_s=call.queue_timeout_s,
        total_timeout_s=call.timeout_s,
        session=session.name,
        persist=session.settings.persist and session.session_id is not None,
        watch=call.watch,
        request=str(get_contextvars().get("request", "")),
    )
    spec = session.settings.parameters.fill(spec)
    return msgspec.structs.replace(
        spec,
        no_cache=_ignores_cache(session, now),
        adapters=chosen_keys(client.adapters, session.settings.parameters.get("lora")),
    )


def _ignores_cache(session: SessionCore, now: float) -> bool:
    """Return whether the turn may not use cached KV state."""
    retention_ms = session.settings.parameters.get("retention-ms")
    if not session.settings.parameters.get("cache-prompt"):
        return True
    if retention_ms < 0 or session.turns_begun == 0:
        return False
    rested = session.rested_at
    return rested is None or now > rested + retention_ms / 1000


def ticket_of(
    session: SessionCore, spec: m.TaskSpec, slots: int, *, goes_on: bool = False
) -> Ticket:
    """Return a turn's ticket in the ledger, where its model has so many *slots*."""
    return Ticket(
        session.owner,
        session.model.name,
        slots,
        spec.priority,
        len(session.conversation.prompt),
        spec.n_predict,
        goes_on=goes_on,
    )


def begin_of(session: SessionCore, call: TurnOptions, spec: m.TaskSpec) -> TurnBegin:
    """Return the stored beginning of a turn."""
    return TurnBegin(
        options=call.options,
        seed=session.settings.parameters.seed,
        priority=spec.priority.label,
        special=spec.special,
        turns=session.turns_begun,
    )
