"""A task: one turn in the engine, with its progress."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from ..backends import CompiledGrammar, Sampler
from ..backends.batch import MediaInput
from ..backends.media import MediaItem, items_of
from .kv.store import Origin, scoped
from .messages import Adjust, ResumePoint, TaskSpec, TokenLogprob, TurnStats, unpack_tokens
from .owner import PRIORITY_MAX
from .policy.draft_plan import Acceptance
from .reasoning import Reasoning
from .stopping import Ending, StopReason, TextAssembler, TurnConditions

RESUMED_AHEAD = 1 << 48
"""Subtracted from a resumed task's queue number, so that it precedes all that have not started."""


class TaskState(StrEnum):
    """The place of a task: in the queue, in a slot, or saved and back in the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"


@dataclass(eq=False)
class Task:
    """Owned by the engine. `tokens` are prompt and output; the first `computed` are in the KV.

    These two determine the work: `tokens[computed:]` are to be decoded. Once all are decoded, a
    token can be sampled from the logits (`has_logits`).
    """

    spec: TaskSpec
    arrival: int
    queue_number: int
    """The order among equals: at first `arrival`, renewed when it is parked after a quantum."""
    arrived_at: float
    tokens: list[int]
    prompt_size: int
    text: TextAssembler
    items: dict[int, int] = field(default_factory=dict)
    """By the place at which it begins in `tokens`, in their order, the size of each part that a
    step does not compute beside others: an image, a sound, or the prompt of an encoder-decoder.
    """
    media: dict[int, MediaItem] = field(default_factory=dict)
    """The images and sounds among `items`, by place."""
    embeddings: dict[int, MediaInput] = field(default_factory=dict)
    """The embeddings of `media` that are in memory and may be needed, by place; see `ItemStore`."""
    covered: int = 0
    """While it has not started, the tokens for which a KV state is known."""
    ctx_size: int = 0
    """Bound on the tokens of prompt and output."""
    conditions: TurnConditions | None = None
    """The conditions that may end it, besides its stop texts and bounds."""
    comparing_since: float | None = None
    """The time since which it waits for the comparison of its last sentence."""
    ending: Ending | None = None
    """The ending that its last token caused, while the sentence before it is compared."""
    scope: int = 0
    session: str = ""
    """`scope` and `session` bound the tasks that its KV state may serve; see `Origin`."""
    state: TaskState = TaskState.WAITING
    slot: int = -1
    computed: int = 0
    has_logits: bool = False
    forced: int = 0
    """Tokens of its answer that its grammar or the bound of its reasoning forced."""
    forced_behind: int = 0
    """Tokens to be computed as a chunk with the last sampled one: those forced behind it, and
    accepted drafts before it whose state is lost (`SlotTable.drop_drafts`).
    """
    drafts: list[int] = field(default_factory=list)
    """Drafts in its slot behind the `computed` tokens, which the last step computed. There are none
    once the tokens of the step are sampled.
    """
    prediction: Sequence[int] = ()
    """The tokens of the text that its answer is expected to repeat, once they are known."""
    drafter: str = ""
    """The name of the drafter of its last drafts."""
    drafted: int = 0
    accepted: int = 0
    """Drafts that were computed, and those that equal the sampled tokens."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    compute_s: float = 0.0
    """Its part, by tokens, of the time of the steps that computed it."""
    tokens_requested: int = 0
    """Tokens that a pull reader has requested and not received."""
    credit: int = -1
    has_grammar: bool = False
    resting_grammar: CompiledGrammar | None = None
    """The grammar that begins behind its reasoning, until then."""
    reasoning: Reasoning | None = None
    sampler: Sampler | None = None
    preparing: bool = False
    """It takes no slot yet, as its sampler is still made, in the order of requests for texts."""
    grammars_queued: int = 0
    """Number of its grammars that are being compiled or wait to be."""
    sampling_s: float = 0.0
    """CPU time that sampling its last token took."""
    clock_waiting: int = 0
    """The engine's token clock when it last began to wait; it ages by the tokens since then."""
    age: int = 0
    """Tokens that the engine computed during earlier waits of this task."""
    computed_at: float = 0.0
    """The last time at which a step computed a token of it; at first, its arrival."""
    passed_over_since: float = 0.0
    """The time since which it has computed nothing outside of reserved quanta."""
    reserved_tokens: int = 0
    """Tokens left of a quantum reserved for it; while there are any, it precedes all others."""
    boost: int = 0
    """The highest effective class of the tasks that wait for a prefix that it computes."""
    follows: bool = False
    """It takes no slot yet, because a running task computes their common prefix."""
    prefix_hash: int = 0
    """A hash of the first tokens. It is equal for tasks that share a prefix worth waiting for."""
    checkpoints: set[int] = field(default_factory=set)
    """Numbers of computed tokens at which the state is saved, for prompts that diverge there."""
    end_logprobs: list[TokenLogprob] = field(default_factory=list)
    """The logprobs of the token that ended it and is not in the answer, if they are wanted."""
    logprobs_done: int = 0
    """Tokens at the start of its prompt whose logprobs are reported."""
    dropped: int = 0
    """Tokens that context shifts took out of `tokens`."""
    shifts: int = 0
    shifted: bool = False
    """The KV state is approximate, by a shift in this turn or an earlier one."""
    shift_pending: bool = False
    """The slot was shifted and not decoded into since, so it cannot be saved or moved now."""
    preempted_by_kv_pressure: bool = False
    """Parked because the KV cache was full; it resumes when another task has ended."""
    yields_until: int = 0
    """After it was parked by hand, all others precede it until the token clock reaches this."""
    trial_tokens: int = 0
    """Tokens that are still to be computed in steps without other tasks."""
    fetching: bool = False
    """Its state is being read from disk."""
    looked_up: bool = False
    """Its state was looked up on disk."""
    reported_position: int = 0
    """The position that its client knows; 0: none, `UNESTIMATED`: one without an estimate."""
    slot_since: float = 0.0
    first_logits_at: float | None = None
    """The time of its first logits in this slot."""
    quantum: int = 0
    cached: int = 0
    parks: int = 0
    reader_away_since: float | None = None
    """The time at which its reader stopped taking tokens."""
    reader_away_s: float = 0.0
    """How long its reader was away the last time, at least."""
    last_logits_at: float = 0.0
    started_at: float | None = None
    prompt_done_at: float | None = None
    first_token_at: float | None = None

    @classmethod
    def from_spec(
        cls, spec: TaskSpec, arrival: int, clock: int, now: float, *, shared: bool = False
    ) -> Task:
        """Return a waiting task that arrived at *now*, when the token clock was at *clock*. With
        *shared* its KV state serves all users. A task resumed from another worker keeps its age and
        progress, and precedes its equals that have not started.
        """
        tokens = unpack_tokens(spec.tokens)
        scope, session = scoped(spec.owner.user, spec.session, shared=shared)
        before, submitted_at = spec.resume_point or ResumePoint(), now
        now -= before.age_s
        items = items_of(tokens) if spec.media else []
        conditions = TurnConditions.from_params(spec.stopping)
        texts = (conditions.text, conditions.sentences) if conditions is not None else ()
        return cls(
            spec=spec,
            arrival=arrival,
            queue_number=arrival if before.started_s is None else arrival - RESUMED_AHEAD,
            arrived_at=now,
            tokens=tokens,
            prompt_size=len(tokens) + before.dropped - before.output_tokens,
            text=TextAssembler(spec.stop, spec.reverse_prompt, *texts),
            items=dict(items),
            media=dict(zip((begin for begin, _ in items), spec.media, strict=False)),
            conditions=conditions,
            scope=scope,
            session=session if spec.session else "",
            credit=spec.credit,
            has_grammar=spec.sampling.has_grammar,
            clock_waiting=clock,
            computed_at=submitted_at,
            passed_over_since=submitted_at,
            tokens_requested=(before.tokens_requested if spec.resume_point else 1)
            if spec.pull
            else 0,
            trial_tokens=spec.trial_tokens,
            logprobs_done=before.prompt_logprobs,
            dropped=before.dropped,
            shifts=before.shifts,
            forced=before.forced_tokens,
            drafted=before.drafted_tokens,
            accepted=before.accepted_tokens,
            compute_s=before.compute_s,
            cached=before.cached_tokens,
            started_at=None if before.started_s is None else now + before.started_s,
            first_token_at=None if before.first_token_s is None else now + before.first_token_s,
        )

    @property
    def origin(self) -> Origin:
        """The origin of its KV state."""
        spec = self.spec
        return Origin(self.scope, self.session, spec.adapters, self.shifted, spec.persist)

    def adjust(self, command: Adjust) -> None:
        """Apply parameters from the next token on; withheld text stays withheld."""
        self.spec = msgspec.structs.replace(
            self.spec,
            sampling=command.sampling,
            n_predict=command.n_predict,
            stop=command.stop,
            reverse_prompt=command.reverse_prompt,
        )
        self.has_grammar = command.sampling.has_grammar
        self.text = self.text.with_stops(command.stop, command.reverse_prompt)

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) + self.dropped - self.prompt_size

    @property
    def prompt_and_answer(self) -> tuple[list[int], list[int]]:
        """Tokens of the prompt and of the answer. After a context shift all count as prompt."""
        size = len(self.tokens) if self.dropped else self.prompt_size
        return self.tokens[:size], self.tokens[size:]

    @property
    def continued(self) -> list[int]:
        """The last tokens of the prompt that begin the answer. After a context shift there are
        none.
        """
        size = 0 if self.dropped else self.spec.continued
        return self.tokens[self.prompt_size - size : self.prompt_size] if size else []

    @property
    def pending(self) -> int:
        """Number of tokens to decode before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def ends_reasoning(self) -> bool:
        """Whether tokens of a forced end of its reasoning are to be added."""
        return self.reasoning is not None and len(self.reasoning.ending) > 0

    @property
    def takes_chunks(self) -> bool:
        """Whether several tokens may be forced at once. A context shift needs that a single token
        is left to compute.
        """
        return self.has_grammar or (self.ends_reasoning and not self.spec.ctx_shift)

    @property
    def prefilling(self) -> bool:
        """Whether more is to be decoded than the last sampled token and those forced behind it."""
        computed = self.computed
        unread = computed + self.dropped < self.prompt_size
        return unread or len(self.tokens) - computed > 1 + self.forced_behind

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of its prompt are wanted that are not reported."""
        return self.spec.prompt_logprobs is not None and self.logprobs_done < self.prompt_size

    @property
    def ignores_cache(self) -> bool:
        """Whether it uses no KV state except its own: the logprobs of its prompt's tokens are known
        only once these are computed.
        """
        return self.spec.no_cache or self.scores_prompt

    def logits_of(self, count: int) -> int:
        """Return how many of its next *count* tokens need logits; they are the last ones.

        The last of all its tokens has logits, to sample from them. While the logprobs of its prompt
        are wanted, each token before one without logprobs has logits.
        """
        end = self.computed + count
        if self.scores_prompt:
            return max(0, end - max(self.computed, self._first_scored()))
        return int(end == len(self.tokens))

    def tokens_within(self, logits: int) -> int:
        """Return how many of its next tokens can be computed with at most *logits* logits."""
        if self.scores_prompt:
            return logits + max(0, self._first_scored() - self.computed)
        return self.pending

    def _first_scored(self) -> int:
        """Return the position of the token after which the next wanted logprob is."""
        return max(1, self.logprobs_done) - 1

    def tokens_to_checkpoint(self) -> int:
        """Return the number of tokens up to the next point at which the state is saved, or at which
        an item of `items` begins.
        """
        points = (*self.checkpoints, *self.items)
        ahead = [point - self.computed for point in points if point > self.computed]
        return min(ahead, default=self.pending)

    def item_at(self, place: int) -> int | None:
        """Return where the item of `items` begins that has the token at *place*."""
        if not self.items:
            return None
        begins = [*self.items]
        index = bisect_right(begins, place) - 1
        found = index >= 0 and place < begins[index] + self.items[begins[index]]
        return begins[index] if found else None

    @property
    def item_left(self) -> int:
        """The entries of an item of `items` that it computes next; 0 if that is a token."""
        begin = self.item_at(self.computed)
        return 0 if begin is None else begin + self.items[begin] - self.computed

    @property
    def item_is_whole(self) -> bool:
        """Whether one step computes the whole item that comes next. Entries that see only those
        before them can be computed in several steps.
        """
        begin = self.item_at(self.computed)
        media = None if begin is None else self.embeddings.get(begin)
        return media is None or not media.causal

    @property
    def awaits_media(self) -> bool:
        """Whether the next token is an entry of an image or a sound without embeddings."""
        if not self.media:
            return False
        begin = self.item_at(max(self.computed, self.covered))
        return begin in self.media and begin not in self.embeddings

    def media_needed(self) -> list[tuple[int, MediaItem]]:
        """Return the images and sounds that are not computed, in their order, with their places."""
        done = max(self.computed, self.covered)
        return [(b, item) for b, item in self.media.items() if b + item.size > done]

    @property
    def computes_alone(self) -> bool:
        """Whether its next tokens are a step of their own: on trial, or an item of `items`."""
        return self.trial_tokens > 0 or (bool(self.items) and self.item_left > 0)

    @property
    def unread_since(self) -> float | None:
        """The time since which its reader is away, or its sentence is being compared."""
        return self.comparing_since if self.reader_away_since is None else self.reader_away_since

    @property
    def wants_token(self) -> bool:
        """Whether the reader takes another token now."""
        return self.comparing_since is None and (
            self.tokens_requested > 0 if self.spec.pull else self.credit != 0
        )

    @property
    def has_work(self) -> bool:
        """Whether the next step may contain tokens of this task.

        A sampled token of a pull task is decoded ahead of the next request. A push task without
        credit stands still, as does a task whose last sentence is being compared, or one that waits
        for embeddings.
        """
        if len(self.tokens) <= self.computed or self.comparing_since is not None:
            return False
        if self.media and self.awaits_media:
            return False
        return self.credit != 0 or self.spec.pull

    def count_tokens(self, count: int, now: float, excluded: int = 0) -> None:
        """Record that the step that ended at *now* computed *count* tokens of it. A reserved
        quantum is also charged a token for each *excluded* task, which waited because the step's
        adapters are not its own.
        """
        self.computed_at = now
        if self.reserved_tokens:
            self.reserved_tokens = max(0, self.reserved_tokens - count - excluded)
        else:
            self.passed_over_since = now

    def note_reader(self, now: float, lag_s: float, step_began: float) -> None:
        """Record that its reader takes tokens; it may have come back since the last step began. The
        time without the reader, if longer than *lag_s*,
        does not count as passed over.
        """
        if self.unread_since is not None and now >= self.unread_since + lag_s:
            self.passed_over_since, self.reserved_tokens = now, 0
        if self.reader_away_since is not None:
            self.reader_away_s = max(0.0, step_began - self.reader_away_since)
        self.reader_away_since = None

    def yields(self, clock: int) -> bool:
        """Return whether it was parked by hand and therefore comes after all waiting tasks."""
        return clock < self.yields_until

    def age_at(self, clock: int) -> int:
        """Return the tokens that the engine computed while it waited."""
        return self.age + (0 if self.state is TaskState.RUNNING else clock - self.clock_waiting)

    def effective_class(self, clock: int, ageing_tokens: int) -> int:
        """Return the class, raised by one for each *ageing_tokens* that the task has waited."""
        raised = self.spec.priority + self.age_at(clock) // ageing_tokens
        return max(self.boost, min(PRIORITY_MAX, raised))

    def stats(self, reason: StopReason, detail: str, now: float) -> TurnStats:
        """Return the statistics of the turn, ended at *now*."""
        started = self.started_at if self.started_at is not None else now
        prompt_done = self.prompt_done_at if self.prompt_done_at is not None else now
        first = self.first_token_at
        return TurnStats(
            stop_reason=reason.name,
            stop_detail=detail,
            prompt_tokens=self.prompt_size,
            cached_tokens=self.cached,
            output_tokens=self.generated,
            queue_ms=(started - self.arrived_at) * 1000,
            ttft_ms=0.0 if first is None else (first - self.arrived_at) * 1000,
            prompt_ms=(prompt_done - started) * 1000,
            predicted_ms=(now - prompt_done) * 1000,
            parks=self.parks,
            shifts=self.shifts,
            shifted=self.shifted,
            forced_tokens=self.forced,
            reasoning_tokens=0 if self.reasoning is None else self.reasoning.tokens,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            compute_s=self.compute_s,
        )
