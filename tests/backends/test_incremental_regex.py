"""Regular expressions on a growing text match like Python's, and report what may still match."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.backends.errors import InvalidArgument
from inferd.backends.incremental_regex import (
    GROUPS_OPEN_MAX,
    PATTERN_CHARACTERS_MAX,
    SELF_TEST,
    STATES_MAX,
    WEIGHT_MAX,
    Pattern,
    RegexMatcher,
    byte_size,
)

ALPHABET = "abAB1_ \nü😀"
TEXTS = st.text(ALPHABET, max_size=16)
ATOMS = st.sampled_from(
    ["a", "b", "B", "ü", "😀", ".", "[ab]", "[^a]", r"\d", r"\w", r"\S", r"\n", "[a-z1]", r"[^\W_]"]
)


def grown(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(part, min_size=1, max_size=3).map("".join),
        st.lists(part, min_size=2, max_size=3).map(lambda p: f"(?:{'|'.join(p)})"),
        st.tuples(part, st.sampled_from(["*", "+", "?", "{1,2}", "{2}", "{2,}", "*?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
        part.map(lambda p: f"^{p}"),
    )


PATTERNS = st.tuples(
    st.sampled_from(["", "(?i)", "(?m)", "(?s)", "(?a)"]), st.recursive(ATOMS, grown, max_leaves=6)
).map("".join)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def place(text: str, index: int) -> int:
    return byte_size(text[:index])


def first_by_python(pattern: str, text: str) -> tuple[int, int] | None:
    """Return the match that ends first; of those that end there, the one that begins first."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if compiled.fullmatch(text, begin, end):
                return place(text, begin), place(text, end)
    return None


def taken(pattern: str) -> Pattern | None:
    try:
        return Pattern(pattern)
    except InvalidArgument as exc:
        assert "empty text" in exc.message, exc.message
        return None


@example("(?m)^b", "a\nb", [])
@example("(?:a|ab)b", "ab", [])
@example("(?i)ü", "Ü", [])
@example("(?:aab|ab)a", "aaba", [])
@given(PATTERNS, TEXTS, st.lists(st.integers(0, 3), max_size=6))
def test_the_match_is_the_first_to_end_in_python_however_the_text_is_split(
    pattern: str, text: str, sizes: list[int]
) -> None:
    compiled = taken(pattern)
    if compiled is None:
        assert re.compile(pattern).match("") or "^" in pattern
        return
    matcher, at, found = RegexMatcher(compiled), 0, None
    for piece in cut(text, sizes):
        found = matcher.match_text(piece, at)
        at += byte_size(piece)
        if found is not None:
            break
    assert found == first_by_python(pattern, text)


@given(PATTERNS, TEXTS, TEXTS)
def test_the_text_of_a_match_was_pending_before(pattern: str, text: str, more: str) -> None:
    compiled = taken(pattern)
    if compiled is None:
        return
    matcher = RegexMatcher(compiled)
    if matcher.match_text(text, 0) is not None:
        return
    pending, size = matcher.pending, byte_size(text)
    found = matcher.match_text(more, size)
    if found is not None and found[0] < size:
        assert pending is not None and pending <= found[0]


@pytest.mark.parametrize(
    ("pattern", "text", "pending"),
    [("ab+c", "xxab", 2), ("ab+c", "xxabd", None), ("abc|b", "xa", 1), ("a.*z", "a\nb", None)],
)
def test_only_text_that_may_still_become_a_match_is_pending(
    pattern: str, text: str, pending: int | None
) -> None:
    matcher = RegexMatcher(Pattern(pattern))
    assert matcher.match_text(text, 0) is None
    assert matcher.pending == pending


def test_a_pattern_at_its_limits_is_accepted() -> None:
    deep = GROUPS_OPEN_MAX - 1
    assert RegexMatcher(Pattern("(" * deep + "a" + ")" * deep)).match_text("ba", 0) == (1, 2)
    assert Pattern(f"a{{{WEIGHT_MAX - 2}}}b").weight == WEIGHT_MAX
    assert Pattern("a" * PATTERN_CHARACTERS_MAX).weight == PATTERN_CHARACTERS_MAX + 1


