"""The command line with a daemon: in this process, through pipes, on a terminal, interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inferd import __version__
from inferd.backends.params.json_texts import SCHEMA_BYTES_MAX
from inferd.cli.inference.chat_commands import COMMANDS_HELP
from inferd.ipc.client import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd, inferd_process, on_terminal, terminal_of
from tests.echo import echo_model
from tests.tiny_gguf import write_tiny

CONFIG = echo_model("slow", slots=2, step_ms=20) + echo_model("slower", step_ms=200)
CONFIG += echo_model("heavy", load_ms=300)
LONG = "BEGIN " + "and so on " * 300
"""A text that takes the slow model a minute."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_tiny("llama", models).rename(models / "tiny.gguf")
    with running_daemon(CONFIG, models_dir=models) as daemon:
        yield daemon


@pytest.fixture
def socket(daemon: RunningDaemon) -> str:
    return daemon.socket


def lines(text: str) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in text.splitlines()]


# run.


def test_run_prints_the_answer(socket: str) -> None:
    result = inferd("run", "echo", "hello there", socket=socket)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "hello there\n", "")


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_run_reads_its_prompt_from_a_pipe(arguments: tuple[str, ...], socket: str) -> None:
    assert inferd("run", "echo", *arguments, socket=socket, text="piped\n").stdout == "piped\n"


def test_run_uses_its_prompt_and_standard_input(socket: str, tmp_path: Path) -> None:
    result = inferd("run", "echo", "summarise", socket=socket, text="a\nfile\n")
    assert result.stdout == "a\nfile\n\nsummarise\n"
    file = tmp_path / "file"
    file.write_text("in a file\n")
    for source in (file, Path("/dev/null")):
        with (
            source.open("rb") as stdin,
            inferd_process("run", "echo", "summarise", socket=socket, stdin=stdin) as process,
        ):
            text = "in a file\n\n" if source == file else ""
            assert process.communicate(timeout=60)[0].decode() == f"{text}summarise\n"


def test_run_reads_a_json_schema_from_a_file(socket: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    result = inferd("run", "echo", "x", "--json-schema", str(file), "--json", socket=socket)
    assert "json-schema" in str(lines(result.stdout)[-1]["metadata"])
    for content, status in (('{"type": "nonsense"}', 1), (None, 2)):
        file.unlink() if content is None else file.write_text(content)
        result = inferd("run", "echo", "x", "--json-schema", str(file), socket=socket)
        assert result.exit_code == status and "schema" in result.stderr


def test_run_measures_a_schema_in_bytes(socket: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    for begin in ("", "x"):  # a character of three bytes ends at the bound, or lies across it
        file.write_text(begin + (SCHEMA_BYTES_MAX // 3 + 1) * "€")
        result = inferd("run", "echo", "x", "--json-schema", str(file), socket=socket)
        assert result.exit_code == 2 and f"{SCHEMA_BYTES_MAX} bytes" in result.stderr


def test_run_collects_repeated_options(socket: str) -> None:
    repeated = ("-o", "stop=l", "-o", 'stop=["e"]', "-o", "n-predict=1", "-o", "n-predict=9")
    assert inferd("run", "echo", "hello", *repeated, socket=socket).stdout == "h\n"
    assert inferd("run", "echo", "all", *repeated, socket=socket).stdout == "a\n"


def test_run_writes_json_lines_and_then_the_metadata(socket: str) -> None:
    result = inferd("run", "echo", "grüß dich", "--json", "--stats", socket=socket)
    *pieces, last = lines(result.stdout)
    assert "".join(str(piece["text"]) for piece in pieces) == "grüß dich"
    assert isinstance(last["metadata"], dict) and last["metadata"]["stop_reason"] == "eos"
    assert result.stderr.startswith("prompt ") and "stopped by eos" in result.stderr


def test_run_passes_its_parameters_on(socket: str) -> None:
    cut = inferd("run", "echo", "hello", "--n-predict", "2", socket=socket)
    assert cut.stdout == "he\n"
    stopped = inferd("run", "echo", "hello", "-o", "stop=l", "--temp", "0", socket=socket)
    assert stopped.stdout == "he\n"
    priority = inferd("run", "echo", "hello", "--priority", "urgent", socket=socket)
    assert priority.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "eco", "x"), "did you mean 'echo'"),
        (("run", "echo", "x", "-o", "topk=1"), "did you mean 'top-k'"),
        (("run", "echo", "x", "--temp", "1000"), "outside 0 … 100"),
        (("show", "nope"), "there is no model 'nope'"),
        (("unload", "nope"), "there is no model 'nope'"),
        (("cancel", "nope"), "you have no session 'nope'"),
    ],
)
def test_a_refusal_is_a_sentence_with_a_hint(
    arguments: tuple[str, ...], sentence: str, socket: str
) -> None:
    result = inferd(*arguments, socket=socket)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("inferd: ") and sentence in result.stderr
    assert result.stderr.count("\n") == 2


