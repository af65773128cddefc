"""Requests with inputs, answered between the engine's steps in bounded time and in a fair order.

They tokenize and detokenize texts, render chats, compute tensors, and make the samplers of tasks
whose parameters contain texts. Threads tokenize long texts, render chats, compile grammars and
compute tensors; each has a lane, from which it gets its work in a fair order. Of a chat's text by
its template, only the part that extends the text of its history is tokenized.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...backends import InferdError, LanguageModel, Rendering, SamplingParams, TensorModel
from ...backends.errors import (
    InvalidArgument,
    OutOfMemory,
    PromptTooLong,
    Timeout,
    UnsupportedOperation,
)
from ...backends.media import MarkedMedia, text_tokens
from ...backends.texts import bytes_of, is_utf8
from .. import messages as m
from ..call_thread import CallResult, CallThread
from ..messages import ChatPrompt
from ..owner import Owner, Priority, Requester
from ..policy.order import TextOrder
from ..policy.slow_sampling import ThreadShare
from ..prefix import common_prefix
from ..rank_text import RankTokens, rank_tokens
from ..record import ActivityKind, Recorder
from .task_table import EngineClock

C = TypeVar("C")
Messages = list[dict[str, Any]]


class ChatText(NamedTuple):
    """The text of a chat, and the part of it that is *appended* to the history, or None if the text
    does not begin with the history. *form* is the number of the answer's form that was rendered.
    """

    text: str
    appended: str | None
    form: int = 0


def appended_text(text: str, history: str, answer: str = "") -> str | None:
    """Return the part of *text* after *history*, which ends with *answer*; None if *text* does not
    begin with the history. White space around the answer may differ, because templates trim it.
    """
    if not history:
        return None
    before = history.removesuffix(answer)
    for answered in (history[len(before) :], answer.rstrip(), answer.lstrip(), answer.strip()):
        if text.startswith(before + answered):
            return text[len(before) + len(answered) :]
    return None


def render_chat(
    request: ChatPrompt, render: Callable[[Messages, Rendering], C]
) -> Generator[C, Any, ChatText]:
    """Yield calls of *render*, whose results are sent back; return the text.

    Of the forms of an answer, the first one is used with which the text begins with the history. If
    only the last form is left, the first one is used whose calls the template writes in another
    way than the answer; then the part after the answer is appended. The last form, the answer's
    text, is avoided because it may break the order of roles later.

    :raises InvalidArgument: the template refuses all forms.
    """
    texts = dict[int, str]()
    refusal: InvalidArgument | None = None
    for number, messages in enumerate(_forms(request)):
        if number and number == len(request.forms):
            found = yield from _after_calls(request, texts, render)
            if found is not None:
                return found
        try:
            text = yield render(messages, request.rendering)
        except InvalidArgument as exc:
            refusal = refusal or exc
            continue
        appended = appended_text(text, request.history, request.answer)
        if appended is not None:
            return ChatText(text, appended, number)
        texts[number] = text
    if not texts:
        assert refusal is not None
        raise refusal
    number, text = next(iter(texts.items()))
    return ChatText(text, None, number)


def _forms(request: ChatPrompt) -> list[Messages]:
    """Return the messages with each form of the answer. The last form is the answer's text."""
    before, after = request.messages[: request.answer_at], request.messages[request.answer_at + 1 :]
    return [request.messages, *([*before, form, *after] for form in request.forms)]


def _after_calls(
    request: ChatPrompt, texts: Mapping[int, str], render: Callable[[Messages, Rendering], C]
) -> Generator[C, Any, ChatText | None]:
    """Return the first of *texts* that has the calls of its form, with the part after the answer.
    That part begins as it does in a rendering of the last form, the answer's text.
    """
    if not texts or not request.history:
        return None
    if "tool_calls" not in request.messages[request.answer_at]:
        return None  # a template may leave out reasoning on purpose
    forms, end = _forms(request), request.answer_at + 1
    ended = msgspec.structs.replace(request.rendering, add_generation_prompt=False)
    before = request.history.removesuffix(request.answer)
    try:
        raw = yield render(forms[-1][:end], ended)
        rest = _after_answer(raw, request.answer)
        if rest is None:
            return None
        for number, text in texts.items():
            known = yield render(forms[number][:end], ended)
            calls = forms[number][request.answer_at]["tool_calls"]
            extends = text.startswith(known) and known.startswith(before)
            if extends and _shows(known[len(before) :], calls):
                return ChatText(text, rest + text[len(known) :], number)
    except InvalidArgument:
        pass
    return None


