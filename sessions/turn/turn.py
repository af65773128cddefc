"""One turn of a session, from its submission until its reader has its end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import anyio
import msgspec

from ...backends.errors import (
    Cancelled,
    ContextFull,
    EndOfSequence,
    InferdError,
    Timeout,
    error_from_wire,
)
from ...backends.params import GRAMMAR_FIELDS
from ...scheduler import messages as m
from ...scheduler.messages import SentenceCompared, SentenceEnded, TaskSpec
from ...scheduler.stopping import CONTEXT_FULL, cuts_text
from ...wire.frames import CREDIT_MAX
from ..entries import Replay
from ..history.media import KnownItems
from ..memory import TOKEN_BYTES
from ..table import SessionCall
from ..worker_client import Comparison, ModelSource, Similarity, TaskClient

PARAMETER = "stop-similarity"


Comparer = Callable[[Comparison, Callable[[Similarity], None]], None]
"""Compares two texts. It reports the result or the failure in bounded time."""


def compare_nothing(_: Comparison, report: Callable[[Similarity], None]) -> None:
    """Report that sentences are not compared."""
    report(Similarity(None, "the comparison of sentences is not available"))


class Comparisons:
    """The comparisons of one turn by *comparer*; a sentence that is similar enough ends it."""

    def __init__(self, comparer: Comparer = compare_nothing):
        self._comparer = comparer
        self._requested = self._missed = 0
        self._why = ""

    def compare_sentence(
        self, spec: TaskSpec, sentence: SentenceEnded, answer: Callable[[SentenceCompared], None]
    ) -> None:
        """Compare a sentence of the task; *answer* gets the result."""
        text = spec.stopping.stop_similarity
        comparison = Comparison(spec.owner, spec.priority, sentence.text, text)
        self._requested += 1
        self._comparer(comparison, partial(self._conclude, spec, sentence.end, answer))

    def _conclude(
        self,
        spec: TaskSpec,
        end: int,
        answer: Callable[[SentenceCompared], None],
        found: Similarity,
    ) -> None:
        detail, cosine = "", found.cosine
        if cosine is None:
            self._missed += 1
            self._why = found.why
        elif cosine >= spec.stopping.stop_similarity_threshold:
            detail = f"{cosine:.3f}"
        answer(SentenceCompared(spec.id, end, detail))

    @property
    def missed(self) -> dict[str, str]:
        """The reason why some sentences were not compared, by the parameter's name."""
        if not self._missed:
            return {}
        count = f"{self._missed} of {self._requested} sentences"
        return {PARAMETER: f"{count} were not compared: {self._why}"}


class PulledPieces:
    """The texts of a pulled turn that were not read yet, and the number of tokens requested from
    the engine. Owned by the turn, on the daemon's event loop. *request_token* requests one more.
    """

    def __init__(self, requested: int, request_token: Callable[[], object]):
        self._requested = requested
        self._request_token = request_token
        self._unread: deque[bytes] = deque()
        self._ended = False
        self._changed = anyio.Event()

    @property
    def requested(self) -> int:
        return max(0, self._requested)

    @property
    def kept_bytes(self) -> int:
        return sum(map(len, self._unread))

    def note_request(self) -> None:
        self._requested += 1

    def add_piece(self, text: bytes) -> None:
        self._requested -= 1
        self._unread.append(text)
        self._changed.set()

    def end(self, tail: bytes) -> None:
        """Add the text that was withheld until the end, as a piece of its own."""
        if tail:
            self._unread.append(tail)
        self._ended = True
        self._changed.set()

    async def next_piece(self) -> bytes | None:
        """Return the next text, or None if the turn has ended; request its token if necessary."""
        while not self._unread:
            if self._ended:
                return None
            if self._requested <= 0:
                self._request_token()
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()
        return self._unread.popleft()


PROBABILITIES_MAX = 20_000
"""Logprobs (sampled tokens and their top tokens) that a turn without a stream keeps."""
LOGPROB_BYTES = 200

TokensSink = Callable[[m.Tokens], None]
ProgressSink = Callable[[m.Position | m.PromptLogprobs | m.PromptProgress], None]
Event = Callable[[SessionCall], None]


