"""The media store: contents once per user, their bounds, their holders, and what a kill leaves."""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path

import anyio
import pytest

from inferd.backends.errors import (
    BackendError,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    TooLarge,
)
from inferd.sessions.media_store import MediaLimits, MediaStore

pytestmark = pytest.mark.asyncio
ADA, BOB = 1000, 1001
DEFAULTS = MediaLimits()
IMAGE = b"an image"


@asynccontextmanager
async def stored(folder: Path, limits: MediaLimits = DEFAULTS) -> AsyncIterator[MediaStore]:
    """Yield an open store, which deletes what nobody holds."""
    store = MediaStore(folder / "media", limits)
    await store.open()
    async with anyio.create_task_group() as group:
        group.start_soon(store.run)
        yield store
        group.cancel_scope.cancel()


async def add(store: MediaStore, data: bytes = IMAGE, user: int = ADA, holder: str = "s") -> bytes:
    """Add a content that a session holds."""
    with store.lease(user) as lease:
        content = await lease.add(data, "image")
        store.hold(holder, user, {*store.held_by(holder), content})
    return content


def files(store: MediaStore) -> list[str]:
    """Return the files of a store, below its folder."""
    return sorted(
        str(path.relative_to(store._directory))
        for path in store._directory.rglob("*")
        if path.is_file()
    )


def read(store: MediaStore, content: bytes, user: int = ADA) -> bytes:
    with os.fdopen(store.open_content(user, content), "rb") as file:
        return file.read()


