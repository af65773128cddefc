"""Check of a GBNF grammar's form without llama.cpp: the echo model answers without following it."""

from __future__ import annotations

import re

from ..errors import InvalidArgument
from ..llama.json_schema import gbnf_of
from ..params import SamplingParams
from ..shorten import shorten

_TOKEN = re.compile(
    r"(?P<space>\s+|#[^\n]*)|(?P<rule>[A-Za-z0-9-]+)(?=\s*::=)|(?P<name>[A-Za-z0-9-]+)"
    r'|(?P<other>::=|[|()*+?.]|"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)+\]|\{\d*,?\d*\}|!?<[^>\n]*>)'
)


def check_grammar(params: SamplingParams) -> None:
    """Check the grammar or JSON schema of a turn.

    :raises InvalidArgument: it is not a grammar, or the schema cannot be made into one.
    """
    if params.grammar:
        _check_rules(params.grammar)
    elif params.json_schema:
        gbnf_of(params.json_schema)


def _check_rules(text: str) -> None:
    rules, names, depth, at = set[str](), {"root"}, 0, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _refusal(f"unexpected {shorten(text[at : at + 40])}")
        if found["rule"]:
            rules.add(found["rule"])
        elif found["name"]:
            names.add(found["name"])
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if depth < 0:
            break
        at = found.end()
    if depth:
        raise _refusal("its brackets do not match")
    if missing := names - rules:
        raise _refusal(f"rule {min(missing)!r} is not defined")


def _refusal(cause: str) -> InvalidArgument:
    return InvalidArgument(
        f"grammar: {cause}",
        hint='GBNF begins at the rule `root`, such as: root ::= "yes" | "no"',
    )
