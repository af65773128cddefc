"""The daemon's decision when settings are measured, with workers of the test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from inferd.backends import MemoryNeed
from inferd.backends.errors import OutOfMemory
from inferd.backends.library import LLAMA_COMMIT
from inferd.backends.tuning_choice import (
    ChosenSetting,
    ModelShape,
    ModelTuning,
    Setting,
    Source,
    TuningRecord,
    this_cpu,
)
from inferd.daemon.models import tuner
from inferd.daemon.models.loader import uses_other_setting
from inferd.daemon.models.tuner import Tuner, TuningPace
from inferd.daemon.models.tuning_records import TuningRecords
from inferd.daemon.workers.cores import LOADING
from inferd.scheduler import messages as m

pytestmark = pytest.mark.asyncio

SHAPE = ModelShape(
    architecture="llama", layers=30, embedding=576, heads=9, kv_heads=3, head_k=64, head_v=64,
    size_bytes=145_000_000,
)  # fmt: skip
CPU = this_cpu(2)
BYTES = 100


class Worker:
    """A worker as the tuner sees it, which records the commands."""

    def __init__(self, source: Source = "rule", size: int = 7, measuring: int = BYTES):
        chosen = ChosenSetting(setting=Setting(False), source=source, reason="r")
        shape = ModelShape(
            **{f: getattr(SHAPE, f) for f in SHAPE.__struct_fields__} | {"layers": size}
        )
        self.tuning: ModelTuning | None = ModelTuning(shape=shape, cpu=CPU.key, chosen=chosen)
        self.claim: int | None = None
        self.unloading = self.died = False
        self.pid = 0
        self.need = MemoryNeed(weights=1, measuring=measuring)
        self.commands: list[m.Command] = []
        self.changed = anyio.Event()
        self.spec = SimpleNamespace(name="m", fd=-1)
        self.client = SimpleNamespace(send_command=self._note)

    def _note(self, command: m.Command) -> None:
        self.commands.append(command)
        self.changed.set()

    @property
    def is_measuring(self) -> bool:
        return self.commands[-1:] == [m.SetMeasuring(True)]


class Memory:
    """Reservations, with *free* bytes."""

    def __init__(self, free: int):
        self.free = free

    def of_worker(self, worker: Worker) -> MemoryNeed:
        return worker.need

    def reserve_more(self, worker: Worker, size: int) -> None:
        if size > self.free:
            raise OutOfMemory("short")
        self.free -= size

    def add_bytes(self, worker: Worker, size: int) -> None:
        self.free -= size


class Bench:
    """A tuner that runs, with its workers, memory and records."""

    def __init__(self, folder: Path, *workers: Worker, free: int = 1000, **pace: float):
        self.workers, self.memory, self.is_on = list(workers), Memory(free), True
        self.records = TuningRecords(folder)
        values: dict[str, Any] = {"idle_s": 0.0, "retry_s": 0.0, "external_cores_max": 1e9} | pace
        self.tuner = Tuner(
            self.records,
            lambda: self.workers,  # type: ignore[arg-type, return-value]
            self.memory,  # type: ignore[arg-type]
            2,
            lambda: self.is_on,
            TuningPace(**values),
        )

    async def settle(self) -> None:
        """Let the tuner run until it waits for a change, after empty timeouts."""
        for _ in range(40):
            await anyio.lowlevel.checkpoint()


@contextmanager
def logged(event: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of that name, filled at the end."""
    found: list[dict[str, Any]] = []
    with capture_logs() as events:
        yield found
    found += [dict(e) for e in events if e["event"] == event]


def record_for(worker: Worker) -> TuningRecord:
    assert worker.tuning is not None
    return TuningRecord(
        shape=worker.tuning.shape, cpu=CPU.key, build=LLAMA_COMMIT, chosen=Setting(True), reason="x"
    )


async def begun(bench: Bench, worker: Worker) -> None:
    """Run the tuner until it has begun with *worker*."""
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(bench.tuner.run)
            while not worker.is_measuring:
                await worker.changed.wait()
                worker.changed = anyio.Event()
            group.cancel_scope.cancel()


