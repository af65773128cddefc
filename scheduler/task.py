"""A task: one turn on its way through the engine, with its own progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from ..backends import Sampler
from .kv.origin import Origin, scoped
from .messages import Adjust, Progressed, TaskSpec, TurnStats, unpack_tokens
from .output.stopping import Ending, StopReason, TurnConditions
from .output.text import TextAssembler
from .priority import Priority

BEGUN_AHEAD = 1 << 48
"""So many places before its own stands a task that another worker had begun."""


class TaskState(StrEnum):
    """Where a task is: in the queue, in a slot, or saved and back in the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"


class Group(NamedTuple):
    """What a step does in one way for all its tokens: only tasks of one group share a batch."""

    adapters: tuple[str, ...] = ()


BASE_GROUP = Group()
"""The model as it is."""


@dataclass(eq=False)
class Task:
    """Owned by the engine. `tokens` are prompt and output; the first `computed` are in the KV.

    What there is to do follows from these two: `tokens[computed:]` are to be decoded, and once all
    are, a token can be sampled from the logits (`has_logits`).
    """

    spec: TaskSpec
    arrival: int
    place: int
    """In the order of its equals: `arrival`, or renewed at the end of a quantum."""
    now: float
    tokens: list[int]
    prompt_size: int
    text: TextAssembler
    ctx_size: int = 0
    """Tokens that prompt and output may have."""
    watch: TurnConditions | None = None
    """What may end it beside its stop texts and its bounds."""
    checking_since: float | None = None
    """Since when others judge its last sentence: it waits, see `checking`."""
    ending: Ending | None = None
    """What its last token ends it by, if that sentence does not."""
    scope: int = 0
    session: str = ""
    """Whom its KV state may serve; see `store.Origin`."""
    state: TaskState = TaskState.WAITING
    slot: int = -1
    computed: int = 0
    has_logits: bool = False
    asked: int = 0
    credit: int = -1
    sampler: Sampler | None = None
    clock_waiting: int = 0
    """The engine's token clock when this task last began to wait: it ages by what runs since."""
    age: int = 0
    """Tokens that the engine computed while this task was waiting or parked, before that."""
    boost: int = 0
    """The highest effective class of those who wait for what this task computes."""
    follows: bool = False
    """It takes no slot yet: a running task computes what it shares with it."""
    prefix_hash: int = 0
    """A hash of the first tokens: tasks that share a prefix worth waiting for have equal ones."""
    stops: set[int] = field(default_factory=set)
    """Numbers of computed tokens at which the state is saved: where prompts part."""
    dropped: int = 0
    """Tokens that context shifts took out of `tokens`."""
    shifts: int = 0
    shifted: bool = False
    """The KV state is approximate, by a shift in this turn or before it."""
    shift_pending: bool = False
    """The slot was shifted and not decoded into since: it cannot be saved or moved now."""
    preempted_by_kv_pressure: bool = False
    """Parked because the KV cache was full: it comes back when another task has ended."""
    yields_until: int = 0
    """Parked by hand: before the token clock stands there, it gets only a slot that nobody else
    waits for."""
    fetching: bool = False
    """Its state is being read from disk."""
    looked_up: bool = False
    """The disk was asked for its state."""
    position: int = 0
    """The place in the queue that was told last."""
    leased_at: float = 0.0
    """When it got its slot."""
    begun_at: float | None = None
    """When it had its first logits in this slot."""
    quantum: int = 0
    cached: int = 0
    parks: int = 0
    away_since: float | None = None
    """Since when its reader takes nothing."""
    logits_at: float = 0.0
    """When the logits came."""
    admitted_at: float | None = None
    prompt_done_at: float | None = None
    first_token_at: float | None = None

    @classmethod
    def from_spec(
        cls, spec: TaskSpec, arrival: int, clock: int, now: float, *, shared: bool = False
    ) -> Task:
        """Return a waiting task that arrived at *now*, when the token clock stood at *clock*;
        *shared* lets its KV state serve all owners. One that another worker had begun arrived as
        much earlier, goes on where that was, and before its equals that have not begun.
        """
        tokens = unpack_tokens(spec.tokens)
        scope, session = scoped(spec.owner, spec.session, shared=shared)
        before = spec.progressed or Progressed()
        now -= before.age_s
        watch = TurnConditions.of(spec.stopping)
        return cls(
            spec=spec,
            arrival=arrival,
            place=arrival if before.admitted_s is None else arrival - BEGUN_AHEAD,
            now=now,
            tokens=tokens,
            prompt_size=len(tokens) + before.dropped - before.output_tokens,
            text=_assembler(spec, watch),
            watch=watch,
            scope=scope,
            session=session if spec.session else "",
            credit=spec.credit,
            clock_waiting=clock,
            asked=(before.asked if spec.progressed else 1) if spec.pull else 0,
            dropped=before.dropped,
            shifts=before.shifts,
            admitted_at=_moment(now, before.admitted_s),
            first_token_at=_moment(now, before.first_token_s),
        )

    @property
    def group(self) -> Group:
        """With whom it may share a batch."""
        return Group(self.spec.adapters)

    @property
    def origin(self) -> Origin:
        """Whose its KV state is."""
        spec = self.spec
        return Origin(self.scope, self.session, spec.adapters, self.shifted, spec.persist)

    def adjust(self, command: Adjust) -> None:
        """Take parameters that hold from the next token on; withheld text stays withheld."""
        self.spec = msgspec.structs.replace(
            self.spec,
            sampling=command.sampling,
            n_predict=command.n_predict,
            stop=command.stop,
            reverse_prompt=command.reverse_prompt,
        )
        self.text = self.text.with_stops(command.stop, command.reverse_prompt)

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) + self.dropped - self.prompt_size

    @property
    def said(self) -> tuple[list[int], list[int]]:
        """Prompt and answer; where some of both was dropped, all counts as prompt."""
        size = len(self.tokens) if self.dropped else self.prompt_size
        return self.tokens[:size], self.tokens[size:]

    @property
    def pending(self) -> int:
        """ScheduledTokens to decode before the next token can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is to be decoded."""
        return self.pending > 1 or self.computed + self.dropped < self.prompt_size

    def tokens_to_stop(self) -> int:
        """Return the tokens up to the next place at which the state is to be saved."""
        ahead = [stop - self.computed for stop in self.stops if stop > self.computed]
        return min(ahead, default=self.pending)

    @property
    def checking(self) -> bool:
        """Whether others judge its last sentence."""
        return self.checking_since is not None

    @property
    def unread_since(self) -> float | None:
        """Since when nothing of it can be told, as its reader is away or others judge it; a reader
        who comes back meanwhile does not change the latter.
        """
        return self.checking_since if self.away_since is None else self.away_since

    @unread_since.setter
    def unread_since(self, moment: float | None) -> None:
        self.away_since = moment

    @property
    def wants_token(self) -> bool:
        """Whether the reader takes another token now."""
        return self.checking_since is None and (
            self.asked > 0 if self.spec.pull else self.credit != 0
        )

    @property
    def has_work(self) -> bool:
        """Whether the next step has tokens of this task.

        A sampled token of a pull task is decoded ahead of the next call; a push task without
        credit stands still, as does a task whose last sentence is judged.
        """
        may = self.wants_token or (self.spec.pull and self.checking_since is None)
        return self.pending > 0 and may

    def yields(self, clock: int) -> bool:
        """Return whether it stands behind all others who wait, as it was parked by hand."""
        return clock < self.yields_until

    def effective_class(self, clock: int, ageing_tokens: int) -> int:
        """Return the class with the age: waiting tasks rise by one per *ageing_tokens*."""
        age = self.age
        if self.state is not TaskState.RUNNING:
            age += clock - self.clock_waiting
        return max(self.boost, min(Priority.URGENT, self.spec.priority + age // ageing_tokens))

    def stats(self, reason: StopReason, detail: str, now: float) -> TurnStats:
        """Return the figures of the turn, ended at *now*."""
        admitted = self.admitted_at if self.admitted_at is not None else now
        prompt_done = self.prompt_done_at if self.prompt_done_at is not None else now
        first = self.first_token_at
        return TurnStats(
            stop_reason=reason.name,
            stop_detail=detail,
            prompt_tokens=self.prompt_size,
            cached_tokens=self.cached,
            output_tokens=self.generated,
            queue_ms=(admitted - self.now) * 1000,
            ttft_ms=((first if first is not None else now) - self.now) * 1000,
            prompt_ms=(prompt_done - admitted) * 1000,
            predicted_ms=(now - prompt_done) * 1000,
            parks=self.parks,
            shifts=self.shifts,
            shifted=self.shifted,
        )


def _assembler(spec: TaskSpec, watch: TurnConditions | None) -> TextAssembler:
    """Return what makes text of a task's tokens."""
    if watch is None:
        return TextAssembler(spec.stop, spec.reverse_prompt)
    return TextAssembler(spec.stop, spec.reverse_prompt, watch.text, watch.sentences)


def _moment(start: float, seconds: float | None) -> float | None:
    return None if seconds is None else start + seconds
