"""The command line without a daemon: usage, sentences, exit statuses, pull and rm."""

from __future__ import annotations

import importlib.metadata
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main
from typer.core import TyperGroup

from inferd import __version__
from inferd.backends import errors
from inferd.backends.library import install_command
from inferd.backends.params import BY_NAME, PARAMETERS
from inferd.cli.app import exit_code
from inferd.cli.commands import _MODULES, OTHER_COMMANDS, meant_command
from inferd.cli.options import read_pairs
from inferd.cli.output import time_text
from inferd.daemon.config import sources
from inferd.daemon.config.sources import ConfigError
from inferd.daemon.printable import size_text
from inferd.ipc.paths import SYSTEM_SOCKET
from tests.daemon.command_line import document, inferd, inferd_process, on_terminal
from tools.man_pages import group_of_all_commands

MODEL = struct.pack("<4sIQQ", b"GGUF", 3, 1, 2) + bytes(100)
COMMANDS = {
    "serve", "run", "chat", "models", "show", "rm", "load", "unload", "ps", "cancel", "status",
    "stop", "pull", "queue", "rm-session", "pin", "unpin", "swap", "sessions", "template",
    "install-service", "uninstall-service", "add-adapter", "rm-adapter", "embed", "rerank",
    "infill",
    "parameters", "config", "doctor", "top", "stats", "drain", "logs", "log-level", "park", "start",
    "wasm", "nnrpc", "gateway", "fleet", "conformance", "states", "backup", "restore",
    "edit-session", "restore-session", "end-reasoning", "tune", "jobs", "usage",
}  # fmt: skip
CLIENT_COMMANDS = [
    ("run", "m", "p"), ("chat", "m"), ("models",), ("show", "m"), ("load", "m"), ("unload", "m"),
    ("ps",), ("cancel", "1"), ("park", "1"), ("status",), ("stop",),
    ("queue",), ("rm-session", "mine"), ("pin", "m"), ("unpin", "m"), ("sessions",),
    ("swap", "m", "--to", "n"), ("template", "m", "p"), ("rerank", "m", "q", "d"),
    ("infill", "m", __file__, "--at", "1"),
    ("add-adapter", "m", "style", "style.gguf"), ("rm-adapter", "m", "style"),
    ("top",), ("stats",), ("usage",), ("drain",), ("logs",), ("log-level",), ("conformance",),
    ("states",), ("states", "delete", "mine"),
    ("jobs",), ("jobs", "wait", "j"), ("jobs", "results", "j"), ("jobs", "cancel", "j"),
    ("jobs", "rm", "j"),
    ("edit-session", "mine"), ("restore-session", "mine"), ("end-reasoning", "mine"),
]  # fmt: skip


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv("INFERD_MODELS_DIR", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return folder


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("list", "models"), ("ls", "models"), ("lst", "models"), ("download", "pull"),
        ("generate", "run"), ("help", "--help"), ("shw", "show"), ("modls", "models"),
    ],
)  # fmt: skip
def test_an_unknown_command_gets_a_suggestion(word: str, meant: str) -> None:
    with inferd_process(word) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"No such command '{word}'. Did you mean '{meant}'?" in stderr.decode()


def test_words_of_other_programs_mean_commands_of_this_one() -> None:
    flags = {"--help", "--version"}
    assert set(OTHER_COMMANDS.values()) <= _MODULES.keys() | flags
    assert not _MODULES.keys() & OTHER_COMMANDS.keys()
    assert meant_command("xyzzy") == ""


def test_an_unknown_parameter_gets_a_suggestion() -> None:
    result = inferd("parameters", "temperture")
    assert result.exit_code == 2 and "did you mean 'temperature'?" in result.stderr


def test_the_help_lists_the_commands_and_the_exit_statuses() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        result = inferd(*arguments)
        assert result.exit_code == 0
        text = " ".join(result.stdout.split())
        assert all(f" {command} " in text for command in COMMANDS)
        assert "Exit status: 0 success; 1 the request was refused" in text and "3 no daemon" in text


