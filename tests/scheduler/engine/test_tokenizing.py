"""The new part of a rendered chat, and texts that memory cannot hold."""

from __future__ import annotations

import select
import threading
from collections.abc import Sequence

import pytest

from inferd.backends import ModelSpec, Rendering
from inferd.backends.base import PLAIN_RENDERING, Message, StillRendering
from inferd.backends.echo.model import EchoModel
from inferd.scheduler import messages as m
from inferd.scheduler.engine.task_table import EngineClock
from inferd.scheduler.engine.tokenizing import LONG_BYTES, TokenizeQueue, appended_text
from inferd.scheduler.recording.recorder import Recorder


@pytest.mark.parametrize(
    ("text", "history", "answer", "rest"),
    [
        ("<u>q<a>yes</a><u>", "<u>q<a>yes", "yes", "</a><u>"),
        ("<u>q<a>yes</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a> yes</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a>yes\n</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a></a><u>", "<u>q<a>\n", "\n", "</a><u>"),
        ("<u>q<a></a><u>", "<u>q<a>", "", "</a><u>"),
        ("<u>q<a>yes", "<u>q<a>yes", "yes", ""),
        ("<u>q<a>no</a><u>", "<u>q<a>yes", "yes", None),
        ("<u>Q<a>yes</a><u>", "<u>q<a>yes", "yes", None),
        ("<u>q<a>yes</a><u>", "", "", None),
        ("<u>q</a>few<a>more", "<u>q</a>few<a>", "few", "more"),
    ],
)
def test_the_part_that_a_text_adds_to_the_history(
    text: str, history: str, answer: str, rest: str | None
) -> None:
    assert appended_text(text, history, answer) == rest


class Starved(EchoModel):
    """A model that runs out of memory for texts that begin with `huge`."""

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        if text.startswith(b"huge"):
            raise MemoryError
        return super().tokenize(text, special=special, bos=bos)


def test_a_text_that_memory_cannot_hold_is_refused_and_ends_no_process() -> None:
    model = Starved(ModelSpec(name="echo", backend="echo", slots=1, ctx_size=64))
    queue = TokenizeQueue(model, Recorder(), EngineClock(lambda: 0.0), dict)
    queue.add_request(m.Tokenize(1, b"huge", special=False, bos=False))
    queue.add_request(m.ChatPrompt(2, [{"role": "user", "content": "huge, too"}], ""))
    queue.add_request(m.Tokenize(3, b"hi", special=False, bos=False))
    reports: list[m.Report] = []
    while queue:
        reports += queue.answer_requests()
    one, two, three = reports
    for report in (one, two):
        assert isinstance(report, m.Refused)
        assert report.error["name"] == "MissingMemory" and "memory" in report.error["message"]
    assert three == m.CommandResult(3, m.pack_tokens(list(b"hi")))


def test_the_record_shows_that_the_thread_tokenizes_a_text() -> None:
    model, recorder = (
        EchoModel(ModelSpec(name="echo", backend="echo", ctx_size=1 << 16)),
        Recorder(),
    )
    queue = TokenizeQueue(model, recorder, EngineClock(lambda: 0.0), dict)
    queue.add_request(m.Tokenize(1, b"x" * (LONG_BYTES + 1), special=False, bos=False))
    reports = [*queue.answer_requests(), *queue.answer_requests()]
    assert queue.threads[0].busy == recorder.read_activity().beside_text
    while not reports:
        reports += queue.answer_requests()
    assert not recorder.read_activity().beside_text


def test_a_careful_engine_does_not_use_the_thread() -> None:
    model = EchoModel(ModelSpec(name="echo", backend="echo", ctx_size=1 << 16))
    now = 0.0
    queue = TokenizeQueue(
        model, Recorder(), EngineClock(lambda: 0.0), dict, lambda: now, alone_s=9.0
    )
    text = m.Tokenize(1, b"x" * (LONG_BYTES + 1), special=False, bos=False)
    queue.add_request(text)
    assert len(list(queue.answer_requests())) == 1 and not queue.threads[0].busy
    now = 9.0
    queue.add_request(text)
    assert list(queue.answer_requests()) == [] and queue.threads[0].busy


class SlowTemplate(EchoModel):
    """A model whose chats that begin with `slow` are rendered once `release` is set."""

    release = threading.Event()

    def render(
        self,
        messages: Sequence[Message],
        rendering: Rendering = PLAIN_RENDERING,
        wait_s: float | None = None,
    ) -> str:
        text = super().render(messages, rendering)
        if not text.startswith("slow"):
            return text

        def finish() -> str:
            assert self.release.wait(10)
            return text

        raise StillRendering(finish)


def test_a_long_rendering_delays_no_other_request() -> None:
    model = SlowTemplate(ModelSpec(name="echo", backend="echo", slots=1, ctx_size=64))
    queue = TokenizeQueue(model, Recorder(), EngineClock(lambda: 0.0), dict)
    for number, text in (1, "slow"), (2, "fast"):
        queue.add_request(m.ChatPrompt(number, [{"role": "user", "content": text}], ""))

    assert [report.id for report in answers(queue)] == [2]
    assert not queue and answers(queue) == []

    model.release.set()
    select.select([*queue.threads], [], [], 10)
    assert [report.id for report in answers(queue)] == [1]


def answers(queue: TokenizeQueue) -> list[m.CommandResult]:
    reports = list(queue.answer_requests())
    assert all(isinstance(report, m.CommandResult) for report in reports)
    return [report for report in reports if isinstance(report, m.CommandResult)]