async def test_a_content_is_stored_once_for_each_user(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        content = await add(store)

        assert content == sha256(IMAGE).digest()
        assert await add(store, holder="another") == content
        assert files(store) == [f"{ADA}/{content.hex()}"]
        assert (store.bytes_of(ADA), store.bytes_of(BOB)) == (len(IMAGE), 0)
        assert read(store, content) == IMAGE == await store.read(ADA, content)
        mode = (tmp_path / "media" / str(ADA) / content.hex()).stat().st_mode
        assert mode & 0o777 == 0o600


async def test_the_hash_of_another_user_finds_nothing(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        content = await add(store)

        for find in (store.open_content, store.size_of):
            with pytest.raises(NotFound):
                find(BOB, content)
        await add(store, user=BOB, holder="bob's")

        assert len(files(store)) == 2
        store.release("bob's")
        await store.delete_unused()
        assert read(store, content) == IMAGE


async def test_a_content_is_deleted_with_the_last_session_that_holds_it(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        content, other = await add(store), await add(store, b"other")
        store.hold("branch", ADA, [content])
        store.hold("s", ADA, [other])

        await store.delete_unused()
        assert store.has(ADA, content)
        store.release("branch")
        assert not store.has(ADA, content)
        await store.delete_unused()
        assert files(store) == [f"{ADA}/{other.hex()}"]
        store.release("s")
        store.release("s")
        await store.delete_unused()
        assert not list((tmp_path / "media").iterdir())
        assert (store.total_bytes, store.count) == (0, 0)


async def test_a_content_of_which_no_session_made_use_is_deleted_after_its_call(
    tmp_path: Path,
) -> None:
    async with stored(tmp_path) as store:
        with store.lease(ADA) as lease:
            await lease.add(IMAGE, "image")
            assert len(files(store)) == 1
        await store.delete_unused()
        assert files(store) == []


async def test_a_content_that_is_held_again_before_its_deletion_stays(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        content = await add(store)
        store.release("s")
        store.hold("state", ADA, [content])
        await store.delete_unused()
        assert (read(store, content), store.bytes_of(ADA)) == (IMAGE, len(IMAGE))

        store.release("state")
        async with anyio.create_task_group() as group:  # its deletion and its addition at once
            group.start_soon(store.delete_unused)
            group.start_soon(add, store)
        assert read(store, content) == IMAGE
        await store.delete_unused()
        assert read(store, content) == IMAGE


async def test_a_content_may_arrive_in_parts(tmp_path: Path) -> None:
    digest = sha256(IMAGE).digest()
    async with stored(tmp_path, MediaLimits(user_bytes_max=2 * len(IMAGE) - 1)) as store:
        with store.lease(ADA) as lease:
            content = store.begin_content(lease, digest, len(IMAGE), "image")
            await content.write(IMAGE[:3])
            [unfinished] = files(store)
            assert unfinished.startswith(f"{ADA}/.new-") and not store.has(ADA, digest)
            with pytest.raises(QuotaExceeded):  # its space is reserved
                await add(store, b"x" * len(IMAGE))
            await content.write(IMAGE[3:])
            await content.finish()
            content.close()
            assert (read(store, digest), store.bytes_of(ADA)) == (IMAGE, len(IMAGE))
            assert files(store) == [f"{ADA}/{digest.hex()}"]

            again = store.begin_content(lease, digest, len(IMAGE), "image")
            await again.write(IMAGE)
            await again.finish()
            again.close()
            assert store.bytes_of(ADA) == len(IMAGE), "it was not written again"
        await store.delete_unused()
        assert (files(store), store._reserved.total()) == ([], 0)


@pytest.mark.parametrize("data", [IMAGE[:3], IMAGE[:-1] + b"!"])
async def test_a_content_that_does_not_arrive_or_has_another_hash_leaves_nothing(
    tmp_path: Path, data: bytes
) -> None:
    async with stored(tmp_path) as store:
        with store.lease(ADA) as lease:
            content = store.begin_content(lease, sha256(IMAGE).digest(), len(IMAGE), "image")
            await content.write(data)
            if not content.missing:
                with pytest.raises(InvalidArgument, match="SHA-256"):
                    await content.finish()
            content.close()
        await store.delete_unused()
        assert files(store) == []
        assert (store.bytes_of(ADA), store._reserved.total()) == (0, 0)


async def test_contents_of_an_arriving_session_have_the_bounds_of_others(tmp_path: Path) -> None:
    limits = MediaLimits(session_bytes_max=10, session_items_max=2, user_bytes_max=12)
    async with stored(tmp_path, limits) as store:
        own = await add(store, b"12345678")
        store.check_arrival(ADA, {own: 8, b"b": 2})
        with pytest.raises(TooLarge, match="would have 3 images"):
            store.check_arrival(ADA, {b"a": 1, b"b": 1, b"c": 1})
        with pytest.raises(TooLarge, match="would have 11 bytes"):
            store.check_arrival(ADA, {b"a": 11})
        with pytest.raises(QuotaExceeded):
            store.check_arrival(ADA, {b"a": 5})


@pytest.mark.parametrize("data", [b"", b"x" * 9])
async def test_an_item_has_at_least_one_byte_and_at_most_its_bound(
    tmp_path: Path, data: bytes
) -> None:
    async with stored(tmp_path, MediaLimits(item_bytes_max=8)) as store:
        await add(store, b"x" * 8)
        with pytest.raises((TooLarge, InvalidArgument)) as refused:
            await add(store, data)
        if data:
            assert refused.value.data == {"bytes": 9, "media_bytes_max": 8}
        assert len(files(store)) == 1


async def test_a_user_has_a_bound_also_for_what_is_being_written(tmp_path: Path) -> None:
    async with stored(tmp_path, MediaLimits(user_bytes_max=20)) as store:
        refused: list[QuotaExceeded] = []

        async def add_one(number: int) -> None:
            try:
                await add(store, b"%08d" % number)
            except QuotaExceeded as exc:
                refused.append(exc)

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(add_one, number)
        assert len(refused) == 98
        assert refused[0].data["bytes_max"] == 20
        assert refused[0].data["bound"] == "media-user-bytes-max"
        assert (store.bytes_of(ADA), len(files(store))) == (16, 2)
        await add(store, b"12345678", user=BOB, holder="bob's")


async def test_a_session_has_bounds_of_items_and_bytes(tmp_path: Path) -> None:
    limits = MediaLimits(session_bytes_max=10, session_items_max=3)
    async with stored(tmp_path, limits) as store:
        some = [await add(store, b"%d" % number) for number in range(4)]
        large = await add(store, b"x" * 9)

        store.check_session(ADA, some[:3])
        store.check_session(ADA, [some[0], large])
        with pytest.raises(TooLarge) as refused:
            store.check_session(ADA, some)
        assert refused.value.data == {"items": 4, "media_items_max": 3}
        with pytest.raises(TooLarge) as refused:
            store.check_session(ADA, [*some[:2], large])
        assert refused.value.data == {"bytes": 11, "media_session_bytes_max": 10}


async def test_a_hundred_calls_with_the_same_content_store_it_once(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(add, store, IMAGE, ADA, f"s{number}")
        await store.delete_unused()
        assert len(files(store)) == 1
        assert store.bytes_of(ADA) == len(IMAGE)
        for number in range(99):
            store.release(f"s{number}")
        await store.delete_unused()
        assert len(files(store)) == 1


async def test_a_start_finds_what_sessions_hold_and_sweeps_the_rest(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        kept, lost = await add(store), await add(store, b"the session was not written")
        # A kill between the parts of a write leaves a file without its name.
        (tmp_path / "media" / str(ADA) / ".new-7").write_bytes(b"half of")

    async with stored(tmp_path) as store:
        assert store.bytes_of(ADA) > len(IMAGE)
        store.hold("restored", ADA, [kept, b"\0" * 32])
        await store.sweep()

        assert files(store) == [f"{ADA}/{kept.hex()}"]
        assert store.bytes_of(ADA) == len(IMAGE)
        assert not store.has(ADA, lost)
        assert not store.has(ADA, b"\0" * 32)
        store.release("restored")
        await store.delete_unused()
        assert files(store) == []


@contextmanager
def files_bounded(size: int) -> Iterator[None]:
    """Let writes beyond this size of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        with files_bounded(4096), pytest.raises(BackendError, match="cannot be stored"):
            await add(store, b"x" * 10_000)

        await store.delete_unused()
        assert files(store) == []
        assert store.bytes_of(ADA) == 0
        await add(store, b"x" * 10_000)
        assert store.bytes_of(ADA) == 10_000


async def test_a_folder_that_is_deleted_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, folders = os.mkdir, list[Path]()

    def make_late(path: Path, mode: int) -> None:
        folders.append(Path(path))
        try:
            make(path, mode)
        except FileExistsError:
            if len(folders) == 1:
                os.rmdir(path)
            raise

    async with stored(tmp_path) as store:
        folder = tmp_path / "media" / str(ADA)
        folder.mkdir()
        monkeypatch.setattr(os, "mkdir", make_late)
        content = await add(store)
        assert folders == [folder, folder]
        assert read(store, content) == IMAGE


async def test_a_cancelled_call_leaves_nothing(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await add(store)
        await store.delete_unused()
        assert files(store) == []
        assert store._reserved.total() == 0


async def test_a_file_that_cannot_be_deleted_is_reported_and_tried_again(tmp_path: Path) -> None:
    async with stored(tmp_path) as store:
        content = await add(store)
        path = tmp_path / "media" / str(ADA) / content.hex()
        path.unlink()
        path.mkdir()  # no unlink removes it, not even that of root
        store.release("s")

        with pytest.raises(BackendError, match="cannot be deleted"):
            await store.delete_unused()
        await store.delete_unused(ADA + 1)  # it concerns nobody else
        path.rmdir()
        await store.delete_unused()
        assert not list((tmp_path / "media").iterdir())


async def test_without_a_usable_directory_contents_end_with_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "media").write_bytes(b"this is not a folder")
    causes: list[str | None] = []
    store = MediaStore(tmp_path / "media", note_state=causes.append)
    await store.open()

    content = await add(store)

    assert read(store, content) == IMAGE
    [cause] = causes
    assert cause is not None
    assert "media" in cause
    temporary = store._directory
    await store.close()
    assert not temporary.exists()


async def test_a_store_that_is_not_open_stores_nothing(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    with pytest.raises(BackendError, match="cannot be stored"):
        await add(store)
