"""Completion in the shell: what is offered, and that nothing else is ever said."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferd import Client
from inferd.backends.params import PARAMETERS
from inferd.daemon.cli.completing import ASK_S_MAX
from inferd.testing import running_daemon

from .command_line import Terminal

NOWHERE = "/nonexistent/inferd.sock"


def offered(line: str, at: str = NOWHERE, **environ: str) -> list[str]:
    """Return what bash is told for the last word of *line*; it may be empty."""
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-m", "inferd"],
        env={
            **os.environ,
            "INFERD_SOCKET": at,
            "_INFERD_COMPLETE": "complete_bash",
            "COMP_WORDS": "\n".join(words),
            "COMP_CWORD": str(len(words) - 1),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


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
        ("inferd chat m --option n-pred", ["n-predict="]),
        ("inferd serve --set kv-sh", ["kv-share=owner", "kv-share=all"]),
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
            assert offered("inferd forget ", daemon.socket) == ["diary"], "a shell's word, no more"
            assert offered("inferd run echo hi --session d", daemon.socket) == ["diary"]
            assert offered(f"inferd run --socket {daemon.socket} e") == ["echo"]


def test_a_file_to_remove_is_offered_without_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").touch()
    assert offered("inferd rm m", INFERD_MODELS_DIR=str(tmp_path)) == ["mine"]
    assert offered(f"inferd rm --models-dir {tmp_path} ") == ["mine"]


def test_without_a_daemon_or_with_a_wrong_configuration_nothing_is_offered_nor_said() -> None:
    assert offered("inferd run ") == offered("inferd forget ") == []
    assert offered("inferd rm ", INFERD_CORES="many") == []


def test_a_daemon_that_hangs_is_waited_for_but_shortly(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        begin = time.monotonic()
        assert offered("inferd run ", str(path)) == []
        assert time.monotonic() - begin < ASK_S_MAX + 20, "the process's start is in it"


def test_a_real_bash_completes(tmp_path: Path) -> None:
    (tmp_path / "inferd").write_text(f'#!/bin/sh\nexec {sys.executable} -m inferd "$@"\n')
    (tmp_path / "inferd").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "> ", "INPUTRC": "/dev/null"}
    ours, theirs = pty.openpty()
    try:
        shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            env=environ | {"INFERD_SOCKET": NOWHERE, "HISTFILE": ""},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    try:
        terminal = Terminal(ours, shell)
        terminal.type('eval "$(_INFERD_COMPLETE=source_bash inferd)"; echo rea""dy\n')
        terminal.until("ready")
        terminal.type("inferd doct\t")
        terminal.until("inferd doctor ")
        terminal.type("\x15inferd config sche\t")
        terminal.until("inferd config schema ")
        terminal.type("\x15exit\n")
        assert shell.wait(30) == 0
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
