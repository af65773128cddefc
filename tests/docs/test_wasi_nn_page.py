"""The page about wasi-nn names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PAGE = (ROOT / "docs" / "wasi-nn.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| theirs")
]


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of the tests of a module, except skipped ones."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text())
    found = [node for node in tree.body if isinstance(node, functions)]
    return frozenset(f.name for f in found if not re.search("skip|xfail", _marks(f)))


def _marks(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join(map(ast.unparse, function.decorator_list))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_line_has_a_test_that_exists(row: list[str]) -> None:
    _theirs, ours, deviation, test = row
    path, name = test.strip("`").split("::")
    assert ours and deviation and name.startswith("test_")
    assert name in names_in(path)


def test_no_test_stands_for_two_lines() -> None:
    tests = [row[3] for row in ROWS]
    assert len(tests) == len(set(tests)) > 50
