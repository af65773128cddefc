"""Plans of batches: functions of the engine's state, without model or clock.

`held_back` and `plan_adapters` decide which tasks with slots share the next batch. Tasks are held
back so that users get their guaranteed part of the time. All tokens of a batch share their
adapters, so tasks with different ones alternate. `plan_tokens` plans the batch's tokens: those of
decoding tasks, in chunks if grammars have forced several (`plan_forced`), and the chunks of prompts
that fit into the time and the tokens of the step (`StepBudget`). `embeds_next` decides
whether the step is one of embeddings, and `EmbeddingQueue.plan_step` its time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...backends import Chunk
from ..owner import Owner, Priority
from ..settings import EngineSettings
from ..task import Task
from .cost import StepCost, StepLoad
from .draft_plan import passes_of
from .guarantees import Guarantees, Part
from .order import Order

LOW_STEP = 2 / 3
"""Share of `step_s_target` for a step for which others wait: with prompts of the lowest class, or
of several users.
"""
PASS_SHARE = 0.05
"""A step of prompts that delays no stream is long enough that its pass takes this share of it."""
REST_SHARE, REST_SHARE_ALONE = 1 / 4, 1 / 2
"""A rest of a prompt of at most this share of a chunk is added to the chunk: beside other tasks,
and if the prompt is alone. SmolLM2-135M computes 54 tokens in 107 ms at once, and in 116 ms in two
steps.
"""
ALONE_STEP = 2.0
"""Times `step_s_target` for a step with the drafts of a stream that is alone: the bound on how long
arrivals wait for it, and on the pauses that its reader sees.
"""
ALONE_S = 5.0
"""A stream is alone if its model has had no other task for this time. So requests that come every
second or two, such as an editor's, do not wait for longer steps.
"""
CHUNK_MIN = 8
"""A smaller chunk is not scheduled unless it ends its prompt, because each chunk has a cost of its
own.
"""


@dataclass
class StepBudget:
    """The chunks (position, count) of a step, and the time and tokens that are left for more."""

    chunks: list[tuple[int, int]]
    cost: StepCost
    tokens_left: int
    tokens_min: int
    seconds: float = 0.0
    logits_left: int = 0
    """Tokens that may have logits besides the last one of each chunk."""
    logits: int = 0
    """Those that have."""
    rest_share: float = REST_SHARE

    def predicted_s(self) -> float:
        """Return the seconds that the chunks so far will take."""
        return self.cost.predict(StepLoad.of_chunks(self.chunks, self.logits))

    def schedule_prompt(self, task: Task) -> int:
        """Add as many tokens of *task* as fit, at least the prompts' minimum; return their number.

        Each chunk has a cost of its own. So a small rest of the prompt is added to the chunk before
        it, and a prompt does not begin with a few tokens. A prompt whose logprobs are wanted gets
        no more tokens than may have logits. Items are scheduled whole, unless their entries see
        only those before them.
        """
        item_left = task.item_left
        if item_left and task.item_is_whole:
            return item_left
        most = min(item_left or task.pending, task.tokens_to_checkpoint(), self.tokens_left)
        most = min(most, task.reserved_tokens or most, task.spec.batch_size or most)
        scored = task.tokens_within(1 + self.logits_left)
        if scored < min(most, CHUNK_MIN) and not self.tokens_min:
            return 0  # the prompts before it use the step's logits
        most = min(most, scored)
        count = max(self._fitting(task, most), min(most, self.tokens_min))
        if most - count <= count * self.rest_share:
            count = most
        elif count < CHUNK_MIN:
            count = 0
        else:
            count = max(self.cost.fast_size(count, most), min(most, self.tokens_min))
        if count:
            self.chunks.append((task.computed, count))
            more = _logits_of(task, count)
            self.logits, self.logits_left = self.logits + more, self.logits_left - more
            self.tokens_left -= count
            self.tokens_min = max(0, self.tokens_min - count)
        return count

    def _fitting(self, task: Task, most: int) -> int:
        """Return the greatest count, up to *most*, with which the step keeps to its time."""
        position = task.computed

        def seconds(count: int) -> float:
            logits = self.logits + _logits_of(task, count)
            return self.cost.predict(StepLoad.of_chunks([*self.chunks, (position, count)], logits))

        return bisect_right(range(1, most + 1), self.seconds, key=seconds)


def _logits_of(task: Task, count: int) -> int:
    """Return the tokens with logits among the next *count*, without one for the chunk."""
    return max(0, task.logits_of(count) - 1)


def forced_tokens_s(
    decoding: Sequence[Task], prompts: Sequence[Task], order: Order, settings: EngineSettings
) -> float:
    """Return the time of a step in which its decoding tasks may compute chunks of forced tokens,
    planned before its prompts. Other streams wait for these chunks as for a prompt's chunk.
    """
    if prompts:
        return settings.step_s_target / 2
    if len(decoding) > 1:
        return settings.step_s_target
    low = any(order.effective(t) == Priority.LOW for t in decoding)
    return LOW_STEP * settings.step_s_target if low else settings.step_s_max


def undisturbed_step_s(cost: StepCost, settings: EngineSettings) -> float:
    """Return the time for a step that delays no stream of its class. Arrivals wait for it, so it is
    no longer than `PASS_SHARE` demands, between `LOW_STEP` of `step_s_target` and `step_s_max`.
    """
    least = LOW_STEP * settings.step_s_target
    return min(settings.step_s_max, max(least, cost.pass_s / PASS_SHARE))


def drafts_step_s(
    streams: Sequence[Task], alone_s: float, order: Order, settings: EngineSettings
) -> float:
    """Return the time that a step may take for the drafts of its *streams*, if it cannot have as
    many tokens per second within `step_s_target`. It is longer only for a stream that has been
    alone for *alone_s*, and not of the lowest class, which any arrival precedes. An arrival, urgent
    or not, waits for one such step, which is shorter than one of a prompt that is alone may be.
    """
    target_s = settings.step_s_target
    if len(streams) > 1 or alone_s < ALONE_S or order.effective(streams[0]) == Priority.LOW:
        return target_s
    return max(target_s, min(ALONE_STEP * target_s, settings.step_s_max))


def step_s_max(absent: Sequence[Task], order: Order) -> float:
    """Return the time that prompts and texts of a step may take, where the readers of the *absent*
    tasks are away for a moment and then request the next token. A reader of a user who is behind
    its guarantee waits no longer than it was away the last time, so that readers who are far away
    keep their part too.
    """
    behind = order.guarantees.behind_of
    return min((t.reader_away_s for t in absent if any(behind(t.spec.owner))), default=math.inf)


def prompts_step_s(
    effective: int,
    decoding: Sequence[Task],
    prompts: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    cost: StepCost,
) -> float:
    """Return the time for a step in which *prompts* of one class are computed:

    - of the lowest class: `LOW_STEP` of `step_s_target`. Any arrival precedes them, but must wait
      for the step under way;
    - while tasks of a higher class decode: `step_s_target`;
    - while only tasks of lower classes decode, or none: `undisturbed_step_s`;
    - while tasks of their own class decode: `step_s_target`, or `step_s_max` for a burst, for which
      the streams wait. Prompts are a burst if they take at most `burst_s` together, and got their
      slots soon after the oldest stream's first token, within `step_s_max`;
    - while several users have prompts or decode: `LOW_STEP` of `step_s_target`.

    A reserved quantum does not change the class here.
    """
    highest = max(map(order.effective_unreserved, decoding), default=-1)
    users = {t.spec.owner.user for t in (*prompts, *decoding)}
    if effective == Priority.LOW or len(users) > 1:
        return LOW_STEP * settings.step_s_target
    if highest > effective:
        return settings.step_s_target
    if highest < effective:
        return undisturbed_step_s(cost, settings)
    equals = [t for t in decoding if order.effective_unreserved(t) == effective]
    streaming_since = min(t.first_logits_at or 0.0 for t in equals)
    left = StepLoad.of_chunks([(t.computed, t.pending) for t in prompts])
    late = streaming_since + settings.step_s_max < max(t.slot_since for t in prompts)
    if late or cost.predict(left) > settings.burst_s:
        return settings.step_s_target
    return max(settings.step_s_target, settings.step_s_max)


def plan_forced(
    decoding: Sequence[Task], cost: StepCost, seconds: float, tokens_max: int
) -> list[int]:
    """Return how many tokens of each *decoding* task the next step computes: one, or the size of
    the chunks, as long as the step keeps to *seconds* and to *tokens_max* tokens.

    All chunks have one size, because different sizes are computed one after the other (see
    `StepLoad`). It is the size with which the step computes most tokens. The rest is left for the
    next steps.

    The chunks need a pass of their own, unless each task has one. A step without chunks is a pass
    with one token for each task. So the chunks must add at least as many tokens, or the tasks
    together would get fewer tokens per second. (With 16 tasks and a vocabulary of 262k tokens, a
    pass for 4 tokens made a step longer by 25 of 64 ms.)
    """
    if all(task.pending == 1 for task in decoding):
        return [1] * len(decoding)
    pending = [_pending(task) for task in decoding]
    size, chunks = _most_tokens(pending)

    def load(size_tried: int) -> StepLoad:
        counts = [size_tried if count >= size else 1 for count in pending]
        return StepLoad.of_chunks([(t.computed, c) for t, c in zip(decoding, counts, strict=True)])

    if size > 1:
        most = min(size, 1 + (tokens_max - len(decoding)) // chunks)
        fitting = bisect_right(range(2, most + 1), seconds, key=lambda n: cost.predict(load(n)))
        if chunks == len(decoding) or fitting * chunks >= len(decoding):
            return [1 + fitting if count >= size else 1 for count in pending]
    return [1] * len(decoding)


def _pending(task: Task) -> int:
    """Return how many tokens of *task* may be computed at once."""
    most = min(task.pending, task.tokens_to_checkpoint())
    return min(most, task.reserved_tokens or most)


def _most_tokens(pending: Sequence[int]) -> tuple[int, int]:
    """Return the size of the chunks with which a step computes most tokens, and their number. The
    other tasks have one token each.
    """
    descending = sorted(pending, reverse=True)
    added = [(size - 1) * count for count, size in enumerate(descending, start=1)]
    index = added.index(max(added))
    return descending[index], index + 1


FIRST_STEP_TOKENS = 32
"""Prompt tokens of the very first step, before the machine's speed is known."""


