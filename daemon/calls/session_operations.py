"""inferd's own calls on a session: its turn, parameters, history, branches and named states."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import structlog
from msgspec.structs import asdict

from ...backends.errors import Cancelled, InvalidArgument, NotFound, WorkerCrashed
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...scheduler.kv.store import scoped
from ...scheduler.owner import Owner
from ...scheduler.reasoning import EndOutcome
from ...sessions import NamedState, PlaceWait, Session, SessionState, checked_title
from ..core import Daemon
from .arguments import priority_of, seconds_of
from .monitoring import describe_session

log = structlog.get_logger()
UNDO_S_MAX = 3600.0
"""The longest time for which a deleted session can be restored."""


async def cancel(daemon: Daemon, request: Request) -> w.CancelResult:
    """Cancel a request, or a context's turn before its next step."""
    p: w.CancelParams = request.params
    if (p.request is None) == (p.context is None):
        raise InvalidArgument("cancel takes a request or a context, and not both")
    if p.request is not None:
        other = request.connection.requests.get(p.request)
        if other is None or other is request:
            return w.CancelResult(cancelled=False)
        other.interrupt()
        return w.CancelResult(cancelled=True)
    assert p.context is not None
    session = _controllable_session(daemon, request, p.context)
    error = Cancelled("the turn was cancelled")
    by_operator = request.owner.user != session.owner.user
    if by_operator:
        error = Cancelled("an operator cancelled the turn", data={"by": "operator"})
    waited = daemon.registry.loader.refuse_requests(error, session)
    waited = daemon.sessions.places.end_waits_of(session, error) or waited
    cancelled = session.cancel_turn(error) or waited
    if cancelled and by_operator:
        log.info(
            "turn.cancelled_by_operator",
            uid=session.owner.user,
            context=session.handle,
            by=request.owner.user,
        )
    await session.wait_recorded()
    return w.CancelResult(cancelled=cancelled)


async def park(daemon: Daemon, request: Request) -> w.ParkResult:
    """Park a context's turn: waiting turns get its slot, and it resumes when a slot is free."""
    session = _controllable_session(daemon, request, request.params.context)
    turn = session.turn
    if turn is not None and session.active:
        for worker in daemon.registry.catalog.ready_workers():
            if turn.spec.id in worker.client.tasks:
                return w.ParkResult(parked=await worker.client.park(turn.spec.id))
    return w.ParkResult(parked=False)


async def end_reasoning(daemon: Daemon, request: Request) -> w.EndReasoningResult:
    """End the present thought of a context's turn, so that its answer begins."""
    session = _controllable_session(daemon, request, request.params.context)
    turn = session.turn
    if turn is None or not session.active:
        return w.EndReasoningResult(ended=False, reason="no_turn")
    for worker in daemon.registry.catalog.ready_workers():
        if turn.spec.id in worker.client.tasks:
            with contextlib.suppress(WorkerCrashed):  # the turn continues in another worker
                outcome = await worker.client.end_reasoning(turn.spec.id)
                turn.end_requested |= outcome is EndOutcome.ENDED
                return _END_RESULTS[outcome]
    return w.EndReasoningResult(ended=False, reason="no_worker")


_END_RESULTS = {
    EndOutcome.ENDED: w.EndReasoningResult(ended=True),
    EndOutcome.NOT_REASONING: w.EndReasoningResult(ended=False, reason="not_reasoning"),
    EndOutcome.GRAMMAR: w.EndReasoningResult(ended=False, reason="refused_by_grammar"),
}


def _controllable_session(daemon: Daemon, request: Request, handle: int) -> Session:
    """Return a session whose turns the caller may control: a session of the same user (for
    `inferd cancel`, `park`, `end-reasoning` and `top`) or, with the rights `see-all` and `manage`,
    of any user.
    """
    for session in daemon.all_sessions():
        if session.handle == handle and daemon.connections.access.may_control_turns_of(
            request.connection, session.owner
        ):
            return session
    return daemon.sessions.live.get_session(request.connection, handle)


async def reset(daemon: Daemon, request: Request) -> w.Empty:
    """Clear the history."""
    session = daemon.session(request)
    session.reset_history(request.params.system)
    await session.wait_recorded()
    return w.Empty()


async def set_options(daemon: Daemon, request: Request) -> w.Empty:
    """Set parameters of the context and its note; unknown keys are refused."""
    session, p = daemon.session(request), request.params
    priority = priority_of(p.priority)
    if p.note is not None:
        session.check_note(p.note)
    session.set_options(p.options)
    if p.note is not None:
        session.set_note(p.note)
    if priority is not None:
        session.settings.priority = priority
    await session.wait_recorded()
    return w.Empty()


