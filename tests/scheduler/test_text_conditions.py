"""Conditions on a turn's text: its end, however it is split, and no release of cut text."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.backends.params import StoppingParams
from inferd.backends.params import sampler_options as params
from inferd.scheduler.stopping import (
    COMPLETE_CONDITIONS,
    WITHHELD_BYTES_MAX,
    TextAssembler,
    TurnConditions,
)

SIZES = st.lists(st.integers(0, 4), max_size=30)
TEXTS = st.text('abEND.!?。 "\n\t`~{}[]\\ü😀', max_size=40)
CONDITIONS = st.builds(
    StoppingParams,
    stop_patterns=st.lists(
        st.sampled_from(["END", r"\s*END", "b.*d", r"[.!?]\n", "ü+a", r"(?s)\{.*\}", "a|ab"]),
        max_size=3,
    ).map(tuple),
    stop_complete=st.lists(st.sampled_from(sorted(COMPLETE_CONDITIONS)), unique=True).map(tuple),
    n_indent=st.integers(0, 3),
)


def assembler_of(
    stopping: StoppingParams, stop: tuple[str, ...] = (), keep: tuple[str, ...] = ()
) -> TextAssembler:
    watch = TurnConditions.from_params(stopping)
    return TextAssembler(stop, keep, None if watch is None else watch.text)


def outcome(assembler: TextAssembler, pieces: list[bytes]) -> tuple[bytes, str, str]:
    """Return the text, and the reason and detail of the ending."""
    out = b""
    for piece in pieces:
        released = assembler.add_piece(piece)
        out += released.text
        if released.ending is not None:
            assert assembler.add_piece(b"more") == (b"", None) and assembler.flush() == b""
            return out, released.ending.reason.name, released.ending.detail
    return out + assembler.flush(), "", ""


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@example(StoppingParams(stop_patterns=("b.*d",)), (), "ab END bd", [1, 1, 1, 1, 1, 1, 1, 1])
@example(StoppingParams(stop_patterns=("ü+a",)), ("ü",), "xüüa", [2, 1, 1, 1])
@given(
    CONDITIONS,
    st.lists(st.text("abEND.ü", min_size=1, max_size=3), max_size=2).map(tuple),
    TEXTS,
    SIZES,
)
def test_a_turn_ends_at_the_same_place_however_its_text_is_split(
    stopping: StoppingParams, stop: tuple[str, ...], text: str, sizes: list[int]
) -> None:
    whole = outcome(assembler_of(stopping, stop), [text.encode()])
    split = outcome(assembler_of(stopping, stop), cut(text.encode(), sizes))
    bytewise = outcome(assembler_of(stopping, stop), [bytes((b,)) for b in text.encode()])
    assert split == bytewise == whole
    assert text.startswith(whole[0].decode())


@given(CONDITIONS, TEXTS, SIZES, st.integers(0, 30))
def test_a_resumed_turn_ends_at_the_same_place(
    stopping: StoppingParams, text: str, sizes: list[int], taken: int
) -> None:
    """After a worker's death, the sent text is replayed, and the reader keeps what it has."""
    pieces = cut(text.encode(), sizes)
    expected = outcome(assembler_of(stopping, ("NDE",)), pieces)
    before, sent, shown, stopped = assembler_of(stopping, ("NDE",)), b"", b"", False
    for piece in pieces[:taken]:
        sent += piece
        released = before.add_piece(piece)
        shown += released.text
        stopped |= released.ending is not None
        if stopped:
            break
    after = assembler_of(stopping, ("NDE",))
    found = after.resume(sent, len(shown))
    assert (found.ending is not None) == stopped
    if found.ending is not None:
        reason, detail = found.ending.reason.name, found.ending.detail
        assert (shown + after.flush(), reason, detail) == expected
        return
    text_, reason, detail = outcome(after, pieces[taken:])
    assert (shown + text_, reason, detail) == expected


@given(CONDITIONS, st.binary(max_size=24), SIZES)
def test_bytes_that_are_not_text_are_released_unchanged(
    stopping: StoppingParams, data: bytes, sizes: list[int]
) -> None:
    text, reason, _ = outcome(assembler_of(stopping), cut(data, sizes))
    assert data.startswith(text)
    assert text == data or reason


# Patterns


@pytest.mark.parametrize(
    ("pattern", "pieces", "shown", "held"),
    [
        ("END", ["so E", "N"], "so ", "EN"),
        (r"\n+Q:", ["a\n", "\n", "b"], "a\n\nb", ""),
        ("(?s)x.*y", ["ax", "bcd"], "a", "xbcd"),
    ],
)
def test_only_text_that_may_still_match_is_withheld(
    pattern: str, pieces: list[str], shown: str, held: str
) -> None:
    assembler = assembler_of(StoppingParams(stop_patterns=(pattern,)))
    assert b"".join(assembler.add_piece(p.encode()).text for p in pieces).decode() == shown
    assert assembler.flush().decode() == held


