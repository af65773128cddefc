"""Branches, rewinds, deletion, and what is kept of a session that goes to sleep."""

from __future__ import annotations

import anyio
import pytest

from inferd.backends.errors import Busy, InvalidArgument, SessionBusy
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority
from inferd.sessions import Session, TurnOptions
from inferd.sessions.manager import BRANCHES_MAX
from inferd.sessions.table import SessionState
from tests.sessions.conversation.test_sessions import HERE, THERE, answer, opened
from tests.sessions.doubles import Harness

pytestmark = pytest.mark.asyncio


def text_of(session: Session) -> bytes:
    return bytes(t for t in session.conversation.tokens() if t < 256)


async def test_branches_go_on_from_one_state_each_on_its_own() -> None:
    harness = Harness(sessions_max=10)
    trunk = opened(harness)
    trunk.set_options({"append": True, "n-predict": 3})
    trunk.settings.priority = Priority.HIGH
    await answer(harness, trunk, b"hello")

    one, two = harness.manager.fork_session(HERE, trunk, 2)

    assert one.conversation.tokens() == two.conversation.tokens() == trunk.conversation.tokens()
    assert (one.settings.priority, one.state) == (2, SessionState.READY)
    assert await answer(harness, one, b"other") == b"oth"
    assert await answer(harness, two, b"third") == b"thi"
    assert text_of(one) == b"hellohelotheroth"
    assert text_of(trunk) == b"hellohel"
    one.set_options({"n-predict": 1})
    assert two.settings.parameters.options["n-predict"] == 3
    assert len({one.handle, two.handle, trunk.handle}) == 3
    assert len({one.name, two.name, trunk.name}) == 3


async def test_a_branch_of_an_empty_session_keeps_its_system_prompt() -> None:
    harness = Harness()
    trunk = opened(harness)
    trunk.reset_history("be brief")

    [branch] = harness.manager.fork_session(HERE, trunk, 1)

    assert branch.state is SessionState.EMPTY
    assert branch.conversation.messages == [{"role": "system", "content": "be brief"}]


async def test_branches_may_have_ids_which_are_free_and_different() -> None:
    harness = Harness(sessions_max=10)
    trunk = opened(harness, session_id="trunk")
    opened(harness, session_id="asleep")
    harness.manager.detach_session(opened(harness, session_id="asleep"))

    branches = harness.manager.fork_session(HERE, trunk, 2, ["a", "b"])

    assert [b.name for b in branches] == ["id:a", "id:b"]
    assert opened(harness, session_id="b") is branches[1]
    for taken in (["c", "trunk"], ["c", "asleep"], ["a", "c"]):
        with pytest.raises(SessionBusy):
            harness.manager.fork_session(HERE, trunk, 2, taken)
    for wrong in (["c"], ["c", "c"], ["c", "d", "d"], ["c", ""], ["c", "x" * 129]):
        with pytest.raises(InvalidArgument):
            harness.manager.fork_session(HERE, trunk, 2, wrong)
    assert len(harness.manager.live) == 3


@pytest.mark.parametrize("count", [0, -1, BRANCHES_MAX + 1])
async def test_branches_are_bounded(count: int) -> None:
    harness = Harness(sessions_max=100)

    with pytest.raises(InvalidArgument):
        harness.manager.fork_session(HERE, opened(harness), count)


async def test_the_cap_takes_all_branches_or_none() -> None:
    harness = Harness(sessions_max=4)
    trunk = opened(harness)

    with pytest.raises(Busy):
        harness.manager.fork_session(HERE, trunk, 4)
    assert len(harness.manager.live) == 1
    harness.manager.fork_session(HERE, trunk, 3)
    assert len(harness.manager.live) == 4


async def test_nothing_branches_off_or_goes_back_during_a_turn() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    await session.start_turn(TurnOptions())

    with pytest.raises(SessionBusy):
        harness.manager.fork_session(HERE, session, 1)
    with pytest.raises(SessionBusy):
        await session.rewind_history(1, None)


