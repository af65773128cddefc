"""Plans of slots and batches, decided without a model or a clock."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from inferd.backends import SamplingParams
from inferd.scheduler.kv.slots import Slot
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.policy.batch_plan import (
    ALONE_S,
    ScheduledTokens,
    drafts_step_s,
    plan_tokens,
)
from inferd.scheduler.policy.cost import StepCost, StepLoad
from inferd.scheduler.policy.order import Order
from inferd.scheduler.policy.slot_plan import plan_slots
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.task import Task, TaskState

SETTINGS = EngineSettings(ageing_tokens=1000, quantum_tokens=100)


def task(
    number: int,
    *,
    tokens: int = 10,
    owner: int | Owner = 1,
    priority: Priority = Priority.NORMAL,
    adapters: tuple[str, ...] = (),
) -> Task:
    spec = TaskSpec(
        id=number,
        owner=owner if isinstance(owner, Owner) else Owner(owner),
        tokens=pack_tokens(range(tokens)),
        sampling=SamplingParams(),
        priority=priority,
        adapters=adapters,
    )
    return Task.from_spec(spec, arrival=number, clock=0, now=0.0)


def running(slot: Slot, it: Task, computed: int = 0) -> Task:
    slot.task, it.slot, it.state, it.computed = it, slot.index, TaskState.RUNNING, computed
    return it


def decoding(slot: Slot, it: Task) -> Task:
    running(slot, it, computed=len(it.tokens)).tokens.append(1)
    return it


def order(
    owners: OwnerClock | None = None, clock: int = 0, settings: EngineSettings = SETTINGS
) -> Order:
    return Order(clock, owners or OwnerClock(), settings)


class Known(StepCost):
    """A machine on which a token takes *row_s* seconds, and nothing else is predicted. A pass takes
    *pass_s*.
    """

    def __init__(self, row_s: float, pass_s: float = 1.0, rows_block: int = 1):
        super().__init__(rows_block)
        self.steps, self._each, self._pass_s = 1, row_s, pass_s

    @property
    def pass_s(self) -> float:
        return self._pass_s

    def predict(self, load: StepLoad) -> float:
        return self._each * load.tokens


def slots_of(count: int) -> list[Slot]:
    return [Slot(i) for i in range(count)]


def tasks_of(slots: list[Slot]) -> list[Task]:
    return [slot.task for slot in slots if slot.task is not None]


def batch_of(
    slots: list[Slot], order: Order, settings: EngineSettings, size: int, cost: StepCost
) -> list[ScheduledTokens]:
    return plan_tokens(tasks_of(slots), order, settings, size, cost)


def test_strict_order_is_by_class_then_owner_share_then_arrival() -> None:
    owners = OwnerClock()
    owners.count_work(Owner(7), 500)
    low, late, early = task(1, priority=Priority.LOW), task(3), task(2)
    greedy, urgent = task(0, owner=7), task(4, priority=Priority.URGENT)
    strict = order(owners, settings=replace(SETTINGS, priority_strict=True))

    plan = plan_slots([low, late, early, greedy, urgent], slots_of(5), strict, SETTINGS, now=0.0)

    assert plan.start == (urgent, early, late, greedy, low)


def test_order_is_by_owner_share_then_class_then_arrival() -> None:
    owners = OwnerClock()
    owners.count_work(Owner(7), 500)
    low, late, early = task(1, priority=Priority.LOW), task(3), task(2)
    greedy, high = task(0, owner=7, priority=Priority.HIGH), task(4, priority=Priority.HIGH)

    plan = plan_slots([low, late, early, greedy, high], slots_of(5), order(owners), SETTINGS, 0.0)

    assert plan.start == (high, early, late, low, greedy)


def test_a_waiting_task_rises_by_one_class_per_ageing_tokens_but_not_past_urgent() -> None:
    it = task(1, priority=Priority.LOW)

    assert it.effective_class(999, 1000) == 0
    assert it.effective_class(2000, 1000) == 2
    assert it.effective_class(10**9, 1000) == 3


def test_a_running_task_does_not_age() -> None:
    it = running(Slot(0), task(1, priority=Priority.LOW))

    assert it.effective_class(10**9, 1000) == 0


def test_an_urgent_task_takes_the_slot_of_the_newest_of_the_lowest() -> None:
    slots = slots_of(2)
    first, second = (
        running(slots[0], task(1, priority=Priority.LOW)),
        running(slots[1], task(2, priority=Priority.LOW)),
    )
    urgent = task(3, priority=Priority.URGENT)

    plan = plan_slots([urgent], slots, order(), SETTINGS, 0.0)

    assert plan.park == (second,)
    assert plan.start == (urgent,)
    assert first not in plan.park


def test_an_aged_task_does_not_preempt_before_a_quantum_ends() -> None:
    slots = slots_of(1)
    runner = running(slots[0], task(1, priority=Priority.HIGH, owner=1))
    aged = task(2, priority=Priority.LOW, owner=2)
    owners = OwnerClock()
    owners.count_work(Owner(1), 5000)

    before = plan_slots([aged], slots, order(owners, 2000), SETTINGS, 0.0)
    runner.quantum = SETTINGS.quantum_tokens
    after = plan_slots([aged], slots, order(owners, 2000), SETTINGS, 0.0)

    assert before.park == ()
    assert after.park == (runner,)


def test_a_task_that_would_preempt_at_once_is_not_parked_for_an_equal() -> None:
    slots = slots_of(2)
    done = running(slots[0], task(1, priority=Priority.NORMAL))
    lowest = running(slots[1], task(2, priority=Priority.LOW))
    done.quantum = SETTINGS.quantum_tokens
    lowest.clock_waiting = 1000
    aged = task(3, priority=Priority.LOW)

    plan = plan_slots([aged], slots, order(clock=1000), SETTINGS, 0.0)

    assert plan.park == (lowest,)
    assert plan.start == (aged,)


def test_a_task_whose_reader_lags_gives_way_to_any_task() -> None:
    slots = slots_of(1)
    runner = running(slots[0], task(1, priority=Priority.URGENT))
    runner.reader_away_since = 10.0
    low = task(2, priority=Priority.LOW)

    soon = plan_slots([low], slots, order(), SETTINGS, 10.1)
    later = plan_slots([low], slots, order(), SETTINGS, 10.2)

    assert soon.park == ()
    assert later.park == (runner,)


def test_a_returning_owner_has_no_credit_from_idleness() -> None:
    owners = OwnerClock()
    owners.count_work(Owner(1), 1000)

    owners.add_owner(Owner(2), active=[Owner(1)])

    assert owners.served(Owner(2)) == (1000, 0)


def test_a_follower_takes_no_slot_and_the_next_task_does() -> None:
    slots = slots_of(3)
    leader = running(slots[0], task(1))
    follower, other = task(2), task(3)

    plan = plan_slots(
        [follower, other],
        slots,
        order(),
        SETTINGS,
        0.0,
        find_leader=lambda it, running: leader if it is follower and leader in running else None,
    )

    assert plan.start == (other,)
    assert plan.follow == ((follower, leader),)


def test_tokens_ascend_by_slot_and_fit_the_batch() -> None:
    slots = slots_of(3)
    running(slots[0], task(1, tokens=50))
    decoding(slots[1], task(2, tokens=5))
    running(slots[2], task(3, tokens=50))

    rows = batch_of(slots, order(), SETTINGS, 64, Known(1e-6))

    assert [(r.task.slot, r.count) for r in rows] == [(0, 50), (1, 1), (2, 13)]


def test_the_first_step_of_an_unknown_machine_is_small() -> None:
    slots = slots_of(1)
    running(slots[0], task(1, tokens=500))

    assert [r.count for r in batch_of(slots, order(), SETTINGS, 512, StepCost())] == [32]


def test_prompts_get_the_time_that_decoding_leaves() -> None:
    slots = slots_of(2)
    running(slots[0], task(1, tokens=500))
    decoding(slots[1], task(2, tokens=5))
    settings = EngineSettings(step_s_target=0.305, step_s_max=0.505)

    equal = batch_of(slots, order(), settings, 512, Known(0.01))
    slots[1].task = decoding(slots[1], task(3, tokens=5, priority=Priority.LOW))
    lower = batch_of(slots, order(), settings, 512, Known(0.01))

    assert [r.count for r in equal] == [29, 1]
    assert [r.count for r in lower] == [49, 1]


def test_chunks_of_prompts_fill_blocks_of_the_engine() -> None:
    slots = slots_of(2)
    running(slots[0], task(1, tokens=500))
    decoding(slots[1], task(2, tokens=5))

    def count(step_s: float) -> int:
        settings = EngineSettings(step_s_target=step_s, step_s_max=step_s)
        planned = batch_of(slots, order(), settings, 512, Known(0.01, rows_block=16))
        return planned[0].count

    assert [count(0.135), count(0.235), count(0.305), count(0.265)] == [16, 20, 32, 24]


def test_a_prompt_alone_is_computed_in_steps_of_half_a_second() -> None:
    slots = slots_of(1)
    running(slots[0], task(1, tokens=500))

    assert [r.count for r in batch_of(slots, order(), EngineSettings(), 512, Known(0.01))] == [50]


def test_a_prompt_alone_has_shorter_steps_where_a_pass_takes_little_of_them() -> None:
    slots = slots_of(1)
    running(slots[0], task(1, tokens=500))
    settings = EngineSettings(step_s_target=0.305)

    def count(pass_s: float) -> int:
        [planned] = batch_of(slots, order(), settings, 512, Known(0.01, pass_s))
        return planned.count

    assert (count(0.001), count(0.012), count(1.0)) == (20, 24, 50)


def test_prompts_advance_even_if_decoding_exceeds_the_target() -> None:
    slots = slots_of(41)
    for slot in slots[:40]:
        decoding(slot, task(slot.index))
    running(slots[40], task(40, tokens=500))
    slow = batch_of(slots, order(), EngineSettings(step_s_target=0.01), 512, Known(0.01))
    half = slots[20:]
    least = batch_of(half, order(), EngineSettings(step_s_target=0.01), 512, Known(0.01))

    assert slow[-1].count == 20, "half of the time of the 40 decoding tokens"
    assert least[-1].count == 16, "the least, which is more than half of 20"


def test_several_prompts_share_a_step_in_the_order_of_the_queue() -> None:
    slots = slots_of(3)
    running(slots[0], task(3, tokens=500))
    running(slots[1], task(1, tokens=30))
    running(slots[2], task(2, tokens=500))

    rows = batch_of(slots, order(), EngineSettings(step_s_max=0.505), 512, Known(0.01))

    assert [(r.task.spec.id, r.count) for r in rows] == [(1, 30), (2, 20)]


def test_tasks_of_one_burst_wait_for_each_other_but_not_for_later_ones() -> None:
    slots = slots_of(3)
    decoding(slots[0], task(1)).first_logits_at = 10.0
    burst = running(slots[1], task(2, tokens=200))
    late = running(slots[2], task(3, tokens=200))
    settings = EngineSettings(step_s_target=0.205, step_s_max=0.505, burst_s=4.1)

    def rows(settings: EngineSettings = settings) -> list[int]:
        return [r.count for r in batch_of(slots, order(), settings, 512, Known(0.01))]

    assert rows() == [1, 49]
    assert rows(replace(settings, burst_s=3.9)) == [1, 19], "it would take too long"
    late.slot_since = 10.6
    assert rows() == [1, 19], "it arrived when the stream had begun"
    late.slot_since = burst.slot_since = 10.5
    assert rows() == [1, 49]
    target = replace(settings, step_s_target=0.605)
    assert rows(target) == [1, 59], "a longer target is allowed"


def test_an_aged_task_does_not_block_a_higher_class_behind_it() -> None:
    slots = slots_of(1)
    normal = running(slots[0], task(1, priority=Priority.NORMAL))
    aged, high = task(2, priority=Priority.LOW), task(3, priority=Priority.HIGH)
    aged.age = 3 * SETTINGS.ageing_tokens

    plan = plan_slots([high, aged], slots, order(), SETTINGS, 0.0)

    assert (plan.park, plan.start) == ((normal,), (high,))


def test_prompts_of_the_lowest_class_have_shorter_steps() -> None:
    slots = slots_of(1)
    running(slots[0], task(1, tokens=500, priority=Priority.LOW))
    settings = EngineSettings(step_s_target=0.305, step_s_max=0.505)

    assert [r.count for r in batch_of(slots, order(), settings, 512, Known(0.01))] == [20]


def test_the_last_tokens_of_a_prompt_are_added_and_a_few_do_not_begin_one() -> None:
    slots = slots_of(3)
    for slot, tokens in zip(slots, (20, 24, 500), strict=True):
        running(slot, task(slot.index, tokens=tokens))
    settings = EngineSettings(step_s_max=0.405)

    first = batch_of(slots, order(), settings, 512, Known(0.01))
    rest = batch_of(slots[2:], order(), EngineSettings(step_s_max=0.055), 512, Known(0.01))

    assert [(r.task.spec.id, r.count) for r in first] == [(0, 20), (1, 24)]
    assert [r.count for r in rest] == [16], "unless nothing else would advance"


def test_a_prompt_alone_is_not_divided_for_a_rest_of_half_a_chunk() -> None:
    settings = EngineSettings(step_s_target=0.305)
    for tokens, beside, chunk in ((30, False, 30), (31, False, 20), (30, True, 20)):
        slots = slots_of(2)
        running(slots[0], task(0, tokens=tokens))
        if beside:
            running(slots[1], task(1, tokens=100))

        batch = batch_of(slots, order(), settings, 512, Known(0.01, pass_s=0.0))

        assert batch[0].count == chunk, (tokens, beside)


def test_prompts_of_a_lower_class_wait_for_those_of_a_higher_one() -> None:
    slots = slots_of(3)
    running(slots[0], task(1, tokens=30, priority=Priority.URGENT))
    waiting = running(slots[1], task(2, tokens=30, priority=Priority.LOW))
    running(slots[2], task(3, tokens=30, priority=Priority.URGENT))

    def served() -> list[int]:
        return [r.task.spec.id for r in batch_of(slots, order(), SETTINGS, 512, Known(1e-6))]

    assert served() == [1, 3]
    waiting.age = 3 * SETTINGS.ageing_tokens
    assert served() == [1, 2, 3]


def test_a_chunk_ends_at_a_checkpoint() -> None:
    slots = slots_of(1)
    it = running(slots[0], task(1, tokens=40), computed=5)
    it.checkpoints = {5, 12, 30}

    assert [r.count for r in batch_of(slots, order(), SETTINGS, 512, Known(1e-6))] == [7]


def test_a_prompt_keeps_to_a_batch_size_of_its_own() -> None:
    first, second = slots_of(2)
    capped = running(first, task(1, tokens=500))
    capped.spec = msgspec.structs.replace(capped.spec, batch_size=32)
    other = running(second, task(2, tokens=100))
    planned = batch_of([first, second], order(), SETTINGS, 512, Known(1e-6))
    assert [(p.task, p.count) for p in planned] == [(capped, 32), (other, 100)]


def test_a_reserved_prompt_computes_its_quantum_in_steps_of_its_own_class() -> None:
    slots = slots_of(2)
    decoding(slots[0], task(1))
    low = running(slots[1], task(2, tokens=2000, priority=Priority.LOW))
    unreserved = batch_of(slots, order(), SETTINGS, 2048, Known(0.001))
    low.reserved_tokens = 5000
    assert batch_of(slots, order(), SETTINGS, 2048, Known(0.001)) == unreserved
    low.reserved_tokens = 20
    assert [part.count for part in batch_of(slots, order(), SETTINGS, 2048, Known(0.001))] == [
        1,
        20,
    ]


def test_only_a_stream_that_is_alone_for_long_enough_has_longer_steps_for_its_drafts() -> None:
    settings = EngineSettings()
    target_s, it = settings.step_s_target, task(1)

    def seconds(*streams: Task, alone_s: float = ALONE_S) -> float:
        return drafts_step_s(streams, alone_s, order(), settings)

    assert seconds(it) == 2 * target_s
    assert seconds(task(1, priority=Priority.URGENT)) == 2 * target_s
    assert seconds(it, alone_s=0.9 * ALONE_S) == target_s, "others may come back"
    assert seconds(it, alone_s=0.0) == target_s
    assert seconds(it, task(2)) == target_s
    assert seconds(it, task(2, priority=Priority.LOW)) == target_s
    assert seconds(task(1, priority=Priority.LOW)) == target_s, "any arrival precedes it"


def test_a_longer_step_for_drafts_keeps_to_the_bound_of_prompts_that_are_alone() -> None:
    for target_s, expected_s in ((0.05, 0.1), (0.3, 0.5), (0.5, 0.5), (0.7, 0.7)):
        settings = EngineSettings(step_s_target=target_s)
        assert drafts_step_s([task(1)], ALONE_S, order(), settings) == expected_s
