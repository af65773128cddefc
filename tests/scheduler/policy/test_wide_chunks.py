"""Chunks of prompts on machines where large batches cost less per token than small ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from inferd.backends import SamplingParams
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.owner import Owner, OwnerClock
from inferd.scheduler.policy.batch_plan import ScheduledTokens, plan_tokens
from inferd.scheduler.policy.cost import WIDE, StepCost, StepLoad, greatest_fitting
from inferd.scheduler.policy.order import Order
from inferd.scheduler.policy.step_budget import TIMES_MAX
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.task import Task

SETTINGS = EngineSettings()
TARGET_S = SETTINGS.step_s_target
PROMPT_TOKENS = 1416
STREAMS = 3

Chunks = Sequence[tuple[int, int]]
Ubatch = tuple[int, Sequence[int]]
"""The tokens of each sequence, and the positions at which they begin."""


def ubatches_of(chunks: Chunks) -> list[Ubatch]:
    """Split a batch as llama.cpp does: each sequence advances by the least that one has left."""
    ubatches: list[Ubatch] = []
    left = [(position, count) for position, count in chunks if count]
    while left:
        size = min(count for _, count in left)
        ubatches.append((size, [position for position, _ in left]))
        left = [(position + size, count - size) for position, count in left if count > size]
    return ubatches


def depth(ubatch: Ubatch) -> int:
    size, positions = ubatch
    return sum(position + i for position in positions for i in range(size))


def linear_s(ubatch: Ubatch) -> float:
    """Return the seconds of a pass on a CPU on which each token costs the same."""
    return 0.004 + 0.0029 * ubatch[0] * len(ubatch[1]) + 2.4e-6 * depth(ubatch)


def stepped_s(ubatch: Ubatch) -> float:
    """Return the seconds of a pass on a CPU on which large ones are more efficient: below 64 tokens
    each takes 4.7 ms, from then on 2.8 ms.
    """
    return 0.004 + (0.0047 if ubatch[0] < 64 else 0.0028) * ubatch[0] * len(ubatch[1])


def tiled_s(ubatch: Ubatch) -> float:
    """Return the seconds of a pass of SmolLM2-135M on two cores with AMX: from 64 tokens on,
    attention is computed in tiles.
    """
    token_s = 0.0026 * ubatch[0] * len(ubatch[1])
    return 0.0043 + token_s + (9.5e-6 if ubatch[0] < 64 else 1.2e-6) * depth(ubatch)


MACHINES = {"linear": linear_s, "stepped": stepped_s, "tiled": tiled_s}


class Machine:
    """A machine of known cost with noise, and the model that learns it."""

    def __init__(self, ubatch_s: Callable[[Ubatch], float], noise: float = 0.05, seed: int = 1):
        self.cost, self.slowness = StepCost(), 1.0
        self._ubatch_s, self._noise, self._rng = ubatch_s, noise, random.Random(seed)

    def seconds(self, chunks: Chunks) -> float:
        return self.slowness * sum(map(self._ubatch_s, ubatches_of(chunks)))

    def error(self, *chunks: tuple[int, int]) -> float:
        return self.cost.predict(StepLoad.of_chunks(chunks)) / self.seconds(chunks) - 1

    def compute_step(self, tasks: Sequence[Task]) -> list[int]:
        """Plan, compute and learn a step; return the tokens of each task."""
        order = Order(0, OwnerClock(), SETTINGS)
        plan = {part.task.spec.id: part.count for part in self.plan(tasks, order)}
        counts = [plan.get(task.spec.id, 0) for task in tasks]
        self.learn([(t.computed, n) for t, n in zip(tasks, counts, strict=True) if n])
        for task, count in zip(tasks, counts, strict=True):
            task.computed += count
            if not task.pending:
                task.tokens.append(1)
        return counts

    def plan(self, tasks: Sequence[Task], order: Order) -> Sequence[ScheduledTokens]:
        return plan_tokens(tasks, order, SETTINGS, 2048, self.cost)

    def learn(self, chunks: Chunks) -> None:
        seconds = self.seconds(chunks) * self._rng.gauss(1, self._noise)
        self.cost.learn_step(StepLoad.of_chunks(chunks), seconds)


def task(number: int, tokens: int) -> Task:
    packed = pack_tokens(range(tokens))
    spec = TaskSpec(id=number, owner=Owner(1), tokens=packed, sampling=SamplingParams())
    return Task.from_spec(spec, arrival=number, clock=0, now=0.0)


def compute_prompt(machine: Machine, prompt: Task, streams: Sequence[Task] = ()) -> list[list[int]]:
    """Compute steps until *prompt* is computed; return their tokens of each task."""
    steps = []
    while prompt.prefilling:
        steps.append(machine.compute_step([*streams, prompt]))
    return steps


def started_streams(machine: Machine) -> list[Task]:
    """Return streams after their first tokens."""
    streams = [task(number, 77) for number in range(STREAMS)]
    for stream in streams:
        compute_prompt(machine, stream)
        stream.first_logits_at = -100.0
    for _ in range(60):
        machine.compute_step(streams)
    return streams


def lived(machine: Machine) -> Machine:
    """Compute a prompt without neighbours, then one beside streams."""
    compute_prompt(machine, task(9, PROMPT_TOKENS))
    compute_prompt(machine, task(10, PROMPT_TOKENS), started_streams(machine))
    return machine


def read_beside_streams(machine: Machine) -> tuple[list[int], list[float]]:
    """Compute a long prompt beside streams; return the sizes of its chunks and the steps' seconds
    without noise.
    """
    streams, prompt = started_streams(machine), task(10, PROMPT_TOKENS)
    sizes, seconds = [], []
    while prompt.prefilling:
        positions = [t.computed for t in (*streams, prompt)]
        counts = machine.compute_step([*streams, prompt])
        sizes.append(counts[-1])
        seconds.append(machine.seconds(list(zip(positions, counts, strict=True))))
    return sizes, seconds


# The cost.


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 63)],
        [(0, 64)],
        [(100, 1), (100, 1), (500, 64)],
        [(100, 1), (100, 1), (500, 65)],
        [(0, 70), (300, 200), (300, 200), (5, 3), (9, 130)],
        [(0, 100), (0, 50)],
    ],
)
def test_a_load_has_the_part_of_the_ubatches_that_are_wide(chunks: Chunks) -> None:
    wide = [ubatch for ubatch in ubatches_of(chunks) if ubatch[0] >= WIDE]
    tokens = sum(size * len(positions) for size, positions in wide)
    expected = StepLoad(len(wide), tokens, sum(map(depth, wide))) if wide else None
    assert StepLoad.of_chunks(chunks).wide == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MACHINES)
def test_it_predicts_narrow_and_wide_chunks(name: str, seed: int) -> None:
    machine = lived(Machine(MACHINES[name], seed=seed))
    for _ in range(600):
        machine.learn([(200, 1)] * STREAMS)
    streams = [(200, 1)] * STREAMS
    for chunks in (streams, [*streams, (300, 20)], [*streams, (1000, 65)], [(600, 200)]):
        assert abs(machine.error(*chunks)) < 0.25, chunks


def test_until_a_wide_chunk_was_computed_it_is_expected_to_cost_what_narrow_ones_cost() -> None:
    machine = Machine(stepped_s, noise=0.0)
    for position in range(0, 320, 32):
        machine.learn([(position, 32)])
        machine.learn([(position, 1)])
    assert machine.cost.predict(StepLoad.of_chunks([(0, 200)])) == pytest.approx(0.944, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_chunk_is_tried_although_no_prompt_was_computed_without_neighbours(
    seed: int,
) -> None:
    sizes, seconds = read_beside_streams(Machine(tiled_s, seed=seed))
    assert WIDE + 1 in sizes
    assert sum(seconds) < 8.0


@pytest.mark.parametrize("name", MACHINES)
def test_after_decoding_on_a_slower_machine_the_first_wide_chunk_shows_their_new_cost(
    name: str,
) -> None:
    machine = lived(Machine(MACHINES[name]))
    machine.slowness = 3.0
    for _ in range(30):
        machine.learn([(200, 1)] * STREAMS)
    machine.learn([(200, 1)] * STREAMS + [(300, 65)])
    assert abs(machine.error(*[(200, 1)] * STREAMS, (100, 65))) < 0.3


def test_one_slow_wide_chunk_changes_little() -> None:
    machine = lived(Machine(tiled_s, noise=0.0))
    machine.slowness = 10.0
    machine.learn([(200, 1)] * STREAMS + [(300, 65)])
    machine.slowness = 1.0
    assert abs(machine.error(*[(200, 1)] * STREAMS, (300, 65))) < 0.5


def test_wide_chunks_that_seemed_free_are_learned_again() -> None:
    machine = lived(Machine(tiled_s))
    machine.slowness = 0.001
    for position in range(500):
        machine.learn([(position, 100)])
    machine.slowness = 1.0
    for position in range(200):
        machine.learn([(position, 1)] * STREAMS)
        machine.learn([(position, 100)])
    assert abs(machine.error((0, 100))) < 0.2


def test_wide_chunks_are_learned_for_each_number_of_threads() -> None:
    machine = Machine(tiled_s)
    machine.cost.use_threads(2)
    lived(machine)
    for threads, slowness in ((1, 2.0), (2, 1.0), (1, 2.0)):
        machine.cost.use_threads(threads)
        machine.slowness = slowness
        assert abs(machine.error(*[(200, 1)] * STREAMS, (1000, 65))) < 0.25, threads
        for _ in range(20):
            machine.learn([(200, 1)] * STREAMS)
            machine.learn([(1000, 100)])


# The plan.


def greatest(most: int, seconds: float) -> int:
    """Return the greatest count on a machine where each of fewer than 20 tokens takes a second, and
    each of more a quarter of one.
    """
    return greatest_fitting(most, 20, seconds, lambda n: n if n < 20 else n / 4)


def test_the_greatest_count_is_found_where_a_greater_one_takes_less_time() -> None:
    assert greatest(15, 100.0) == 15
    assert greatest(15, 7.5) == 7
    assert greatest(40, 0.5) == 0
    assert greatest(40, 4.5) == 4, "20 take 5 s"
    assert greatest(40, 5.0) == 20
    assert greatest(40, 7.5) == 30
    assert greatest(40, 10.0) == 40
    assert greatest(20, 5.0) == 20
    assert greatest(19, 30.0) == 19
    assert greatest(0, 5.0) == greatest(-1, 5.0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_where_large_chunks_cost_little_less_a_step_keeps_to_its_target(seed: int) -> None:
    sizes, seconds = read_beside_streams(lived(Machine(stepped_s, seed=seed)))
    assert max(sizes) < WIDE
    assert max(seconds) < 1.2 * TARGET_S
    assert sum(seconds) < 8.0


@pytest.mark.parametrize("seed", range(5))
def test_where_large_chunks_cost_half_a_step_takes_longer_and_computes_one(seed: int) -> None:
    sizes, seconds = read_beside_streams(lived(Machine(tiled_s, seed=seed)))
    first = sizes.index(WIDE + 1)
    assert set(sizes[first:]) == {WIDE + 1}, "what is left over came first"
    assert max(seconds[:first]) < 1.2 * TARGET_S
    assert max(seconds) < 1.2 * TIMES_MAX * TARGET_S
    assert sum(seconds) < 7.0, "14.7 s in narrow chunks"


@pytest.mark.parametrize("seed", range(5))
def test_where_each_token_costs_the_same_a_step_keeps_to_its_target(seed: int) -> None:
    sizes, seconds = read_beside_streams(lived(Machine(linear_s, seed=seed)))
    assert max(sizes) < WIDE
    assert max(seconds) < 1.2 * TARGET_S
    assert min(seconds[:-1]) > 0.8 * TARGET_S


def test_only_one_prompt_of_a_step_gets_a_wide_chunk_beyond_its_time() -> None:
    machine = lived(Machine(tiled_s))
    streams = started_streams(machine)
    prompts = [task(number, PROMPT_TOKENS) for number in (10, 11)]
    for prompt in prompts:
        prompt.computed = PROMPT_TOKENS - 6 * (WIDE + 1)
    counts = machine.compute_step([*streams, *prompts])
    assert sorted(counts) == [0, 1, 1, 1, WIDE + 1]
