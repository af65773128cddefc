"""The sizes of chunks of forced tokens, decided without a model or a clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from inferd.backends import SamplingParams
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.policy.batch_plan import plan_forced, plan_tokens
from inferd.scheduler.policy.cost import StepCost, StepLoad
from inferd.scheduler.policy.order import Order
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.task import Task

SETTINGS = EngineSettings(step_s_target=0.1005, step_s_max=0.4005)


class Machine(StepCost):
    """A pass takes 4 ms, and each token of it 3 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 1

    def predict(self, load: StepLoad) -> float:
        return 0.004 * load.ubatches + 0.003 * load.tokens


def decoding(forced: int = 0, priority: Priority = Priority.NORMAL) -> Task:
    """Return a task that has a sampled token, and *forced* ones behind it, to compute."""
    tokens = pack_tokens(range(10))
    spec = TaskSpec(
        id=1, owner=Owner(1), tokens=tokens, sampling=SamplingParams(), priority=priority
    )
    task = Task.from_spec(spec, arrival=1, clock=0, now=0.0)
    task.computed = len(task.tokens)
    task.tokens += [7] * (1 + forced)
    task.forced_behind = forced
    return task


def prompt(tokens: int) -> Task:
    task = decoding()
    task.tokens, task.prompt_size, task.computed = list(range(tokens)), tokens, 0
    task.slot_since = 10.0
    return task


def counts(tasks: list[Task], size: int = 512, settings: EngineSettings = SETTINGS) -> list[int]:
    order = Order(0, OwnerClock(), settings)
    return [part.count for part in plan_tokens(tasks, order, settings, size, Machine())]


def test_a_task_alone_computes_all_its_forced_tokens() -> None:
    assert counts([decoding(0)]) == [1]
    assert counts([decoding(1)]) == [2]
    assert counts([decoding(64)]) == [65]


def test_the_time_of_a_chunk_is_that_of_a_prompts_chunk_beside_streams() -> None:
    assert counts([decoding(200)]) == [132], "0.4 s: alone"
    assert counts([decoding(200, Priority.LOW)]) == [20 + 1], "two thirds of the target: low"
    assert counts([decoding(200), decoding()]) == [1 + 28, 1], "the target: beside a stream"


def test_beside_prompts_a_chunk_gets_half_of_the_time_and_the_step_keeps_to_its_target() -> None:
    chunk, read = counts([decoding(200), prompt(500)])
    assert (chunk, read) == (15, 16)
    assert Machine().predict(StepLoad.of_chunks([(10, chunk), (0, read)])) < 0.105


def test_chunks_have_the_size_that_computes_most_tokens() -> None:
    assert counts([decoding(6), decoding(), decoding(6), decoding(2)]) == [7, 1, 7, 1]
    assert counts([decoding(3), decoding(3), decoding(5), decoding(3)]) == [4, 4, 4, 4]
    assert counts([decoding(9), decoding(1), decoding(1)]) == [10, 1, 1]


def test_a_pass_adds_as_many_tokens_as_the_step_has_without_it() -> None:
    streams = [decoding() for _ in range(9)]
    assert counts([decoding(9), *streams]) == [1] * 10
    assert counts([decoding(10), *streams]) == [11, *[1] * 9]
    assert counts([decoding(3)] * 3 + streams[:7]) == [1] * 10
    assert counts([decoding(4)] * 3 + streams[:7]) == [5] * 3 + [1] * 7
    assert counts([decoding(1)] * 16) == [2] * 16, "no stream waits for another pass"


def test_chunks_fit_the_batch_and_leave_the_prompts_their_minimum() -> None:
    fast = replace(SETTINGS, step_s_target=10.0, step_s_max=10.0)
    assert counts([decoding(40)], 16, fast) == [16]
    assert counts([decoding(40)] * 3, 16, fast) == [5] * 3
    assert counts([decoding(40), prompt(500)], 32, fast) == [16, 16]
    assert counts([decoding(40), prompt(500)], 16, fast) == [1, 15]


def test_a_chunk_ends_at_a_checkpoint_and_with_a_reserved_quantum() -> None:
    task = decoding(8)
    task.checkpoints = {14}
    assert counts([task]) == [4]
    task.checkpoints, task.reserved_tokens = set(), 3
    assert counts([task]) == [3]


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Record the calls of functions, and the steps of generators."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("forced", [0, 1])
def test_the_work_of_a_plan_grows_as_the_number_of_tasks(forced: int) -> None:
    tasks = [decoding(forced * (index + 1)) for index in range(200)]
    with counted_calls() as calls:
        planned = plan_forced(tasks, Machine(), 10.0, 512)
    assert len(planned) == 200 and (sum(planned) > 200) == bool(forced)
    assert len(calls) < 50 * 200


def test_nothing_forced_is_found_without_a_prediction() -> None:
    with counted_calls() as calls:
        assert plan_forced([decoding()] * 200, Machine(), 10.0, 512) == [1] * 200
    assert len(calls) < 3 * 200


@pytest.mark.parametrize("forced", [[0], [5, 0, 3], [9] * 4])
def test_on_an_unknown_machine_a_chunk_is_bounded_too(forced: list[int]) -> None:
    tasks = [decoding(count) for count in forced]
    planned = plan_forced(tasks, StepCost(), 0.1, 8)
    assert sum(planned) <= 8 and min(planned) >= 1


def test_a_lost_state_is_read_like_a_prompt() -> None:
    task = decoding(3)
    assert not task.prefilling
    task.computed = 0
    assert task.prefilling
