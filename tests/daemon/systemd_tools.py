"""Systemd's tools for tests, and reading units."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ("SYSTEMD", "directives", "run_tool")

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"


def run_tool(name: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run one of systemd's tools; it need not run as the machine's manager."""
    if shutil.which(name) is None:
        pytest.fail(f"{name} is missing: on Debian or Ubuntu: sudo apt install systemd")
    return subprocess.run([name, *arguments], capture_output=True, text=True, timeout=60, **more)


def directives(unit: Path) -> dict[str, list[str]]:
    """Return a unit's values by their names, in their order."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found
