"""The simulation of a fleet: it repeats, and one node takes the time of a real one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from bench.fleet_simulation import page
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
from bench.fleet_simulation.node import Node
from bench.fleet_simulation.policies import POLICIES, InferdPolicy
from bench.fleet_simulation.simulation import Scenario, Simulation
from bench.fleet_simulation.states import SessionStates
from bench.fleet_simulation.traffic import Traffic
from bench.fleet_simulation.turns import Session, Turn, TurnPlan
from inferd.gateways.fleet.link import REPORT_S
from inferd.gateways.fleet.routing.loads import ModelLoad, NodeLoad
from inferd.scheduler.policy.cost import CostCoefficients, StepCost

COST = CostCoefficients(0.006, 0.0025, 1.5e-6, 0.001)


def sessions_of(trace: list[Arrival]) -> list[tuple[float, Session]]:
    return [
        (arrival.at_s, Session(number, number % 3, "", arrival.priority, 0, arrival.turns))
        for number, arrival in enumerate(trace)
    ]


def scenario(memory_bytes: int = ENOUGH, losses_per_day: float = 0.0) -> Scenario:
    names = [size.name for size in SIZES]
    traffic = Traffic(4, 0.008, names, begin_s=36_000, losses_per_day=losses_per_day)
    return Scenario(traffic, model_kinds(COST), memory_bytes, 450.0, warm_up_s=150.0)


def test_steps_in_closed_form_are_those_that_are_planned_one_by_one() -> None:
    costs = NodeCosts(StepCost.from_coefficients(COST), 0.001, 0.002)
    trace = synthetic_trace(160, 20, 120)
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
    _, calm = recorded(ENOUGH)
    assert calm["moves"] == 0 and calm["retries"] == 0
    _, lost = recorded(ENOUGH, losses_per_day=200.0)
    assert lost["moves"] > 0 and lost["prefix_hits"] < calm["prefix_hits"]


def test_a_node_that_is_back_is_warmed_up_while_others_have_free_slots() -> None:
    names = [size.name for size in SIZES]
    traffic = Traffic(4, 0.006, names, begin_s=36_000, losses_per_day=40.0, loss_s=60.0)
    run = Simulation(Scenario(traffic, model_kinds(COST), ENOUGH, 3600.0, 600.0), InferdPolicy)
    found = run.run()
    assert all(node.instance > 1 and node.loaded for node in run.nodes.values())
    assert found["imbalance_cv"] < 0.25


class Recorder(InferdPolicy):
    """The entry, with the turns that it places and their nodes. Where *is_eager*, all parts of
    each report are made anew.
    """

    def __init__(self, loads: Mapping[str, NodeLoad], *, is_eager: bool = False):
        super().__init__(loads)
        self.placed: list[tuple[Turn, str]] = []
        self.nodes: Mapping[str, Node] = {}
        self._is_eager = is_eager

    def choose(self, turn: Turn, now: float) -> str:
        node = super().choose(turn, now)
        self.placed.append((turn, node))
        return node

    def begin_turn(self, turn: Turn, now: float) -> None:
        super().begin_turn(turn, now)
        self._forget_reports()

    def end_turn(self, turn: Turn, now: float) -> None:
        super().end_turn(turn, now)
        self._forget_reports()

    def note_report(self, node: str, load: NodeLoad, now: float) -> None:
        super().note_report(node, load, now)
        self._forget_reports()

    def _forget_reports(self) -> None:
        if self._is_eager:
            for node in self.nodes.values():
                node.forget_report()


@cache
def recorded(
    memory_bytes: int, *, losses_per_day: float = 0.0, is_eager: bool = False
) -> tuple[Recorder, dict[str, Any]]:
    """Run a scenario once, for all tests; return its policy and its figures."""
    found: list[Recorder] = []

    def policy(loads: Mapping[str, NodeLoad]) -> Recorder:
        found.append(Recorder(loads, is_eager=is_eager))
        return found[0]

    simulation = Simulation(scenario(memory_bytes, losses_per_day), policy)
    found[0].nodes = simulation.nodes
    return found[0], simulation.run()


@pytest.mark.parametrize("memory_bytes", [ENOUGH, LITTLE])
def test_reports_without_their_unchanged_parts_give_the_same_choices(memory_bytes: int) -> None:
    lazy, figures = recorded(memory_bytes, losses_per_day=200.0)
    eager, same = recorded(memory_bytes, losses_per_day=200.0, is_eager=True)
    assert [node for _, node in lazy.placed] == [node for _, node in eager.placed]
    assert len(lazy.placed) > 20 and figures == same


def test_turns_under_way_at_the_end_are_counted_when_they_end() -> None:
    run = scenario()
    policy, figures = recorded(ENOUGH)
    end_s = run.warm_up_s + run.seconds
    arrived = [turn for turn, _ in policy.placed if turn.arrived_at >= run.warm_up_s]
    late = [turn for turn in arrived if turn.ended_at > end_s]
    assert late and all(turn.arrived_at <= end_s < turn.ended_at for turn in late)
    assert figures["turns"] == len(arrived) and figures["late_turns"] == len(late)


def test_the_time_of_a_token_is_learned_from_a_run_of_steps() -> None:
    kinds = model_kinds(COST)
    node = Node("node", kinds, ENOUGH)
    node.preload()
    session = Session(1, 1, "chat", 1, 0, [TurnPlan(8, 200, 0.0)])
    node.add_turn(Turn(session, 0, 0.0), 0.0)
    reports = 0
    while node.due_at < math.inf:
        now = min(node.due_at, reports * REPORT_S)
        if now == node.due_at:
            node.advance(now)
        else:
            node.report(now)
            reports += 1
    learned = node.report(reports * REPORT_S).models["chat"].token_s
    step_s = COST.ubatch_s + COST.token_s + 100 * COST.position_s
    assert learned == pytest.approx(10 * step_s, rel=0.1), "`chat` takes ten times as long"


def test_a_new_session_goes_where_its_users_shared_tokens_were_computed() -> None:
    def load(running: int = 0, sessions: int = 0) -> NodeLoad:
        model = ModelLoad(loaded=True, slots=4, running=(0, running, 0, 0))
        return NodeLoad(instance=1, sessions=sessions, sessions_max=100, models={"chat": model})

    def place(number: int, user: int) -> str:
        session = Session(number, user, "chat", 1, 600, [TurnPlan(8, 8, 0.0)], history=600)
        return policy.choose(Turn(session, 0, 0.0), 0.0)

    policy = InferdPolicy({name: load() for name in ("a", "b", "c")})
    assert place(1, user=1) == "a"
    policy.note_report("a", load(running=3), 0.2)
    assert place(2, user=1) == "b"
    policy.note_report("a", load(sessions=5), 0.4)
    policy.note_report("b", load(running=3), 0.4)
    assert place(3, user=2) == "c", "the idle node with the fewest sessions"
    assert place(4, user=1) == "a"


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


def test_the_page_has_the_figures_of_the_results() -> None:
    assert page.PAGE.read_text() == page.with_figures(page.PAGE.read_text(), page.load())


def test_a_row_has_the_mean_and_the_range_of_the_seeds() -> None:
    def run(seed: int, value: float) -> dict[str, object]:
        waits = {"urgent": {"p99": value}, "normal": {"p99": 10 * value}}
        figures = dict.fromkeys(("imbalance_max", "imbalance_cv", "imbalance_cv_10min"), value)
        known = {"fleet": "10 nodes, a day", "policy": "inferd", "seed": seed, "turns": 5 * seed}
        counts = {"load": 0.5, "prefix_hits": 0.9, "moves": 1500, "late_turns": 2, "turn_s": 100.0}
        return {**known, **figures, **counts, "waits": waits}

    text = page.table([run(1, 1.0), run(2, 2.0)])
    assert "5 to 10 turns" in text and "| 1.50 (1.00–2.00) |" in text
    assert "| 90.0 % | 1 500 | 1.5 (1.0–2.0) s | 15 (10–20) s | 100 s | 2 |" in text


def test_a_trace_has_the_tokens_that_the_daemon_counted() -> None:
    trace = [Arrival(0.0, 1, [TurnPlan(5, 7, 0.0), TurnPlan(5, 7, 1.0)])]
    record = (0.0, 1.0, 0.0)
    records = [[Record(*record, 12, 1, 7, 0.02), Record(*record, 30, 18, 6, 0.02)]]
    ((_, session),) = measured_sessions(trace, records)
    assert [plan.new_tokens for plan in session.plans] == [12, 11]
    assert [plan.answer_tokens for plan in session.plans] == [7, 6]
