"""Ids of events, and the answer of a turn that several readers follow, without a daemon."""

from __future__ import annotations

import anyio
import pytest

from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.gateways.http.turns import EventId, LiveTurn, live
from inferd.ipc.client import Piece, ToolCallPart

TEXTS = ["Über ", "allen ", "Gipfeln"]


def turn_of(*texts: str) -> LiveTurn:
    turn = LiveTurn()
    turn.begin(3, "m")
    for text in texts:
        turn.add_piece(Piece(text))
    return turn


def test_an_id_is_read_as_it_was_written() -> None:
    for each in (
        EventId(1),
        EventId(7).after("ü".encode(), b"why", 2),
        EventId(2**31).after(b"x" * 100)._replace(ended=True),
    ):
        assert EventId.parse(str(each)) == each


def test_the_rest_after_each_piece_is_the_remaining_text() -> None:
    turn, place, read = turn_of(*TEXTS), EventId(3), ""
    assert turn.rest_after(EventId(3)).text == "".join(TEXTS)  # type: ignore[union-attr]
    for text in TEXTS:
        place = place.after(text.encode())
        read += text
        rest = turn.rest_after(place)
        assert read + (rest.text if rest else "") == "".join(TEXTS)


def test_parts_arrive_once_each() -> None:
    turn = turn_of()
    place, read = EventId(3), []
    for text in TEXTS:
        turn.add_piece(Piece(text, reasoning="r"))
        rest = turn.rest_after(place)
        assert rest is not None
        place = rest.id
        read.append((rest.text, rest.reasoning))
        assert turn.rest_after(place) is None
    assert read == [(text, "r") for text in TEXTS]


def test_a_tool_call_is_part_of_the_rest_until_it_was_read() -> None:
    turn, place = turn_of("a"), EventId(3).after(b"a")
    turn.add_piece(Piece("", tool_calls=[ToolCallPart(index=0, id="i", name="f", arguments="{")]))
    turn.add_piece(Piece("", tool_calls=[ToolCallPart(index=0, arguments="}")]))
    turn.add_piece(Piece("", tool_calls=[ToolCallPart(index=1, id="j", name="g")]))
    rest = turn.rest_after(place)
    assert rest is not None and [(c.name, c.arguments) for c in rest.calls] == [("f", "{}")]
    assert turn.rest_after(rest.id) is None


def test_a_reader_with_more_than_the_answer_waits_and_is_refused_at_its_end() -> None:
    turn = turn_of("Über ")
    place = EventId(3).after("Über allen ".encode())
    assert turn.rest_after(place) is None
    turn.add_piece(Piece("allen Gipfeln"))
    rest = turn.rest_after(place)
    assert rest is not None and rest.text == "Gipfeln"


@pytest.mark.parametrize(
    "place",
    [
        EventId(4),
        EventId(3).after(b"Unter"),
        EventId(3)._replace(text=1),
        EventId(3, text=1, text_crc=EventId(3).after("Ü".encode()[:1]).text_crc),
        EventId(3).after("Über ".encode(), b"thought")._replace(reasoning=0),
    ],
)
def test_a_place_of_another_turn_or_answer_is_refused(place: EventId) -> None:
    with pytest.raises(InvalidArgument):
        turn_of(*TEXTS).rest_after(place)


def test_an_answer_past_the_bound_is_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ANSWER_BYTES_MAX", 10)
    turn = turn_of("x" * 10)
    assert turn.rest_after(EventId(3)) is not None
    turn.add_piece(Piece("y"))
    assert not turn._text
    with pytest.raises(TooLarge):
        turn.rest_after(EventId(3))


@pytest.mark.anyio
async def test_a_turn_waits_for_the_reader_who_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LAG_BYTES_MAX", 4)
    turn = turn_of("1234")
    await turn.wait_for_readers()
    turn.add_piece(Piece("5"))
    async with anyio.create_task_group() as group:
        done = anyio.Event()

        async def wait() -> None:
            await turn.wait_for_readers()
            done.set()

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not done.is_set()
        turn.note_read(EventId(3).after(b"1"))
        await done.wait()