class ScheduledTokens(msgspec.Struct, frozen=True):
    """The next *count* pending tokens of *task* go into the batch. The last *logits* of them have
    logits. Behind them are *drafts*, which all have logits. The first *proposed* of these are of a
    drafter, the others are fill.
    """

    task: Task
    start: int
    """The position of the first of these tokens."""
    count: int
    logits: int
    drafts: tuple[int, ...] = ()
    proposed: int = 0
    beside_prompts: bool = False
    """It has drafts in a step with chunks of prompts."""

    @classmethod
    def of_task(cls, task: Task, count: int) -> ScheduledTokens:
        """Return the next *count* tokens of *task*, with the logits that it needs."""
        return cls(task, task.computed, count, task.logits_of(count))

    def chunk(self) -> Chunk:
        """Return the chunk for the model."""
        task, start = self.task, self.start
        tokens = task.tokens[start : start + self.count]
        begin = task.item_at(start) if task.media else None
        if begin is None:
            logits = self.logits + len(self.drafts)
            return Chunk(task.slot, [*tokens, *self.drafts], start, logits)
        return Chunk(task.slot, tokens, start, self.logits, task.embeddings[begin], start - begin)

    @property
    def size(self) -> int:
        """The tokens of the chunk, with the drafts."""
        return self.count + len(self.drafts)

    @property
    def logits_read(self) -> int:
        """The tokens with logits, except the last one and drafts."""
        return max(0, self.logits - 1)


