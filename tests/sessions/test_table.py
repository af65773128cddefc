"""The session's state table: every (state, call), against the rules of the design written anew."""

from __future__ import annotations

import itertools

import pytest

from inferd.backends.errors import InferdError, InvalidArgument, SessionBusy, SessionExpired
from inferd.sessions.table import ACTIVE, TABLE, SessionCall, SessionState, step

RESTING = {SessionState.EMPTY, SessionState.READY, SessionState.DONE, SessionState.FAILED}
EVENTS = {
    SessionCall.RUN,
    SessionCall.PARK,
    SessionCall.FINISHED,
    SessionCall.FAIL,
    SessionCall.EXPIRE,
    SessionCall.DETACH,
}


def expected(state: SessionState, call: SessionCall) -> SessionState | type[InferdError]:
    """Return what the rules say, rule by rule."""
    if state is SessionState.CLOSED:
        return InvalidArgument
    if state is SessionState.DORMANT:
        wakes = {
            SessionCall.ATTACH: SessionState.READY,
            SessionCall.CLOSE: SessionState.CLOSED,
            SessionCall.EXPIRE: SessionState.CLOSED,
        }
        return wakes.get(call, SessionExpired)
    if call is SessionCall.CLOSE:
        return SessionState.CLOSED
    if call is SessionCall.UNLOAD:
        return SessionState.UNLOADED
    if call in (SessionCall.GET_OUTPUT, SessionCall.CANCEL):
        return state
    if call is SessionCall.FINI_SINGLE:
        return state if state in (SessionState.EMPTY, SessionState.UNLOADED) else SessionState.READY
    if state in ACTIVE:
        return expected_in_a_turn(state, call)
    return expected_at_rest(state, call)


def expected_in_a_turn(state: SessionState, call: SessionCall) -> SessionState | type[InferdError]:
    if call in (
        SessionCall.SET_INPUT,
        SessionCall.COMPUTE,
        SessionCall.RESET,
        SessionCall.REWIND,
        SessionCall.FORK,
    ):
        return SessionBusy
    if call is SessionCall.PARK:
        return SessionState.PARKED if state is SessionState.RUNNING else InvalidArgument
    ends = {
        SessionCall.RUN: SessionState.RUNNING,
        SessionCall.FINISHED: SessionState.DONE,
        SessionCall.FAIL: SessionState.FAILED,
    }
    return state if call is SessionCall.COMPUTE_SINGLE else ends.get(call, InvalidArgument)


def expected_at_rest(state: SessionState, call: SessionCall) -> SessionState | type[InferdError]:
    if call is SessionCall.EXPIRE:
        return SessionState.CLOSED
    if state is SessionState.UNLOADED:
        return InvalidArgument
    if call in (SessionCall.COMPUTE, SessionCall.COMPUTE_SINGLE):
        return InvalidArgument if state is SessionState.EMPTY else SessionState.WAITING
    if call is SessionCall.REWIND:
        return SessionState.EMPTY if state is SessionState.EMPTY else SessionState.READY
    if call is SessionCall.FORK:
        return state
    rest = {
        SessionCall.SET_INPUT: SessionState.READY,
        SessionCall.RESET: SessionState.EMPTY,
        SessionCall.DETACH: SessionState.DORMANT,
    }
    return rest.get(call, InvalidArgument)


@pytest.mark.parametrize(("state", "call"), list(itertools.product(SessionState, SessionCall)))
def test_every_call_in_every_state_does_what_the_rules_say(
    state: SessionState, call: SessionCall
) -> None:
    outcome = expected(state, call)

    if isinstance(outcome, SessionState):
        assert step(state, call) is outcome
    else:
        with pytest.raises(outcome) as caught:
            step(state, call)
        assert type(caught.value) is outcome
        assert caught.value.hint


def test_the_table_has_every_state_and_call_and_no_other() -> None:
    assert set(TABLE) == set(itertools.product(SessionState, SessionCall))


def test_resting_and_active_states_are_distinguished() -> None:
    assert not RESTING & ACTIVE
    assert RESTING | ACTIVE | {
        SessionState.UNLOADED,
        SessionState.DORMANT,
        SessionState.CLOSED,
    } == set(SessionState)