def test_all_commands_except_serve_write_json_and_those_of_a_daemon_take_a_socket() -> None:
    commands = dict(group_of_all_commands().commands)
    assert set(commands) == COMMANDS
    for above in ("config", "wasm", "fleet"):
        group = commands.pop(above)
        assert isinstance(group, TyperGroup)
        commands |= {f"{above} {name}": command for name, command in group.commands.items()}
    for above in ("states", "jobs"):  # commands of their own, too
        group = commands[above]
        assert isinstance(group, TyperGroup)
        commands |= {f"{above} {name}": command for name, command in group.commands.items()}
    for name, command in commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        silent = {"serve", "wasm run", "nnrpc", "gateway"}
        silent |= {"fleet node", "fleet serve", "fleet remove"}
        assert ("--json" in options) == (name not in silent), name
        alone = name in ("parameters", "backup", "restore", "tune") or name.endswith("-service")
        alone = alone or name.startswith("config ") or name in ("fleet init", "fleet remove")
        assert ("--socket" in options) == (not alone), name


@pytest.mark.parametrize("arguments", CLIENT_COMMANDS, ids=lambda a: a[0])
def test_without_a_daemon_the_error_has_a_hint(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # `logs` would show the log of a daemon
    result = inferd(*arguments)
    assert result.exit_code == 3
    assert result.stderr.startswith("inferd: no daemon answers at /nonexistent/inferd.sock")
    assert "start it with `inferd start`" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_error_is_printed_as_json_too(place: str) -> None:
    result = inferd("--json", "ps") if place == "before" else inferd("ps", "--json")
    assert result.exit_code == 3
    assert document(result)["error"]["name"] == "ConnectionLost"


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_socket_is_named_before_or_after_the_command(place: str) -> None:
    socket = ("--socket", "/other.sock")
    result = inferd(*socket, "ps") if place == "before" else inferd("ps", *socket)
    assert "at /other.sock" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("no-such-command",), ("run",), ("ps", "--no-such-option"), ("run", "m", "p", "--option", "x"),
     ("run", "m", "p", "--priority", "huge"), ("serve", "--set", "x"), ("stop", "--wait", "-1")],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_has_its_own_exit_status(arguments: tuple[str, ...]) -> None:
    result = inferd(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidArgument("x"), 1),
        (ConfigError(["x"]), 2),
        (errors.ConnectionLost("x"), 3),
        (errors.Busy("x"), 4),
        (errors.ShuttingDown("x"), 4),
        (errors.Timeout("x"), 4),
        (errors.ModelNotFound("x"), 1),
        (errors.InferdError("x"), 1),
    ],
)
def test_an_errors_exit_status(error: errors.InferdError, status: int) -> None:
    assert exit_code(error) == status


def test_an_internal_error_is_a_sentence_unless_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.cli.monitoring.status_commands.OneShotClient", lambda socket: 1 / 0)
    result = inferd("ps")
    assert result.exit_code == 1
    assert result.stderr.startswith("inferd: internal error: ZeroDivisionError: ")
    monkeypatch.setenv("INFERD_DEBUG", "1")
    assert isinstance(inferd("ps").exception, ZeroDivisionError)


# Versions and what is imported.


def test_the_version_without_a_daemon_shows_the_installed_engine() -> None:
    result = inferd("--version")
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first == f"inferd {__version__}, protocol 1.1"
    assert second.startswith("llama.cpp ") and second.endswith(", no daemon running)")
    assert document(inferd("--version", "--json"))["inferd"] == __version__
    assert importlib.metadata.version("inferd") == __version__


def test_the_version_is_shown_whatever_the_socket() -> None:
    result = inferd("--version", "--socket", "/" + "x" * 300)
    assert result.exit_code == 0 and "no daemon running" in result.stdout


def test_the_version_without_an_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert inferd("--version").stdout.splitlines()[1].startswith("engine not installed")


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_loads_nothing_heavy() -> None:
    code = """if True:
        import sys, inferd.cli
        heavy = {"rich", "numpy", "llama_cpp", "structlog", "psutil", "inferd.ipc.client", "anyio",
                 "inferd.daemon.config.settings", "inferd.daemon.core"}
        sys.exit(", ".join(heavy & set(sys.modules)))
    """
    assert run_python(code).stderr.strip() == ""


