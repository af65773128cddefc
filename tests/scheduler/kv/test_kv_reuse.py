"""Reuse of KV states in slots, in memory and on disk: no token is computed twice."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inferd.backends.base import KvKind
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import IDLE_SAVE_S
from inferd.scheduler.engine.steps import END_TOKENS
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.owner import Priority
from tests.scheduler.doubles import Bench

PREFIX = "the beginning that all of these prompts have in common, and it is long: "
SHARE = EngineSettings(shared_prefix_tokens_min=16)
MEMORIES: tuple[KvKind, ...] = ("plain", "window", "recurrent", "hybrid")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KvFiles]:
    files = KvFiles(tmp_path, "echo-1")
    yield files
    files.close()


def computed(bench: Bench) -> int:
    return int(bench.engine.statistics()["batch_tokens"])


def history(bench: Bench, number: int, text: str) -> bytes:
    """Return the tokens of a first turn with *text* and its answer."""
    prompt = bench.model.tokenize(text.encode(), special=False, bos=True)
    return m.pack_tokens([*prompt, *bench.tokens(number)])


def go_on(bench: Bench, number: int, before: bytes, text: str, **fields: object) -> m.Submit:
    """Return a turn that adds *text* to the tokens *before*."""
    spec = bench.spec(number, text, **fields)
    return m.Submit(msgspec.structs.replace(spec, tokens=before + spec.tokens))


def ask(bench: Bench, command: m.Command) -> object:
    reports = bench.iterate(command)
    return next(r.value for r in reports if isinstance(r, m.CommandResult))


# Slots and memory.


@pytest.mark.parametrize("memory", MEMORIES)
def test_many_sessions_over_few_slots_compute_each_token_once(memory: KvKind) -> None:
    bench = Bench(slots=2, options=EchoOptions(memory=memory))
    texts = [f"session number {i} says something of its own" for i in range(10)]
    for i, text in enumerate(texts):
        bench.run(bench.submit(i, text, session=f"s{i}"))
    histories = [history(bench, i, text) for i, text in enumerate(texts)]
    before = computed(bench)

    for i in range(10):
        bench.run(go_on(bench, 100 + i, histories[i], "and more", session=f"s{i}"))

    assert all(bench.text(100 + i) == b"and more" for i in range(10))
    assert all(bench.stats(100 + i).cached_tokens == len(histories[i]) // 4 for i in range(10))
    each = len("and more") + 2 + len("and more")
    assert computed(bench) - before == 10 * each, "tokens of a history were computed again"


def test_idle_states_are_saved_when_no_task_has_to_wait_for_it() -> None:
    bench = Bench(slots=2)
    slots = bench.engine.slots
    bench.iterate(bench.submit(1, PREFIX), bench.submit(2, "short"))
    while bench.end(2) is None or bench.end(1) is None:
        assert len(bench.engine.store) == 0, "not while there is work"
        bench.iterate()

    bench.run()
    assert len(bench.engine.store) == 0 and bench.engine.wait_s_max() == IDLE_SAVE_S, "nor at once"

    bench.now += IDLE_SAVE_S
    bench.run()

    assert [len(e.tokens) for e in bench.engine.store] == [len(slots.slots[0].tokens)]
    assert bench.engine.kv.idle.unsaved is None and bench.engine.wait_s_max() is None
    saves: list[int] = []
    bench.model.save = saves.append  # type: ignore[assignment]
    bench.iterate(bench.submit(3, "quite another text"), bench.submit(4, "and one more of them"))
    assert bench.engine.slots.tasks and saves == [], "the saved state is not saved again"


def test_states_that_do_not_fit_into_memory_are_not_saved_ahead() -> None:
    bench = Bench(slots=2, settings=EngineSettings(kv_ram_bytes=1))
    bench.run(bench.submit(1, PREFIX))

    bench.now += IDLE_SAVE_S
    bench.run()

    assert len(bench.engine.store) == 0 and bench.engine.wait_s_max() is None


def test_states_that_do_not_fit_into_memory_are_computed_again() -> None:
    bench = Bench(slots=1, settings=EngineSettings(kv_ram_bytes=1))
    bench.run(bench.submit(1, "the first session's text"))
    before = history(bench, 1, "the first session's text")
    bench.run(bench.submit(2, "the second session's text", owner=2))

    bench.run(go_on(bench, 3, before, "again"))

    assert bench.text(3) == b"again"
    assert bench.stats(3).cached_tokens == 0


def test_the_state_with_the_least_cost_per_byte_is_evicted_first() -> None:
    bench = Bench(slots=1, settings=EngineSettings(kv_ram_bytes=450))
    for number, text in ((1, "x" * 60), (2, "y" * 20), (3, "z" * 60), (4, "w" * 60)):
        bench.run(bench.submit(number, text, owner=number))

    sizes = [len(e.tokens) for e in bench.engine.store]
    assert bench.engine.store.bytes <= 450
    assert sizes, "no state was kept"


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_repeated_prompt_computes_only_its_end(memory: KvKind) -> None:
    bench = Bench(slots=2, options=EchoOptions(memory=memory))
    bench.run(bench.submit(1, PREFIX))

    bench.run(bench.submit(2, PREFIX))

    assert bench.text(2).decode() == PREFIX
    computed = END_TOKENS if memory == "window" else 1
    assert bench.stats(2).cached_tokens == len(PREFIX) + 2 - computed


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("size", [0, 1, END_TOKENS - 1, END_TOKENS, END_TOKENS + 1])
def test_a_prompt_no_longer_than_its_end_is_computed_at_most_twice(
    memory: KvKind, size: int
) -> None:
    bench = Bench(slots=2, options=EchoOptions(memory=memory))
    text = PREFIX[:size]
    bench.run(bench.submit(1, text))
    once = computed(bench)

    bench.run(bench.submit(2, text))

    assert bench.text(1) == bench.text(2) == text.encode()
    assert computed(bench) <= 2 * once


def test_states_serve_other_owners_only_if_they_are_shared() -> None:
    private, shared = Bench(), Bench(settings=EngineSettings(kv_shared=True))
    for bench in (private, shared):
        bench.run(bench.submit(1, PREFIX, owner=1))
        bench.run(bench.submit(2, PREFIX, owner=2))

    assert private.stats(2).cached_tokens == 0
    assert shared.stats(2).cached_tokens == len(PREFIX) + 1


def test_states_serve_only_tasks_with_the_same_adapters() -> None:
    bench = Bench(slots=2)
    bench.run(bench.submit(1, PREFIX))
    bench.run(bench.submit(2, PREFIX, adapters=("upper",)))
    bench.run(bench.submit(3, PREFIX, adapters=("upper",)))

    assert bench.text(2).decode() == PREFIX.upper()
    assert bench.stats(2).cached_tokens == 0
    assert bench.stats(3).cached_tokens == len(PREFIX) + 1


def test_an_unknown_adapter_is_refused() -> None:
    bench = Bench()

    bench.run(bench.submit(1, "text", adapters=("unknown",)))

    assert bench.error(1) == "InvalidArgument"


# Shared prefixes.


@pytest.mark.parametrize("memory", MEMORIES)
def test_sessions_that_share_a_prefix_compute_it_once(memory: KvKind) -> None:
    bench = Bench(slots=8, settings=SHARE, options=EchoOptions(memory=memory), batch_size=32)
    tails = [f"{i} is the tail" for i in range(8)]

    bench.run(*(bench.submit(i, PREFIX + tail) for i, tail in enumerate(tails)))

    for i, tail in enumerate(tails):
        assert bench.text(i).decode() == PREFIX + tail
    leader, *followers = (bench.stats(i).cached_tokens for i in range(8))
    assert leader == 0
    assert all(cached >= len(PREFIX) + 1 for cached in followers), followers


@pytest.mark.parametrize("memory", MEMORIES)
def test_followers_start_together(memory: KvKind) -> None:
    bench = Bench(slots=8, settings=SHARE, options=EchoOptions(memory=memory), batch_size=32)
    bench.iterate(*(bench.submit(i, f"{PREFIX}{i} is the tail") for i in range(8)))
    occupied = [len(bench.engine.slots.tasks)]

    while occupied[-1] < 8:
        bench.iterate()
        occupied.append(len(bench.engine.slots.tasks))

    assert set(occupied) == {1, 8}


def test_a_follower_makes_its_leader_as_urgent_as_itself() -> None:
    bench = Bench(slots=3, settings=SHARE, batch_size=8)
    bench.iterate(
        bench.submit(1, PREFIX + "low", priority=Priority.LOW),
        bench.submit(2, "q" * 60, priority=Priority.HIGH),
    )
    leader = next(t for t in bench.engine.slots.tasks if t.spec.id == 1)

    bench.iterate(bench.submit(3, PREFIX + "urgent", priority=Priority.URGENT))

    assert leader.boost == 3
    bench.run()
    assert bench.order.index(3) > bench.order.index(1)
    assert bench.stats(3).ttft_ms <= bench.stats(2).ttft_ms


def test_a_leader_is_only_parked_for_tasks_ahead_of_its_followers() -> None:
    bench = Bench(slots=2, settings=SHARE, batch_size=8)
    bench.iterate(
        bench.submit(1, PREFIX + "low", priority=Priority.LOW),
        bench.submit(2, "q" * 60, priority=Priority.NORMAL),
    )

    bench.iterate(
        bench.submit(3, PREFIX + "urgent", priority=Priority.URGENT),
        bench.submit(4, "n" * 30, priority=Priority.HIGH),
    )

    running = {t.spec.id for t in bench.engine.slots.tasks}
    assert running == {1, 4}, "the normal task was parked"
    bench.iterate(m.Cancel(3))
    leader = bench.engine.tasks.find_task(1)
    assert leader is not None and leader.boost == 0, "no task waits for it"
    bench.run()


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_state_of_a_cancelled_leader_serves_its_followers(memory: KvKind) -> None:
    bench = Bench(slots=2, settings=SHARE, options=EchoOptions(memory=memory), batch_size=16)
    bench.iterate(bench.submit(1, PREFIX + "one"), bench.submit(2, PREFIX + "two"))
    bench.iterate()
    read = next(t for t in bench.engine.slots.tasks if t.spec.id == 1).computed

    bench.run(m.Cancel(1))

    assert bench.text(2).decode() == PREFIX + "two"
    assert bench.stats(2).cached_tokens == read > 0


def test_no_task_waits_for_a_leader_that_has_passed_their_prefix() -> None:
    bench = Bench(slots=2, settings=SHARE)
    bench.iterate(bench.submit(1, PREFIX + "one"))
    bench.iterate()
    bench.iterate()

    bench.iterate(bench.submit(2, PREFIX + "two"))

    assert [t.spec.id for t in bench.engine.slots.tasks] == [1, 2]
    bench.run()
    assert bench.stats(2).cached_tokens == len(PREFIX) + 1, "a running task's state was copied"


def test_prompts_with_a_short_common_prefix_run_in_parallel() -> None:
    bench = Bench(slots=2, settings=EngineSettings(shared_prefix_tokens_min=64), batch_size=16)

    bench.iterate(bench.submit(1, "short share 1"), bench.submit(2, "short share 2"))

    assert len(bench.engine.slots.tasks) == 2


@pytest.mark.parametrize("memory", ["window", "recurrent", "hybrid"])
def test_a_checkpoint_where_prompts_diverge_serves_the_next_one(memory: KvKind) -> None:
    bench = Bench(slots=1, settings=SHARE, options=EchoOptions(memory=memory))
    for number, tail in ((1, "first"), (2, "second"), (3, "third")):
        bench.run(bench.submit(number, PREFIX + tail))

    assert bench.stats(2).cached_tokens == 0
    assert bench.stats(3).cached_tokens == len(PREFIX) + 1


# Branches.


@pytest.mark.parametrize("memory", MEMORIES)
def test_branches_of_a_state_compute_the_shared_part_once(memory: KvKind) -> None:
    bench = Bench(slots=4, options=EchoOptions(memory=memory))
    bench.run(bench.submit(1, PREFIX, session="trunk"))
    before = history(bench, 1, PREFIX)
    size = len(before) // 4
    assert ask(bench, m.Lookup(9, 1, "trunk", (), before)) == size
    start = computed(bench)

    for i in range(5):
        bench.run(go_on(bench, 10 + i, before, f"{i} branch", session=f"branch {i}"))

    assert all(bench.stats(10 + i).cached_tokens >= size for i in range(5))
    assert computed(bench) - start <= 5 * (len("0 branch") * 2 + 2)


def test_a_lookup_counts_cached_tokens() -> None:
    bench = Bench(options=EchoOptions(memory="recurrent"))
    bench.run(bench.submit(1, PREFIX))
    tokens = bench.spec(2, PREFIX[:20]).tokens

    assert ask(bench, m.Lookup(1, 1, "", (), tokens)) == 0
    assert ask(bench, m.Lookup(2, 2, "", (), history(bench, 1, PREFIX))) == 0


# Context shift and reuse.


def test_a_full_context_shifts_and_continues() -> None:
    bench = Bench(slots=1, ctx_size=24)
    text = "abcdefghijklm"  # 15 tokens of prompt, 9 free

    bench.run(bench.submit(1, text, ctx_shift=True, n_keep=-1, n_discard=4, n_predict=12))

    stats = bench.stats(1)
    assert (stats.stop_reason, stats.shifts, stats.shifted) == ("length", 1, True)
    shifts = [r for r in bench.reports[1] if isinstance(r, m.Shifted)]
    assert shifts == [m.Shifted(1, 15, 4)]
    assert bench.text(1).startswith(b"abcdefghi")


def test_shifts_are_bounded_and_a_model_that_cannot_ends_the_turn() -> None:
    settings = EngineSettings(shifts_max=2)
    bench = Bench(slots=1, ctx_size=24, settings=settings)
    bench.run(bench.submit(1, "abcdefghijklmno", ctx_shift=True, n_discard=2))
    fixed = Bench(slots=1, ctx_size=24, options=EchoOptions(memory="recurrent"))
    fixed.run(fixed.submit(1, "abcdefghijklmno", ctx_shift=True))

    assert bench.stats(1).shifts == 2
    assert bench.stats(1).stop_reason == "context_full"
    assert fixed.stats(1).shifts == 0
    assert fixed.stats(1).stop_reason == "context_full"


def shifted(n_discard: int) -> Bench:
    """Return an engine after a turn of the session "mine" with a context shift."""
    bench = Bench(slots=2, ctx_size=40)
    turn = {"session": "mine", "ctx_shift": True, "n_keep": -1, "n_discard": n_discard}
    bench.run(bench.submit(1, "abcdefghijklmnopqrstuvwx", **turn))
    assert bench.stats(1).shifts
    return bench


def idle_tokens(bench: Bench) -> array[int]:
    """Return the contents of the first idle slot that is not empty."""
    return next(s for s in bench.engine.slots.slots if s.tokens).tokens


def assert_it_serves_mine_alone(bench: Bench) -> None:
    tokens = idle_tokens(bench)
    packed = m.pack_tokens(tokens)
    assert ask(bench, m.Lookup(1, 1, "mine", (), packed)) == len(tokens)
    assert ask(bench, m.Lookup(2, 1, "other", (), packed)) == 0


def test_a_shifted_state_serves_only_its_own_session() -> None:
    assert_it_serves_mine_alone(shifted(n_discard=2))


def test_a_turn_on_a_shifted_state_is_approximate_too() -> None:
    bench = shifted(n_discard=14)
    before = m.pack_tokens(idle_tokens(bench)[:30])

    bench.run(go_on(bench, 2, before, "on", session="mine"))

    assert bench.stats(2).cached_tokens and bench.stats(2).shifted
    assert_it_serves_mine_alone(bench)


def test_parking_waits_for_a_pending_shift_and_loses_nothing() -> None:
    bench = Bench(slots=1, ctx_size=32)
    bench.iterate(bench.submit(1, "abcdefghijklmnopq", priority=Priority.LOW, ctx_shift=True,
                            n_keep=-1, n_discard=3))  # fmt: skip
    for _ in range(11):
        bench.iterate()
    bench.run(bench.submit(2, "now", priority=Priority.URGENT))

    assert bench.text(2) == b"now"
    assert bench.stats(1).parks == 1
    assert bench.stats(1).shifts >= 1


def test_equal_runs_are_reused_by_shifting_and_marked() -> None:
    bench = Bench(slots=1)
    bench.run(bench.submit(1, "the head, some middle to drop, and the tail of it all"))

    bench.run(bench.submit(2, "the head, and the tail of it all", cache_reuse=8, session="s"))
    bench.run(bench.submit(3, "the head, and the tail of it all", session="t"))

    assert bench.text(2) == b"the head, and the tail of it all"
    assert bench.stats(2).shifted
    assert bench.stats(2).cached_tokens == len("the head, and the tail of it all") + 1
    assert bench.stats(3).cached_tokens < 20, "a shifted state served another session"
    assert not bench.stats(3).shifted


# A full KV cache.


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_full_cache_parks_the_last_task_in_the_order_and_fails_none(memory: KvKind) -> None:
    bench = Bench(slots=4, options=EchoOptions(memory=memory, kv_cells=150))
    texts = [f"{i} " + "text that goes on for a while" for i in range(4)]

    bench.run(
        *(
            bench.submit(i, text, priority=Priority(Priority.URGENT - i))
            for i, text in enumerate(texts)
        )
    )

    assert [bench.text(i).decode() for i in range(4)] == texts
    assert bench.engine.statistics()["kv_full"] > 0
    assert bench.stats(0).parks == 0, "the first task in the order was parked"


def test_a_task_that_is_alone_and_does_not_fit_is_refused() -> None:
    bench = Bench(slots=2, options=EchoOptions(kv_cells=30))

    bench.run(bench.submit(1, "x" * 40), bench.submit(2, "small"))

    assert bench.error(1) == "KvFull"
    assert bench.text(2) == b"small"


# Disk.


def settle(bench: Bench, files: KvFiles) -> None:
    assert files.flush(10)
    bench.run()


def test_states_that_do_not_fit_into_memory_return_from_disk(files: KvFiles) -> None:
    bench = Bench(
        slots=1, settings=EngineSettings(kv_ram_bytes=1, shared_prefix_tokens_min=16), files=files
    )
    bench.run(bench.submit(1, PREFIX, session="mine", persist=True))
    before = history(bench, 1, PREFIX)
    bench.run(bench.submit(2, "somebody else comes along", owner=2))
    settle(bench, files)
    assert bench.engine.statistics()["kv_disk_files"] == 1

    bench.engine.store.bytes_max = 1 << 20
    bench.iterate(go_on(bench, 3, before, "back", session="mine", persist=True))
    assert bench.end(3) is None
    settle(bench, files)

    assert bench.text(3) == b"back"
    assert bench.stats(3).cached_tokens == len(before) // 4


def test_a_restart_keeps_the_states_of_persisted_sessions(tmp_path: Path) -> None:
    first = Bench(slots=2, files=KvFiles(tmp_path, "echo-1"))
    first.run(first.submit(1, PREFIX, session="kept", persist=True))
    first.run(first.submit(2, "not to be kept on any disk at all", session="x"))
    before = history(first, 1, PREFIX)
    first.engine.kv.close()

    files = KvFiles(tmp_path, "echo-1")
    second = Bench(slots=2, files=files, settings=SHARE)
    second.iterate(go_on(second, 3, before, "back", session="kept"))
    settle(second, files)
    second.engine.kv.close()

    assert second.engine.statistics()["kv_disk_files"] == 1
    assert second.stats(3).cached_tokens == len(before) // 4
    assert second.text(3) == b"back"


@pytest.mark.parametrize(("session", "cached"), [("mine", True), ("yours", False)])
def test_a_short_state_is_read_from_disk_for_its_own_session(
    tmp_path: Path, session: str, cached: bool
) -> None:
    """Shorter than `shared_prefix_tokens_min`, for which another session's file is read."""
    first = Bench(slots=1, files=KvFiles(tmp_path, "echo-1"))
    first.run(first.submit(1, "a short text", session="mine", persist=True))
    before = history(first, 1, "a short text")
    first.engine.kv.close()
    assert 16 < len(before) // 4 < 64

    files = KvFiles(tmp_path, "echo-1")
    second = Bench(slots=1, files=files)
    second.iterate(go_on(second, 2, before, "back", session=session, persist=True))
    settle(second, files)
    second.engine.kv.close()

    assert second.text(2) == b"back"
    assert second.stats(2).cached_tokens == (len(before) // 4 if cached else 0)


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    first = Bench(files=KvFiles(tmp_path, "echo-1"))
    first.run(first.submit(1, PREFIX, session="kept", persist=True))
    first.engine.kv.close()
    (path,) = [p for p in tmp_path.rglob("*") if p.is_file()]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    files = KvFiles(tmp_path, "echo-1")
    second = Bench(files=files, settings=SHARE)
    second.iterate(second.submit(2, PREFIX))
    settle(second, files)
    second.engine.kv.close()

    assert second.text(2).decode() == PREFIX
    assert second.stats(2).cached_tokens == 0
    assert second.engine.statistics()["kv_disk_failures"] == 1
    assert not path.exists()


def test_a_session_that_becomes_dormant_is_on_disk(files: KvFiles) -> None:
    bench = Bench(slots=1, files=files)
    bench.run(bench.submit(1, PREFIX, session="mine", persist=True))
    before = history(bench, 1, PREFIX)

    assert ask(bench, m.PersistState(1, 1, "mine", (), before)) == len(before) // 4
    settle(bench, files)

    assert bench.engine.statistics()["kv_disk_files"] == 1


def test_delete_removes_states_in_slots_in_memory_and_on_disk(
    files: KvFiles, tmp_path: Path
) -> None:
    bench = Bench(slots=1, files=files)
    bench.run(bench.submit(1, PREFIX, session="mine", persist=True))
    before = history(bench, 1, PREFIX)
    bench.iterate(m.PersistState(1, 1, "mine", (), before))

    reports = bench.iterate(m.DeleteSessionStates(2, 1, "mine"))
    assert files.flush(10)
    reports += bench.iterate()

    assert m.CommandResult(2, None) in reports
    assert ask(bench, m.Lookup(3, 1, "mine", (), before)) == 0
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_deleted_states_are_not_written_with_evicted_ones(files: KvFiles, tmp_path: Path) -> None:
    bench = Bench(slots=2, settings=EngineSettings(kv_ram_bytes=1), files=files)
    bench.run(bench.submit(1, PREFIX, session="mine", persist=True))
    before = history(bench, 1, PREFIX)

    bench.iterate(m.PersistState(1, 1, "mine", (), before), m.DeleteSessionStates(2, 1, "mine"))
    settle(bench, files)

    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_file_that_the_daemon_has_deleted_is_written_again(files: KvFiles) -> None:
    bench = Bench(slots=1, files=files)
    bench.run(bench.submit(1, PREFIX, session="mine", persist=True))
    keep = m.PersistState(1, 1, "mine", (), history(bench, 1, PREFIX))
    bench.iterate(keep)
    settle(bench, files)
    [file] = files.scan()
    file.path.unlink()

    bench.iterate(m.KvFileEvicted(file.path.name))
    bench.iterate(keep)
    settle(bench, files)

    assert file.path.exists()


def test_close_reports_the_written_files(files: KvFiles) -> None:
    bench = Bench(slots=1, files=files)
    bench.run(bench.submit(1, PREFIX, session="mine", persist=True))

    reports = bench.engine.kv.close()

    assert [type(report) for report in reports] == [m.KvFileWritten]


def test_a_task_does_not_wait_for_a_slow_file(files: KvFiles) -> None:
    first = Bench(files=files)
    first.run(first.submit(1, PREFIX, session="kept", persist=True))
    first.iterate(m.PersistState(1, 1, "kept", (), history(first, 1, PREFIX)))
    settle(first, files)
    second = Bench(files=files, settings=SHARE)
    files.results = list  # type: ignore[method-assign]

    second.iterate(second.submit(2, PREFIX))
    assert second.engine.tasks.queue[0].fetching
    assert second.engine.wait_s_max() == second.engine.tasks.settings.fetch_timeout_s, (
        "nothing else wakes it"
    )
    second.now += second.engine.tasks.settings.fetch_timeout_s
    second.run()

    assert second.text(2).decode() == PREFIX