class Turn:
    """Collects the engine's reports on one task. Lives on the daemon's event loop.

    `tokens` and `text` are the output sent to the reader. `stats` is set when the turn has
    finished, `error` when it has failed. `shifts` are its context shifts (tokens kept, then
    dropped). *on_call* moves the session's state, *on_tokens* forwards a stream. *on_progress*
    forwards, before the first token, the position in the queue, which is 0 at the first slot, the
    progress of the prompt, and a stream's logprobs of it. *comparer* compares sentences with the
    text of `stop-similarity`.
    """

    def __init__(
        self,
        client: TaskClient,
        spec: m.TaskSpec,
        on_call: Event,
        on_tokens: TokensSink | None = None,
        on_progress: ProgressSink | None = None,
        comparer: Comparer = compare_nothing,
    ):
        self.spec = spec
        self.seed = spec.sampling.seed
        """The seed at the turn's beginning; `adjust` may change that of `spec`."""
        self.comparisons = Comparisons(comparer)
        self.tokens: list[int] = []
        self.shifts: list[tuple[int, int]] = []
        self.dropped: list[str] = []
        """The paths of constraints of its JSON schema that its grammar does not keep."""
        self.logprobs: list[m.TokenLogprob] = []
        """Logprobs of the first tokens, if they were requested."""
        self.prompt_logprobs: list[m.TokenLogprob] = []
        """Logprobs of the prompt's tokens, if they were requested, except of a stream."""
        self.end_logprobs: list[m.TokenLogprob] = []
        """Those of the token that ended the answer and is not part of it."""
        self._prompt_scored = 0
        """The number of the prompt's first tokens whose logprobs were reported."""
        self.probabilities_max = PROBABILITIES_MAX
        self._logprobs_count = 0
        self.text = bytearray()
        self.forced_tokens = 0
        """Those of `tokens` that the grammar or the bound of reasoning forced."""
        self.ending_left = 0
        """The number of tokens that a forced end of reasoning still adds."""
        self.end_requested = False
        """The end of its reasoning was requested, and none of its tokens was sent."""
        self.drafted_tokens = self.accepted_tokens = 0
        self.compute_s = 0.0
        """Its part of the time of the steps that computed the tokens so far."""
        self.key = ""
        """The gateway's key with which it was requested."""
        self.surprisals: list[float] = []
        """The surprisal of each token, where it is needed; NaN of a forced one."""
        self.tail = b""
        """The text that was withheld until the end."""
        self.end_piece = b""
        self.embedding: m.Embedded | None = None
        self.items_encoded = 0
        """The images and sounds, or parts of them, that were encoded for it."""
        self.encode_s = 0.0
        self.stats: m.TurnStats | None = None
        self.error: InferdError | None = None
        self.ended = anyio.Event()
        self.resumed = False
        """It continues an interrupted turn."""
        self.client = client
        """The client of the present or last worker."""
        self._on_call, self._on_tokens, self._on_progress = on_call, on_tokens, on_progress
        self._position = self._prompt_processed = -1
        self._unestimated = False
        """The last reported place in the queue came without the estimate of the start."""
        self._shifted: list[int] | None = None
        """Prompt and output without the dropped tokens, from the first context shift on."""
        self._credit = spec.credit
        self.queued_at = time.monotonic()
        """Monotonic seconds, as all times of a turn."""
        self.started_at: float | None = None
        """The time at which it got its first slot."""
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self._cached_tokens = self._parks = 0
        self._unread_at: float | None = None
        """The time at which the last credit was used up, or the last requested token arrived."""
        self._on_read: Callable[[], None] | None = None
        """Requests a place for its session, while that has none, because the turn is read."""
        self._pulled = PulledPieces(1 if spec.pull else 0, self.request_token)

    def submit(self) -> None:
        """Queue the task. A resumed turn continues after the output that was taken over."""
        spec = self.continue_on(self.client) if self.resumed else self.spec
        assert spec is not None, "a turn that has not begun has not ended"
        self.client.submit(spec, self)

    def take_over(self, before: Replay) -> None:
        """Start with the output of *before*, an earlier turn on the same prompt."""
        self.tokens += before.tokens
        self.text += before.text
        self.surprisals += before.surprisals
        self.ending_left = before.ending_left
        self.shifts += before.shifts
        self._shifted = before.history() if self.shifts else None
        if self.tokens:  # they came after the logprobs of the prompt
            self._prompt_scored = m.count_tokens(self.spec.tokens)
        self.resumed = True

    def continue_on(self, client: TaskClient) -> m.TaskSpec | None:
        """Continue in another worker; see `TaskReader.continue_on`."""
        if self.ended.is_set():
            return None
        self.client = client
        progressed = m.ResumePoint(
            output_tokens=len(self.tokens),
            text_bytes=len(self.text),
            answer=m.pack_tokens(self.tokens) if self.shifts else b"",
            surprisals=m.pack_floats(self.surprisals),
            ending_left=self.ending_left,
            end_requested=self.end_requested,
            tokens_requested=self._pulled.requested,
            prompt_logprobs=self._prompt_scored,
            dropped=sum(discard for _, discard in self.shifts),
            shifts=len(self.shifts),
            forced_tokens=self.forced_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            cached_tokens=self._cached_tokens,
            compute_s=self.compute_s,
            age_s=time.monotonic() - self.queued_at,
            started_s=self._since_queued(self.started_at),
            first_token_s=self._since_queued(self.first_token_at),
        )
        history = self.history()
        media = KnownItems(self.spec.media).items_in(history) if self.shifts else self.spec.media
        return msgspec.structs.replace(
            self.spec,
            tokens=m.pack_tokens(history),
            media=media,
            credit=self._credit,
            resume_point=progressed,
        )

    def _since_queued(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.queued_at

    # The place of its session.

    @property
    def has_no_place(self) -> bool:
        """Whether the turn is set aside because its session has no place."""
        return self._on_read is not None

    @property
    def can_be_set_aside(self) -> bool:
        """Whether `set_aside` is possible now."""
        return not self.ended.is_set() and self.client.has_task(self.spec.id, self)

    def set_aside(self, new_id: int, on_read: Callable[[], None]) -> None:
        """Withdraw the task, because its session yields its place. After `continue_in_place` it
        continues as the task *new_id*. *on_read* requests the place: now, or once the turn is
        read.
        """
        self.client.withdraw_task(self.spec.id)
        self.spec = msgspec.structs.replace(self.spec, id=new_id)  # late reports name the old one
        self.keep_aside(on_read)

    def keep_aside(self, on_read: Callable[[], None]) -> None:
        """Keep a task that no engine has, as `set_aside` does."""
        self._on_read = on_read
        self.client.keep_turn(self)
        if self._unread_at is None:
            on_read()

    def continue_in_place(self) -> None:
        """Continue a turn that was set aside, now or once it is read: its session has a place."""
        was_aside, self._on_read = self.has_no_place, None
        if was_aside and self._unread_at is None and not self.ended.is_set():
            self.client.send_command(m.Credit(self.spec.id, 0))

    def cancel(self) -> None:
        """Stop the task before the engine's next step."""
        if not self.ended.is_set():
            self.client.send_command(m.Cancel(self.spec.id))

    def add_credit(self, events: int) -> None:
        """Let the engine send *events* more reports of tokens."""
        if not self.ended.is_set():
            self._unread_at = None
            if self._credit >= 0:
                self._credit = min(self._credit + events, CREDIT_MAX)  # as the engine does
            if self._on_read is not None:
                self._on_read()
            else:
                self.client.send_command(m.Credit(self.spec.id, events))

    def request_token(self) -> None:
        """Request one more token from the engine (pull turns)."""
        if not self.ended.is_set():
            self._unread_at = None
            self._pulled.note_request()
            if self._on_read is not None:
                self._on_read()
            else:
                self.client.send_command(m.PullToken(self.spec.id))

    def adjust(self, spec: m.TaskSpec) -> None:
        """Apply the parameters of *spec* from the next token on; a grammar and the conditions on
        the whole answer apply from the next turn on.
        """
        if not self.ended.is_set():
            begun = self.spec.sampling
            grammar = {name: getattr(begun, name) for name in GRAMMAR_FIELDS}
            sampling = msgspec.structs.replace(spec.sampling, **grammar)
            stopping = self.spec.stopping
            self.spec = spec = msgspec.structs.replace(
                spec, sampling=sampling, stopping=stopping, embed=self.spec.embed
            )
            self.client.send_command(
                m.Adjust(spec.id, spec.sampling, spec.n_predict, spec.stop, spec.reverse_prompt)
            )

    def media_encoded(self, items: int, seconds: float) -> None:
        """Count encodings; see `TaskReader.media_encoded`."""
        if self.ended_at is None:
            self.items_encoded += items
            self.encode_s += seconds

    def report(self, report: m.Report) -> None:
        """Handle one report of the engine; ignore reports after the end."""
        if self.ended_at is not None:
            return
        match report:
            case m.Tokens(_, tokens, text):
                if self.first_token_at is None:
                    self.first_token_at = time.monotonic()
                if self._credit > 0:
                    self._use_credit()
                self.tokens += tokens
                self.text += text
                self.forced_tokens += report.forced
                self.ending_left = report.ending_left
                self.end_requested &= not report.forced
                if self.spec.stopping.stop_surprisal:
                    self.surprisals += _surprisals_of(report)
                self.drafted_tokens = report.drafted
                self.accepted_tokens = report.accepted
                self.compute_s = report.compute_s
                if report.logprobs and self.spec.credit < 0:  # a stream sends them
                    self._keep_logprobs(report.logprobs)
                if self._shifted is not None:
                    self._shifted += tokens
                if self._on_tokens is not None:
                    self._on_tokens(report)
                if self.spec.pull:
                    self._pulled.add_piece(text)
                    self._unread_at = None if self._pulled.requested else time.monotonic()
            case m.PromptLogprobs(_, offset, logprobs):
                if self._credit > 0:
                    self._use_credit()
                self._prompt_scored = offset + len(logprobs)
                if self.spec.credit < 0:
                    self.prompt_logprobs += logprobs
                elif self._on_progress is not None:
                    self._on_progress(report)
            case m.ConstraintsDropped(_, paths):
                self.dropped = paths
            case m.SentenceEnded():
                self.comparisons.compare_sentence(self.spec, report, self._send_comparison)
            case m.StateChanged(_, state, cached_tokens, started_at):
                self._cached_tokens = cached_tokens
                self._parks += state == "parked"
                if state != "waiting":
                    if self.started_at is None:
                        # This loop may read the report long after the worker has sent it.
                        self.started_at = min(max(started_at, self.queued_at), time.monotonic())
                        if self._on_progress is not None:
                            self._on_progress(m.Position(self.spec.id, 0, 0, 0.0))
                    self._on_call(SessionCall.RUN if state == "running" else SessionCall.PARK)
            case m.Position(_, position, _, starts_in_s):
                # Beside many turns, the first place comes again with the estimate of the start.
                estimated = self._unestimated and starts_in_s is not None
                changed = position != self._position or estimated
                if self._on_progress is not None and changed and not self.tokens:
                    self._position, self._unestimated = position, starts_in_s is None
                    self._on_progress(report)
            case m.PromptProgress(_, _, _, processed):
                if self._on_progress is not None and processed > self._prompt_processed:
                    self._prompt_processed = processed
                    self._on_progress(report)
            case m.Shifted(_, keep, discard):
                self._shifted = self.history()
                del self._shifted[keep : keep + discard]
                self.shifts.append((keep, discard))
            case m.Embedded():
                self.embedding = report
            case m.Finished(_, text, end, stats):
                self.stats, self.tail, self.end_piece = stats, text, end
                self.compute_s = stats.compute_s
                self.end_logprobs = report.logprobs
                self.text += text
                self._end(SessionCall.FINISHED)
            case m.Failed(_, error):
                self.error = error_from_wire(error)
                self._end(SessionCall.FAIL)

    def _use_credit(self) -> None:
        self._credit -= 1
        self._unread_at = None if self._credit else time.monotonic()

    def _send_comparison(self, compared: m.SentenceCompared) -> None:
        """Send a comparison to the present worker; a new worker requests it again."""
        if not self.ended.is_set():
            self.client.send_command(compared)

    def _keep_logprobs(self, found: list[m.TokenLogprob]) -> None:
        self._logprobs_count += sum(1 + len(one.top) for one in found)
        if self._logprobs_count <= self.probabilities_max:
            self.logprobs += found

    @property
    def unread_s(self) -> float | None:
        """The time for which its reader has given no credit and requested no token, or None if the
        reader waits for output.
        """
        return None if self._unread_at is None else time.monotonic() - self._unread_at

    def unread_for(self, seconds: float) -> bool:
        """Return whether its reader has given no credit and requested no token for *seconds*."""
        unread_s = self.unread_s
        return unread_s is not None and unread_s >= seconds

    def timeout_in_s(self) -> tuple[float, str]:
        """Return the time until the first of its timeouts has passed, and the timeout's name. The
        engine ends a task at its timeouts, except while it is set aside.
        """
        total_s = self.spec.total_timeout_s or math.inf
        queue_s = self.spec.queue_timeout_s if self.started_at is None else 0.0
        limit_s, name = min((total_s, "total"), (queue_s or math.inf, "queue"))
        return self.queued_at + limit_s - time.monotonic(), name

    def history(self) -> list[int]:
        """Return the token ids of prompt and output, less those that shifts dropped."""
        if self._shifted is not None:
            return list(self._shifted)
        return m.unpack_tokens(self.spec.tokens) + self.tokens

    @property
    def history_size(self) -> int:
        if self._shifted is not None:
            return len(self._shifted)
        return m.count_tokens(self.spec.tokens) + len(self.tokens)

    @property
    def kept_bytes(self) -> int:
        numbers = len(self.tokens) + len(self._shifted or ()) + len(self.surprisals)
        vectors = b"" if self.embedding is None else self.embedding.vectors
        texts = len(self.spec.tokens) + len(self.text) + len(self.tail) + len(vectors)
        count = min(self._logprobs_count, self.probabilities_max)
        per_token = 1 + (self.spec.prompt_logprobs or 0)
        logprobs = LOGPROB_BYTES * (count + per_token * len(self.prompt_logprobs))
        pieces = self._pulled.kept_bytes + sum(map(len, self.dropped))
        return TOKEN_BYTES * numbers + texts + pieces + logprobs

    @property
    def adjusted(self) -> dict[str, str]:
        """The parameters that could not be fully applied, by name, with the reasons."""
        paths = ", ".join(self.dropped)
        return self.comparisons.missed | (
            {"json-schema": f"no grammar keeps these constraints: {paths}"} if paths else {}
        )

    @property
    def generates(self) -> bool:
        """Whether it generates text; otherwise it makes an embedding."""
        return self.spec.embed is None

    @property
    def cached_tokens(self) -> int:
        """The tokens of its prompt that needed no computing, once it has had a slot."""
        return self._cached_tokens

    @property
    def begun(self) -> bool:
        """Whether it has had a slot or has sent something."""
        return self.started_at is not None or bool(self.tokens)

    @property
    def refused(self) -> bool:
        """Whether it failed before its first token, except by cancellation or its total timeout."""
        error = self.error
        if error is None or self.first_token_at is not None or isinstance(error, Cancelled):
            return False
        return not isinstance(error, Timeout) or error.data.get("timeout") == "queue"

    def stats_so_far(self) -> m.TurnStats:
        """Return the engine's statistics of a turn that has finished, or else those of its progress
        so far, or until it failed. Then the prompt ends with the first token.
        """
        if self.stats is not None:
            return self.stats
        now = time.monotonic() if self.ended_at is None else self.ended_at
        started, first = self.started_at, self.first_token_at
        begun_at = now if started is None else started
        prompt_until = now if first is None else first
        return m.TurnStats(
            stop_reason="",
            cached_tokens=self._cached_tokens,
            output_tokens=len(self.tokens),
            queue_ms=(begun_at - self.queued_at) * 1000,
            ttft_ms=0.0 if first is None else (first - self.queued_at) * 1000,
            prompt_ms=max(0.0, prompt_until - begun_at) * 1000,
            predicted_ms=(now - prompt_until) * 1000,
            parks=self._parks,
            shifts=len(self.shifts),
            forced_tokens=self.forced_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            compute_s=self.compute_s,
        )

    @property
    def stopped_by_text(self) -> bool:
        """Whether the answer's text was cut, while its tokens are complete."""
        return self.stats is not None and cuts_text(self.stats.stop_reason)

    def _end(self, call: SessionCall) -> None:
        self.ended_at = time.monotonic()
        self.ended.set()
        self._pulled.end(self.tail if self.spec.pull else b"")
        self._on_call(call)

    async def next_piece(self) -> bytes:
        """Return the next token's text (pull turns); request it from the engine if necessary.

        Withheld text is a piece of its own before the end.

        :raises EndOfSequence: the turn has ended.
        :raises ContextFull: it has ended because the context is full.
        :raises InferdError: it has failed.
        """
        piece = await self._pulled.next_piece()
        if piece is None:
            raise self.ending()
        return piece

    def ending(self) -> InferdError:
        """Return the error that stands for the end of the turn."""
        if self.error is not None:
            return self.error
        assert self.stats is not None, "the turn has not ended"
        reason, detail = self.stats.stop_reason, self.stats.stop_detail
        if reason == CONTEXT_FULL.name:
            return ContextFull(
                f"the context of {detail} tokens is full", data={"ctx_size": int(detail)}
            )
        return EndOfSequence(f"the turn has ended: {reason}", data={"stop_reason": reason})


def _surprisals_of(report: m.Tokens) -> list[float]:
    """Return the surprisal of each token; that of a forced one is not known, and NaN."""
    forced = [math.nan] * report.forced
    return forced if report.surprisal is None else [report.surprisal, *forced]


class TurnListener(Protocol):
    """A listener of the turns of all sessions, called on the daemon's event loop."""

    def turn_began(self, model: ModelSource, turn: Turn, *, chat: bool) -> None:
        """Note that a turn begins, in the task of its call; with *chat* its history is a chat."""

    def turn_ended(self, model: ModelSource, turn: Turn) -> None:
        """Note that a turn has ended."""
