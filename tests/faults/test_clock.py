"""Setting the machine's clock has no effect on the times of sessions, models and turns.

The test sets the clock of the daemon and its workers by a `sitecustomize`, which Python runs before
their code: `time.time` and `time.time_ns` have an offset from the true time. The module has a fork
server whose interpreter began so, too.
"""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import SessionExpired, Timeout
from inferd.testing import RunningDaemon, running_daemon
from tests import fork_server
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

HOUR_S = 3600
DAY_S = 24 * HOUR_S
ROOT = Path(__file__).parents[2]
PACKAGES = ("backends", "cli", "daemon", "gateways", "ipc", "scheduler", "sessions", "wire")

SITECUSTOMIZE = """
import time
from pathlib import Path

_true, _true_ns = time.time, time.time_ns
_offset = Path(__file__).with_name("offset")


def _offset_s():
    return int(_offset.read_text())


time.time = lambda: _true() + _offset_s()
time.time_ns = lambda: _true_ns() + _offset_s() * 1_000_000_000
"""
CONFIG = echo_model("slow", slots=1, step_ms=10)
SHORT = "[daemon]\nidle_timeout_ms = 300\n" + CONFIG + echo_model("brief", keep_alive=0.3)
SLOW = "x" * 100
"""A prompt for which the slow model needs a second."""


class Clock:
    """The clock of the processes whose interpreter begins with `sitecustomize.py` in *folder*."""

    def __init__(self, folder: Path):
        self._folder = folder
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self.set(0)

    def set(self, offset_s: int) -> None:
        """Set the clock's offset from the true time."""
        new = self._folder / "new"
        new.write_text(str(offset_s))
        new.replace(self._folder / "offset")


@pytest.fixture(scope="module")
def module_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clock]:
    """The clock of all processes that the module starts; they are forked from servers with it."""
    folder = tmp_path_factory.mktemp("clock")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    servers: dict[str, fork_server._Server] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setattr(fork_server, "_environment", dict(os.environ))
        patch.setattr(fork_server, "_servers", servers)
        yield Clock(folder)
    for server in servers.values():
        server._close()


@pytest.fixture
def clock(module_clock: Clock) -> Clock:
    """The clock, which shows the true time at the test's start."""
    module_clock.set(0)
    return module_clock


@contextmanager
def attached(
    daemon: RunningDaemon, session_id: str
) -> Iterator[tuple[RawClient, int, dict[str, Any]]]:
    """Open a session of `echo` by its id, on a separate connection."""
    with RawClient(daemon.socket) as client:
        graph = client.call("load_by_name", name="echo")["graph"]
        call = "init_execution_context_with_session_id"
        opened = client.call(call, graph=graph, session_id=session_id)
        yield client, opened["context"], opened


def chat(client: RawClient, context: int, prompt: str) -> dict[str, Any]:
    return dict(client.call("chat", context=context, prompt=prompt, raw=True)["metadata"])


def start_slow_turn(client: RawClient, context: int) -> int:
    """Start a slow turn, and return once it runs."""
    turn = client.start_request("chat", context=context, prompt=SLOW, raw=True)
    wait_until(lambda: client.call("stats")["stats"]["running"])
    return turn


def model(client: RawClient, name: str) -> dict[str, Any]:
    (found,) = client.call("show", name=name)["models"]
    return dict(found)


JUMPS = pytest.mark.parametrize("jump_s", [5 * HOUR_S, -5 * HOUR_S], ids=["ahead", "back"])


@JUMPS
def test_nothing_ends_before_its_time(clock: Clock, jump_s: int) -> None:
    """A running turn, a waiting turn, sessions, an idle model and connections are unaffected."""
    with running_daemon(CONFIG) as daemon, RawClient(daemon.socket) as client:
        idle = client.call("load_by_name", name="echo")["graph"]
        client.call("unload", graph=idle, keep=True)
        contexts = client.context("slow"), client.context("slow")
        turns = [start_slow_turn(client, contexts[0])]
        turns.append(
            client.start_request(
                "chat", context=contexts[1], prompt="next", raw=True, queue_timeout_s=60.0
            )
        )
        wait_until(lambda: client.call("stats")["stats"]["waiting"])
        clock.set(jump_s)

        output = [bytes(client.wait_result(turn)["text"]) for turn in turns]
        assert output == [SLOW.encode(), b"next"]
        client.call("unload", graph=client.call("load_by_name", name="slow")["graph"], keep=True)
        idle_model = model(client, "echo")
        assert idle_model["state"] == "ready" and 0 <= idle_model["idle_s"] < HOUR_S
        for session in client.call("sessions")["sessions"]:
            assert 0 <= session["idle_s"] < HOUR_S
        assert 0 <= client.call("stats")["stats"]["uptime_s"] < HOUR_S


