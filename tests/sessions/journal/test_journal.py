"""The journal: sessions with an id come back as they were, whatever daemon and disk have done.

A restart is a second manager on the same file; a kill is one on a copy of it, made while the first
still has it open.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.backends.errors import BackendError, InvalidArgument
from inferd.scheduler import messages as m
from inferd.scheduler.messages import pack_tokens
from inferd.scheduler.owner import Owner, Priority
from inferd.sessions import DormantLimits, Journal, Opening, Session, TurnOptions
from inferd.sessions.entries import (
    HistoryEntry,
    Mark,
    Replay,
    SessionFacts,
    TurnBegin,
    TurnPiece,
    decode_history,
    encode,
)
from inferd.sessions.journal.journal_file import (
    SCHEMA,
    Erase,
    JournalFile,
    NewerJournal,
    SaveDeletions,
    SaveFacts,
    SavePast,
    SavePiece,
)
from inferd.sessions.lifetimes.sessions_in_memory import DAY_S
from inferd.sessions.manager import SessionManager
from tests.journal_versions import mark_version
from tests.repetitions import repetitions
from tests.sessions.conversation.test_sessions import HERE, THERE, answer, opened
from tests.sessions.doubles import Harness

OWNER = Owner(1000)
SECRET = b"the cat is called Fluffington"


class Kept(Harness):
    """A harness with a journal in *folder*."""

    def __init__(self, folder: Path, **bounds: Any):
        super().__init__()
        self.path = folder / "state" / "sessions.db"
        self.journal = Journal(self.path)
        numbers = count(1)
        self.manager = SessionManager(
            self.ledger, lambda: next(numbers), journal=self.journal, **bounds
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Kept]:
        """Read the journal and write it, as the daemon does."""
        self.manager.restore_sessions(await self.journal.open_file(), lambda _: self.source)
        async with anyio.create_task_group() as group:
            group.start_soon(self.journal.run)
            yield self
            await self.journal.close()
            group.cancel_scope.cancel()

    def files(self) -> bytes:
        """Return the bytes of the journal and its log."""
        return b"".join(p.read_bytes() for p in self.path.parent.glob("sessions.db*"))

    @asynccontextmanager
    async def killed(self, folder: Path) -> AsyncIterator[Kept]:
        """Start on the files as they are now."""
        shutil.copytree(self.path.parent, folder / "state")
        async with Kept(folder).running() as other:
            yield other


def named(harness: Harness, session_id: str = "diary", **fields: Any) -> Session:
    return opened(harness, session_id=session_id, **fields)


def all_of(session: Session) -> tuple[HistoryEntry, Any]:
    """Return all that a session is to come back with."""
    entry = session.conversation.history_state.now.after(session.turn).entry()
    facts = session.facts
    return entry, (facts.model, facts.options, facts.priority, facts.turns, facts.vocabulary)


def end_of(session: Session) -> Any:
    """Return the end of a session's last turn as its reader can get it after a loss."""
    resumable, last = session.conversation.history_state.resumable, session.conversation.last
    if resumable is not None:
        return resumable.whole.end, resumable.whole.metadata
    if last.turn is None:
        return "no turn"
    return (None, b"") if last.end is None else (last.end.reason, last.end.metadata)


async def reopened(harness: Kept, session_id: str = "diary") -> Session:
    session, attached = harness.manager.open_session(
        Opening(THERE, OWNER, harness.source, {}, session_id)
    )
    assert attached
    return session


# The file.


def a_past(text: str = "", tokens: Sequence[int] = ()) -> bytes:
    messages = [{"role": "user", "content": text}] if text else []
    return encode(HistoryEntry(tokens=pack_tokens(tokens), messages=messages))


def saved(session_id: str, past: bytes = b"\x80", at: float = 1.0) -> SavePast:
    facts = encode(SessionFacts(model="m"))
    return SavePast(owner=OWNER, session_id=session_id, facts=facts, past=past, at=at)


def piece(session_id: str, number: int, **fields: Any) -> SavePiece:
    data = encode(TurnPiece(**fields))
    return SavePiece(owner=OWNER, session_id=session_id, number=number, data=data)


@pytest.fixture
def file(tmp_path: Path) -> JournalFile:
    return JournalFile(tmp_path / "state" / "sessions.db", now=lambda: 7.0)


