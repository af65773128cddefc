"""The commands that the daemon sends to a running engine."""

from __future__ import annotations

from ...backends import Model
from ...backends.errors import Cancelled, InferdError
from .. import messages as m
from ..kv.manager import KvManager
from ..recording.recorder import Recorder
from ..task import Task
from .answers import Answers
from .slot_assignment import SlotAssignment
from .steps import Steps
from .task_table import TaskTable
from .tokenizing import TokenizeQueue
from .validation import check_task
from .worker_adapters import add_adapter, in_use, uses


class CommandHandler:
    """Handles one command at a time; answers are sent as reports. Owned by the engine."""

    def __init__(
        self,
        model: Model,
        tasks: TaskTable,
        assignment: SlotAssignment,
        answers: Answers,
        steps: Steps,
        kv: KvManager,
        recorder: Recorder,
    ):
        self._model, self._tasks, self._assignment, self._answers = (
            model,
            tasks,
            assignment,
            answers,
        )
        self._steps, self._kv, self._reporter = steps, kv, tasks.reporter
        self.tokenizing = TokenizeQueue(model, recorder)

    def handle_command(self, command: m.Command) -> None:
        """Do what *command* requests."""
        send = self._reporter.send
        match command:
            case m.Park():
                send(m.CommandResult(command.id, self._park_by_hand(command.task_id)))
            case m.TaskMessage(task_id):
                task = self._tasks.find_task(task_id)
                if task is not None:
                    self._handle_task_command(task, command)
            case m.Submit(spec):
                self._submit_task(spec)
            case m.Tokenize() | m.Detokenize() | m.ChatPrompt():
                self.tokenizing.add_request(command)
            case m.Lookup() | m.PersistState():
                send(self._kv.look_up(command))
            case m.ForgetSession():
                self._reporter.send_all(self._kv.forget_session(command))
            case m.KvFileEvicted(name):
                self._kv.forget_file(name)
            case m.AddAdapter():
                send(add_adapter(self._model, command))
            case m.RemoveAdapter():
                send(self._remove_adapter(command))
            case m.Logging():
                self._reporter.log.configure(command)
            case m.SetThreads(threads):
                self._steps.use_threads(threads)
            case m.SetLowMemory():
                send(self._kv.set_low_memory(command))
            case m.Queue(request):
                send(m.CommandResult(request, self._tasks.view_queue().entries()))
            case _:
                raise AssertionError(f"a loaded engine has no command {command}")

    def _handle_task_command(self, task: Task, command: m.TaskMessage) -> None:
        match command:
            case m.Credit(events=events):
                if task.credit >= 0:
                    task.credit = min(task.credit + events, self._tasks.settings.credit_max)
                    task.unread_since = None
            case m.PullToken():
                task.tokens_requested += 1
                task.unread_since = None
            case m.Verdict():
                self._answers.apply_verdict(task, command)
            case m.Adjust():
                self._answers.adjust_task(task, command)
            case m.Cancel():
                self._tasks.fail_task(task, Cancelled("the turn was cancelled"))

    def _submit_task(self, spec: m.TaskSpec) -> None:
        self.tokenizing.tasks_expected = max(0, self.tokenizing.tasks_expected - 1)
        task = self._tasks.new_task(spec)
        try:
            check_task(task, self._model)
            if spec.embed is None:
                self._answers.check_sampler(task)
                self._steps.check_adapters(spec.adapters)
        except InferdError as exc:
            self._reporter.report_failed(spec, exc)
            return
        self._tasks.add_task(task)
        if spec.embed is None:
            self._answers.resume_task(task)

    def _park_by_hand(self, task_id: int) -> bool:
        task = self._tasks.find_task(task_id)
        return task is not None and task.spec.embed is None and self._assignment.yield_slot(task)

    def _remove_adapter(self, command: m.RemoveAdapter) -> m.CommandResult | m.Refused:
        adapter_id = command.adapter_id
        users = [t for t in self._tasks if uses(t.spec.adapters, adapter_id)]
        if users and not command.force:
            return in_use(command, users)
        for task in users:
            self._tasks.fail_task(task, Cancelled("the adapter of the turn was removed"))
        if uses(self._steps.adapters, adapter_id):
            self._steps.use_adapters(())
        self._model.remove_adapter(adapter_id)
        return m.CommandResult(command.id, None)