def test_ps_loads_no_other_command_and_nothing_that_it_does_not_need() -> None:
    code = """if True:
        import sys
        from inferd.cli import main
        sys.argv = ["inferd", "--socket", "/nonexistent/s", "ps"]
        try:
            main()
        except SystemExit:
            pass
        unused = {"rich", "numpy", "llama_cpp", "structlog", "psutil", "pydantic", "email.message",
                  "importlib.metadata", "inferd.backends.params",
                  "inferd.daemon.config.settings", "inferd.daemon.core"}
        commands = {m for m in sys.modules if m.startswith("inferd.cli.")}
        other = ("inference", "models", "operations", "monitoring.top", "monitoring.stats")
        used = {m for m in commands if m.startswith(tuple(f"inferd.cli.{o}" for o in other))}
        print(", ".join(sorted(used | unused & set(sys.modules))))
    """
    result = run_python(code)
    assert "no daemon answers at /nonexistent/s" in result.stderr
    assert result.stdout.strip() == ""


def test_the_daemon_loads_nothing_that_only_hints_need() -> None:
    code = """if True:
        import sys
        sys.modules["rich"] = None
        import inferd.cli.operations.serve, inferd.daemon.app
        print(", ".join({"importlib.metadata", "email.message"} & set(sys.modules)))
    """
    assert run_python(code).stdout.strip() == ""


def test_serve_without_the_engine_says_what_to_install(tmp_path: Path) -> None:
    code = """if True:
        import sys
        sys.modules["structlog"] = None
        from inferd.cli import main
        main()
    """
    result = run_python(code, "serve", "--socket", str(tmp_path / "s"))
    assert result.returncode == 1
    assert result.stderr.startswith("inferd: inferd serve needs the engine")
    assert install_command("daemon") in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_prints_every_error_of_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[daemon]\nsesions-max = 1\n")
    result = inferd(
        "serve", "--config", str(file), "--cores", "-1", "--set", "shutdown-grace-s=long"
    )
    assert result.exit_code == 2
    assert "sesions-max: unknown key; did you mean 'sessions-max'?" in result.stderr
    assert "--cores: -1 is outside 0 … 4096" in result.stderr
    assert "--set shutdown-grace-s: 'long' is not a number" in result.stderr


# Small things.


def test_an_options_value_is_json_or_else_text() -> None:
    pairs = ["top-k=3", 'stop=["a","b"]', "stop=x=y", "ignore-eos=true", "name="]
    assert read_pairs(pairs[:2]) == {"top-k": 3, "stop": ["a", "b"]}
    assert read_pairs(pairs[2:]) == {"stop": "x=y", "ignore-eos": True, "name": ""}
    for bad in ("x", "=1"):
        with pytest.raises(typer.BadParameter):
            read_pairs([bad])


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (98_362_432, "98.4 MB"), (1e12, "1 TB"),
     (2.5e15, "2500 TB"), (10_960_000_000, "10.96 GB"), (11_040_000_000, "11.04 GB"),
     (10**10, "10 GB"), (-5, "0 B")],
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


# pull and rm.


