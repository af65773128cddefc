"""GBNF under construction: its texts, and its rules by name, each written once and all bounded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ...errors import InvalidArgument

__all__ = ("CHAR", "DEPTH_MAX", "Rules", "either", "literal", "refusal", "sequence")

RULES_MAX = 8000
GBNF_CHARACTERS_MAX = 512 << 10
DEPTH_MAX = 64
"""Objects and arrays in each other, in a schema; groups in each other, in a pattern: a third."""
REPEAT = 64
"""llama.cpp makes rules of each repetition: of 2000 at most, more is read as without an end."""

_ESCAPED = re.compile(r'[\x00-\x1f"\\\x7f]')
_SPACE = r'| " " | "\n"{1,2} [ \t]{0,20}'
"""What llama-server allows: enough for any layout, and an end to it."""
_HEX = "[0-9a-fA-F]"
CHAR = (
    r"[\x20-\x21\x23-\x5B\x5D-\x7E\u0080-\uD7FF\uE000-\U0010FFFF]"
    r' | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] ' + _HEX + "{3} | [dD] [0-7] " + _HEX + "{2}))"
)
"""A character of a JSON string. Ranges, not exceptions from them: half a surrogate is none."""


def refusal(path: str, why: str, hint: str) -> InvalidArgument:
    """Return the error that tells what in a schema cannot hold, and where."""
    return InvalidArgument(f"json-schema: {path}: {why}", hint=hint, data={"path": path})


def literal(text: str) -> str:
    """Return *text* as a GBNF literal."""
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    found = match.group()
    return "\\" + found if found in '"\\' else f"\\x{ord(found):02X}"


def either(alternatives: Iterable[str]) -> str:
    """Return one of *alternatives* as an item: in brackets if there are several."""
    parts = list(dict.fromkeys(alternatives))
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def sequence(*items: str) -> str:
    """Return *items* one after another; empty ones are left out."""
    return " ".join(item for item in items if item) or '""'


def _common(a: str, b: str) -> str:
    """Return what two texts begin with, and so does each between them."""
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[:size]


class Rules:
    """The rules of one grammar. Those of schemas are reserved before they are defined, so that
    they can name each other; shared ones are found by what they say.
    """

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._shared: dict[str, str] = {}
        self._needs: dict[str, list[frozenset[str]]] = {}
        self._characters = self._reserved = 0
        self._add("ws", _SPACE)
        self._add("char", CHAR)

    def shared(self, body: str) -> str:
        """Return the name of the rule that says *body*."""
        name = self._shared.get(body)
        if name is None:
            name = self._shared[body] = f"s{len(self._shared)}"
            self._add(name, body)
        return name

    def reserve(self) -> str:
        """Return the name of a rule that is defined later."""
        self._reserved += 1
        return f"v{self._reserved}"

    def define(self, name: str, alternatives: Collection[tuple[str, frozenset[str]]]) -> None:
        """Let a reserved rule be one of *alternatives*: what it says, and the rules that it cannot
        do without.
        """
        self._add(name, " | ".join(dict.fromkeys(body for body, _ in alternatives)))
        self._needs[name] = [needs for _, needs in alternatives]

    def _add(self, name: str, body: str) -> None:
        self._bodies[name] = body
        self._characters += len(body)
        if len(self._bodies) > RULES_MAX or self._characters > GBNF_CHARACTERS_MAX:
            raise refusal(
                "#",
                f"its grammar has more than {RULES_MAX} rules or {GBNF_CHARACTERS_MAX} characters",
                "shorten its enums, ranges and patterns, or ask for less at a time",
            )

    def repeat(self, item: str, low: int, high: int | None) -> str:
        """Return *item*, one symbol, *low* to *high* times; None: without an end."""
        if high is None:
            return sequence(self._exactly(item, low), f"{item}*")
        return sequence(self._exactly(item, low), self._up_to(item, high - low))

    def _exactly(self, item: str, count: int) -> str:
        if count <= REPEAT:
            return "" if count == 0 else item if count == 1 else f"{item}{{{count}}}"
        chunks, rest = divmod(count, REPEAT)
        return sequence(self._exactly(self._chunk(item), chunks), self._exactly(item, rest))

    def _up_to(self, item: str, count: int) -> str:
        if count < REPEAT:
            return "" if count == 0 else f"{item}?" if count == 1 else f"{item}{{0,{count}}}"
        chunks, rest = divmod(count, REPEAT)
        chunk = self._chunk(item)
        fewer = sequence(self._up_to(chunk, chunks - 1), self._up_to(item, REPEAT - 1))
        return either([fewer, sequence(self._exactly(chunk, chunks), self._up_to(item, rest))])

    def _chunk(self, item: str) -> str:
        return self.shared(f"{item}{{{REPEAT}}}")

    def one_of(self, texts: Collection[str]) -> str:
        """Return one of *texts*, of which common beginnings are said once: what may come next is
        then looked at once for each letter, not for each text.
        """
        begin = _common(min(texts), max(texts))
        by_letter: dict[str, list[str]] = {}
        for text in sorted(texts):
            by_letter.setdefault(text[len(begin) :][:1], []).append(text[len(begin) :])
        if len(texts) == 1:
            return literal(begin)
        rest = [self.one_of(tails) if letter else '""' for letter, tails in by_letter.items()]
        return sequence(literal(begin) if begin else "", self.shared(" | ".join(rest)))

    def endless(self) -> set[str]:
        """Return the names of the rules that nothing finite follows."""
        ends: set[str] = set()
        while True:
            more = {
                name
                for name, needs in self._needs.items()
                if name not in ends and any(one <= ends for one in needs)
            }
            if not more:
                return self._needs.keys() - ends
            ends |= more

    def text(self, root: str) -> str:
        """Return the grammar, which begins with the rule *root*."""
        lines = [f"{name} ::= {body}" for name, body in self._bodies.items()]
        return "\n".join([f"root ::= {root}", *lines]) + "\n"