def test_what_is_written_is_read_the_longest_untouched_first(file: JournalFile) -> None:
    assert file.open().sessions == []
    file.write([saved("b", at=2.0), saved("a", a_past("hello"), at=3.0), saved("c", at=1.0)])
    file.write([piece("a", 0, begin=TurnBegin(seed=3), text=b"x"), piece("a", 1, end="eos")])
    other = encode(SessionFacts(model="m", priority=Priority.URGENT.label))
    file.write([SaveFacts(owner=OWNER, session_id="b", facts=other, at=4.0)])
    file.close()

    found = file.open()

    assert [s.session_id for s in found.sessions] == ["c", "a", "b"]
    assert found.sessions[1].past == a_past("hello")
    assert found.sessions[1].pieces == (
        TurnPiece(begin=TurnBegin(seed=3), text=b"x"),
        TurnPiece(end="eos"),
    )
    assert found.sessions[2].facts.priority == Priority.URGENT.label
    assert found.set_aside is None


def test_another_past_and_another_turn_leave_nothing_of_the_turn_before(file: JournalFile) -> None:
    file.open()
    file.write([saved("a"), piece("a", 0, text=b"one"), piece("a", 1, text=b"two")])
    file.write([piece("a", 0, text=b"three")])
    file.close()
    [stored] = file.open().sessions
    assert [p.text for p in stored.pieces] == [b"three"]

    file.write([saved("a")])
    file.close()

    assert file.open().sessions[0].pieces == ()


def test_only_its_owner_may_read_it(file: JournalFile) -> None:
    file.open()
    file.write([saved("a")])

    parts = list(file.path.parent.iterdir())
    assert {p.name for p in parts} == {"sessions.db", "sessions.db-wal"}
    assert {p.stat().st_mode & 0o777 for p in parts} == {0o600}


@pytest.mark.parametrize("size", [1, 5000, 100_000])
def test_what_is_erased_is_in_no_byte_of_the_files(file: JournalFile, size: int) -> None:
    file.open()
    text = f"{SECRET.decode()} " * (size // 30 + 1)
    file.write([saved("keep", a_past("kept " * 500)), saved("a", a_past(text))])
    file.write([saved("a", a_past(text + "more")), piece("a", 0, text=SECRET)])
    everything = file.path.parent.glob("sessions.db*")
    assert any(SECRET in p.read_bytes() for p in everything)

    file.write([Erase(owner=OWNER, session_id="a"), saved("b", a_past("other"))])

    for path in file.path.parent.glob("sessions.db*"):
        assert SECRET not in path.read_bytes()
    file.close()
    assert {s.session_id for s in file.open().sessions} == {"keep", "b"}


def test_a_newer_journal_is_refused_and_not_touched(file: JournalFile) -> None:
    file.open()
    file.write([saved("a")])
    file.close()
    mark_version(file.path, SCHEMA + 1)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in file.path.parent.iterdir()}

    with pytest.raises(NewerJournal, match=f"tables {SCHEMA + 1}, here {SCHEMA}"):
        file.open()

    after = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in file.path.parent.iterdir()}
    assert after == before
    assert not file.is_open


def test_a_journal_of_an_older_version_is_set_aside(file: JournalFile) -> None:
    file.open()
    file.write([saved("a")])
    file.close()
    mark_version(file.path, SCHEMA - 1)
    before = file.path.read_bytes()

    found = file.open()

    assert found.sessions == []
    assert found.set_aside is not None and found.set_aside.read_bytes() == before
    assert f"an older version of inferd (tables {SCHEMA - 1}, here {SCHEMA})" in found.cause
    file.write([saved("new")])
    file.close()
    assert [s.session_id for s in file.open().sessions] == ["new"]


def garble_header(data: bytearray) -> None:
    data[:20] = b"x" * 20


def garble_pages(data: bytearray) -> None:
    data[4096:] = b"\xff" * (len(data) - 4096)


def cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def no_tables(data: bytearray) -> None:
    at = data.index(b"CREATE TABLE session")
    data[at : at + 6] = b"create"
    data[at + 13 : at + 20] = b"sessiun"


@pytest.mark.parametrize("damage", [garble_header, garble_pages, cut, no_tables])
def test_a_damaged_journal_is_set_aside_and_a_new_one_begun(
    file: JournalFile, damage: Callable[[bytearray], None]
) -> None:
    file.open()
    file.write([saved(f"s{n}", a_past("hello" * 1000)) for n in range(20)])
    file.close()
    data = bytearray(file.path.read_bytes())
    damage(data)
    file.path.write_bytes(data)

    found = file.open()

    assert found.set_aside is not None and found.set_aside.name == "sessions.db.damaged-7"
    assert found.set_aside.read_bytes() == data
    file.write([saved("new")])
    file.close()
    assert [s.session_id for s in file.open().sessions] == ["new"]


