"""Bounds on reasoning over a real socket: parameters, requests to end it, losses of the worker.

The echo model has a token for each byte, and skips as much of its prompt as is forced.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import inferd
from inferd.backends.errors import InvalidArgument, PermissionDenied
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.access.test_operators import bobs
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

END = "</think>"
THOUGHT = "<think>0123456789abcdefgh</think>The answer is long enough."
SPLIT = {"reasoning-format": "deepseek"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\\n"
OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CONFIG = f"""
[defaults]
ctx-size = 512
threads = 1
[models.low]
backend = "echo"
reasoning-efforts = {{ low = 2 }}
[models.thinks]
file = "tiny-llama.gguf"
chat-template = "{TEMPLATE}"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny("llama", folder)
    with running_daemon(CONFIG, models_dir=folder) as daemon:
        yield daemon


def split_at(size: int, end: str = END) -> tuple[str, str]:
    """Return the reasoning and the text of the answer to `THOUGHT` with a thought of *size*."""
    at = len("<think>") + size
    return THOUGHT[7:at] + end.removesuffix(END), THOUGHT[at + len(end) :]


@pytest.mark.parametrize(
    ("model", "options", "size"),
    [
        ("echo", {"reasoning-budget": 0}, 0),
        ("echo", {"reasoning_budget_tokens": 1}, 1),
        ("echo", {"thinking_budget_tokens": 5}, 5),
        ("echo", {"reasoning-effort": "none"}, 0),
        ("low", {"reasoning-effort": "low"}, 2),
        ("low", {"reasoning-effort": "low", "reasoning-budget": 1}, 1),
    ],
)
def test_a_thought_has_its_budget(
    client: inferd.Client, model: str, options: dict[str, Any], size: int
) -> None:
    reply = client.chat(model, THOUGHT, options=SPLIT | options)
    assert (reply.reasoning, str(reply)) == split_at(size)
    assert reply.metadata["reasoning_tokens"] == size + len(END)
    assert reply.metadata["forced_tokens"] == len(END)


@pytest.mark.parametrize("options", [{}, {"reasoning-budget": -1}, {"reasoning-effort": "max"}])
def test_a_thought_without_a_bound_is_not_changed(
    client: inferd.Client, options: dict[str, Any]
) -> None:
    reply = client.chat("low", THOUGHT, options=SPLIT | options)
    assert (reply.reasoning, str(reply)) == ("0123456789abcdefgh", "The answer is long enough.")
    assert (reply.metadata["reasoning_tokens"], reply.metadata["forced_tokens"]) == (26, 0)


def test_a_message_with_the_end_is_refused(client: inferd.Client) -> None:
    options = {"reasoning-budget": 1, "reasoning-budget-message": "x</think>"}
    with pytest.raises(InvalidArgument, match="it contains '</think>'"):
        client.chat("echo", THOUGHT, options=options)


@pytest.mark.parametrize("budget", [0, 9])
def test_a_schema_applies_behind_the_reasoning_that_the_template_has_begun(
    client: inferd.Client, budget: int
) -> None:
    options = {
        "reasoning-budget": budget,
        "reasoning-budget-message": "Enough.",
        "json-schema": OBJECT,
        "json-whitespace": "compact",
        "seed": 5,
        "n-predict": 100,
    }
    reply = client.chat("thinks", "x", options=SPLIT | options)
    assert reply.reasoning.endswith("Enough.") and len(reply.reasoning) >= budget
    assert str(reply) in ('{"ok":true}', '{"ok":false}')
    assert reply.metadata["stop_reason"] == "eos"


def test_a_required_call_follows_the_forced_end(client: inferd.Client) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": OBJECT}}
    options = {"tools": [tool], "tool-choice": "required", "reasoning-budget": 9, "seed": 5}
    reply = client.chat("thinks", "x", options=SPLIT | options | {"n-predict": 200})
    [call] = reply.tool_calls
    assert call.name == "a" and call.values["ok"] in (True, False)


# Requests.


def begin(raw: RawClient, context: int, events: int, **options: Any) -> int:
    """Begin a stream of `THOUGHT` that stands still after some *events*."""
    number = raw.start_request(
        "stream", context=context, prompt=THOUGHT, credit=events, options=SPLIT | options
    )
    while sum("tokens" in event[2] for event in raw.events) < events:
        raw.events.append(raw.read_message())
    return number


def finish(raw: RawClient, number: int) -> tuple[str, str]:
    """Read the rest of a stream; return its reasoning and its text."""
    raw.write([5, number, 1000])
    done = raw.wait_result(number)
    parts = [*(event[2] for event in raw.events), done]
    reasoning = b"".join(part.get("reasoning", b"") for part in parts)
    return reasoning.decode(), b"".join(part.get("text", b"") for part in parts).decode()


