"""Operators cancel and park turns of other users: rights, effects and reports to both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import Cancelled, InvalidArgument, PermissionDenied
from inferd.cli.monitoring.top_screen import Top
from inferd.daemon.access.rights import Access
from inferd.daemon.config.access_settings import Rule
from inferd.ipc.messages import Right
from inferd.ipc.server.connection import ServerConnection
from inferd.scheduler import Owner
from inferd.testing import RunningDaemon
from tests.cli.test_top_screen import shown, states, until
from tests.daemon.command_line import document, inferd
from tests.daemon.other_users import ADA, BOB, Stranger, as_user, client_of, daemon_for_all
from tests.daemon.residency.test_budget import echo
from tests.raw import RawClient
from tests.waiting import wait_until

MODELS = """
quantum-tokens = 100000
[models.slow]
backend = "echo"
slots = 1
[models.slow.echo]
step_ms = 5
"""
SECRET = "the treasure lies under the third oak behind the old mill " * 26
"""More tokens than a stream has credit for: a turn with it does not end before it is read."""
SHORT = "a short one"
DIARY = "diary"
BOTH = ["use", "manage", "see-all"]


def bobs(*rights: str) -> str:
    return f"[access.bob]\nusers = [{BOB}]\nallow = {list(rights)}\n"


@contextmanager
def shared(rules: str = "") -> Iterator[tuple[RunningDaemon, RawClient, RawClient]]:
    """Run a daemon with connections of Ada and Bob."""
    with (
        daemon_for_all(MODELS + rules) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        yield daemon, ada, bob


def diary(client: RawClient) -> int:
    graph = client.call("load_by_name", name="slow")["graph"]
    call = "init_execution_context_with_session_id"
    return int(client.call(call, graph=graph, session_id=DIARY)["context"])


def task_of(client: RawClient, context: int) -> dict[str, Any] | None:
    tasks = client.call("queue")["tasks"]
    return next((task for task in tasks if task["context"] == context), None)


# Rights over other users' turns.


@pytest.mark.parametrize("may", [(), ("use",), ("manage",), ("see-all",), ("manage", "see-all")])
def test_others_turns_take_both_rights_and_one_s_own_none(may: tuple[str, ...]) -> None:
    rule = Rule(name="r", users=frozenset({BOB}), allow=frozenset(map(Right, may)))
    access, bob = Access([rule], own=0), connection_of(BOB)
    assert access.may_control_turns_of(bob, Owner(BOB))
    if may == ("see-all",):
        with pytest.raises(PermissionDenied) as caught:
            access.may_control_turns_of(bob, Owner(ADA))
        assert caught.value.data == {"right": "manage"}
        assert "allow = ['manage']" in caught.value.hint
    else:
        assert access.may_control_turns_of(bob, Owner(ADA)) == (set(may) >= {"manage", "see-all"})


def test_without_rules_root_and_the_daemons_user_are_operators_and_others_are_not() -> None:
    access = Access((), own=990)
    for uid, reaches in ((0, True), (990, True), (BOB, False)):
        assert access.may_control_turns_of(connection_of(uid), Owner(ADA)) is reaches


def connection_of(uid: int) -> ServerConnection:
    stranger: Any = Stranger(uid)
    connection: ServerConnection = stranger
    return connection


# Reports to both users.


def test_the_user_of_a_turn_cancelled_by_an_operator_gets_the_cause_and_keeps_the_text() -> None:
    with shared(bobs(*BOTH)) as (daemon, ada, bob):
        context = diary(ada)
        turn = ada.begin_stream(context, SECRET)
        [task] = bob.call("queue", all=True)["tasks"]

        assert bob.call("cancel", context=task["context"]) == {"cancelled": True}

        with pytest.raises(Cancelled) as caught:
            ada.wait_result(turn)
        assert caught.value.message == "an operator cancelled the turn"
        assert caught.value.data.pop("metadata") == ada.metadata(context)
        assert caught.value.data == {"by": "operator"}
        assert str(BOB) not in json.dumps(caught.value.to_wire())
        metadata = ada.metadata(context)
        assert (metadata["stop_reason"], metadata["stop_detail"]) == ("Cancelled", "operator")
        said = ada.output(context)
        assert said and SECRET.encode().startswith(said)
        assert bob.call("cancel", context=context) == {"cancelled": False}, "it has ended"
        assert ada.call("chat", context=context, prompt=SHORT, raw=True)["text"]
        [event] = [line for line in daemon.log.splitlines() if "cancelled_by_operator" in line]
        fields = event.split()
        assert {f"uid={ADA}", f"by={BOB}", f"context={context}"} <= set(fields)


def test_one_s_own_turn_is_cancelled_by_oneself_operator_or_not() -> None:
    with shared(bobs(*BOTH)) as (daemon, _, bob):
        context = diary(bob)
        turn = bob.begin_stream(context, SECRET)
        bob.call("cancel", context=context)
        with pytest.raises(Cancelled) as caught:
            bob.wait_result(turn)
        assert caught.value.message == "the turn was cancelled"
        assert caught.value.data == {"metadata": bob.metadata(context)}
        assert bob.metadata(context)["stop_detail"] == "the turn was cancelled"
        assert "cancelled_by_operator" not in daemon.log


def test_a_turn_that_waits_is_cancelled_and_one_that_runs_parked() -> None:
    with shared() as (daemon, ada, bob), RawClient(daemon.socket) as operator:
        hers, his = ada.context("slow"), bob.context("slow")
        tale = SECRET[:300]
        long = ada.begin_stream(hers, tale)
        waits = bob.start_request("chat", context=his, prompt=SHORT, raw=True)
        wait_until(lambda: task_of(bob, his) is not None)
        assert operator.call("park", context=hers) == {"parked": True}
        assert bob.wait_result(waits)["text"] == SHORT.encode(), "it had the slot meanwhile"
        ada.wait_result(long)
        assert ada.streamed_text == tale and ada.metadata(hers)["parks"] == 1

        ada.start_request("stream", context=hers, prompt=SECRET, raw=True, credit=1)
        waits = bob.start_request("chat", context=his, prompt=SHORT, raw=True)
        wait_until(lambda: task_of(bob, his) is not None)
        assert operator.call("cancel", context=his) == {"cancelled": True}
        with pytest.raises(Cancelled, match="an operator"):
            bob.wait_result(waits)


def test_a_turn_that_waits_for_its_model_is_cancelled() -> None:
    models = "memory-bytes = 1000\n" + echo("a", 600) + "step_ms = 5\n" + echo("b", 600)
    with (
        daemon_for_all(models) as daemon,
        client_of(daemon, ADA) as ada,
        RawClient(daemon.socket) as operator,
    ):
        running, late = ada.context("a"), ada.context("b")
        turn = ada.start_request("stream", context=running, prompt=SECRET, raw=True, credit=1000)
        ada.events.append(ada.read_message())
        waits = ada.start_request("chat", context=late, prompt=SHORT, raw=True)
        wait_until(lambda: len(operator.call("queue", all=True)["tasks"]) >= 2)
        assert operator.call("cancel", context=late) == {"cancelled": True}
        with pytest.raises(Cancelled, match="an operator"):
            ada.wait_result(waits)
        operator.call("cancel", context=running)
        with pytest.raises(Cancelled, match="an operator"):
            ada.wait_result(turn)


# Missing rights.


@pytest.mark.parametrize("may", [["use"], ["use", "manage"], ["use", "drain"]])
def test_without_see_all_another_user_s_turn_does_not_exist(may: list[str]) -> None:
    with shared(bobs(*may)) as (daemon, ada, bob):
        context = diary(ada)
        turn = ada.begin_stream(context, SECRET)
        for call in ("cancel", "park"):
            hers, nobodys = refusal_of(bob, call, context), refusal_of(bob, call, context + 1000)
            assert hers == nobodys.replace(str(context + 1000), str(context))
        for command in ("cancel", "park"):
            for hers in (str(context), DIARY):
                outcome = said_to_bob(daemon, command, hers)
                assert outcome == said_to_bob(daemon, command, "nothing").replace("nothing", hers)
        assert task_of(ada, context)
        ada.call("cancel", context=context)
        with pytest.raises(Cancelled, match="the turn was"):
            ada.wait_result(turn)


def said_to_bob(daemon: RunningDaemon, *command: str) -> str:
    """Return the error of Bob's command."""
    inferd("cancel", "nobody", socket=daemon.socket)  # Bob may not read what is imported late
    with as_user(BOB):
        result = inferd(*command, socket=daemon.socket)
    assert result.exit_code == 1 and result.stderr.startswith("inferd: "), result.output
    return str(result.stderr)


