"""The page about reliability names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PAGE = (ROOT / "docs" / "reliability.md").read_text()
PROMISES = re.findall(r"^\| (?!promise|---)(.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("promise", "test"), PROMISES)
def test_each_promise_has_a_test(promise: str, test: str) -> None:
    path, name = test.strip("`").split("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in tree.body if isinstance(node, functions)}, promise


def test_there_are_promises() -> None:
    assert len(PROMISES) > 20
