"""The index of KV files: it matches the disk, and stays within its bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import BackendError
from inferd.daemon.models.kv_index import KvFilePlace, KvIndex
from inferd.scheduler.kv.disk import FileWritten, KvFiles
from inferd.scheduler.kv.eviction_order import EvictionOrder
from inferd.scheduler.kv.file_format import KvFile, KvKey
from inferd.scheduler.kv.store import SCOPE_ALL, name_of_state
from inferd.scheduler.messages import pack_tokens

LARGE = 1 << 30


class Store:
    """Workers' files below one directory, and an index of them."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, KvFiles] = {}

    def write(
        self,
        number: int,
        *,
        owner: int = 1,
        session: str = "",
        fingerprint: str = "model",
        size: int = 1000,
        seconds: float = 1.0,
    ) -> KvFile:
        """Write a state of *size* bytes, as the worker of *fingerprint* does."""
        files = self._files.get(fingerprint)
        if files is None:
            files = self._files[fingerprint] = KvFiles(self.directory, fingerprint)
        key = KvKey(owner, pack_tokens([number]), session)
        assert files.queue_write(key, bytes(size), seconds) and files.flush(30)
        (result,) = files.results()
        assert isinstance(result, FileWritten)
        return result.file

    def close(self) -> None:
        for files in self._files.values():
            files.close()

    def names(self) -> set[str]:
        return {p.name for p in self.directory.rglob("*") if not p.is_dir()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "kv")
    yield store
    store.close()


def report(index: KvIndex, file: KvFile, fingerprint: str = "model") -> None:
    """Report a file to the index, as its worker does."""
    key = file.key
    index.add_file(fingerprint, key.name, key.owner, key.session, file.size, file.seconds)


async def settle(index: KvIndex) -> None:
    """Run the index until it has deleted all removed files."""
    async with anyio.create_task_group() as group:
        group.start_soon(index.run)
        while index._doomed:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


def paths(index: KvIndex) -> set[str]:
    return {place.name for place in index._entries}


# The order of eviction.


def test_the_file_cheapest_to_compute_again_per_byte_is_evicted_first() -> None:
    values = EvictionOrder[KvFilePlace]()
    for name, size, seconds in (("a", 100, 5.0), ("b", 1000, 5.0), ("c", 100, 1.0)):
        values.record_use(KvFilePlace("model", name), size, seconds)

    assert [values.evict_least().name for _ in range(3)] == ["b", "c", "a"]


def test_of_equal_files_the_least_recently_used_is_evicted_first() -> None:
    values = EvictionOrder[KvFilePlace]()
    for name in ("a", "b", "c", "a"):
        values.record_use(KvFilePlace("model", name), 10, 1.0)

    assert [values.evict_least().name for _ in range(3)] == ["b", "c", "a"]


def test_even_an_expensive_file_is_evicted_when_it_is_unused() -> None:
    values = EvictionOrder[KvFilePlace]()
    values.record_use(KvFilePlace("model", "dear"), 1, 5.0)
    taken = []
    for number in range(20):
        values.record_use(KvFilePlace("model", str(number)), 1, 1.0)
        taken.append(values.evict_least().name)

    assert "dear" in taken and taken[0] == "0"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["use", "remove", "take"]),
            st.integers(0, 9),
            st.integers(1, 5),
            st.integers(1, 5),
        ),
        max_size=300,
    )
)
def test_it_is_the_published_algorithm(steps: list[tuple[str, int, int, int]]) -> None:
    """Compared with the paper's, written without a heap."""
    values, floor = EvictionOrder[KvFilePlace](), 0.0
    plain: dict[KvFilePlace, tuple[float, int]] = {}
    for clock, (step, number, size, seconds) in enumerate(steps):
        place = KvFilePlace("model", str(number))
        if step == "use":
            values.record_use(place, size, seconds)
            plain[place] = (floor + seconds / size, clock)
        elif step == "remove":
            values.remove(place)
            plain.pop(place, None)
        elif plain:
            least = min(plain, key=plain.__getitem__)
            floor = plain.pop(least)[0]
            assert values.evict_least() == least


def test_endless_use_does_not_fill_the_memory() -> None:
    values = EvictionOrder[KvFilePlace]()
    for number in range(10_000):
        values.record_use(KvFilePlace("model", str(number % 10)), 1, 1.0)

    assert len(values._heap) <= 100


# The bounds.


@pytest.mark.asyncio
async def test_past_the_byte_limit_the_least_valuable_files_are_deleted(store: Store) -> None:
    files = [store.write(i, seconds=1 + i % 2) for i in range(6)]
    index = KvIndex(store.directory, bytes_max=4 * files[0].size)

    for file in files:
        report(index, file)
    assert index.bytes == 4 * files[0].size
    await settle(index)

    assert store.names() == {files[i].key.name for i in (1, 3, 4, 5)}