def test_pull_accepts_a_file_and_prints_the_result(models: Path, tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(MODEL)
    result = inferd("pull", str(tmp_path / "own.gguf"), "--name", "mine")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{models / 'mine.gguf'}: 124 B, SHA-256 ")
    assert 'inferd run mine "Say hello."' in result.stderr
    again = inferd("pull", str(tmp_path / "own.gguf"), "--name", "mine")
    assert again.exit_code == 0 and "up to date, 124 B" in again.stdout
    (tmp_path / "own.gguf").write_bytes(MODEL + b"more")
    other = inferd("pull", str(tmp_path / "own.gguf"), "--name", "mine")
    assert other.exit_code == 1 and "exists already, with other contents" in other.stderr
    forced = inferd("pull", str(tmp_path / "own.gguf"), "--name", "mine", "--force", "--json")
    assert document(forced)["name"] == "mine"


def test_pull_suggests_a_name_for_a_typo(models: Path) -> None:
    result = inferd("pull", "smolm2")
    assert result.exit_code == 1
    assert "did you mean 'smollm2'?" in result.stderr


def test_rm_asks_and_removes(models: Path) -> None:
    for name in ("m.gguf", "m.LICENSE", "other.gguf"):
        (models / name).write_bytes(MODEL)
    for answer in ("n\n", ""):
        result = inferd("rm", "m", text=answer)
        assert result.exit_code == 1 and (models / "m.gguf").exists()
        assert "Remove m (248 B)?" in result.stderr
    result = inferd("rm", "m", text="y\n")
    assert result.exit_code == 0 and result.stdout.endswith("m is removed: 248 B\n")
    assert [path.name for path in models.iterdir()] == ["other.gguf"]
    removed = document(inferd("rm", "other", "--yes", "--json"))
    assert removed == {"removed": [str(models / "other.gguf")], "size_bytes": len(MODEL)}


def test_ctrl_c_at_a_question_is_the_exit_status_of_an_interrupt(models: Path) -> None:
    (models / "m.gguf").write_bytes(MODEL)
    with on_terminal("rm", "m", socket="/nonexistent/inferd.sock") as terminal:
        terminal.until("[y/N]: ")
        terminal.interrupt()
        assert "Aborted" not in terminal.until_end()
        assert terminal.process.wait(60) == 130
    assert (models / "m.gguf").exists()


def test_rm_removes_nothing_outside_the_models_directory(models: Path, tmp_path: Path) -> None:
    outside = tmp_path / "precious.gguf"
    outside.write_bytes(MODEL)
    (models / "link.gguf").symlink_to(outside)
    for name in ("../precious", "precious", str(outside)):
        assert inferd("rm", name, "--yes").exit_code == 1
    assert inferd("rm", "link", "--yes").exit_code == 0
    assert outside.exists() and not (models / "link.gguf").is_symlink()


def test_parameters_are_listed_from_their_table_and_explained_in_any_spelling() -> None:
    listed = inferd("parameters").stdout.splitlines()
    assert listed[0].split() == ["PARAMETER", "LEVEL", "TYPE", "DEFAULT"]
    assert [line.split()[0] for line in listed[1:]] == [p.name for p in PARAMETERS]
    said = inferd("parameters", "temperature", "n_predict").stdout
    for name in ("temp", "n-predict"):
        assert f"{name}: {BY_NAME[name].doc}" in said
    assert "0 … " in said and "aliases: temperature" in said
    assert list(document(inferd("parameters", "top_k", "--json"))["properties"]) == ["top-k"]
    unknown = inferd("parameters", "top-kk")
    assert unknown.exit_code == 2 and "did you mean 'top-k'?" in unknown.stderr


def test_the_flags_of_parameters_have_their_help_from_the_table() -> None:
    text = " ".join(inferd("run", "--help").stdout.split())
    for name in ("temp", "n-predict"):
        assert " ".join(BY_NAME[name].doc.replace("`", "").split())[:40] in text.replace("`", "")


@pytest.mark.parametrize("level", ["warn", "WARNING", "Err"])
def test_the_words_of_an_option_are_read_in_any_case(level: str) -> None:
    """The logs are looked for only if the option is valid."""
    read, refused = (inferd("logs", "--level", word) for word in (level, f"{level}x"))
    assert "is not one of" not in read.output and read.exit_code != 2
    assert "is not one of" in refused.output and refused.exit_code == 2


def test_logs_of_the_stopped_service_are_found_by_the_machine_s_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, system = tmp_path / "service.log", tmp_path / "system.toml"
    log.write_text('{"event": "daemon.stopped"}\n')
    system.write_text(f'[daemon]\nlog-file = "{log}"\n')
    monkeypatch.setattr(sources, "SYSTEM_FILE", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shown = inferd("logs", "--socket", str(SYSTEM_SOCKET))
    assert shown.exit_code == 0 and "daemon.stopped" in shown.output, shown.output
    assert inferd("logs").exit_code == 3, "a user's own daemon has not written it"
