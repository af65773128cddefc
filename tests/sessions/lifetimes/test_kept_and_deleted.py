"""Kept sessions, deletions that can be undone, notes on deletions, and titles, without a daemon."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.backends.errors import Busy, InvalidArgument, QuotaExceeded, SessionBusy
from inferd.scheduler import Owner
from inferd.sessions import DormantLimits, Opening, Session
from inferd.sessions.identity import checked_title, first_words, matches, opening_of
from inferd.sessions.lifetimes.deletion import DeletionNotes
from inferd.sessions.turn.options import TurnOptions
from tests.sessions.doubles import Harness

pytestmark = pytest.mark.asyncio
HERE = object()
ADA, BOB = Owner(1000), Owner(1001)


def opened(harness: Harness, name: str, owner: Owner = ADA) -> Session:
    return harness.manager.open_session(Opening(HERE, owner, harness.source, {}, name))[0]


def dormant(harness: Harness, *names: str, owner: Owner = ADA) -> list[Session]:
    """Open sessions and make them dormant, one second after the other."""
    sessions = []
    for name in names:
        harness.now += 1
        sessions.append(opened(harness, name, owner))
        harness.manager.detach_session(sessions[-1])
    return sessions


def names(harness: Harness) -> list[str | None]:
    return [session.session_id for session in harness.manager.dormant]


async def test_kept_sessions_are_neither_past_the_bound_nor_too_old() -> None:
    harness = Harness(sessions_max=10)
    [kept] = dormant(harness, "kept")
    harness.manager.set_kept(kept, True)
    dormant(harness, "a", "b", "c")
    assert names(harness) == ["kept", "b", "c"], "two dormant sessions are allowed beside it"
    harness.now += 8 * 86_400
    harness.manager.delete_excess()
    assert names(harness) == ["kept"]
    harness.manager.set_kept(kept, False)
    assert names(harness) == ["kept"], "its age counts from this change on"
    harness.now += 8 * 86_400
    harness.manager.delete_excess()
    assert names(harness) == []


async def test_a_kept_session_counts_in_its_users_open_bytes() -> None:
    harness = Harness()
    [session] = dormant(harness, "kept")
    kept_bytes, size = harness.ledger.kept_bytes, session.kept_bytes
    before = kept_bytes.open_bytes(ADA.user)
    harness.manager.set_kept(session, True)
    assert kept_bytes.open_bytes(ADA.user) == before + size
    assert harness.manager.dormant.bytes == 0
    assert opened(harness, "kept") is session
    harness.manager.detach_session(session)
    assert kept_bytes.open_bytes(ADA.user) == before + session.kept_bytes
    harness.manager.set_kept(session, False)
    assert kept_bytes.open_bytes(ADA.user) == before
    assert harness.manager.dormant.bytes == session.kept_bytes


async def test_a_user_keeps_as_many_sessions_and_bytes_as_the_bounds_allow() -> None:
    harness = Harness(sessions_max=10)
    harness.ledger.bounds.kept_sessions_owner_max = 1
    one, two = dormant(harness, "one", "two")
    harness.manager.set_kept(one, True)
    with pytest.raises(QuotaExceeded) as caught:
        harness.manager.set_kept(two, True)
    assert caught.value.data == {
        "bound": "kept-sessions-user-max",
        "sessions": 1,
        "sessions_max": 1,
    }
    assert not two.settings.kept
    await harness.manager.delete_restorably(ADA, "one", 60)
    with pytest.raises(QuotaExceeded):
        harness.manager.set_kept(two, True)  # the deleted one can be restored
    await harness.manager.restore_deleted(ADA, "one")
    harness.ledger.bounds.kept_sessions_owner_max = 2
    harness.ledger.bounds.session_bytes_owner_max = one.kept_bytes + two.kept_bytes - 1
    with pytest.raises(QuotaExceeded):
        harness.manager.set_kept(two, True)


async def test_all_users_together_keep_no_more_than_the_machine_allows() -> None:
    harness = Harness(sessions_max=10)
    for owner in (ADA, BOB):
        [session] = dormant(harness, "mine", owner=owner)
        harness.manager.set_kept(session, True)
    [third] = dormant(harness, "more", owner=BOB)
    with pytest.raises(Busy, match="as many as this machine keeps"):
        harness.manager.set_kept(third, True)


async def test_a_kept_session_that_has_yielded_its_place_is_not_in_excess() -> None:
    harness = Harness(sessions_max=1)
    session = opened(harness, "kept")
    harness.manager.set_kept(session, True)
    harness.manager.live.yield_place(session)
    harness.manager.dormant.add_yielded(session)
    harness.manager.dormant.limits = DormantLimits(sessions_max=0, bytes_max=0)
    harness.manager.delete_excess()
    assert session in harness.manager.live and harness.manager.dormant.yielded == 1
    harness.manager.dormant.remove_session(session)
    harness.manager.live.restore_place(session)
    assert harness.ledger.kept_bytes.bytes_of(session) == session.kept_bytes


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_deleted_session_is_found_by_no_call_until_it_is_restored(is_open: bool) -> None:
    harness = Harness()
    manager = harness.manager
    session = opened(harness, "mine")
    if not is_open:
        manager.detach_session(session)
    assert await manager.delete_restorably(ADA, "mine", 60)
    assert manager.find_session(ADA, "mine") is None and names(harness) == []
    assert not await manager.delete_restorably(ADA, "mine", 60)
    with pytest.raises(SessionBusy, match="can still be restored"):
        opened(harness, "mine")
    with pytest.raises(SessionBusy):
        manager.fork_session(HERE, opened(harness, "other"), 1, ["mine"])
    assert await manager.restore_deleted(BOB, "mine") is None
    harness.now += 59
    assert await manager.restore_deleted(ADA, "mine") is session
    assert await manager.restore_deleted(ADA, "mine") is None
    assert opened(harness, "mine") is session


async def test_a_deleted_session_is_deleted_for_good_when_its_time_is_over() -> None:
    harness = Harness()
    dormant(harness, "mine")
    await harness.manager.delete_restorably(ADA, "mine", 60)
    assert harness.manager.dormant.expires_in_s(harness.now) == 60
    harness.now += 60
    harness.manager.delete_excess()
    assert await harness.manager.restore_deleted(ADA, "mine") is None
    await harness.manager.deletion.drain()
    assert harness.port.deleted == [(ADA, "id:mine")]
    assert harness.manager.deletions.of(ADA) == [], "its owner has asked for it"
    opened(harness, "mine")


async def test_a_deleted_session_is_deleted_for_good_by_a_second_call() -> None:
    harness = Harness()
    dormant(harness, "mine")
    await harness.manager.delete_restorably(ADA, "mine", 60)
    assert await harness.manager.delete_session_by_id(ADA, "mine")
    assert not await harness.manager.delete_session_by_id(ADA, "mine")
    assert harness.manager.dormant.bytes == 0


async def test_deleted_sessions_are_the_first_past_a_bound() -> None:
    harness = Harness(sessions_max=10)
    dormant(harness, "a", "b")
    await harness.manager.delete_restorably(ADA, "b", 60)
    dormant(harness, "c")
    assert names(harness) == ["a", "c"]
    assert await harness.manager.restore_deleted(ADA, "b") is None
    assert harness.manager.deletions.of(ADA) == []


async def test_a_session_that_vanishes_by_itself_leaves_a_note_with_the_reason() -> None:
    harness = Harness(sessions_max=10)
    [first, *_] = dormant(harness, "a", "b")
    first.set_title("My diary")
    dormant(harness, "c")
    [note] = harness.manager.deletions.of(ADA)
    assert (note.session_id, note.title, note.model) == ("a", "My diary", "echo")
    assert note.reason == "sessions" and note.at > 0
    harness.now += 8 * 86_400
    harness.manager.delete_excess()
    assert {n.session_id: n.reason for n in harness.manager.deletions.of(ADA)} == {
        "a": "sessions",
        "b": "age",
        "c": "age",
    }
    harness.manager.dormant.limits = DormantLimits(bytes_max=0)
    dormant(harness, "d")
    assert harness.manager.deletions.of(ADA)[0].reason == "memory"
    assert harness.manager.deletions.of(BOB) == []
    await harness.manager.deletions.clear(ADA)
    assert harness.manager.deletions.of(ADA) == []


async def test_notes_are_bounded_for_each_owner_and_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inferd.sessions.lifetimes.deletion.DELETION_NOTES_MAX", 2)
    monkeypatch.setattr("inferd.sessions.lifetimes.deletion.DELETION_OWNERS_MAX", 2)
    notes = DeletionNotes(None)
    for owner in (ADA, BOB, Owner(1002)):
        for name in "abc":
            notes.add(owner, name, title=name, model="m", reason="age")
    assert notes.of(ADA) == []
    assert [note.session_id for note in notes.of(BOB)] == ["c", "b"]


async def test_a_user_without_a_label_reads_and_clears_the_notes_of_all_labels() -> None:
    notes = DeletionNotes(None)
    notes.add(Owner(1000, "app"), "a", title="", model="m", reason="age")
    notes.add(ADA, "b", title="", model="m", reason="age")
    assert [note.session_id for note in notes.of(Owner(1000, "app"))] == ["a"]
    assert len(notes.of(ADA)) == 2
    await notes.clear(ADA)
    assert notes.of(Owner(1000, "app")) == []


async def test_a_title_is_set_or_the_first_words_of_the_first_message() -> None:
    harness = Harness()
    session = opened(harness, "mine")
    assert session.title == ""
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": " Why is\nthe sky   blue? "}
    await session.add_messages([system, question], {})
    assert session.title == session.opening == "Why is the sky blue?"
    session.set_title("Sky ")
    assert session.title == "Sky"
    harness.manager.detach_session(session)
    assert (session.title, session.opening) == ("Sky", "Why is the sky blue?")
    session.set_title("")
    assert session.title == "Why is the sky blue?"
    with pytest.raises(InvalidArgument):
        session.set_title("x" * 201)


async def test_parameters_are_set_and_removed_together_or_not_at_all() -> None:
    session = opened(Harness(), "mine")
    session.change_options({"temp": 0.5, "seed": 7}, [])
    session.change_options({"temp": 0.25}, ["seed"])
    assert session.settings.parameters.options == {"temp": 0.25}
    for values, unset in (({"temp": 500}, ["temp"]), ({"temp": 1}, ["no-such"])):
        with pytest.raises(InvalidArgument):
            session.change_options(values, unset)
        assert session.settings.parameters.options == {"temp": 0.25}


@pytest.mark.parametrize(
    ("content", "opening"),
    [
        ("a  b\tc", "a b c"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a b"),
        (None, ""),
        ([1, {"x": 2}], ""),
        ("x" * 10_000, "x" * 300),
        (" " * 100_000, ""),
    ],
)
async def test_the_opening_is_the_beginning_of_the_users_first_message(
    content: Any, opening: str
) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    assert opening_of(messages) == opening
    assert opening_of(messages[:1]) == opening_of([]) == ""


async def test_first_words_end_at_a_word_and_within_the_bound() -> None:
    assert first_words("short") == "short"
    long = first_words("word " * 30)
    assert len(long) <= 80 and long.endswith("word…")
    assert first_words("x" * 300) == "x" * 79 + "…"


async def test_a_search_finds_titles_and_first_messages_in_any_case() -> None:
    assert matches("SKY", "", "why is the sky blue")
    assert matches("straße", "STRASSE 7", "")
    assert not matches("sea", "sky", "blue")
    assert checked_title(" a\nb ") == "a b"


async def had_a_chat(harness: Harness, question: str) -> Session:
    """Return a session without an id whose chat has an answer."""
    session = harness.manager.open_session(Opening(HERE, ADA, harness.source, {}))[0]
    await session.add_messages([{"role": "user", "content": question}])
    await session.start_turn(TurnOptions())
    harness.port.run()
    return session


async def test_a_deleted_session_without_an_id_leaves_no_recent_chat() -> None:
    harness = Harness(sessions_max=10)
    manager = harness.manager
    await manager.close_session(await had_a_chat(harness, "one"))
    assert len(manager.recent) == 1, "later requests may continue it"

    await manager.delete_session(await had_a_chat(harness, "two"))
    assert len(manager.recent) == 1
    await manager.delete_session(await had_a_chat(harness, "one"))
    assert len(manager.recent) == 0


async def test_only_the_first_answer_of_a_chat_makes_it_a_recent_one() -> None:
    harness = Harness(sessions_max=10)
    session = await had_a_chat(harness, "one")
    await session.add_messages([{"role": "user", "content": "two"}])
    await session.start_turn(TurnOptions())
    harness.port.run()
    await harness.manager.close_session(session)
    raw = harness.manager.open_session(Opening(HERE, ADA, harness.source, {}))[0]
    await raw.add_text(b"text")
    await raw.start_turn(TurnOptions())
    harness.port.run()
    await harness.manager.close_session(raw)

    assert len(harness.manager.recent) == 0
