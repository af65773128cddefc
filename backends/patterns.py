"""Regular expressions on a text that grows: where one first matches, which text may become a match.

Python's syntax, read by its own parser, run as an automaton (Thompson 1968; the sets of states of
R. Cox, "Regular Expression Matching Can Be Simple And Fast", 2007): each character is looked at
once, in time bounded by the number of states, and nothing is ever looked at again. The engines of
PyPI either cannot tell what may still match (google-re2) or take exponential time (regex).

A match is the one that ends first; of those that end there, the one that begins first. What needs
to know the text behind it (`$`, `\\b`, lookahead) or to remember it (backreferences) is refused.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from .errors import InvalidArgument

__all__ = ("PATTERN_CHARACTERS_MAX", "STATES_MAX", "Matcher", "Pattern", "byte_size")

PATTERN_CHARACTERS_MAX = 500
STATES_MAX = 1000
_STEPS_MAX = 10_000
"""Steps of a pattern that are remembered."""
_parser: Any = importlib.import_module("re._parser")
_ACCEPT = -1
_BEGIN, _LINE, _INSIDE = 0, 1, 2
"""What stands before a place: nothing, a line's end, another character."""
_NEVER: dict[str, str] = {
    "AT_END": "$",
    "AT_END_STRING": "\\Z",
    "AT_BOUNDARY": "\\b",
    "AT_NON_BOUNDARY": "\\B",
    "ASSERT": "lookahead and lookbehind",
    "ASSERT_NOT": "lookahead and lookbehind",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a backreference",
    "POSSESSIVE_REPEAT": "a possessive repeat",
    "ATOMIC_GROUP": "an atomic group",
    "FAILURE": "what never matches",
}
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda c: c.isalnum() or c == "_",
}
Test = Callable[[str], bool]


def byte_size(text: str) -> int:
    """Return the bytes of *text*, where bytes that are no characters are escaped ones."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


class Pattern:
    """A regular expression as an automaton; *whole* ones match from the text's beginning only.

    :raises InvalidArgument: it is none, is too large, matches the empty text, or needs more than
        the text so far.
    """

    def __init__(self, text: str, *, whole: bool = False):
        self.text, self.whole = text, whole
        self._tests: list[Test | None] = []
        """What a state takes; None: it goes on without taking a character."""
        self._edges: list[tuple[int, ...]] = []
        self._lines: dict[int, bool] = {}
        """States that hold only at the beginning, or, if true, at a line's, too."""
        self._steps: dict[tuple[int, str], tuple[int, ...]] = {}
        self._work = 0
        try:
            self._first = self._sequence(*_parsed(text), _ACCEPT)
        except RecursionError:
            raise _refused(text, "it is nested too deep") from None
        self.begin = [self._closure(self._first, before) for before in (_BEGIN, _LINE, _INSIDE)]
        """The states in which a match begins, by what stands before."""
        if any(_ACCEPT in states for states in self.begin):
            raise _refused(text, "it matches the empty text, and so everywhere")

    def __len__(self) -> int:
        return len(self._tests)

    @staticmethod
    @lru_cache(256)
    def of(text: str, whole: bool = False) -> Pattern:
        """Return the pattern of *text*, made once."""
        return Pattern(text, whole=whole)

    def step(self, state: int, character: str) -> tuple[int, ...]:
        """Return the states that follow *state* behind *character*."""
        key = (state, character)
        found = self._steps.get(key)
        if found is None:
            if len(self._steps) >= _STEPS_MAX:
                self._steps.clear()
            found = self._steps[key] = self._step(state, character)
        return found

    def _step(self, state: int, character: str) -> tuple[int, ...]:
        test = self._tests[state]
        if test is None or not test(character):
            return ()
        [following] = self._edges[state]
        return self._closure(following, _LINE if character == "\n" else _INSIDE)

    def _closure(self, state: int, before: int) -> tuple[int, ...]:
        """Return the states that take a character, and the end, as far as nothing is taken."""
        found, seen, todo = list[int](), set[int](), [state]
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            if state == _ACCEPT or self._tests[state] is not None:
                found.append(state)
            elif state not in self._lines or before < _LINE + self._lines[state]:
                todo += self._edges[state]
        return tuple(found)

    # Making it, from the end to the beginning.

    def _state(self, test: Test | None, *following: int) -> int:
        if len(self._tests) >= STATES_MAX:
            raise _refused(self.text, f"it has more than {STATES_MAX} states")
        self._tests.append(test)
        self._edges.append(following)
        return len(self._tests) - 1

    def _sequence(self, items: Iterable[Any], flags: int, then: int) -> int:
        """Return the state in which *items* begin, behind which the state *then* comes."""
        self._work += 1
        if self._work > 10 * STATES_MAX:  # repeats of nothing make no states
            raise _refused(self.text, "it repeats too much")
        for op, value in reversed(list(items)):
            then = self._item(op.name, value, flags, then)
        return then

    def _item(self, op: str, value: Any, flags: int, then: int) -> int:
        match op:
            case "SUBPATTERN":
                _, added, removed, items = value
                return self._sequence(items, (flags | added) & ~removed, then)
            case "BRANCH":
                return self._state(None, *(self._sequence(i, flags, then) for i in value[1]))
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, items = value
                return self._repeat(low, high, items, flags, then)
            case "AT" if value.name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
                state = self._state(None, then)
                lines = value.name == "AT_BEGINNING" and flags & re.MULTILINE
                self._lines[state] = bool(lines)
                return state
        test = _test(op, value, flags)
        if test is None:
            name = value.name if op == "AT" else op
            raise _refused(self.text, f"{_NEVER.get(name, name)} cannot be told while text grows")
        return self._state(test, then)

    def _repeat(self, low: int, high: int, items: Any, flags: int, then: int) -> int:
        if high is _parser.MAXREPEAT:
            loop = self._state(None)
            self._edges[loop] = (self._sequence(items, flags, loop), then)
            then = loop
        else:
            end = then
            for _ in range(high - low):
                then = self._state(None, self._sequence(items, flags, then), end)
        for _ in range(low):
            then = self._sequence(items, flags, then)
        return then


