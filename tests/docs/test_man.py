"""The manual pages match the commands and have no errors."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.man_pages import group_of_all_commands, man_pages

MAN = Path(__file__).resolve().parents[2] / "docs" / "man"
PAGES = man_pages()


def commands(group: Any, name: str = "inferd") -> Iterator[tuple[str, Any]]:
    yield name, group
    for below, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name}-{below}")


COMMANDS = dict(commands(group_of_all_commands()))


def formatted(page: str) -> subprocess.CompletedProcess[str]:
    """Return a page as groff renders it for `man`, with all warnings."""
    if shutil.which("groff") is None:
        pytest.fail("groff is missing: on Debian or Ubuntu: sudo apt install groff-base")
    return subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-P-cbou"],
        input=page,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_pages_match_the_commands() -> None:
    assert {p.name for p in MAN.iterdir()} == {f"{name}.1" for name in COMMANDS} == set(PAGES)
    old = [name for name, text in PAGES.items() if (MAN / name).read_text() != text]
    assert not old, "run `make docs`"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_clean_and_has_every_flag_and_argument(name: str) -> None:
    done = formatted(PAGES[f"{name}.1"])
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert f"NAME {name} - " in words
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option":
            assert all(flag in words for flag in (*parameter.opts, *parameter.secondary_opts))
        else:
            assert (parameter.metavar or parameter.name.upper()) in words


def test_special_characters_of_troff_are_escaped() -> None:
    shown = formatted(PAGES["inferd-chat.1"]).stdout
    assert "no-history" in shown and "\N{HYPHEN}" not in shown
    assert "`" not in shown, "text in backquotes is bold"


def test_the_first_page_names_all_others_and_the_end_of_the_help() -> None:
    shown = " ".join(formatted(PAGES["inferd.1"]).stdout.split())
    for name in COMMANDS:
        assert name == "inferd" or f"{name}(1)" in shown
    assert re.search(
        r"EXIT STATUS 0 success 1 the request was refused or failed 2 wrong usage", shown
    )
    assert "INFERD_SOCKET the daemon's socket" in shown and "/etc/inferd/config.toml" in shown
