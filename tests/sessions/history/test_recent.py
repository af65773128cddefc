"""Chats of programs that send the whole conversation each time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferd.scheduler.messages import pack_tokens
from inferd.scheduler.owner import Owner
from inferd.sessions.entries import Replay, TurnPiece
from inferd.sessions.history.history import History
from inferd.sessions.history.recent import RecentChats
from tests.sessions.history.test_history import ChatClient, ids, user
from tests.sessions.history.test_tool_history import COMPACT, HERMES, WITH_TOOLS

pytestmark = pytest.mark.asyncio
OWNER, OTHER = Owner(1), Owner(2)
CHAT = user("q0")
ANSWER = {"role": "assistant", "content": "one"}
NEXT = user("q1")


def piece(text: str) -> TurnPiece:
    return TurnPiece(tokens=pack_tokens([*ids(text), 7]), text=text.encode())


async def noted(recent: RecentChats, owner: Owner = OWNER, question: str = "q0") -> History:
    history = History()
    await history.add_messages(ChatClient(), user(question))
    recent.add(owner, "f", user(question), history, piece("one"))
    return history


async def test_a_conversation_that_begins_with_a_chat_continues_from_its_tokens() -> None:
    recent = RecentChats()
    before = await noted(recent)

    found = recent.find(OWNER, "f", [*CHAT, ANSWER, *NEXT])

    assert found is not None
    history, known = found
    assert known == 2
    assert history.prompt == [*before.prompt, *ids("one"), 7], "the token 7 is not in the text"
    await history.add_messages(ChatClient(), NEXT)
    assert history.prompt[: len(before.prompt) + 4] == [*before.prompt, *ids("one"), 7]


@pytest.mark.parametrize(
    ("owner", "fingerprint", "messages"),
    [
        (OTHER, "f", [*CHAT, ANSWER, *NEXT]),
        (Owner(1, "program"), "f", [*CHAT, ANSWER, *NEXT]),
        (OWNER, "another model", [*CHAT, ANSWER, *NEXT]),
        (OWNER, "f", [*CHAT, {**ANSWER, "content": "two"}, *NEXT]),
        (OWNER, "f", [*CHAT, {**ANSWER, "reasoning_content": "two"}, *NEXT]),
        (OWNER, "f", [*CHAT, {**ANSWER, "thinking": "two"}, *NEXT]),
        (OWNER, "f", [*user("q"), ANSWER, *NEXT]),
        (OWNER, "f", [{"role": "system", "content": "be brief"}, *CHAT, ANSWER, *NEXT]),
        (OWNER, "f", [*CHAT, ANSWER]),
        (OWNER, "f", CHAT),
        (OWNER, "f", [ANSWER, *NEXT]),
    ],
)
async def test_other_conversations_do_not(
    owner: Owner, fingerprint: str, messages: list[dict[str, Any]]
) -> None:
    recent = RecentChats()
    await noted(recent)

    assert recent.find(owner, fingerprint, messages) is None


async def test_an_answer_may_be_trimmed_and_have_keys_without_a_value() -> None:
    recent = RecentChats()
    await noted(recent)
    sent: dict[str, Any] = {**ANSWER, "content": " one\n", "refusal": None, "annotations": []}

    assert recent.find(OWNER, "f", [*CHAT, sent, *NEXT]) is not None


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ({"content": "one", "reasoning_content": "why"}, True),
        ({"content": "<think>why</think>one"}, True),
        ({"content": "one"}, False),
        ({"content": "one", "reasoning_content": "other"}, False),
    ],
)
async def test_reasoning_may_be_apart_or_in_the_text(sent: dict[str, str], found: bool) -> None:
    recent, history = RecentChats(), History()
    await history.add_messages(ChatClient(), CHAT)
    recent.add(OWNER, "f", CHAT, history, piece("<think>why</think>one"))

    messages = [*CHAT, {"role": "assistant", **sent}, *NEXT]

    assert (recent.find(OWNER, "f", messages) is not None) is found


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, True),
        ({"arguments": '{ "a" : 1 }'}, True),
        ({"arguments": {"a": 1}}, True),
        ({"arguments": {"a": 1.0}}, False),
        ({"arguments": {"a": True}}, False),
        ({"arguments": {"a": {1: 2, "b": 3}}}, False),
        ({"name": "sub"}, False),
        ({"id": "other"}, False),
    ],
)
async def test_a_call_is_the_same_however_its_arguments_are_spaced(
    changed: dict[str, Any], found: bool
) -> None:
    recent, history = RecentChats(), History()
    await history.add_messages(ChatClient(), CHAT, WITH_TOOLS, HERMES)
    recent.add(OWNER, "f", CHAT, history, TurnPiece(text=COMPACT.encode()))
    answered = history.after(Replay(history.prompt, (TurnPiece(text=COMPACT.encode()),)))
    answer = answered.client_messages[-1]
    [call] = answer["tool_calls"]
    function: dict[str, Any] = {"name": "add", "arguments": json.dumps({"a": 1}), **changed}
    sent: dict[str, Any] = {
        "id": function.pop("id", call["id"]),
        "type": "function",
        "function": function,
    }
    result = {"role": "tool", "tool_call_id": sent["id"], "content": "2"}

    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [sent]}, result]

    assert (recent.find(OWNER, "f", messages) is not None) is found


async def test_past_a_bound_the_largest_owner_loses_its_oldest_chat() -> None:
    recent = RecentChats(chats_max=3)
    await noted(recent, OTHER)
    for question in ("q0", "q1", "q2"):
        await noted(recent, OWNER, question)

    def known(owner: Owner, question: str) -> bool:
        return recent.find(owner, "f", [*user(question), ANSWER, *NEXT]) is not None

    assert len(recent) == 3
    assert known(OTHER, "q0") and known(OWNER, "q1") and known(OWNER, "q2")
    assert not known(OWNER, "q0")


async def test_many_small_chats_displace_no_chat_of_a_user_with_fewer() -> None:
    recent = RecentChats(chats_max=3)
    await noted(recent, OTHER, "q" * 10_000)
    for number in range(5):
        await noted(recent, Owner(1, f"label{number}"))

    assert recent.find(OTHER, "f", [*user("q" * 10_000), ANSWER, *NEXT]) is not None
    assert len(recent) == 3


async def test_a_deleted_chat_is_deleted_with_those_that_it_has_continued() -> None:
    recent = RecentChats()
    await noted(recent)
    await noted(recent, OTHER)
    await noted(recent, OWNER, "q1")

    recent.delete(OWNER, [*CHAT, ANSWER, *NEXT])

    assert recent.find(OWNER, "f", [*CHAT, ANSWER, *NEXT]) is None
    assert recent.find(OTHER, "f", [*CHAT, ANSWER, *NEXT]) is not None
    assert recent.find(OWNER, "f", [*user("q1"), ANSWER, *NEXT]) is not None
    recent.delete(OTHER, ())
    assert len(recent) == 2


async def test_the_memory_of_chats_is_bounded() -> None:
    one = RecentChats()
    await noted(one)
    recent = RecentChats(bytes_max=2 * one.bytes)
    for number in range(5):
        await noted(recent, OWNER, f"q{number}")

    assert len(recent) == 2 and recent.bytes <= 2 * one.bytes
    await noted(recent, OWNER, "q4")
    assert len(recent) == 2, "the same chat replaces itself"


async def test_nothing_is_kept_without_room() -> None:
    recent = RecentChats(chats_max=0)
    await noted(recent)

    assert len(recent) == recent.bytes == 0
