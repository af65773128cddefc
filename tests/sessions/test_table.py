"""The session's state table: every (state, call), against the rules of the design written anew."""

from __future__ import annotations

import itertools

import pytest

from inferd.backends.errors import InferdError, InvalidArgument, SessionBusy, SessionExpired
from inferd.sessions.table import ACTIVE, TABLE, Call, State, step

RESTING = {State.EMPTY, State.READY, State.DONE, State.FAILED}
EVENTS = {Call.ADMITTED, Call.PARK, Call.FINISHED, Call.FAIL, Call.EXPIRE, Call.DETACH}


def expected(state: State, call: Call) -> State | type[InferdError]:
    """Return what the rules say, rule by rule."""
    if state is State.CLOSED:
        return InvalidArgument
    if state is State.DORMANT:
        wakes = {Call.ATTACH: State.READY, Call.CLOSE: State.CLOSED, Call.EXPIRE: State.CLOSED}
        return wakes.get(call, SessionExpired)
    if call is Call.CLOSE:
        return State.CLOSED
    if call is Call.UNLOAD:
        return State.UNLOADED
    if call in (Call.GET_OUTPUT, Call.CANCEL):
        return state
    if call is Call.FINI_SINGLE:
        return state if state in (State.EMPTY, State.UNLOADED) else State.READY
    if state in ACTIVE:
        return expected_in_a_turn(state, call)
    return expected_at_rest(state, call)


def expected_in_a_turn(state: State, call: Call) -> State | type[InferdError]:
    if call in (Call.SET_INPUT, Call.COMPUTE, Call.RESET, Call.REWIND, Call.FORK):
        return SessionBusy
    if call is Call.PARK:
        return State.PARKED if state is State.RUNNING else InvalidArgument
    ends = {Call.ADMITTED: State.RUNNING, Call.FINISHED: State.DONE, Call.FAIL: State.FAILED}
    return state if call is Call.COMPUTE_SINGLE else ends.get(call, InvalidArgument)


def expected_at_rest(state: State, call: Call) -> State | type[InferdError]:
    if call is Call.EXPIRE:
        return State.CLOSED
    if state is State.UNLOADED:
        return InvalidArgument
    if call in (Call.COMPUTE, Call.COMPUTE_SINGLE):
        return InvalidArgument if state is State.EMPTY else State.WAITING
    if call is Call.REWIND:
        return State.EMPTY if state is State.EMPTY else State.READY
    if call is Call.FORK:
        return state
    rest = {Call.SET_INPUT: State.READY, Call.RESET: State.EMPTY, Call.DETACH: State.DORMANT}
    return rest.get(call, InvalidArgument)


@pytest.mark.parametrize(("state", "call"), list(itertools.product(State, Call)))
def test_every_call_in_every_state_does_what_the_rules_say(state: State, call: Call) -> None:
    outcome = expected(state, call)

    if isinstance(outcome, State):
        assert step(state, call) is outcome
    else:
        with pytest.raises(outcome) as caught:
            step(state, call)
        assert type(caught.value) is outcome
        assert caught.value.hint


def test_the_table_has_every_state_and_call_and_no_other() -> None:
    assert set(TABLE) == set(itertools.product(State, Call))


def test_resting_and_active_states_are_told_apart() -> None:
    assert not RESTING & ACTIVE
    assert RESTING | ACTIVE | {State.UNLOADED, State.DORMANT, State.CLOSED} == set(State)
