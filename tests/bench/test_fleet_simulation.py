"""The simulation of a fleet: it repeats, and one node takes the time of a real one."""

from __future__ import annotations

import math

import pytest

from bench.fleet_simulation.calibrating import PACED, compare
from bench.fleet_simulation.calibration import (
    TOLERANCE,
    Arrival,
    NodeCosts,
    Record,
    measured_sessions,
    simulate,
    synthetic_trace,
)
from bench.fleet_simulation.engine import Run
from bench.fleet_simulation.fleets import ENOUGH, LITTLE, SIZES, model_kinds
from bench.fleet_simulation.policies import POLICIES
from bench.fleet_simulation.simulation import Scenario, Simulation
from bench.fleet_simulation.states import SessionStates
from bench.fleet_simulation.traffic import Traffic
from bench.fleet_simulation.turns import Session, TurnPlan
from inferd.scheduler.policy.cost import CostCoefficients, StepCost

COST = CostCoefficients((0.006, 0.0025, 1.5e-6), (0.006, 0.0012, 1.5e-6), 0.001)


def sessions_of(trace: list[Arrival]) -> list[tuple[float, Session]]:
    return [
        (arrival.at_s, Session(number, number % 3, "", arrival.priority, 0, arrival.turns))
        for number, arrival in enumerate(trace)
    ]


def scenario(memory_bytes: int = ENOUGH, losses_per_day: float = 0.0) -> Scenario:
    names = [size.name for size in SIZES]
    traffic = Traffic(4, 0.008, names, begin_s=36_000, losses_per_day=losses_per_day)
    return Scenario(traffic, model_kinds(COST), memory_bytes, 900.0, warm_up_s=300.0)


def test_steps_in_closed_form_are_those_that_are_planned_one_by_one() -> None:
    costs = NodeCosts(StepCost.from_coefficients(COST), 0.001, 0.002)
    trace = synthetic_trace(40, 30, 120)
    fast, few = simulate(sessions_of(trace), costs)
    slow, many = simulate(sessions_of(trace), costs, steps_max=1)
    assert few.tokens == many.tokens and few.plans < many.plans / 4
    assert all(abs(error) < 0.02 for error in slow.errors(fast).values())


def test_the_steps_that_have_begun_are_found_from_the_time() -> None:
    run = Run(0.0, 50, 0.02, 0.0003, (), ())
    for steps in range(1, 50):
        assert run.steps_begun(run.seconds(steps) - 1e-6) == steps
        assert run.steps_begun(run.seconds(steps) + 1e-6) == steps + 1


@pytest.mark.alone
@pytest.mark.process
def test_one_node_is_within_a_tenth_of_a_real_daemon() -> None:
    trace = synthetic_trace(16, 0.5, 32)
    found = compare(PACED, trace)
    assert min(attempt.worst for attempt in found) <= TOLERANCE, [
        (attempt.real, attempt.simulated) for attempt in found
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_repeats_and_ends_its_turns(policy: str) -> None:
    first = Simulation(scenario(LITTLE, losses_per_day=200.0), POLICIES[policy]).run()
    again = Simulation(scenario(LITTLE, losses_per_day=200.0), POLICIES[policy]).run()
    assert first == again
    assert first["turns"] > 5 and first["retries"] > 0 and math.isfinite(first["turn_s"])


def test_sessions_move_only_when_their_node_is_lost() -> None:
    calm = Simulation(scenario(), POLICIES["inferd"]).run()
    assert calm["moves"] == 0 and calm["retries"] == 0
    lost = Simulation(scenario(losses_per_day=200.0), POLICIES["inferd"]).run()
    assert lost["moves"] > 0 and lost["prefix_hits"] < calm["prefix_hits"]


def test_all_policies_get_the_same_sessions() -> None:
    def sessions() -> list[tuple[float, int, str]]:
        return [(at, s.user, s.model) for at, s in scenario().traffic.sessions(3600)]

    assert sessions() == sessions() and len({model for *_, model in sessions()}) == len(SIZES)


def test_states_are_reused_by_session_and_user_until_they_are_evicted() -> None:
    states = SessionStates(bytes_max=1000, token_bytes=1, recompute_s=float)
    plans = [TurnPlan(10, 10, 0.0)]
    own, same_user, other = (Session(n, u, "m", 1, 50, plans) for n, u in ((1, 1), (2, 1), (3, 2)))
    states.save_state(own, 400)
    assert states.covered_tokens(own, 500) == 400 and states.covered_tokens(own, 300) == 299
    assert states.covered_tokens(same_user, 500) == 50
    assert states.covered_tokens(other, 500) == 0
    states.save_state(other, 900)
    assert states.covered_tokens(own, 500) == 0 and states.covered_tokens(same_user, 500) == 0


def test_a_trace_has_the_tokens_that_the_daemon_counted() -> None:
    trace = [Arrival(0.0, 1, [TurnPlan(5, 7, 0.0), TurnPlan(5, 7, 1.0)])]
    record = (0.0, 1.0, 0.0)
    records = [[Record(*record, 12, 1, 7, 0.02), Record(*record, 30, 18, 6, 0.02)]]
    ((_, session),) = measured_sessions(trace, records)
    assert [plan.new_tokens for plan in session.plans] == [12, 11]
    assert [plan.answer_tokens for plan in session.plans] == [7, 6]
