"""`inferd infill`: the text at a place in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from inferd.cli.inference.infill_command import split_at
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd
from tests.echo import echo_model

CONFIG = echo_model("code", fim=True) + echo_model("chat")


@pytest.mark.parametrize(
    ("at", "prefix"),
    [
        ("1", "ab"),
        ("1:1", ""),
        ("1:2", "a"),
        ("2", "ab\n"),
        ("3:3", "ab\n\ncd"),
        ("4", "ab\n\ncd\n"),
    ],
)
def test_a_place_divides_the_file(at: str, prefix: str) -> None:
    text = "ab\n\ncd\n"
    assert split_at(text, at) == (prefix, text[len(prefix) :])


@pytest.mark.parametrize(
    ("at", "why"),
    [("0", "4 lines"), ("5", "4 lines"), ("1:4", "2 characters"), ("1:0", "2"), ("x", "LINE")],
)
def test_a_place_that_a_file_lacks_is_refused(at: str, why: str) -> None:
    with pytest.raises(typer.BadParameter, match=why):
        split_at("ab\n\ncd\n", at)


def test_the_text_at_a_place_is_printed(daemon: RunningDaemon, tmp_path: Path) -> None:
    file, other = tmp_path / "a.py", tmp_path / "b.py"
    file.write_text("def f():\n    \n\nprint(f())\n")
    other.write_text("x = 1\n")
    found = inferd(
        *("infill", "code", str(file), "--at", "2:5", "--extra", str(other)),
        socket=daemon.socket,
    )
    assert found.stdout == "def f():\n    |\n\nprint(f())\n"
    as_json = inferd(
        *("infill", "code", str(file), "--at", "1", "--n-predict", "3", "--json"),
        socket=daemon.socket,
    )
    lines = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert "".join(line.get("text", "") for line in lines) == "def"


def test_a_model_that_does_not_fill_in_is_named(daemon: RunningDaemon, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("a")
    found = inferd("infill", "chat", str(file), "--at", "1", socket=daemon.socket)
    assert found.exit_code == 1
    assert "the model 'chat' does not fill in text between two others" in found.stderr