async def test_an_idle_worker_measures_with_memory_of_the_budget(tmp_path: Path) -> None:
    worker = Worker()
    bench = Bench(tmp_path, worker)
    with logged("tuning.began") as events:
        await begun(bench, worker)
    assert bench.memory.free == 1000 - BYTES
    assert events[0]["bytes"] == BYTES


async def test_work_of_any_worker_stops_it_in_the_same_step(tmp_path: Path) -> None:
    worker, other = Worker(), Worker("measured")
    bench = Bench(tmp_path, worker, other)
    await begun(bench, worker)
    other.claim = 1
    bench.tuner.note_change()
    assert worker.commands == [m.SetMeasuring(True), m.SetMeasuring(False)]
    assert bench.memory.free == 1000


async def test_it_continues_when_the_work_has_ended(tmp_path: Path) -> None:
    worker = Worker()
    bench = Bench(tmp_path, worker)
    await begun(bench, worker)
    worker.claim = 1
    bench.tuner.note_change()
    worker.claim = None
    await begun(bench, worker)
    assert worker.commands == [m.SetMeasuring(on) for on in (True, False, True)]


async def test_a_configuration_that_forbids_it_stops_it(tmp_path: Path) -> None:
    worker = Worker()
    bench = Bench(tmp_path, worker)
    await begun(bench, worker)
    bench.is_on = False
    bench.tuner.note_change()
    assert not worker.is_measuring


@pytest.mark.parametrize(
    "reason",
    [
        "configured",
        "measured",
        "gpu",
        "no memory known",
        "off",
        "works",
        "unloads",
        "waits",
        "recorded",
        "descriptor",
        "nothing",
    ],
)
async def test_workers_that_are_not_measured(tmp_path: Path, reason: str) -> None:
    worker = Worker()
    match reason:
        case "configured" | "measured":
            worker = Worker(reason)
        case "gpu":
            worker.tuning = None
        case "no memory known":
            worker = Worker(measuring=0)
        case "works":
            worker.claim = 0
        case "descriptor":
            worker.spec.fd = 5
        case "unloads":
            worker.unloading = True
    bench = Bench(tmp_path, worker)
    bench.is_on = reason != "off"
    if reason == "waits":  # another model, for memory
        waiting = Worker()
        waiting.claim, waiting.tuning = LOADING, None
        bench.workers.append(waiting)
    if reason == "recorded":
        bench.records.store(record_for(worker))
    async with anyio.create_task_group() as group:
        group.start_soon(bench.tuner.run)
        await bench.settle()
        assert worker.is_measuring == (reason == "nothing")
        group.cancel_scope.cancel()


async def test_short_memory_postpones_it(tmp_path: Path) -> None:
    worker = Worker()
    bench = Bench(tmp_path, worker, free=BYTES - 1, retry_s=60.0)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.tuner.run)
        await bench.settle()
        assert worker.commands == [] and bench.memory.free == BYTES - 1
        bench.memory.free = BYTES
        bench.tuner.note_change()
        with anyio.fail_after(60):
            await worker.changed.wait()
        group.cancel_scope.cancel()
    assert worker.is_measuring


async def test_other_programs_postpone_it(tmp_path: Path) -> None:
    worker = Worker()
    bench = Bench(tmp_path, worker, external_cores_max=-1e9, retry_s=60.0)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.tuner.run)
        await bench.settle()
        group.cancel_scope.cancel()
    assert worker.commands == []


async def test_other_programs_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used_s, worker = itertools.count(step=1000), Worker()
    monkeypatch.setattr(tuner, "busy_s", lambda: next(used_s) if worker.is_measuring else 0.0)
    bench = Bench(tmp_path, worker, external_cores_max=1.0, check_s=0.0, retry_s=60.0)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(bench.tuner.run)
            while len(worker.commands) < 2:
                await worker.changed.wait()
                worker.changed = anyio.Event()
            await bench.settle()
            group.cancel_scope.cancel()
    assert worker.commands == [m.SetMeasuring(True), m.SetMeasuring(False)]
    assert bench.memory.free == 1000


