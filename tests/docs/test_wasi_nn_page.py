"""The page about wasi-nn names tests that exist, and has each key of the other systems."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.protocol_page import tables
from tools.reference_keys import ROWS

ROOT = Path(__file__).resolve().parents[2]

PAGE = (ROOT / "docs" / "wasi-nn.md").read_text()
KEYS = "tests/daemon/calls/test_reference_keys.py"
TABLES = list(tables(PAGE))
LINES = [row for table in TABLES if table.columns[0].startswith("theirs") for row in table.rows]
KEY_LINES = [row for table in TABLES if table.columns[0] == "key" for row in table.rows]
TESTS = [row[-1].strip("`") for row in LINES] + [
    f"{KEYS}::{row[-1].strip('`')}" for row in KEY_LINES
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


@cache
def cases_of(path: str, name: str) -> frozenset[str]:
    """Return the ids of the cases of a test whose parameters are texts."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    marks = getattr(module, name).pytestmark
    [values] = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    return frozenset("-".join(v) if isinstance(v, tuple) else v for v in values)


@pytest.mark.process
@pytest.mark.parametrize("test", TESTS)
def test_each_line_has_a_test_that_exists(test: str) -> None:
    path, name, case = re.fullmatch(r"([\w/]+\.py)::(test_\w+)(?:\[(.+)\])?", test).groups()  # type: ignore[union-attr]
    assert name in names_in(path)
    assert case is None or case in cases_of(path, name)


def test_each_line_has_all_cells() -> None:
    assert {len(row) for row in LINES} == {4} and {len(row) for row in KEY_LINES} == {6}
    assert all(cell for row in LINES + KEY_LINES for cell in row)


def test_no_test_stands_for_two_lines() -> None:
    assert len(TESTS) == len(set(TESTS)) > 300


def _cases() -> Iterator[str]:
    for row in KEY_LINES:
        yield row[-1].removeprefix("`test_a_key[").removesuffix("]`")


def test_each_key_has_a_line() -> None:
    assert list(_cases()) == list(ROWS)