@JUMPS
def test_nothing_is_delayed_past_its_time(clock: Clock, jump_s: int) -> None:
    """A timeout, idle sessions and an idle model end in time, whatever the clock shows."""
    with running_daemon(SHORT) as daemon, RawClient(daemon.socket) as client:
        kept = client.call("load_by_name", name="brief")["graph"]
        contexts = client.context("slow"), client.context("slow")
        turn = start_slow_turn(client, contexts[0])
        clock.set(jump_s)

        with pytest.raises(Timeout):
            client.call("chat", context=contexts[1], prompt="next", raw=True, queue_timeout_s=0.1)
        client.wait_result(turn)
        client.call("unload", graph=kept, keep=True)
        wait_until(lambda: model(client, "brief")["state"] == "cold")
        wait_until(lambda: not client.call("sessions")["sessions"])
        with pytest.raises(SessionExpired):
            chat(client, contexts[0], "too late")


@JUMPS
def test_a_conversation_continues_after_a_restart_with_another_clock(
    clock: Clock, jump_s: int
) -> None:
    """Its history is kept, and none of it is computed again."""
    with running_daemon(CONFIG) as daemon:
        with attached(daemon, "diary") as (client, context, _):
            before = chat(client, context, "once upon a time " * 8)
        daemon.stop()
        clock.set(jump_s)
        daemon.start_again()
        with attached(daemon, "diary") as (client, context, opened):
            assert opened.get("attached")
            after = chat(client, context, "next")
            history = before["input_tokens"] + before["output_tokens"]
            assert after["input_tokens"] > history
            assert after["cached_tokens"] >= history - 1


@pytest.mark.parametrize("running", [True, False], ids=["while-it-runs", "at-its-start"])
def test_sessions_written_while_the_clock_is_a_month_behind_are_not_old_once_it_is_right(
    clock: Clock,
    running: bool,
) -> None:
    """The daemon deletes sessions after a week."""
    with running_daemon(CONFIG) as daemon:
        for name, offset_s in (("first", 0), ("second", -30 * DAY_S)):
            if not running:
                daemon.stop()
            clock.set(offset_s)
            if not running:
                daemon.start_again()
            with attached(daemon, name) as (client, context, _):
                chat(client, context, "hello")
        daemon.kill()
        clock.set(0)
        daemon.start_again()
        for name in ("first", "second"):
            with attached(daemon, name) as (_, _, opened):
                assert opened.get("attached"), name


def test_a_start_with_the_clock_ahead_keeps_all_sessions_and_warns(clock: Clock) -> None:
    with running_daemon(CONFIG) as daemon:
        with attached(daemon, "diary") as (client, context, _):
            chat(client, context, "hello")
        daemon.kill()
        for _ in range(2):  # a later start, with the same wrong clock, keeps them, too
            clock.set(300 * DAY_S)
            daemon.start_again()
            with RawClient(daemon.socket) as client:
                [session] = client.call("sessions", dormant=True)["sessions"]
                assert session["session_id"] == "diary" and session["idle_s"] < HOUR_S
            daemon.stop()
        assert daemon.log.count("clock.leapt") == 1
        assert "sessions_kept=1" in daemon.log and "days=300.0" in daemon.log
        assert "deleted_by_age" not in daemon.log


def test_a_session_is_deleted_after_its_days_and_the_log_has_their_number(clock: Clock) -> None:
    """Otherwise the tests above would prove nothing."""
    with running_daemon(CONFIG) as daemon:
        with attached(daemon, "diary") as (client, context, _):
            chat(client, context, "hello")
        daemon.kill()
        short = "[daemon]\ndormant_days_max = 0.00001\n" + CONFIG
        (daemon.directory / "config.toml").write_text(short)
        daemon.start_again()
        with RawClient(daemon.socket) as client:
            wait_until(lambda: not client.call("sessions", dormant=True)["sessions"])
        wait_until(lambda: re.search(r"sessions.deleted_by_age.* sessions=1", daemon.log))


