"""The KV state of a named state, shared with another user: copied for this user alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inferd.backends.base import KvKind
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.kv.file_format import KvFile
from inferd.scheduler.kv.manager import PREFETCH_SHARE
from inferd.scheduler.kv.store import name_of_state
from tests.scheduler.doubles import Bench

TEXT = "the beginning with which the sessions of several users begin, and it is long: "
OWNER, OTHER, THIRD = 1, 2, 3
NAME = name_of_state("", "story")
SHARE = EngineSettings(shared_prefix_tokens_min=16)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KvFiles]:
    files = KvFiles(tmp_path, "echo-1")
    yield files
    files.close()


def new_bench(files: KvFiles | None = None, memory: KvKind = "plain") -> Bench:
    return Bench(files=files, settings=SHARE, options=EchoOptions(memory=memory))


def bench_after_restart(folder: Path, states_in_memory: float = 2) -> tuple[Bench, KvFiles]:
    """Return an engine that finds the only file in *folder*, and has memory for *states_in_memory*
    states of this size. With little memory, it reads no file before it is needed.
    """
    [file] = [path for path in folder.rglob("*") if path.is_file()]
    bytes_max = int(states_in_memory * file.stat().st_size)
    files = KvFiles(folder, "echo-1")
    settings = EngineSettings(shared_prefix_tokens_min=16, kv_ram_bytes=bytes_max)
    return Bench(files=files, settings=settings), files


def save(bench: Bench, files: KvFiles | None = None, text: str = TEXT) -> bytes:
    """Have a named state of the owner in memory and, with *files*, on disk; return its tokens."""
    spec = bench.spec(1, text, owner=OWNER, n_predict=0)
    bench.run(m.Submit(spec))
    bench.iterate(m.SaveNamedState(1, OWNER, NAME, (), spec.tokens))
    settle(bench, files)
    return spec.tokens


def settle(bench: Bench, files: KvFiles | None) -> None:
    assert files is None or files.flush(10)
    bench.run()


def share(tokens: bytes) -> m.ShareKv:
    return m.ShareKv(OWNER, NAME, (), tokens, OTHER)


def cached(bench: Bench, user: int, tokens: bytes) -> int:
    """Return how many of the tokens have KV states for a user, in memory or on disk."""
    reports = bench.iterate(m.Lookup(9, user, "", (), tokens))
    return next(int(r.value) for r in reports if isinstance(r, m.CommandResult))


def in_memory(bench: Bench, user: int) -> int:
    return sum(entry.origin.scope == user for entry in bench.engine.store)


def turn(bench: Bench, number: int, tokens: bytes, user: int = OTHER) -> m.Submit:
    """Return a turn of another user that begins with the state."""
    spec = bench.spec(number, "and then", owner=user)
    shared = m.SharedKv.of_tokens(OWNER, NAME, tokens)
    return m.Submit(msgspec.structs.replace(spec, tokens=tokens + spec.tokens, shared_kv=shared))


@pytest.mark.parametrize("memory", ["plain", "window", "recurrent", "hybrid"])
def test_a_state_in_memory_is_copied_for_the_other_user(memory: KvKind) -> None:
    bench = new_bench(memory=memory)
    tokens = save(bench)
    size = len(tokens) // 4
    assert cached(bench, OTHER, tokens) == 0

    bench.iterate(share(tokens))

    assert cached(bench, OTHER, tokens) >= size - 1
    assert cached(bench, THIRD, tokens) == 0


def test_a_second_request_copies_nothing() -> None:
    bench = new_bench()
    tokens = save(bench)
    bench.iterate(share(tokens), share(tokens))
    assert in_memory(bench, OTHER) == 1


def test_other_tokens_than_the_states_are_not_copied(files: KvFiles) -> None:
    bench = new_bench(files)
    tokens = save(bench, files)
    for others in (tokens[:-40], tokens + tokens, tokens[4:]):
        bench.iterate(share(others))
        settle(bench, files)
        assert cached(bench, OTHER, others) == 0


def test_a_file_is_read_for_the_other_user_alone(files: KvFiles, tmp_path: Path) -> None:
    tokens = save(new_bench(files), files)
    bench, again = bench_after_restart(tmp_path)

    bench.iterate(share(tokens))
    settle(bench, again)

    assert (in_memory(bench, OTHER), in_memory(bench, OWNER)) == (1, 0)
    assert cached(bench, OTHER, tokens) >= len(tokens) // 4 - 1
    assert cached(bench, THIRD, tokens) == 0
    bench.engine.kv.close()
    assert [path.parent.name for path in tmp_path.rglob("*") if path.is_file()] == [str(OWNER)]


def test_a_file_that_both_users_need_is_read_once_for_both(
    files: KvFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = save(new_bench(files), files)
    bench, again = bench_after_restart(tmp_path)
    reads: list[KvFile] = []
    queue_read = again.queue_read

    def count_read(file: KvFile, *, ahead: bool = False) -> bool:
        reads.append(file)
        return queue_read(file, ahead=ahead)

    monkeypatch.setattr(again, "queue_read", count_read)

    bench.iterate(share(tokens), m.SaveNamedState(2, OWNER, NAME, (), tokens))
    settle(bench, again)

    assert len(reads) == 1
    assert (in_memory(bench, OTHER), in_memory(bench, OWNER)) == (1, 1)
    bench.engine.kv.close()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_turn_waits_for_the_file(files: KvFiles, tmp_path: Path, prepared: bool) -> None:
    tokens = save(new_bench(files), files)
    bench, again = bench_after_restart(tmp_path)

    bench.iterate(*([share(tokens)] if prepared else []), turn(bench, 2, tokens))
    settle(bench, again)

    assert bench.text(2) == b"and then"
    assert bench.stats(2).cached_tokens >= len(tokens) // 4 - 1
    bench.engine.kv.close()


def test_a_turn_without_cached_prompt_uses_no_copy() -> None:
    bench = new_bench()
    tokens = save(bench)
    submitted = turn(bench, 2, tokens)
    spec = msgspec.structs.replace(submitted.task, no_cache=True)
    bench.run(m.Submit(spec))
    assert bench.stats(2).cached_tokens == 0


def test_neither_user_finds_the_turns_of_the_other() -> None:
    bench = new_bench()
    tokens = save(bench)
    size = len(tokens) // 4
    bench.run(turn(bench, 2, tokens))
    whole = turn(bench, 3, tokens).task.tokens
    assert cached(bench, OTHER, whole) > size
    assert cached(bench, OWNER, whole) <= size
    assert cached(bench, THIRD, whole) == 0


def test_a_copy_stays_when_the_owner_deletes_the_state(files: KvFiles) -> None:
    bench = new_bench(files)
    tokens = save(bench, files)
    bench.iterate(share(tokens))
    bench.iterate(m.DeleteSessionStates(2, OWNER, NAME))
    settle(bench, files)
    bench.run(turn(bench, 3, tokens))
    assert bench.stats(3).cached_tokens >= len(tokens) // 4 - 1


def test_a_file_that_is_deleted_while_it_is_read_is_computed_again(
    files: KvFiles, tmp_path: Path
) -> None:
    tokens = save(new_bench(files), files)
    bench, again = bench_after_restart(tmp_path)
    bench.iterate(turn(bench, 2, tokens), m.DeleteSessionStates(2, OWNER, NAME))
    settle(bench, again)
    assert bench.text(2) == b"and then"
    bench.engine.kv.close()


def test_named_states_are_read_after_a_start_as_far_as_memory_suffices(
    files: KvFiles, tmp_path: Path
) -> None:
    tokens = save(new_bench(files), files)
    for states_in_memory, read in ((PREFETCH_SHARE - 0.5, 0), (PREFETCH_SHARE + 0.5, 1)):
        bench, again = bench_after_restart(tmp_path, states_in_memory)
        assert again.pending == read
        settle(bench, again)
        assert in_memory(bench, OWNER) == read
        bench.iterate(share(tokens))
        settle(bench, again)
        assert in_memory(bench, OTHER) == 1
        bench.engine.kv.close()


def test_a_file_that_is_read_ahead_does_not_count_as_used(files: KvFiles, tmp_path: Path) -> None:
    tokens = save(new_bench(files), files)
    [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
    os.utime(path, (1, 1))
    bench, again = bench_after_restart(tmp_path, 100)
    assert again.flush(10)
    assert not [r for r in bench.iterate() if isinstance(r, m.KvFileWritten)]
    assert cached(bench, OWNER, tokens) and path.stat().st_mtime == 1
    bench.engine.kv.close()


def test_files_of_sessions_are_not_read_before_a_turn_needs_them(tmp_path: Path) -> None:
    first = Bench(files=KvFiles(tmp_path, "echo-1"))
    first.run(first.submit(1, TEXT, session="mine", persist=True))
    first.engine.kv.close()
    bench, again = bench_after_restart(tmp_path, 100)
    settle(bench, again)
    assert len(bench.engine.store) == 0
    bench.engine.kv.close()


def test_a_prompt_begins_with_a_state_only_with_all_of_its_tokens() -> None:
    tokens = m.pack_tokens([1, 2, 3])
    shared = m.SharedKv.of_tokens(OWNER, NAME, tokens)
    assert shared.begins(tokens) and shared.begins(tokens + m.pack_tokens([4]))
    for other in ([], [1, 2], [1, 2, 4], [2, 3, 1, 2, 3]):
        assert not shared.begins(m.pack_tokens(other))
