"""`make browser`: it installs Debian's package as root, or says what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import get_browser

APT = """\
#!/bin/sh
echo "$DEBIAN_FRONTEND $*" >> {calls}
exit {status}
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The calls of apt-get, of which there is none in PATH yet; the tool runs as root."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path / "calls"


def put_in_path(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def put_apt(calls: Path, status: int = 0) -> None:
    put_in_path("apt-get", APT.format(calls=calls, status=status), calls.parent)


def test_a_browser_in_path_is_used(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_apt(calls)
    put_in_path("google-chrome", "", calls.parent)
    get_browser.main()
    assert get_browser.browser() == str(calls.parent / "google-chrome")
    assert not calls.exists() and capsys.readouterr().err == ""


@pytest.mark.process
def test_root_installs_the_package(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_apt(calls)
    get_browser.main()
    assert calls.read_text().splitlines() == [
        "noninteractive -qq update",
        "noninteractive -qq install --yes --no-install-recommends chromium-headless-shell",
    ]
    assert capsys.readouterr().err == ""


def test_another_user_is_asked_to_run_it_as_root(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_apt(calls)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    get_browser.main()
    assert capsys.readouterr().err == f"only root can install packages\n{get_browser.MISSING}\n"
    assert not calls.exists()


def test_a_system_without_apt_needs_a_browser_in_path(
    calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    get_browser.main()
    assert capsys.readouterr().err == f"this system has no apt-get\n{get_browser.MISSING}\n"


@pytest.mark.process
def test_a_failure_of_apt_is_printed(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_apt(calls, status=100)
    get_browser.main()
    printed = capsys.readouterr().err
    assert "exit status 100" in printed and printed.endswith(f"{get_browser.MISSING}\n")