def _parsed(text: str) -> tuple[Any, int]:
    if len(text) > PATTERN_CHARACTERS_MAX:
        raise _refused(text, f"it has {len(text)} characters; {PATTERN_CHARACTERS_MAX} at most")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(text)
    except (re.error, OverflowError) as exc:
        raise _refused(text, str(exc)) from None
    return tree, tree.state.flags


def _refused(text: str, why: str) -> InvalidArgument:
    shown = text if len(text) <= 40 else f"{text[:40]}…"
    return InvalidArgument(
        f"the pattern {shown!r}: {why}",
        hint="docs/stopping.md says which patterns there are",
    )


def _test(op: str, value: Any, flags: int) -> Test | None:
    """Return what tells whether a character is taken; None where *op* is about no character."""
    match op:
        case "LITERAL" | "RANGE" | "CATEGORY" | "IN":
            test = _member(op, value, flags)
        case "NOT_LITERAL":
            test = _none_of([_member("LITERAL", value, flags)])
        case "ANY":
            return (lambda _: True) if flags & re.DOTALL else (lambda c: c != "\n")
        case _:
            return None
    return test


def _member(op: str, value: Any, flags: int) -> Test:
    if op == "IN":
        members = [_member(o.name, v, flags) for o, v in value if o.name != "NEGATE"]
        negated = value[0][0].name == "NEGATE"
        return _none_of(members) if negated else _one_of(members)
    if op == "CATEGORY":
        name = value.name.removeprefix("CATEGORY_")
        category = _CATEGORIES[name.removeprefix("NOT_")]
        if flags & re.ASCII:
            whole, category = category, lambda c: c.isascii() and whole(c)
        return _none_of([category]) if name.startswith("NOT_") else category
    low, high = map(chr, value if op == "RANGE" else (value, value))
    if flags & re.IGNORECASE:
        return lambda c: any(low <= v <= high for v in (c, c.lower(), c.upper()) if len(v) == 1)
    return lambda c: low <= c <= high


def _one_of(tests: list[Test]) -> Test:
    return lambda c: any(test(c) for test in tests)


def _none_of(tests: list[Test]) -> Test:
    return lambda c: not any(test(c) for test in tests)


class Matcher:
    """One pattern on one text, which comes piece by piece. Places are byte offsets in the text."""

    def __init__(self, pattern: Pattern):
        self._pattern = pattern
        self._threads: dict[int, int] = {}
        """The states that a match may be in, with where the first such match began."""
        self._begin: tuple[int, ...] = pattern.begin[_BEGIN]

    @property
    def pending(self) -> int | None:
        """Where the text begins that may become a match; None if there is none."""
        return min(self._threads.values(), default=None)

    def feed(self, text: str, at: int) -> tuple[int, int] | None:
        """Take *text*, which stands at the byte *at*; return where the first match begins and ends.

        What stands behind a match has not been looked at: it is not to be fed more.
        """
        step, begin = self._pattern.step, self._pattern.begin
        for character in text:
            end = at + byte_size(character)
            after: dict[int, int] = {}
            for state, start in self._threads.items():
                for following in step(state, character):
                    if start < after.get(following, end):
                        after[following] = start
            for state in self._begin:
                for following in step(state, character):
                    after.setdefault(following, at)
            if _ACCEPT in after:
                return after[_ACCEPT], end
            self._threads, at = after, end
            if not self._pattern.whole:
                self._begin = begin[_LINE if character == "\n" else _INSIDE]
            else:
                self._begin = ()
        return None