async def parameters(daemon: Daemon, request: Request) -> w.ParametersResult:
    """Return the value in force of each parameter, and its source."""
    effective = daemon.session(request).settings.parameters.effective()
    return w.ParametersResult(parameters=[w.ParameterInfo(**asdict(one)) for one in effective])


async def fork_session(daemon: Daemon, request: Request) -> w.ForkResult:
    """Create branches of a session's present state: all of them, or none."""
    daemon.check_open()
    branches = await _make_branches(daemon, request)
    try:
        for branch in branches:
            await branch.wait_recorded()
        cached = await _count_cached(branches[0])
    except BaseException:  # the caller does not get their handles
        for branch in branches:
            daemon.sessions.discard_session(branch)
        raise
    return w.ForkResult(contexts=[branch.handle for branch in branches], **cached)


async def _make_branches(daemon: Daemon, request: Request) -> list[Session]:
    p: w.ForkParams = request.params
    session, queue_timeout_s = daemon.session(request), seconds_of(p.queue_timeout_s)
    priority = priority_of(p.priority)
    branching = (request.connection, session, p.n, p.session_ids)
    if not queue_timeout_s:
        return daemon.sessions.fork_session(*branching)
    if priority is None:
        quota = daemon.ledger.bounds.quota_of(session.owner.user)
        priority = min(session.settings.priority, quota.priority_max)
    wait = PlaceWait(priority, queue_timeout_s)
    return await daemon.sessions.fork_session_in_queue(*branching, wait=wait)


async def rewind(daemon: Daemon, request: Request) -> w.RewindResult:
    """Go back in a session's history."""
    p: w.RewindParams = request.params
    if (p.turns is None) == (p.tokens is None):
        raise InvalidArgument("rewind takes turns or tokens, and not both")
    session = daemon.session(request)
    await session.rewind_history(p.turns, p.tokens)
    turns = session.conversation.turns_back
    return w.RewindResult(turns=turns, **await _count_cached(session))


async def _count_cached(session: Session) -> dict[str, Any]:
    """Return the fields of a result that count a session's tokens and those with KV state. An
    answer's last token may lack it: the turn may have ended before computing it.
    """
    tokens, cached = len(session.conversation.tokens()), await session.count_cached_tokens()
    kv = "cached" if cached >= tokens - 1 else "recomputed"
    return {"tokens": tokens, "cached_tokens": cached, "kv": kv}


async def history(daemon: Daemon, request: Request) -> w.HistoryResult:
    """Return the messages of a session, open or dormant, and the turns that can be rewound."""
    session = named_session(daemon, request, request.params)
    found = session.history
    return w.HistoryResult(
        messages=found.client_messages,
        turns=[mark.messages for mark in found.marks],
        session=describe_session(daemon, session),
        note=session.settings.note,
        options=session.settings.parameters.options,
    )


def named_session(
    daemon: Daemon, request: Request, p: w.HistoryParams | w.SessionMediaParams
) -> Session:
    """Return a session of the caller by its context or id.

    :raises NotFound: the caller has no session with this id.
    """
    if (p.context is None) == (p.session_id is None):
        raise InvalidArgument(f"{request.call} takes a context or a session id, and not both")
    if p.session_id is None:
        return daemon.session(request)
    return _session_by_id(daemon, request, p.session_id)


def _session_by_id(daemon: Daemon, request: Request, session_id: str) -> Session:
    """Return a session of the caller, open or dormant.

    :raises NotFound: the caller has no session with this id.
    """
    session = daemon.sessions.find_session(request.owner, session_id)
    if session is None:
        raise NotFound(
            f"there is no session {session_id!r}", hint="`sessions` lists them: check the id"
        )
    return session


async def update_session(daemon: Daemon, request: Request) -> w.SessionResult:
    """Change a session's title, parameters and priority, and whether it is kept: all, or none."""
    p: w.UpdateSessionParams = request.params
    session, priority = _session_by_id(daemon, request, p.session_id), priority_of(p.priority)
    if session.state is SessionState.DORMANT:
        daemon.sessions.moving.check_free(session.owner, p.session_id)
    title = None if p.title is None else checked_title(p.title)
    if p.kept is not None:
        daemon.sessions.check_kept(session, p.kept)
    if p.options or p.unset:
        session.change_options(p.options, p.unset)
    if p.kept is not None:
        daemon.sessions.set_kept(session, p.kept)
    if title is not None:
        session.set_title(title)
    if priority is not None:
        session.settings.priority = priority
        session.recording.facts_changed()
    daemon.sessions.note_change(session)
    await session.wait_recorded()
    return w.SessionResult(session=describe_session(daemon, session))