async def test_going_back_by_turns_and_by_tokens() -> None:
    harness = Harness()
    session = opened(harness)
    session.set_options({"append": True})
    await answer(harness, session, b"one")
    await answer(harness, session, b"two")

    await session.rewind_history(1, None)
    assert (text_of(session), session.state) == (b"oneone", SessionState.READY)
    await session.rewind_history(None, 3)
    assert session.conversation.tokens() == [258, ord("o"), ord("n")]
    await session.rewind_history(None, 0)
    assert (session.conversation.tokens(), session.state) == ([], SessionState.EMPTY)
    assert await answer(harness, session, b"anew") == b"anew"


async def test_what_need_not_be_computed_again_is_asked_of_a_loaded_model_only() -> None:
    harness = Harness()
    session = opened(harness)
    await answer(harness, session, b"hello")
    harness.port.held = 5

    assert await session.count_cached_tokens() == 5
    harness.source.loaded = None
    assert await session.count_cached_tokens() == 0


async def test_every_turn_names_its_session_and_says_whether_it_may_be_written_down() -> None:
    harness = Harness(sessions_max=10)
    specs: list[m.TaskSpec] = []
    for session in (
        opened(harness),
        opened(harness, session_id="a"),
        opened(harness, session_id="b"),
    ):
        session.settings.persist = session.session_id != "b"
        await session.set_input(b"x")
        specs.append((await session.start_turn(TurnOptions())).spec)

    assert [s.session for s in specs] == ["#1", "id:a", "id:b"]
    assert [s.persist for s in specs] == [False, True, False]


async def test_the_parameters_of_a_context_shift_reach_the_engine() -> None:
    session = opened(Harness())
    session.set_options({"ctx-shift": True, "n-keep": 8, "n-discard": 16, "cache-reuse": 32})
    await session.set_input(b"x")

    spec = (await session.start_turn(TurnOptions())).spec

    assert (spec.ctx_shift, spec.n_keep, spec.n_discard, spec.cache_reuse) == (True, 8, 16, 32)


async def test_a_shift_shortens_the_history_and_the_metadata_says_so() -> None:
    harness = Harness()
    session = opened(harness)
    session.set_options({"append": True})
    await session.set_input(b"abcdef")
    turn = await session.start_turn(TurnOptions())
    turn.report(m.Tokens(turn.spec.id, [ord("x")], b"x"))
    turn.report(m.Shifted(turn.spec.id, 1, 4))
    stats = m.TurnStats(stop_reason="length", shifts=1, shifted=True)
    turn.report(m.Finished(turn.spec.id, b"", b"", stats))

    assert text_of(session) == b"efx"
    assert session.read_output(0) == b"x"
    assert (session.metadata().shifts, session.metadata().shifted) == (
        1,
        True,
    )
    await session.set_input(b"more")
    assert bytes(t for t in session.conversation.prompt if t < 256) == b"efxmore"


async def test_closing_a_session_with_an_id_deletes_it_before_it_returns() -> None:
    harness = Harness()
    files: list[tuple[Owner, str]] = []

    async def delete(owner: Owner, name: str) -> None:
        assert harness.port.deleted, "first the worker, which may be writing"
        files.append((owner, name))

    harness.manager.deletion.delete_files = delete

    await harness.manager.close_session(opened(harness, session_id="mine"))

    assert harness.port.deleted == files == [(Owner(1000), "id:mine")]


async def test_what_others_with_the_same_tokens_use_too_stays() -> None:
    """States of sessions without an id are found by their tokens, as long as they say them."""
    harness = Harness()
    session, shifted = opened(harness), opened(harness)
    await shifted.set_input(b"hello")
    turn = await shifted.start_turn(TurnOptions())
    turn.report(m.Shifted(turn.spec.id, 0, 2))

    await harness.manager.close_session(session)
    harness.manager.close_connection(HERE)
    await harness.manager.deletion.drain()

    assert harness.port.deleted == [(Owner(1000), shifted.name)]


