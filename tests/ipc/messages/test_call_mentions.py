"""No code outside the table of calls decides by the name of a call."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from inferd.ipc.messages import CALLS

ROOT = Path(__file__).parents[3]
PRODUCT = ("backends", "cli", "daemon", "gateways", "ipc", "scheduler", "sessions", "wire")
KNOWN_BY_NAME = {
    "ipc/messages/calls.py": "the table",
    "ipc/client/": "the methods of the client",
    "scheduler/channels.py": "the two calls that a channel takes",
    "gateways/conformance": "it knows the protocol from its page alone",
    "gateways/wasm/host_functions.py": "the functions of wasi-nn, by their names for guests",
    "sessions/table.py": "the state table of a session, which does not know the protocol",
}
OTHER_MEANINGS = {"log_level", "session_media"}
"""The names of a setting and of a metric, too."""
DISTINCT = {name for name in CALLS if "_" in name} - OTHER_MEANINGS
"""Names that mean nothing else; many others are words for the contents of results, too."""


def keys_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names of calls that select something: compared ones, keys, and members of sets."""
    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=keys):
                yield from names_in(keys)
            case ast.Set(elts=members) | ast.List(elts=members) | ast.Tuple(elts=members):
                yield from names_in(members)
            case ast.MatchValue(value=value) | ast.Assign(value=value):
                yield from names_in([value])
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                members = [text for side in others for text in getattr(side, "elts", ())]
                yield from names_in([*sides, *members], among_calls=any(map(is_call, sides)))


def names_in(
    found: Sequence[ast.expr | None], *, among_calls: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield the names of calls: those that are distinct, and others that are *among calls*."""
    for text in found:
        if isinstance(text, ast.Constant) and text.value in (CALLS if among_calls else DISTINCT):
            yield text.lineno, str(text.value)


def is_call(side: ast.expr) -> bool:
    return (isinstance(side, ast.Attribute) and side.attr == "call") or (
        isinstance(side, ast.Name) and side.id == "call"
    )


@pytest.mark.parametrize("package", PRODUCT)
def test_only_the_table_selects_by_the_name_of_a_call(package: str) -> None:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith(tuple(KNOWN_BY_NAME)):
            keys = keys_in(ast.parse(path.read_text()))
            found += [f"{file}:{line}: {name}" for line, name in keys]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        'if request.call == "stream": pass',
        'if call in ("queue", "chat"): pass',
        'PULLED = "compute_single"',
        'ROUTES = {"queue": 1, "delete_session": 2}',
        'match call:\n    case "save_state": pass',
    ],
)
def test_a_selection_by_name_is_found(code: str) -> None:
    assert list(keys_in(ast.parse(code)))