def test_one_flipped_bit_costs_one_session_and_an_aside_never_overwrites_another(
    file: JournalFile,
) -> None:
    for expected in ("sessions.db.damaged-7", "sessions.db.damaged-7-1"):
        file.open()
        file.write([saved(name, a_past(f"<{name}>" * 40)) for name in ("a", "b", "c")])
        file.close()
        data = bytearray(file.path.read_bytes())
        data[data.index(b"<b>") + 1] ^= 4
        file.path.write_bytes(data)

        found = file.open()

        assert sorted(s.session_id for s in found.sessions) == ["a", "c"]
        assert found.set_aside is not None and found.set_aside.name == expected
        file.close()


def test_a_journal_of_a_version_without_notes_is_read_and_gets_them(file: JournalFile) -> None:
    file.open()
    file.write([saved("diary")])
    file.close()
    with closing(sqlite3.connect(file.path)) as db:
        db.execute("DROP TABLE deletions")
    found = file.open()
    assert found.set_aside is None and len(found.sessions) == 1
    file.write([SaveDeletions(owner=OWNER, data=b"notes")])
    file.close()
    assert file.open().deletions == {OWNER: b"notes"}


def test_damaged_notes_are_left_out_and_cost_no_session(file: JournalFile) -> None:
    file.open()
    file.write([saved("diary"), SaveDeletions(owner=OWNER, data=b"notes")])
    file.close()
    with closing(sqlite3.connect(file.path)) as db, db:
        db.execute("UPDATE deletions SET data = ?", (b"other",))
    found = file.open()
    assert found.set_aside is None and len(found.sessions) == 1 and found.deletions == {}


def test_notes_that_are_cleared_are_in_no_byte_of_the_files(file: JournalFile) -> None:
    file.open()
    file.write([SaveDeletions(owner=OWNER, data=SECRET)])
    file.write([SaveDeletions(owner=OWNER, data=b"")])
    assert all(SECRET not in path.read_bytes() for path in file.path.parent.iterdir())


def test_the_title_of_a_session_of_an_earlier_version_is_made_of_its_history(
    tmp_path: Path,
) -> None:
    facts = msgspec.msgpack.decode(encode(SessionFacts(model="echo")))
    del facts["opening"], facts["title"], facts["kept"], facts["undo_s"]
    past = HistoryEntry(messages=[{"role": "user", "content": "Why is the sky blue?"}])
    file = JournalFile(tmp_path / "sessions.db")
    file.open()
    key: dict[str, Any] = {"owner": OWNER, "session_id": "diary"}
    file.write([SavePast(**key, facts=encode(facts), past=encode(past), at=1.0)])
    file.close()
    [stored] = file.open().sessions
    harness = Harness()
    session = Session.from_stored(stored, harness.source, harness.ledger)
    assert session.title == "Why is the sky blue?" and not session.settings.kept


def test_two_daemons_do_not_share_a_journal(file: JournalFile) -> None:
    file.open()
    other = JournalFile(file.path)

    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.open()

    file.write([saved("a")])
    file.close()
    assert len(other.open().sessions) == 1


def test_shifts_are_replayed_where_they_came() -> None:
    pieces = (
        TurnPiece(tokens=pack_tokens([4, 5]), begin=TurnBegin()),
        TurnPiece(tokens=pack_tokens([6]), shifts=((3, 1, 2),)),
        TurnPiece(tokens=pack_tokens([7, 8]), shifts=((4, 0, 1),), end="length"),
    )

    replay = Replay([1, 2, 3], pieces)

    assert replay.history() == [4, 5, 6, 7, 8]
    assert replay.shifts == [(1, 2), (0, 1)]
    assert replay.ended


# Sessions.