async def test_delete_finds_a_session_wherever_it_is() -> None:
    harness = Harness()
    opened(harness, THERE, session_id="open")
    harness.manager.detach_session(opened(harness, session_id="asleep"))
    nameless = opened(harness)

    assert await harness.manager.delete_session_by_id(Owner(1000), "open")
    assert await harness.manager.delete_session_by_id(Owner(1000), "asleep")
    await harness.manager.delete_session(nameless)
    assert not await harness.manager.delete_session_by_id(Owner(1000), "open")
    assert not await harness.manager.delete_session_by_id(Owner(1001), "asleep")

    assert harness.port.deleted == [
        (Owner(1000), "id:open"),
        (Owner(1000), "id:asleep"),
        (Owner(1000), nameless.name),
    ]
    assert (len(harness.manager.live), len(harness.manager.dormant)) == (0, 0)


async def test_an_id_cannot_be_opened_while_it_is_being_deleted() -> None:
    harness = Harness()
    gate = anyio.Event()

    async def slow(owner: Owner, name: str) -> None:
        await gate.wait()

    harness.manager.deletion.delete_files = slow
    session = opened(harness, session_id="mine")
    async with anyio.create_task_group() as group:
        group.start_soon(harness.manager.close_session, session)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(SessionBusy):
            opened(harness, session_id="mine")
        gate.set()

    assert opened(harness, session_id="mine") is not session


async def test_a_caller_that_is_cancelled_leaves_the_deletion_to_the_timer() -> None:
    harness = Harness()
    session = opened(harness, session_id="mine")

    with anyio.move_on_after(0):
        await harness.manager.close_session(session)
    assert harness.port.deleted == []
    with anyio.move_on_after(0.05):
        await harness.manager.expire_idle()

    assert harness.port.deleted == [(Owner(1000), "id:mine")]


async def test_a_session_that_goes_to_sleep_is_written_down_if_it_may_be() -> None:
    harness = Harness(sessions_max=10)
    for name in ("kept", "not"):
        session = opened(harness, session_id=name)
        session.settings.persist = name == "kept"
        await answer(harness, session, b"hi")
    nothing_said = opened(harness, session_id="empty")
    assert nothing_said.settings.persist

    harness.manager.close_connection(HERE)

    assert [(owner, name) for owner, name, _ in harness.port.kept] == [(Owner(1000), "id:kept")]
    assert bytes(t for t in harness.port.kept[0][2] if t < 256) == b"hihi"


async def test_a_place_in_the_queue_is_reported_when_it_changes() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"x")
    sent: list[m.Position | m.PromptLogprobs | m.PromptProgress] = []
    turn = await session.start_turn(TurnOptions(watch=True), on_progress=sent.append)

    for position in (3, 3, 2, 2, 1):
        turn.report(m.Position(turn.spec.id, position, 4, 1.5))

    assert turn.spec.watch and not turn.spec.watch_prompt
    assert [p.position for p in sent if isinstance(p, m.Position)] == [3, 2, 1]


async def test_a_place_in_the_queue_is_reported_again_once_the_start_can_be_estimated() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"x")
    sent: list[m.Position | m.PromptLogprobs | m.PromptProgress] = []
    turn = await session.start_turn(TurnOptions(watch=True), on_progress=sent.append)

    for starts_in_s in (None, None, 1.5, 1.2, None):
        turn.report(m.Position(turn.spec.id, 40, 60, starts_in_s))

    assert [p.starts_in_s for p in sent if isinstance(p, m.Position)] == [None, 1.5]


async def test_the_progress_of_a_prompt_is_reported_when_it_has_grown() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"x")
    sent: list[m.Position | m.PromptLogprobs | m.PromptProgress] = []
    options = TurnOptions(watch_prompt=True)
    turn = await session.start_turn(options, on_progress=sent.append)

    for processed in (0, 4, 2, 4, 7):  # less than before, after a loss of its KV state
        turn.report(m.PromptProgress(turn.spec.id, 7, 0, processed, 1.5))

    assert turn.spec.watch_prompt
    assert [p.processed for p in sent if isinstance(p, m.PromptProgress)] == [0, 4, 7]
