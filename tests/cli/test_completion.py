"""Completion in shells: the words offered, and no other output."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer import _completion_shared

from inferd import Client
from inferd.backends.library import LEVELS
from inferd.backends.params import PARAMETERS
from inferd.cli.completion import CALL_TIMEOUT_S
from inferd.testing import running_daemon
from tests.daemon.command_line import Terminal, terminal_of
from tests.echo import echo_model
from tests.fork_server import ForkedProcess

NOWHERE = "/nonexistent/inferd.sock"


def offered(line: str, at: str = NOWHERE, **environ: str) -> list[str]:
    """Return the completions that bash offers for the last word of *line*; it may be empty."""
    words = line.split(" ")
    process = ForkedProcess(
        [sys.executable, "-m", "inferd"],
        env={
            **os.environ,
            "INFERD_SOCKET": at,
            "_INFERD_COMPLETE": "complete_bash",
            "COMP_WORDS": "\n".join(words),
            "COMP_CWORD": str(len(words) - 1),
            **environ,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    return output.decode().split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("inferd doc", ["doctor"]),
        ("inferd config ", ["check", "show", "schema"]),
        ("inferd pull sm", ["smollm2"]),
        ("inferd run m p --priority u", ["urgent"]),
        ("inferd parameters top-", [p.name for p in PARAMETERS if p.name.startswith("top-")]),
        ("inferd parameters temper", ["temperature"]),
        ("inferd run m p -o cache-p", ["cache-prompt=true", "cache-prompt=false"]),
        (
            "inferd run m p -o json-w",
            ["json-whitespace=any", "json-whitespace=compact", "json-whitespace=spaced"],
        ),
        ("inferd run m p -o schema-l", ["schema-lenient=true", "schema-lenient=false"]),
        ("inferd chat m --option n-pred", ["n-predict="]),
        ("inferd serve --set kv-sh", ["kv-share=user", "kv-share=all"]),
        ("inferd log-level de", ["debug"]),
        ("inferd log-level sched", ["scheduler="]),
        ("inferd log-level scheduler=w", ["scheduler=warning"]),
        ("inferd log-level info llama=", [f"llama={level}" for level in LEVELS]),
        ("inferd logs --level w", ["warning"]),
        ("inferd config check --set log-fo",
         ["log-format=auto", "log-format=json", "log-format=console"]),
    ],
)  # fmt: skip
def test_names_of_the_tables_are_offered(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_models_and_sessions_of_a_daemon_are_offered() -> None:
    with running_daemon() as daemon, Client(daemon.socket) as client:
        with client.session("echo", session_id="diary") as session:
            session.chat("hello")
        with client.session("echo", session_id="two; words") as session:
            session.chat("hello")
            assert offered("inferd run ec", daemon.socket) == ["echo"]
            assert offered("inferd swap a --to e", daemon.socket) == ["echo"]
            assert offered("inferd rm-session ", daemon.socket) == ["diary"], (
                "a shell's word, no more"
            )
            session.save_state("my-notes")
            session.save_state("two words")
            assert offered("inferd states delete ", daemon.socket) == ["my-notes"]
            assert offered("inferd run echo hi --session d", daemon.socket) == ["diary"]
            assert offered(f"inferd run --socket {daemon.socket} e") == ["echo"]


def test_test_models_are_offered_beside_others_once_a_letter_is_typed() -> None:
    config = echo_model("slow") + f"[models.real]\nfile = {json.dumps(__file__)}\n"
    with running_daemon(config) as daemon:
        assert offered("inferd run ", daemon.socket) == ["real"]
        assert offered("inferd run e", daemon.socket) == ["echo"]
        assert offered("inferd unload sl", daemon.socket) == ["slow"]


def test_a_file_to_remove_is_offered_without_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").touch()
    assert offered("inferd rm m", INFERD_MODELS_DIR=str(tmp_path)) == ["mine"]
    assert offered(f"inferd rm --models-dir {tmp_path} ") == ["mine"]


def test_without_a_daemon_or_with_a_wrong_configuration_nothing_is_offered_or_printed() -> None:
    assert offered("inferd run ") == offered("inferd rm-session ") == []
    assert offered("inferd rm ", INFERD_CORES="many") == []


def test_completion_waits_only_briefly_for_a_daemon_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        begin = time.monotonic()
        assert offered("inferd run ", str(path)) == []
        assert time.monotonic() - begin < CALL_TIMEOUT_S + 20, "the process's start is in it"


@contextmanager
def bash(tmp_path: Path) -> Iterator[Terminal]:
    """Run a bash that completes inferd's commands."""
    (tmp_path / "inferd").write_text(f'#!/bin/sh\nexec {sys.executable} -m inferd "$@"\n')
    (tmp_path / "inferd").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "INFERD_SOCKET": NOWHERE, "HISTFILE": ""}
    environ |= {"TERM": "dumb", "PS1": "> ", "INPUTRC": "/dev/null"}
    with terminal_of(["bash", "--norc", "--noprofile", "-i"], environ) as terminal:
        terminal.type('eval "$(_INFERD_COMPLETE=source_bash inferd)"; echo rea""dy\n')
        terminal.until("ready")
        yield terminal
        terminal.type("\x15exit\n")
        assert terminal.process.wait(30) == 0


def test_a_real_bash_completes_and_adds_a_space_after_a_value_but_not_after_a_key(
    tmp_path: Path,
) -> None:
    with bash(tmp_path) as terminal:
        for typed, line in (
            ("inferd doct\t", "inferd doctor "),
            ("inferd config sche\t", "inferd config schema "),
            ("inferd chat m -o n-predi\t7", "inferd chat m -o n-predict=7"),
            ("inferd serve --set sessions-m\t7", "inferd serve --set sessions-max=7"),
            ("inferd run m p --priority ur\t7", "inferd run m p --priority urgent 7"),
            ("inferd log-level warn\t7", "inferd log-level warning 7"),
            ("inferd log-level lla\terr\t7", "inferd log-level llama=error 7"),
        ):
            terminal.type(f"\x15{typed}")
            terminal.until(line)


def test_the_script_shown_for_bash_is_the_installed_one() -> None:
    script = _completion_shared.get_completion_script(
        prog_name="inferd", complete_var="_INFERD_COMPLETE", shell="bash"
    )
    assert script.count("compopt -o nospace") == 1
