"""Regular expressions on a growing text: the first match, and text that may still become a match.

Patterns have Python's syntax, are parsed by its parser and run as an automaton (Thompson 1968;
the sets of states of R. Cox, "Regular Expression Matching Can Be Simple And Fast", 2007). Each
character is read once, in time bounded by the number of states. The engines on PyPI either cannot
report what may still match (google-re2) or take exponential time (regex).

The match that ends first counts; of several that end there, the one that begins first. Constructs
that depend on the text that follows (`$`, `\\b`, lookahead) or need memory (backreferences) are
refused.

The parser is a private module of Python, and so is the compiler, which is used for the parts that
consume a character. A self-test at import runs each construct; if a result differs, every pattern
is refused.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any

from .errors import InvalidArgument, UnsupportedOperation

PATTERN_CHARACTERS_MAX = 500
STATES_MAX = 1000
STEPS_MAX = 3 * STATES_MAX
"""Steps of the compiler. They are bounded, too, because repeats of nothing create no states."""
GROUPS_OPEN_MAX = 50
WEIGHT_MAX = 1000
"""States that one character can take patterns through: 0.2 ms if all are active (measured)."""
_PASSED_MAX = 1000
"""Characters for which a pattern caches the tests that each one passes."""
SELF_TEST: tuple[tuple[str, str, tuple[int, int] | None], ...] = (
    ("b(?:c|dd)e", "xbdde", (1, 5)),
    ("[^a-c\\d]x", "1xzx", (2, 4)),
    ("[\\W_]\\S", "a_b", (1, 3)),
    ("a{2,3}?b*c+", "aaabbc", (0, 6)),
    ("(?i)A[^b].", "xac\n", None),
    ("(?sa)[^x]\\w.", "xa\u00fca\n", (2, 6)),
    ("(?m)^b", "ab\nb", (3, 4)),
    ("\\Ab(?i:C)", "bC", (0, 2)),
    ("^b", "ab", None),
)
"""Patterns with each accepted construct, a text, and the position of the match."""
_REFUSED = ("a$", "a\\b", "(?=a)a", "(?<!b)a", "(a)\\1", "a++", "(?>a)", "a*", "(a")
_ACCEPT = -1
"""The number of the state at the end of a match."""
_NO_TEST = 0
"""In place of a test's bit: the state consumes no character."""
_BEGIN, _LINE, _INSIDE = 0, 1, 2
"""The text before a position: empty, the end of a line, another character. They index `begin`."""
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
    "FAILURE": "a construct that never matches",
}
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
"""The operations that consume one character."""
_CHARSETS = re.ASCII | re.UNICODE


