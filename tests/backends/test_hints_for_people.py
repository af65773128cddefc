"""Hints in the form that people read: no name of a call or of the Python client is in them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends import errors as e
from inferd.backends.errors import ERRORS_BY_NAME, InferdError, error_from_wire
from inferd.ipc.client import AsyncClient, AsyncSession
from inferd.ipc.client.caller import with_progress
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
FOR_PROGRAMMERS = re.compile(
    r"\b(frames?|msgpack|handles?|params|builder|SCM_RIGHTS|memfd|execution context)\b"
    r"|\b(graph \d|\d graphs|graph encoding|graph of)\b"
    r"|\b(tensors? of \d|set_input|fini_single|resume_timeout|undo_s)\b"
    r"|\bon this connection\b|\bdescriptors?\b(?!-)"
)
"""Words for the parts of the protocol, which no command and no page shows."""


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


def classes_by_name() -> dict[str, type[InferdError]]:
    """Return the error classes by the names in the code, and those of functions that make one."""
    found = {cls.__name__: cls for cls in ERRORS_BY_NAME.values()}
    return found | {"HttpRefusal": InferdError, "field_error": e.InvalidArgument}


def constant_texts(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression can have, with 7 in place of each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "7"
            for part in node.values
        )
    elif isinstance(node, ast.IfExp):
        yield from (*constant_texts(node.body), *constant_texts(node.orelse))
    elif isinstance(node, ast.BinOp):
        for left in constant_texts(node.left):
            yield from (left + right for right in constant_texts(node.right))


@functools.cache
def errors_of_the_code() -> list[tuple[str, InferdError]]:
    """Return each error that the packages raise, and its place."""
    return list(_errors_of_the_code())


def _errors_of_the_code() -> Iterator[tuple[str, InferdError]]:
    classes = classes_by_name()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                cls = classes.get(ast.unparse(node.func).rpartition(".")[2])
                if cls is None:
                    continue
                hints = [k.value for k in node.keywords if k.arg == "hint"]
                hint = next(iter(constant_texts(hints[0])), "") if hints else ""
                for argument in node.args:
                    for text in constant_texts(argument):
                        place = f"{file.relative_to(ROOT)}:{node.lineno}"
                        yield place, cls(text, hint=hint)


def test_no_message_and_no_hint_of_the_code_is_about_calls_when_people_read_it() -> None:
    found = errors_of_the_code()
    assert len(found) > 600
    wrong = {
        place: error.text_for_people
        for place, error in found
        if CALL.search(error.text_for_people) or FOR_PROGRAMMERS.search(error.text_for_people)
    }
    assert wrong == {}


def test_messages_that_people_understand_stay() -> None:
    kept = [error for _, error in errors_of_the_code() if error.message_for_people == error.message]
    assert len(kept) > 500


def test_a_text_that_is_too_long_for_a_frame_is_named_with_its_bounds() -> None:
    data = {"bytes": 9, "frame_bytes_max": 8}
    error = e.TooLarge("stream takes a frame of 9 bytes; the limit is 8", data=data)
    assert error.message_for_people.endswith("of 9 bytes; 8 are allowed")