def load_of(batch: Sequence[ScheduledTokens]) -> StepLoad:
    """Return the load of a step, before or after its tokens were counted as computed."""
    chunks = [(part.start, part.size) for part in batch]
    load = StepLoad.of_chunks(chunks, sum(part.logits_read for part in batch))
    if any(part.drafts for part in batch):
        passes, mixed = passes_of([s for _, s in chunks]), any(p.beside_prompts for p in batch)
        load = msgspec.structs.replace(load, passes=tuple(passes), has_prompts=mixed)
    return load


def next_trial(tasks: Sequence[Task], order: Order, *, tried: bool) -> Task | None:
    """Return the task that the next step computes alone, on trial or with an item next. Return None
    if the next step computes the other tasks. Both kinds of steps alternate; *tried* means that the
    last one computed a task alone. Images and sounds wait for prompts of a higher class, as other
    prompts do.
    """
    trials = [t for t in tasks if t.computes_alone and t.has_work]
    if not trials or (tried and any(t.has_work and not t.computes_alone for t in tasks)):
        return None
    items = [t for t in trials if t.media and not t.trial_tokens]
    if items:
        first = first_prompts([t for t in tasks if t.has_work and t.prefilling], order)
        trials = [t for t in trials if t not in items or t in first]
    return min(trials, key=order.key, default=None)


