"""The start of a turn: its task, its adapters, its ticket in the ledger, its stored beginning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from structlog.contextvars import get_contextvars

from ...backends.adapter_keys import adapter_key, split_key
from ...backends.errors import InvalidArgument, error_from_wire
from ...backends.params import nearest
from ...backends.tool_formats import MARK_TOKENS
from ...scheduler import PRIORITIES
from ...scheduler import messages as m
from ...scheduler.messages import AdapterReport
from ..admission.bounds import Ticket
from ..conversation.core import SessionCore
from ..entries import Replay, TurnBegin
from ..worker_client import WorkerClient
from .options import NO_SAMPLING, TurnOptions

PROMPT_LOGPROBS_MAX = 1 << 15
"""Logprobs of a prompt's tokens and of their top tokens, which are described in one reply."""
_NAME_SHOWN_MAX = 100
Reports = Mapping[str, AdapterReport]
"""A model's adapters by their names, in the order of the configuration."""


def task_of(
    session: SessionCore, client: WorkerClient, call: TurnOptions, task_id: int, now: float
) -> m.TaskSpec:
    """Return the task of a turn that starts *now* on the session's prompt.

    :raises InvalidArgument: an option or an adapter is unknown, a value is out of its range, or
        there would be too many logprobs of the prompt.
    """
    session.settings.parameters.set_turn_options(call.options, call.notes)
    tokens = m.pack_tokens(session.conversation.prompt)
    spec = m.TaskSpec(
        id=task_id,
        owner=session.owner,
        account=session.ledger.bounds.gateway_of(session.owner.user),
        tokens=tokens,
        sampling=NO_SAMPLING,
        priority=session.settings.priority if call.priority is None else call.priority,
        pull=call.pull,
        credit=call.credit,
        special=call.special,
        shown_tokens=MARK_TOKENS.get(session.conversation.history_state.now.tool_use.form, ()),
        queue_timeout_s=call.queue_timeout_s,
        total_timeout_s=call.timeout_s,
        session=session.name,
        persist=session.settings.persist and session.session_id is not None,
        shared_kv=_shared_kv(session, tokens),
        watch=call.watch,
        watch_prompt=call.watch_prompt,
        request=str(get_contextvars().get("request", "")),
    )
    history = session.conversation.history_state.now
    spec = session.settings.parameters.fill(spec, client.info.vocab_size)
    spec = session.settings.parameters.constrain_calls(
        spec, history.tool_use, opened=history.opens_call
    )
    if not call.scores_prompt:
        spec = msgspec.structs.replace(spec, prompt_logprobs=None)
    _check_prompt_logprobs(spec)
    return msgspec.structs.replace(
        spec,
        no_cache=_ignores_cache(session, now),
        adapters=chosen_keys(client.adapters, session.settings.parameters.get("lora")),
    )


def _check_prompt_logprobs(spec: m.TaskSpec) -> None:
    size, top = m.count_tokens(spec.tokens), spec.prompt_logprobs
    if top is None or size * (1 + top) <= PROMPT_LOGPROBS_MAX:
        return
    raise InvalidArgument(
        f"prompt-logprobs: {size} tokens with {top} top tokens each make {size * (1 + top)}"
        f" logprobs; at most {PROMPT_LOGPROBS_MAX} are returned",
        hint="request fewer top tokens, or use a shorter prompt",
        data={"prompt_tokens": size, "prompt_logprobs_max": PROMPT_LOGPROBS_MAX},
    )


def _shared_kv(session: SessionCore, tokens: bytes) -> m.SharedKv | None:
    """Return the KV state with which the session began, if its prompt still begins so."""
    shared = session.settings.shared_kv
    return shared if shared is not None and shared.begins(tokens) else None


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
    has, and the options to continue with: the turn's own, with its seed. *call* decides the
    timeouts and the delivery, and may change the priority.

    :raises InvalidArgument: no turn was interrupted, or the reader's output differs.
    """
    if before is None or before.ended:
        raise InvalidArgument("no turn of this session was interrupted")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidArgument(f"the tokens are 0 … {vocab_size - 1}")
    so_far, begin = before.extended(tokens, text), before.begin
    options = msgspec.structs.replace(
        call,
        options={**begin.options, "seed": begin.seed},
        priority=PRIORITIES[begin.priority] if call.priority is None else call.priority,
        special=begin.special,
    )
    return so_far, options


def chosen_keys(reports: Reports, lora: Sequence[Sequence[Any]] | None) -> tuple[str, ...]:
    """Return the sorted keys of a turn's adapters, without those at a scale of 0.

    *lora* are pairs of a name, or an index in the order of the configuration, and a scale; None
    means the configured scales of the model's adapters.

    :raises InvalidArgument: the model has no such adapter.
    :raises InferdError: an adapter is not loaded; this is its own error, mostly `LoadFailed`.
    """
    if lora is None:
        pairs = [(report, report.spec.scale) for report in reports.values()]
    else:
        pairs = [(_find(reports, which), scale) for which, scale in lora]
    scales: dict[str, float] = {}
    for report, scale in pairs:
        if not scale:
            continue
        if report.info is None:
            raise error_from_wire(report.error or {})
        scales[report.info.id] = scales.get(report.info.id, 0.0) + scale
    return tuple(sorted(adapter_key(i, scale) for i, scale in scales.items() if scale))


def _find(reports: Reports, which: str | int) -> AdapterReport:
    if isinstance(which, int) and 0 <= which < len(reports):
        return list(reports.values())[which]
    if isinstance(which, str) and which in reports:
        return reports[which]
    names = ", ".join(reports) or "none"
    close = nearest(which, reports) if isinstance(which, str) else ""
    shown = which if isinstance(which, int) else which[:_NAME_SHOWN_MAX]
    raise InvalidArgument(
        f"the model has no adapter {shown!r}",
        hint=f"{close + ' ' if close else ''}it has {names}; an operator adds one with"
        " `inferd add-adapter`",
        data={"adapters": list(reports)},
    )


def scales_by_name(reports: Reports, keys: Iterable[str]) -> dict[str, float]:
    """Return the scales of *keys* by the adapters' names, or by their ids if a name was removed."""
    names = {report.info.id: name for name, report in reports.items() if report.info is not None}
    pairs = [split_key(key) for key in keys]
    return {names.get(adapter_id, adapter_id): scale for adapter_id, scale in pairs}
