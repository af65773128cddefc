"""Shares of users, and of the labels of one user, in the scheduler's decisions."""

from __future__ import annotations

from inferd.scheduler.owner import Owner, OwnerClock, Requester
from inferd.scheduler.policy.order import TextOrder
from inferd.scheduler.policy.slot_plan import plan_slots
from inferd.scheduler.settings import EngineSettings
from tests.scheduler.doubles import Bench
from tests.scheduler.policy.test_plan import SETTINGS, order, running, slots_of, task

ADA, BOB = 1, 2
GUEST, OTHER = Owner(ADA, "guest"), Owner(ADA, "other")


def test_a_label_with_one_task_precedes_the_waiting_tasks_of_another_label() -> None:
    owners, slots = OwnerClock(), slots_of(1)
    crowd = [task(number, owner=GUEST) for number in range(24)]
    running(slots[0], crowd[0])
    owners.count_work(GUEST, 5000)
    single = task(99, owner=OTHER)
    owners.add_owner(OTHER, [GUEST])
    assert owners.served(OTHER) == owners.served(GUEST), "idleness earns no credit"
    owners.count_work(GUEST, 1)

    assert plan_slots([*crowd[1:], single], slots, order(owners), SETTINGS, 0.0).start == ()
    crowd[0].quantum = SETTINGS.quantum_tokens
    plan = plan_slots([*crowd[1:], single], slots, order(owners), SETTINGS, 0.0)
    assert (plan.park, plan.start) == ((crowd[0],), (single,))


def test_a_label_of_the_same_user_preempts_none_that_was_served_less() -> None:
    owners, slots = OwnerClock(), slots_of(1)
    runner = running(slots[0], task(1, owner=GUEST))
    runner.quantum = SETTINGS.quantum_tokens
    owners.count_work(OTHER, 10)
    assert plan_slots([task(2, owner=OTHER)], slots, order(owners), SETTINGS, 0.0).start == ()


def test_labels_do_not_count_before_users() -> None:
    owners, slots = OwnerClock(), slots_of(2)
    owners.count_work(GUEST, 100)
    fresh, bobs = task(1, owner=Owner(ADA, "fresh")), task(2, owner=Owner(BOB, "guest"))
    owners.count_work(Owner(BOB, "guest"), 99)
    plan = plan_slots([fresh, bobs], slots, order(owners), SETTINGS, 0.0)
    assert plan.start == (bobs, fresh), "a label counts only beside labels of the same user"


def test_labels_do_not_multiply_a_users_share() -> None:
    bench = Bench(slots=1, settings=EngineSettings(quantum_tokens=10))
    many = range(1, 9)
    bench.iterate(
        *(bench.submit(n, "x" * 400, owner=Owner(ADA, f"agent{n}")) for n in many),
        bench.submit(50, "y" * 400, owner=Owner(BOB)),
    )
    while not bench.end(50):
        bench.iterate()
    (hers, _), (his, _) = map(bench.engine.tasks.owners.served, (Owner(ADA), Owner(BOB)))
    assert abs(hers - his) <= 420, "equal except for one prompt; by labels it would be thousands"


def test_labels_of_a_user_get_equal_parts_however_many_tasks_one_has() -> None:
    bench = Bench(slots=1, settings=EngineSettings(quantum_tokens=10))
    crowd = range(1, 25)
    bench.iterate(*(bench.submit(n, "x" * 200, owner=GUEST) for n in crowd))
    for _ in range(50):
        bench.iterate()
    served = bench.engine.tasks.owners.served
    before = served(GUEST)[1]
    bench.iterate(bench.submit(50, "y" * 200, owner=OTHER))
    while not bench.end(50):
        bench.iterate()
    assert served(GUEST)[1] - before <= 620, "400 for equal parts and a prompt, not thousands"


def test_texts_of_labels_alternate_within_the_part_of_their_user() -> None:
    texts: TextOrder[str] = TextOrder()
    for number in range(10):
        for label in ("a", "b", "c"):
            texts.add_request(Requester(Owner(ADA, label)), f"{label}{number}")
        texts.add_request(Requester(Owner(BOB)), f"bob{number}")
    answered = []
    for _ in range(12):
        requester = texts.next_requester()
        assert requester is not None
        answered.append(texts.remove_first(requester))
        texts.count_work(requester.owner, 0.01)
    assert sum(text.startswith("bob") for text in answered) == 6
    assert sum(text.startswith("b") and text[1] != "o" for text in answered) == 2


def test_ten_thousand_labels_take_no_more_memory_than_the_bound() -> None:
    owners = OwnerClock()
    for number in range(10_000):
        owners.count_work(Owner(ADA, f"label{number}"), 1)
        owners.add_owner(Owner(ADA, f"label{number + 1}"), [Owner(BOB)])
    assert len(owners) <= OwnerClock.OWNERS_MAX + 1
    owners.count_work(Owner(BOB), 7)
    assert owners.served(Owner(BOB))[0] == 7


def test_kv_states_are_shared_among_the_labels_of_a_user_and_not_among_users() -> None:
    bench = Bench()
    text = "a prefix that is long enough to share"
    bench.run(bench.submit(1, text, owner=GUEST))
    bench.run(bench.submit(2, text, owner=OTHER))
    bench.run(bench.submit(3, text, owner=Owner(BOB, "guest")))
    assert bench.stats(2).cached_tokens > 0 and bench.stats(3).cached_tokens == 0


def test_a_label_that_equals_another_users_number_gives_nothing_of_that_user() -> None:
    assert not Owner(ADA, "2").includes(Owner(2))
    assert not Owner(ADA).includes(Owner(BOB, "1"))
    assert Owner(ADA).includes(GUEST) and not GUEST.includes(Owner(ADA)) and GUEST != OTHER


def test_idleness_earns_no_credit_over_a_user_that_has_just_left() -> None:
    owners = OwnerClock()
    owners.add_owner(Owner(ADA), [])
    owners.count_work(Owner(ADA), 5000)
    owners.add_owner(Owner(BOB), [])
    assert owners.served(Owner(BOB))[0] == 5000
    owners.count_work(Owner(BOB), 100)
    owners.add_owner(Owner(ADA), [Owner(BOB)])
    assert owners.served(Owner(ADA))[0] == 5100