async def test_a_result_is_stored_and_holds_from_the_next_load(tmp_path: Path) -> None:
    worker = Worker()
    bench = Bench(tmp_path, worker)
    await begun(bench, worker)
    with logged("tuning.measured") as events:
        bench.tuner.note_result(worker, m.Measured(9, 1.5, record_for(worker)))  # type: ignore[arg-type]
    assert (events[0]["flash_attn"], events[0]["slices"], events[0]["reason"]) == (True, 9, "x")
    assert bench.memory.free == 1000
    (stored,) = bench.tuner.load_tuning(keeps_threads=False).records
    assert stored.measured_at > 0 and stored.chosen == Setting(True)
    assert worker.tuning is not None
    choice = bench.tuner.next_choice(worker.tuning)
    assert (choice.setting, choice.source) == (Setting(True), "measured")


async def test_a_measurement_that_is_not_possible_is_not_repeated(tmp_path: Path) -> None:
    worker, next_one = Worker(), Worker(size=8)
    bench = Bench(tmp_path, worker, next_one)
    await begun(bench, worker)
    with logged("tuning.not_measured") as events:
        bench.tuner.note_result(worker, m.Measured(1, 0.1, cause="no memory"))  # type: ignore[arg-type]
    assert events[0]["cause"] == "no memory"
    await begun(bench, next_one)
    assert worker.commands == [m.SetMeasuring(True), m.SetMeasuring(False)]


async def test_a_state_directory_that_is_full_ends_no_daemon(tmp_path: Path) -> None:
    worker = Worker()
    (tmp_path / "state").write_text("not a directory")
    bench = Bench(tmp_path / "state", worker)
    with logged("tuning.not_stored") as events:
        bench.tuner.note_result(worker, m.Measured(9, 1.5, record_for(worker)))  # type: ignore[arg-type]
    assert len(events) == 1


async def test_a_model_whose_worker_died_is_not_measured_again(tmp_path: Path) -> None:
    worker, again, other = Worker(), Worker(), Worker(size=8)
    bench = Bench(tmp_path, worker)
    await begun(bench, worker)
    worker.died = worker.unloading = True
    bench.workers = [again, other]
    with logged("tuning.worker_died") as events:
        bench.tuner.note_exited(worker)  # type: ignore[arg-type]
    assert len(events) == 1
    await begun(bench, other)
    assert again.commands == []


async def test_a_death_is_noted_even_if_a_load_begins_before_the_worker_is_removed(
    tmp_path: Path,
) -> None:
    worker, again, other = Worker(), Worker(), Worker(size=8)
    bench = Bench(tmp_path, worker)
    await begun(bench, worker)
    worker.died = worker.unloading = True
    other.claim = -1
    bench.workers = [worker, again, other]
    bench.tuner.note_change()
    other.claim = None
    bench.tuner.note_exited(worker)  # type: ignore[arg-type]
    bench.workers = [again, other]
    await begun(bench, other)
    assert again.commands == [] and bench.memory.free == 1000 - BYTES


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"file": "/a.gguf", "flash": "off"}, True),
        ({"file": "/a.gguf", "flash": "on"}, False),
        ({"file": "/a.gguf"}, False),
        ({"file": "/b.gguf", "flash": "off"}, False),
        ({"file": "/a.gguf", "fingerprint": "off-states"}, True),
        ({"file": "/a.gguf", "fingerprint": "others"}, False),
    ],
)
async def test_entries_that_still_use_the_other_setting(
    other: dict[str, str], expected: bool
) -> None:
    def entry(file: str, flash: str = "auto", fingerprint: str = "") -> Any:
        loaded = SimpleNamespace(info=SimpleNamespace(fingerprint=fingerprint))
        return SimpleNamespace(
            config=SimpleNamespace(file=file),
            loaded=loaded if fingerprint else None,
            options=lambda: {"flash-attn": flash},
        )

    own, chosen = (
        entry("/a.gguf"),
        ChosenSetting(setting=Setting(True), source="measured", reason=""),
    )
    tuning = ModelTuning(shape=SHAPE, cpu="", chosen=chosen, other_fingerprint="off-states")
    assert uses_other_setting(tuning, own, [own, entry(**other)]) == expected
