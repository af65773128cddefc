"""The start of a turn: its task, its ticket in the ledger, its stored beginning."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from structlog.contextvars import get_contextvars

from ...backends.errors import InvalidArgument
from ...scheduler import PRIORITIES
from ...scheduler import messages as m
from ..admission.bounds import Ticket
from ..journal.entries import Replay, TurnBegin
from ..session.core import SessionCore
from ..worker_client import WorkerClient
from .adapter_choice import chosen_keys
from .turn_options import NO_SAMPLING, TurnOptions


def task_of(
    session: SessionCore, client: WorkerClient, call: TurnOptions, task_id: int, now: float
) -> m.TaskSpec:
    """Return the task of a turn that starts *now* on the session's prompt.

    :raises InvalidArgument: an option or an adapter is unknown, or a value is out of its range.
    """
    session.settings.parameters.set_turn_options(call.options)
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
    """Return whether the turn must compute its whole prompt."""
    retention_ms = session.settings.parameters.get("retention-ms")
    if not session.settings.parameters.get("cache-prompt"):
        return True
    if retention_ms < 0 or session.turns_begun == 0:
        return False
    rested = session.rested_at
    return rested is None or now > rested + retention_ms / 1000


def ticket_of(
    session: SessionCore, spec: m.TaskSpec, slots: int, *, quota_checked: bool = False
) -> Ticket:
    """Return a turn's ticket in the ledger; its model has this number of *slots*."""
    return Ticket(
        session.owner,
        session.model.name,
        slots,
        spec.priority,
        len(session.conversation.prompt),
        spec.n_predict,
        quota_checked=quota_checked,
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


def resumed(
    before: Replay | None, call: TurnOptions, tokens: Sequence[int], text: bytes, vocab_size: int
) -> tuple[Replay, TurnOptions]:
    """Return the interrupted turn *before*, extended by the *tokens* and the *text* that its reader
    has, and the options to continue with: its own, with its seed, where *call* leaves them open.

    :raises InvalidArgument: no turn was interrupted, or the reader's output differs.
    """
    if before is None:
        raise InvalidArgument("no turn of this session was interrupted")
    if not all(0 <= token < vocab_size for token in tokens):
        raise InvalidArgument(f"the tokens are 0 … {vocab_size - 1}")
    whole, begin = before.extended(tokens, text), before.begin
    own = msgspec.structs.replace(
        call,
        options={**begin.options, "seed": begin.seed},
        priority=PRIORITIES[begin.priority] if call.priority is None else call.priority,
        special=begin.special,
    )
    return whole, own
