"""Texts with marks, in whose places images and sounds are tokenized."""

from __future__ import annotations

import select
from collections.abc import Iterable
from pathlib import Path

import pytest

from inferd.backends import LanguageModel, ModelSpec
from inferd.backends.echo.model import EchoModel
from inferd.backends.echo.options import PROMPT_BEGIN, PROMPT_END
from inferd.backends.media import MarkedMedia
from inferd.scheduler import messages as m
from inferd.scheduler.engine.task_table import EngineClock
from inferd.scheduler.engine.tokenizing import (
    LONG_BYTES,
    MediaMarks,
    TokenizeQueue,
    marked_tokens,
)
from inferd.scheduler.record import Recorder
from tests.backends.tiny import load_tiny
from tests.scheduler.media_bench import image

ONE, TWO = image("one", 5).entries(), image("two", 7).entries()
MEDIA = [
    MarkedMedia("<1>", m.pack_tokens(ONE)),
    MarkedMedia("<2>", m.pack_tokens([65, *TWO, 66])),
    MarkedMedia("<absent>", m.pack_tokens(ONE)),
]


def echo(ctx_size: int = 1 << 16) -> EchoModel:
    return EchoModel(ModelSpec(name="echo", backend="echo", slots=1, ctx_size=ctx_size))


def answer_of(request: m.InputRequest, model: LanguageModel | None = None) -> m.Report:
    queue = TokenizeQueue(model or echo(), Recorder(), EngineClock(lambda: 0.0), dict)
    queue.add_request(request)
    while not (reports := list(queue.answer_requests())):
        assert select.select([lane.thread for lane in queue.lanes], [], [], 10)[0]
    queue.close()
    [report] = reports
    return report


def tokens_of(text: bytes, *, special: bool = True, bos: bool = True) -> list[int]:
    request = m.Tokenize(1, text, special=special, bos=bos, media=MEDIA)
    report = answer_of(request)
    assert isinstance(report, m.CommandResult)
    return m.unpack_tokens(report.value)


def framed(*parts: Iterable[int]) -> list[int]:
    return [PROMPT_BEGIN, *(token for part in parts for token in part), PROMPT_END]


def test_items_stand_where_their_marks_stood() -> None:
    second = [65, *TWO, 66]
    assert tokens_of(b"see <1> and <2>!") == framed(b"see ", ONE, b" and ", second, b"!")
    assert tokens_of(b"<1>") == framed(ONE)
    assert tokens_of(b"<2><1>") == framed(second, ONE)
    assert tokens_of(b"a<1", special=False, bos=False) == [*b"a<1"]
    assert tokens_of(b"a<1>b", special=False, bos=False) == [*b"a", *ONE, *b"b"]


def test_a_mark_that_stands_twice_is_refused() -> None:
    report = answer_of(m.Tokenize(1, b"<1> <1>", special=True, bos=True, media=MEDIA))
    assert isinstance(report, m.Refused) and report.error["name"] == "InvalidArgument"


def test_a_long_text_has_its_items_too() -> None:
    long = b"x" * LONG_BYTES
    assert tokens_of(long + b"<1>" + long) == framed(long, ONE, long)


def test_a_chat_has_the_items_of_the_part_that_extends_its_history() -> None:
    message = {"role": "user", "content": "look: <1> yes <2>?"}
    whole = answer_of(m.ChatPrompt(1, [message], "", media=MEDIA))
    assert isinstance(whole, m.CommandResult)
    text, packed, appended, _ = whole.value
    assert text == message["content"] and not appended
    assert m.unpack_tokens(packed) == framed(b"look: ", ONE, b" yes ", [65, *TWO, 66], b"?")
    more = m.ChatPrompt(1, [message], "look: <1> yes", answer=" yes", media=MEDIA)
    report = answer_of(more)
    assert isinstance(report, m.CommandResult)
    text, packed, appended, _ = report.value
    assert text == message["content"] and appended
    assert m.unpack_tokens(packed) == framed(b" ", [65, *TWO, 66], b"?")


@pytest.mark.parametrize("cut_behind", range(12))
@pytest.mark.parametrize("ctx_size", range(2, 16))
def test_a_text_that_is_cut_has_no_part_of_a_mark(ctx_size: int, cut_behind: int) -> None:
    text = b"aaa<1>" + b"b" * 20 + b"<2>ccc"
    request = m.Tokenize(1, text, True, True, cut_behind=cut_behind, media=MEDIA)
    report = answer_of(request, echo(ctx_size))
    assert isinstance(report, m.CommandResult)
    tokens = m.unpack_tokens(report.value)
    assert not set(tokens) & set(b"<12>") and len(tokens) < len(text) + len(ONE) + len(TWO)
    text_kept = [token for token in tokens if token in set(b"abc")]
    assert text_kept == sorted(text_kept)


def test_the_texts_beside_an_item_are_tokenized_by_themselves(tmp_path: Path) -> None:
    """The token that begins a prompt stands once, at the beginning."""
    model = load_tiny("llama", tmp_path)
    before, after = b"see ", b" and say"
    expected = (
        model.tokenize(before, special=True, bos=True),
        model.tokenize(after, special=True, bos=False),
    )
    found = marked_tokens(model, before + b"<1>" + after, True, True, MediaMarks(MEDIA))
    assert found == [*expected[0], *ONE, *expected[1]]
    begin = model.tokenize(b"", special=True, bos=True)
    assert begin and found[: len(begin)] == begin
    assert marked_tokens(model, b"<1>", True, True, MediaMarks(MEDIA)) == [*begin, *ONE]
    model.close()