def _after_answer(text: str, answer: str) -> str | None:
    """Return the part of *text* after its last *answer*, which templates trim."""
    for answered in (answer, answer.rstrip(), answer.lstrip(), answer.strip()):
        place = text.rfind(answered)
        if answered and place >= 0:
            return text[place + len(answered) :]
    return None


def _shows(text: str, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a template's *text* of an answer has the answer's *calls*."""
    for function in (call["function"] for call in calls):
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if function["name"] not in text or arguments not in text:
            return False
    return True


Parts = Generator["LaneCall | None", Any, object]
"""The work on a request. It yields a call for a thread, whose result is sent back to it, or None
where other requests may precede the rest.
"""


@dataclass(slots=True)
class LaneWork:
    """The work on a *request*, or for a task, which gets no answer."""

    requester: Requester
    parts: Parts
    request: m.InputRequest | None = None
    call: LaneCall | None = None
    """The call that comes next in a thread."""
    done: bool = False


class Lane:
    """Work that waits for a thread, and the work that is in it. A *recorder* records when the
    thread uses the model, because this use may end the process.
    """

    def __init__(
        self, thread: CallThread, recorder: Recorder | None = None, *, strict: bool = False
    ):
        self.thread, self._recorder = thread, recorder
        self._waiting: TextOrder[LaneWork] = TextOrder(strict=strict)
        self._in_thread: LaneWork | None = None

    @property
    def busy(self) -> bool:
        """Whether work is in the thread, or its result was not taken."""
        return self._in_thread is not None

    def add_work(self, work: LaneWork) -> None:
        """Add work with a call, which is made at once if the thread is idle."""
        self._waiting.add_request(work.requester, work)
        self._begin_next()

    def drop_work(self, is_dropped: Callable[[LaneWork], bool]) -> None:
        """Drop work that waits for the thread."""
        self._waiting.remove_requests(is_dropped)

    def _begin_next(self) -> None:
        requester = None if self.busy else self._waiting.next_requester()
        if requester is not None:
            self._in_thread = work = self._waiting.remove_first(requester)
            assert work.call is not None
            self._record(busy=True)
            self.thread.queue_call(work.call.function)

    def take_result(self, wait_s: float = 0) -> tuple[LaneWork, CallResult] | None:
        """Return the work whose call has ended, and its result; make the next call."""
        work = self._in_thread
        results = self.thread.results(wait_s) if work is not None else []
        if work is None or not results:
            return None
        [result], self._in_thread = results, None
        self._record(busy=False)
        self._waiting.count_work(work.requester.owner, result.seconds)
        self._begin_next()
        return work, result

    def _record(self, *, busy: bool) -> None:
        if self._recorder is not None:
            self._recorder.record_text_thread(busy=busy)


@dataclass(frozen=True, slots=True)
class LaneCall:
    """A function for the thread of a lane, whose result the engine awaits for *wait_s* at most."""

    lane: Lane
    function: Callable[[], Any]
    wait_s: float = 0.0
    charged_s_max: float = 0.0
    """The most time in the lane's thread that counts in the owner's share of the engine's thread.
    """


TOKENIZE_S = 0.02
"""Time for texts per step: 1 M characters take 0.3–0.6 s, which no stream should wait for."""
LONG_BYTES = 16 << 10
"""A longer text is tokenized in a thread. It stays whole, so that its tokens do not change."""
LONG_RAW_BYTES = 2 << 10
"""As `LONG_BYTES`, for texts that are not UTF-8, as each part between invalid bytes takes 10 us."""
RENDER_S = 0.01
"""The engine waits this long for a rendering, and then goes on without it. Most take 0.1 ms."""
RENDER_CHARGED_S = 0.5
"""Of a rendering for which the engine did not wait, at most this time counts in its owner's share.
It is the CPU time that a template may take; on a busy machine the rendering takes longer.
"""
COMPILE_S = 0.005
"""The engine waits this long for a grammar, and then goes on without it. Most take 3 ms."""
COMPUTE_S = 0.002
"""The engine waits this long for the outputs of tensors, and then goes on without them."""
PIECES = 4096
"""Tokens that are detokenized at a time. This takes 0.3 ms, or 4 ms the first time."""
TEXT_NICE = 10
"""The niceness of the threads that tokenize and compile. They get a tenth of a core that a thread
of llama.cpp keeps busy.
"""


class TokenizeQueue:
    """Answers requests for texts; owned by the engine. *busy_classes* returns the users whose
    tasks compute, with their highest class. *count_time* counts the time of work for an owner. Work
    is measured in time and not in CPU time, because rendering waits for another process. In the
    first *alone_s* seconds no thread tokenizes texts or computes tensors. *strict* is
    `priority_strict`.

    `tasks_expected` counts the tokenized prompts whose tasks will be submitted at once, and
    `expects_urgent` is whether an urgent one is among them.
    """

    def __init__(
        self,
        model: LanguageModel,
        recorder: Recorder,
        clock: EngineClock,
        busy_classes: Callable[[], Mapping[int, int]],
        seconds: Callable[[], float] = time.monotonic,
        alone_s: float = 0.0,
        *,
        strict: bool = False,
        count_time: Callable[[Owner, float], None] = lambda owner, seconds: None,
    ):
        self._model, self._recorder, self._clock = model, recorder, clock
        self._strict, self._count_time = strict, count_time
        self._seconds, self._alone_until = seconds, seconds() + alone_s
        self._busy_classes = busy_classes
        self._busy: Mapping[int, int] = {}
        """The last result of *busy_classes*."""
        self.tasks_expected = 0
        self.expects_urgent = False
        self._short: TextOrder[LaneWork] = TextOrder(strict=strict)
        tokenizing = CallThread("tokenizing", time.thread_time, TEXT_NICE)
        self._tokenizing = Lane(tokenizing, recorder, strict=strict)
        self._rendering = Lane(CallThread("rendering", seconds), strict=strict)
        self.compiling = Lane(CallThread("compiling", nice=TEXT_NICE), strict=strict)
        self._computing = Lane(CallThread("computing"), recorder, strict=strict)
        self.lanes = self._tokenizing, self._rendering, self.compiling, self._computing
        """The results of their threads wake the engine."""
        self._share = ThreadShare()
        self._bytes_max = model.info.ctx_size * model.info.token_bytes_max

    def __len__(self) -> int:
        """Return the number of requests that the engine's thread works on."""
        return len(self._short)

    def close(self) -> None:
        """End the threads; wait for those that use the model, which is freed next."""
        self._rendering.thread.close(0)
        self._tokenizing.thread.close()
        self.compiling.thread.close()
        self._computing.thread.close()

    def add_request(self, request: m.InputRequest) -> None:
        """Queue a request."""
        work = LaneWork(request.requester, self._answer(request, self._seconds()), request)
        self._short.add_request(request.requester, work)

    def drop_request(self, number: int) -> None:
        """Drop a request by its id, unless it is in a thread or was answered."""

        def is_dropped(work: LaneWork) -> bool:
            return work.request is not None and work.request.id == number

        self._short.remove_requests(is_dropped)
        for lane in self.lanes:
            lane.drop_work(is_dropped)

    def add_work(self, requester: Requester, parts: Parts) -> None:
        """Queue work for a task. The work handles its own errors."""
        self._short.add_request(requester, LaneWork(requester, parts))

    def compilation(self, sampling: SamplingParams, user: int) -> LaneCall:
        """Return the call that compiles a grammar of *user* in the compiling thread."""
        return LaneCall(
            self.compiling, partial(self._model.compile_grammar, sampling, user), COMPILE_S
        )

    def tokens_of(self, text: str) -> Generator[LaneCall, Any, list[int]]:
        """Return the tokens of a text in the middle of others, as a part of work for a task."""
        return self._tokenize(text.encode(), False, False, MediaMarks(()))

    def answer_requests(self) -> Iterator[m.Report]:
        """Answer requests until the time of one step is used up. Beside tasks of other users whose
        class is not lower, the work for a user is limited to a share of the thread.
        """
        ended = [found for lane in self.lanes if (found := lane.take_result()) is not None]
        if not (ended or self._short):
            return
        end, self._busy = self._seconds() + TOKENIZE_S, self._busy_classes()
        for work, result in ended:
            assert work.call is not None
            self._charge(work.requester, min(result.seconds, work.call.charged_s_max))
            yield from self._continue_and_charge(work, result.outcome)
        while (requester := self._short.next_requester(self._may_work)) is not None:
            work = self._short.first_request(requester)
            yield from self._continue_and_charge(work)
            if work.done or work.call is not None:
                self._short.remove_first(requester)
            if self._seconds() >= end:
                return

    def _competes(self, requester: Requester) -> bool:
        """Return whether tasks of other users compute whose class is not lower. Without strict
        priorities, users are equal, except that `urgent` precedes.
        """
        owner, priority = requester
        limit = priority if self._strict or priority == Priority.URGENT else Priority.LOW
        return any(u != owner.user and level >= limit for u, level in self._busy.items())

    def _may_work(self, requester: Requester) -> bool:
        may = self._share.may_work(requester.owner.user, self._clock.now)
        return may or not self._competes(requester)

    def _continue_and_charge(self, work: LaneWork, outcome: Any = None) -> Iterator[m.Report]:
        owner, started = work.requester.owner, self._seconds()
        yield from self._continue(work, outcome)
        seconds = self._seconds() - started
        self._short.count_work(owner, seconds)
        self._count_time(owner, seconds)
        self._charge(work.requester, seconds)

    def _charge(self, requester: Requester, seconds: float) -> None:
        """Charge work to the share of its user, if tasks of other users compete with it."""
        if seconds and self._competes(requester):
            user, users = requester.owner.user, len(self._short.users)
            self._share.charge_user(user, seconds, self._clock.now, users)

    def _continue(self, work: LaneWork, outcome: Any = None) -> Iterator[m.Report]:
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
                if isinstance(request, m.TokenizeParts) or (
                    isinstance(request, m.Tokenize | m.ChatPrompt) and request.turn
                ):
                    self.tasks_expected += 1
                    self.expects_urgent |= request.requester.priority == Priority.URGENT
                yield m.CommandResult(request.id, ended.value)
        except (InferdError, MemoryError) as exc:
            if request is None:
                raise
            work.done = True
            yield m.Refused(request.id, _error_of(exc).to_wire())
        else:
            if work.call is not None:
                yield from self._make_call(work, work.call)

    def _make_call(self, work: LaneWork, call: LaneCall) -> Iterator[m.Report]:
        waits = call.wait_s > 0 and not call.lane.busy
        call.lane.add_work(work)
        if waits and (ended := call.lane.take_result(call.wait_s)) is not None:
            work, result = ended
            yield from self._continue(work, result.outcome)

    def _answer(self, request: m.InputRequest, arrived_at: float) -> Parts:
        if isinstance(request, m.Tokenize):
            marks = MediaMarks(request.media)
            fitted = self._fit_text(request.text, request.cut_behind, marks)
            tokens = yield from self._tokenize(fitted, request.special, request.bos, marks)
            return m.pack_tokens(tokens)
        if isinstance(request, m.TokenizeParts):
            return (yield from self._tokenize_parts(request.texts))
        if isinstance(request, m.Detokenize):
            pieces = yield from self._pieces_of(m.unpack_tokens(request.tokens))
            return pieces if request.apart else b"".join(pieces)
        if isinstance(request, m.RankPrompt):
            return (yield from self._rank_prompt(request))
        if isinstance(request, m.ComputeTensors):
            compute = self._computation(request, arrived_at)
            if self._seconds() < self._alone_until:
                return compute()
            return (yield LaneCall(self._computing, compute, COMPUTE_S))
        if self._model.info.decoder_start_token is not None:  # it reads no history
            request = msgspec.structs.replace(request, history="", answer="")
        text, appended, form = yield from render_chat(request, self._render)
        new = bytes_of(text if appended is None else appended)
        marks = MediaMarks(request.media)
        fitted = self._fit_text(new, request.cut_behind, marks)
        tokens = yield from self._tokenize(fitted, True, appended is None, marks)
        return text, m.pack_tokens(tokens), appended is not None, form

    def _rank_prompt(
        self, request: m.RankPrompt
    ) -> Generator[LaneCall, Any, tuple[bytes, int, bool]]:
        """Return the tokens of a query with a document, the number of those that depend on the
        query alone, and whether the document was truncated.
        """
        info = self._model.info.embedding
        if info is None or not info.rank_parts:
            raise UnsupportedOperation(
                "the model ranks no documents",
                hint="use a reranking model: one whose file has the pooling rank",
            )
        query = self._fit_text(request.query, -1, NO_MARKS)
        document = self._fit_text(request.document, -1, NO_MARKS)
        tokenize = partial(self._model.tokenize, special=False, bos=False)
        parts, tokens_max = info.rank_parts, request.tokens_max
        make = partial(rank_tokens, parts, query, document, tokenize, tokens_max)
        long = _is_long(query + document) and self._seconds() >= self._alone_until
        found: RankTokens = (yield LaneCall(self._tokenizing, make)) if long else make()
        return m.pack_tokens(found.tokens), found.shared, found.truncated

    def _computation(
        self, request: m.ComputeTensors, arrived_at: float
    ) -> Callable[[], m.ComputedTensors]:
        """Return a function that computes tensors, and fails if it is called too late.

        :raises UnsupportedOperation: the model computes no tensors.
        """
        model, wait_s = self._model, request.wait_s
        if not isinstance(model, TensorModel):
            raise UnsupportedOperation("the model computes no tensors", hint="send it text")
        begin_by = arrived_at + wait_s if wait_s else math.inf

        def compute() -> m.ComputedTensors:
            if (began := self._seconds()) > begin_by:
                text = f"the queue timeout of {wait_s:g} s has passed"
                raise Timeout(text, data={"timeout": "queue"})
            outputs = model.compute(request.inputs)
            return m.ComputedTensors(outputs, self._seconds() - began)

        return compute

    def _render(self, messages: list[dict[str, Any]], rendering: Rendering) -> LaneCall:
        render = partial(self._model.render, messages, rendering)
        return LaneCall(self._rendering, render, RENDER_S, charged_s_max=RENDER_CHARGED_S)

    def _pieces_of(self, tokens: Sequence[int]) -> Generator[None, Any, list[bytes]]:
        pieces, tokens = list[bytes](), text_tokens(tokens)
        for begin in range(0, len(tokens), PIECES):
            if begin:
                yield None
            pieces += map(self._model.piece, tokens[begin : begin + PIECES])
        return pieces

    def _fit_text(self, text: bytes, cut_behind: int, marks: MediaMarks) -> bytes:
        """Return *text*, without a part in its middle if it is too long to be tokenized. The rest
        has its first *cut_behind* tokens and one more, and at its end as many as a context holds.
        *marks* are left out whole.

        :raises PromptTooLong: *text* is too long, and *cut_behind* is negative.
        """
        info, most = self._model.info, self._bytes_max
        if len(text) <= most:
            return text
        if cut_behind < 0:
            raise PromptTooLong(
                f"the prompt has {len(text)} bytes; a context of {info.ctx_size} tokens holds at"
                f" most {most}",
                data={
                    "prompt_bytes": len(text),
                    "prompt_bytes_max": most,
                    "prompt_tokens": -(-len(text) // info.token_bytes_max),
                    "ctx_size": info.ctx_size,
                },
            )
        head = _before_character(text, (cut_behind + 1) * info.token_bytes_max)
        tail = _before_character(text, len(text) - most)
        for begin, end, _ in marks.places(text):
            head = begin if begin < head < end else head
            tail = end if begin < tail < end else tail
        return text if tail <= head else text[:head] + text[tail:]

    def _tokenize(
        self, text: bytes, special: bool, bos: bool, marks: MediaMarks
    ) -> Generator[LaneCall, Any, list[int]]:
        tokenize = partial(marked_tokens, self._model, text, special, bos, marks)
        if not _is_long(text) or self._seconds() < self._alone_until:
            return tokenize()
        tokens: list[int] = yield LaneCall(self._tokenizing, tokenize)
        return tokens

    def _tokenize_parts(self, texts: Sequence[str]) -> Generator[LaneCall, Any, list[bytes]]:
        parts = [self._fit_text(bytes_of(text), 0, NO_MARKS) for text in texts]
        tokenize = partial(tokenized_parts, self._model, parts)
        is_long = sum(map(len, parts)) > LONG_BYTES or any(map(_is_long, parts))
        if not is_long or self._seconds() < self._alone_until:
            return tokenize()
        found: list[bytes] = yield LaneCall(self._tokenizing, tokenize)
        return found


class MediaMarks:
    """The marks of images and sounds in a text, with the tokens that replace them."""

    def __init__(self, media: Sequence[MarkedMedia]):
        self._tokens = {one.mark.encode(): one.tokens for one in media if one.mark}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)))

    def places(self, text: bytes) -> list[tuple[int, int, bytes]]:
        """Return where each mark in *text* begins and ends, and its packed tokens. Marks that the
        text lacks are ignored.

        :raises InvalidArgument: the text has a mark twice.
        """
        if not self._tokens:
            return []
        found = [(*match.span(), match.group()) for match in self._pattern.finditer(text)]
        if len({mark for _, _, mark in found}) < len(found):
            raise InvalidArgument(
                "the prompt has an image or a sound twice, for which there is one place",
                hint="use a chat template that renders each message once",
            )
        return [(begin, end, self._tokens[mark]) for begin, end, mark in found]