@pytest.mark.asyncio
async def test_past_the_file_limit_each_new_file_evicts_one(store: Store) -> None:
    files = [store.write(i) for i in range(5)]
    index = KvIndex(store.directory, LARGE, files_max=3)

    for file in files[:3]:
        report(index, file)
    report(index, files[0])
    for file in files[3:]:
        report(index, file)
    await settle(index)

    assert len(index) == 3
    assert store.names() == {files[i].key.name for i in (0, 3, 4)}


@pytest.mark.asyncio
async def test_a_file_larger_than_the_limit_is_the_only_one_evicted(store: Store) -> None:
    small, large = store.write(1), store.write(2, size=9000, seconds=1e6)
    index = KvIndex(store.directory, bytes_max=5000)
    report(index, small)
    report(index, large)
    await settle(index)

    assert store.names() == {small.key.name}


@pytest.mark.asyncio
async def test_the_user_who_has_most_loses_files_first(store: Store) -> None:
    his = [store.write(n, owner=2, seconds=0.001) for n in range(2)]
    hers = [store.write(n, owner=1, seconds=1e6) for n in range(10, 15)]
    index = KvIndex(store.directory, bytes_max=4 * his[0].size)
    for file in (*his, *hers):
        report(index, file)
    await settle(index)

    assert store.names() == {file.key.name for file in (*his, *hers[-2:])}

    few = KvIndex(store.directory, LARGE, files_max=3)
    for file in (*his, *hers):
        report(few, file)
    assert {place.name for place in few._entries} >= {his[1].key.name}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.floats(0, 9)), max_size=60))
def test_the_bounds_hold_for_any_reports(reports: list[tuple[int, int, float]]) -> None:
    index = KvIndex(Path("/nowhere"), bytes_max=100, files_max=7)
    for number, size, seconds in reports:
        index.add_file("model", str(number), 1, "", size, seconds)
        assert index.bytes <= 100 and len(index) <= 7
        assert index.bytes == sum(entry.size for entry in index._entries.values())


# Reports of workers.


@pytest.mark.asyncio
async def test_a_file_written_again_counts_once(store: Store) -> None:
    index = KvIndex(store.directory, LARGE)
    report(index, store.write(1, size=500))
    report(index, file := store.write(1, size=800))

    assert (len(index), index.bytes) == (1, file.size)


@pytest.mark.asyncio
async def test_a_file_that_a_worker_reports_missing_is_removed(store: Store) -> None:
    index = KvIndex(store.directory, LARGE)
    report(index, file := store.write(1))
    index.remove_file("model", file.key.name)
    index.remove_file("model", file.key.name)

    assert (len(index), index.bytes) == (0, 0)


@pytest.mark.asyncio
async def test_a_file_written_again_after_its_eviction_stays(store: Store) -> None:
    first, second = store.write(1), store.write(2)
    index = KvIndex(store.directory, bytes_max=first.size)
    report(index, first)
    report(index, second)  # evicts the first
    report(index, store.write(1, seconds=9))  # before it was deleted
    await settle(index)

    assert store.names() == paths(index) == {first.key.name}


# Starting.


@pytest.mark.asyncio
async def test_a_new_daemon_indexes_files_of_earlier_ones(store: Store) -> None:
    files = [
        store.write(i, owner=i % 2, fingerprint=f"model-{i % 3}", session=str(i)) for i in range(12)
    ]
    index = KvIndex(store.directory, LARGE)
    await index.load()

    assert paths(index) == {file.key.name for file in files}
    assert index.bytes == sum(file.size for file in files)
    assert await index.delete_session_files(1, "7") == 1


@pytest.mark.asyncio
async def test_a_start_without_a_directory_finds_nothing(tmp_path: Path) -> None:
    index = KvIndex(tmp_path / "none", LARGE)
    await index.load()

    assert len(index) == 0 and not (tmp_path / "none").exists()


@pytest.mark.asyncio
async def test_a_start_deletes_damaged_files(store: Store) -> None:
    good, cut = store.write(1), store.write(2, fingerprint="other")
    cut.path.write_bytes(cut.path.read_bytes()[:-1])
    good.path.with_name(".unfinished.1").touch()
    (store.directory / "other" / "9").mkdir()
    (store.directory / "link").symlink_to(store.directory / "model")

    index = KvIndex(store.directory, LARGE)
    await index.load()

    assert paths(index) == {good.key.name}
    assert store.names() == {good.key.name}, "a link was followed, or damage left"
    assert not (store.directory / "other").exists(), "an empty directory was left"


@pytest.mark.asyncio
async def test_a_start_with_a_lower_limit_evicts_the_least_recently_used(store: Store) -> None:
    files = [store.write(i) for i in range(4)]
    for age, file in zip((3, 1, 4, 2), files, strict=True):
        os.utime(file.path, (age, age))
    index = KvIndex(store.directory, bytes_max=2 * files[0].size)
    await index.load()
    await settle(index)

    assert store.names() == {files[0].key.name, files[2].key.name}