def byte_size(text: str) -> int:
    """Return the size of *text*, in which invalid bytes are surrogate escapes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


class Pattern:
    """A regular expression as an automaton; with *whole* it matches only from the text's beginning.

    States are numbered, and each test is one bit. A state consumes a character if the bit of the
    state's test (`test_of`) is among those of the tests that the character passes (`passed`).
    `after` has, by state, a pair: the states that follow a consumed newline, and those that follow
    another character.

    :raises InvalidArgument: *text* is not a pattern, is too large, matches the empty text, or
        depends on text that follows.
    :raises UnsupportedOperation: Python's parser failed the self-test.
    """

    def __init__(self, text: str, *, whole: bool = False):
        self.text, self.whole = text, whole
        self.test_of: list[int] = []
        """By state, the bit of its test, or `_NO_TEST`."""
        self._bits: dict[Any, int] = {}
        """By part of the pattern, the bit of its test."""
        self._tests: dict[int, Callable[[], re.Pattern[str]]] = {}
        """By bit, the test: Python's own pattern of one character, compiled at its first use."""
        self.passed = lru_cache(_PASSED_MAX)(self._tests_passed)
        self._edges: list[tuple[int, ...]] = []
        self._lines: dict[int, bool] = {}
        """Anchor states; true: passed at the beginning of each line, false: only of the text."""
        self.weight = 0
        """States that one character takes the pattern through if all are active."""
        self.steps = 0
        """Steps of the compiler."""
        self._depth = 0
        first = self._sequence(*_parsed(text), _ACCEPT)
        self.begin = [self._closure(first, before) for before in (_BEGIN, _LINE, _INSIDE)]
        """The states in which a match begins, indexed by the text before it (`_BEGIN`, …)."""
        if any(_ACCEPT in states for states in self.begin):
            raise _refused(text, "it matches the empty text, and so everywhere")
        self.after = [self._following(state) for state in range(len(self.test_of))]

    def _following(self, state: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.test_of[state] == _NO_TEST:
            return (), ()
        [following] = self._edges[state]
        return self._closure(following, _LINE), self._closure(following, _INSIDE)

    @staticmethod
    @lru_cache(64)
    def cached(text: str, whole: bool = False) -> Pattern:
        """Return the pattern of *text*, from a cache."""
        return Pattern(text, whole=whole)

    def _tests_passed(self, character: str) -> int:
        """Return the bits of the tests that *character* passes."""
        return sum(bit for bit, test in self._tests.items() if test().fullmatch(character))

    def _closure(self, state: int, before: int) -> tuple[int, ...]:
        """Return the states that consume a character, and the end, as far as *state* leads to them
        without a character.
        """
        found, seen, todo = list[int](), set[int](), [state]
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            if state == _ACCEPT or self.test_of[state] != _NO_TEST:
                found.append(state)
            elif state not in self._lines or self._passes_line(state, before):
                todo += self._edges[state]
        if before == _INSIDE:
            self.weight += len(seen)
            if self.weight > WEIGHT_MAX:
                why = f"one character takes it through over {WEIGHT_MAX} states"
                raise _refused(self.text, f"{why}: use fewer repeats and alternatives")
        return tuple(found)

    def _passes_line(self, state: int, before: int) -> bool:
        return before == _BEGIN or (before == _LINE and self._lines[state])

    # Compilation, from the end to the beginning.

    def _state(self, test: int, *following: int) -> int:
        if len(self.test_of) >= STATES_MAX:
            raise _refused(self.text, f"it has more than {STATES_MAX} states")
        self.test_of.append(test)
        self._edges.append(following)
        return len(self.test_of) - 1

    def _sequence(self, items: Iterable[Any], flags: int, then: int) -> int:
        """Compile *items*, followed by the state *then*; return their first state."""
        self.steps += 1
        self._depth += 1
        if self._depth > GROUPS_OPEN_MAX:
            raise _refused(self.text, f"over {GROUPS_OPEN_MAX} groups and repeats are open at once")
        if self.steps > STEPS_MAX:
            raise _refused(self.text, "it repeats too much")
        for op, value in reversed(list(items)):
            then = self._item(op, value, flags, then)
        self._depth -= 1
        return then

    def _item(self, op: Any, value: Any, flags: int, then: int) -> int:
        match op.name:
            case "SUBPATTERN":
                _, added, removed, items = value
                if added & _CHARSETS:
                    flags &= ~_CHARSETS
                return self._sequence(items, (flags | added) & ~removed, then)
            case "BRANCH":
                return self._state(_NO_TEST, *(self._sequence(i, flags, then) for i in value[1]))
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, items = value
                return self._repeat(low, high, items, flags, then)
            case "AT" if value.name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
                state = self._state(_NO_TEST, then)
                lines = value.name == "AT_BEGINNING" and flags & re.MULTILINE
                self._lines[state] = bool(lines)
                return state
        return self._state(self._test(op, value, flags), then)

    def _test(self, op: Any, value: Any, flags: int) -> int:
        """Return the bit of the test for this part of the pattern, which repeats share."""
        key = (op, id(value) if isinstance(value, list) else value, flags)
        if key not in self._bits:
            if op.name not in _CHARACTERS:
                name = value.name if op.name == "AT" else op.name
                why = f"{_NEVER.get(name, name)} cannot be decided while text grows"
                raise _refused(self.text, why)
            part = _parser.SubPattern(_parser.State(), [(op, value)])
            bit = self._bits[key] = 1 << len(self._tests)
            self._tests[bit] = cache(partial(_compiler.compile, part, flags))
        return self._bits[key]

    def _repeat(self, low: int, high: int, items: Any, flags: int, then: int) -> int:
        if high is _parser.MAXREPEAT:
            loop = self._state(_NO_TEST)
            self._edges[loop] = (self._sequence(items, flags, loop), then)
            then = loop
        else:
            end = then
            for _ in range(high - low):
                then = self._state(_NO_TEST, self._sequence(items, flags, then), end)
        for _ in range(low):
            then = self._sequence(items, flags, then)
        return then


def _parsed(text: str) -> tuple[Any, int]:
    if _parser_failure:
        raise UnsupportedOperation(
            f"patterns cannot be used on Python {sys.version.split()[0]}: its parser of regular"
            f" expressions has changed ({_parser_failure})",
            hint="run inferd on a Python version that it was tested with, or leave out"
            " stop-patterns and the grammar-triggers that are texts",
        )
    if len(text) > PATTERN_CHARACTERS_MAX:
        raise _refused(text, f"it has {len(text)} characters; {PATTERN_CHARACTERS_MAX} at most")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(text)
    except (re.error, OverflowError, RecursionError) as exc:
        raise _refused(text, str(exc)) from None
    return tree, tree.state.flags


def _refused(text: str, why: str) -> InvalidArgument:
    shown = text if len(text) <= 40 else f"{text[:40]}…"
    return InvalidArgument(
        f"the pattern {shown!r}: {why}",
        hint="use another pattern, without references back and conditions, that is never empty",
    )


class RegexMatcher:
    """One pattern on one text that arrives in pieces. Positions are byte offsets in the text."""

    def __init__(self, pattern: Pattern):
        self._pattern = pattern
        self._threads: dict[int, int] = {}
        """By active state, where the first match that reached it began."""
        self._begin: tuple[int, ...] = pattern.begin[_BEGIN]

    @property
    def pending(self) -> int | None:
        """The beginning of the text that may still become a match; None if there is none."""
        return min(self._threads.values(), default=None)

    def match_text(self, text: str, at: int) -> tuple[int, int] | None:
        """Match *text*, which begins at byte *at*; return where the first match begins and ends.

        Text after a match is not read, so the matcher must not be fed again.
        """
        pattern = self._pattern
        test_of, follow = pattern.test_of, pattern.after
        for character in text:
            end = at + byte_size(character)
            passed, inside = pattern.passed(character), character != "\n"
            after: dict[int, int] = {}
            for state, start in self._threads.items():
                if test_of[state] & passed:
                    for following in follow[state][inside]:
                        if start < after.get(following, end):
                            after[following] = start
            for state in self._begin:
                if test_of[state] & passed:
                    for following in follow[state][inside]:
                        after.setdefault(following, at)
            if _ACCEPT in after:
                return after[_ACCEPT], end
            self._threads, at = after, end
            self._begin = () if pattern.whole else pattern.begin[_INSIDE if inside else _LINE]
        return None


def _self_test() -> str:
    """Return the first difference between Python's parser and the expected one; empty if equal."""
    try:
        for text, sample, expected in SELF_TEST:
            found = RegexMatcher(Pattern(text)).match_text(sample, 0)
            if found != expected:
                return f"{text!r} matches {sample!r} at {found}, not at {expected}"
        for text in _REFUSED:
            with suppress(InvalidArgument):
                Pattern(text)
                return f"{text!r} is accepted"
    except Exception as exc:  # a changed parser may raise anything
        return f"{type(exc).__name__}: {exc}"
    return ""


_parser: Any = None
_compiler: Any = None
_parser_failure = ""
try:
    _parser, _compiler = map(importlib.import_module, ("re._parser", "re._compiler"))
except ImportError as exc:
    _parser_failure = str(exc)
else:
    _parser_failure = _self_test()
