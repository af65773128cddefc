"""Full contexts: the parts of a history that are dropped, as pure decisions and on a chat."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import PromptTooLong
from inferd.backends.params import OverflowPolicy
from inferd.sessions.history import history as history_module
from inferd.sessions.history.history import History
from inferd.sessions.history.overflow import (
    ContextLimit,
    TokenCut,
    is_dropped,
    system_messages,
    turn_starts,
)
from inferd.sessions.worker_client import ChatTokens
from tests.sessions.history.test_history import (
    ChatClient,
    chatted,
    ended,
    ids,
    said,
    text_of,
    turn_on,
    user,
)

SHIFT, DROP, TRUNCATE, ERROR = (
    OverflowPolicy.SHIFT,
    OverflowPolicy.DROP_TURNS,
    OverflowPolicy.TRUNCATE,
    OverflowPolicy.ERROR,
)


def limit(policy: OverflowPolicy, ctx_size: int = 100, **fields: Any) -> ContextLimit:
    return ContextLimit(policy=policy, ctx_size=ctx_size, **fields)


@pytest.mark.parametrize(
    ("policy", "fields", "cut"),
    [
        (ERROR, {}, None),
        (SHIFT, {}, TokenCut(1, 49)),
        (SHIFT, {"n_keep": 20}, TokenCut(20, 45)),
        (SHIFT, {"n_discard": 60}, TokenCut(1, 60)),
        (SHIFT, {"n_discard": 500}, TokenCut(1, 118)),
        (SHIFT, {"n_keep": 99}, TokenCut(50, 45)),
        (SHIFT, {"n_keep": -1}, TokenCut(50, 45)),
        (TRUNCATE, {}, TokenCut(1, 45)),
        (TRUNCATE, {"n_predict": 5}, TokenCut(1, 25)),
        (TRUNCATE, {"n_predict": 0, "n_keep": 7}, TokenCut(7, 21)),
        (TRUNCATE, {"n_predict": 5000}, TokenCut(1, 45)),
    ],
)
def test_a_prompt_of_120_tokens_in_a_context_of_100(
    policy: OverflowPolicy, fields: dict[str, int], cut: TokenCut | None
) -> None:
    assert limit(policy, **fields).cut(120) == cut


@pytest.mark.parametrize("policy", [SHIFT, TRUNCATE, DROP])
def test_a_prompt_that_fits_stays_whole(policy: OverflowPolicy) -> None:
    assert limit(policy, n_predict=1).cut(99, [0, 40]) is None
    assert limit(SHIFT).cut(100) is not None


@pytest.mark.parametrize(
    ("starts", "cut"),
    [
        ([0, 30, 60, 90], TokenCut(1, 59)),
        ([0, 110], TokenCut(1, 109)),
        ([0], None),
        ([], None),
        ([0, 120], None),
    ],
)
def test_raw_text_loses_whole_turns(starts: list[int], cut: TokenCut | None) -> None:
    assert limit(DROP).cut(120, starts) == cut


@given(
    tokens=st.integers(1, 5000),
    ctx_size=st.integers(1, 600),
    n_keep=st.integers(-1, 700),
    n_discard=st.integers(0, 700),
    n_predict=st.integers(-1, 700),
    policy=st.sampled_from([SHIFT, TRUNCATE]),
)
def test_a_shortened_prompt_fits_and_keeps_both_ends(
    tokens: int, ctx_size: int, n_keep: int, n_discard: int, n_predict: int, policy: OverflowPolicy
) -> None:
    given_limit = limit(policy, ctx_size, n_keep=n_keep, n_discard=n_discard, n_predict=n_predict)
    cut = given_limit.cut(tokens)
    assert (cut is None) == (tokens < ctx_size)
    if cut is not None:
        assert 1 <= cut.keep <= max(1, ctx_size // 2)
        left = tokens - cut.discard
        assert cut.keep + cut.discard < max(tokens, 2), "the last token stays"
        assert left < ctx_size or ctx_size <= 2


@pytest.mark.parametrize(
    ("roles", "starts"),
    [
        ("uaua", [0, 2]),
        ("uatata", [0]),
        ("uatua", [0, 3]),
        ("auau", [1, 3]),
        ("uuaua", [0, 3]),
        ("uasua", [0, 2]),
        ("", []),
    ],
)
def test_a_turn_begins_with_a_users_message(roles: str, starts: list[int]) -> None:
    names = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    assert turn_starts([{"role": names[role]} for role in roles], 0) == starts


def test_system_messages_are_those_at_the_start() -> None:
    roles = ["system", "developer", "user", "system"]
    assert system_messages([{"role": role} for role in roles]) == 2
    assert system_messages([{"role": "system"}]) == 1
    assert system_messages([]) == 0


def test_each_dropped_turn_of_raw_text_is_counted() -> None:
    history, context, counts = History(), limit(DROP, 100, n_predict=10), []
    for _ in range(6):
        history.append_tokens(ids("x" * 28))
        fitted = history.fitted(context)
        counts.append(fitted.dropped.turns)
        history = fitted.after(turn_on(fitted, said("ab"), ended()))
    assert counts == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("n_keep", "starts"), [(0, [1, 31]), (40, [0, 40]), (-1, [0, 50])])
def test_raw_text_keeps_its_first_tokens(n_keep: int, starts: list[int]) -> None:
    history = History()
    for letter in "abcd":
        history.append_tokens(ids(letter * 28))
        history = history.after(turn_on(history, said("--"), ended()))
    fitted = history.fitted(limit(DROP, 100, n_predict=5, n_keep=n_keep))
    kept = max(1, min(n_keep, 50)) if n_keep >= 0 else 50
    assert fitted.prompt[:kept] == history.prompt[:kept]
    assert fitted.prompt[kept:] == history.prompt[-len(fitted.prompt) + kept :]
    assert len(fitted.prompt) <= 95


@pytest.mark.parametrize(
    ("n_keep", "reports"), [(0, False), (1, False), (50, False), (51, True), (-1, True)]
)
def test_fewer_kept_tokens_than_n_keep_are_reported(n_keep: int, reports: bool) -> None:
    assert bool(limit(TRUNCATE, n_keep=n_keep).kept_reason) == reports


class BoundedClient(ChatClient):
    """Refuses texts of more tokens than a context holds."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    async def chat_prompt(self, *values: Any, **keywords: Any) -> ChatTokens:
        found = await super().chat_prompt(*values, **keywords)
        if len(found.tokens) > self.most:
            raise PromptTooLong("too long", data={"prompt_tokens": len(found.tokens)})
        return found