def test_what_a_pattern_caches_of_a_character_is_small() -> None:
    pattern = Pattern("".join(f"[^{chr(0x4E00 + n)}]" for n in range(PATTERN_CHARACTERS_MAX // 4)))
    assert sys.getsizeof(pattern.passed("a")) < 100


def test_a_whole_pattern_matches_only_from_the_beginning() -> None:
    assert RegexMatcher(Pattern("b", whole=True)).match_text("ab", 0) is None
    assert RegexMatcher(Pattern("ab", whole=True)).match_text("ab", 0) == (0, 2)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "missing \\)"),
        ("a*", "empty text"),
        ("^", "empty text"),
        ("a$", r"\$ cannot be decided"),
        (r"a\b", r"\\b cannot be decided"),
        (r"a\Z", r"\\Z cannot be decided"),
        ("a(?=b)", "lookahead"),
        ("(?<!a)b", "lookbehind"),
        (r"(a)\1", "backreference"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("a" * (PATTERN_CHARACTERS_MAX + 1), f"{PATTERN_CHARACTERS_MAX} at most"),
        (f"a{{{STATES_MAX + 1}}}", f"more than {STATES_MAX} states"),
        ("(?:a?){50}b", f"through over {WEIGHT_MAX} states"),
        ("((a{99}){99}){99}", f"more than {STATES_MAX} states"),
        ("(?:(?:(?:|){9999}){9999}){9999}", "repeats too much|more than"),
        ("(?:(?i:){4000}){4000}b", "repeats too much"),
        ("(" * GROUPS_OPEN_MAX + "a" + ")" * GROUPS_OPEN_MAX, f"over {GROUPS_OPEN_MAX} groups"),
        ("a{99999999999}", "too large"),
    ],
)
def test_a_pattern_that_cannot_be_run_is_refused_with_the_reason(pattern: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        Pattern(pattern)
    assert "use another pattern" in caught.value.hint


def test_a_pattern_that_takes_other_engines_exponential_time_has_few_active_states() -> None:
    pattern = Pattern("(?:a+)+(?:a+)+(?:a+)+b")
    matcher = RegexMatcher(pattern)
    assert matcher.match_text("a" * 5000, 0) is None
    assert matcher.pending == 0
    assert len(matcher._threads) <= len(pattern.test_of) < 30


CHANGED_PARSERS = {
    "missing": "sys.modules['re._parser'] = None",
    "emptied": "sys.modules['re._parser'] = types.ModuleType('re._parser')",
    "other operations": "constants.SUBPATTERN.name = 'GROUP'; constants.LITERAL.name = 'CHAR'",
    "other repeats": "changed = types.ModuleType('re._parser'); changed.parse = parser.parse;"
    "changed.MAXREPEAT = object(); sys.modules['re._parser'] = changed",
    "silently wrong": "changed = types.ModuleType('re._parser');"
    "changed.parse = lambda text: parser.parse('x');"
    "changed.MAXREPEAT = parser.MAXREPEAT; sys.modules['re._parser'] = changed",
}
ON_A_CHANGED_PARSER = """
import re, re._parser as parser, re._constants as constants, sys, types
import tokenize
{change}
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.params import adjust_parameters
assert adjust_parameters({{"stop-patterns": [], "temp": 0.0}})[0]
for values in (
    {{"stop-patterns": ["a+"]}},
    {{"grammar": 'root ::= "a"', "grammar-triggers": [("word", "a")]}},
):
    try:
        adjust_parameters(values)
    except UnsupportedOperation as exc:
        print(exc.message, "/", exc.hint)
    else:
        print("accepted")
"""


@pytest.mark.parametrize("change", CHANGED_PARSERS.values(), ids=CHANGED_PARSERS)
def test_a_changed_parser_disables_patterns_and_nothing_else(change: str) -> None:
    program = ON_A_CHANGED_PARSER.format(change=change)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "its parser of regular expressions has changed" in line
        assert "leave out stop-patterns" in line


@pytest.mark.parametrize(("pattern", "text", "expected"), SELF_TEST)
def test_the_self_test_expects_what_python_finds(
    pattern: str, text: str, expected: tuple[int, int] | None
) -> None:
    assert first_by_python(pattern, text) == expected