async def restore_session(daemon: Daemon, request: Request) -> w.SessionResult:
    """Restore a session that was deleted with `undo_s`."""
    p: w.SessionIdParams = request.params
    session = await daemon.sessions.restore_deleted(request.owner, p.session_id)
    if session is None:
        raise NotFound(
            f"there is no deleted session {p.session_id!r} that can be restored",
            hint="the time for it is over, or the session was not deleted: check the id",
        )
    return w.SessionResult(session=describe_session(daemon, session))


async def list_deletions(daemon: Daemon, request: Request) -> w.ListDeletionsResult:
    """Return the notes on the caller's sessions that the daemon has deleted by itself."""
    p: w.ListDeletionsParams = request.params
    notes = daemon.sessions.deletions.of(request.owner)
    if p.clear:
        await daemon.sessions.deletions.clear(request.owner)
    return w.ListDeletionsResult(deletions=[w.DeletionInfo(**asdict(one)) for one in notes])


async def delete_session(daemon: Daemon, request: Request) -> w.DeleteSessionResult:
    """Delete a session, its history and its KV state; return when they are deleted."""
    p: w.DeleteSessionParams = request.params
    if (p.context is None) == (p.session_id is None):
        raise InvalidArgument("delete_session takes a context or a session id, and not both")
    if not 0 <= p.undo_s <= UNDO_S_MAX:
        raise InvalidArgument(
            f"undo_s of {p.undo_s:g} s is out of range", hint=f"use 0 to {UNDO_S_MAX:g} seconds"
        )
    if p.session_id is not None and p.undo_s:
        deleted = await daemon.sessions.delete_restorably(request.owner, p.session_id, p.undo_s)
        return w.DeleteSessionResult(deleted=deleted)
    if p.session_id is not None:
        deleted = await daemon.sessions.delete_session_by_id(request.owner, p.session_id)
        return w.DeleteSessionResult(deleted=deleted)
    if p.undo_s:
        raise InvalidArgument(
            "only a session that is named by its id can be restored", hint="give its session_id"
        )
    await daemon.sessions.delete_session(daemon.session(request))
    return w.DeleteSessionResult(deleted=True)


async def save_state(daemon: Daemon, request: Request) -> w.SaveStateResult:
    """Save a context's present state under a name, after its KV state was computed."""
    daemon.check_open()
    p: w.SaveStateParams = request.params
    state, stored = await daemon.states.save_state(
        daemon.session(request), p.name, replace=p.replace
    )
    return w.SaveStateResult(tokens=state.size, stored_tokens=stored)


def find_state(daemon: Daemon, request: Request, name: str) -> NamedState:
    """Return a state with which the caller may begin a session: one of the caller's own, or one
    that an access rule shares.

    :raises NotFound: the caller may begin with no state of this name.
    """
    states: dict[str, tuple[Owner, str]] = {}
    for shared in daemon.connections.access.shared_states(request.connection):
        key = Owner(shared.user, shared.label), shared.state
        states[shared.name] = states[shared.numbered_name] = key
    return daemon.states.find_state(request.owner, name, states)


async def list_states(daemon: Daemon, request: Request) -> w.ListStatesResult:
    """List the caller's named states, sorted by name, then the shared states of other users."""
    own = [state for state in daemon.states if request.owner.includes(state.owner)]
    own.sort(key=lambda state: (state.name, state.owner))
    sizes = daemon.registry.kv_index.state_bytes()
    listed = [_describe_state(daemon, state, sizes) for state in own]
    for shared in sorted(daemon.connections.access.shared_states(request.connection)):
        state = daemon.states.get((Owner(shared.user, shared.label), shared.state))
        if state is not None and not request.owner.includes(state.owner):
            info = _describe_state(daemon, state, sizes)
            info.name, info.shared_by = shared.name, shared.user
            listed.append(info)
    return w.ListStatesResult(states=listed)


def _describe_state(
    daemon: Daemon, state: NamedState, sizes: Mapping[tuple[int, str], int]
) -> w.StateInfo:
    shared = daemon.config.kv_share == "all"
    files_of = scoped(state.owner.user, state.kv_name, shared=shared)
    return w.StateInfo(
        name=state.name,
        label=state.owner.label,
        model=state.facts.model,
        fingerprint=state.facts.fingerprint,
        tokens=state.size,
        bytes=state.kept_bytes,
        kv_disk_bytes=sizes.get(files_of, 0),
        created_at=state.facts.created_at,
        shared_by=None,
    )


async def delete_state(daemon: Daemon, request: Request) -> w.DeleteStateResult:
    """Delete a state and its KV state; return when they are deleted."""
    deleted = await daemon.states.delete_state(request.owner, request.params.name)
    return w.DeleteStateResult(deleted=deleted)