def contents(messages: list[dict[str, Any]]) -> list[str]:
    return [x["content"] for x in messages]


async def long_chat(client: ChatClient, turns: int, context: ContextLimit) -> History:
    history = History("be brief")
    for number in range(turns):
        await history.add_messages(client, user(f"question {number}"), limit=context)
        history = history.after(turn_on(history, said(f"answer {number}"), ended()))
    return history


@pytest.mark.asyncio
@pytest.mark.parametrize("bounded", [False, True])
async def test_the_oldest_turns_are_dropped_behind_the_system_message(bounded: bool) -> None:
    context = limit(DROP, 150, n_predict=20)
    client = BoundedClient(150) if bounded else ChatClient()
    history = await long_chat(client, 4, context)
    assert not history.dropped_bytes
    before = len(history.prompt)

    await history.add_messages(client, user("question 4"), limit=context)

    assert history.dropped.turns == 2
    assert len(history.prompt) <= 130
    assert history.prompt == ids(text_of(history.read_messages))
    assert history.dropped.tokens == before + len("\n<u>question 4\n<a>") - len(history.prompt)
    assert history.dropped.tokens >= 37, "a quarter of the context"
    assert contents(history.read_messages)[:2] == ["be brief", "question 2"]
    assert contents(history.messages)[:4] == ["be brief", "question 0", "answer 0", "question 1"]
    assert [at for at, x in enumerate(history.messages) if is_dropped(x)] == [1, 2, 3, 4]
    assert "old turns were dropped" in history.recomputed.why
    assert history.copy().dropped.turns == 0, "counted for one input"


@pytest.mark.asyncio
async def test_the_kept_turns_can_be_rewound_to_their_tokens() -> None:
    context, client = limit(DROP, 150, n_predict=20), ChatClient()
    history = await long_chat(client, 4, context)
    await history.add_messages(client, user("question 4"), limit=context)
    assert history.dropped.turns == 2
    history = history.after(turn_on(history, said("answer 4"), ended()))
    kept = text_of(history.read_messages)
    assert [mark.exact for mark in history.marks] == [True, False, True, True, True]

    by_turns, by_tokens = history.copy(), history.copy()
    by_turns.rewind_turns(1)
    assert by_turns.prompt == ids(kept[: kept.index("\n<u>question 4")])
    by_tokens.rewind_tokens(kept.index("\n<u>question 4") + 5)
    assert contents(by_tokens.read_messages) == [
        *("be brief", "question 2", "answer 2", "question 3", "answer 3"),
    ]
    for one in (by_turns, by_tokens):
        await one.add_messages(client, user("again"), limit=context)
        assert contents(one.read_messages)[-1] == "again"
    assert by_turns.prompt == ids(text_of(by_turns.read_messages))


@pytest.mark.asyncio
async def test_a_chat_of_1000_turns_stays_within_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history_module, "DROPPED_BYTES_MAX", 20_000)
    context, client, drops = limit(DROP, 512), ChatClient(), 0
    history = History("be brief")
    for number in range(1000):
        await history.add_messages(client, user(f"question {number}"), limit=context)
        assert len(history.prompt) <= 384
        drops += bool(history.dropped.turns)
        history = History.from_entry(history.entry())
        history = history.after(turn_on(history, said(f"answer {number}"), ended()))
        assert contents(history.read_messages)[0] == "be brief"
    assert 100 < drops < 250, "a drop frees at least a quarter of the context"
    assert history.dropped_bytes <= 20_000
    assert history.messages[1]["role"] == "user", "whole turns are deleted"
    assert 40 < len(history.messages) < 400
    assert len(history.marks) < 200, "turns whose messages were deleted cannot be rewound"
    while history.marks:
        history.rewind_turns(1)
        await history.copy().add_messages(client, user("again"), limit=context)


