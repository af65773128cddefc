"""The screen of `top`: driven by textual's pilot over a real daemon, and run on a terminal."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from textual.pilot import Pilot

from inferd.backends.errors import Cancelled, PermissionDenied
from inferd.backends.library import install_command
from inferd.cli.monitoring.top_screen import Table, Top
from inferd.cli.monitoring.top_view import (
    MODELS,
    SESSIONS,
    TASKS,
    Panel,
    Sample,
    TopFrame,
    frame_of,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import on_terminal
from tests.echo import echo_model
from tests.ipc.fake_server import Answer, Exchange, FakeServer, fake_server
from tests.raw import RawClient

from .top_samples import FLEET, model, sample, session, task

CONFIG = "[daemon]\nquantum-tokens = 100000\n" + echo_model("slow", slots=1, step_ms=10)
LONG = "so long a text " * 100
SIZE = (80, 24)
WAIT_S_MAX = 60.0
XTERM = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
LEFT = "\x1b[?1049l"
"""The escape sequence that restores a terminal's own screen."""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as daemon:
        yield daemon


def top_of(daemon: RunningDaemon, *, all_users: bool = False) -> Top:
    return Top(Path(daemon.socket), 0.1, all_users=all_users)


def shown(app: Top) -> str:
    """Return the text on the screen."""
    strips = app.screen._compositor.render_strips()  # a picture of them takes ten times as long
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    """Wait until *holds* returns true."""
    app = pilot.app
    assert isinstance(app, Top)
    with anyio.move_on_after(WAIT_S_MAX):
        while not holds():
            await pilot.pause(0.02)
        return
    raise AssertionError(f"the condition never held: {shown(app)}")


def table(app: Top, panel: Panel) -> Table:
    return app.query_one(f"#{panel.title}", Table)


def selected(app: Top) -> str | None:
    row = table(app, TASKS).selected
    return None if row is None else row.key


def states(app: Top) -> list[str]:
    frame = app.frame
    return [] if frame is None else [str(t["state"]) for t in frame.sample.tasks]


@contextmanager
def streams(daemon: RunningDaemon, count: int) -> Iterator[tuple[RawClient, list[int]]]:
    """Start turns on the slow model; the first of them runs."""
    with RawClient(daemon.socket, timeout_s=WAIT_S_MAX) as client:
        turns = []
        for _ in range(count):
            context = client.context("slow")
            turns.append(client.start_request("chat", context=context, prompt=LONG))
        yield client, turns


@pytest.mark.asyncio
async def test_it_shows_models_tasks_and_sessions_in_eighty_columns(daemon: RunningDaemon) -> None:
    app = top_of(daemon)
    words = (
        "inferd/", "tokens/s", "1 running, 1 waiting", "2 of 100", "models (2)", "tasks (2)",
        "sessions (2)", "slow", "1/1", "POSITION", "ANSWER/S", "HISTORY", "Cancel", "Park",
        "Unload", "Quit",
    )  # fmt: skip
    with streams(daemon, 2):
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: all(word in shown(app) for word in words))


@pytest.mark.asyncio
async def test_c_cancels_the_selected_task(daemon: RunningDaemon) -> None:
    app = top_of(daemon)
    with streams(daemon, 2) as (client, turns):
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: states(app) == ["running", "waiting"])
            await pilot.press("down", "c")
            await until(pilot, lambda: len(states(app)) == 1)
            assert states(app) == ["running"], "the second one was selected"
            await until(pilot, lambda: "is cancelled" in shown(app))
        with pytest.raises(Cancelled):
            client.wait_result(turns[1])


