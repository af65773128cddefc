"""Reasoning split off from an answer: however it is cut, and from wherever it is gone on with."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.answer_form import PLAIN_ANSWERS, THINK
from inferd.backends.errors import InvalidArgument
from inferd.sessions.answers.parser import opened_by
from inferd.sessions.answers.source import SPACE_CHARACTERS_MAX as SPACE_MAX
from inferd.sessions.answers.splitter import (
    AnswerParts,
    AnswerSplitter,
    plain_splitter,
    resume_splitting,
)

OPEN, CLOSE = THINK.begin.encode(), THINK.end.encode()
PARTS = (b"<think>", b"</think>", b"<", b"</", b"think", b">", b" ", b"\n", b"a", "é".encode())
ANSWERS = st.lists(st.sampled_from(PARTS), max_size=24).map(b"".join)
CUTS = st.lists(st.integers(0, 80), max_size=12)


def splitter_of(opened: bool = False) -> AnswerSplitter:
    return plain_splitter("<think>\n" if opened else "")


def whole(answer: bytes, *, opened: bool = False) -> AnswerParts:
    return splitter_of(opened).split_last(answer)


def pieces(answer: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(answer), *(c for c in cuts if c < len(answer))})
    return [answer[a:b] for a, b in pairwise(places)]


def added(parts: list[AnswerParts]) -> AnswerParts:
    return AnswerParts(b"".join(p.text for p in parts), b"".join(p.reasoning for p in parts))


@pytest.mark.parametrize(
    ("answer", "text", "reasoning"),
    [
        (b"plain", b"plain", b""),
        (b"<think>hm</think>yes", b"yes", b"hm"),
        (b"\n <think>hm\n</think>\n\nyes", b"\n \n\nyes", b"hm\n"),
        (b"<think></think>yes", b"yes", b""),
        (b"<think>never closed", b"", b"never closed"),
        (b"<think>ends in a tag </thin", b"", b"ends in a tag </thin"),
        (b"<thinking>no tag", b"<thinking>no tag", b""),
        (b"<thi", b"<thi", b""),
        (b"say <think>a</think>", b"say <think>a</think>", b""),
        (b"<think>a</think>b<think>c</think>", b"b<think>c</think>", b"a"),
        (b"<think>a<think>b</think>c", b"c", b"a<think>b"),
        (b" " * SPACE_MAX + b"<think>a</think>b", b" " * SPACE_MAX + b"b", b"a"),
        (b" " * (SPACE_MAX + 1) + b"<think>a", b" " * (SPACE_MAX + 1) + b"<think>a", b""),
        (b"", b"", b""),
    ],
)
def test_an_answer_is_split(answer: bytes, text: bytes, reasoning: bytes) -> None:
    assert whole(answer) == AnswerParts(text, reasoning)


def test_a_prompt_that_opens_the_block_leaves_the_answer_inside_it() -> None:
    assert opened_by(PLAIN_ANSWERS, "<|assistant|>\n<think>\n") == "<think>"
    assert opened_by(PLAIN_ANSWERS, "<|assistant|>\n<think>\n\n</think>\n\n") == ""
    assert whole(b"hm</think>yes", opened=True) == AnswerParts(b"yes", b"hm")
    assert whole(b"hm", opened=True) == AnswerParts(b"", b"hm")


def test_white_space_that_is_too_long_for_a_block_is_sent_at_once() -> None:
    splitter = splitter_of()
    assert splitter.split(b" " * SPACE_MAX) == AnswerParts(b"")
    assert splitter.split(b" ") == AnswerParts(b" " * (SPACE_MAX + 1))
    assert splitter.split(b"\n") == AnswerParts(b"\n")


def test_without_the_format_everything_is_text() -> None:
    splitter = AnswerSplitter()
    assert splitter.split_last(b"<think>hm</think>yes") == AnswerParts(b"<think>hm</think>yes")


@given(ANSWERS, CUTS, st.booleans())
def test_stream_and_whole_are_equal_for_every_split(
    answer: bytes, cuts: list[int], opened: bool
) -> None:
    splitter = splitter_of(opened)
    sent = [splitter.split(piece) for piece in pieces(answer, cuts)]

    assert added([*sent, splitter.split_last(b"")]) == whole(answer, opened=opened)


@given(ANSWERS, st.booleans())
def test_nothing_is_lost_but_the_tags(answer: bytes, opened: bool) -> None:
    said = whole(answer, opened=opened)
    tags = len(answer) - len(said.text) - len(said.reasoning)
    assert tags in (0, len(CLOSE) if opened else len(OPEN), len(OPEN) + len(CLOSE))


@given(ANSWERS, CUTS, st.data(), st.booleans())
def test_a_reader_gets_the_rest_from_any_position(
    answer: bytes, cuts: list[int], data: st.DataObject, opened: bool
) -> None:
    """He has read some pieces; the daemon has written down more of the answer, or less."""
    parts = pieces(answer, cuts)
    reader = splitter_of(opened)
    read = parts[: data.draw(st.integers(0, len(parts)))]
    has = added([AnswerParts(b""), *(reader.split(piece) for piece in read)])
    sent = answer[: data.draw(st.integers(0, len(answer)))]

    text, splitter = resume_splitting(sent, has, lambda: splitter_of(opened))

    assert answer.startswith(text) or sent.startswith(text)
    rest = splitter.split_last(answer[len(text) :])
    assert added([has, rest]) == whole(answer, opened=opened)


@pytest.mark.parametrize(
    ("sent", "has", "rest", "parts"),
    [
        (b"<thi", AnswerParts(b"<thi"), b"nk>no tag", AnswerParts(b"nk>no tag")),
        (b"<think>a</th", AnswerParts(b"", b"a</th"), b"ink>b", AnswerParts(b"", b"ink>b")),
        (b" \n", AnswerParts(b" \n"), b"<think>a</think>b", AnswerParts(b"b", b"a")),
    ],
)
def test_bytes_that_were_held_back_and_that_a_reader_has_begin_no_tag(
    sent: bytes, has: AnswerParts, rest: bytes, parts: AnswerParts
) -> None:
    """A turn sends them when it is interrupted. Space alone is not a part of a tag."""
    text, splitter = resume_splitting(sent, has, splitter_of)

    assert text == sent
    assert splitter.split_last(rest) == parts


@pytest.mark.parametrize(
    "has", [AnswerParts(b"no"), AnswerParts(b"", b"ho"), AnswerParts(b"yet", b"hm")]
)
def test_who_has_something_else_is_refused(has: AnswerParts) -> None:
    with pytest.raises(InvalidArgument, match="differ from those that the interrupted turn sent"):
        resume_splitting(b"<think>hm</think>yes", has, splitter_of)