def test_a_refusal_of_a_stream_is_json_when_asked_for(socket: str) -> None:
    result = inferd("run", "nope", "x", "--json", socket=socket)
    assert document(result)["error"]["name"] == "ModelNotFound"


def test_a_closed_pipe_ends_the_run_quietly(socket: str) -> None:
    with inferd_process("run", "slow", LONG, socket=socket) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"B"
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (141, b"")
    assert document(inferd("ps", "--json", socket=socket))["tasks"] == []


def test_ctrl_c_ends_the_run_and_its_turn(socket: str) -> None:
    with inferd_process("run", "slow", LONG, socket=socket) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"B"
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (130, b"")
    assert document(inferd("ps", "--json", socket=socket))["tasks"] == []


def test_a_terminal_gets_a_bar_for_a_long_load_and_a_pipe_gets_none(socket: str) -> None:
    with on_terminal("run", "heavy", "hello", socket=socket, TERM="xterm") as terminal:
        assert "loading heavy" in terminal.until("hello\r\n")
        assert terminal.process.wait(60) == 0
    piped = inferd("run", "heavy", "hello", socket=socket)
    assert (piped.stdout, piped.stderr) == ("hello\n", "")


@pytest.mark.parametrize("job", ["foreground", "background"])
def test_only_a_foreground_job_draws_a_bar_on_its_terminal(socket: str, job: str) -> None:
    inferd("unload", "heavy", socket=socket)
    command = f"{sys.executable} -m inferd load heavy"
    script = command if job == "foreground" else f"{command} & wait"
    shell = f"os.execvp('bash', ['bash', '-c', 'set -m; {script}; echo end'])"
    code = f"import fcntl, os, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{shell}"
    environ = {"INFERD_SOCKET": socket, "TERM": "xterm"}
    with terminal_of([sys.executable, "-c", code], environ) as terminal:
        assert ("loading heavy" in terminal.until("end\r\n")) == (job == "foreground")
    assert "heavy" in inferd("ps", socket=socket).stdout


