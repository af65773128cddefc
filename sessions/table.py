"""The state table of a session: (state, call) → next state, or the error that refuses the call.

It is data, tested exhaustively; only `step` reads it. Clients make calls; the engine and the clock
cause events.
"""

from __future__ import annotations

from enum import StrEnum

from ..backends.errors import InferdError, InvalidArgument, SessionBusy, SessionExpired


class SessionState(StrEnum):
    """The states of a session."""

    EMPTY = "empty"
    READY = "ready"
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    DONE = "done"
    FAILED = "failed"
    UNLOADED = "unloaded"
    """Its graph was unloaded; its output can still be read."""
    DORMANT = "dormant"
    CLOSED = "closed"


class SessionCall(StrEnum):
    """Calls of a session's client, then events."""

    SET_INPUT = "set_input"
    COMPUTE = "compute"
    COMPUTE_SINGLE = "compute_single"
    GET_OUTPUT = "get_output"
    FINI_SINGLE = "fini_single"
    CANCEL = "cancel"
    RESET = "reset"
    REWIND = "rewind"
    FORK = "fork_session"
    CLOSE = "close"
    ATTACH = "attach"
    UNLOAD = "unload"
    # Events.
    RUN = "run"
    PARK = "park"
    FINISHED = "finished"
    FAIL = "fail"
    EXPIRE = "expire"
    DETACH = "detach"


ACTIVE = frozenset((SessionState.WAITING, SessionState.RUNNING, SessionState.PARKED))
"""States in which a turn is under way: the session is not idle and refuses new input."""

Outcome = SessionState | type[InferdError]

_S, _C = SessionState, SessionCall


def _rows(
    states: tuple[SessionState, ...], **outcomes: Outcome
) -> dict[tuple[SessionState, SessionCall], Outcome]:
    return {(s, SessionCall(c)): outcome for s in states for c, outcome in outcomes.items()}


_RESTING = (_S.EMPTY, _S.READY, _S.DONE, _S.FAILED)
_TURN = tuple(ACTIVE)

TABLE: dict[tuple[SessionState, SessionCall], Outcome] = {
    # A call is refused unless a later row allows it.
    **{(s, c): InvalidArgument for s in SessionState for c in SessionCall},
    **{(_S.DORMANT, c): SessionExpired for c in SessionCall},
    # At rest: input may be given, then computed.
    **_rows(_RESTING, set_input=_S.READY, reset=_S.EMPTY, close=_S.CLOSED, unload=_S.UNLOADED),
    **_rows((_S.READY, _S.DONE, _S.FAILED), compute=_S.WAITING, compute_single=_S.WAITING),
    **_rows((_S.READY, _S.DONE, _S.FAILED), rewind=_S.READY),
    **_rows((_S.EMPTY,), rewind=_S.EMPTY),
    **{(s, _C.FORK): s for s in _RESTING},
    # A turn is under way.
    **_rows(_TURN, set_input=SessionBusy, compute=SessionBusy, reset=SessionBusy),
    **_rows(_TURN, rewind=SessionBusy, fork_session=SessionBusy),
    **_rows(_TURN, close=_S.CLOSED, unload=_S.UNLOADED),
    **{(s, _C.COMPUTE_SINGLE): s for s in _TURN},
    **_rows((_S.UNLOADED,), close=_S.CLOSED, unload=_S.UNLOADED),
    # Output can be read, also after an unload, and cleared.
    **{(s, c): s for s in (*_RESTING, *_TURN, _S.UNLOADED) for c in (_C.GET_OUTPUT, _C.CANCEL)},
    **_rows((_S.READY, _S.DONE, _S.FAILED, *_TURN), fini_single=_S.READY),
    **{(s, _C.FINI_SINGLE): s for s in (_S.EMPTY, _S.UNLOADED)},
    # Events.
    **_rows(_TURN, run=_S.RUNNING, finished=_S.DONE, fail=_S.FAILED),
    **_rows((_S.RUNNING,), park=_S.PARKED),
    **_rows((*_RESTING, _S.UNLOADED), expire=_S.CLOSED),
    **_rows(_RESTING, detach=_S.DORMANT),
    **_rows((_S.DORMANT,), attach=_S.READY, close=_S.CLOSED, expire=_S.CLOSED),
}


_REFUSALS = {
    _S.EMPTY: ("the context has no input", "send a prompt first"),
    _S.UNLOADED: ("the context's graph was unloaded", "load the model, and open another context"),
    _S.CLOSED: ("the context is closed", "open another context"),
}
"""The message and the hint of an `InvalidArgument`, by state."""


def step(state: SessionState, call: SessionCall) -> SessionState:
    """Return the state after *call*.

    :raises InvalidArgument: the state does not allow the call.
    :raises SessionBusy: a turn is under way.
    :raises SessionExpired: the session is dormant.
    """
    outcome = TABLE[state, call]
    if isinstance(outcome, SessionState):
        return outcome
    if outcome is InvalidArgument:
        default = f"{call.value} of a context that is {state.value}", ""
        message, hint = _REFUSALS.get(state, default)
        raise outcome(message, hint=hint)
    active = state in ACTIVE
    raise outcome(
        f"the context has a turn that is {state}" if active else f"the session is {state}"
    )
