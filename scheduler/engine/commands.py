"""The commands that the daemon sends to a running engine."""

from __future__ import annotations

from ...backends import InferdError, Model
from ...backends.errors import Cancelled
from .. import messages as m
from ..kv.manager import KvManager
from ..output.sampling import resume_text, sampler_for
from ..policy.cost import StepCost
from ..recording.recorder import Doing, Recorder
from ..task import BASE_GROUP, Task
from .answers import Answers
from .leasing import SlotLeases
from .steps import Steps
from .task_table import TaskTable
from .tokenizing import TokenizeQueue
from .validation import check_task, ctx_size_of
from .worker_adapters import add_adapter, in_use, uses


class CommandHandler:
    """Handles one command at a time; answers are sent as reports. Owned by the engine."""

    def __init__(
        self,
        model: Model,
        tasks: TaskTable,
        leases: SlotLeases,
        answers: Answers,
        steps: Steps,
        cost: StepCost,
        kv: KvManager,
        tokenizing: TokenizeQueue,
        recorder: Recorder,
    ):
        self._model, self._tasks, self._leases, self._answers = model, tasks, leases, answers
        self._steps, self._cost, self._kv, self._tokenizing = steps, cost, kv, tokenizing
        self._recorder, self._reporter = recorder, tasks.reporter

    def handle(self, command: m.Command) -> None:
        """Do what a command asks for."""
        send = self._reporter.send
        match command:
            case m.Credit(task_id, events):
                self._add_credit(task_id, events)
            case m.Pull(task_id):
                self._pull_token(task_id)
            case m.Verdict():
                self._answers.apply_verdict(command)
            case m.Adjust():
                self._adjust_task(command)
            case m.Submit(spec):
                self._submit_task(spec)
            case m.Cancel(task_id):
                self._cancel_task(task_id)
            case m.Park():
                send(m.Answer(command.id, self._park_by_hand(command.task_id)))
            case m.Tokenize() | m.Detokenize() | m.ChatPrompt():
                self._tokenizing.add(command)
            case m.Lookup() | m.Keep():
                send(self._kv.look_up(command))
            case m.Forget():
                self._reporter.send_all(self._kv.forget(command))
            case m.Evicted(name):
                self._kv.evicted(name)
            case m.AddAdapter():
                send(add_adapter(self._model, command))
            case m.RemoveAdapter():
                send(self._remove_adapter(command))
            case m.Logging():
                self._reporter.log.use(command)
            case m.Threads(threads):
                self._model.set_threads(threads)
                self._cost.use(threads)
            case m.SetLowMemory():
                send(self._kv.set_low_memory(command))
            case m.Queue(request):
                send(m.Answer(request, self._tasks.view_queue().entries()))
            case _:
                raise AssertionError(f"no command of a loaded engine: {command}")

    def _submit_task(self, spec: m.TaskSpec) -> None:
        self._tokenizing.coming = max(0, self._tokenizing.coming - 1)
        tasks, clock = self._tasks, self._tasks.clock
        task = Task.from_spec(
            spec, tasks.next_place(), clock.tokens, clock.now, shared=tasks.limits.kv_shared
        )
        task.ctx_size = ctx_size_of(spec, self._model)
        try:
            self._check_task(task)
        except InferdError as exc:
            self._reporter.failed(spec, exc)
            return
        tasks.add_task(task)
        if spec.embed is None:
            self._answers.go_on(task, resume_text(self._model, task))

    def _check_task(self, task: Task) -> None:
        check_task(task, self._model)
        if task.spec.embed is not None:
            return
        sampling = task.spec.sampling
        if sampling.logit_bias or sampling.follows:
            self._recorder.note(Doing.STEP, [task.spec.id])  # whom to blame if it ends the process
            sampler_for(self._model, task, sampling).close()  # refuses what cannot be
            self._recorder.note(Doing.OTHER)
        if task.spec.adapters:
            self._model.set_adapters(task.spec.adapters)  # refuses what there is not
            self._model.set_adapters(self._steps.group.adapters)

    def _add_credit(self, task_id: int, events: int) -> None:
        task = self._tasks.find_task(task_id)
        if task is not None and task.credit >= 0:
            task.credit = min(task.credit + events, self._tasks.limits.credit_max)
            task.unread_since = None

    def _pull_token(self, task_id: int) -> None:
        task = self._tasks.find_task(task_id)
        if task is not None:
            task.asked += 1
            task.unread_since = None

    def _adjust_task(self, command: m.Adjust) -> None:
        task = self._tasks.find_task(command.task_id)
        if task is None:
            return
        if task.sampler is not None and command.sampling != task.spec.sampling:
            try:
                sampler = sampler_for(self._model, task, command.sampling)
            except InferdError as exc:
                self._tasks.fail_task(task, exc)
                return
            task.sampler.close()
            task.sampler = sampler
        task.adjust(command)

    def _cancel_task(self, task_id: int) -> None:
        task = self._tasks.find_task(task_id)
        if task is not None:
            self._tasks.fail_task(task, Cancelled("the turn was cancelled"))

    def _park_by_hand(self, task_id: int) -> bool:
        task = self._tasks.find_task(task_id)
        return task is not None and task.spec.embed is None and self._leases.yield_slot(task)

    def _remove_adapter(self, command: m.RemoveAdapter) -> m.Answer | m.Refused:
        adapter_id = command.adapter_id
        users = [t for t in self._tasks if uses(t.spec.adapters, adapter_id)]
        if users and not command.force:
            return in_use(command, users)
        for task in users:
            self._tasks.fail_task(task, Cancelled("the adapter of the turn was removed"))
        if uses(self._steps.group.adapters, adapter_id):
            self._steps.use_group(BASE_GROUP)
        self._model.remove_adapter(adapter_id)
        return m.Answer(command.id, None)
