"""Control characters in texts that users choose do not reach the terminal of an operator."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from inferd.testing import RunningDaemon
from tests.daemon.command_line import document, inferd
from tests.daemon.other_users import ADA, client_of, daemon_for_all
from tests.raw import Closed, RawClient

WILD = "x\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\u202etxt.exe"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
COMMANDS = ("ps", "sessions --all", "queue --all", "status", "models", "stats", "logs")
CONFIG = (
    "log-file = '{}'\nlog-level = 'debug'\n[access.all]\nallow = ['use', 'manage', 'see-all']\n"
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with a log of attacks: a session's id, a model's name, a client's software."""
    log = tmp_path_factory.mktemp("log") / "log"
    with daemon_for_all(CONFIG.format(log)) as running, client_of(running, ADA) as ada:
        graph = ada.call("load_by_name", name="echo")["graph"]
        ada.call("init_execution_context_with_session_id", graph=graph, session_id=WILD)
        _greet_with(running, WILD)
        yield running


def _greet_with(daemon: RunningDaemon, software: str) -> None:
    with RawClient(daemon.socket, hello=False) as client:
        client.write([0, {"protocol": [1, 0], "software": software}])
        client.write([99])
        with pytest.raises(Closed):
            while True:
                client.read_message()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_in_a_pipe_has_no_control_characters(daemon: RunningDaemon, command: str) -> None:
    result = inferd(*command.split(), socket=daemon.socket)
    assert result.exit_code == 0, result.output
    assert CONTROLS.findall(result.output) == []


def test_an_id_is_shown_with_its_escapes_and_is_unchanged_in_json(daemon: RunningDaemon) -> None:
    assert r"x\u001b]0;owned" in inferd("sessions", "--all", socket=daemon.socket).stdout
    found = document(inferd("sessions", "--all", "--json", socket=daemon.socket))
    assert [session["session_id"] for session in found["sessions"]] == [WILD]


@pytest.mark.parametrize("command", ["show", "load", "unload", "cancel", "pin", "rm-session"])
def test_a_message_about_a_name_has_no_control_characters(
    daemon: RunningDaemon, command: str
) -> None:
    result = inferd(command, WILD, socket=daemon.socket)
    assert CONTROLS.findall(result.output) == []


def test_the_log_on_a_console_has_no_control_characters(daemon: RunningDaemon) -> None:
    assert CONTROLS.findall(daemon.log) == []
