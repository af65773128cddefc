"""One turn of a session, from the moment it is queued until its reader has its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import anyio
import msgspec

from ..backends.errors import (
    ContextFull,
    EndOfSequence,
    InferdError,
    error_from_wire,
)
from ..scheduler import messages as m
from ..scheduler.output.stopping import cuts_text
from ..scheduler.output.stopping.ending import CONTEXT_FULL
from .journal.entries import Replay
from .table import SessionCall
from .turns.sentence_checks import Comparisons, Judge, no_judge
from .worker_client import TaskClient

PROBABILITIES_MAX = 20_000
"""Tokens that are told with how likely they were, of one turn that is no stream: 2 MB."""

TokensSink = Callable[[m.Tokens], None]
PositionSink = Callable[[m.Position], None]
Event = Callable[[SessionCall], None]


class Turn:
    """Collects what the engine tells of one task. Lives on the daemon's event loop.

    `tokens` and `text` are what the reader has been told; `stats` stands once it has ended well,
    `error` once it has not. `shifts` are the context shifts (tokens kept, then dropped), in order.
    *on_call* moves the session's state, *on_tokens* forwards a stream, *on_position* its place in
    the queue, where that changes before the first token; *judge* compares its sentences with a text
    that is to end it.
    """

    def __init__(
        self,
        client: TaskClient,
        spec: m.TaskSpec,
        on_call: Event,
        on_tokens: TokensSink | None = None,
        on_position: PositionSink | None = None,
        judge: Judge = no_judge,
    ):
        self.spec = spec
        self.comparisons = Comparisons(judge)
        self.tokens: list[int] = []
        self.shifts: list[tuple[int, int]] = []
        self.logprobs: list[m.TokenLogprob] = []
        """How likely the first tokens were, where that is asked for."""
        self._kept = 0
        self.text = bytearray()
        self.surprisals: list[float] = []
        """How unlikely its tokens were, as far as that counts and is known."""
        self.tail = b""
        """The text that was withheld until the end."""
        self.end_piece = b""
        self.embedding: m.Embedded | None = None
        self.stats: m.TurnStats | None = None
        self.error: InferdError | None = None
        self.ended = anyio.Event()
        self.resumed = False
        """It goes on where an earlier turn was interrupted."""
        self._client = client
        self._on_call, self._on_tokens, self._on_position = on_call, on_tokens, on_position
        self._position = -1
        self._shifted: list[int] | None = None
        """Prompt and answer, once some of it was dropped."""
        self._pieces: deque[bytes] = deque()
        self._credit = spec.credit
        self._queued_at = time.monotonic()
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._unread_at: float | None = None
        """When the last credit was used up."""
        self._asked = 1 if spec.pull else 0
        self._told = anyio.Event()

    def submit(self) -> None:
        """Queue the task."""
        self._client.submit(self.spec, self)

    def take_over(self, before: Replay) -> None:
        """Have told what *before* has, an earlier turn on the same prompt."""
        self.tokens += before.tokens
        self.text += before.text
        self.surprisals += before.surprisals
        self.shifts += before.shifts
        self._shifted = before.history() if self.shifts else None
        self.resumed = True

    def submit_resumed(self) -> None:
        """Queue the task where the turn that was taken over ended."""
        spec = self.continue_on(self._client)
        assert spec is not None, "it has not begun, and so has not ended"
        self._client.submit(spec, self)

    def continue_on(self, client: TaskClient) -> m.TaskSpec | None:
        """Go on in another worker; see `TaskReader.continue_on`."""
        if self.ended.is_set():
            return None
        self._client = client
        progressed = m.Progressed(
            output_tokens=len(self.tokens),
            text_bytes=len(self.text),
            answer=m.pack_tokens(self.tokens) if self.shifts else b"",
            surprisals=m.pack_floats(self.surprisals),
            asked=max(0, self._asked),
            dropped=sum(discard for _, discard in self.shifts),
            shifts=len(self.shifts),
            age_s=time.monotonic() - self._queued_at,
            admitted_s=self._since_queued(self._admitted_at),
            first_token_s=self._since_queued(self._first_token_at),
        )
        return msgspec.structs.replace(
            self.spec,
            tokens=m.pack_tokens(self.history()),
            credit=self._credit,
            progressed=progressed,
        )

    def _since_queued(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._queued_at

    def cancel(self) -> None:
        """Ask the engine to stop before its next step."""
        if not self.ended.is_set():
            self._client.cancel(self.spec.id)

    def add_credit(self, events: int) -> None:
        """Let the engine tell *events* more."""
        if not self.ended.is_set():
            self._unread_at = None
            if self._credit >= 0:
                self._credit += events
            self._client.credit(self.spec.id, events)

    def request_token(self) -> None:
        """Ask the engine for one token more (pull turns)."""
        if not self.ended.is_set():
            self._asked += 1
            self._client.pull(self.spec.id)

    def adjust(self, spec: m.TaskSpec) -> None:
        """Let the parameters of *spec* hold from the next token on; a grammar and the
        conditions on the whole answer from the next turn on.
        """
        if not self.ended.is_set():
            begun = self.spec.sampling
            sampling = msgspec.structs.replace(
                spec.sampling,
                grammar=begun.grammar,
                json_schema=begun.json_schema,
                grammar_triggers=begun.grammar_triggers,
            )
            stopping = self.spec.stopping
            self.spec = spec = msgspec.structs.replace(
                spec, sampling=sampling, stopping=stopping, embed=self.spec.embed
            )
            self._client.adjust(
                m.Adjust(spec.id, spec.sampling, spec.n_predict, spec.stop, spec.reverse_prompt)
            )

    def report(self, report: m.Report) -> None:
        """Take one report of the engine; what comes after the end is too late to count."""
        if self.ended.is_set():
            return
        match report:
            case m.Tokens(_, tokens, text):
                if self._first_token_at is None:
                    self._first_token_at = time.monotonic()
                if self._credit > 0:
                    self._credit -= 1
                    self._unread_at = None if self._credit else time.monotonic()
                self.tokens += tokens
                self.text += text
                if report.surprisal is not None:
                    self.surprisals.append(report.surprisal)
                self._keep(report.logprobs)
                if self._shifted is not None:
                    self._shifted += tokens
                if self._on_tokens is not None:
                    self._on_tokens(report)
                if self.spec.pull:
                    self._asked -= 1
                    self._add_piece(text)
            case m.SentenceEnded():
                self.comparisons.compare_sentence(self.spec, report, self._answer)
            case m.Moved(_, state):
                if state != "waiting":
                    if self._admitted_at is None:
                        self._admitted_at = time.monotonic()
                    self._on_call(SessionCall.ADMITTED if state == "running" else SessionCall.PARK)
            case m.Position(_, position):
                changed = position != self._position and not self.tokens
                if self._on_position is not None and changed:
                    self._position = position
                    self._on_position(report)
            case m.Shifted(_, keep, discard):
                self._shifted = self.history()
                del self._shifted[keep : keep + discard]
                self.shifts.append((keep, discard))
            case m.Embedded():
                self.embedding = report
            case m.Finished(_, text, end, stats):
                self.stats, self.tail, self.end_piece = stats, text, end
                self.text += text
                self._end(SessionCall.FINISHED)
            case m.Failed(_, error):
                self.error = error_from_wire(error)
                self._end(SessionCall.FAIL)

    def _answer(self, verdict: m.Verdict) -> None:
        """Tell the worker that has the task now; another one than asked asks again."""
        if not self.ended.is_set():
            self._client.judge(verdict)

    @property
    def moments(self) -> tuple[float, float | None, float | None]:
        """When it was queued, first had a slot, and told its first token, by the monotonic clock;
        None: not yet.
        """
        return self._queued_at, self._admitted_at, self._first_token_at

    def _keep(self, found: list[m.TokenLogprob]) -> None:
        """Keep how likely tokens were, but for a stream, which tells it token by token."""
        if found and self.spec.credit < 0:
            self._kept += sum(1 + len(one.top) for one in found)
            if self._kept <= PROBABILITIES_MAX:
                self.logprobs += found

    def unread_for(self, seconds: float) -> bool:
        """Tell whether its reader has let a stream stand still for so long."""
        at = self._unread_at
        return at is not None and time.monotonic() >= at + seconds

    def history(self) -> list[int]:
        """Return the token ids of the prompt and of what was told, less what shifts dropped."""
        if self._shifted is not None:
            return list(self._shifted)
        return m.unpack_tokens(self.spec.tokens) + self.tokens

    @property
    def says(self) -> bool:
        """Tell whether it answers: it does not make an embedding."""
        return self.spec.embed is None

    @property
    def client(self) -> TaskClient:
        """The client of the worker that has the task now, or had it last."""
        return self._client

    @property
    def begun(self) -> bool:
        """Tell whether a worker has begun with it; see `TaskReader.begun`."""
        return self._admitted_at is not None or bool(self.tokens)

    @property
    def stopped_by_text(self) -> bool:
        """Tell whether text was cut from the answer whose tokens are still there."""
        return self.stats is not None and cuts_text(self.stats.stop_reason)

    def _add_piece(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._told.set()

    def _end(self, call: SessionCall) -> None:
        if self.tail and self.spec.pull:
            self._pieces.append(self.tail)
        self.ended.set()
        self._told.set()
        self._on_call(call)

    async def next_piece(self) -> bytes:
        """Return the next token's text (pull turns), asking the engine for it.

        What was withheld comes as a piece of its own before the end does.

        :raises EndOfSequence: the turn has ended.
        :raises ContextFull: it has ended because the context is full.
        :raises InferdError: it has failed.
        """
        while not self._pieces:
            if self.ended.is_set():
                raise self.ending()
            if self._asked <= 0:
                self.request_token()
            if self._told.is_set():
                self._told = anyio.Event()
            await self._told.wait()
        return self._pieces.popleft()

    def ending(self) -> InferdError:
        """Return the error that says how the turn ended."""
        if self.error is not None:
            return self.error
        assert self.stats is not None, "the turn has not ended"
        reason, detail = self.stats.stop_reason, self.stats.stop_detail
        if reason == CONTEXT_FULL.name:
            return ContextFull(f"the context of {detail} tokens is full", data={"ctx_size": detail})
        return EndOfSequence(f"the turn has ended: {reason}", data={"stop_reason": reason})
