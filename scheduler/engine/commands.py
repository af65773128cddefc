"""The commands that the daemon sends to a running engine, and the checks of submitted tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ...backends import CompiledGrammar, InferdError, LanguageModel, ModelInfo, SamplingParams
from ...backends.errors import (
    Busy,
    Cancelled,
    InvalidArgument,
    Outcome,
    PromptTooLong,
    UnsupportedOperation,
    error_from_wire,
    error_of,
)
from ...backends.media import ShortItems, check_tokens
from ...backends.model_spec import split_key
from ...wire.frames import CREDIT_MAX
from .. import messages as m
from ..embeddings import check_text
from ..owner import Requester
from ..reasoning import EndOutcome
from ..task import Task
from .answers import needs_preparation
from .metrics_publisher import MetricsPublisher
from .steps import Steps
from .task_table import TaskTable
from .tokenizing import Parts, TokenizeQueue

ADAPTER_RETRY_S = 5.0


class CommandHandler:
    """Handles one command at a time; answers are sent as reports. Owned by the engine."""

    def __init__(
        self, model: LanguageModel, tasks: TaskTable, steps: Steps, metrics: MetricsPublisher
    ):
        self._model, self._tasks, self._steps = model, tasks, steps
        self._kv, self._reporter = tasks.kv, tasks.reporter
        self._short_items = ShortItems()
        self.tokenizing = TokenizeQueue(
            model,
            metrics.recorder,
            tasks.clock,
            tasks.busy_classes,
            tasks.clock.read,
            alone_s=tasks.settings.careful_s,
            strict=tasks.settings.priority_strict,
            count_time=tasks.count_time,
        )

    def handle_command(self, command: m.Command) -> None:
        """Carry out *command*."""
        send = self._reporter.send
        match command:
            case m.Park():
                send(m.CommandResult(command.id, self._park_by_hand(command.task_id)))
            case m.EndReasoning():
                send(self._end_reasoning(command))
            case m.TaskMessage(task_id):
                task = self._tasks.find_task(task_id)
                if task is not None:
                    self._handle_task_command(task, command)
            case m.Submit(spec):
                self._submit_task(spec)
            case _ if isinstance(command, m.InputRequest):
                self.tokenizing.add_request(command)
            case m.MediaReady():
                self._fail_tasks(*self._tasks.items.add_item(command))
            case m.MediaFailed(digest, error, scope):
                waiting = self._tasks.items.fail_item(scope, digest)
                self._fail_tasks(waiting, error_from_wire(error))
            case m.DropInput(number):
                self.tokenizing.drop_request(number)
            case m.Lookup() | m.PersistState():
                send(self._kv.look_up(command))
            case m.ExportState():
                send(*self._kv.export_state(command))
            case m.KvFileAdded(owner, name):
                self._kv.add_file(owner, name)
            case m.SaveNamedState():
                send(*self._kv.save_named_state(command))
            case m.ShareKv():
                self._kv.share_kv(command)
            case m.DeleteSessionStates(user=user, session=session):
                self._steps.speculation.forget_session(user, session)
                send(*self._kv.delete_session_states(command))
            case m.KvFileEvicted(name):
                self._kv.forget_file(name)
            case m.AddAdapter() | m.RemoveAdapter():
                send(self._change_adapters(command))
            case m.Logging():
                self._reporter.configure_log(command)
            case m.SetThreads(threads):
                self._steps.use_threads(threads)
            case m.SetLowMemory():
                send(self._kv.set_low_memory(command))
            case m.ExchangeServed(request, elsewhere):
                send(m.CommandResult(request, self._tasks.exchange_users(elsewhere)))
            case m.Queue(request):
                send(m.CommandResult(request, self._tasks.view_queue().entries()))
            case _:
                raise AssertionError(f"a loaded engine has no command {command}")

    def _handle_task_command(self, task: Task, command: m.TaskMessage) -> None:
        match command:
            case m.Credit(events=events):
                if task.credit >= 0:
                    task.credit = min(task.credit + events, CREDIT_MAX)
                    self._note_reader(task)
            case m.PullToken():
                task.tokens_requested += 1
                self._note_reader(task)
            case m.SentenceCompared():
                self._steps.answers.apply_comparison(task, command)
            case m.Adjust():
                adjust = self._steps.answers.adjust_task
                sampling = command.sampling
                self._queue_sampler(task, sampling, lambda g: adjust(task, command, g))
            case m.Cancel():
                self._tasks.fail_task(task, Cancelled("the turn was cancelled"))

    def _fail_tasks(self, numbers: Iterable[int], error: InferdError | None) -> None:
        for number in numbers:
            task = self._tasks.find_task(number)
            if task is not None and error is not None:
                self._tasks.fail_task(task, error)

    def _note_reader(self, task: Task) -> None:
        clock = self._tasks.clock
        task.note_reader(clock.now, self._tasks.settings.reader_lag_s, clock.step_began)

    def _submit_task(self, spec: m.TaskSpec) -> None:
        self.tokenizing.tasks_expected = max(0, self.tokenizing.tasks_expected - 1)
        task = self._tasks.new_task(spec)
        try:
            check_task(task, self._model)
            self._short_items.add(spec.media)
            if spec.embed is None:
                self._steps.check_adapters(spec.adapters)
                self._steps.answers.begin_reasoning(task)
        except InferdError as exc:
            self._reporter.report_failed(spec, exc)
            return
        self._tasks.add_task(task)
        if spec.embed is None:
            self._kv.share_with_task(task)
            self._steps.answers.resume_task(task)
            if spec.prediction:
                requester = Requester(spec.owner, spec.priority)
                self.tokenizing.add_work(requester, self._prediction_parts(task))
            if needs_preparation(spec.sampling):
                task.preparing = True
                prepare = self._steps.answers.prepare_sampler
                self._queue_sampler(task, spec.sampling, lambda g: prepare(task, g))

    def _queue_sampler(
        self, task: Task, sampling: SamplingParams, make: Callable[[CompiledGrammar | None], None]
    ) -> None:
        """Queue the call of *make* with the compiled grammar of *sampling*, in the order of the
        owner's texts. The call is dropped if the task ends before.
        """
        requester = Requester(task.spec.owner, task.spec.priority)
        self.tokenizing.add_work(requester, self._sampler_parts(task, sampling, make))

    def _sampler_parts(
        self, task: Task, sampling: SamplingParams, make: Callable[[CompiledGrammar | None], None]
    ) -> Parts:
        grammar: CompiledGrammar | None = None
        # This waits for earlier grammars of the task, so that its parameters change in order.
        if sampling.has_grammar or task.grammars_queued:
            task.grammars_queued += 1
            try:
                grammar = yield self.tokenizing.compilation(sampling, task.spec.owner.user)
            except Exception as exc:  # from code that reads a user's grammar: only this turn ends
                self._fail_compilation(task, error_of(exc, "compiling the grammar"))
                return None
            finally:
                task.grammars_queued -= 1
        if self._tasks.find_task(task.spec.id) is task:
            if grammar is not None and grammar.dropped:
                self._reporter.send(m.ConstraintsDropped(task.spec.id, list(grammar.dropped)))
            make(grammar)
        return None

    def _prediction_parts(self, task: Task) -> Parts:
        """Tokenize the prediction of a task. It does not wait for that: its drafts begin later."""
        task.prediction = yield from self.tokenizing.tokens_of(task.spec.prediction)
        return None

    def _fail_compilation(self, task: Task, error: InferdError) -> None:
        if error.outcome is Outcome.FAILED:
            self._reporter.log_compilation_failed(task, error)
        if self._tasks.find_task(task.spec.id) is task:
            self._tasks.fail_task(task, error)

    def _park_by_hand(self, task_id: int) -> bool:
        task = self._tasks.find_task(task_id)
        return (
            task is not None and task.spec.embed is None and self._steps.assignment.yield_slot(task)
        )

    def _end_reasoning(self, command: m.EndReasoning) -> m.CommandResult | m.Refused:
        task, outcome = self._tasks.find_task(command.task_id), EndOutcome.NOT_REASONING
        try:
            if task is not None:
                outcome = self._steps.answers.end_reasoning(task)
        except InferdError as exc:
            return m.Refused(command.id, exc.to_wire())
        return m.CommandResult(command.id, outcome)

    def _change_adapters(
        self, command: m.AddAdapter | m.RemoveAdapter
    ) -> m.CommandResult | m.Refused:
        try:
            if isinstance(command, m.AddAdapter):
                info = self._model.add_adapter(command.spec)
                return m.CommandResult(command.id, msgspec.to_builtins(info))
            self._remove_adapter(command.adapter_id, force=command.force)
            return m.CommandResult(command.id, None)
        except InferdError as exc:
            return m.Refused(command.id, exc.to_wire())

    def _remove_adapter(self, adapter_id: str, *, force: bool) -> None:
        users = [t for t in self._tasks if _uses(t.spec.adapters, adapter_id)]
        if users and not force:
            raise Busy(
                f"{len(users)} turns use the adapter",
                hint="wait until they are done, or pass `force`, with which they fail",
                data={"tasks": len(users), "retry_after_s": ADAPTER_RETRY_S},
            )
        for task in users:
            self._tasks.fail_task(task, Cancelled("the adapter of the turn was removed"))
        if _uses(self._steps.adapters, adapter_id):
            self._steps.use_adapters(())
        self._model.remove_adapter(adapter_id)


def _uses(keys: Iterable[str], adapter_id: str) -> bool:
    return any(split_key(key)[0] == adapter_id for key in keys)


def check_task(task: Task, model: LanguageModel) -> None:
    """Check that a task can be computed. A text to embed is checked by `check_text`, too.

    :raises UnsupportedOperation: the model does not generate text, has no logprobs of prompts, or
        reads no images and sounds.
    :raises PromptTooLong: the prompt leaves no token of the context for an answer, or an encoder
        cannot read it at once.
    :raises InvalidArgument: the prompt is empty, or one of its tokens or a stop token is not in the
        vocabulary.
    """
    ctx_size, embed = task.ctx_size, task.spec.embed
    if embed is not None:
        check_text(task.prompt_size, embed.pooling, task.spec.ctx_size, model.info.embedding)
    elif not task.tokens:
        raise InvalidArgument("the prompt has no tokens", hint="send some text")
    elif not model.info.generates:
        raise UnsupportedOperation(
            "the model makes embeddings and does not generate text",
            hint="use embed, or set the parameter embedding",
        )
    elif task.prompt_size >= ctx_size:
        raise PromptTooLong(
            f"the prompt has {task.prompt_size} tokens; the context holds {ctx_size - 1} and"
            " one for the answer",
            data={"prompt_tokens": task.prompt_size, "ctx_size": ctx_size},
        )
    if embed is None and model.info.decoder_start_token is not None:
        _check_encoded_prompt(task, model.info)
    vocab_size, media = model.info.vocab_size, task.spec.media
    if media and not model.info.media_width:
        raise UnsupportedOperation(
            "the model reads no images or sounds",
            hint="load it with a projector (mmproj), or use a model that has one",
        )
    check_tokens(task.tokens, vocab_size, media)
    if media and (embed is not None or task.scores_prompt):
        raise UnsupportedOperation("images and sounds have neither embeddings nor logprobs")
    unknown = next((t for t in task.spec.stopping.stop_tokens if not 0 <= t < vocab_size), None)
    if unknown is not None:
        raise InvalidArgument(
            f"stop-tokens: token {unknown} is not in the vocabulary of {vocab_size}",
            hint="`tokenize` returns the tokens of a text",
        )


def _check_encoded_prompt(task: Task, info: ModelInfo) -> None:
    """Check the prompt of an encoder-decoder; see `check_task`."""
    size = task.items[0]
    if not size:
        raise InvalidArgument(
            "the prompt has nothing for the encoder to read, or does not end with token"
            f" {info.decoder_start_token}, with which the decoder begins",
            hint="send text, or the tokens that `tokenize` returns for it with `bos`",
        )
    if size > info.batch_size:
        raise PromptTooLong(
            f"the prompt has {size} tokens; the encoder reads at most {info.batch_size} at once",
            hint="raise batch-size, and ctx-size if needed, or shorten the prompt",
            data={"prompt_tokens": size, "ctx_size": info.batch_size},
        )
    if task.scores_prompt:
        raise UnsupportedOperation(
            "an encoder-decoder has no logprobs of its prompt, which it does not predict",
            hint="leave out prompt-logprobs",
        )
