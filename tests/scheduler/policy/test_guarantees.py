"""Users' shares of a model's time, and the tasks that are held back for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from inferd.backends import EmbedSpec
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.policy.batch_plan import ADAPTERS_LAG_S, held_back
from inferd.scheduler.policy.cost import StepCost, StepLoad
from inferd.scheduler.policy.guarantees import (
    AHEAD_S_MAX,
    ALIKE_S,
    BEHIND_S_MAX,
    NEWCOMER_S,
    NO_GUARANTEES,
    PARTS_MAX,
    SLOT_KEPT_S,
    STARVED_S,
    WINDOW_S,
    Guarantees,
    Part,
    UserLags,
    fleet_weights,
)
from inferd.scheduler.policy.order import Order
from inferd.scheduler.policy.slot_plan import plan_slots
from inferd.scheduler.task import Task
from tests.scheduler.policy.test_plan import SETTINGS, decoding, running, slots_of, task

ADA, BOB, CARL = Owner(1), Owner(2), Owner(3)
GATEWAY, FIRST, SECOND = 9, Owner(1 << 40), Owner((1 << 40) + 1)
NORMAL, HIGH, URGENT = Priority.NORMAL, Priority.HIGH, Priority.URGENT
GAP_S = 0.15


def shares_of(*owners: Owner, time: UserLags | None = None, now: float = 0.0) -> Guarantees:
    time = UserLags() if time is None else time
    return time.shares(dict.fromkeys(owners, NORMAL), now)


def share(shares: Guarantees, owner: Owner) -> float:
    return shares.shares[shares.parts[owner][-1]]


def order(shares: Guarantees, *, strict: bool = False) -> Order:
    settings = replace(SETTINGS, priority_strict=strict)
    return Order(0, OwnerClock(), settings, shares)


def with_lags(lags: Mapping[Owner, float], urgent: frozenset[int] = frozenset()) -> Guarantees:
    """Return shares in which the users of these owners are behind by these seconds."""
    shares = shares_of(*lags)
    parts = {part: lag for owner, lag in lags.items() for part in shares.parts[owner]}
    return Guarantees(shares.parts, parts, shares.weights, shares.shares, urgent)


# Shares.


def test_a_single_owner_has_no_shares() -> None:
    assert shares_of(ADA) is NO_GUARANTEES and shares_of() is NO_GUARANTEES


def test_users_have_equal_shares_however_many_labels_one_has() -> None:
    labels = [Owner(1, label) for label in "abc"]
    shares = shares_of(*labels, BOB)
    assert share(shares, BOB) == 0.5
    assert [share(shares, owner) for owner in labels] == pytest.approx([1 / 6] * 3)


def test_users_of_a_gateway_divide_the_part_of_the_gateways_user() -> None:
    time = UserLags()
    for user in (FIRST, SECOND):
        time.set_account(user.user, GATEWAY)
    shares = shares_of(FIRST, SECOND, BOB, time=time)
    assert [share(shares, owner) for owner in (FIRST, SECOND, BOB)] == [0.25, 0.25, 0.5]


def test_classes_shift_shares_by_three_to_one() -> None:
    shares = UserLags().shares({ADA: HIGH, BOB: NORMAL}, 0.0)
    assert (share(shares, ADA), share(shares, BOB)) == (0.75, 0.25)


def test_strict_priorities_guarantee_nothing_to_lower_classes() -> None:
    shares = UserLags(strict=True).shares({ADA: HIGH, BOB: NORMAL, CARL: HIGH}, 0.0)
    assert [share(shares, owner) for owner in (ADA, BOB, CARL)] == [0.5, 0.0, 0.5]


def test_a_user_who_is_served_on_other_nodes_has_less_here() -> None:
    time = UserLags()
    for user in (FIRST, SECOND):
        time.set_account(user.user, GATEWAY)
    totals = dict.fromkeys((FIRST.user, SECOND.user), 0)
    for number in range(30):
        totals = {FIRST.user: 40 * number, SECOND.user: 40 * number}
        time.note_exchange({FIRST.user: 40}, totals, now=0.2 * number)
    shares = shares_of(FIRST, SECOND, time=time, now=6.0)
    assert share(shares, FIRST) == pytest.approx(0.25, abs=0.02)
    assert share(shares_of(FIRST, SECOND, time=time, now=6.0 + 2 * WINDOW_S), FIRST) == 0.5


@pytest.mark.parametrize(
    ("elsewhere", "expected"),
    [((0, 0), (1, 1)), ((4, 0), (0.5, 1.5)), ((20, 0), (0.01, 2)), ((4, 4), (1, 1))],
)
def test_tokens_here_and_elsewhere_are_equal_in_sum_if_possible(
    elsewhere: tuple[int, int], expected: tuple[float, float]
) -> None:
    weights: dict[Part, float] = {(1,): 1.0, (2,): 1.0}
    found = fleet_weights(weights, dict(zip(weights, elsewhere, strict=True)), 8)
    assert tuple(found.values()) == pytest.approx(expected)
    assert fleet_weights(weights, dict.fromkeys(weights, 5), 0) == weights


# Lags.


def test_a_lag_is_the_guarantee_less_the_time_used_and_is_bounded() -> None:
    time = UserLags()
    shares = shares_of(ADA, BOB, time=time)
    time.count_work(shares, 0.2, {ADA: 0.01, BOB: 0.19})
    assert shares.lags[1,] == pytest.approx(NEWCOMER_S + 0.1 - 0.01)
    assert shares.lags[2,] == pytest.approx(NEWCOMER_S + 0.1 - 0.19)
    time.count_work(shares, 60.0, {BOB: 60.0})
    assert (shares.lags[1,], shares.lags[2,]) == (BEHIND_S_MAX, -AHEAD_S_MAX)


def test_idleness_earns_nothing_but_a_prompt_start() -> None:
    time = UserLags()
    shares = shares_of(ADA, BOB, time=time)
    time.count_work(shares, 60.0, {BOB: 60.0})
    shares_of(BOB, CARL, time=time, now=0.5)
    shares = shares_of(ADA, BOB, CARL, time=time, now=1.0)
    assert shares.lags[1,] == BEHIND_S_MAX, "a pause between two turns is not idleness"
    shares_of(BOB, CARL, time=time, now=2.0)
    shares = shares_of(ADA, BOB, CARL, time=time, now=1.1 + WINDOW_S)
    assert shares.lags[1,] == NEWCOMER_S


def test_a_moment_alone_does_not_end_a_lag() -> None:
    time = UserLags()
    shares = shares_of(ADA, BOB, time=time)
    time.count_work(shares, 0.4, {BOB: 0.4})
    before = shares.lags[1,]
    shares_of(ADA, time=time, now=0.4)
    shares_of(ADA, time=time, now=0.41)
    assert shares_of(ADA, BOB, time=time, now=0.42).lags[1,] == pytest.approx(before - 0.01)
    shares_of(ADA, time=time, now=0.5)
    shares_of(ADA, time=time, now=1.0)
    assert shares_of(ADA, BOB, time=time, now=1.0).lags[1,] == 0.0


def test_work_of_an_owner_without_tasks_counts_for_the_others() -> None:
    time = UserLags()
    shares = shares_of(ADA, BOB, time=time)
    time.count_work(shares, 0.02, {CARL: 0.02})
    assert shares.lags[1,] == shares.lags[2,] == pytest.approx(NEWCOMER_S + 0.01)


def test_no_more_parts_are_remembered_than_there_may_be() -> None:
    time = UserLags()
    for user in range(PARTS_MAX):
        time.set_account(user, user + 1)
        shares_of(Owner(user), Owner(user + PARTS_MAX), time=time)
        shares_of(Owner(user, "alone"), time=time)
    assert len(time) <= PARTS_MAX + 6 and len(time._accounts) <= PARTS_MAX


# Tasks that are held back.


def decoding_tasks(*owners: Owner, priority: Priority = NORMAL) -> list[Task]:
    slots = slots_of(len(owners))
    return [
        decoding(slot, task(slot.index, owner=owner, priority=priority))
        for slot, owner in zip(slots, owners, strict=True)
    ]


def held(tasks: list[Task], lags: Mapping[Owner, float], now: float = 0.0) -> list[Task]:
    found = held_back(tasks, order(with_lags(lags)), now, GAP_S, StepCost())
    return [it for it in tasks if it in found]


def test_nobody_is_held_back_while_nobody_is_behind() -> None:
    tasks = decoding_tasks(ADA, BOB)
    assert held(tasks, {ADA: 0.0, BOB: -0.02}) == []
    assert held_back(tasks, order(NO_GUARANTEES), 0.0, GAP_S, StepCost()) == frozenset()


def test_tasks_of_other_users_are_held_back_for_a_user_who_is_behind() -> None:
    ada, *bob = decoding_tasks(ADA, BOB, BOB)
    prompt = running(slots_of(1)[0], task(9, owner=BOB))
    assert held([ada, *bob, prompt], {ADA: 0.01, BOB: 0.0}) == [*bob, prompt]


def test_a_user_who_is_behind_without_work_in_a_slot_holds_nobody_back() -> None:
    bob = decoding_tasks(BOB)
    assert held(bob, {ADA: 0.5, BOB: 0.0}) == []


def test_users_who_are_behind_alike_are_computed_together() -> None:
    ada, bob = decoding_tasks(ADA, BOB)
    assert held([ada, bob], {ADA: 0.3, BOB: 0.3 - 0.9 * ALIKE_S}) == []
    assert held([ada, bob], {ADA: 0.3, BOB: 0.3 - 1.1 * ALIKE_S}) == [bob]


def test_a_stream_is_held_back_no_longer_than_the_gap_and_a_prompt_is() -> None:
    ada, bob = decoding_tasks(ADA, BOB)
    prompt = running(slots_of(1)[0], task(9, owner=BOB))
    bob.computed_at = 10.0
    lags = {ADA: 0.5, BOB: 0.0}
    assert held([ada, bob, prompt], lags, 10.0 + 0.9 * GAP_S) == [bob, prompt]
    assert held([ada, bob, prompt], lags, 10.0 + GAP_S) == [prompt]


def test_a_label_holds_back_another_of_its_user_unless_its_class_is_lower() -> None:
    a, b = Owner(1, "a"), Owner(1, "b")
    first, second = slots_of(2)
    one, other = decoding(first, task(1, owner=a)), decoding(second, task(2, owner=b))
    shares = shares_of(a, b)
    lags = {(1,): 0.0, (1, 1): 0.0, (1, 1, "a"): 0.1, (1, 1, "b"): 0.0}
    behind = Guarantees(shares.parts, lags, shares.weights, shares.shares)
    assert held_back([one, other], order(behind), 0.0, GAP_S, StepCost()) == {other}
    high = decoding(second, task(3, owner=b, priority=HIGH))
    assert held_back([one, high], order(behind), 0.0, GAP_S, StepCost()) == frozenset()


def test_a_class_protects_from_other_users_only_if_it_is_strict_or_urgent() -> None:
    first, second = slots_of(2)
    ada = decoding(first, task(1, owner=ADA))
    bob = decoding(second, task(2, owner=BOB, priority=HIGH))
    shares = with_lags({ADA: 0.1, BOB: 0.0})
    assert held_back([ada, bob], order(shares), 0.0, GAP_S, StepCost()) == {bob}
    assert held_back([ada, bob], order(shares, strict=True), 0.0, GAP_S, StepCost()) == frozenset()
    urgent = with_lags({ADA: 0.1, BOB: 0.0}, frozenset({BOB.user}))
    assert held_back([ada, bob], order(urgent), 0.0, GAP_S, StepCost()) == frozenset()
    starved = with_lags({ADA: STARVED_S, BOB: 0.0}, frozenset({BOB.user}))
    assert held_back([ada, bob], order(starved), 0.0, GAP_S, StepCost()) == {bob}


def test_a_task_with_a_reserved_quantum_is_not_held_back() -> None:
    ada, bob = decoding_tasks(ADA, BOB)
    bob.reserved_tokens = 5
    assert held([ada, bob], {ADA: 0.5, BOB: 0.0}) == []


def test_texts_to_embed_are_held_back_like_streams() -> None:
    [ada] = decoding_tasks(ADA)
    spec = msgspec.structs.replace(task(9, owner=BOB).spec, embed=EmbedSpec())
    text = Task.from_spec(spec, arrival=9, clock=0, now=0.0)
    assert held([ada, text], {ADA: 0.01, BOB: 0.0}) == [text]
    assert held([ada, text], {ADA: 0.0, BOB: 0.01}) == [ada]


def test_tasks_with_other_adapters_are_held_back_later() -> None:
    first, second = slots_of(2)
    ada = decoding(first, task(1, owner=ADA, adapters=("x",)))
    bob = decoding(second, task(2, owner=BOB))
    assert held([ada, bob], {ADA: 0.9 * ADAPTERS_LAG_S, BOB: 0.0}) == []
    assert held([ada, bob], {ADA: 1.1 * ADAPTERS_LAG_S, BOB: 0.0}) == [bob]


def test_streams_share_batches_if_a_user_who_is_behind_catches_up_in_them() -> None:
    ada, *others = decoding_tasks(ADA, BOB, CARL, *(Owner(10 + n) for n in range(5)))
    lags = {it.spec.owner: 0.0 for it in others} | {ADA: 0.9}
    cost = StepCost()
    for _ in range(50):
        cost.learn_step(StepLoad.of_chunks([(0, 1)]), 0.020)
        cost.learn_step(StepLoad.of_chunks([(0, 1)] * 8), 0.028)
    shares = with_lags(lags)
    assert held_back([ada, *others], order(shares), 0.0, GAP_S, cost) == frozenset()
    prompt = running(slots_of(1)[0], task(9, owner=BOB))
    assert held_back([ada, *others, prompt], order(shares), 0.0, GAP_S, cost) == {prompt}
    two = with_lags({ADA: 0.9, BOB: 0.0})
    for _ in range(50):
        cost.learn_step(StepLoad.of_chunks([(0, 1)] * 2), 0.040)
    bob = others[0]
    assert held_back([ada, bob], order(two), 0.0, GAP_S, cost) == {bob}, "half of the batch"


def test_a_starved_user_of_an_account_precedes_urgent_tasks_only_within_the_account() -> None:
    time = UserLags()
    for user in (FIRST, SECOND):
        time.set_account(user.user, GATEWAY)
    shares = time.shares({FIRST: NORMAL, SECOND: URGENT, ADA: URGENT}, 0.0)
    lags = dict.fromkeys(shares.lags, 0.0) | {(GATEWAY, FIRST.user): STARVED_S}
    urgent = frozenset({SECOND.user, ADA.user})
    it = order(Guarantees(shares.parts, lags, shares.weights, shares.shares, urgent))
    first, second, ada = decoding_tasks(FIRST, SECOND, ADA)
    assert it.is_above(ada, first) and not it.is_above(second, first)


# Slots.


def test_a_user_with_a_slot_takes_no_other_one_for_being_behind() -> None:
    slots = slots_of(2)
    bob = running(slots[0], task(1, owner=BOB))
    running(slots[1], task(2, owner=ADA))
    shares = with_lags({ADA: BEHIND_S_MAX / 2, BOB: 0.0})
    assert plan_slots([task(3, owner=ADA)], slots, order(shares), SETTINGS, 0.0).park == ()
    slots[1].task = None
    running(slots[1], task(4, owner=CARL))
    shares = with_lags({ADA: BEHIND_S_MAX / 2, BOB: 0.0, CARL: 0.1})
    assert plan_slots([task(3, owner=ADA)], slots, order(shares), SETTINGS, 0.0).park == (bob,)


def test_a_starved_user_keeps_no_more_slots_than_others() -> None:
    slots = slots_of(4)
    crowd = [running(slot, task(slot.index, owner=BOB)) for slot in slots]
    shares = with_lags({ADA: 0.0, BOB: STARVED_S})
    assert plan_slots([task(9, owner=ADA)], slots, order(shares), SETTINGS, 0.0).park == (crowd[3],)


def test_urgent_tasks_and_a_starved_user_do_not_park_each_other_again_and_again() -> None:
    slots = slots_of(1)
    bob, urgent = running(slots[0], task(1, owner=BOB)), task(2, owner=ADA, priority=URGENT)

    def parked(lag_s: float) -> tuple[Task, ...]:
        shares = with_lags({ADA: 0.0, BOB: lag_s}, frozenset({ADA.user}))
        return plan_slots([urgent], slots, order(shares), SETTINGS, 0.0).park

    assert parked(STARVED_S) == parked(SLOT_KEPT_S) == ()
    assert parked(SLOT_KEPT_S - 0.01) == (bob,)


def test_users_divide_the_slots_at_once() -> None:
    slots = slots_of(4)
    crowd = [running(slot, task(slot.index, owner=BOB, tokens=50)) for slot in slots]
    waiting = [task(number, owner=ADA) for number in (10, 11, 12)]
    plan = plan_slots(waiting, slots, order(with_lags({ADA: 0.0, BOB: 0.0})), SETTINGS, 0.0)
    assert (plan.park, plan.start) == ((crowd[3], crowd[2]), (waiting[0], waiting[1]))


def test_a_user_with_too_few_slots_gets_one_for_the_highest_of_its_tasks() -> None:
    """The urgent task has the slot of the other user; the normal one keeps its own."""
    slots = slots_of(4)
    first = [task(number, owner=BOB) for number in (1, 2)]
    urgent_of_bob = task(3, owner=BOB, priority=URGENT)
    normal = task(4, owner=ADA)
    for slot, it in zip(slots, [*first, urgent_of_bob, normal], strict=True):
        running(slot, it)
    low, urgent = task(5, owner=ADA, priority=Priority.LOW), task(6, owner=ADA, priority=URGENT)
    urgent_users = frozenset({ADA.user, BOB.user})
    shares = with_lags({ADA: 0.0, BOB: 0.0}, urgent_users)
    plan = plan_slots([low, urgent], slots, order(shares), SETTINGS, 0.0)
    assert (plan.park, plan.start) == ((first[1],), (urgent,))


def test_free_slots_go_to_users_with_fewer_slots() -> None:
    tasks = [task(number, owner=BOB) for number in range(6)] + [task(9, owner=ADA)]
    plan = plan_slots(tasks, slots_of(4), order(with_lags({ADA: 0.0, BOB: 0.0})), SETTINGS, 0.0)
    assert [t.spec.id for t in plan.start] == [0, 9, 1, 2]


def test_a_user_of_a_higher_class_gets_more_slots_and_not_all() -> None:
    slots = slots_of(4)
    crowd = [running(s, task(s.index, owner=BOB, priority=HIGH)) for s in slots]
    shares = UserLags().shares({ADA: NORMAL, BOB: HIGH}, 0.0)
    waiting = [task(number, owner=ADA) for number in (10, 11)]
    plan = plan_slots(waiting, slots, order(shares), SETTINGS, 0.0)
    assert (plan.park, plan.start) == ((crowd[3],), (waiting[0],))


def test_an_owner_who_is_far_behind_takes_the_slot_of_one_who_is_not() -> None:
    slots = slots_of(2)
    bob, carl = running(slots[0], task(1, owner=BOB)), running(slots[1], task(2, owner=CARL))
    it, limit = task(3, owner=ADA), SETTINGS.slot_lag_s

    def parked(lag_s: float) -> tuple[Task, ...]:
        lags = {ADA: lag_s, BOB: 0.1, CARL: 0.0}
        return plan_slots([it], slots, order(with_lags(lags)), SETTINGS, 0.0).park

    assert parked(0.9 * limit) == ()
    assert parked(1.1 * limit) == (carl,)
    assert bob not in parked(1.1 * limit)


def test_an_urgent_task_of_another_user_takes_a_slot_at_once_and_a_high_one_does_not() -> None:
    slots = slots_of(1)
    bob = running(slots[0], task(1, owner=BOB))
    shares = with_lags({ADA: 0.0, BOB: 0.0}, frozenset({ADA.user}))
    urgent, high = task(2, owner=ADA, priority=URGENT), task(3, owner=ADA, priority=HIGH)
    assert plan_slots([urgent], slots, order(shares), SETTINGS, 0.0).park == (bob,)
    assert (
        plan_slots([high], slots, order(with_lags({ADA: 0.0, BOB: 0.0})), SETTINGS, 0.0).park == ()
    )


# The time of a part of a step.


def test_the_time_of_decoding_alone_is_learned_and_at_first_the_least() -> None:
    cost = StepCost()
    one, four = StepLoad.of_chunks([(0, 1)]), StepLoad.of_chunks([(0, 1)] * 4)
    for _ in range(20):
        cost.learn_step(four, 0.029)
    assert cost.alone_s(one, four, 0.029) == pytest.approx(0.029 / 4)
    cost.learn_step(one, 0.011)
    assert cost.alone_s(one, four, 0.029) == pytest.approx(0.011, rel=0.2)
    assert cost.alone_s(one, four, 0.008) == 0.008, "no more than the step took"


# The time that planning takes.


class CountingOrder(Order):
    """An order that counts the ranks that were found."""

    ranks = 0

    def rank(self, task: Task) -> tuple[float, ...]:
        self.ranks += 1
        return super().rank(task)


def test_planning_takes_time_by_the_number_of_tasks_and_not_of_users_times_tasks() -> None:
    users, slots = [Owner(number) for number in range(40)], slots_of(4)
    crowd = [running(slot, task(slot.index, owner=users[slot.index])) for slot in slots]
    waiting = [task(10 + number, owner=users[number % 40]) for number in range(400)]
    counting = CountingOrder(0, OwnerClock(), SETTINGS, with_lags(dict.fromkeys(users, 0.5)))
    leaders: list[Task] = []

    def find_leader(it: Task, running: Sequence[Task]) -> None:
        leaders.append(it)

    plan = plan_slots(waiting, slots, counting, SETTINGS, 0.0, find_leader)
    assert (plan.park, len(crowd)) == ((), 4)
    assert counting.ranks <= 1.2 * len(waiting)
    assert len(leaders) <= len(slots) + 1


@hypothesis.given(st.lists(st.floats(-AHEAD_S_MAX, BEHIND_S_MAX), min_size=2, max_size=6))
def test_the_preceded_owners_are_those_that_another_one_precedes(lags: list[float]) -> None:
    owners = [Owner(number) for number in range(len(lags))]
    shares = with_lags(dict(zip(owners, lags, strict=True)))
    expected = [o for o in owners if any(shares.precedes_by(one, o) > 0 for one in owners)]
    assert shares.preceded(owners) == expected


def test_a_quantum_ends_for_no_task_that_would_lose_the_slot_again_at_once() -> None:
    slots, users = slots_of(2), (Owner(1), Owner(2))
    urgent = decoding(slots[0], task(1, owner=2, priority=Priority.URGENT))
    decoding(slots[1], task(2, owner=1, priority=Priority.URGENT))
    urgent.quantum = SETTINGS.quantum_tokens
    owners = OwnerClock()
    for owner in users:
        owners.add_owner(owner, [])
    owners.count_work(Owner(2), 1000)
    shares = with_lags(dict.fromkeys(users, 0.0), frozenset({1, 2}))
    waiting = task(3, owner=1, priority=Priority.HIGH)
    plan = plan_slots([waiting], slots, Order(0, owners, SETTINGS, shares), SETTINGS, 0.0)
    assert plan.park == ()
