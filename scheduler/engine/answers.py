"""The sampling of tokens, with their text and the endings that they cause.

By its answer a task continues, ends, or shifts its context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ...backends import CompiledGrammar, LanguageModel, Sampler, SamplingParams
from ...backends.errors import BackendError, InferdError
from ...backends.media import text_tokens
from ...backends.params import NOT_KEPT_TOKENS, without_grammar
from .. import messages as m
from ..logprobs import prompt_logprobs, token_logprobs
from ..messages import unpack_floats, unpack_tokens
from ..policy.batch_plan import ScheduledTokens
from ..policy.cost import StepCost, StepLoad
from ..policy.slow_sampling import SlowSampling
from ..reasoning import EndOutcome, Reasoning
from ..record import ActivityKind
from ..stopping import (
    CONTEXT_FULL,
    END_MARK,
    GRAMMAR,
    LENGTH,
    TIME,
    TOKEN,
    Ending,
    Sentences,
    TurnConditions,
)
from ..task import Task, TaskState
from .metrics_publisher import MetricsPublisher
from .task_table import TaskTable


class AddedToken(NamedTuple):
    """A token of an answer, sampled, or *forced* by the grammar or a bound. *text* is the text that
    it releases, or None if it only ends the turn. The *surprisal* of a sampled token is known if
    the turn needs it.
    """

    token: int
    text: bytes | None
    ending: Ending | None = None
    surprisal: float | None = None
    forced: bool = False


def joins_events(task: Task) -> bool:
    """Return whether several sampled tokens can be reported to a stream in one event, which has one
    surprisal.
    """
    return not needs_surprisal(task)


def needs_preparation(sampling: SamplingParams) -> bool:
    """Return whether making the sampler reads texts, which takes time and may be refused."""
    return bool(sampling.logit_bias) or sampling.has_grammar or sampling.dry_multiplier > 0


def sampler_for(
    model: LanguageModel, task: Task, sampling: SamplingParams, grammar: CompiledGrammar | None
) -> Sampler:
    """Return a sampler that has seen the tokens of *task* so far, with its compiled *grammar*."""
    prompt, answer = task.prompt_and_answer
    if begun := task.continued:
        prompt, answer = prompt[: -len(begun)], [*begun, *answer]
    begin = 0 if task.reasoning is None else task.reasoning.grammar_begin
    if begin is None and sampling.has_grammar:
        task.resting_grammar = grammar or model.compile_grammar(sampling, task.spec.owner.user)
        sampling, grammar, begin = without_grammar(sampling), None, 0
    before, answer = answer[:begin], answer[begin:]
    return model.sampler(sampling, [*text_tokens(prompt), *before], answer, grammar)


def sample_token(model: LanguageModel, task: Task, now: float, *, last: bool) -> AddedToken:
    """Sample the next token of *task*, whose slot has logits, and add it to its tokens.

    *last* means that this token fills the context.
    """
    assert task.sampler is not None
    place = task.computed - 1 if task.drafts else None
    surprisal_of = model.surprisal(task.slot, place) if needs_surprisal(task) else None
    token = model.sample(task.slot, task.sampler, task.generated, place)
    task.forced_behind = 0
    surprisal = None if surprisal_of is None else surprisal_of(token)
    text, ending = _add_token(model, task, token, surprisal, now, last=last)
    return AddedToken(token, text, ending, surprisal)


def take_forced(model: LanguageModel, task: Task, now: float, *, last: bool) -> AddedToken | None:
    """Add the next token of *task* to its tokens, if its grammar forces it. Logits are not needed,
    and those that the slot has are out of date afterwards.

    No token is forced for a turn that needs the surprisal of its tokens, or that may shift its
    context, because a shift happens only when a single token is left to compute.
    """
    if task.sampler is None or task.spec.ctx_shift or needs_surprisal(task):
        return None
    token = task.sampler.take_forced()
    if token is None:
        return None
    task.forced += 1
    task.forced_behind += 1
    text, ending = _add_token(model, task, token, None, now, last=last)
    return AddedToken(token, text, ending, forced=True)


def take_end(model: LanguageModel, task: Task, now: float, *, last: bool) -> AddedToken | None:
    """Add the next token of a forced end of reasoning to the tokens of *task*, if there is one.
    Logits are not needed. The end is not forced if the grammar of *task* refuses it.
    """
    reasoning = task.reasoning
    if reasoning is None or not reasoning.ending or task.sampler is None:
        return None
    token = reasoning.ending[0]
    # The end itself may start a lazy grammar, which then refuses the rest of it.
    if not task.sampler.allows([*reasoning.ending] if reasoning.ending_is_new else [token]):
        reasoning.cancel_end()
        return None
    task.sampler.force(token)
    task.forced += 1
    task.forced_behind += 1
    text, ending = _add_token(model, task, token, None, now, last=last, ends_reasoning=True)
    return AddedToken(token, text, ending, forced=True)


def needs_surprisal(task: Task) -> bool:
    """Return whether *task* needs the surprisal of each of its tokens."""
    return task.conditions is not None and task.conditions.surprisal is not None


def _add_token(
    model: LanguageModel,
    task: Task,
    token: int,
    surprisal: float | None,
    now: float,
    *,
    last: bool,
    ends_reasoning: bool = False,
) -> tuple[bytes | None, Ending | None]:
    """Add *token* to *task*; return the text that it releases, and the ending that it causes. Of
    the tokens with which reasoning ends, none is an end mark of the answer.
    """
    spec, conditions = task.spec, task.conditions
    task.has_logits = False
    task.tokens.append(token)
    if model.is_eog(token) and not (spec.sampling.ignore_eos or ends_reasoning):
        return None, Ending(END_MARK, str(token), model.piece(token))
    if conditions is not None and token in conditions.tokens:
        return None, Ending(TOKEN, str(token))
    if task.reasoning is not None:
        _follow_reasoning(task, task.reasoning, model.piece(token))
    piece = _piece(model, task, token, len(task.tokens) - 1)
    text, ending = task.text.add_piece(piece)
    if ending is None and conditions is not None:
        ending = _met_condition(conditions, task, token, piece, surprisal, now)
    if ending is None and 0 <= spec.n_predict <= task.generated:
        ending = Ending(LENGTH, str(spec.n_predict))
    elif ending is None and last:
        ending = Ending(CONTEXT_FULL, str(task.ctx_size))
    return text, ending


def _follow_reasoning(task: Task, reasoning: Reasoning, piece: bytes) -> None:
    """Add a token to the *reasoning* of *task*, and start the grammar that rested until its end."""
    reasoning.add_token(piece)
    if task.resting_grammar is not None and reasoning.grammar_begin is not None:
        assert task.sampler is not None
        task.sampler.start_grammar(task.resting_grammar)
        task.resting_grammar = None


def _met_condition(
    conditions: TurnConditions,
    task: Task,
    token: int,
    piece: bytes,
    surprisal: float | None,
    now: float,
) -> Ending | None:
    """Return the ending by a condition that *token* meets. The order is that of llama-server's
    checks (`server-context.cpp`), as far as llama-server has them.
    """
    since = task.first_token_at
    late = since is not None and 0 < conditions.line_ms < (now - since) * 1000
    if late and b"\n" in piece:
        return Ending(TIME, f"t-max-predict-ms {conditions.line_ms}")
    met = conditions.check_token(token, surprisal)
    if met is not None:
        return met
    if conditions.grammar and task.sampler is not None and task.sampler.complete:
        return Ending(GRAMMAR, "complete")
    return None


def resume_text(model: LanguageModel, task: Task) -> Ending | None:
    """Restore the text of a turn resumed from another worker up to where its reader is.

    Return an ending that the turn met and that was not reported. If its last sentence is still to
    be compared, the ending counts only after that.
    """
    before = task.spec.resume_point
    if before is None or not before.output_tokens:
        return None
    answer = answer_of(task, before)
    begin = len(task.tokens) - len(answer)
    text = b"".join(_piece(model, task, token, at) for at, token in enumerate(answer, begin))
    ending = task.text.resume(text, before.text_bytes).ending
    if ending is None and task.conditions is not None:  # the last surprisals may not be known
        known = unpack_floats(before.surprisals)[: len(answer)]
        for token, surprisal in zip_longest(answer, known):
            ending = task.conditions.check_token(token, surprisal)
    if ending is not None:
        return ending
    if 0 <= task.spec.n_predict <= task.generated:
        return Ending(LENGTH, str(task.spec.n_predict))
    return None


NOT_BEGUN = m.ResumePoint()


def answer_of(task: Task, before: m.ResumePoint) -> list[int]:
    """Return the tokens of the answer that *task* has from another worker."""
    if before.answer:
        return unpack_tokens(before.answer)
    return task.tokens[len(task.tokens) - before.output_tokens :]


def _piece(model: LanguageModel, task: Task, token: int, place: int) -> bytes:
    """Return the text of *token*, which is at *place* in the tokens of *task*. The decoder of an
    encoder-decoder begins a text, so the space before its first word is not part of it.
    """
    piece, spec = model.piece(token), task.spec
    if task.items.get(0) == place and model.info.decoder_start_token is not None:
        piece = piece.removeprefix(b" ")
    if spec.special or not model.is_control(token):
        return piece
    text = piece.decode(errors="replace")
    shown = text and any(text in mark for mark in spec.shown_marks)
    return piece if shown else b""


FORCED_MAX = 64
"""A task has at most this many forced tokens that are not computed yet. This bounds the time that
they take between two steps, and the size of the event that reports them.
"""


class Answers:
    """The answers of the running tasks. Owned by the engine."""

    def __init__(
        self, model: LanguageModel, tasks: TaskTable, metrics: MetricsPublisher, cost: StepCost
    ):
        self.slow = SlowSampling()
        self._model, self._tasks, self._recorder = model, tasks, metrics.recorder
        self._cost = cost
        self._clock, self._reporter, self._slots = tasks.clock, tasks.reporter, tasks.slots
        self._counts = metrics.counts

    def sample_tokens(self, tasks: Sequence[Task]) -> None:
        """Add a token to the answer of each task whose reader takes one, and the tokens that a
        grammar forces behind it. All *tasks* have logits.
        """
        if not tasks:
            return
        now = self._clock.now
        for task in tasks:
            if task.prompt_done_at is None:
                task.prompt_done_at = now
            if task.spec.n_predict == 0:
                self._tasks.finish_task(task, Ending(LENGTH, "0"))
            elif task.wants_token:
                self._extend_answer(task)
            elif task.unread_since is None:
                task.reader_away_since = now
            if task.drafts and task.slot >= 0:
                self._slots.drop_drafts(task)
        self._recorder.record_activity(ActivityKind.OTHER)

    def report_prompts(self, batch: Sequence[ScheduledTokens]) -> None:
        """Report the logprobs of prompts that the step of *batch*, which was just computed, has
        made known. A stream takes each report for one credit.
        """
        for part in batch:
            task = part.task
            if task.spec.prompt_logprobs is None:
                continue
            found = prompt_logprobs(self._model, task, part.count)
            if not found:
                continue
            self._reporter.send(m.PromptLogprobs(task.spec.id, task.logprobs_done, found))
            task.logprobs_done += len(found)
            if task.credit > 0 and not task.spec.pull:
                task.credit -= 1
                if not task.wants_token:
                    task.reader_away_since = self._clock.now

    def add_forced_tokens(self, tasks: Iterable[Task]) -> None:
        """Add the tokens that grammars and bounds force to the answers of *tasks*, none of which
        has logits. Their readers did not take these tokens before, or the end of reasoning was just
        requested. A task on trial gets none, because it computes each token before the next.
        """
        constrained = [t for t in tasks if t.takes_chunks]
        if not constrained:
            return
        for task in constrained:
            able = task.spec.n_predict and not task.trial_tokens
            if able and task.wants_token and not task.prefilling:
                self._extend_answer(task)
        self._recorder.record_activity(ActivityKind.OTHER)

    def _extend_answer(self, task: Task) -> None:
        """Add tokens to the answer of *task* until the next one is not forced and there are no
        logits to sample it from. A stream gets them in one event, unless their surprisals are
        wanted; a pull reader requests each one.
        """
        self._recorder.record_activity(ActivityKind.SAMPLE, [task.spec.id])
        event: m.Tokens | None = None
        clock, takes = self._clock, task.pending <= FORCED_MAX
        joins = joins_events(task)
        while takes:
            started, started_cpu = clock.read(), clock.cpu()
            added = self._next_token(task)
            if added is not None:
                event = self._report_token(task, added, event if joins or added.forced else None)
                self._continue_task(task, added.ending)
            self._note_time(task, added, started, started_cpu)
            takes = added is not None and self._takes_another(task, joins=joins)

    def _takes_another(self, task: Task, *, joins: bool) -> bool:
        """Return whether *task*, which has just got a token, takes another one at once: after a
        draft that equals the token, or one that may be forced.
        """
        if self._tasks.find_task(task.spec.id) is not task:
            return False
        if task.drafts:
            reads = task.comparing_since is None and (joins or task.wants_token)
            if reads and task.drafts[0] == task.tokens[-1]:
                assert task.pending == 1, "the drafts follow the tokens before the last one"
                del task.drafts[0]
                task.computed += 1
                task.accepted += 1
                count = f"accepted_{task.drafter}"
                self._counts[count] = self._counts.get(count, 0) + 1
                task.has_logits = True
                return True
            self._slots.drop_drafts(task)
        return task.takes_chunks and self._takes_forced(task)

    def _takes_forced(self, task: Task) -> bool:
        """Return whether *task* takes another token if that is forced."""
        if task.pending > FORCED_MAX or task.trial_tokens:
            return False
        return task.wants_token if task.spec.pull else task.comparing_since is None

    def _note_time(
        self, task: Task, added: AddedToken | None, started: float, started_cpu: float
    ) -> None:
        """Charge slow sampling, and fail a task whose token took too long. The time is that in
        which a token was *added*, or in which it was found that none is forced. Only sampled tokens
        show what is usual for the model.
        """
        seconds, usual = self._clock.cpu() - started_cpu, added is not None and not added.forced
        slow_s = self.slow.note_token(task, seconds, usual=usual)
        if slow_s:  # other tasks also wait while another process has the core
            self._charge_slow_token(task, max(slow_s, self._clock.read() - started))
        error = self.slow.timeout(seconds)
        if error is not None and self._tasks.find_task(task.spec.id) is task:
            self._tasks.fail_task(task, error)

    def _charge_slow_token(self, task: Task, slow_s: float) -> None:
        """Charge a slow token to the owner, and to the quantum as the tokens that could have been
        computed meanwhile, so that a slow task does not keep its slot for longer than others.
        """
        self.slow.charge_task(task, slow_s, self._clock.now, self._slots.tasks)
        token_s = self._cost.predict(StepLoad(1, 1, 0))
        tokens = round(slow_s / token_s) if token_s else 0
        task.quantum += tokens
        self._tasks.owners.count_work(task.spec.owner, tokens)
        self._tasks.count_time(task.spec.owner, slow_s)

    def _next_token(self, task: Task) -> AddedToken | None:
        """Add a token that is forced, or else sampled from the logits, to the tokens of *task*.
        Return None if none is forced and there are no logits, or if the task has failed.
        """
        last = len(task.tokens) + 1 >= task.ctx_size and not self._may_shift(task)
        now = self._clock.now
        try:
            added = take_end(self._model, task, now, last=last)
            if added is None and task.has_grammar:
                added = take_forced(self._model, task, now, last=last)
            if added is None and task.has_logits:
                added = sample_token(self._model, task, now, last=last)
        except InferdError as exc:
            self._reporter.log_step_failed([task], exc)
            self._tasks.fail_task(task, exc)
            return None
        if added is not None:
            self._counts["generated"] += 1
            self._counts["forced"] += added.forced
            task.trial_tokens = max(0, task.trial_tokens - 1)
            if task.first_token_at is None:
                task.first_token_at = now
        return added

    def _report_token(
        self, task: Task, added: AddedToken, event: m.Tokens | None
    ) -> m.Tokens | None:
        """Report an *added* token, unless it only ends the turn; return the event that has it. A
        stream's further tokens go into *event*, which is sent later with the iteration's reports.
        """
        if added.text is None:
            task.end_logprobs = token_logprobs(self._model, task)
            return event
        if event is not None and not task.spec.pull:
            event.tokens.append(added.token)
            event.text += added.text
            event.forced += added.forced
            event.logprobs += self._logprobs_of(task, added)
            event.ending_left = 0 if task.reasoning is None else len(task.reasoning.ending)
            return event
        event = m.Tokens(task.spec.id, [added.token], added.text, forced=int(added.forced))
        event.drafted, event.accepted = task.drafted, task.accepted
        event.compute_s = task.compute_s
        if added.surprisal is not None:
            event.surprisal = added.surprisal
        event.logprobs = self._logprobs_of(task, added)
        event.ending_left = 0 if task.reasoning is None else len(task.reasoning.ending)
        self._reporter.send(event)
        if task.spec.pull:
            task.tokens_requested -= 1
        elif task.credit > 0:
            task.credit -= 1
        if not task.wants_token:
            task.reader_away_since = self._clock.now
        return event

    def _logprobs_of(self, task: Task, added: AddedToken) -> list[m.TokenLogprob]:
        """Return the logprobs of an *added* token, if they are wanted; a forced one is certain."""
        if not task.spec.sampling.n_probs:
            return []
        if not added.forced:
            return token_logprobs(self._model, task)
        value = 1.0 if task.spec.sampling.post_sampling_probs else 0.0
        return [m.TokenLogprob(added.token, self._model.piece(added.token), value)]

    def end_reasoning(self, task: Task) -> EndOutcome:
        """End the present thought of *task* before its next token is sampled.

        :raises InvalidArgument: the vocabulary cannot spell the end.
        """
        reasoning, sampler = task.reasoning, task.sampler
        if reasoning is None or not reasoning.request_end():
            return EndOutcome.NOT_REASONING
        if sampler is not None and not sampler.allows(reasoning.ending):
            reasoning.cancel_end()
            return EndOutcome.GRAMMAR
        return EndOutcome.ENDED

    def _continue_task(self, task: Task, ending: Ending | None) -> None:
        """Have a completed sentence compared (`stop-similarity`), or else end a task that has met
        an *ending*. While it waits for the comparison, the task computes nothing that would have to
        be undone, and gives up its slot like a task whose reader is away.
        """
        sentence = task.text.pending_sentence
        if sentence is not None:
            task.comparing_since, task.ending = self._clock.now, ending
            self._reporter.send(m.SentenceEnded(task.spec.id, sentence.end, sentence.text))
        elif ending is not None:
            self._tasks.finish_task(task, ending)
        elif task.state is TaskState.WAITING and len(task.tokens) >= task.ctx_size:
            self.shift_context(task)  # which the previous worker was about to do

    def apply_comparison(self, task: Task, compared: m.SentenceCompared) -> None:
        """Continue or end a task whose last sentence was compared."""
        sentence = task.text.pending_sentence
        if task.comparing_since is None or sentence is None or sentence.end != compared.end:
            return  # a repeated request for a comparison gets two answers
        ending, task.ending, task.comparing_since = task.ending, None, None
        if compared.detail:
            task.text.stop_at_sentence()
            self._continue_task(task, Ending(Sentences.reason, compared.detail))
        else:
            self._continue_task(task, task.text.continue_text().ending or ending)

    # Submitted and adjusted tasks.

    def begin_reasoning(self, task: Task) -> None:
        """Follow the reasoning of a submitted task, whose answer may have begun elsewhere.

        :raises InvalidArgument: the vocabulary cannot spell an end that the budget may force.
        """
        model, spec = self._model, task.spec.reasoning
        if spec is None:
            return
        before = task.spec.resume_point or NOT_BEGUN
        pieces = map(model.piece, [*task.continued, *answer_of(task, before)])
        task.reasoning = Reasoning(spec, model.spell)
        task.reasoning.begin(pieces, before.ending_left, end_requested=before.end_requested)

    def prepare_sampler(self, task: Task, grammar: CompiledGrammar | None) -> None:
        """Make the sampler of a waiting task, or fail the task if its parameters allow none."""
        if self._replace_sampler(task, task.spec.sampling, grammar):
            task.preparing = False

    def make_sampler(
        self, task: Task, sampling: SamplingParams, grammar: CompiledGrammar | None = None
    ) -> Sampler:
        """Return a sampler that has seen the tokens of *task*. llama.cpp may abort meanwhile."""
        self._recorder.record_activity(ActivityKind.SAMPLE, [task.spec.id])
        try:
            return sampler_for(self._model, task, sampling, grammar)
        finally:
            self._recorder.record_activity(ActivityKind.OTHER)

    def _replace_sampler(
        self, task: Task, sampling: SamplingParams, grammar: CompiledGrammar | None
    ) -> bool:
        """Make another sampler for *task*; fail the task if *sampling* allows none."""
        try:
            sampler = self.make_sampler(task, sampling, grammar)
        except InferdError as exc:
            self._tasks.fail_task(task, exc)
            return False
        if task.sampler is not None:
            task.sampler.close()
        task.sampler = sampler
        return True

    def resume_task(self, task: Task) -> None:
        """Restore the text of a task resumed from another worker; end it if it must end."""
        self._recorder.record_activity(ActivityKind.SAMPLE, [task.spec.id])
        self._continue_task(task, resume_text(self._model, task))
        self._recorder.record_activity(ActivityKind.OTHER)

    def adjust_task(self, task: Task, command: m.Adjust, grammar: CompiledGrammar | None) -> None:
        """Apply new parameters from the next token on. A sampler that may be refused is made now,
        because once the task has a slot, a refusal would end the engine.
        """
        sampling = command.sampling
        changed = sampling != task.spec.sampling and task.spec.embed is None
        needed = changed and (task.sampler is not None or needs_preparation(sampling))
        if not needed or self._replace_sampler(task, sampling, grammar):
            task.adjust(command)

    # Context shift.

    def _may_shift(self, task: Task) -> bool:
        can = self._model.info.can_shift and task.spec.ctx_shift and not task.items
        return can and task.shifts < self._tasks.settings.shifts_max

    def shift_context(self, task: Task) -> None:
        """Drop old tokens of a full context, as llama-server does; the first token always stays."""
        ctx_size = task.ctx_size
        keep = task.prompt_size if task.spec.n_keep < 0 else task.spec.n_keep
        keep = max(1, min(keep, ctx_size - NOT_KEPT_TOKENS))
        left = len(task.tokens) - 1 - keep
        discard = min(max(task.spec.n_discard or left // 2, 1), left - 1)
        if not self._may_shift(task) or left < 2:
            self._tasks.finish_task(task, Ending(CONTEXT_FULL, str(ctx_size)))
            return
        if task.slot >= 0:
            self._shift_slot(task, keep, discard)
        del task.tokens[keep : keep + discard]
        task.dropped += discard
        task.shifts += 1
        self._counts["shifts"] += 1
        self._reporter.send(m.Shifted(task.spec.id, keep, discard))

    def _shift_slot(self, task: Task, keep: int, discard: int) -> None:
        try:
            self._model.shift(task.slot, keep, discard)
            task.computed -= discard
            task.shifted = task.shift_pending = True
        except BackendError:  # cells are missing: the shortened text is computed again
            self._slots.clear_task(task)
