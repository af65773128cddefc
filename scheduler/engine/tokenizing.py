"""Requests for texts, answered between the engine's steps in bounded time and in a fair order.

They tokenize and detokenize texts, render chats, and make the samplers of tasks whose parameters
contain texts. Long texts are tokenized in a thread, and long renderings are awaited in another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...backends import InferdError, Model
from ...backends.base import StillRendering
from ...backends.errors import OutOfMemory, PromptTooLong
from .. import messages as m
from ..policy.text_order import TextOrder
from ..policy.thread_share import ThreadShare
from ..priority import Requester
from ..recording.recorder import ActivityKind, Recorder
from .task_table import EngineClock
from .text_thread import NICE, TextThread

TOKENIZE_S = 0.02
"""Time for texts per step: 1 M characters take 0.3–0.6 s, which no stream should wait for."""
LONG_BYTES = 16 << 10
"""A longer text is tokenized in the thread. It stays whole, so that its tokens do not change."""
RENDER_S = 0.01
"""A rendering that takes longer is awaited in a thread."""
PIECES = 4096
"""Tokens that are detokenized at a time: 0.3 ms, or 4 ms for the first time."""

Parts = Generator["_Call | None", Any, object]
"""The work on a request. It yields a call for a thread, whose result it gets, or None where other
requests may precede the rest.
"""


def appended_text(text: str, history: str, answer: str = "") -> str | None:
    """Return the part of *text* after *history*, which ends with *answer*; None if *text* does not
    begin with it. White space around the answer may differ: templates trim it.
    """
    if not history:
        return None
    before = history.removesuffix(answer)
    for answered in (history[len(before) :], answer.rstrip(), answer.lstrip(), answer.strip()):
        if text.startswith(before + answered):
            return text[len(before) + len(answered) :]
    return None


@dataclass(slots=True)
class _Work:
    """The work on a *request*, or for a task: then without an answer."""

    requester: Requester
    parts: Parts
    request: m.TextRequest | None = None
    call: _Call | None = None
    """The call that comes next in a thread."""
    done: bool = False


class _Lane:
    """Work that waits for a thread, and the work that is in it. A *recorder* records when the
    thread uses the model, as that may end the process.
    """

    def __init__(self, thread: TextThread, recorder: Recorder | None = None):
        self.thread, self._recorder = thread, recorder
        self.waiting: TextOrder[_Work] = TextOrder()
        self._in_thread: _Work | None = None

    def begin_next(self) -> None:
        """Make the next call if the thread is idle."""
        requester = None if self.thread.busy else self.waiting.next_requester()
        if requester is not None:
            self._in_thread = work = self.waiting.remove_first(requester)
            assert work.call is not None
            self._record(busy=True)
            self.thread.begin_call(work.call.function)

    def take_result(self) -> tuple[_Work, Any] | None:
        """Return the work whose call has ended, and the call's outcome."""
        result = self.thread.take_result()
        if result is None:
            return None
        self._record(busy=False)
        work, self._in_thread = self._in_thread, None
        assert work is not None
        self.waiting.count_work(work.requester.owner, result.seconds)
        return work, result.outcome

    def _record(self, *, busy: bool) -> None:
        if self._recorder is not None:
            self._recorder.record_text_thread(busy=busy)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function for the thread of a lane."""

    lane: _Lane
    function: Callable[[], Any]


class TokenizeQueue:
    """Answers requests for texts; owned by the engine. *busy_classes* returns the owners of the
    tasks that compute, with their highest class. Time counts, and not CPU time: rendering waits for
    another process. In the first *alone_s* seconds the thread is not used.

    `tasks_expected` counts the tokenized prompts whose tasks follow at once.
    """

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        clock: EngineClock,
        busy_classes: Callable[[], Mapping[int, int]],
        seconds: Callable[[], float] = time.monotonic,
        alone_s: float = 0.0,
    ):
        self._model, self._recorder, self._clock = model, recorder, clock
        self._seconds, self._alone_until = seconds, seconds() + alone_s
        self._busy_classes = busy_classes
        self.tasks_expected = 0
        self._short: TextOrder[_Work] = TextOrder()
        self._tokenizing = _Lane(TextThread(time.thread_time, NICE), recorder)
        self._rendering = _Lane(TextThread(time.monotonic))
        self._lanes = self._tokenizing, self._rendering
        self._share = ThreadShare()
        self._bytes_max = model.info.ctx_size * model.info.token_bytes_max

    def __len__(self) -> int:
        """Return the number of requests that the engine's thread works on."""
        return len(self._short)

    @property
    def threads(self) -> tuple[TextThread, ...]:
        """The threads, whose results wake the engine."""
        return tuple(lane.thread for lane in self._lanes)

    def close(self) -> None:
        """End the thread that uses the model, which is freed next."""
        self._tokenizing.thread.close()

    def add_request(self, request: m.TextRequest) -> None:
        """Queue a request."""
        work = _Work(request.requester, self._answer(request), request)
        self._short.add_request(request.requester, work)

    def add_work(self, requester: Requester, do: Callable[[], None]) -> None:
        """Queue a function that works for a task; it handles its own errors."""
        self._short.add_request(requester, _Work(requester, _parts_of(do)))

    def answer_requests(self) -> Iterator[m.Report]:
        """Answer requests until the time of one step is used up. Beside tasks of other owners whose
        class is not lower, the work for an owner is limited to a share of the thread.
        """
        for lane in self._lanes:
            if (ended := lane.take_result()) is not None:
                yield from self._continue(*ended)
        if self._short:
            yield from self._answer_short()
        for lane in self._lanes:
            lane.begin_next()

    def _answer_short(self) -> Iterator[m.Report]:
        end, now, busy = self._seconds() + TOKENIZE_S, self._clock.now, self._busy_classes()

        def competes(requester: Requester) -> bool:
            owner, priority = requester
            return any(o != owner and level >= priority for o, level in busy.items())

        def may(requester: Requester) -> bool:
            return not competes(requester) or self._share.may_work(requester.owner, now)

        while (requester := self._short.next_requester(may)) is not None:
            owners = len(self._short.owners)
            work, started = self._short.first_request(requester), self._seconds()
            yield from self._continue(work)
            seconds = self._seconds() - started
            if work.done or work.call is not None:
                self._short.remove_first(requester)
            self._short.count_work(requester.owner, seconds)
            if competes(requester):
                self._share.charge_owner(requester.owner, seconds, now, owners)
            if self._seconds() >= end:
                return

    def _continue(self, work: _Work, outcome: Any = None) -> Iterator[m.Report]:
        """Continue *work* with the *outcome* of its call; yield the answer once it is done."""
        request, parts, work.call = work.request, work.parts, None
        if request is not None:
            self._recorder.record_activity(ActivityKind.PROMPT, [request.id])
        try:
            if isinstance(outcome, Exception):
                work.call = parts.throw(outcome)
            else:
                work.call = parts.send(outcome)
        except StopIteration as ended:
            work.done = True
            if request is not None:
                self.tasks_expected += not isinstance(request, m.Detokenize) and request.turn
                yield m.CommandResult(request.id, ended.value)
        except (InferdError, MemoryError) as exc:
            if request is None:
                raise
            work.done = True
            yield m.Refused(request.id, _error_of(exc).to_wire())
        else:
            if work.call is not None:
                work.call.lane.waiting.add_request(work.requester, work)

    def _answer(self, request: m.TextRequest) -> Parts:
        if isinstance(request, m.Tokenize):
            tokens = yield from self._tokenize(request.text, request.special, request.bos)
            return m.pack_tokens(tokens)
        if isinstance(request, m.Detokenize):
            return (yield from self._detokenize(m.unpack_tokens(request.tokens)))
        text = yield from self._render(request)
        appended = appended_text(text, request.history, request.answer)
        if appended is not None:
            tokens = yield from self._tokenize(appended.encode(), True, False)
        else:
            tokens = yield from self._tokenize(text.encode(), True, True)
        return text, m.pack_tokens(tokens), appended is not None

    def _render(self, request: m.ChatPrompt) -> Generator[_Call, Any, str]:
        try:
            return self._model.render(request.messages, request.rendering, RENDER_S)
        except StillRendering as exc:
            text: str = yield _Call(self._rendering, exc.finish)
            return text

    def _detokenize(self, tokens: list[int]) -> Generator[None, Any, bytes]:
        pieces = []
        for begin in range(0, len(tokens), PIECES):
            if begin:
                yield None
            pieces.append(b"".join(map(self._model.piece, tokens[begin : begin + PIECES])))
        return b"".join(pieces)

    def _tokenize(self, text: bytes, special: bool, bos: bool) -> Generator[_Call, Any, list[int]]:
        if len(text) > self._bytes_max:
            raise PromptTooLong(
                f"the prompt has {len(text)} bytes; a context of {self._model.info.ctx_size}"
                f" tokens holds at most {self._bytes_max}",
                data={"prompt_bytes": len(text), "prompt_bytes_max": self._bytes_max},
            )
        if len(text) <= LONG_BYTES or self._seconds() < self._alone_until:
            return self._model.tokenize(text, special=special, bos=bos)
        tokenize = partial(self._model.tokenize, text, special=special, bos=bos)
        tokens: list[int] = yield _Call(self._tokenizing, tokenize)
        return tokens


def _parts_of(do: Callable[[], None]) -> Parts:
    yield from ()
    do()
    return None


def _error_of(exc: InferdError | MemoryError) -> InferdError:
    if isinstance(exc, InferdError):
        return exc
    return OutOfMemory(  # another time there may be enough
        "there is too little memory to tokenize the text",
        hint="unload models or end other programs and try again, or send less text",
    )