@pytest.mark.asyncio
async def test_p_parks_the_selected_task_where_another_waits(daemon: RunningDaemon) -> None:
    app = top_of(daemon)
    with streams(daemon, 1) as (client, _):
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: states(app) == ["running"])
            await pilot.press("p")
            await until(pilot, lambda: "no other task waits for its slot" in shown(app))
            client.start_request("chat", context=client.context("slow"), prompt=LONG)
            await until(pilot, lambda: len(states(app)) == 2)
            first = selected(app)
            await pilot.press("p")
            await until(pilot, lambda: states(app) == ["running", "parked"])
            await until(pilot, lambda: "is parked" in shown(app))
            assert selected(app) == first, "the selection stays with its task"


@pytest.mark.asyncio
async def test_u_unloads_the_selected_model_after_a_confirmation(daemon: RunningDaemon) -> None:
    app = top_of(daemon)

    def state() -> str:
        assert app.frame is not None
        return app.frame.models[0].cells[1]

    with streams(daemon, 1) as (client, turns):
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: states(app) == ["running"])
            await pilot.press("u")
            await until(pilot, lambda: "Unload slow?" in shown(app))
            await pilot.press("x", "n")
            await until(pilot, lambda: "Unload slow?" not in shown(app))
            await pilot.press("u", "y")
            await until(pilot, lambda: "is in use" in shown(app))
            assert state() == "ready"
            await pilot.press("u", "f")
            await until(pilot, lambda: "slow is unloaded" in shown(app))
        with pytest.raises(Cancelled, match="an operator unloaded 'slow'"):
            client.wait_result(turns[0])


@pytest.mark.asyncio
async def test_the_question_mark_lists_the_keys_while_frames_are_updated(
    daemon: RunningDaemon,
) -> None:
    app = top_of(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.frame)
        await pilot.press("question_mark")
        await until(pilot, lambda: "cancel the selected task" in shown(app))
        before = app.frame
        await until(pilot, lambda: app.frame is not before)
        await pilot.press("escape")
        await until(pilot, lambda: "cancel the selected task" not in shown(app))


@pytest.mark.asyncio
async def test_keys_without_a_selected_row_show_a_message(daemon: RunningDaemon) -> None:
    app = top_of(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.frame)
        await pilot.press("c")
        await until(pilot, lambda: "no task is selected" in shown(app))


@pytest.mark.asyncio
async def test_the_screen_reconnects_to_a_restarted_daemon(daemon: RunningDaemon) -> None:
    app = top_of(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.frame)
        await anyio.to_thread.run_sync(daemon.stop)
        await until(pilot, lambda: "reconnecting" in shown(app))
        await pilot.press("c")
        assert app.daemon_client is None
        await anyio.to_thread.run_sync(daemon.start_again)
        await until(pilot, lambda: "connected to inferd/" in shown(app))
        assert app.frame is not None and app.frame.sample.stats["instance"] == 2


@pytest.mark.asyncio
async def test_a_user_without_see_all_sees_only_their_own_tasks(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server:
        release_samples(server, sample())
        app = Top(server.path, 0.1, all_users=True)
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: "showing only yours" in shown(app))
            await until(pilot, lambda: app.frame)
            assert not app.all_users


def release_samples(server: FakeServer, reply: Sample) -> None:
    """Make *server* answer with a sample, and refuse requests for all users."""

    def answer(**fields: Any) -> Answer:
        async def send_reply(exchange: Exchange) -> dict[str, Any]:
            if exchange.params.get("all"):
                raise PermissionDenied("user 1000 may not see the tasks of all users")
            return fields

        return send_reply

    server.answers |= {
        "stats": answer(stats=reply.stats),
        "models": answer(models=reply.models),
        "queue": answer(tasks=reply.tasks),
        "sessions": answer(sessions=reply.sessions),
    }


@pytest.mark.asyncio
async def test_names_of_other_users_sessions_are_shown_as_plain_text() -> None:
    wild = "[red]\x1b[2J[/nope] x\ny"
    app = Top(Path("/nonexistent/inferd.sock"), 60.0, all_users=False)
    async with app.run_test(size=(120, 24)) as pilot:
        tasks, sessions = [task(session_id=wild)], [session(session_id=wild)]
        app.show_frame(frame_of(None, sample(tasks=tasks, sessions=sessions)))
        await until(pilot, lambda: shown(app).count("[red]\\u001b[2J[/nope] x y") == 2)