def test_a_pattern_withholds_and_cuts_a_bounded_amount_of_text() -> None:
    stopping = StoppingParams(stop_patterns=("(?s)<.*>",))
    body = "é" * WITHHELD_BYTES_MAX  # two bytes each; the limit splits one
    pieces = [b"a<b", *(c.encode() for c in body), b">", b"no more"]
    text, reason, detail = outcome(assembler_of(stopping), pieces)
    assert (reason, detail) == ("pattern", "(?s)<.*>")
    whole = f"a<b{body}>".encode()
    assert whole.startswith(text) and text.decode()
    assert WITHHELD_BYTES_MAX - 1 <= len(whole) - len(text) <= WITHHELD_BYTES_MAX
    assert outcome(assembler_of(stopping), [whole])[0] == text
    assembler = assembler_of(stopping)
    for piece in pieces[:-2]:
        assembler.add_piece(piece)
    assert len(assembler.flush()) <= WITHHELD_BYTES_MAX, "the rest was released"


# Complete answers


def test_the_accepted_names_are_the_existing_conditions() -> None:
    assert set(params.COMPLETE_KINDS) == set(COMPLETE_CONDITIONS)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text('ab"{}[]\\ \nü', max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('a"}', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON.filter(lambda v: isinstance(v, (list, dict, str))), st.booleans(), TEXTS, SIZES)
def test_a_json_value_ends_the_turn_behind_its_last_character(
    value: object, ascii_: bool, rest: str, sizes: list[int]
) -> None:
    text = "\n " + json.dumps(value, ensure_ascii=ascii_, indent=1)
    stopping = StoppingParams(stop_complete=("json",))
    found = outcome(assembler_of(stopping), cut((text + rest).encode(), sizes))
    assert found == (text.encode(), "complete", "json")


@pytest.mark.parametrize("text", ["Here: {}", "7 ", "null ", '{"a": 1', '["]"', "[}", "} {}", " "])
def test_an_incomplete_json_value_ends_no_turn(text: str) -> None:
    stopping = StoppingParams(stop_complete=("json",))
    assert outcome(assembler_of(stopping), [text.encode()]) == (text.encode(), "", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("See:\n```py\nx = '`'\n```\nThat's it", "See:\n```py\nx = '`'\n```"),
        ("~~~\n```\n~~~~ \nmore", "~~~\n```\n~~~~ "),
        ("````\n```\n````\nmore", "````\n```\n````"),
        ("   ```\r\na\r\n   ```\r\nb", "   ```\r\na\r\n   ```\r"),
        ("```\na\n``` no\n```", None),
        ("    ```\na\n    ```\nb", None),
        ("``` a`b\n```\nstill open", None),
        ("```", None),
    ],
)
def test_a_fenced_block_ends_the_turn_behind_its_closing_fence(
    text: str, shown: str | None
) -> None:
    stopping = StoppingParams(stop_complete=("fence",))
    expected = (text, "", "") if shown is None else (shown, "complete", "fence")
    out, *end = outcome(assembler_of(stopping), [c.encode() for c in text])
    assert (out.decode(), *end) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It is 3.5 m. And", "It is 3.5 m."),
        ('He said "no!" Then', 'He said "no!"'),
        ("... well?! Yes", "... well?!"),
        ("これです。次", "これです。"),
        ("「はい。」と", "「はい。」"),
        ("Wait…\nmore", "Wait…"),
        ("no end.", None),
        ("a.b.c", None),
        (" . . .", None),
    ],
)
def test_a_sentence_ends_the_turn_behind_its_end(text: str, shown: str | None) -> None:
    stopping = StoppingParams(stop_complete=("sentence",))
    expected = (text, "", "") if shown is None else (shown, "complete", "sentence")
    out, *end = outcome(assembler_of(stopping), [c.encode() for c in text])
    assert (out.decode(), *end) == expected


# Indent


def by_llama_server(text: str, n_indent: int) -> str:
    """Return the rest of *text*: lines except the first must begin with this many blanks."""
    for match in re.finditer(r"\n([ \t]*)(?=[^ \t])", text):
        if len(match[1]) < n_indent:
            return text[: match.end()]
    return text


@example("a\n  b\nc", 2)
@example("a\n\n  b", 1)
@given(st.text("ab \t\n", max_size=30), st.integers(1, 3))
def test_a_line_that_is_indented_too_little_ends_the_turn_as_in_llama_server(
    text: str, n_indent: int
) -> None:
    out, reason, detail = outcome(
        assembler_of(StoppingParams(n_indent=n_indent)), [c.encode() for c in text]
    )
    assert out.decode() == by_llama_server(text, n_indent)
    assert (reason, detail) == (
        ("indent", f"n-indent {n_indent}") if out.decode() != text else ("", "")
    )


# Several at once


def test_the_ending_that_is_met_first_counts() -> None:
    stopping = StoppingParams(stop_patterns=("de",), stop_complete=("json",))
    assert outcome(assembler_of(stopping, ("def",)), [b"abcdefg"])[1:] == ("pattern", "de")
    assert outcome(assembler_of(stopping, ("cd",)), [b"abcdefg"])[1:] == ("stop", "cd")
    assert outcome(assembler_of(stopping, ("cde",)), [b"abcdefg"]) == (b"ab", "stop", "cde")
    assert outcome(assembler_of(stopping), [b'["de"]'])[0] == b'["'


def test_a_reverse_prompt_stays_beside_withheld_text() -> None:
    assembler = assembler_of(StoppingParams(stop_patterns=("Us.*Z",)), keep=("User:",))
    assert outcome(assembler, [b"Hi ", b"Us", b"er", b": Z"]) == (b"Hi User:", "stop", "User:")
