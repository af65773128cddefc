"""The learned cost of a step: it predicts kinds of steps that were not seen for long."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.scheduler.policy.cost import StepCost, StepLoad
from tests.repetitions import repetitions

# A CPU with a small model: seconds for a ubatch, a token, and a token attended to.
GRAPH_S, ROW_S, DEPTH_S = 0.004, 0.0029, 2.4e-6


class Machine:
    """A machine of known cost with noise, and the model that learns it."""

    def __init__(self, noise: float = 0.05, seed: int = 1):
        self.cost = StepCost()
        self.slowness = 1.0
        self._noise, self._rng = noise, random.Random(seed)

    def seconds(self, load: StepLoad) -> float:
        plain = GRAPH_S * load.ubatches + ROW_S * load.tokens + DEPTH_S * load.depth
        return self.slowness * plain

    def step(self, *chunks: tuple[int, int]) -> None:
        load = StepLoad.of_chunks(chunks)
        self.cost.learn_step(load, self.seconds(load) * self._rng.gauss(1, self._noise))

    def error(self, *chunks: tuple[int, int]) -> float:
        load = StepLoad.of_chunks(chunks)
        return self.cost.predict(load) / self.seconds(load) - 1


def lived(machine: Machine) -> Machine:
    """Compute a prompt, decode, do both, then decode for long."""
    machine.step((0, 32))
    for at in range(32, 512, 120):
        machine.step((at, 120))
    for at in range(60):
        machine.step(*[(80 + at, 1)] * 3, (24 * at, 24))
    for at in range(600):
        machine.step(*[(200 + at % 50, 1)] * 16)
    return machine


def test_a_load_counts_groups_tokens_and_depths() -> None:
    assert StepLoad.of_chunks([(10, 1), (20, 1), (100, 3)]) == StepLoad(
        2, 5, 10 + 20 + (100 + 101 + 102)
    )


def test_nothing_is_known_before_the_first_step() -> None:
    cost = StepCost()
    assert not cost.known and cost.predict(StepLoad(1, 100, 0)) == 0.0
    cost.learn_step(StepLoad(1, 32, 0), 0.1)
    assert cost.known and cost.predict(StepLoad(1, 32, 0)) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(5))
def test_it_predicts_every_kind_of_step_after_hours_of_one_kind(seed: int) -> None:
    machine = lived(Machine(seed=seed))
    for chunks in (
        [(300, 1)] * 16,
        [(1000, 1)] * 16,
        [(300, 1)] * 3 + [(1000, 24)],
        [(0, 128)],
        [(600, 128)],
    ):
        assert abs(machine.error(*chunks)) < 0.25, (chunks, machine.cost)


def test_one_outlier_changes_little_and_a_lasting_change_is_learned() -> None:
    machine = lived(Machine(noise=0.02))
    load = StepLoad.of_chunks([(300, 1)] * 16)
    before = machine.cost.predict(load)
    machine.cost.learn_step(load, 10 * before)
    assert machine.cost.predict(load) < 1.5 * before
    machine.slowness = 4.0
    for _ in range(15):
        machine.step(*[(300, 1)] * 16)
    assert abs(machine.error(*[(300, 1)] * 16)) < 0.2


@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.3])
def test_it_learns_machines_of_any_speed(row_s: float) -> None:
    cost = StepCost()
    for at in range(0, 2000, 100):
        load = StepLoad.of_chunks([(at, 100)])
        cost.learn_step(load, 5 * row_s + row_s * load.tokens + row_s / 1000 * load.depth)
    load = StepLoad.of_chunks([(2000, 100)])
    assert cost.predict(load) == pytest.approx(5 * row_s + 100 * row_s + row_s * 204.95, rel=0.1)


def test_coefficients_are_never_negative() -> None:
    cost = StepCost()
    rng = random.Random(3)
    for _ in range(500):
        cost.learn_step(StepLoad(1, rng.randint(1, 200), rng.randint(0, 10**5)), rng.random())
        assert cost.predict(StepLoad(1, 0, 0)) >= 0 and cost.recompute_s(1000) >= 0


STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 512)), min_size=1, max_size=16),
        st.floats(0, 1e4),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=repetitions(100))
@given(STEPS, st.integers(1, 30))
def test_predictions_are_finite_with_any_clock(
    steps: list[tuple[list[tuple[int, int]], float]], rounds: int
) -> None:
    cost = StepCost()
    for chunks, seconds in steps * rounds:
        load = StepLoad.of_chunks(chunks)
        cost.learn_step(load, seconds)
        assert 0 <= cost.predict(load) < math.inf
        assert 0 <= cost.recompute_s(1000) < math.inf


def test_coefficients_driven_to_zero_are_learned_again() -> None:
    machine = lived(Machine())
    for at in range(2000):
        machine.cost.learn_step(StepLoad.of_chunks([(at % 500, 1)]), 0.0)
    for at in range(0, 2000, 4):
        machine.step((at % 500, 1), (at % 300, 1))
    assert abs(machine.error((100, 1), (100, 1))) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_a_cost_that_does_not_rise_with_the_depth_stays_the_same(seed: int) -> None:
    cost, rng = StepCost(), random.Random(seed)
    for position in range(0, 6000, 60):
        load = StepLoad.of_chunks([(position, 60)])
        cost.learn_step(load, (GRAPH_S + ROW_S * 60) * rng.gauss(1, 0.02))
        seconds = cost.predict(StepLoad.of_chunks([(position + 60, 60)]))
        assert seconds == pytest.approx(GRAPH_S + ROW_S * 60, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_after_a_busy_time_of_decoding_a_prompt_shows_its_cost_again(seed: int) -> None:
    machine, rng = lived(Machine(seed=seed)), random.Random(seed)
    for _ in range(300):
        machine.slowness = rng.choice([2, 2, 3, 20])
        machine.step(*[(200, 1)] * rng.randint(1, 3))
    machine.slowness = 2.0
    for at in range(12):
        machine.step(*[(200, 1)] * 3, (20 * at, 20))
    assert abs(machine.error(*[(200, 1)] * 3, (300, 30))) < 0.25


def test_costs_are_learned_for_each_number_of_threads() -> None:
    """A change of threads causes no outliers, so that prompts do not slow streams down."""
    machine = Machine(noise=0.02)
    machine.cost.use_threads(2)
    lived(machine)
    kinds = ([(300, 1)] * 16, [(600, 128)])
    for threads, slowness in ((1, 2.0), (2, 1.0), (1, 2.0)):
        machine.cost.use_threads(threads)
        machine.slowness = slowness
        for chunks in kinds:
            assert abs(machine.error(*chunks)) < 0.25, (threads, machine.cost)
        for _ in range(50):
            machine.step(*kinds[0])


def test_more_threads_are_not_expected_to_be_faster() -> None:
    machine = Machine()
    machine.cost.use_threads(1)
    load = StepLoad.of_chunks([(300, 1)] * 16)
    before = lived(machine).cost.predict(load)
    machine.cost.use_threads(2)
    assert machine.cost.predict(load) == before


def test_the_number_of_threads_has_no_effect_before_the_first_step() -> None:
    cost = StepCost()
    for threads in (2, 1):
        cost.use_threads(threads)
    cost.learn_step(StepLoad(1, 32, 0), 0.1)
    assert cost.predict(StepLoad(1, 32, 0)) == pytest.approx(0.1)


def test_tokens_are_never_expected_to_be_quicker_than_the_quickest() -> None:
    """A busy machine must not make prompts seem free."""
    for seed in range(20):
        machine, rng = lived(Machine(seed=seed)), random.Random(seed)
        for at in range(200):
            chunks = [(200 + at, 1)] * rng.randint(1, 16)
            load = StepLoad.of_chunks(chunks)
            machine.cost.learn_step(load, machine.seconds(load) * rng.choice([1, 1, 1, 10, 30]))
        assert machine.cost.predict(StepLoad.of_chunks([(0, 480)])) > 480 * 0.5 * ROW_S


def test_learned_costs_predict_the_same_elsewhere() -> None:
    machine = lived(Machine())
    machine.step((0, 200))
    known = machine.cost.coefficients()
    assert known is not None
    copy = StepCost.from_coefficients(known)
    for chunks in ([(10, 1), (500, 1)], [(0, 300)], [(400, 1), (0, 20)]):
        load = StepLoad.of_chunks(chunks)
        assert copy.predict(load) == machine.cost.predict(load)
    assert copy.coefficients() == known
    assert StepCost().coefficients() is None


@pytest.mark.parametrize("logits_s", [0.2 * ROW_S, 3 * ROW_S])
def test_logits_are_learned_without_a_change_of_other_steps(logits_s: float) -> None:
    machine = lived(Machine())
    others = [((0, 120),), ((300, 1),) * 16]
    before = [machine.cost.predict(StepLoad.of_chunks(chunks)) for chunks in others]
    assert machine.cost.logits_as_tokens(100) == 0
    for at in range(0, 800, 20):
        load = StepLoad.of_chunks([(at, 20)], 19)
        machine.cost.learn_step(load, machine.seconds(load) + 19 * logits_s)
    load = StepLoad.of_chunks([(0, 20), (50, 1)], 19)
    seconds = machine.seconds(load) + 19 * logits_s
    assert machine.cost.predict(load) == pytest.approx(seconds, rel=0.15)
    assert machine.cost.logits_as_tokens(100) == pytest.approx(100 * logits_s / ROW_S, rel=0.25)
    assert [machine.cost.predict(StepLoad.of_chunks(chunks)) for chunks in others] == before


def test_a_pause_during_a_step_with_logits_is_forgotten_soon() -> None:
    machine = lived(Machine())
    load = StepLoad.of_chunks([(0, 20)], 19)
    seconds = machine.seconds(load) + 19 * ROW_S
    for _ in range(30):
        machine.cost.learn_step(load, seconds)
    machine.cost.learn_step(load, 20.0)
    assert machine.cost.predict(load) < 1.5 * seconds
    for _ in range(10):
        machine.cost.learn_step(load, seconds)
    assert machine.cost.predict(load) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("count", "most", "size"),
    [
        *((3, 90, 3), (8, 90, 8), (11, 90, 8), (12, 90, 16), (12, 15, 12), (16, 90, 16)),
        *((27, 90, 24), (28, 90, 32), (31, 31, 28), (63, 90, 64), (70, 90, 68)),
    ],
)
def test_chunks_fill_blocks_of_the_engine(count: int, most: int, size: int) -> None:
    assert StepCost(16).fast_size(count, most) == size
    assert StepCost().fast_size(count, most) == count


def test_a_whole_block_is_expected_to_cost_less_than_its_tokens() -> None:
    """Llama 1.1B in Q4_0, two cores: 15 tokens took 189 ms, 16 took 146."""
    cost = StepCost(16)
    for tokens, seconds in ((1, 0.022), (4, 0.058), (8, 0.1)):
        for _ in range(50):
            cost.learn_step(StepLoad(1, tokens, 0, decodes=tokens == 1, passes=(tokens,)), seconds)
    assert cost.logits_pass_s(16) == pytest.approx(0.144, abs=0.003)
    assert cost.logits_pass_s(15) == pytest.approx(0.178, abs=0.003)
    assert cost.logits_pass_s(32) == pytest.approx(0.278, abs=0.003)
