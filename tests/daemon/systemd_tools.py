"""Systemd's tools for tests, and reading units."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ("SYSTEMD", "directives", "make_folders", "run_tool")

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"


def run_tool(name: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run one of systemd's tools; it need not run as the machine's manager."""
    if shutil.which(name) is None:
        pytest.fail(f"{name} is missing: on Debian or Ubuntu: sudo apt install systemd")
    return subprocess.run([name, *arguments], capture_output=True, text=True, timeout=60, **more)


def make_folders(root: Path, file: Path) -> None:
    """Do what a file of tmpfiles.d says below *root*; whose they are only root can say."""
    done = run_tool("systemd-tmpfiles", f"--root={root}", "--create", str(file))
    may_not = "fchownat() of" if os.geteuid() else None
    wrong = [x for x in done.stderr.splitlines() if may_not is None or not x.startswith(may_not)]
    assert not wrong, wrong
    assert done.returncode == 0 or may_not


def directives(unit: Path) -> dict[str, list[str]]:
    """Return a unit's values by their names, in their order."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found