def test_a_run_without_a_prompt_on_a_terminal_is_a_chat(socket: str, tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    with on_terminal("run", "echo", "-o", "stop=l", socket=socket, **home) as terminal:
        assert "/help lists the commands" in terminal.until(">>> ")
        terminal.type("hello\n")
        assert terminal.until(">>> ").endswith("he\r\n>>> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    with on_terminal("run", "echo", "--raw", socket=socket) as terminal:
        assert "inferd chat MODEL" in terminal.until("chat MODEL`")
        assert terminal.process.wait(60) == 2


# chat.


def test_chat_on_a_terminal(socket: str, tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    with on_terminal("chat", "slower", socket=socket, **home) as terminal:
        assert "/help lists the commands" in terminal.until(">>> ")
        terminal.type("hello\n")
        assert terminal.until(">>> ").count("hello") == 2  # as typed, and the answer
        terminal.type(f"BEGIN {'and so on ' * 6}END\n")
        terminal.until("END")
        terminal.until("BEGIN")
        terminal.interrupt()
        assert "stopped" in terminal.until(">>> ")
        terminal.interrupt()
        assert "Ctrl-D ends the chat" in terminal.until(">>> ")
        terminal.type("again\n")
        assert terminal.until(">>> ").count("again") == 2
        terminal.type("/reset\n")
        assert "cleared" in terminal.until(">>> ")
        terminal.type("/help\n")
        assert "/exit" in terminal.until(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    (history,) = (tmp_path / "inferd").iterdir()
    assert "again\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_chat_keeps_no_history_with_no_history(socket: str, tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    with on_terminal("chat", "echo", "--no-history", socket=socket, **home) as terminal:
        terminal.until(">>> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


def test_chat_without_a_terminal_runs_one_turn_per_line(socket: str) -> None:
    text = "one\n\ntwo\n/reset\n/exit\nnever said\n"
    result = inferd("chat", "echo", socket=socket, text=text)
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\n")
    assert result.stderr == "cleared\n"


def test_chat_on_a_terminal_prints_a_note_about_dropped_turns(socket: str, tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    options = ("-o", "ctx-size=160", "-o", "n-predict=20", "-o", "ignore-eos=true")
    with on_terminal("chat", "tiny", *options, socket=socket, **home) as terminal:
        shown = terminal.until(">>> ")
        for number in range(6):
            assert "the context was full" not in shown or number > 1
            terminal.type(f"Please tell me fact number {number} about the sea.\n")
            shown += terminal.until(">>> ")
        assert "the model no longer reads" in shown
        assert "inferd: " not in shown
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0


def test_an_answer_that_ends_by_a_full_context_says_so(socket: str) -> None:
    options = ("-o", "ctx-size=160", "-o", "ignore-eos=true", "-o", "overflow=error")
    for more, stderr in (
        (("--n-predict", "5"), ""),
        ((), "the answer was cut off: the context of 160 tokens is full (-o ctx-size=N"),
    ):
        with inferd_process("run", "tiny", "hello", *options, *more, socket=socket) as process:
            _, text = process.communicate(timeout=60)
        assert process.returncode == 0
        assert text.decode().startswith(stderr) and len(text.splitlines()) == bool(stderr), text


def test_an_unknown_command_in_a_chat_is_named(socket: str) -> None:
    text = "/rest\n/what\n/usr/bin is a path\n/help\n"
    result = inferd("chat", "echo", socket=socket, text=text)
    assert (result.exit_code, result.stdout) == (0, "/usr/bin is a path\n")
    assert result.stderr == (
        "inferd: there is no command /rest; did you mean '/reset'?\n  /help lists the commands\n"
        "inferd: there is no command /what\n  /help lists the commands\n"
        f"{COMMANDS_HELP}\n"
    )


def test_chat_says_whether_its_session_is_new(socket: str) -> None:
    seen = [
        inferd("chat", "echo", "--session", "diary", *more, socket=socket, text="/exit\n").stderr
        for more in ((), (), ("--system", "Be brief."))
    ]
    assert seen == [
        "the session diary is new\n",
        "the session diary is continued\n",
        "the session diary is continued; --system applies after /reset\n",
    ]


def test_chat_continues_after_a_failed_turn(socket: str) -> None:
    result = inferd("chat", "echo", "--json", socket=socket, text="x" * 5000 + "\nsecond\n")
    answers = lines(result.stdout)
    assert isinstance(answers[0]["error"], dict) and answers[0]["error"]["name"] == "PromptTooLong"
    assert "".join(str(a.get("text", "")) for a in answers) == "second"
    assert result.exit_code == 0 and "inferd: " in result.stderr


# Models.


def test_models_and_show(socket: str) -> None:
    rows = inferd("models", socket=socket).stdout.splitlines()
    assert rows[0].split() == ["NAME", "STATE", "SIZE", "BACKEND", "FILE"]
    assert [row.split()[0] for row in rows[1:]] == ["echo", "heavy", "slow", "slower", "tiny"]
    names = [m["name"] for m in document(inferd("models", "--json", socket=socket))["models"]]
    assert names == ["echo", "heavy", "slow", "slower", "tiny"]
    assert document(inferd("show", "slow", "--json", socket=socket))["options"] == {"slots": 2}
    assert "slots   2" in inferd("show", "slow", socket=socket).stdout


def test_load_ps_and_unload(socket: str) -> None:
    loaded = inferd("load", "slow", socket=socket)
    assert loaded.stdout == "slow is loaded: 2 sessions at once, 4096 tokens each\n"
    assert document(inferd("load", "slow", "--json", socket=socket))["slots"] == 2
    models = document(inferd("ps", "--json", socket=socket))["models"]
    assert "slow" in [m["name"] for m in models]
    heads = inferd("ps", socket=socket).stdout.splitlines()[0].split()
    assert heads[:4] == ["NAME", "ID", "SIZE", "MEMORY"]
    assert inferd("unload", "slow", socket=socket).stdout == "slow is unloaded\n"
    models = document(inferd("ps", "--json", socket=socket))["models"]
    assert "slow" not in [m["name"] for m in models]


def test_load_sets_the_context_size_or_says_that_it_is_not_applied(socket: str) -> None:
    inferd("unload", "slower", "--force", socket=socket)
    loaded = inferd("load", "slower", "--ctx-size", "8192", socket=socket)
    assert loaded.stdout == "slower is loaded: 4 sessions at once, 8192 tokens each\n"
    assert loaded.stderr == ""
    again = inferd("load", "slower", "--ctx-size", "10000", socket=socket)
    assert again.exit_code == 0 and "8192 tokens each\n" in again.stdout
    assert again.stderr == (
        "ctx-size=10000 is not applied: slower has 8192"
        " (`inferd unload slower` first, or set it in the configuration: [models.slower])\n"
    )
    inferd("unload", "slower", socket=socket)


def test_run_requests_a_context_size_or_says_that_it_is_not_applied(socket: str) -> None:
    inferd("unload", "echo", "--force", socket=socket)
    short = ("-o", "n-predict=9")
    first = inferd("run", "echo", "x" * 4200, "-o", "ctx-size=12000", *short, socket=socket)
    assert (first.exit_code, first.stderr) == (0, "")
    larger = inferd("run", "echo", "hello", "-o", "n_ctx=20000", "-o", "temp=0", socket=socket)
    assert larger.stdout == "hello\n"
    assert larger.stderr.startswith("n_ctx=20000 is not applied: echo has 12000 (")
    smaller = inferd("run", "echo", "x" * 200, "-o", "ctx-size=100", socket=socket)
    assert smaller.exit_code == 1 and "the context holds 99" in smaller.stderr
    inferd("unload", "echo", "--force", socket=socket)


def test_a_model_parameter_out_of_its_range_is_refused(socket: str) -> None:
    result = inferd("run", "echo", "x", "-o", "ctx-size=-5", socket=socket)
    assert result.exit_code == 1 and "ctx-size: -5 is outside" in result.stderr


def test_a_model_in_use_is_unloaded_by_force_only(socket: str) -> None:
    with Client(socket) as client, client.session("slow"):
        refused = inferd("unload", "slow", socket=socket)
        assert refused.exit_code == 4 and "in use" in refused.stderr
        assert document(inferd("unload", "slow", "--force", "--json", socket=socket)) == {
            "unloaded": "slow"
        }


def test_rm_refuses_a_loaded_model_unless_forced(socket: str) -> None:
    tiny = Path(document(inferd("show", "tiny", "--json", socket=socket))["file"])
    file = tiny.with_name("other.gguf")
    shutil.copy(tiny, file)
    arguments = ("rm", "other", "--yes", "--models-dir", str(tiny.parent))
    with Client(socket) as client, client.session("other"):
        refused = inferd(*arguments, socket=socket)
        assert refused.exit_code == 1 and "other is ready" in refused.stderr
        assert file.exists()
        assert inferd(*arguments, "--force", socket=socket).exit_code == 0
    assert not file.exists()
    assert "other" not in inferd("models", socket=socket).stdout


# Looking in and steering.


def test_the_version_shows_that_of_the_running_daemon(socket: str) -> None:
    first, second = inferd("--version", socket=socket).stdout.splitlines()
    assert first == f"inferd {__version__}, protocol 1.1"
    assert f"(inferd/{__version__} running at {socket})" in second


def test_status(socket: str, daemon: RunningDaemon) -> None:
    text = inferd("status", socket=socket).stdout
    assert f"at {socket}, pid {daemon.pid}, up for " in text and "sessions: " in text
    assert document(inferd("status", "--json", socket=socket))["pid"] == daemon.pid


@pytest.mark.parametrize("by", ["number", "id"])
def test_an_active_session_is_listed_and_cancelled(by: str, socket: str) -> None:
    name = f"job-{by}"
    arguments = ("run", "slow", LONG, "--session", name, "--priority", "low")
    with inferd_process(*arguments, socket=socket) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"B"
        listed = inferd("ps", socket=socket).stdout
        assert name in listed and "running" in listed and "low" in listed
        heads, task = inferd("queue", socket=socket).stdout.splitlines()
        assert heads.split()[:4] == ["MODEL", "POSITION", "STATE", "SESSION"]
        assert name in task and "running" in task and task.split()[1] == "-"
        (session,) = document(inferd("ps", "--json", socket=socket))["sessions"]
        wanted = name if by == "id" else str(session["context"])
        assert inferd("cancel", wanted, socket=socket).stdout == "cancelled\n"
        process.wait(60)
    assert document(inferd("ps", "--json", socket=socket))["tasks"] == []
    assert document(inferd("queue", "--all", "--json", socket=socket)) == {"tasks": []}


def test_dormant_sessions_are_listed(socket: str) -> None:
    inferd("run", "echo", "hello", "--session", "asleep", socket=socket)

    heads, *rows = inferd("sessions", "--all", socket=socket).stdout.splitlines()
    assert heads.split()[:4] == ["ID", "SESSION", "USER", "MODEL"]
    [row] = [row for row in rows if row.split()[0] == "asleep"]
    assert row.split()[1:5] == ["-", str(os.getuid()), "echo", "dormant"]
    assert " yes " in row, "it is on disk"
    listed = document(inferd("sessions", "--json", socket=socket))["sessions"]
    assert "asleep" in [session["session_id"] for session in listed]
    assert "asleep" not in inferd("ps", socket=socket).stdout


def test_a_session_is_deleted_by_its_id(socket: str) -> None:
    assert inferd("run", "echo", "secret", "--session", "diary", socket=socket).exit_code == 0
    assert inferd("rm-session", "diary", socket=socket).stdout == "deleted\n"
    assert document(inferd("rm-session", "diary", "--json", socket=socket)) == {"deleted": False}


def test_a_session_is_titled_kept_and_restored(socket: str) -> None:
    assert inferd("run", "echo", "why blue", "--session", "sky", socket=socket).exit_code == 0
    edited = inferd("edit-session", "sky", "--title", "Sky", "--keep", socket=socket)
    assert edited.stdout == "Sky, kept\n"
    heads, row = inferd("sessions", "--search", "BLUE", socket=socket).stdout.splitlines()
    assert heads.split()[-3:] == ["DELETED", "IN", "TITLE"]
    assert row.split()[0] == "sky" and row.split()[-2:] == ["kept", "Sky"]
    assert document(inferd("sessions", "--deleted", "--json", socket=socket)) == {"deletions": []}
    removed = inferd("rm-session", "sky", "--undo", "60", socket=socket)
    assert "`inferd restore-session sky`" in removed.stdout
    assert inferd("restore-session", "sky", socket=socket).stdout == "restored\n"
    found = document(inferd("edit-session", "sky", "--no-keep", "--json", socket=socket))
    assert (found["session"]["kept"], found["session"]["title"]) == (False, "Sky")
    assert inferd("rm-session", "sky", socket=socket).stdout == "deleted\n"


def test_a_prompt_that_is_too_long_is_refused_in_words_for_people(socket: str) -> None:
    found = inferd("run", "echo", "-", socket=socket, text="x" * 1_100_000)
    assert found.exit_code == 1
    assert "1048576 are allowed" in found.stderr and "send less" in found.stderr
    assert "frame" not in found.stderr and "set_input" not in found.stderr


def test_stop_waits_until_the_daemon_has_ended() -> None:
    with running_daemon() as daemon:
        result = inferd("stop", socket=daemon.socket)
        assert result.exit_code == 0 and "has ended" in result.stderr
        assert daemon.process is not None and daemon.process.wait(60) == 0
        assert not Path(daemon.socket).exists()
        assert inferd("stop", socket=daemon.socket).exit_code == 3


def test_stop_has_a_time_limit_and_now_ends_running_turns() -> None:
    with running_daemon(CONFIG) as daemon:
        with inferd_process("run", "slow", LONG, socket=daemon.socket) as process:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"B"
            waited = inferd("stop", "--wait", "0", socket=daemon.socket)
            assert waited.exit_code == 4 and "has not ended within 0 s" in waited.stderr
            assert inferd("stop", "--now", socket=daemon.socket).exit_code == 0
            assert process.wait(60) == 3
        assert daemon.process is not None
        assert daemon.process.wait(60) != 0


def test_ctrl_d_and_a_lost_daemon_end_a_chat() -> None:
    with running_daemon() as daemon:
        command = ("chat", "echo", "--resume-timeout", "0.01")
        with inferd_process(*command, socket=daemon.socket, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"hello\n"
            daemon.kill()
            out, errors = process.communicate(b"again\n", timeout=60)
        assert (process.returncode, out) == (3, b""), "no part of an answer came"
        assert b"inferd: " in errors and b"Traceback" not in errors


def test_two_words_of_a_prompt_are_a_usage_error(socket: str) -> None:
    assert inferd("run", "echo", "two", "words", socket=socket).exit_code == 2


# swap.


def test_swap_prints_its_mode() -> None:
    config = '[models.live]\nbackend = "echo"\n[models.one]\nbackend = "echo"\n'
    config += '[models.one.echo]\nvariant = "one"\n'
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        client.load_by_name("live")
        arguments = ("swap", "live", "--to", "one")
        done = document(inferd(*arguments, "--mode", "drain", "--json", socket=daemon.socket))
        assert done == {
            "swapped": "live",
            "fingerprint": "echo-1one",
            "previous_fingerprint": "echo-1",
            "mode": "drain",
            "nodes": [],
            "unreachable": [],
        }
        said = inferd("swap", "live", "--to", "echo", socket=daemon.socket).stdout
        assert said == "live is now echo (echo-1, migrate)\n"


def test_the_end_of_a_swap_and_what_a_name_stands_for() -> None:
    config = '[models.live]\nbackend = "echo"\n[models.one]\nbackend = "echo"\n'
    config += '[models.one.echo]\nvariant = "one"\n'
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        client.load_by_name("live")

        def said(*arguments: str) -> str:
            result = inferd(*arguments, socket=daemon.socket)
            assert result.exit_code == 0, result.stderr
            return str(result.stdout)

        assert said("ps").splitlines()[1].endswith("  echo") and "swapped" not in said(
            "show", "live"
        )
        said("swap", "live", "--to", "one", "--mode", "drain")
        assert said("ps").splitlines()[1].endswith("  echo, swapped to one")
        assert "one; `inferd swap live --undo` ends it" in said("show", "live")
        own = "live is again its own model (echo-1, drain)\n"
        assert said("swap", "live", "--undo", "--mode", "drain") == own
        assert said("ps").splitlines()[1].endswith("  echo")
        said("swap", "live", "--to", "one", "--mode", "drain")
        assert said("swap", "live", "--to", "live", "--mode", "drain") == own
        for given in ((), ("--to", "one", "--undo")):
            refused = inferd("swap", "live", *given, socket=daemon.socket)
            assert refused.exit_code == 2 and "one of --to MODEL and --undo" in refused.stderr


def test_a_failed_command_prints_a_hint_for_people_and_json_the_hint_for_programs(
    socket: str,
) -> None:
    long = "x" * 2_000_000
    printed = inferd("run", "echo", socket=socket, text=long)
    assert printed.exit_code == 1 and printed.stderr.endswith("\n  send less\n")
    reported = inferd("run", "echo", "--json", socket=socket, text=long)
    assert "client.set_input(" in document(reported)["error"]["hint"]
