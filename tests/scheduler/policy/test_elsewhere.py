"""Tokens that other nodes of a fleet have computed, in an engine's order of users."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, OwnerClock
from tests.scheduler.doubles import Bench

ADA, BOB = Owner(1), Owner(2)
LEAD_MAX = 1000
HUGE = 1 << 63


def owners_level_at(tokens: int) -> OwnerClock:
    """Return the clock of two users with work, for each of whom so many tokens were computed."""
    owners = OwnerClock()
    for owner in (ADA, BOB):
        owners.add_owner(owner, [])
    for owner in (ADA, BOB):
        owners.count_work(owner, tokens)
    owners.exchange_users({}, [ADA, BOB], LEAD_MAX)
    return owners


def lead(owners: OwnerClock) -> int:
    return owners.served(ADA)[0] - owners.served(BOB)[0]


def test_tokens_of_other_nodes_count_like_those_of_this_one() -> None:
    owners = owners_level_at(5000)
    before = owners.served(ADA)[1]
    owners.exchange_users({ADA.user: 300, BOB.user: 100}, [ADA, BOB], LEAD_MAX)
    assert lead(owners) == 200
    assert owners.served(ADA)[1] == before, "a label has no tokens of other nodes"


def test_tokens_of_other_nodes_are_not_reported_as_those_of_this_one() -> None:
    owners = OwnerClock()
    owners.add_owner(ADA, [])
    assert owners.exchange_users({ADA.user: 300}, [ADA], LEAD_MAX) == {ADA.user: 0}
    owners.count_work(ADA, 7)
    assert owners.exchange_users({}, [], LEAD_MAX) == {ADA.user: 7}
    assert owners.exchange_users({}, [], LEAD_MAX) == {}, "without work and without tokens since"
    owners.count_work(ADA, 1)
    assert owners.exchange_users({}, [ADA, BOB], LEAD_MAX) == {ADA.user: 8, BOB.user: 0}


def test_without_tokens_of_other_nodes_the_order_is_that_of_one_machine() -> None:
    owners = owners_level_at(5000)
    owners.count_work(ADA, 3 * LEAD_MAX)
    owners.exchange_users({}, [ADA, BOB], LEAD_MAX)
    assert lead(owners) == 3 * LEAD_MAX


def test_a_lead_fades_while_tokens_are_computed() -> None:
    owners = owners_level_at(5000)
    owners.exchange_users({ADA.user: 800}, [ADA, BOB], LEAD_MAX)
    owners.count_work(BOB, LEAD_MAX // 4)
    owners.exchange_users({ADA.user: 1}, [ADA, BOB], LEAD_MAX)
    assert lead(owners) == round(0.75 * (800 - 250)) + 1


@pytest.mark.parametrize("tokens", [LEAD_MAX, LEAD_MAX + 1, HUGE])
def test_however_many_tokens_put_no_user_further_behind_than_the_bound(tokens: int) -> None:
    owners = owners_level_at(5000)
    for _ in range(10):
        owners.exchange_users({ADA.user: tokens}, [ADA, BOB], LEAD_MAX)
    assert lead(owners) == LEAD_MAX
    owners.count_work(BOB, LEAD_MAX)
    assert lead(owners) == 0


def test_users_without_a_task_here_take_no_memory() -> None:
    owners = owners_level_at(5000)
    for start in range(10, 20_000, 1000):
        users = dict.fromkeys(range(start, start + 1000), 1)
        owners.exchange_users(users, [ADA, BOB], LEAD_MAX)
    assert len(owners) == 2
    assert owners.served(BOB)[0] == 5000


def test_totals_begin_anew_once_there_were_too_many_users() -> None:
    owners = OwnerClock()
    owners.add_owner(ADA, [])
    owners.count_work(ADA, 9)
    owners.exchange_users({}, [], LEAD_MAX)
    for user in range(10, 10 + OwnerClock.OWNERS_MAX + 1):
        owners.add_owner(Owner(user), [])
        owners.count_work(Owner(user), 1)
    owners.add_owner(BOB, [])
    owners.count_work(ADA, 2)
    assert owners.exchange_users({}, [ADA], LEAD_MAX)[ADA.user] == 2


_users = st.integers(1, 4)
_amounts = st.dictionaries(_users, st.integers(0, HUGE), max_size=4)


@given(st.lists(st.tuples(_amounts, st.sets(_users), _users, st.integers(0, 500)), max_size=20))
def test_the_order_stays_within_its_bounds(
    calls: list[tuple[dict[int, int], set[int], int, int]],
) -> None:
    owners = OwnerClock()
    for elsewhere, working, user, computed in calls:
        active = [Owner(number) for number in working]
        before = {number: owners.served(Owner(number))[0] for number in range(1, 5)}
        owners.exchange_users(elsewhere, active, LEAD_MAX)
        after = {number: owners.served(Owner(number))[0] for number in range(1, 5)}
        least = min((before[number] for number in working), default=0)
        for number in range(1, 5):
            assert after[number] >= min(before[number], least), "tokens give no credit"
            assert after[number] <= max(before.values()) + LEAD_MAX
        owners.add_owner(Owner(user), active)
        owners.count_work(Owner(user), computed)


def test_an_engine_leaves_its_slot_to_a_user_without_tokens_elsewhere() -> None:
    bench = Bench(slots=1, settings=EngineSettings(quantum_tokens=10), ctx_size=2048)
    bench.iterate(
        *(bench.submit(n, "x" * 400, owner=ADA) for n in (1, 2)),
        *(bench.submit(n, "y" * 400, owner=BOB) for n in (3, 4)),
    )
    for _ in range(300):
        bench.iterate()
    served = bench.engine.tasks.owners.served
    hers = served(ADA)[0]
    reports = bench.iterate(m.ExchangeServed(7, {ADA.user: 5000}))
    [answer] = [r for r in reports if isinstance(r, m.CommandResult)]
    assert answer.value[ADA.user] + answer.value[BOB.user] == bench.engine.clock.tokens - 1
    assert served(ADA)[0] >= hers + 4000
    before = computed_for(bench)
    for _ in range(200):
        bench.iterate()
    after = computed_for(bench)
    assert after[ADA.user] - before[ADA.user] <= 10, "the rest of a quantum"
    assert after[BOB.user] - before[BOB.user] >= 190


def computed_for(bench: Bench) -> dict[int, int]:
    return bench.engine.tasks.owners.exchange_users({}, [ADA, BOB], LEAD_MAX)
