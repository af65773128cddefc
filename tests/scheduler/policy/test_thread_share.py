"""The share of the engine's thread for one user's work outside of steps."""

from __future__ import annotations

import pytest

from inferd.scheduler.policy.slow_sampling import BURST_S, SHARE, ThreadShare


def worked_s(
    share: ThreadShare, owner: int, seconds: float, one_s: float, owners: int = 1
) -> float:
    """Return for how long *owner* works in *seconds*, always on pieces of *one_s*."""
    now, worked = 0.0, 0.0
    while now < seconds:
        if share.may_work(owner, now):
            share.charge_user(owner, one_s, now, owners)
            worked += one_s
            now += one_s
        else:
            now += 0.001
    return worked


@pytest.mark.parametrize("one_s", [0.0001, 0.008, 0.2])
def test_work_in_the_long_run_is_a_share_of_the_time(one_s: float) -> None:
    worked = worked_s(ThreadShare(), 1, 20.0, one_s)
    assert SHARE * 20 - one_s <= worked <= SHARE * 20 + BURST_S + one_s


def test_owners_divide_the_share() -> None:
    share = ThreadShare()
    worked = sum(worked_s(share, owner, 20.0, 0.005, owners=4) for owner in range(4))
    assert worked <= SHARE * 20 + 4 * (BURST_S + 0.005)


def test_the_first_work_waits_for_nothing_and_others_owe_nothing() -> None:
    share = ThreadShare()
    done = 0.0
    while share.may_work(1, 0.0):
        share.charge_user(1, 0.003, 0.0)
        done += 0.003
    assert BURST_S <= done < BURST_S + 0.003
    assert share.may_work(2, 0.0)


def test_debts_that_are_paid_are_forgotten() -> None:
    share = ThreadShare()
    for owner in range(10_000):
        share.charge_user(owner, 0.001, float(owner))
    assert len(share._paid_at) == 1