NO_MARKS = MediaMarks(())


def marked_tokens(
    model: LanguageModel, text: bytes, special: bool, bos: bool, marks: MediaMarks
) -> list[int]:
    """Return the tokens of *text*, with those of images and sounds in place of their *marks*. The
    texts between them are tokenized by themselves, as llama.cpp does (`mtmd_tokenize`). Tokens that
    the model adds around a text are added once.
    """
    places = marks.places(text)
    if not places:
        return model.tokenize(text, special=special, bos=bos)
    head, tail = _added_tokens(model, special, bos)
    tokens, at = [*head], 0
    for begin, end, packed in (*places, (len(text), len(text), b"")):
        first = not at
        piece = model.tokenize(text[at:begin], special=special, bos=bos and first)
        before, after = (head, tail) if first else _added_tokens(model, special, False)
        begins = len(before) if piece[: len(before)] == before else 0
        ends = len(after) if piece[len(piece) - len(after) :] == after else 0
        tokens += piece[begins : len(piece) - ends]
        tokens += m.unpack_tokens(packed)
        at = end
    return tokens + tail


def tokenized_parts(model: LanguageModel, parts: Sequence[bytes]) -> list[bytes]:
    """Return the packed tokens that begin a prompt, and those of each part by itself."""
    begin, _ = _added_tokens(model, special=False, bos=True)
    tokens = [model.tokenize(part, special=False, bos=False) for part in parts]
    return list(map(m.pack_tokens, [begin, *tokens]))


def _added_tokens(model: LanguageModel, special: bool, bos: bool) -> tuple[list[int], list[int]]:
    """Return the tokens that the model adds before and after a text."""
    around = model.tokenize(b"", special=special, bos=bos)
    if not around:
        return [], []
    size = common_prefix(around, model.tokenize(b"a", special=special, bos=bos))
    return around[:size], around[size:]


def _before_character(text: bytes, at: int) -> int:
    """Return the last place up to *at* where a character of UTF-8 begins."""
    return next((i for i in range(at, max(at - 4, 0), -1) if text[i] & 0xC0 != 0x80), at)


def _is_long(text: bytes) -> bool:
    return len(text) > LONG_BYTES or (len(text) > LONG_RAW_BYTES and not is_utf8(text))


def _error_of(exc: InferdError | MemoryError) -> InferdError:
    if isinstance(exc, InferdError):
        return exc
    return OutOfMemory(  # at another time there may be enough memory
        "there is too little memory for the input",
        hint="unload models or end other programs and try again, or send less",
    )