def plan_trial(
    task: Task,
    settings: EngineSettings,
    batch_size: int,
    cost: StepCost,
    logits_max: int,
    seconds: float | None = None,
) -> list[ScheduledTokens]:
    """Return the tokens of a step that computes only *task*, in about *seconds*, by default the
    target.
    """
    left = batch_size if cost.known else min(batch_size, FIRST_STEP_TOKENS)
    tokens_min = settings.prompt_tokens_min
    seconds = settings.step_s_target if seconds is None else seconds
    step = StepBudget([], cost, left, tokens_min, seconds, logits_max - 1)
    return [ScheduledTokens.of_task(task, step.schedule_prompt(task))]


def item_step_s(
    task: Task, others: Sequence[Task], order: Order, settings: EngineSettings, cost: StepCost
) -> float:
    """Return the time of a step with entries of an image or a sound of *task*, for which the
    *others* wait. If no stream waits, it is as long as that of a prompt.
    """
    decoding = [t for t in others if not t.prefilling]
    own = order.effective_unreserved(task)
    seconds = prompts_step_s(own, decoding, [task], order, settings, cost)
    return min(seconds, settings.step_s_target) if decoding else seconds


def first_prompts(prompts: Sequence[Task], order: Order) -> list[Task]:
    """Return the prompts that share the next step, in the order of the queue: of each user, those
    of the user's highest class, if no prompt of another user is above them.
    """
    highest = max(map(order.level, prompts))
    of_user: dict[int, int] = {}
    for task in prompts:
        user = task.spec.owner.user
        of_user[user] = max(of_user.get(user, 0), order.effective(task))
    first = [
        t
        for t in prompts
        if order.level(t) == highest and order.effective(t) == of_user[t.spec.owner.user]
    ]
    return sorted(first, key=order.key)


def plan_tokens(
    running: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    batch_size: int,
    cost: StepCost,
    adapters: tuple[str, ...] = (),
    logits_max: int = 0,
    seconds_max: float = math.inf,
) -> list[ScheduledTokens]:
    """Return the next batch: tokens of the *running* tasks with *adapters*, in the tasks' order.

    Every decoding task gets one token, or a chunk of forced ones (`plan_forced`). Prompts share the
    rest of the step's time (`prompts_step_s`, at most *seconds_max*), in the order of the queue.
    They get at least half as much time as the decoding tokens take, even if the step then exceeds
    its target. Prompts of a lower class wait for those of a higher one (`first_prompts`). Each task
    may have logits after its last token; prompts whose logprobs are wanted share the others of the
    *logits_max* tokens with logits.
    """
    tasks = [t for t in running if t.has_work and t.spec.adapters == adapters]
    prompts = [t for t in tasks if t.prefilling]
    if not prompts and all(t.pending == 1 for t in tasks):
        return [ScheduledTokens.of_task(t, 1) for t in tasks]
    decoding = [t for t in tasks if not t.prefilling]
    most = batch_size if cost.known else min(batch_size, len(decoding) + FIRST_STEP_TOKENS)
    most_forced = most - settings.prompt_tokens_min if prompts else most
    seconds = forced_tokens_s(decoding, prompts, order, settings)
    planned = plan_forced(decoding, cost, seconds, max(most_forced, len(decoding)))
    if not prompts:
        return [ScheduledTokens.of_task(t, n) for t, n in zip(decoding, planned, strict=True)]
    counts = {id(t): n for t, n in zip(decoding, planned, strict=True)}
    chunks = [(t.computed, counts[id(t)]) for t in decoding]
    tokens_min, logits_left = settings.prompt_tokens_min, max(0, logits_max - len(tasks))
    step = StepBudget(chunks, cost, most - sum(planned), tokens_min, logits_left=logits_left)
    prompts = first_prompts(prompts, order)
    own = max(map(order.effective_unreserved, prompts))
    step.seconds = prompts_step_s(own, decoding, prompts, order, settings, cost)
    step.seconds = max(min(step.seconds, seconds_max), 1.5 * step.predicted_s())
    if len(tasks) == 1 and own > Priority.LOW and not order.guarantees.parts:
        step.rest_share = REST_SHARE_ALONE
    for task in prompts:
        counts[id(task)] = step.schedule_prompt(task)
    return [ScheduledTokens.of_task(t, counts[id(t)]) for t in tasks if counts.get(id(t))]


