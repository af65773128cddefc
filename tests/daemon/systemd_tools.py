"""Systemd's tools for tests, and a reader of units."""

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
    """Run one of systemd's tools; systemd need not be the machine's manager."""
    if shutil.which(name) is None:
        pytest.fail(f"{name} is missing: on Debian or Ubuntu: sudo apt install systemd")
    return subprocess.run([name, *arguments], capture_output=True, text=True, timeout=60, **more)


def make_folders(root: Path, file: Path) -> None:
    """Create the folders of a tmpfiles.d *file* below *root*; only root can set their owners."""
    done = run_tool("systemd-tmpfiles", f"--root={root}", "--create", str(file))
    ignored = "fchownat() of" if os.geteuid() else None
    wrong = [x for x in done.stderr.splitlines() if ignored is None or not x.startswith(ignored)]
    assert not wrong, wrong
    assert done.returncode == 0 or ignored


def directives(unit: Path) -> dict[str, list[str]]:
    """Return a unit's values by directive, in order."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found
