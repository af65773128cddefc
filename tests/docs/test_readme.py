"""The commands, code and configuration of the README work as written."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inferd.cli.app import STATUSES
from inferd.daemon.config.settings import SETTINGS
from inferd.daemon.config.sources import load_config
from inferd.testing import running_daemon
from tests.models import ONE_THREAD, smollm2

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
PACKAGE = ROOT / "clients" / "typescript" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", PACKAGE, *(ROOT / "docs").glob("*.md")]


def block(language: str, page: str = PAGE) -> str:
    """Return the one block of code in *language*."""
    [text] = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return str(text)


def inferd(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "inferd", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    first, second = re.findall(r"```toml\n(.*?)```", CONFIGURATION, re.DOTALL)
    assert tomllib.loads(second)["models"]["coder"]["of"] == "qwen3"
    (tmp_path / "config.toml").write_text(first)
    config = load_config({"config": tmp_path / "config.toml"}, {})
    assert (config.sessions_max, config.keep_alive_s) == (200, 1800)
    assert config.models["notes"].options == {"slots": 8, "temp": 0.2}


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_library_code_runs_on_a_real_model(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").symlink_to(smollm2())
    config = f"{ONE_THREAD}n-predict = 12\ntemp = 0\n"
    with running_daemon(config, models_dir=tmp_path) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", block("python")],
            env=daemon.environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


def test_every_command_in_the_table_exists() -> None:
    rows = re.findall(r"^\| (`inferd .*?) \|", COMMANDS, re.MULTILINE)
    assert rows
    known = set(re.findall(r"^  (\w[\w-]+)  ", inferd("--help"), re.MULTILINE))
    named = {w for row in rows for w in re.findall(r"`(?:inferd )?([a-z][a-z-]+)", row)}
    assert named == known


def test_every_flag_of_the_session_exists() -> None:
    for line in re.findall(r"^\$ inferd (.*)$", block("console"), re.MULTILINE):
        command = line.split()[0]
        text = inferd(command, "--help")
        for flag in re.findall(r"--[\w-]+", line):
            assert flag in text, f"{command} {flag}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(h) for h in headings}, target


def test_the_first_screen_shows_it_working() -> None:
    first = "\n".join(PAGE.splitlines()[:45])
    for words in ("make demo", "pip install", "inferd pull", "inferd start", "$ inferd run"):
        assert words in first


def test_the_scope_takes_five_lines() -> None:
    lines = PAGE.split("## Scope")[1].split("\n## ")[0].strip().splitlines()
    assert len(lines) == 5 and all(line.startswith("- ") for line in lines)


def test_every_setting_has_a_row_on_its_page() -> None:
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert set(SETTINGS) <= named


def test_the_exit_statuses_are_those_of_the_help() -> None:
    rows = re.findall(r"^\| (\d+) \|", COMMANDS, re.MULTILINE)
    assert [int(row) for row in rows] == sorted(STATUSES)