def test_a_session_is_deleted_if_the_machine_was_off_for_its_days(clock: Clock) -> None:
    with running_daemon(CONFIG) as daemon:
        with attached(daemon, "diary") as (client, context, _):
            chat(client, context, "hello")
        daemon.stop()
        note = daemon.directory / "state" / "clock"
        before = msgspec.json.decode(note.read_bytes())
        before["moment"]["boot"] = "another boot"
        note.write_bytes(msgspec.json.encode(before))
        uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        clock.set(8 * DAY_S + int(uptime_s))
        daemon.start_again()
        with attached(daemon, "diary") as (_, _, opened):
            assert not opened.get("attached")
        wait_until(lambda: re.search(r"sessions.deleted_by_age.* sessions=1", daemon.log))


# Modules that read the date.

DATES = {
    "backends/llama/text/sandbox.py": "a chat template may say today's date",
    "backends/llama/text/template_form.py": "some chat templates get the date as a text",
    "daemon/calls/between_daemons.py": "a session that moves here counts as used now",
    "daemon/calls/monitoring.py": "usage is shown from an hour of a date",
    "daemon/jobs/store.py": "the name of a damaged file",
    "cli/operations/backup_commands.py": "sessions do not age while they are in a backup",
    "cli/operations/job_commands.py": "lists show when a job was submitted",
    "cli/operations/session_commands.py": "shows when a state was saved",
    "cli/models/tune_command.py": "the date of a measurement",
    "cli/monitoring/status_commands.py": "lists show how long ago sessions were deleted",
    "daemon/models/draft_gains.py": "the days of gains",
    "daemon/models/tuner.py": "the date of a measurement",
    "daemon/tuning/report.py": "the date of a measurement",
    "gateways/http/inferd_api/sessions.py": "the date at which a chat will be deleted",
    "sessions/lifetimes/deletion.py": "the dates of deletions",
    "daemon/state_clock.py": "the date at the start, beside the time since boot",
    "daemon/state_lock.py": "a number that no daemon had before, where none can be kept",
    "daemon/models/persisted_settings.py": "the name of a damaged file",
    "daemon/traces/export.py": "the dates of spans, beside those of other programs",
    "gateways/fleet/certificates.py": "the dates of certificates, and the rest of their time",
    "gateways/http/inferd_api/monitoring.py": "the date of the statistics",
    "scheduler/engine/tensor_engine.py": "the date of the last computation, in Triton's API",
    "gateways/http/ollama/lines.py": "the date of an answer, in Ollama's API",
    "gateways/http/ollama/api.py": "the date of a model's expiry, in Ollama's API",
    "gateways/http/openai/chat.py": "the date of an answer, in OpenAI's API",
    "gateways/http/openai/completions.py": "the date of an answer, in OpenAI's API",
    "gateways/http/openai/responses/frame.py": "the date of an answer, in OpenAI's API",
    "sessions/entries.py": "the date at the start",
    "sessions/journal/journal_file.py": "the name of a damaged file",
    "gateways/fleet/ray_cluster/router.py": "Ray dates its requests",
    "sessions/named_states.py": "lists show when a state was saved",
    "sessions/usage/usage.py": "usage counts by hours and months of the date",
}
"""Modules that read the date, and their purpose. All others use clocks that cannot be set."""
TIME_ATTRIBUTES = {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"}
DATE_ATTRIBUTES = {"now", "utcnow", "today", "CLOCK_REALTIME"}
ATTRIBUTES = "|".join(TIME_ATTRIBUTES | DATE_ATTRIBUTES)
DATE_TEXT = re.compile(rf"\bfrom\s+time\b|\.\s*({ATTRIBUTES})\b")
"""Text without which a module does not read the date; few modules have to be parsed."""


def reads_the_date(source: str) -> bool:
    """Return whether a module reads the machine's date, according to its syntax."""
    if not DATE_TEXT.search(source):
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            return True  # calls by the imported names would not be found
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name == "time" and node.attr in TIME_ATTRIBUTES | DATE_ATTRIBUTES:
                return True
            if name in ("date", "datetime") and node.attr in DATE_ATTRIBUTES:
                return True
    return False


@pytest.mark.parametrize(
    "line", ["at = time.time()", "f(now=time.time_ns)", "from time import time", "datetime.now()"]
)
def test_a_module_that_reads_the_date_is_found(line: str) -> None:
    assert reads_the_date(f"import time\n{line}\n")


def test_the_date_is_read_only_where_a_date_is_needed() -> None:
    modules = [p for package in PACKAGES for p in (ROOT / package).rglob("*.py")]
    modules += (ROOT / "src" / "inferd").glob("*.py")
    found = {str(p.relative_to(ROOT)) for p in modules if reads_the_date(p.read_text())}
    assert len(modules) > 100
    assert found == set(DATES)
