"""Assignment of cores to models, and the load of other programs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.daemon.workers import cores as cores_module
from inferd.daemon.workers.cores import (
    ENCODING,
    LOADING,
    Cores,
    ExternalLoad,
    assign_threads,
    busy_s,
    own_s,
)


class Busy:
    """A `CoreUser` that records its thread counts."""

    def __init__(self, claim: int | None = None, threads_max: int = 8, users: Sequence[int] = (1,)):
        self.claim, self.threads_max, self.pid, self.users = claim, threads_max, 0, users
        self.thread_counts: list[int] = []

    def set_threads(self, threads: int, first: int) -> None:
        self.thread_counts.append(threads)
        self.first = first


@pytest.mark.parametrize(
    ("claims", "cores", "threads"),
    [
        ([(1, 8)], 2, [2]),
        ([(1, 8), (1, 8)], 2, [1, 1]),
        ([(1, 8), (2, 8)], 8, [1, 7]),
        ([(1, 8), (1, 8), (1, 8)], 8, [3, 3, 2]),
        ([(1, 8), (1, 8), (1, 8)], 2, [1, 1, 1]),
        ([(3, 2), (1, 8)], 8, [2, 6]),
        ([(LOADING, 8)], 8, [8]),
        ([(LOADING, 8), (0, 8)], 8, [1, 7]),
        ([(LOADING, 8), (0, 4)], 8, [4, 4]),
        ([], 8, []),
    ],
)
def test_models_of_the_highest_class_divide_all_cores_beyond_one_for_each_other_model(
    claims: list[tuple[int, int]], cores: int, threads: list[int]
) -> None:
    assert assign_threads(claims, cores) == threads


@pytest.mark.parametrize(
    ("claims", "cores", "threads"),
    [
        ([(1, 8), (2, 8)], 8, [2, 6]),
        ([(1, 16), (1, 16)], 16, [8, 8]),
        ([(0, 16), (2, 16)], 10, [1, 9]),
        ([(LOADING, 8), (0, 8)], 8, [1, 7]),
        ([(1, 2), (2, 2)], 8, [2, 2]),
    ],
)
def test_models_of_several_users_divide_the_cores_by_weight(
    claims: list[tuple[int, int]], cores: int, threads: list[int]
) -> None:
    assert assign_threads(claims, cores, strict=False) == threads


@pytest.mark.parametrize(
    ("users", "strict", "threads"),
    [((1, 1), False, [1, 7]), ((1, 2), False, [2, 6]), ((1, 2), True, [1, 7])],
)
def test_a_class_counts_strictly_among_the_models_of_one_user(
    users: tuple[int, int], strict: bool, threads: list[int]
) -> None:
    normal, high = (Busy(c, users=[user]) for c, user in zip((1, 2), users, strict=True))
    Cores(8, lambda: [normal, high], 8, strict=strict).assign_cores()
    assert [*normal.thread_counts, *high.thread_counts] == threads


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 16)), max_size=20), st.integers(1, 64))
def test_each_model_gets_a_core_and_no_core_is_assigned_twice(
    claims: list[tuple[int, int]], cores: int
) -> None:
    threads = assign_threads(claims, cores)
    assert all(1 <= number <= most for number, (_, most) in zip(threads, claims, strict=True))
    assert sum(threads) <= max(cores, len(claims))


def test_only_a_changed_number_of_threads_is_sent() -> None:
    one, two = Busy(1), Busy()
    workers = [one, two]
    cores = Cores(4, lambda: workers, 4)
    cores.assign_cores()
    cores.assign_cores()
    two.claim = 3
    cores.assign_cores()
    two.claim = None
    cores.assign_cores()
    cores.assign_cores()

    assert one.thread_counts == [4, 1, 4]
    assert two.thread_counts == [3]


def test_a_loading_worker_gets_the_cores_that_others_leave() -> None:
    it, other = Busy(LOADING), Busy(1)
    cores = Cores(4, lambda: [it, other], 4)
    cores.assign_cores()
    assert (it.thread_counts, other.thread_counts) == ([1], [3])
    other.claim = None
    cores.assign_cores()
    assert it.thread_counts == [1, 4]
    it.claim = 1
    cores.assign_cores()
    assert it.thread_counts == [1, 4], "the engine has them from the load"


def test_an_encoder_gets_the_cores_of_a_worker_whose_tasks_wait_for_it() -> None:
    worker, encoder, other = Busy(1), Busy(LOADING), Busy()
    cores = Cores(2, lambda: [worker, encoder, other], 2)
    cores.assign_cores()
    assert (worker.thread_counts, encoder.thread_counts) == ([1], [1])
    worker.claim = ENCODING
    cores.assign_cores()
    assert (worker.thread_counts, encoder.thread_counts) == ([1], [1, 2])
    other.claim = 1
    cores.assign_cores()
    assert (encoder.thread_counts, other.thread_counts) == ([1, 2, 1], [1])
    worker.claim, encoder.claim, other.claim = 1, None, None
    cores.assign_cores()
    assert worker.thread_counts == [1, 2]


# The load of other programs.


def sampled(load: ExternalLoad, *cores: float, own: float = 1.0) -> list[int]:
    """Add samples of one second each; return the busy cores after each sample."""
    found, busy = [], 0.0
    load.add_sample(0.0, busy, {1: 0.0})
    for second, external in enumerate(cores, start=1):
        busy += external + own
        load.add_sample(float(second), busy, {1: own * second})
        found.append(load.cores)
    return found


@pytest.mark.parametrize(
    ("loads", "cores"),
    [
        ([0.0, 0.3, 0.45, 0.45, 0.45], [0, 0, 0, 0, 0]),
        ([0.7, 0.7], [0, 1]),
        ([0.7, 0.0, 0.7, 0.0], [0, 0, 0, 0]),
        ([1.0, 1.0, 0.4, 0.4, 0.2, 0.2], [0, 1, 1, 1, 1, 0]),
        ([2.9, 2.9, 1.0, 1.0, 1.0], [0, 3, 3, 1, 1]),
    ],
)
def test_a_core_is_busy_once_other_programs_use_half_of_it_for_two_samples(
    loads: list[float], cores: list[int]
) -> None:
    assert sampled(ExternalLoad(), *loads) == cores


def test_a_sample_across_a_change_of_our_processes_is_ignored() -> None:
    load = ExternalLoad()
    for second in range(10):
        load.add_sample(float(second), 2.0 * second, {second: 0.0})
    assert load.cores == 0


def test_one_sample_suffices_when_a_worker_begins_its_first_step() -> None:
    load = ExternalLoad()
    load.add_sample(0.0, 0.0, {1: 0.0})
    assert not load.add_sample(0.3, 0.6, {1: 0.0, 2: 0.25}), "a process that began meanwhile"
    assert not load.add_sample(0.35, 0.7, {1: 0.0, 2: 0.3}), "too short"
    assert load.add_sample(0.38, 0.7, {1: 0.0, 2: 0.3}, begins=True)
    assert load.cores == 1

    assert not load.add_sample(0.7, 0.7, {1: 0.0, 2: 0.3}, begins=True), "it lowers nothing"
    assert load.cores == 1
    assert not load.add_sample(6.0, 20.0, {1: 0.0, 2: 0.3}, begins=True), "too old"


def test_the_first_step_after_a_load_leaves_busy_cores_free() -> None:
    it = Busy(LOADING)
    cores = Cores(4, lambda: [it], 4)
    cores.assign_cores()
    now, mine = time.monotonic(), own_s([os.getpid()])
    cores.external_load.add_sample(now - 1.0, busy_s() - 2.0, mine)
    it.claim = 1
    cores.assign_cores()

    assert it.thread_counts == [4, 2]


def test_cores_that_other_programs_keep_busy_are_not_assigned() -> None:
    one, two = Busy(1), Busy()
    cores = Cores(4, lambda: [one, two], 4)
    cores.assign_cores()
    sampled(cores.external_load, 1.0, 1.0)
    cores.assign_cores()
    two.claim = 1
    cores.assign_cores()
    sampled(cores.external_load, 9.0, 9.0)
    cores.assign_cores()
    assert one.thread_counts == [4, 3, 2, 1]
    assert two.thread_counts == [1]


@pytest.mark.asyncio
async def test_cores_that_become_free_while_no_model_computes_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, others_s, samples = Busy(1), [0.0], [0]
    cores = Cores(4, lambda: [it], 4)

    def busy_s() -> float:
        samples[0] += 1
        return others_s[0]

    monkeypatch.setattr(cores_module, "busy_s", busy_s)
    monkeypatch.setattr(cores_module, "own_s", lambda pids: {1: 0.0})
    monkeypatch.setattr(cores_module, "EXTERNAL_LOAD_INTERVAL_S", 0.11)
    monkeypatch.setattr(cores_module, "IDLE_INTERVAL_S", 0.11)
    async with anyio.create_task_group() as group:
        cores.assign_cores()
        group.start_soon(cores.watch_external_load)
        with anyio.fail_after(30):
            while not cores.external_load.cores:
                others_s[0] += 0.02
                await anyio.sleep(0.02)
            it.claim, samples[0] = None, 0
            while cores.external_load.cores:  # noqa: ASYNC110 (it has no event)
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    assert samples[0] <= 6, "it samples at intervals"
    it.claim = 1
    cores.assign_cores()
    assert it.thread_counts[-1] == 4


def test_cores_that_are_not_ours_may_be_busy() -> None:
    cores = Cores(4, lambda: [], 16)
    sampled(cores.external_load, 12.0, 12.0)
    assert cores.available == 4
    sampled(cores.external_load, 13.0, 13.0)
    assert cores.available == 3


def test_the_cpu_times_of_this_machine_are_read() -> None:
    before, mine = busy_s(), own_s([os.getpid(), 1 << 30])
    begun = time.process_time()
    while time.process_time() < begun + 0.1:
        pass
    assert busy_s() - before >= 0.08
    assert own_s([os.getpid()])[os.getpid()] - mine[os.getpid()] >= 0.08
    assert list(mine) == [os.getpid()]


def test_models_are_confined_to_different_cores() -> None:
    models = [Busy(1, users=(n,)) for n in range(3)]
    cores = Cores(4, lambda: models, machine=4)
    cores.assign_cores()
    assert [(model.first, model.thread_counts) for model in models] == [
        (0, [2]),
        (2, [1]),
        (3, [1]),
    ]
