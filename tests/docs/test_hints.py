"""Texts that users read name nothing that an installed package lacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backends", "wire", "scheduler", "sessions", "ipc", "daemon", "cli", "gateways")


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module with their lines, except docstrings and texts like them."""
    described = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in described:
                yield node.lineno, text


@pytest.mark.parametrize("package", PACKAGES)
def test_no_text_names_a_page_of_the_repository(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if ".md" in (code := path.read_text())
        for line, text in texts_of(ast.parse(code))
        if "docs/" in text and ".md" in text
    ]
    assert found == [], "name a command that prints it, or write the fact itself"