@pytest.mark.asyncio
async def test_a_session_comes_back_after_a_restart_as_it_was(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        session.set_options({"append": True, "n-predict": 4})
        session.settings.priority = Priority.URGENT
        await answer(harness, session, b"hello")
        await session.add_messages([{"role": "user", "content": "and now"}])
        expected = all_of(session)
        harness.manager.detach_all()

    async with Kept(tmp_path).running() as harness:
        assert len(harness.manager.dormant) == 1
        session = await reopened(harness)
        assert all_of(session) == expected
        await session.wait_recorded()
        assert session.recording.durable
        assert await answer(harness, session, b"go on") == b"go o"


@pytest.mark.asyncio
async def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        await answer(harness, session, b"hello")
        metadata = session.metadata()
        session.set_options({"append": True, "seed": 5})
        await session.wait_recorded()
        expected = all_of(session)
        async with harness.killed(tmp_path / "b") as other:
            back = await reopened(other)
            assert all_of(back) == expected
            assert back.metadata() == metadata


@pytest.mark.asyncio
async def test_a_turn_under_way_survives_a_kill_up_to_the_last_group(tmp_path: Path) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        await session.set_input(b"abcdef")
        await session.start_turn(TurnOptions(credit=3, options={"seed": 9}))
        harness.port.run()
        assert session.active
        await session.wait_recorded()
        async with harness.killed(tmp_path / "b") as other:
            back = await reopened(other)

            assert back.conversation.tokens() == session.conversation.tokens()
            assert bytes(t for t in back.conversation.tokens() if t < 256) == b"abcdefabc"
            assert back.metadata().stop_reason == "detached"
            turn = back.conversation.history_state.resumable
            assert turn is not None and not turn.ended
            assert turn.begin == TurnBegin(options={"seed": 9}, seed=9, special=True, turns=1)
            assert (turn.tokens, turn.text) == (list(b"abc"), b"abc")


@pytest.mark.asyncio
async def test_tokens_are_written_without_anybody_asking(tmp_path: Path) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        await session.set_input(b"abcdef")
        await session.start_turn(TurnOptions(credit=3))
        harness.port.run()
        with anyio.fail_after(60):
            await harness.journal._flushed.wait()
        async with harness.killed(tmp_path / "b") as other:
            assert (await reopened(other)).conversation.tokens() == session.conversation.tokens()


@pytest.mark.asyncio
async def test_a_group_is_written_at_once_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.sessions.journal.journal.GROUP_S", 1e9)
    monkeypatch.setattr("inferd.sessions.journal.journal.GROUP_TOKENS", 16)
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await session.set_input(b"x" * 100)
        await session.start_turn(TurnOptions(credit=15))
        harness.port.run()
        written = harness.journal._done
        await anyio.wait_all_tasks_blocked()
        assert harness.journal._done == written, "15 tokens wait for more, or for their time"

        assert session.turn is not None
        session.turn.add_credit(1)
        harness.port.run()
        with anyio.fail_after(60):
            await harness.journal._flushed.wait()


@pytest.mark.asyncio
async def test_computing_the_same_prompt_anew_takes_the_place_of_the_answer(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        await answer(harness, session, b"again")
        turn = await session.start_turn(TurnOptions(options={"n-predict": 2}))
        harness.port.run()
        await session.finish_turn(turn)
        async with harness.killed(tmp_path / "b") as other:
            back = await reopened(other)
            assert bytes(t for t in back.conversation.tokens() if t < 256) == b"againag"


@pytest.mark.asyncio
async def test_context_shifts_come_back(tmp_path: Path) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        session.set_options({"append": True})
        await answer(harness, session, b"one two three")
        await session.set_input(b"four five")
        turn = await session.start_turn(TurnOptions())
        ids = turn.spec.id
        for report in (
            m.Tokens(ids, [65, 66], b"AB"),
            m.Shifted(ids, 3, 10),
            m.Tokens(ids, [67], b"C"),
            m.Shifted(ids, 3, 5),
        ):
            turn.report(report)
        await session.wait_recorded()
        turn.report(m.Finished(ids, b"", b"", m.TurnStats(stop_reason="length")))
        await session.finish_turn(turn)
        async with harness.killed(tmp_path / "b") as other:
            assert all_of(await reopened(other)) == all_of(session)


@pytest.mark.asyncio
async def test_branches_come_back_and_those_that_nobody_wanted_do_not(tmp_path: Path) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        trunk = opened(harness)
        await answer(harness, trunk, b"hello")
        one, two = harness.manager.fork_session(HERE, trunk, 2, ["one", "two"])
        await one.wait_recorded()
        harness.manager.discard_session(two)
        await harness.manager.deletion.drain()
        async with harness.killed(tmp_path / "b") as other:
            assert len(other.manager.dormant) == 1
            assert all_of(await reopened(other, "one"))[0] == all_of(one)[0]


@pytest.mark.asyncio
async def test_sessions_without_an_id_and_those_that_do_not_persist_are_not_written(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path).running() as harness:
        sessions = [opened(harness), named(harness, "quiet", persist=False)]
        for session in sessions:
            await answer(harness, session, SECRET)
            assert session.metadata().durable is None
        written = harness.journal._begun
        harness.manager.detach_all()

        assert written == 0
        assert SECRET not in harness.files()
        assert len(harness.manager.dormant) == 1, "it sleeps in memory"


async def delete_by_id(harness: Kept, session: Session) -> None:
    assert await harness.manager.delete_session_by_id(OWNER, "diary")


async def delete_dormant(harness: Kept, session: Session) -> None:
    harness.manager.detach_session(session)
    await delete_by_id(harness, session)


async def close(harness: Kept, session: Session) -> None:
    await harness.manager.close_session(session)


async def quiet(harness: Kept, session: Session) -> None:
    await harness.manager.stop_persisting(session)


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", [close, delete_by_id, delete_dormant, quiet])
async def test_what_is_deleted_is_in_no_byte_of_the_files_and_does_not_come_back(
    tmp_path: Path, ending: Callable[[Kept, Session], Any]
) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        other = named(harness, "other")
        await answer(harness, other, b"something else")
        session = named(harness)
        await session.add_messages([{"role": "user", "content": SECRET.decode()}])
        turn = await session.start_turn(TurnOptions())
        harness.port.run()
        await session.finish_turn(turn)
        session.set_options({"stop": ["a marker of mine"]})
        await session.wait_recorded()
        assert SECRET in harness.files() and b"a marker of mine" in harness.files()

        await ending(harness, session)

        assert SECRET not in harness.files() and b"a marker of mine" not in harness.files()
        async with harness.killed(tmp_path / "b") as again:
            assert len(again.manager.dormant) == 1


@pytest.mark.asyncio
async def test_what_is_deleted_is_not_written_again_by_what_comes_late(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await session.set_input(SECRET)
        turn = await session.start_turn(TurnOptions(credit=3))
        harness.port.run()
        await harness.manager.close_session(session)

        turn.report(m.Tokens(turn.spec.id, [1], SECRET))
        session.recording.history_changed()
        await session.wait_recorded()

        assert not harness.journal._changed
        assert SECRET not in harness.files()


@pytest.mark.asyncio
async def test_an_id_that_is_deleted_may_be_used_again(tmp_path: Path) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        for text in (b"first", b"second"):
            session = named(harness)
            await answer(harness, session, text)
            if text == b"first":
                await harness.manager.close_session(session)
        async with harness.killed(tmp_path / "b") as other:
            assert all_of(await reopened(other)) == all_of(session)


# Bounds.


async def expire_until(harness: Kept, count: int) -> None:
    """Expire sessions until *count* are dormant, and nothing more is to be deleted."""
    manager = harness.manager
    async with anyio.create_task_group() as group:
        group.start_soon(manager.expire_idle)
        with anyio.fail_after(60):
            while len(manager.dormant) != count or manager.deletion.pending:  # noqa: ASYNC110 (it has no event)
                await anyio.sleep(0.002)
        group.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_the_longest_dormant_goes_by_days_and_by_bytes(tmp_path: Path) -> None:
    async with Kept(
        tmp_path, dormant_limits=DormantLimits(seconds_max=7 * DAY_S)
    ).running() as harness:
        for number in range(3):
            harness.now = number * DAY_S
            await answer(harness, named(harness, f"s{number}"), bytes([97 + number]) * 100)
            harness.manager.close_connection(HERE)
        size = harness.manager.dormant.bytes

        harness.now = 7 * DAY_S
        await expire_until(harness, 2)
        assert harness.port.deleted == [(OWNER, "id:s0")], "its KV states go with it"
        assert pack_tokens([97] * 9) not in harness.files()

        harness.manager.dormant.limits = DormantLimits(bytes_max=size // 2)
        await expire_until(harness, 1)
        assert harness.manager.dormant.bytes < size // 2
        assert list(harness.journal._present) == [(OWNER, "s2")]


@pytest.mark.asyncio
async def test_bounds_hold_for_what_is_found_at_the_start(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "state" / "sessions.db")
    file.open()
    file.write([saved(f"s{n}", at=float(n)) for n in range(4)])
    file.close()

    async with Kept(tmp_path, dormant_limits=DormantLimits(2, 1e12)).running() as harness:
        assert len(harness.manager.dormant) == 2
        await harness.manager.deletion.drain()
        assert harness.journal._present == {(OWNER, "s2"), (OWNER, "s3")}
    async with Kept(tmp_path).running() as harness:
        assert len(harness.manager.dormant) == 0, "they are from 1970"


# Faults.


@pytest.mark.asyncio
async def test_a_journal_that_cannot_be_written_says_so_and_is_made_good_later(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "state").write_text("a file where the folder belongs")
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        await answer(harness, session, b"hello")
        assert session.metadata().durable is False
        status = harness.journal.status
        assert status["state"] == "failing" and "state" in str(status["cause"])

        (tmp_path / "a" / "state").unlink()
        session.set_options({"n-predict": 3})
        await session.wait_recorded()

        assert session.metadata().durable is True
        assert harness.journal.status["state"] == "written"
        async with harness.killed(tmp_path / "b") as other:
            assert all_of(await reopened(other)) == all_of(session)


@pytest.mark.asyncio
async def test_a_session_that_cannot_be_stored_keeps_no_other_from_being_written(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path).running() as harness:
        odd, usual = named(harness, "odd"), named(harness, "usual")
        await harness.journal.wait_written(usual.recording)
        odd.settings.parameters.options = {"chat-template-kwargs": {"number": 1 << 64}}
        await answer(harness, odd, b"one")
        await answer(harness, usual, b"two")
        assert (odd.recording.durable, usual.recording.durable) == (False, True)
        assert harness.journal.status["state"] == "written"
        async with harness.killed(tmp_path / "after") as other:
            back = await reopened(other, "usual")
            assert back.conversation.tokens() == usual.conversation.tokens()


@pytest.mark.asyncio
async def test_a_journal_that_cannot_be_written_is_tried_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.sessions.journal.journal.RETRY_S", 0.01)
    (tmp_path / "state").write_text("")
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await answer(harness, session, b"hello")
        (tmp_path / "state").unlink()

        with anyio.fail_after(60):
            while not session.recording.durable:
                await harness.journal._flushed.wait()


@pytest.mark.asyncio
async def test_the_lag_counts_from_the_damage_that_a_deletion_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Kept(tmp_path).running() as harness:
        deleted, other = named(harness, "deleted"), named(harness, "other")
        await answer(harness, deleted, b"hello")
        await answer(harness, other, b"hello")
        damage = sqlite3.DatabaseError("malformed")
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        monkeypatch.setattr(harness.journal._file, "write", failing(damage))
        with pytest.raises(BackendError):
            await harness.manager.close_session(deleted)
        other.set_options({"n-predict": 3})
        assert harness.journal.lag_s > 0
        monkeypatch.undo()


@pytest.mark.asyncio
async def test_what_cannot_be_deleted_is_no_success_and_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await answer(harness, session, SECRET)
        blocked = sqlite3.OperationalError("disk full")
        monkeypatch.setattr(harness.journal._file, "write", failing(blocked))

        with pytest.raises(BackendError, match="disk full"):
            await harness.manager.close_session(session)
        assert SECRET in harness.files()

        monkeypatch.undo()
        await harness.manager.deletion.drain()
        assert SECRET not in harness.files()


def failing(error: Exception) -> Callable[[Any], None]:
    def write(changes: Any) -> None:
        raise error

    return write


@pytest.mark.asyncio
async def test_a_newer_journal_leaves_the_sessions_in_memory(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "state" / "sessions.db")
    file.open()
    file.close()
    mark_version(file.path, SCHEMA + 1)
    before = file.path.read_bytes()

    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await answer(harness, session, b"hello")
        assert session.metadata().durable is False
        assert harness.journal.status["state"] == "refused"
        harness.manager.close_connection(HERE)
        assert (
            bytes(t for t in (await reopened(harness)).conversation.tokens() if t < 256)
            == b"hellohello"
        )
    assert file.path.read_bytes() == before


@pytest.mark.asyncio
async def test_damage_costs_only_what_is_damaged(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        for name in ("one", "two"):
            await answer(harness, named(harness, name), f"<{name}> and so on".encode())
        expected = all_of(harness.manager.live.sessions_of(HERE)[0])
        harness.manager.detach_all()
    data = bytearray(harness.path.read_bytes())
    at = data.index(pack_tokens(list(b"<two>")))
    data[at] ^= 1
    harness.path.write_bytes(data)

    async with Kept(tmp_path).running() as harness:
        assert harness.journal.status["moved_to"] is not None
        with anyio.fail_after(60):
            while not harness.journal._present:
                await harness.journal._flushed.wait()
    async with Kept(tmp_path).running() as harness:
        assert harness.journal.status["moved_to"] is None
        assert all_of(await reopened(harness, "one")) == expected, "it was written into the new one"
        assert not harness.manager.open_session(Opening(HERE, OWNER, harness.source, {}, "two"))[1]


@pytest.mark.asyncio
async def test_a_session_whose_model_has_other_tokens_now_is_refused(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await answer(harness, session, b"hello")
        session.conversation.vocabulary.hash = "another"
        harness.manager.detach_all()
    async with Kept(tmp_path).running() as harness:
        with pytest.raises(InvalidArgument, match="has another vocabulary"):
            harness.manager.open_session(Opening(THERE, OWNER, harness.source, {}, "diary"))
        assert await harness.manager.delete_session_by_id(OWNER, "diary")


# Resuming.


async def interrupted(harness: Kept, sent: int = 3, **options: Any) -> Session:
    """Return a restored session whose turn has sent this number of tokens."""
    session = named(harness)
    await session.set_input(b"abcdefghij")
    await session.start_turn(TurnOptions(credit=sent, options=options))
    harness.port.run()
    harness.manager.close_connection(HERE)
    harness.port.run()
    return await reopened(harness)


async def resumed(harness: Kept, session: Session, tokens: bytes = b"", text: bytes = b"") -> bytes:
    """Resume with the reader's output, and return what is sent then."""
    sent = bytearray()
    turn = await session.resume_turn(
        TurnOptions(), list(tokens), text, lambda report: sent.extend(report.text)
    )
    harness.port.run()
    await session.finish_turn(turn)
    return bytes(sent) + turn.tail


@pytest.mark.asyncio
@pytest.mark.parametrize("seen", [b"", b"a", b"abc", b"abcdef", b"abcdefghij"])
async def test_a_turn_goes_on_from_where_its_reader_is(tmp_path: Path, seen: bytes) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = await interrupted(harness)
        assert await resumed(harness, session, seen, seen) == b"abcdefghij"[len(seen) :]

        assert bytes(session.turn.text) == b"abcdefghij" if session.turn else False
        assert session.metadata().stop_reason == "eos"
        assert bytes(t for t in session.conversation.tokens() if t < 256) == b"abcdefghij" * 2
        async with harness.killed(tmp_path / "b") as other:
            assert all_of(await reopened(other)) == all_of(session)


@pytest.mark.asyncio
async def test_a_resumed_turn_has_its_own_options_seed_and_bound(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        options = {"n-predict": 5, "seed": 77}
        session = await interrupted(harness, **options)
        assert await resumed(harness, session, b"abc", b"abc") == b"de"
        assert session.metadata().seed == 77
        assert session.metadata().stop_reason == "length"


@pytest.mark.asyncio
async def test_a_turn_whose_last_token_its_reader_has_ends_without_another(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        session = await interrupted(harness, **{"n-predict": 5})
        assert await resumed(harness, session, b"abcde", b"abcde") == b""
        assert session.metadata().stop_reason == "length"
        assert bytes(t for t in session.conversation.tokens() if t < 256) == b"abcdefghijabcde"


@pytest.mark.asyncio
async def test_a_turn_may_be_interrupted_and_resumed_again_and_again(tmp_path: Path) -> None:
    async def go_on(harness: Kept, session: Session, sent: int) -> None:
        await session.wait_recorded()
        async with harness.killed(tmp_path / str(sent)) as other:
            back = await reopened(other)
            turn = await back.resume_turn(TurnOptions(credit=2), [], b"")
            other.port.run()
            assert bytes(turn.text) == b"abcdefghij"[: sent + 2]
            if sent < 6:
                await go_on(other, back, sent + 2)

    async with Kept(tmp_path / "first").running() as harness:
        await go_on(harness, await interrupted(harness, sent=2), 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["compute", "input"])
async def test_what_is_done_instead_of_resuming_leaves_the_turn_as_it_stands(
    tmp_path: Path, call: str
) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = await interrupted(harness)
        await session.wait_recorded()
        if call == "compute":
            turn = await session.start_turn(TurnOptions(options={"n-predict": 1}))
            harness.port.run()
            await session.finish_turn(turn)
        else:
            await session.add_text(b"more")
        with pytest.raises(InvalidArgument, match="no turn of this session was interrupted"):
            await session.resume_turn(TurnOptions(), [], b"")
        async with harness.killed(tmp_path / "b") as other:
            back = await reopened(other)
            assert all_of(back) == all_of(session)
            assert not back.conversation.history_state.interrupted


@pytest.mark.asyncio
async def test_a_turn_sends_nothing_before_its_beginning_is_written(tmp_path: Path) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        await session.set_input(b"abc")
        async with anyio.create_task_group() as group, harness.journal._thread:  # the disk is slow
            group.start_soon(session.start_turn, TurnOptions())
            await anyio.wait_all_tasks_blocked()
            harness.port.run()
            assert session.active and not session.conversation.tokens()[5:]
        harness.port.run()
        assert bytes(t for t in session.conversation.tokens() if t < 256) == b"abcabc"


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["the caller goes", "the turn is cancelled"])
async def test_a_turn_that_ends_while_its_beginning_is_written_never_reaches_the_engine(
    tmp_path: Path, ending: str
) -> None:
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await session.set_input(b"abc")
        async with anyio.create_task_group() as group, harness.journal._thread:
            group.start_soon(session.start_turn, TurnOptions())
            await anyio.wait_all_tasks_blocked()
            if ending == "the caller goes":
                group.cancel_scope.cancel()
            else:
                session.cancel_turn()
        harness.port.run()

        assert session.state == "failed"
        assert harness.port.bench.engine.statistics()["prompt"] == 0
        assert await answer(harness, session, b"again") == b"again"


@pytest.mark.asyncio
async def test_output_that_was_not_sent_is_refused_and_the_turn_can_still_be_resumed(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path).running() as harness:
        session = await interrupted(harness)
        for tokens, text in ((b"xbc", b"abc"), (b"abc", b"xbc")):
            with pytest.raises(InvalidArgument, match="differ from those that the turn sent"):
                await session.resume_turn(TurnOptions(), list(tokens), text)
        with pytest.raises(InvalidArgument, match="the tokens are"):
            await session.resume_turn(TurnOptions(), [97, 98, 99, -1], b"abc")
        assert await resumed(harness, session, b"abc", b"abc") == b"defghij"


# Any sequence of calls.

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("input"), st.text("abc", min_size=1, max_size=6)),
        st.tuples(st.just("text"), st.text("abc", min_size=1, max_size=6)),
        st.tuples(st.just("chat"), st.text("abc", min_size=1, max_size=6)),
        st.tuples(st.just("turn"), st.integers(1, 5)),
        st.tuples(st.just("unfinished"), st.integers(1, 3)),
        st.tuples(st.just("single"), st.integers(1, 3)),
        st.tuples(st.just("append"), st.booleans()),
        st.tuples(st.just("rewind"), st.integers(0, 9)),
        st.tuples(st.just("back"), st.integers(1, 2)),
        st.tuples(st.just("reset"), st.sampled_from([None, "be brief"])),
        st.tuples(st.just("sleep"), st.none()),
        st.tuples(st.just("resume"), st.integers(1, 4)),
    ),
    max_size=12,
)


async def do(harness: Kept, session: Session, call: str, value: Any) -> Session:
    """Do a call as a client would; one that is refused changes nothing."""
    match call:
        case "input":
            await session.set_input(value.encode())
        case "text":
            await session.add_text(value.encode())
        case "chat":
            await session.add_messages([{"role": "user", "content": value}])
        case "turn" | "unfinished" if session.conversation.prompt:
            credit = value if call == "unfinished" else -1
            turn = await session.start_turn(TurnOptions(options={"n-predict": 5}, credit=credit))
            harness.port.run()
            if turn.ended.is_set():
                await session.finish_turn(turn)
        case "single" if session.conversation.prompt:
            turn = await session.start_turn(TurnOptions(pull=True))
            harness.port.run()
            session.clear_output()
        case "append":
            session.set_options({"append": value})
        case "rewind":
            await session.rewind_history(None, value)
        case "back":
            await session.rewind_history(value, None)
        case "reset":
            session.reset_history(value)
        case "resume":
            turn = await session.resume_turn(TurnOptions(credit=value), [], b"")
            harness.port.run()
            if turn.ended.is_set():
                await session.finish_turn(turn)
        case "sleep":
            harness.manager.detach_session(session)
            session, _ = harness.manager.open_session(
                Opening(HERE, OWNER, harness.source, {}, "diary")
            )
    return session


@given(calls=CALLS)
@settings(max_examples=repetitions(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_calls_then_a_kill_give_the_same_session(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("journal")

    async def check() -> None:
        async with Kept(folder / "a").running() as harness:
            session = named(harness)
            for call, value in calls:
                try:
                    session = await do(harness, session, call, value)
                except InvalidArgument:
                    continue
                except Exception as exc:
                    assert type(exc).__name__ == "SessionBusy", exc
                    session.cancel_turn()
            session.recording.facts_changed()
            await session.wait_recorded()
            async with harness.killed(folder / "b") as other:
                back = await reopened(other)
                assert all_of(back) == all_of(session)
                assert end_of(back) == end_of(session)

    anyio.run(check)
    shutil.rmtree(folder)


def test_a_past_is_what_it_was() -> None:
    entry = HistoryEntry(tokens=pack_tokens([1, 2]), marks=[Mark(0, 0)], rendered="x", loose=True)
    assert decode_history(encode(entry)) == entry
