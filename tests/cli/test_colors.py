"""Colors: none with NO_COLOR (no-color.org), and no escape sequence at all on a dumb terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inferd.testing import RunningDaemon
from tests.daemon.command_line import Terminal, on_terminal

XTERM = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80", "LINES": "24"}
PLAIN = {"NO_COLOR": "", **XTERM}
CASES = {"none": {"NO_COLOR": "1", **XTERM}, "dumb": {"NO_COLOR": "", "TERM": "dumb"}}
CONFIG = """
[models.heavy]
backend = "echo"
[models.heavy.echo]
load_ms = 300
[models.fails]
file = "/nonexistent/model.gguf"
"""
COMMANDS = (
    "--help",
    "run --help",
    "--version",
    "ps",
    "models",
    "show echo",
    "status",
    "stats",
    "sessions",
    "queue",
    "parameters temp",
    "log-level",
    "config show",
    "logs -n 5",
    "run heavy hello --stats",
    "template echo hello",
    "embed echo hello",
    "doctor",
    "top --once",
    # Errors.
    "show nix",
    "load fails",
    "nonsense",
    "run echo x --option y",
)


def colors_in(text: str) -> set[str]:
    """Return the codes of SGR sequences in *text* that choose a color; 39 and 49 choose none."""
    found = set()
    for parameters in re.findall(r"\x1b\[([\d;:]*)m", text):
        found |= {c for c in re.split("[;:]", parameters) if re.fullmatch(r"[34][0-8]|9\d|10\d", c)}
    return found


def output_of(command: str, daemon: RunningDaemon, environ: dict[str, str]) -> str:
    """Return all that a command writes to a terminal."""
    with on_terminal(*command.split(), socket=daemon.socket, **environ) as terminal:
        text = terminal.until_end()
        assert text
        return text


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_colors_its_output_where_none_is_wanted(
    command: str, daemon: RunningDaemon
) -> None:
    assert not colors_in(output_of(command, daemon, CASES["none"]))
    assert "\x1b" not in output_of(command, daemon, CASES["dumb"])


def test_errors_and_findings_are_colored_where_nothing_forbids_it(daemon: RunningDaemon) -> None:
    """An empty NO_COLOR forbids nothing."""
    for command in ("show nix", "doctor"):
        assert colors_in(output_of(command, daemon, PLAIN)), command


def top_on_terminal(terminal: Terminal) -> str:
    text = terminal.until("sessions (")
    terminal.type("q")
    return text + terminal.until("\x1b[?1049l")


@pytest.mark.parametrize(("environ", "colored"), [(PLAIN, True), (CASES["none"], False)])
def test_the_screen_of_top_has_colors_only_where_they_are_wanted(
    environ: dict[str, str], colored: bool, daemon: RunningDaemon
) -> None:
    with on_terminal("top", socket=daemon.socket, **environ) as terminal:
        text = top_on_terminal(terminal)
    assert bool(colors_in(text)) == colored
    if not colored:
        assert re.search(r"\x1b\[[\d;]*\b7\b", text), "the selected row is reversed"
    else:
        rgb = set(re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", text))
        assert any(not red == green == blue for red, green, blue in rgb), "not only greys"


@pytest.mark.parametrize(
    ("environ", "colored"), [(PLAIN, True), *((case, False) for case in CASES.values())]
)
def test_the_log_on_a_terminal_has_colors_only_where_they_are_wanted(
    environ: dict[str, str], colored: bool, tmp_path: Path
) -> None:
    places = ("--state-dir", str(tmp_path), "--models-dir", str(tmp_path))
    with on_terminal("serve", *places, socket=str(tmp_path / "s"), **environ) as terminal:
        text = terminal.until("daemon.ready")
        terminal.type("\x03")
        text += terminal.until("daemon.stopped")
    assert bool(colors_in(text)) == colored
    assert colored or "\x1b[3" not in text