def refusal_of(client: RawClient, call: str, context: int) -> str:
    with pytest.raises(InvalidArgument) as caught:
        client.call(call, context=context)
    return json.dumps(caught.value.to_wire())


def test_a_user_with_see_all_but_not_manage_gets_the_missing_right() -> None:
    with shared(bobs("see-all")) as (daemon, ada, bob):
        context = diary(ada)
        ada.begin_stream(context, SECRET)
        for call in ("cancel", "park", "end_reasoning"):
            with pytest.raises(PermissionDenied) as caught:
                bob.call(call, context=context)
            assert caught.value.data == {"right": "manage"}
            assert refusal_of(bob, call, context + 1000)
        assert "may not control the turns of other users" in said_to_bob(daemon, "cancel", DIARY)
        assert task_of(ada, context)


# On the command line.


@pytest.mark.parametrize("by", ["number", "id"])
def test_tasks_in_the_list_of_all_are_cancelled_and_parked_by_command(by: str) -> None:
    with shared() as (daemon, ada, bob):
        context, other = diary(ada), bob.context("slow")
        turn = ada.begin_stream(context, SECRET)
        waits = bob.start_request("chat", context=other, prompt=SHORT, raw=True)
        wait_until(lambda: task_of(bob, other) is not None)
        tasks = document(inferd("queue", "--all", "--json", socket=daemon.socket))["tasks"]
        [hers] = [task for task in tasks if task["uid"] == ADA]
        wanted = str(hers["context"]) if by == "number" else hers["session_id"]

        outcome = inferd("park", wanted, socket=daemon.socket)
        assert (outcome.stdout, outcome.exit_code) == ("parked\n", 0)
        bob.wait_result(waits)
        alone = document(inferd("park", wanted, "--json", socket=daemon.socket))
        assert alone == {"parked": False}
        assert inferd("cancel", wanted, socket=daemon.socket).stdout == "cancelled\n"
        with pytest.raises(Cancelled, match="an operator"):
            ada.wait_result(turn)
        outcome = inferd("cancel", wanted, socket=daemon.socket)
        assert outcome.stdout == "there was no running turn\n"