ADAPTERS_LAG_S = 0.1
"""Lag from which tasks with other adapters are held back. A change of adapters takes 2 ms."""

CATCH_UP = 1.5
"""A lag of a second is gone after 2 s, divided by the guaranteed share, at most."""


@dataclass
class _OwnersWork:
    """The work of one owner: the highest class of its tasks beside those of its user, of other
    accounts and of its account, and their adapters. Texts to embed have None for adapters.
    """

    effective: int = 0
    level: int = 0
    level_in_account: int = 0
    decodes: bool = True
    """Whether all of its tasks decode."""
    adapters: set[tuple[str, ...] | None] = field(default_factory=set)


def held_back(
    tasks: Sequence[Task], order: Order, now: float, gap_s: float, cost: StepCost
) -> frozenset[Task]:
    """Return those of *tasks*, which all could be in the next step, that are held back for an owner
    who is behind its guarantee (see `Guarantees`).

    A task is held back if its own owner is not behind, and its class is not above that of the other
    owner's tasks. A decoding task is held back for *gap_s* at most, so that no stream stands still
    for longer, and a task with a reserved quantum is not held back.

    Decoding tasks are not held back for others that catch up beside them (`_catch_up`). So streams
    still share batches if more users than slots take turns.
    """
    shares, works = order.guarantees, dict[Owner, _OwnersWork]()
    if not shares.parts:
        return frozenset()
    for task in tasks:
        work = works.setdefault(task.spec.owner, _OwnersWork())
        work.effective = max(work.effective, order.effective(task))
        work.level = max(work.level, order.level(task))
        work.level_in_account = max(work.level_in_account, order.level_in_account(task))
        work.adapters.add(_adapters(task))
        work.decodes &= task.spec.embed is None and not task.prefilling
    preceded = frozenset(shares.preceded(works))
    if not preceded:
        return frozenset()
    catching_up = _catch_up(tasks, shares, cost)
    behind = [one for one in works if any(shares.behind_of(one))]

    def is_held_back(task: Task) -> bool:
        owner, adapters = task.spec.owner, _adapters(task)
        decodes = task.spec.embed is None and not task.prefilling
        if owner not in preceded or task.reserved_tokens:
            return False
        if decodes and now >= task.computed_at + gap_s:
            return False
        for one in behind:
            rivals, lag_s = shares.rivals(one, owner), shares.precedes_by(one, owner)
            if rivals is None or lag_s <= 0:
                continue
            work = works[one]
            if one.user == owner.user:
                above = order.effective(task) > work.effective
            elif shares.share_account(one, owner):
                above = order.level_in_account(task) > work.level_in_account
            else:
                above = order.level(task) > work.level
            apart = adapters is not None and work.adapters.isdisjoint({adapters, None})
            if decodes and work.decodes and not apart and rivals[0] in catching_up:
                continue
            if not above and lag_s > (ADAPTERS_LAG_S if apart else 0.0):
                return True
        return False

    return frozenset(filter(is_held_back, tasks))