@pytest.mark.asyncio
async def test_the_selection_follows_its_row_and_moves_to_the_next_when_that_ends() -> None:
    app = Top(Path("/nonexistent/inferd.sock"), 60.0, all_users=False)
    async with app.run_test(size=SIZE) as pilot:
        tasks = [task(n) for n in range(1, 4)]
        app.show_frame(frame_of(None, sample(tasks=tasks)))
        await pilot.press("down")
        assert selected(app) == "102"
        app.show_frame(frame_of(None, sample(tasks=tasks[::-1])))
        assert selected(app) == "102"
        await pilot.press("down")
        assert selected(app) == "101"
        app.show_frame(frame_of(None, sample(tasks=tasks[1:])))
        assert selected(app) == "103", "the last one there is"
        app.show_frame(frame_of(None, sample(tasks=[])))
        assert selected(app) is None


@pytest.mark.asyncio
async def test_models_of_a_fleet_are_selected_by_their_node_and_unloaded_on_all() -> None:
    app = Top(Path("/nonexistent/inferd.sock"), 60.0, all_users=False)
    async with app.run_test(size=SIZE) as pilot:
        frame = frame_of(None, sample(models=[model(node="a"), model(node="b")], stats=FLEET))
        app.show_frame(frame)
        models = table(app, MODELS)
        models.focus()
        await pilot.press("down")
        app.show_frame(frame)
        assert models.selected is not None and models.selected.node == "b"
        assert "NODE" in shown(app)
        await pilot.press("u")
        await until(pilot, lambda: "Unload m on all nodes?" in shown(app))
        await pilot.press("n")
        app.show_frame(frame_of(None, sample(models=[model()])))
        await until(pilot, lambda: "NODE" not in shown(app))


@pytest.mark.asyncio
async def test_it_follows_the_terminal_s_size() -> None:
    app = Top(Path("/nonexistent/inferd.sock"), 60.0, all_users=False)
    async with app.run_test(size=(40, 10)) as pilot:
        models = [model(f"m{n}") for n in range(9)]
        app.show_frame(frame_of(None, sample(models=models)))
        await pilot.pause()
        await pilot.resize_terminal(140, 50)
        await until(pilot, lambda: table(app, SESSIONS).size.height > 10)
        assert table(app, MODELS).size.width >= 130
        assert "m8" in shown(app) and "RAM KV" in shown(app)


def narrow_frame() -> TopFrame:
    """Return a frame with long names and long numbers."""
    long = "gemma-3-270m-instruct-of-somebody"
    tasks = [
        task(1, model=long, prompt_tokens=1_234_567, output_tokens=7_654_321, age_s=300_000.0),
        task(2, model="m", session_id="a-session-with-a-long-name", position=1, state="waiting"),
    ]
    sessions = [session(4_294_967_298, model=long, tokens=1_234_567), session(102)]
    models = [model(long, "loading"), model("m")]
    before = sample(0.0, tasks=[tasks[0] | {"output_tokens": 7_650_000}, tasks[1]])
    return frame_of(before, sample(1.0, models=models, tasks=tasks, sessions=sessions))


