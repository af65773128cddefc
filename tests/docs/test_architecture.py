"""ARCHITECTURE.md matches the tree: what it names is there, and what is there is named."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
ROOMS = ("backends", "daemon", "ipc", "scheduler", "sessions", "wire")
GROUPED = ("daemon/cli", "daemon/pull")
"""Folders that the page names as one."""


def paths() -> set[str]:
    return set(re.findall(r"[`(]([\w./-]+/[\w./-]*)[`)]", PAGE))


def test_every_path_that_is_named_exists() -> None:
    missing = [p for p in paths() if not (ROOT / p).exists()]
    assert not missing


def test_every_module_of_the_rooms_is_named() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path.name != "__init__.py"
    }
    grouped = {m for m in modules if m.startswith(GROUPED)}
    assert modules - grouped - paths() == set()


def test_the_methods_of_the_trace_are_methods_of_their_class() -> None:
    code = "\n".join(p.read_text() for room in ROOMS for p in (ROOT / room).rglob("*.py"))
    for owner, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE):
        bodies = re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", code, re.MULTILINE | re.DOTALL)
        assert any(re.search(rf"def {method}\b", body) for body in bodies), f"{owner}.{method}"