def test_one_s_own_session_comes_first_and_an_id_of_several_users_is_refused() -> None:
    with shared() as (daemon, ada, bob), RawClient(daemon.socket) as own:
        contexts = sorted((diary(ada), diary(bob)))
        outcome = inferd("cancel", DIARY, socket=daemon.socket)
        assert outcome.exit_code == 1 and "2 users or labels have a session" in outcome.stderr
        assert f"give its number: {contexts[0]}, {contexts[1]}" in outcome.stderr
        ada.begin_stream(diary(ada), SECRET)
        mine = diary(own)
        turn = own.start_request("chat", context=mine, prompt=SHORT, raw=True)
        wait_until(lambda: task_of(own, mine) is not None)
        assert inferd("cancel", DIARY, socket=daemon.socket).stdout == "cancelled\n"
        with pytest.raises(Cancelled, match="the turn was"):
            own.wait_result(turn)
        assert any(task["uid"] == ADA for task in own.call("queue", all=True)["tasks"])


def test_a_number_is_a_context_s_before_it_is_somebody_s_session_id() -> None:
    with shared() as (daemon, ada, bob):
        context = ada.context("slow")
        graph = bob.call("load_by_name", name="slow")["graph"]
        call = "init_execution_context_with_session_id"
        bob.call(call, graph=graph, session_id=str(context))
        turn = ada.begin_stream(context, SECRET)
        assert inferd("cancel", str(context), socket=daemon.socket).stdout == "cancelled\n"
        with pytest.raises(Cancelled):
            ada.wait_result(turn)


# On the screen.


@pytest.mark.asyncio
async def test_top_cancels_the_selected_task_of_another_user() -> None:
    with shared() as (daemon, ada, _):
        turn = ada.begin_stream(diary(ada), SECRET)
        app = Top(Path(daemon.socket), 0.1, all_users=True)
        async with app.run_test(size=(100, 24)) as pilot:
            await until(pilot, lambda: states(app) == ["running"])
            assert str(ADA) in shown(app)
            await pilot.press("c")
            await until(pilot, lambda: "is cancelled" in shown(app))
        with pytest.raises(Cancelled, match="an operator"):
            ada.wait_result(turn)
