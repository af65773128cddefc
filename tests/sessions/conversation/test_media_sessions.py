"""Sessions with images: their contents, their turns, and what ends, restarts and moves leave."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from inferd.backends.errors import Busy, NotFound, TooLarge, UnsupportedOperation
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from inferd.sessions import (
    Dates,
    ExportedSession,
    Journal,
    NamedStates,
    Opening,
    Session,
    StateFacts,
    StoredSession,
    Transfer,
    Turn,
    TurnOptions,
    decode_change,
    encode_change,
)
from inferd.sessions.elsewhere.documents import Uploads
from inferd.sessions.history.media import content_of
from inferd.sessions.media_store import MediaLimits, MediaStore
from tests.sessions.conversation.test_sessions import HERE, THERE, opened
from tests.sessions.doubles import IMAGE_SIZE, Source, media_tokens
from tests.sessions.history.test_history import ChatClient
from tests.sessions.history.test_media import message, part
from tests.sessions.journal.test_journal import Kept

pytestmark = pytest.mark.asyncio
USER = Owner(1000)


class Viewing(Kept):
    """A harness whose journal and media store are in *folder*."""

    def __init__(self, folder: Path, **bounds: Any):
        super().__init__(folder, **bounds)
        self.folder = folder
        self.port = ChatClient()
        self.source = Source(self.port)
        self.media = self.ledger.media = MediaStore(folder / "state" / "media")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Viewing]:
        """Open the store, read the journal and write it, as the daemon does."""
        await self.media.open()
        async with super().running():
            await self.media.sweep()
            yield self

    @asynccontextmanager
    async def killed(self, folder: Path) -> AsyncIterator[Viewing]:
        """Start on the files as they are now."""
        shutil.copytree(self.path.parent, folder / "state")
        async with Viewing(folder).running() as other:
            yield other

    async def add_input(self, session: Session, *parts: str | dict[str, Any]) -> None:
        """Add a message whose images are *parts* named by their bytes."""
        with self.media.lease(USER.user) as lease:
            for each in parts:
                if isinstance(each, dict):
                    await lease.add(each["data"], "image")
            stored = [p if isinstance(p, str) else part(p["data"]) for p in parts]
            await session.add_messages(message(*stored))

    async def turn(self, session: Session, *parts: str | dict[str, Any]) -> Turn:
        """Compute a turn with these parts, of which the answer is "yes"."""
        await self.add_input(session, *parts)
        turn = await session.start_turn(TurnOptions())
        end(turn)
        await session.finish_turn(turn)
        return turn

    def stored(self) -> set[bytes]:
        """Return the contents on disk."""
        return {path.read_bytes() for path in self.media._directory.rglob("*") if path.is_file()}


def end(turn: Turn) -> None:
    turn.report(m.Tokens(turn.spec.id, [121], b"y"))
    turn.report(m.Finished(turn.spec.id, b"", b"", m.TurnStats(stop_reason="eos")))


def image(data: bytes = b"cat") -> dict[str, Any]:
    return {"data": data}


@asynccontextmanager
async def viewing(folder: Path, **bounds: Any) -> AsyncIterator[Viewing]:
    async with Viewing(folder, **bounds).running() as harness:
        yield harness


async def test_a_turn_gets_the_items_of_its_prompt_and_reports_them(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness)
        await harness.add_input(session, "What is", image(), "beside", image(b"dog"))
        turn = await session.start_turn(TurnOptions())
        turn.media_encoded(1, 0.25)
        end(turn)
        turn.media_encoded(1, 9.0)  # of a turn that has ended

        items = [media_tokens(content_of(part(data))).items[0] for data in (b"cat", b"dog")]
        assert turn.spec.media == tuple(items)
        metadata = session.metadata()
        assert metadata.media_tokens == 2 * IMAGE_SIZE
        assert (metadata.media_cached, metadata.encode_s) == (1, 0.25)
        assert "media" not in metadata.adjusted


async def test_a_turn_without_images_reports_none(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness)
        turn = await harness.turn(session, "hello")

        assert turn.spec.media == ()
        assert b"media" not in session.read_output(1)


async def test_an_image_is_deleted_with_the_last_session_that_has_it(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        trunk = opened(harness)
        await harness.turn(trunk, "What?", image())
        [branch] = harness.manager.fork_session(HERE, trunk, 1)
        await harness.turn(branch, "And?", image(b"dog"))
        assert harness.stored() == {b"cat", b"dog"}

        await harness.manager.close_session(trunk)
        assert harness.stored() == {b"cat", b"dog"}
        await harness.manager.close_session(branch)
        assert harness.stored() == set()


@pytest.mark.parametrize("session_id", [None, "diary"])
async def test_a_reset_and_a_rewind_let_images_go(tmp_path: Path, session_id: str | None) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness, session_id=session_id)
        await harness.turn(session, "What?", image())
        await harness.turn(session, "And?", image(b"dog"))

        await session.rewind_history(1, None)
        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}
        session.reset_history()
        await session.wait_recorded()
        await harness.media.delete_unused()
        assert harness.stored() == set()


async def test_an_image_stays_until_the_journal_no_longer_names_it(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness, session_id="diary")
        await harness.turn(session, "What?", image())

        session.reset_history()  # not written yet
        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}
        async with harness.killed(tmp_path / "killed") as other:
            [found] = other.manager.dormant
            assert other.stored() == {b"cat"}
            assert found.history.messages[0]["content"][1] == part()


async def test_a_refused_turn_lets_its_image_go(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness)
        await harness.turn(session, "What?", image())
        harness.ledger.bounds.tasks_max = harness.ledger.bounds.tasks_owner_max = 0

        with pytest.raises(Busy):
            async with session.turn_input(lambda: _input(harness, session, image(b"dog"))):
                await session.start_turn(TurnOptions())

        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}
        assert [len(m["content"]) for m in session.history.messages] == [2, 1]


async def _input(harness: Viewing, session: Session, *parts: dict[str, Any]) -> Any:
    with harness.media.lease(USER.user) as lease:
        for each in parts:
            await lease.add(each["data"], "image")
        return await session.add_messages(message(*(part(p["data"]) for p in parts)))


async def test_a_kill_loses_no_image_and_leaves_none_over(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        diary = opened(harness, session_id="diary")
        await harness.turn(diary, "What?", image())
        await harness.turn(opened(harness), "Without an id", image(b"dog"))
        with harness.media.lease(USER.user) as lease:
            await lease.add(b"between the write and the journal", "image")
            async with harness.killed(tmp_path / "killed") as other:
                assert other.stored() == {b"cat"}
                session, attached = other.manager.open_session(
                    Opening(THERE, USER, other.source, {}, "diary")
                )
                assert attached
                turn = await other.turn(session, "And now?")
                assert len(turn.spec.media) == 1
                await other.manager.delete_session(session)
                assert other.stored() == set()


async def test_an_interrupted_turn_resumes_with_its_images(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        diary = opened(harness, session_id="diary")
        await harness.add_input(diary, "What?", image())
        before = await diary.start_turn(TurnOptions())
        before.report(m.Tokens(before.spec.id, [121], b"y"))
        diary.recording.turn_ended(None)
        await diary.wait_recorded()

        async with harness.killed(tmp_path / "killed") as other:
            session, _ = other.manager.open_session(Opening(THERE, USER, other.source, {}, "diary"))
            turn = await session.resume_turn(TurnOptions(), [121], b"y")
            assert turn.spec.media == before.spec.media != ()
            assert turn.spec.tokens == before.spec.tokens
            again = turn.continue_on(turn.client)
            assert again is not None
            assert again.media == before.spec.media


async def test_dormant_and_deleted_sessions_hold_their_images_until_they_are_erased(
    tmp_path: Path,
) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness, session_id="diary")
        await harness.turn(session, "What?", image())

        harness.manager.detach_session(session)
        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}
        assert await harness.manager.delete_restorably(USER, "diary", 60.0)
        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}
        assert await harness.manager.restore_deleted(USER, "diary")
        assert await harness.manager.delete_restorably(USER, "diary", 60.0)
        harness.now += 61
        harness.manager.delete_excess()
        await harness.manager.deletion.drain()
        assert harness.stored() == set()


async def test_a_named_state_holds_the_images_of_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with viewing(tmp_path) as harness, anyio.create_task_group() as group:
        path = harness.folder / "state" / "states.db"
        journal = Journal(path, dates=Dates(), facts=StateFacts)
        await journal.open_file()
        group.start_soon(journal.run)
        states = NamedStates(
            *(journal, harness.ledger.kept_bytes, lambda: 1, set(), lambda *_: None),
            media=harness.media,
        )
        session = opened(harness)
        await harness.turn(session, "What?", image())

        monkeypatch.setattr(harness.port, "submit", lambda _, turn: end(turn))
        state, _ = await states.save_state(session, "cat")
        await harness.manager.close_session(session)
        assert harness.stored() == {b"cat"}
        assert state.facts.media == tuple(session.history.contents)

        origin = states.find_state(USER, "cat")
        other, _ = harness.manager.open_session(
            Opening(HERE, USER, harness.source, {}, origin=origin)
        )
        assert await states.delete_state(USER, "cat")
        assert harness.stored() == {b"cat"}
        assert len(other.history.items) == 1
        await harness.manager.close_session(other)
        assert harness.stored() == set()
        await journal.close()
        group.cancel_scope.cancel()


async def test_embeddings_are_made_of_texts_only(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness)
        session.set_options({"embedding": True})
        with harness.media.lease(USER.user) as lease:
            await lease.add(b"cat", "image")
            await session.set_input([b"see ", part()])

            with pytest.raises(UnsupportedOperation, match="texts only"):
                await session.start_turn(TurnOptions(embeds=True))


async def test_a_raw_prompt_with_images_is_held(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness)
        with harness.media.lease(USER.user) as lease:
            await lease.add(b"cat", "image")
            tokens = await session.set_input([b"see ", part(), b"!"])

        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}
        assert tokens == len(session.conversation.prompt)
        turn = await session.start_turn(TurnOptions())
        assert len(turn.spec.media) == 1
        end(turn)
        await session.set_input(b"without")
        await harness.media.delete_unused()
        assert harness.stored() == set()


async def test_a_session_has_a_bound_of_images(tmp_path: Path) -> None:
    async with viewing(tmp_path) as harness:
        harness.media.limits = MediaLimits(session_items_max=1)
        session = opened(harness)
        await harness.turn(session, image())
        await harness.turn(session, "the same again", image())

        with pytest.raises(TooLarge):
            await harness.turn(session, image(b"dog"))
        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}


async def test_old_images_that_a_swapped_model_cannot_read_are_noted_or_refused(
    tmp_path: Path,
) -> None:
    async with viewing(tmp_path) as harness:
        session = opened(harness)
        await harness.turn(session, "What?", image())
        harness.port.reads = ()
        harness.media.limits = MediaLimits(refuses_unread=True)
        with pytest.raises(UnsupportedOperation, match="cannot read the images"):
            await harness.turn(session, "And?")

        harness.media.limits = MediaLimits()
        turn = await harness.turn(session, "And?")

        assert turn.spec.media == ()
        assert session.metadata().adjusted["media"].startswith("1 of the history's images")
        await harness.media.delete_unused()
        assert harness.stored() == {b"cat"}


async def test_a_session_takes_its_images_to_another_daemon(tmp_path: Path) -> None:
    async with viewing(tmp_path / "old") as old, viewing(tmp_path / "new") as new:
        session = opened(old, session_id="diary")
        await old.turn(session, "What?", image())
        await old.turn(session, "And?", image(b"dog"))
        old.manager.detach_session(session)
        leaving = old.manager.moving
        hold = leaving.hold_session(USER, "diary", Transfer("t", "new"), HERE)
        assert (hold.media_bytes, hold.size) == (6, len(hold.document) + 6)

        uploads = Uploads()
        contents = [old.media.read(USER.user, head.sha256) for head in hold.media]
        data = hold.document + b"".join([await content for content in contents])
        for offset, size in ((0, len(data) - 4), (len(data) - 4, 2), (len(data) - 2, 2)):
            upload = await uploads.add_part("t", offset, data[offset : offset + size], HERE)
            if upload.exported is None:
                assert upload.document is not None
                exported = ExportedSession.decode(upload.document)
                upload.begin_contents(exported, USER.user, new.media)
            is_complete = await upload.write_contents(new.media)
            assert is_complete == (offset + size == len(data))
        stored = StoredSession(USER, "diary", 0.0, _moving(exported), exported.past)
        await new.manager.moving.accept_session(stored, new.source, persist=True)
        upload.note_accepted()
        await leaving.end_transfer("t", "release", HERE)
        await new.manager.moving.end_transfer("t", "keep", HERE)
        for each in (old, new):
            await each.media.delete_unused()

        assert (old.stored(), new.stored()) == (set(), {b"cat", b"dog"})
        arrived, _ = new.manager.open_session(Opening(THERE, USER, new.source, {}, "diary"))
        turn = await new.turn(arrived, "And?")
        assert len(turn.spec.media) == 2


def _moving(exported: ExportedSession) -> Any:
    return msgspec.structs.replace(exported.facts, transfer=Transfer("t", "old"))


async def test_a_copy_gets_images_with_the_whole_session_only(tmp_path: Path) -> None:
    async with viewing(tmp_path / "home") as home, viewing(tmp_path / "follower") as follower:
        session = opened(home, session_id="diary")
        await home.turn(session, "What?", image())
        copies, stream = follower.manager.copies, Transfer("s", "home", copy=True)

        async def write(
            number: int, media: tuple[bytes, ...] | None, *, keeps: bool = True
        ) -> None:
            change = session.recording.take_copy(whole=True, media=media)
            with follower.media.lease(USER.user) as lease:
                for content in (media or ()) if keeps else ():
                    await lease.add(content, "image")
                received = decode_change(encode_change(change)[4:])
                await copies.write_change(USER, "diary", stream, number, received, follower.source)

        with pytest.raises(NotFound, match="are not here"):
            await write(1, None)
        await write(1, (b"cat",))
        await write(2, None)
        assert follower.stored() == {b"cat"}
        await home.turn(session, "And?", image(b"dog"))
        with pytest.raises(NotFound, match="are not here"):
            await write(3, None)
        await write(3, (b"cat", b"dog"), keeps=False)  # the follower has no space for it
        await write(4, None)
        [copy] = copies
        assert len(copy.absent) == 1
        assert follower.stored() == {b"cat"}

        await copies.end_copy(copy, "keep")
        found, _ = follower.manager.open_session(Opening(THERE, USER, follower.source, {}, "diary"))
        assert follower.media.held_by(found) == session.contents
        await follower.manager.delete_session(found)
        assert follower.stored() == set()
