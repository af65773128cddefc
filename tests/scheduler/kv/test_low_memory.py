"""Low-memory mode: KV states that no task holds leave memory, for the disk if they may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends.base import KvKind
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import IDLE_SAVE_S
from inferd.scheduler.kv import disk as kv_files
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.owner import Priority
from tests.scheduler.doubles import Bench
from tests.scheduler.kv.test_kv_reuse import ask, go_on, history, settle

TEXTS = [f"session number {i} says something of its own, and at length" for i in range(6)]
HEAP = """
import random
from inferd.backends.memory import resident_bytes
from inferd.backends.memory import return_free_memory

random.seed(1)
states, small = [], []
for number in range(100):
    states.append(bytes([number]) * random.randint(200_000, 2_000_000))
    small.append([bytes(2000) for _ in range(100)])
    if number % 7 == 0:
        del states[random.randrange(len(states))]
freed = sum(map(len, states))
del states
before = resident_bytes()
return_free_memory()
print(freed, before - resident_bytes())
"""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KvFiles]:
    files = KvFiles(tmp_path, "echo-1")
    yield files
    files.close()


def with_states(files: KvFiles | None = None, **fields: object) -> Bench:
    """Return an engine that has computed a turn of each text, and saved the states."""
    bench = Bench(slots=1, files=files, settings=EngineSettings(shared_prefix_tokens_min=16))
    for number, text in enumerate(TEXTS):
        bench.run(bench.submit(number, text, session=f"s{number}", **fields))
    assert len(bench.engine.store) == len(TEXTS) - 1, "the last state is in the slot"
    return bench


def test_states_are_evicted_at_once_and_their_bytes_reported() -> None:
    bench = with_states()
    held = bench.engine.store.bytes

    assert ask(bench, m.SetLowMemory(1, True)) == held > 0
    assert bench.engine.store.bytes == 0
    assert ask(bench, m.SetLowMemory(2, True)) == 0


def test_states_that_may_be_persisted_move_to_disk_and_return(files: KvFiles) -> None:
    bench = with_states(files, persist=True)
    before = history(bench, 0, TEXTS[0])
    bench.iterate(m.SetLowMemory(1, True))
    settle(bench, files)
    assert bench.engine.statistics()["kv_disk_files"] == len(TEXTS) - 1
    assert bench.engine.store.bytes == 0

    bench.iterate(go_on(bench, 9, before, "back", session="s0", persist=True))
    settle(bench, files)

    assert bench.text(9) == b"back"
    assert bench.stats(9).cached_tokens == len(before) // 4
    assert bench.engine.store.bytes == 0, "no state stays while memory is low"


def test_states_that_may_not_be_persisted_are_dropped(files: KvFiles) -> None:
    bench = with_states(files, persist=False)
    bench.iterate(m.SetLowMemory(1, True))
    settle(bench, files)
    assert bench.engine.statistics()["kv_disk_files"] == 0
    assert bench.engine.store.bytes == 0


def test_states_wait_in_memory_while_the_disk_is_busy(
    files: KvFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = with_states(files, persist=True)
    monkeypatch.setattr(kv_files, "QUEUE_COUNT_MAX", 2)
    bench.iterate(m.SetLowMemory(1, True))
    assert len(bench.engine.store) >= 1, "the queue holds two"

    for _ in TEXTS:
        settle(bench, files)

    assert len(bench.engine.store) == 0
    assert bench.engine.statistics()["kv_disk_files"] == len(TEXTS) - 1


def rows_with(memory: KvKind, *commands: m.Command) -> int:
    """Return the tokens of two turns over one slot; *commands* are sent while one is parked."""
    bench = Bench(
        slots=1, options=EchoOptions(memory=memory), settings=EngineSettings(quantum_tokens=4)
    )
    bench.iterate(bench.submit(1, TEXTS[0], priority=Priority.LOW))
    while not bench.text(1):
        bench.iterate()
    bench.iterate(bench.submit(2, TEXTS[1], priority=Priority.URGENT))
    while not bench.text(2):
        bench.iterate()
    bench.iterate(*commands)
    assert [entry.pins for entry in bench.engine.store] == [1] or not commands
    bench.run()
    assert [bench.text(1).decode(), bench.text(2).decode()] == TEXTS[:2]
    assert len(bench.engine.store) == 0 or not commands
    return int(bench.engine.statistics()["batch_tokens"])


@pytest.mark.parametrize("memory", ["plain", "window", "recurrent", "hybrid"])
def test_parked_turns_keep_their_states_and_end_as_without_pressure(memory: KvKind) -> None:
    assert rows_with(memory, m.SetLowMemory(1, True)) == rows_with(memory)


def test_no_idle_state_is_saved_until_memory_has_recovered() -> None:
    bench = Bench(slots=2)
    bench.iterate(m.SetLowMemory(1, True))
    bench.run(bench.submit(1, TEXTS[0]))
    assert bench.engine.wait_s_max() is None, "the engine sleeps"

    assert ask(bench, m.SetLowMemory(2, False)) == 0
    assert bench.engine.wait_s_max() == IDLE_SAVE_S
    bench.now += IDLE_SAVE_S
    bench.run()
    assert len(bench.engine.store) == 1


def test_freed_memory_among_small_objects_is_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAP],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    freed, came_back = (int(word) for word in done.stdout.split())
    assert came_back > freed / 2
