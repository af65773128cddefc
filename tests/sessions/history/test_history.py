"""A conversation's past: marks of turns, going back, what a context shift leaves of a chat."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import pytest

from inferd.backends import Rendering, SamplingParams
from inferd.backends.base import PLAIN_RENDERING
from inferd.backends.errors import InvalidArgument
from inferd.backends.media import MarkedMedia
from inferd.scheduler import messages as m
from inferd.scheduler.engine.tokenizing import ChatText, render_chat
from inferd.scheduler.owner import Owner
from inferd.sessions.entries import Mark
from inferd.sessions.history.history import MARKS_MAX, History
from inferd.sessions.memory import memory_bytes
from inferd.sessions.turn.turn import Turn
from inferd.sessions.worker_client import ChatTokens
from tests.scheduler.doubles import Bench
from tests.sessions.doubles import InProcessClient, spliced

pytestmark = pytest.mark.asyncio


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(f"<{x['role'][0]}>{x['content']}\n" for x in messages) + "<a>"


class ChatClient(InProcessClient):
    """Renders by a template in which what was said stays; a token is a character's number."""

    def __init__(self) -> None:
        super().__init__(Bench())
        self.rendered: list[str] = []

    async def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        said: str = "",
        answer: str = "",
        rendering: Rendering = PLAIN_RENDERING,
        *,
        turn: bool = False,
        answer_at: int = -1,
        forms: Sequence[dict[str, Any]] = (),
        cut_behind: int = -1,
        media: Sequence[MarkedMedia] = (),
    ) -> ChatTokens:
        request = m.ChatPrompt(
            0, list(messages), said, answer, rendering, answer_at=answer_at, forms=list(forms)
        )
        chat = render_chat(request, lambda *values: values)
        send: Callable[[], Any] = partial(next, chat)
        while True:
            try:
                values = send()
            except StopIteration as ended:
                found: ChatText = ended.value
                break
            send = self._result(chat, values)
        rest = found.appended
        tokens = spliced(found.text if rest is None else rest, media, ids)
        return ChatTokens(found.text, tokens, rest is not None, found.form)

    def _result(self, chat: Generator[Any, Any, ChatText], values: Any) -> Callable[[], Any]:
        try:
            text = self.template(*values)
        except InvalidArgument as exc:
            return partial(chat.throw, exc)
        self.rendered.append(text)
        return partial(chat.send, text)

    def template(self, messages: Sequence[dict[str, Any]], rendering: Rendering) -> str:
        return text_of(messages)


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def turn_on(history: History, *reports: m.Report) -> Turn:
    """Return an ended turn on the history with this output."""
    client = InProcessClient(Bench())
    spec = m.TaskSpec(
        id=1, owner=Owner(1), tokens=m.pack_tokens(history.prompt), sampling=SamplingParams()
    )
    turn = Turn(client, spec, lambda _: None)
    for report in reports:
        turn.report(report)
    return turn


def said(text: str) -> m.Tokens:
    return m.Tokens(1, ids(text), text.encode())


def ended(reason: str = "eos") -> m.Finished:
    return m.Finished(1, b"", b"", m.TurnStats(stop_reason=reason))


async def chatted(client: ChatClient, *answers: str) -> History:
    """Return a chat of turns `q0`, `q1`, … with these answers."""
    history = History()
    for number, answer in enumerate(answers):
        await history.add_messages(client, user(f"q{number}"))
        history = history.after(turn_on(history, said(answer), ended()))
    return history


async def test_a_chat_is_only_ever_added_to() -> None:
    client = ChatClient()
    history = await chatted(client, "one", "two")

    assert history.prompt == ids("<u>q0\n<a>one\n<u>q1\n<a>two")
    assert [x["content"] for x in history.messages] == ["q0", "one", "q1", "two"]
    assert history.marks == [Mark(0, 0), Mark(len("<u>q0\n<a>one"), 2)]


async def test_the_memory_of_messages_is_counted_when_they_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked: list[Any] = []

    def count(*values: Any) -> int:
        walked.extend(v for v in values if isinstance(v, dict) and "role" in v)
        return memory_bytes(*values)

    monkeypatch.setattr("inferd.sessions.history.history.memory_bytes", count)
    client, history = ChatClient(), History("be brief")
    for number in range(5):
        await history.add_messages(client, user(f"question {number}"))
        history = history.after(turn_on(history, said("yes"), ended()))
        assert history.kept_bytes > history.messages_bytes == memory_bytes(*history.messages)
    assert len(walked) == len(history.messages) == 11
    history.rewind_turns(3)
    assert history.messages_bytes == memory_bytes(*history.messages)
    restored = History.from_entry(history.entry())
    assert restored.kept_bytes == history.kept_bytes


async def test_going_back_a_turn_leaves_the_chat_as_it_was_before_it() -> None:
    client = ChatClient()
    history = await chatted(client, "one", "two")

    history.rewind_turns(1)

    assert history.prompt == ids("<u>q0\n<a>one")
    assert [x["content"] for x in history.messages] == ["q0", "one"]
    await history.add_messages(client, user("other"))
    assert history.prompt == ids("<u>q0\n<a>one\n<u>other\n<a>")


async def test_going_back_all_turns_leaves_the_system_prompt() -> None:
    history = History("be brief")
    await history.add_messages(ChatClient(), user("q"))
    history = history.after(turn_on(history, said("a"), ended()))

    history.rewind_turns(1)

    assert history.prompt == []
    assert history.messages == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize("turns", [0, -1, 3])
