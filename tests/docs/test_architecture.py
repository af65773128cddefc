"""ARCHITECTURE.md matches the tree: named paths exist, and every package is named."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = ("backends", "cli", "daemon", "gateways", "ipc", "scheduler", "sessions", "wire")
GROUPED = (
    *("backends/grammars", "backends/llama", "cli", "daemon/doctor"),
    *("gateways/conformance", "gateways/fleet", "gateways/http", "ipc/client"),
)
"""Packages whose parts the page names in their own row."""


def paths() -> set[str]:
    return set(re.findall(r"[`(]([\w./-]+/[\w./-]*)[`)]", PAGE))


def code() -> str:
    return "\n".join(p.read_text() for name in PACKAGES for p in (ROOT / name).rglob("*.py"))


def test_every_path_that_is_named_exists() -> None:
    roots = [ROOT, *(ROOT / name for name in GROUPED)]
    missing = [p for p in paths() if not any((root / p).exists() for root in roots)]
    assert not missing


def test_every_package_is_named() -> None:
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for name in PACKAGES
        for path in (ROOT / name).rglob("__init__.py")
    }
    grouped = {p for p in packages if p.startswith(tuple(f"{name}/" for name in GROUPED))}
    assert packages - grouped - paths() == set()


def test_every_part_of_a_grouped_package_is_named() -> None:
    for name in GROUPED:
        row = next(line for line in PAGE.splitlines() if re.match(rf"\| (\*\*)?`{name}/`", line))
        parts = [p.parent.name for p in (ROOT / name).glob("*/__init__.py")]
        assert parts
        assert all(f"`{part}/`" in row for part in parts), name


def test_the_methods_that_are_named_are_methods_of_their_class() -> None:
    text = code()
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE)
    assert named
    for owner, method in named:
        bodies = re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        assert any(re.search(rf"def {method}\b", body) for body in bodies), f"{owner}.{method}"


def test_the_classes_and_functions_that_are_named_exist() -> None:
    text = code()
    for name in re.findall(r"`([A-Z][a-zA-Z]+|plan_slots)`", PAGE):
        assert re.search(rf"^(class|def) {name}\b", text, re.MULTILINE), name


def test_every_invariant_names_a_test() -> None:
    section = PAGE.split("## Invariants")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`tests/[\w/]+/test_\w+\.py`", row), row


def test_the_page_has_at_most_160_lines() -> None:
    assert len(PAGE.splitlines()) <= 160