@pytest.mark.parametrize("message", ["", " Well."])
def test_a_request_makes_the_answer_begin(daemon: RunningDaemon, message: str) -> None:
    with RawClient(daemon.socket) as raw, RawClient(daemon.socket) as other:
        context = raw.context("echo")
        number = begin(raw, context, 11, **{"reasoning-budget-message": message})
        found = other.call("end_reasoning", context=context)
        assert found == {"ended": True}
        assert finish(raw, number) == split_at(4, message + END)
        found = raw.call("end_reasoning", context=context)
        assert found == {"ended": False, "reason": "no_turn"}


def test_a_turn_that_does_not_reason_is_not_changed(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as raw:
        context = raw.context("echo")
        assert raw.call("end_reasoning", context=context)["reason"] == "no_turn"
        number = begin(raw, context, 40)
        found = raw.call("end_reasoning", context=context)
        assert found == {"ended": False, "reason": "not_reasoning"}
        assert finish(raw, number) == ("0123456789abcdefgh", "The answer is long enough.")
        with pytest.raises(InvalidArgument):
            raw.call("end_reasoning", context=context + 1000)


def test_the_client_ends_the_reasoning_of_its_stream(
    daemon: RunningDaemon, client: inferd.Client
) -> None:
    with client.session("echo", options=SPLIT) as session:
        assert session.end_reasoning() == inferd.EndReasoningResult(ended=False, reason="no_turn")
        with RawClient(daemon.socket) as raw:
            context = raw.context("echo")
            number = begin(raw, context, 12)
            assert client.end_reasoning(context) == inferd.EndReasoningResult(ended=True)
            assert finish(raw, number) == split_at(5)


@pytest.mark.parametrize(("rights", "ends"), [((), False), (("use", "manage", "see-all"), True)])
def test_only_an_operator_ends_the_reasoning_of_others(rights: tuple[str, ...], ends: bool) -> None:
    with (
        daemon_for_all(bobs(*rights) if rights else "") as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        context = ada.context("echo")
        number = begin(ada, context, 9)
        if ends:
            assert bob.call("end_reasoning", context=context)["ended"]
            assert finish(ada, number) == split_at(2)
        else:
            with pytest.raises(InvalidArgument):
                bob.call("end_reasoning", context=context)
            assert finish(ada, number)[0] == "0123456789abcdefgh"


def test_a_user_who_only_sees_turns_ends_no_reasoning() -> None:
    with (
        daemon_for_all(bobs("use", "see-all")) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        context = ada.context("echo")
        begin(ada, context, 9)
        with pytest.raises(PermissionDenied):
            bob.call("end_reasoning", context=context)


# Losses.


@pytest.mark.parametrize("events", [7, 8, 9, 10, 20])
@pytest.mark.parametrize("requested", [False, True])
def test_a_worker_that_is_killed_around_the_forced_end_loses_nothing(
    daemon: RunningDaemon, client: inferd.Client, events: int, requested: bool
) -> None:
    """The ninth event has the forced end, or the tenth if it is requested after the ninth."""
    with RawClient(daemon.socket) as raw:
        context = raw.context("echo")
        options = {} if requested else {"reasoning-budget": 2}
        number = begin(raw, context, 9 if requested else events, **options)
        if requested:
            assert raw.call("end_reasoning", context=context)["ended"]
            raw.write([5, number, max(0, events - 9)])
            while sum("tokens" in event[2] for event in raw.events) < max(9, events):
                raw.events.append(raw.read_message())
        before = daemon.log.count("worker.died")
        os.kill(client.show("echo")["pid"], signal.SIGKILL)
        wait_until(lambda: daemon.log.count("worker.died") > before)
        assert finish(raw, number) == split_at(2)


# Ceilings.


CEILINGS = f"""
reasoning-max = {{ low = 4 }}
[access.bob]
users = [{BOB}]
reasoning-max = 6
[access.ada]
users = [{ADA}]
reasoning-max = {{ low = 9, high = 0 }}
"""


def test_access_rules_and_classes_have_ceilings() -> None:
    with (
        daemon_for_all(CEILINGS) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        asked = {"options": SPLIT | {"reasoning-budget": 8}}
        for user, priority, more, size in (
            (bob, "normal", {"options": SPLIT}, 6),
            (bob, "normal", asked, 6),
            (bob, "normal", {"options": SPLIT | {"reasoning-budget": 2}}, 2),
            (bob, "low", {"options": SPLIT}, 4),
            (ada, "normal", asked, 8),
            (ada, "high", asked, 0),
            (ada, "low", asked, 4),
        ):
            context = user.context("echo")
            done = user.call("chat", context=context, prompt=THOUGHT, priority=priority, **more)
            found = done["reasoning"].decode() if size else ""
            assert (found, done["text"].decode()) == split_at(size), (priority, more)
            reason = done["metadata"]["adjusted"].get("reasoning-budget", "")
            limited = more is asked and size < 8
            assert reason.endswith(f"allows {size} tokens of a thought") if limited else not reason
