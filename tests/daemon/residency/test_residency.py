"""Residencies on a simulated clock: order, bound, loads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.daemon.residency.residency import AGEING_S_MIN, JUST_USED_S, Residency, ResidencyRequest
from inferd.scheduler.owner import Priority
from tests.repetitions import repetitions

TICK_S = 0.25
LOAD_S = 1.0
SLOTS = 2
WORK_S_MAX = 4.0


class Job(ResidencyRequest):
    """A request that computes for *work_s* once it has a slot."""

    def __init__(self, model: int, priority: Priority, since: float, work_s: float) -> None:
        super().__init__(priority, since)
        self.model, self.left_s, self.served_at = model, work_s, -1.0


class Machine:
    """Memory for one of several models; each has `SLOTS` and serves its admitted jobs in order."""

    def __init__(self, models: int, residency_s: float) -> None:
        self.residencies = [Residency(residency_s) for _ in range(models)]
        self.now = 0.0
        self.resident = -1
        self.ready_at = 0.0
        self.loads = 0
        self.served: list[int] = []
        """The number of admitted jobs of each load."""

    def ask(self, job: Job) -> None:
        self.residencies[job.model].queue_request(job, self.residencies)

    def blocked(self) -> ResidencyRequest | None:
        others = [s for i, s in enumerate(self.residencies) if i != self.resident and s.waiting]
        first = min(others, key=lambda s: s.rank(self.now), default=None)
        return first.first_request(self.now) if first is not None else None

    def advance(self) -> None:
        other = self.blocked()
        if self.resident >= 0 and self.now < self.ready_at:
            return
        if self.resident >= 0:
            residency = self.residencies[self.resident]
            for request in residency.admit_waiting(other, self.now):
                assert isinstance(request, Job)
                request.served_at = self.now
                self.served[-1] += 1
            if other is None or not residency.may_be_evicted(other, self.now):
                return
        if other is not None:
            assert isinstance(other, Job)
            self.resident, self.ready_at = other.model, self.now + LOAD_S
            self.residencies[other.model].begin_residency(self.ready_at, SLOTS)
            self.loads += 1
            self.served.append(0)

    def tick(self) -> None:
        self.advance()
        if self.resident >= 0 and self.now >= self.ready_at:
            for job in list(self.residencies[self.resident].admitted[:SLOTS]):
                assert isinstance(job, Job)
                job.left_s -= TICK_S
                if job.left_s <= 0:
                    self.residencies[self.resident].end_request(job, self.now)
        self.now += TICK_S

    def run(self, jobs: list[Job], until_s: float = float("inf")) -> None:
        """Let the jobs arrive at their times, and run until all are done."""
        coming = sorted(jobs, key=lambda j: j.since)
        for number, job in enumerate(coming):
            job.number = number
        while self.now < until_s and (
            coming or any(s.waiting or s.admitted for s in self.residencies)
        ):
            while coming and coming[0].since <= self.now:
                self.ask(coming.pop(0))
            self.tick()


def bound_s(
    job: Job, jobs: list[Job], models: int, residency_s: float, work_s: dict[Job, float]
) -> float:
    """Return how long a request may wait, whatever comes after it has become urgent."""
    aged_s = (Priority.URGENT - job.priority) * max(residency_s, AGEING_S_MIN)
    before = sum(work_s[j] for j in jobs if j is not job and j.since <= job.since + aged_s)
    return (
        aged_s
        + residency_s
        + before
        + models * (residency_s + WORK_S_MAX + LOAD_S + JUST_USED_S + 2 * TICK_S)
    )


jobs_of = st.lists(
    st.builds(
        Job,
        model=st.integers(0, 2),
        priority=st.sampled_from(Priority),
        since=st.integers(0, 240).map(lambda n: n * TICK_S),
        work_s=st.integers(1, int(WORK_S_MAX / TICK_S)).map(lambda n: n * TICK_S),
    ),
    min_size=1,
    max_size=60,
)


@given(jobs=jobs_of, residency_s=st.sampled_from([0.0, 2.0, 10.0]))
@settings(max_examples=repetitions(150))
def test_no_request_waits_past_the_bound_and_each_load_serves_one(
    jobs: list[Job], residency_s: float
) -> None:
    work_s = {job: job.left_s for job in jobs}
    machine = Machine(3, residency_s)
    machine.run(jobs)
    for job in jobs:
        assert 0 <= job.served_at - job.since <= bound_s(job, jobs, 3, residency_s, work_s)
    assert all(machine.served)
    assert sum(machine.served) == len(jobs)


@pytest.mark.parametrize("priority", Priority)
@pytest.mark.parametrize("residency_s", [0.0, 5.0, 20.0])
def test_a_flood_of_urgent_requests_delays_a_cold_model_only_until_it_has_aged(
    priority: Priority, residency_s: float
) -> None:
    """The flood is more than the resident model can do, and never ends."""
    flood = [Job(0, Priority.URGENT, n * TICK_S, 1.0) for n in range(1000)]
    cold = Job(1, priority, 10 * TICK_S, 1.0)
    machine = Machine(2, residency_s)
    machine.run([*flood, cold], until_s=240)
    aged_s = (Priority.URGENT - priority) * max(residency_s, AGEING_S_MIN)
    queued_s = sum(1 for j in flood if j.since <= cold.since + aged_s) * 1.0 / SLOTS
    assert cold.served_at - cold.since > 0
    assert cold.served_at <= queued_s + residency_s + LOAD_S + WORK_S_MAX + cold.since


def pipelines(count: int, rounds: int) -> list[Job]:
    """Return what arrives where programs ask three models in turns, out of phase."""
    return [
        Job((p + n) % 3, Priority.NORMAL, float(n), 0.5)
        for n in range(rounds * 3)
        for p in range(count)
    ]


def test_alternating_models_are_loaded_for_many_requests_at_a_time() -> None:
    """Arrival order is what a stay of 0 makes of it: each arrival finds another model there."""
    machines = {residency_s: Machine(3, residency_s) for residency_s in (0.0, 20.0)}
    for machine in machines.values():
        machine.run(pipelines(4, 10))
    assert machines[20.0].loads * 2 <= machines[0.0].loads


def run_programs(machine: Machine, models: list[int], steps: int, apart_s: float = 0.0) -> None:
    """Let programs ask the three models in turns, each for the next one once it has its answer; the
    first ones are given, the programs begin *apart_s* after each other.
    """
    jobs = [Job(model, Priority.NORMAL, n * apart_s, 0.5) for n, model in enumerate(models)]
    left, coming = [steps] * len(jobs), list(jobs)
    while any(left):
        for job in [j for j in coming if j.since <= machine.now]:
            coming.remove(job)
            machine.ask(job)
        machine.tick()
        for program, job in enumerate(jobs):
            if job.left_s <= 0 and left[program]:
                left[program] -= 1
                jobs[program] = Job((job.model + 1) % 3, Priority.NORMAL, machine.now - TICK_S, 0.5)
                if left[program]:
                    machine.ask(jobs[program])


@pytest.mark.parametrize(
    ("models", "apart_s"),
    [
        ([1, 0, 0, 2], 0.0),
        ([0, 0, 2, 2], 0.0),
        ([0, 1, 2], 0.0),
        ([0, 0, 0, 0], 1.0),
        ([0, 0, 0], 2.0),
    ],
)
def test_programs_that_are_out_of_step_synchronize(models: list[int], apart_s: float) -> None:
    """Those that ask for different models would do so for ever if arrival alone counted."""
    loads = {}
    for residency_s in (0.0, 8.0):
        machine = Machine(3, residency_s)
        run_programs(machine, models, 30, apart_s)
        loads[residency_s] = machine.loads
    assert loads[0.0] > 55
    assert loads[8.0] <= 36


# Single decisions.


def residency_of(
    *inside: ResidencyRequest, began: float = 0.0, residency_s: float = 10.0
) -> Residency:
    residency = Residency(residency_s)
    residency.begin_residency(began, SLOTS)
    for request in inside:
        residency.admit_request(request)
    return residency


def asks(
    residency: Residency, other: ResidencyRequest | None, *requests: ResidencyRequest, now: float
) -> list[ResidencyRequest]:
    residency.waiting.extend(requests)
    return residency.admit_waiting(other, now)


def test_without_rivals_all_requests_are_admitted() -> None:
    requests = [ResidencyRequest(Priority.LOW, 1.0) for _ in range(5)]
    assert asks(residency_of(), None, *requests, now=1.0) == requests


def test_earlier_requests_are_admitted_and_later_ones_only_to_a_free_slot() -> None:
    earlier, other = ResidencyRequest(Priority.NORMAL, 1.0), ResidencyRequest(Priority.NORMAL, 2.0)
    later = [ResidencyRequest(Priority.NORMAL, 3.0) for _ in range(3)]
    residency = residency_of(ResidencyRequest(Priority.NORMAL, 0.0))
    assert asks(residency, other, *later, now=3.0) == later[:1]
    assert asks(residency, other, earlier, now=3.0) == [earlier]


def test_after_the_residency_only_earlier_requests_are_admitted() -> None:
    other, later = ResidencyRequest(Priority.NORMAL, 2.0), ResidencyRequest(Priority.NORMAL, 3.0)
    assert asks(residency_of(ResidencyRequest(Priority.NORMAL, 0.0)), other, later, now=11.9) == [
        later
    ]
    assert (
        asks(
            residency_of(ResidencyRequest(Priority.NORMAL, 0.0)),
            other,
            ResidencyRequest(Priority.NORMAL, 3.0),
            now=12.0,
        )
        == []
    )
    assert asks(
        residency_of(ResidencyRequest(Priority.NORMAL, 0.0), began=9.0), other, later, now=12.0
    ) == [later]


def test_a_lower_class_does_not_delay_a_higher_one() -> None:
    assert (
        asks(
            residency_of(ResidencyRequest(Priority.LOW, 0.0)),
            ResidencyRequest(Priority.HIGH, 2.0),
            ResidencyRequest(Priority.NORMAL, 1.0),
            now=2.0,
        )
        == []
    )


def test_age_counts() -> None:
    other, urgent = ResidencyRequest(Priority.NORMAL, 0.0), ResidencyRequest(Priority.URGENT, 20.0)
    assert (
        asks(
            residency_of(ResidencyRequest(Priority.URGENT, 0.0)),
            other,
            ResidencyRequest(Priority.URGENT, 19.0),
            now=19.0,
        )
        != []
    )
    assert asks(residency_of(ResidencyRequest(Priority.URGENT, 0.0)), other, urgent, now=20.0) == []


def test_the_first_request_of_a_load_is_admitted_even_before_a_more_urgent_rival() -> None:
    residency = residency_of()
    mine = ResidencyRequest(Priority.LOW, 0.0)
    residency.waiting.append(mine)
    assert not residency.may_be_evicted(ResidencyRequest(Priority.URGENT, 1.0), 5.0)
    assert residency.admit_waiting(ResidencyRequest(Priority.URGENT, 1.0), 5.0) == [mine]


def test_a_model_may_be_evicted_once_all_requests_have_ended_or_are_absent() -> None:
    away = False
    inside, other = (
        ResidencyRequest(Priority.NORMAL, 0.0, lambda: away),
        ResidencyRequest(Priority.NORMAL, 0.0),
    )
    residency = residency_of(inside)
    assert not residency.may_be_evicted(other, 99.0)
    away = True
    assert residency.may_be_evicted(other, 99.0)
    away = False
    residency.end_request(inside, 3.0)
    assert not residency.may_be_evicted(other, 3.0 + JUST_USED_S / 2)
    assert residency.may_be_evicted(other, 3.0 + JUST_USED_S)
    assert residency.may_be_evicted(None, 3.0)


def test_a_residency_of_zero_seconds_does_not_linger() -> None:
    inside = ResidencyRequest(Priority.NORMAL, 0.0)
    residency = residency_of(inside, residency_s=0.0)
    residency.end_request(inside, 3.0)
    assert residency.may_be_evicted(ResidencyRequest(Priority.NORMAL, 0.0), 3.0)
