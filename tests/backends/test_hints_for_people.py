"""Hints in the form that people read: no name of a call or of the Python client is in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends import errors as e
from inferd.backends.errors import ERRORS_BY_NAME, InferdError, error_from_wire
from inferd.ipc.client import AsyncClient, AsyncSession
from inferd.ipc.client.failures import with_progress
from inferd.ipc.messages import CALLS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backends", "daemon", "gateways/http", "ipc", "scheduler", "sessions", "wire")
METHODS = {name for cls in (AsyncClient, AsyncSession) for name in dir(cls) if name[0] != "_"}
CALL = re.compile(
    rf"\b(?:{'|'.join(sorted(name for name in {*CALLS, *METHODS} if '_' in name))})\b"
    rf"|`(?:{'|'.join(sorted(CALLS))})`(?! in )"
    r"|[\w.]\((?!s\))|\bretry_after_s\b"
)
"""A call of the protocol or of the Python client, or another one in Python's notation."""


def hints() -> Iterator[tuple[str, str]]:
    """Yield the constant hints of all packages whose errors reach people, and their places."""
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                for value in values_of(node):
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield f"{file.relative_to(ROOT)}:{value.lineno}", value.value


def values_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the value of a hint that an argument or an assignment sets."""
    names = []
    if isinstance(node, ast.keyword):
        names = [node.arg or ""]
    elif isinstance(node, ast.Assign):
        names = [ast.unparse(target) for target in node.targets]
    if any("hint" in name.lower() for name in names):
        assert isinstance(node, ast.keyword | ast.Assign)
        yield node.value


@pytest.mark.parametrize("cls", ERRORS_BY_NAME.values(), ids=ERRORS_BY_NAME)
def test_the_default_of_each_error_names_no_call(cls: type[InferdError]) -> None:
    found = cls("it failed")
    assert found.hint == cls.hint_default
    for text in (found.hint_for_people, cls("no", hint="call resume(tokens)").hint_for_people):
        assert text and not CALL.search(text) and "{" not in text
        assert InferdError("x", hint=text).hint_for_people == text, "no word is for programs only"


def test_no_hint_names_a_call_to_people() -> None:
    found = list(hints())
    assert len(found) > 250
    wrong = {
        place: shown
        for place, hint in found
        if CALL.search(shown := InferdError("x", hint=hint).hint_for_people)
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("save it by save_state; `inferd states` lists yours", "`inferd states` lists yours"),
        ("send less; a program can use client.set_input(context, 0, text)", "send less"),
        ("use http(s)://HOST/NAME.gguf (see `inferd pull`)",) * 2,
        ("set ctx-size (at most 8192)",) * 2,
    ],
)
def test_the_clauses_for_people_stay(hint: str, shown: str) -> None:
    assert InferdError("x", hint=hint).hint_for_people == shown


def test_a_lost_turn_keeps_the_hint_of_its_cause() -> None:
    error = with_progress(e.WorkerCrashed("the worker has exited"), [1, 2], "ab")
    assert "resume(tokens, text)" in error.hint
    assert error.hint_for_people == e.WorkerCrashed.hint_default
    assert error.text_for_people == f"{error.message} ({e.WorkerCrashed.hint_default})"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *(
            (0.2, "1 s"),
            (2.1, "3 s"),
            (119, "119 s"),
            (120, "2 min"),
            (3601, "61 min"),
            (-5, "1 s"),
        ),
        *((1e9, "1440 min"), (float("inf"), "1440 min"), (float("nan"), "1 s")),
    ],
)
def test_the_time_until_a_retry_is_shown(seconds: float, shown: str) -> None:
    for cls in (e.Busy, e.QuotaExceeded):
        error = error_from_wire(cls("no", data={"retry_after_s": seconds}).to_wire())
        assert error.hint_for_people.startswith(f"try again in {shown}")