@pytest.mark.asyncio
@pytest.mark.parametrize(("bytes_max", "files_max"), [(0, 10), (LARGE, 0)])
async def test_a_store_that_was_switched_off_keeps_nothing(
    store: Store, bytes_max: int, files_max: int
) -> None:
    store.write(1)
    index = KvIndex(store.directory, bytes_max, files_max)
    await index.load()
    report(index, store.write(2))
    await settle(index)

    assert len(index) == 0 and store.names() == set()


# Deletion of sessions.


@pytest.mark.asyncio
async def test_delete_removes_a_sessions_files_of_all_models_before_it_answers(
    store: Store,
) -> None:
    index = KvIndex(store.directory, LARGE)
    for i, fingerprint in enumerate(("a", "a", "b")):
        report(index, store.write(i, session="mine", fingerprint=fingerprint), fingerprint)
    others = [
        store.write(1, session="mine", owner=2),
        store.write(1, session="other"),
        store.write(1),
    ]
    for file in others:
        report(index, file)

    assert await index.delete_session_files(1, "mine") == 3
    assert store.names() == paths(index) == {file.key.name for file in others}
    assert await index.delete_session_files(1, "mine") == 0


@pytest.mark.asyncio
async def test_delete_removes_evicted_files_that_still_exist(store: Store) -> None:
    index = KvIndex(store.directory, bytes_max=1)
    report(index, store.write(1, session="mine"))
    assert len(index) == 0 and store.names()

    assert await index.delete_session_files(1, "mine") == 1
    assert store.names() == set() and not index._doomed


@pytest.mark.asyncio
async def test_a_cancelled_deletion_is_completed(store: Store) -> None:
    index = KvIndex(store.directory, LARGE)
    report(index, store.write(1, session="mine"))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await index.delete_session_files(1, "mine")
    await settle(index)

    assert len(index) == 0 and store.names() == set()


@pytest.mark.asyncio
async def test_a_file_rewritten_and_evicted_during_its_deletion_is_deleted_again(
    store: Store,
) -> None:
    index = KvIndex(store.directory, bytes_max=1)
    report(index, file := store.write(1, session="mine"))
    async with anyio.create_task_group() as group:
        group.start_soon(index.delete_session_files, 1, "mine")
        await anyio.lowlevel.checkpoint()  # it knows by now what it deletes
        report(index, file)
    assert len(index._doomed) == 1
    await settle(index)

    assert not index._doomed


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_deleted_is_an_error(store: Store) -> None:
    index = KvIndex(store.directory, LARGE)
    report(index, file := store.write(1, session="mine"))
    file.path.unlink()
    file.path.mkdir()

    with pytest.raises(
        BackendError, match=r"1 KV files of the session cannot be deleted: .*: Is a"
    ):
        await index.delete_session_files(1, "mine")


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_deleted_does_not_end_the_index(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    index = KvIndex(store.directory, bytes_max=1)
    report(index, file := store.write(1))
    file.path.unlink()
    file.path.mkdir()
    await settle(index)
    report(index, store.write(2))
    await settle(index)

    assert store.names() == set()


@pytest.mark.asyncio
async def test_the_files_of_named_states_are_the_last_to_be_evicted(store: Store) -> None:
    index = KvIndex(store.directory, LARGE, files_max=2)
    state = store.write(1, session=name_of_state("", "story"), seconds=0.001)
    first, second = store.write(2, session="id:a"), store.write(3, session="id:b")
    for file in (state, first, second):
        report(index, file)
    await settle(index)
    assert store.names() == {state.key.name, second.key.name}

    another = store.write(4, session=name_of_state("", "tale"), seconds=0.002)
    report(index, another)
    report(index, store.write(5, session=name_of_state("cli", "tale"), seconds=0.003))
    await settle(index)
    assert state.key.name not in store.names() and len(index) == 2


@pytest.mark.asyncio
async def test_files_of_named_states_that_are_not_known_are_removed(store: Store) -> None:
    files = [store.write(n, session=name_of_state("", str(n))) for n in range(2)]
    files.append(store.write(3, session="id:state:/0"))
    files.append(store.write(4, owner=SCOPE_ALL, session=f"7/{name_of_state('', '1')}"))
    index = KvIndex(store.directory, LARGE)
    await index.load()
    index.remove_unknown_states({(1, name_of_state("", "1"))})
    await settle(index)
    assert store.names() == {files[1].key.name, files[2].key.name}


@pytest.mark.asyncio
async def test_all_files_of_a_fingerprint_can_be_deleted(store: Store) -> None:
    files = [store.write(n, session=f"id:{n}") for n in range(3)]
    index = KvIndex(store.directory, LARGE)
    await index.load()
    size = index.bytes
    assert index.delete_fingerprint("another") == (0, 0)
    (fingerprint,) = {file.path.parent.parent.name for file in files}
    assert index.delete_fingerprint(fingerprint) == (3, size)
    await settle(index)
    assert store.names() == set() and len(index) == 0