@pytest.mark.asyncio
async def test_tool_results_stay_with_their_calls() -> None:
    client, context = ChatClient(), limit(DROP, 160, n_predict=20)
    history = History()
    for number in range(3):
        await history.add_messages(client, user(f"question {number}"), limit=context)
        history = history.after(turn_on(history, said("call"), ended()))
        result = [{"role": "tool", "content": f"result {number} " + "x" * 20}]
        await history.add_messages(client, result, limit=context)
        assert history.read_messages[0]["role"] == "user"
        roles = [x["role"] for x in history.read_messages]
        assert roles == ["user", "assistant", "tool", "assistant"] * (len(roles) // 4) + [
            "user",
            "assistant",
            "tool",
        ]
        history = history.after(turn_on(history, said("done"), ended()))
    assert any(map(is_dropped, history.messages))


@pytest.mark.asyncio
@pytest.mark.parametrize("explicit", [False, True])
async def test_messages_of_one_input_are_dropped_only_on_request(explicit: bool) -> None:
    """A client that sends its whole chat each time expects an error by default."""
    client, history = BoundedClient(100), History()
    chat = [
        {"role": role, "content": f"{role} {number} " + "x" * 10}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "be brief"}, *chat, *user("last")]
    context = limit(DROP, 100, n_predict=10, drops_input=explicit)
    if not explicit:
        with pytest.raises(PromptTooLong):
            await history.add_messages(client, messages, limit=context)
        assert not history.messages
        return
    await history.add_messages(client, messages, limit=context)
    assert len(history.prompt) <= 90
    assert contents(history.read_messages)[0] == "be brief"
    assert contents(history.read_messages)[-1] == "last"
    assert history.dropped.turns >= 4
    assert contents(history.messages) == contents(messages)


@pytest.mark.asyncio
async def test_an_input_that_alone_does_not_fit_is_refused() -> None:
    client, context = BoundedClient(100), limit(DROP, 100)
    history = await long_chat(client, 3, limit(DROP, 1000))
    with pytest.raises(PromptTooLong):
        await history.add_messages(client, user("x" * 200), limit=context)


@pytest.mark.asyncio
async def test_a_rewind_behind_the_dropped_turns_lets_the_model_read_them_again() -> None:
    context, client = limit(DROP, 150, n_predict=20), ChatClient()
    history = await long_chat(client, 5, context)
    assert any(map(is_dropped, history.messages))
    assert len(history.marks) == 5

    last = history.copy()
    last.rewind_turns(1)
    assert contents(last.read_messages) == [
        *("be brief", "question 2", "answer 2", "question 3", "answer 3"),
    ]
    await last.add_messages(client, user("other"), limit=context)
    assert last.prompt == ids(text_of(last.read_messages))

    history.rewind_turns(3)
    assert contents(history.messages) == [
        *("be brief", "question 0", "answer 0", "question 1", "answer 1"),
    ]
    assert not any(map(is_dropped, history.messages))
    await history.add_messages(client, user("other"), limit=context)
    assert history.prompt == ids(text_of(history.messages))


@pytest.mark.asyncio
async def test_a_rewind_after_the_template_has_changed_earlier_text_loses_nothing() -> None:
    class Forgetful(ChatClient):
        def template(self, messages: Any, rendering: Any) -> str:
            last = len(messages) - 1
            shown = [
                x | {"content": x["content"][: 99 if n > last - 2 else 3]}
                for n, x in enumerate(messages)
            ]
            return text_of(shown)

    client = Forgetful()
    history = await chatted(client, "answer 0", "answer 1", "answer 2")
    history.rewind_turns(1)
    await history.add_messages(client, user("again"))
    assert history.prompt == ids(client.template(history.messages, None))
    assert contents(history.messages) == ["q0", "answer 0", "q1", "answer 1", "again"]


@pytest.mark.asyncio
async def test_a_shift_before_a_turn_drops_tokens_and_marks_whole_turns() -> None:
    client, context = ChatClient(), limit(SHIFT, 45)
    history = await chatted(client, "one", "two", "three")
    await history.add_messages(client, user("q3"), limit=context)
    whole = history.prompt

    fitted = history.fitted(context)

    assert fitted is not history
    assert fitted.prompt == whole[:1] + whole[1 + fitted.dropped.tokens :]
    assert len(fitted.prompt) < 45
    assert contents(fitted.read_messages)[-1] == "q3"
    assert is_dropped(fitted.messages[0])
    assert history.prompt == whole, "a value"
    again = fitted.after(turn_on(fitted, said("four"), ended()))
    await again.add_messages(client, user("q4"), limit=context)
    assert again.prompt == fitted.prompt + ids("four\n<u>q4\n<a>")


@pytest.mark.asyncio
async def test_a_client_cannot_mark_messages_as_dropped() -> None:
    history = History()
    await history.add_messages(ChatClient(), [{**user("q0")[0], "dropped": True}])
    assert history.prompt == ids("<u>q0\n<a>")
    assert not history.dropped_bytes