def _catch_up(tasks: Sequence[Task], shares: Guarantees, cost: StepCost) -> frozenset[Part]:
    """Return the parts whose lag decreases fast enough in a step of all decoding tasks: alone,
    their tokens would take `CATCH_UP` times as long as they are guaranteed of this step.
    """
    decoding = [t.spec.owner for t in tasks if t.spec.embed is None and not t.prefilling]
    tokens = Counter(part for owner in decoding for part in shares.parts.get(owner, ()))
    step_s = cost.decode_s(len(decoding))
    if not step_s:
        return frozenset()
    return frozenset(
        part
        for part, count in tokens.items()
        if cost.decode_s(count) >= CATCH_UP * shares.shares[part] * step_s
    )


def _adapters(task: Task) -> tuple[str, ...] | None:
    return task.spec.adapters if task.spec.embed is None else None


ADAPTER_SETS_MAX = 256
"""Number of adapter sets whose last quantum is remembered: the most slots that a model has."""


class AdapterQuantum(NamedTuple):
    """The present *adapters*, the *tokens* computed with them, and the *previous* adapter sets, the
    latest last.
    """

    adapters: tuple[str, ...] = ()
    tokens: int = 0
    previous: tuple[tuple[str, ...], ...] = ()

    def with_tokens(self, tokens: int) -> AdapterQuantum:
        """Return the quantum after a step of *tokens* more."""
        return AdapterQuantum(self.adapters, self.tokens + tokens, self.previous)

    def pass_to(self, adapters: tuple[str, ...]) -> AdapterQuantum:
        """Return the quantum of *adapters* that follows this one."""
        if adapters == self.adapters:
            return self
        previous = (*(a for a in self.previous if a != self.adapters), self.adapters)
        return AdapterQuantum(adapters, 0, previous[-ADAPTER_SETS_MAX:])

    def order_of(self, adapters: tuple[str, ...]) -> int:
        """Return the sort key of *adapters*: the latest quantum comes last, and -1 means none."""
        return self.previous.index(adapters) if adapters in self.previous else -1


def plan_adapters(
    tasks: Iterable[Task], order: Order, settings: EngineSettings, quantum: AdapterQuantum
) -> tuple[str, ...]:
    """Return the adapters of the next step, from the *tasks* that have slots and work.

    The next adapters are those of the first task in the order of the queue. Among tasks of equal
    rank they are those whose last quantum is longest ago, so that no task waits for more than one
    quantum of each other set. A task of a higher class takes over at once, and one
    whose owner is further behind by `ADAPTERS_LAG_S`. Another one of the same class takes over at
    the end of the present quantum, unless its owner was served more.
    """
    present, tasks = quantum.adapters, [t for t in tasks if t.has_work]
    if all(t.spec.adapters == present for t in tasks):
        return present
    first: dict[tuple[str, ...], Task] = {}
    for task in sorted(tasks, key=order.key):
        first.setdefault(task.spec.adapters, task)
    own = first.pop(present, None)
    if not first:
        return present
    following, task = min(
        first.items(),
        key=lambda pair: (
            *order.rank(pair[1]),
            quantum.order_of(pair[0]),
            pair[1].queue_number,
        ),
    )
    if own is None or order.is_above(task, own):
        return following
    if order.guarantees.lead_s(task.spec.owner, own.spec.owner) >= ADAPTERS_LAG_S:
        return following
    over = quantum.tokens >= settings.quantum_tokens
    return following if over and order.rank(task) <= order.rank(own) else present


def embeds_next(
    generating: Sequence[Task], embedding: Sequence[Task], order: Order, *, embedded: bool
) -> bool:
    """Return whether the next step is one of embeddings; *embedded* means that the last one was.

    The two alternate step by step, so that neither starves. Decoding tasks get every other step,
    whatever their class. Embeddings wait for prompts of a higher class until they have aged. While
    no task decodes, prompts wait for embeddings of a higher class in the same way.
    """
    if not embedding or not generating:
        return bool(embedding)
    texts = order.highest(embedding)
    prompts = order.highest(t for t in generating if t.prefilling)
    if embedded:
        decodes = any(not t.prefilling for t in generating)
        return not decodes and all(any(order.is_above(t, p) for t in texts) for p in prompts)
    return not any(all(order.is_above(p, t) for t in texts) for p in prompts)