async def test_there_is_no_way_back_past_the_first_turn(turns: int) -> None:
    history = await chatted(ChatClient(), "one", "two")

    with pytest.raises(InvalidArgument) as caught:
        history.rewind_turns(turns)

    assert caught.value.data == {"turns": 2}


async def test_keeping_tokens_cuts_anywhere_and_the_chat_goes_on_after_its_whole_turns() -> None:
    client = ChatClient()
    history = await chatted(client, "one", "two")

    history.rewind_tokens(len("<u>q0\n<a>one\n<u>q1\n<a>t"))
    await history.add_messages(client, user("x"))

    assert history.prompt == ids("<u>q0\n<a>one\n<u>q1\n<a>t\n<u>x\n<a>")
    assert [x["content"] for x in history.messages] == ["q0", "one", "x"]


@pytest.mark.parametrize("tokens", [-1, 4])
async def test_more_tokens_than_there_are_cannot_be_kept(tokens: int) -> None:
    history = History()
    history.replace_tokens([1, 2, 3])

    with pytest.raises(InvalidArgument):
        history.rewind_tokens(tokens)

    history.rewind_tokens(3)
    assert history.prompt == [1, 2, 3]


async def test_inputs_before_one_turn_are_one_turn() -> None:
    history = History()
    history.replace_tokens([1])
    history.append_tokens([2])
    history = history.after(turn_on(history, m.Tokens(1, [3], b"c"), ended()))
    history.append_tokens([4])
    history.append_tokens([5])

    history.rewind_turns(1)

    assert history.prompt == [1, 2, 3]


async def test_a_value_that_was_taken_on_does_not_change_the_old_one() -> None:
    history = await chatted(ChatClient(), "one")
    branch = history.after(None)

    branch.append_tokens([7])
    branch.rewind_turns(2)

    assert history.prompt == ids("<u>q0\n<a>one")
    assert len(history.marks) == 1


@pytest.mark.parametrize("reason", ["stop", "pattern", "complete", "indent"])
async def test_an_answer_from_which_text_was_cut_is_tokenised_anew(reason: str) -> None:
    client = ChatClient()
    history = History()
    await history.add_messages(client, user("q"))
    turn = turn_on(history, m.Tokens(1, ids("yes."), b"yes"), ended(reason))
    history = history.after(turn)

    await history.add_messages(client, user("r"))

    assert history.prompt == ids("<u>q\n<a>yes\n<u>r\n<a>")
    assert history.marks[1].tokens == len("<u>q\n<a>yes"), "as far as both agree"


async def test_marks_are_bounded_and_the_oldest_go() -> None:
    history = History()
    for _ in range(MARKS_MAX + 5):
        history.append_tokens([1])
        history = history.after(turn_on(history, ended()))

    assert len(history.marks) == MARKS_MAX
    assert len(history.prompt) == MARKS_MAX + 5


async def test_a_shift_drops_tokens_and_later_ones_follow() -> None:
    history = History()
    history.replace_tokens(list(range(10)))
    turn = turn_on(
        history,
        m.Tokens(1, [10, 11], b"xy"),
        m.Shifted(1, keep=2, discard=4),
        m.Tokens(1, [12], b"z"),
        m.Shifted(1, keep=2, discard=1),
        ended(),
    )

    assert turn.history() == [0, 1, 7, 8, 9, 10, 11, 12]
    assert turn.history_size == 8
    assert turn.tokens == [10, 11, 12], "the answer is still whole"
    assert history.after(turn).prompt == turn.history()
    assert history.after(turn).shifted
    assert not history.shifted


async def test_after_a_shift_a_chat_is_added_to_what_is_left_of_it() -> None:
    """The model no longer reads the turns that were dropped whole; one that was cut stays."""
    client = ChatClient()
    history = await chatted(client, "one", "two")
    await history.add_messages(client, user("q2"))
    first = len("<u>q0\n<a>one")
    turn = turn_on(history, said("th"), m.Shifted(1, 0, first + 3), said("ree"), ended())

    history = history.after(turn)
    assert [x["content"] for x in history.read_messages] == ["q1", "two", "q2", "three"]
    assert [x.get("dropped", False) for x in history.messages] == [True] * 2 + [False] * 4
    await history.add_messages(client, user("q3"))

    left = "<u>q0\n<a>one\n<u>q1\n<a>two\n<u>q2\n<a>three"[first + 3 :]
    assert history.prompt == ids(left + "\n<u>q3\n<a>")
    assert client.rendered[-1] == text_of(history.read_messages)
    history = history.after(turn_on(history, said("four"), ended()))
    history.rewind_turns(1)
    assert history.prompt == ids(left)
    history.rewind_turns(1)
    assert [x["content"] for x in history.read_messages] == ["q1", "two"]


async def test_the_system_prompt_stays_in_the_messages_of_a_shifted_chat() -> None:
    client = ChatClient()
    history = History("be brief")
    for number in range(3):
        await history.add_messages(client, user(f"q{number}"))
        reports = [m.Shifted(1, 4, 20)] if number == 2 else []
        history = history.after(turn_on(history, said("a"), *reports, ended()))

    assert history.messages[0] == {"role": "system", "content": "be brief"}
    length = len(history.prompt)
    await history.add_messages(client, user("next"))
    assert history.prompt[length:] == ids("\n<u>next\n<a>")
