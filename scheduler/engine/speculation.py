"""Speculation: the drafts of a step, from the proposals of drafters and the decision of
`draft_plan`, and the acceptance of each stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from ...backends import LanguageModel
from ..drafting.model_drafter import LAG_MAX
from ..drafting.ngram import NgramDrafter
from ..policy.batch_plan import ScheduledTokens, drafts_step_s
from ..policy.cost import KeepTime, StepCost
from ..policy.draft_plan import (
    DRAFT_MAX,
    LOSS_MAX,
    Acceptance,
    DraftPlan,
    PromptChunks,
    StepBounds,
    StepTimes,
    StreamOffer,
    pays_to_catch_up,
    plan_drafts,
    saving_s,
)
from ..policy.order import Order
from ..task import Task
from .answers import joins_events
from .metrics_publisher import MetricsPublisher
from .model_drafts import ModelDrafts
from .task_table import TaskTable

TRIAL_DRAFTS = 4
"""Drafts of a draft model that are only compared with the tokens that follow, to learn how many it
gets right now.
"""
CHECK_TOKENS = 8
"""Tokens between two checks whether it pays that the draft model catches up with a stream."""
PAUSE_MAX = 64
"""The most tokens that a stream generates without drafts after its drafts failed."""
FULL_PAUSE_STEPS = 256
"""Steps without drafts after a step found no KV cells for its drafts."""
AUTO = "auto"
BY_MODEL = ("draft", "mtp")
"""The drafters whose drafts take time: a draft model, and NextN layers."""


class Drafter(Protocol):
    """Proposes tokens that a task is expected to generate next. The engine's thread owns it.

    A drafter only predicts. Its proposals do not change the text, because each token is
    sampled as without drafts, and a draft is kept only if it equals the sampled token. It must not
    let one user's text show in the proposals for another, since the time of a step shows these.
    """

    def propose(self, task: Task, limit: int) -> Sequence[int]:
        """Return up to *limit* tokens that are expected behind all tokens of *task*; none if there
        is no proposal. Proposals of which less was computed than offered are compared with the
        tokens that follow, too, so a drafter should continue a proposal while it is right.
        """

    def forget(self, task_id: int) -> None:
        """Free the memory for a task that has ended or lost its slot. Nothing else is lost: the
        next proposal for it begins anew.
        """

    def forget_session(self, user: int, session: str) -> None:
        """Drop everything that is kept of a session, which is being deleted."""


@dataclass(slots=True)
class _Stream:
    """A stream whose answer is drafted, by its *drafter* or else the draft model. *predicted* are
    the tokens that it expected behind the first *seen* of the answer. It was right *run* times in a
    row.
    """

    name: str
    drafter: Drafter | None
    predicted: Sequence[int] = ()
    seen: int = 0
    run: int = 0
    fails: int = 0
    """Steps in a row whose drafts took more time than they saved."""
    paused_until: int = 0
    """The size of the answer from which on it may have drafts again."""
    tried: int = 0
    """Accepted drafts before its last step with drafts."""
    slowdown: float = 0.0
    """How many times as long that step took with its drafts; 0 if it had none."""
    account_s: float = 0.0
    """The time that the draft model may take for it without a gain: `LOSS_MAX` of its steps."""
    catches_up: bool = False
    checked_at: int = -CHECK_TOKENS
    """The size of the answer when it was last checked whether to catch up with it."""


_Planner = Callable[[Sequence[StreamOffer]], DraftPlan]


class _Step(NamedTuple):
    """The streams of the next step with their offers, and the function that plans their drafts."""

    streams: Sequence[ScheduledTokens]
    offers: Sequence[StreamOffer]
    plan_of: _Planner
    beside_prompts: bool

    def may_pay(self, index: int) -> bool:
        """Return whether a stream would have drafts if all of them were right."""
        hoped, offer = list(self.offers), self.offers[index]
        right = [float(count) for count in range(1, len(offer.expected) + 1)]
        hoped[index] = offer._replace(expected=right)
        return self.plan_of(hoped).counts[index] > 0


class Speculation:
    """Owned by the engine. The proposals that are not computed are compared with the tokens that
    follow, too. So the acceptance of a stream is known before it has its first draft, and a stream
    that no drafter can predict loses nothing.
    """

    def __init__(
        self,
        model: LanguageModel,
        tasks: TaskTable,
        cost: StepCost,
        metrics: MetricsPublisher,
        drafters: Mapping[str, Drafter] | None = None,
    ):
        self.drafters: dict[str, Drafter] = dict(drafters or {"ngram": NgramDrafter()})
        """By name; more can be added before the first step."""
        self.by_model = ModelDrafts(model, tasks, metrics)
        self._model, self._tasks, self._cost, self._counts = model, tasks, cost, metrics.counts
        self._slots = tasks.slots
        self._streams: dict[int, _Stream] = {}
        self._pause_steps = 0
        self._keep_time = KeepTime()
        self._others_at = -math.inf
        """When a step was last planned while there were several tasks."""
        self._slowdown, self._streams_in_step, self._accepted_before = 1.0, 0, 0
        """Of the step that is being computed: how many times as long it takes with its drafts, its
        streams, and the drafts of its tasks that were accepted before.
        """

    def _new_stream(self, task: Task) -> _Stream | None:
        """Return the stream of a task's answer, if it has a drafter."""
        info, wanted = self._model.info, task.spec.speculation
        name = wanted
        is_on = self.by_model.is_on and self.by_model.name == wanted
        if wanted == AUTO or (wanted in BY_MODEL and not is_on):
            name = info.drafter
        drafter = self.drafters.get(name)
        if (drafter is None and name not in BY_MODEL) or task.spec.pull or not task.spec.draft_max:
            return None
        if drafter is None and not task.drafted:
            task.acceptance = Acceptance(self.by_model.learned.rates)
        stream = self._streams[task.spec.id] = _Stream(name, drafter, seen=task.generated)
        return stream

    def add_drafts(
        self, batch: Sequence[ScheduledTokens], order: Order
    ) -> Sequence[ScheduledTokens]:
        """Return *batch* with the drafts that the next step verifies."""
        self.by_model.step_s = 0.0
        if len(self._tasks) > 1:
            self._others_at = self._tasks.clock.now
        able = self._model.info.no_drafts == "" and not self._slots.drafts_cut_states
        if not able:
            return batch
        prompts = [part.count for part in batch if part.task.prefilling]
        if len(prompts) == len(batch):
            return batch
        if self._pause_steps:
            self._pause_steps -= 1
            return batch
        offers, proposals, lagging = [], [], dict[int, StreamOffer]()
        streams = [part for part in batch if not part.task.prefilling] if prompts else batch
        for index, part in enumerate(streams):
            offer, tokens = self._offer(part, order)
            if offer.by_model and self.by_model.drafter.lag(part.task) > LAG_MAX:
                lagging[index] = offer
                offer = offer._replace(expected=(), by_model=False)
            offers.append(offer)
            proposals.append(tokens)
        offered = any(offer.expected for offer in offers)
        if not offered and not lagging:
            return batch
        plan_of = self._planner(batch, prompts, order)
        plan = plan_of(offers) if offered else DraftPlan([0] * len(streams))
        if any(map(self._is_by_model, streams)):
            step = _Step(streams, offers, plan_of, beside_prompts=len(prompts) > 0)
            self._draft_by_model(step, proposals, plan.counts, lagging)
        self._slowdown, self._streams_in_step = plan.slowdown, len(streams)
        if not any(tokens and count for tokens, count in zip(proposals, plan.counts, strict=True)):
            return batch
        drafted = {
            id(part): self._with_drafts(part, tokens[:count], count, plan.slowdown, prompts)
            for part, tokens, count in zip(streams, proposals, plan.counts, strict=True)
            if count
        }
        return [drafted.get(id(part), part) for part in batch]

    def _planner(
        self, batch: Sequence[ScheduledTokens], prompts: Sequence[int], order: Order
    ) -> _Planner:
        """Return the function that plans the drafts of the streams in *batch*, by their offers."""
        info, cost, settings = self._model.info, self._cost, self._tasks.settings
        logits = sum(max(1, part.logits) for part in batch)
        left = min(info.logits_max - logits, info.batch_size - sum(p.count for p in batch))
        alone_s = self._tasks.clock.now - self._others_at
        longer_s = drafts_step_s([part.task for part in batch], alone_s, order, settings)
        beside = PromptChunks(prompts, cost.token_s, cost.pass_s, cost.logits_pass_known)
        draft_s = self.by_model.draft_s
        times = StepTimes(
            cost.logits_pass_s, cost.position_s, beside, draft_s, self._keep_time.seconds
        )
        bounds = StepBounds(settings.step_s_target, left, longer_s)
        return lambda offers: plan_drafts(offers, times, bounds)

    def _is_by_model(self, part: ScheduledTokens) -> bool:
        stream = self._streams.get(part.task.spec.id)
        return stream is not None and stream.drafter is None

    def _draft_by_model(
        self,
        step: _Step,
        proposals: list[Sequence[int]],
        counts: Sequence[int],
        lagging: Mapping[int, StreamOffer],
    ) -> None:
        """Have the draft model make the *proposals* of which the plan has *counts*. Otherwise it
        catches up with a stream, or is tried again, if that is expected to pay.
        """
        offers, parts = step.offers, step.streams
        wanted = {i: counts[i] for i, offer in enumerate(offers) if offer.by_model and counts[i]}
        step_s = self._cost.logits_pass_s(len(parts))
        for index, part in enumerate(parts):
            if index in wanted or not self._is_by_model(part) or step.beside_prompts:
                continue
            stream = self._streams[part.task.spec.id]
            stream.account_s += LOSS_MAX * step_s
            if index in lagging:
                hoped = [lagging.get(i, offer) for i, offer in enumerate(offers)]
                self._catch_up(step._replace(offers=hoped), index, step_s)
            elif offers[index].by_model and not stream.predicted:
                stream.catches_up = False
                trial_s = self.by_model.draft_s(1, TRIAL_DRAFTS)
                if stream.account_s > trial_s:
                    stream.account_s -= trial_s
                    if step.may_pay(index):
                        wanted[index] = min(TRIAL_DRAFTS, len(offers[index].expected))
        limits = [(parts[i].task, min(n, len(offers[i].expected))) for i, n in wanted.items()]
        limits.sort(key=lambda limit: limit[0].slot)
        made = self.by_model.propose(limits)
        for index in wanted:
            number = parts[index].task.spec.id
            proposals[index] = self._streams[number].predicted = made.get(number, ())

    def _catch_up(self, step: _Step, index: int, step_s: float) -> None:
        """Have the draft model catch up with a stream, if that pays and no task waits."""
        task = step.streams[index].task
        stream, by_model = self._streams[task.spec.id], self.by_model
        if self._tasks.queue or not by_model.is_on:
            return
        lag = by_model.drafter.lag(task)
        if not by_model.drafter.cost.known:  # a few tokens show what the others take
            by_model.catch_up(task, lag, step_s, alone=True)
            return
        lag_s = by_model.drafter.lag_s(task, lag)
        if not stream.catches_up and task.generated >= stream.checked_at + CHECK_TOKENS:
            stream.checked_at = task.generated
            saved_s = saving_s(step.offers, step.plan_of(step.offers), index, step_s)
            left = task.ctx_size - len(task.tokens)
            if task.spec.n_predict >= 0:
                left = min(left, task.spec.n_predict - task.generated)
            trial_s = by_model.draft_s(1, TRIAL_DRAFTS)
            pays = pays_to_catch_up(lag_s, saved_s, task.generated, left, stream.account_s, trial_s)
            stream.catches_up = pays and (saved_s > 0 or step.may_pay(index))
            if stream.catches_up and not saved_s:
                stream.account_s -= lag_s
        if stream.catches_up:
            by_model.catch_up(task, lag, step_s, alone=len(step.streams) == 1)

    def _offer(self, part: ScheduledTokens, order: Order) -> tuple[StreamOffer, Sequence[int]]:
        """Return what a stream offers for the next step, and the tokens that its drafter proposes,
        of which there are none while the stream pauses.
        """
        task, limit = part.task, self._limit(part)
        keeps_states = self._model.info.keeps_states
        offer = StreamOffer(part.count, part.start + part.count, limit, goes_back=keeps_states)
        stream = self._streams.get(task.spec.id)
        if stream is None:
            stream = self._new_stream(task)
            if stream is None:  # it has no fill either
                return offer._replace(drafts_max=0), ()
        self._compare(task, stream)
        if stream.drafter is None:
            return self._offer_by_model(offer, task, stream, order), ()
        proposed = stream.drafter.propose(task, max(limit, 1))
        if stream.predicted and proposed[:1] != stream.predicted[:1]:
            stream.run = 0
        stream.predicted = proposed
        if limit < 1 or not proposed or task.generated < stream.paused_until:
            return offer, ()
        proposed = proposed[:limit]
        expected = task.acceptance.expected(stream.run, len(proposed))
        return offer._replace(expected=expected, level=order.effective(task)), proposed

    def _offer_by_model(
        self, offer: StreamOffer, task: Task, stream: _Stream, order: Order
    ) -> StreamOffer:
        """Return what a stream offers whose drafts the draft model makes after the plan."""
        if offer.drafts_max < 1 or not self.by_model.is_on or task.generated < stream.paused_until:
            return offer
        limit = min(offer.drafts_max, self.by_model.drafter.drafts_max(task))
        expected = task.acceptance.expected(stream.run, limit)
        return offer._replace(
            expected=expected, level=order.effective(task), by_model=bool(expected)
        )

    def _limit(self, part: ScheduledTokens) -> int:
        """Return the most drafts that *part* can have: no token would be sampled after more."""
        task = part.task
        if part.count < task.pending or task.trial_tokens or task.comparing_since is not None:
            return 0
        spec = task.spec
        limit = min(spec.draft_max, DRAFT_MAX, task.ctx_size - len(task.tokens) - 1)
        if (most := self._model.info.drafts_max) is not None:
            limit = min(limit, most)
        if spec.n_predict >= 0:
            limit = min(limit, spec.n_predict - task.generated - 1)
        if task.credit >= 0 and not joins_events(task):
            limit = min(limit, task.credit - 1)
        return limit

    def _compare(self, task: Task, stream: _Stream) -> None:
        """Compare the tokens of *task* since the last step with those that were expected."""
        new = task.generated - stream.seen
        stream.seen = task.generated
        if stream.slowdown:
            accepted = task.accepted - stream.tried
            stream.fails = stream.fails + 1 if 1 + accepted < stream.slowdown else 0
            if stream.fails:
                stream.paused_until = task.generated + min(1 << stream.fails, PAUSE_MAX)
            stream.slowdown = 0.0
        predicted, acceptance = stream.predicted, task.acceptance
        for done, token in enumerate(task.tokens[-new:] if new > 0 else ()):
            if done >= len(predicted):
                stream.predicted = ()
                return
            right = token == predicted[done]
            acceptance.note(stream.run, right=right)
            if stream.drafter is None:
                self.by_model.learned.note(stream.run, right=right)
            stream.run = stream.run + 1 if right else 0
            if not right:
                stream.predicted = ()
                return
        stream.predicted = predicted[max(new, 0) :]

    def _with_drafts(
        self,
        part: ScheduledTokens,
        tokens: Sequence[int],
        count: int,
        slowdown: float,
        prompts: Sequence[int],
    ) -> ScheduledTokens:
        """Return *part* with *count* drafts: the proposed *tokens* first, then fill."""
        task = part.task
        if tokens:
            stream = self._streams[task.spec.id]
            stream.slowdown, stream.tried = slowdown, task.accepted
        fill = (task.tokens[-1],) * (count - len(tokens))
        return msgspec.structs.replace(
            part,
            drafts=(*tokens, *fill),
            proposed=len(tokens),
            beside_prompts=len(prompts) > 0,
        )

    def keep_states(self, batch: Sequence[ScheduledTokens]) -> None:
        """Keep the states to which slots go back if drafts of the next step are rejected.

        :raises BackendError: a state cannot be kept.
        """
        if not self._model.info.keeps_states:
            return
        slots = [part.task.slot for part in batch if part.drafts]
        if slots:
            cpu = self._tasks.clock.cpu
            started = cpu()
            self._model.keep_states(slots)
            self._keep_time.learn(cpu() - started, len(slots))

    def count_drafts(self, batch: Sequence[ScheduledTokens]) -> None:
        """Count the drafts of a step that was computed: they are in the slots of their tasks."""
        self._accepted_before = sum(part.task.accepted for part in batch)
        for part in batch:
            if part.drafts:
                part.task.drafts = list(part.drafts)
                part.task.drafted += part.proposed
            if part.proposed:
                name = part.task.drafter = self._streams[part.task.spec.id].name
                self._counts[f"drafted_{name}"] = (
                    self._counts.get(f"drafted_{name}", 0) + part.proposed
                )

    def count_gain(self, batch: Sequence[ScheduledTokens], seconds: float) -> None:
        """Count the tokens of a step of *batch* that took *seconds*, once they were sampled, and
        the time that they would have taken without drafts, if there were some.
        """
        if not any(part.drafts for part in batch):
            return
        accepted = sum(part.task.accepted for part in batch) - self._accepted_before
        tokens = self._streams_in_step + accepted
        plain_s = seconds / self._slowdown * tokens / self._streams_in_step
        self._counts["draft_step_tokens"] += tokens
        self._counts["draft_step_us"] += round(seconds * 1e6)
        self._counts["draft_plain_us"] += round(plain_s * 1e6)

    def retract(self, batch: Sequence[ScheduledTokens]) -> bool:
        """Make the next steps without drafts if that of *batch*, which found no KV cells, had some.
        Return whether it had.
        """
        if not any(part.drafts for part in batch):
            return False
        for part in batch:
            part.task.computed = self._model.trim(part.task.slot, part.task.computed)
        for stream in self._streams.values():
            stream.slowdown = 0.0
        self._pause_steps = FULL_PAUSE_STEPS
        return True

    def forget_ended(self) -> None:
        """Forget the streams of tasks that have ended or lost their slots."""
        self.by_model.follow_slots()
        if not self._streams:
            return
        running = {t.spec.id for t in self._slots.tasks}
        for number in [n for n in self._streams if n not in running]:
            drafter = self._streams.pop(number).drafter
            if drafter is not None:
                drafter.forget(number)

    def forget_session(self, user: int, session: str) -> None:
        """Drop the text of a session that is being deleted."""
        for drafter in self.drafters.values():
            drafter.forget_session(user, session)
        self.by_model.forget_session(session)

    def statistics(self) -> dict[str, str]:
        """Return why the draft model is no longer used, if it failed."""
        return {"draft_model_error": self.by_model.error} if self.by_model.error else {}