@pytest.mark.parametrize("size", [(40, 24), (20, 10), (3, 3)], ids=str)
@pytest.mark.asyncio
async def test_a_narrow_screen_shows_whole_numbers(size: tuple[int, int]) -> None:
    app = Top(Path("/nonexistent/inferd.sock"), 60.0, all_users=False)
    async with app.run_test(size=size) as pilot:
        frame = narrow_frame()
        app.show_frame(frame)
        await pilot.pause()
        for panel, rows in frame.tables():
            shown_table = table(app, panel)
            assert shown_table.virtual_size.width <= max(size[0], 0) or size[0] < 10
            heads = [str(column.label) for column in shown_table.ordered_columns]
            assert heads or size[0] < 10
            cells = {text for row in rows for text in row.cells if text[0].isdigit()}
            for index, row in enumerate(rows):
                for head, column in zip(heads, shown_table.ordered_columns, strict=True):
                    text = row.cells[panel.heads.index(head)]
                    assert text not in cells or column.width >= len(text), (index, head)
        await pilot.resize_terminal(100, 30)
        await until(pilot, lambda: "RAM KV" in shown(app) and "1234567" in shown(app))
        await pilot.resize_terminal(*size)
        await until(pilot, lambda: "RAM KV" not in shown(app))


@pytest.mark.asyncio
async def test_forty_columns_show_what_runs_and_how_fast() -> None:
    app = Top(Path("/nonexistent/inferd.sock"), 60.0, all_users=False)
    async with app.run_test(size=(40, 24)) as pilot:
        app.show_frame(narrow_frame())
        words = ("inferd/9, up for 5 min", "2 running, 3 waiting, 1 parked", "gemma-3-2", "TOK/S")
        await until(pilot, lambda: all(word in shown(app) for word in (*words, "4321", "waiting")))
        await pilot.press("question_mark")
        await until(pilot, lambda: "cancel the selected task" in shown(app))
        await pilot.press("pagedown", "pagedown")
        await until(pilot, lambda: "Any other key closes this." in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Any other key" not in shown(app))


@pytest.mark.parametrize(("typed", "status"), [("q", 0), ("\x03", 130)])
def test_on_a_terminal_it_ends_and_leaves_the_terminal_as_it_was(
    typed: str, status: int, daemon: RunningDaemon
) -> None:
    with streams(daemon, 1), on_terminal("top", socket=daemon.socket, **XTERM) as terminal:
        before = termios.tcgetattr(terminal.descriptor)
        terminal.until("running")
        assert termios.tcgetattr(terminal.descriptor) != before, "keys come at once, unechoed"
        terminal.type(typed)
        terminal.until(LEFT)
        assert terminal.process.wait(WAIT_S_MAX) == status
        assert termios.tcgetattr(terminal.descriptor) == before


@pytest.mark.alone
def test_on_a_terminal_it_follows_its_size(daemon: RunningDaemon) -> None:
    environ = {"TERM": "xterm-256color"}
    with streams(daemon, 1), on_terminal("top", socket=daemon.socket, **environ) as terminal:
        terminal.until("running")
        fcntl.ioctl(terminal.descriptor, termios.TIOCSWINSZ, struct.pack("4H", 50, 140, 0, 0))
        terminal.until("\x1b[50;")
        terminal.type("q")
        terminal.until(LEFT)


def test_a_dumb_terminal_gets_plain_tables(daemon: RunningDaemon) -> None:
    """A dumb terminal, such as an editor's, shows escape sequences as text."""
    with on_terminal("top", "-n", "0.1", socket=daemon.socket, TERM="dumb") as terminal:
        text = terminal.until("SESSION\r\n")
        assert terminal.process.wait(WAIT_S_MAX) == 0
    assert "\x1b" not in text and "POSITION" in text


def test_without_a_daemon_the_screen_is_not_shown(tmp_path: Path) -> None:
    with on_terminal("top", socket=str(tmp_path / "none.sock"), **XTERM) as terminal:
        assert "no daemon" in terminal.until("inferd start")
        assert terminal.process.wait(WAIT_S_MAX) == 3


def test_without_textual_the_error_names_the_package_to_install(
    daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = 'raise ModuleNotFoundError("No module named textual", name="textual")\n'
    (tmp_path / "textual.py").write_text(error)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with on_terminal("top", socket=daemon.socket, **XTERM) as terminal:
        text = terminal.until("needs no textual")
        assert "needs textual" in text and install_command("top") in text.replace("\r\n", " ")
        assert terminal.process.wait(WAIT_S_MAX) == 1
