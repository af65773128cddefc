"""Sessions and turns of the simulation, and the tasks that the scheduler's functions plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from inferd.backends.params import SamplingParams
from inferd.scheduler.messages import TaskSpec
from inferd.scheduler.owner import Owner, Priority
from inferd.scheduler.task import Task, TaskState

_SAMPLING = SamplingParams()


class TurnPlan(NamedTuple):
    """A turn of a session before it is simulated: the tokens of the user's text and of the answer,
    and the time from the end of the previous turn.
    """

    new_tokens: int
    answer_tokens: int
    think_s: float


@dataclass(slots=True, eq=False)
class Session:
    """A conversation of one user with one model. Its first *shared_tokens* are the same in all
    sessions of the user with the model.
    """

    number: int
    user: int
    model: str
    priority: int
    shared_tokens: int
    plans: Sequence[TurnPlan]
    history: int = 0
    """Tokens of the turns so far, the shared ones included."""
    node: str = ""
    """The node of its last turn."""


@dataclass(slots=True, eq=False)
class Turn:
    """A turn under way. Times are those of the simulation."""

    session: Session
    number: int
    arrived_at: float
    attempts: int = 0
    """How often it was sent to a node, which is more than once if nodes were lost."""
    node: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    noticed_at: float = -1.0
    """The time at which the engine read it, after the step during which it arrived. The daemon's
    `queue_ms` begins there.
    """
    started_at: float = -1.0
    ended_at: float = -1.0

    @property
    def plan(self) -> TurnPlan:
        """Its tokens."""
        return self.session.plans[self.number]


@dataclass(eq=False)
class SimulatedTask(Task):
    """A task whose tokens are only counted, because the plans read only their number."""

    turn: Turn = field(kw_only=True)
    answer_tokens: int = 0

    def set_size(self, tokens: int) -> None:
        """Set the number of tokens of prompt and output."""
        self.tokens = cast("list[int]", range(tokens))

    @property
    def steps_left(self) -> int:
        """The steps of decoding that it needs, once its prompt is computed."""
        return self.answer_tokens - self.generated


def task_of(turn: Turn, number: int, queue_number: int, clock: int, now: float) -> SimulatedTask:
    """Return the waiting task of a turn that a node receives *now*."""
    session, plan = turn.session, turn.plan
    turn.prompt_tokens = session.history + plan.new_tokens
    spec = TaskSpec(
        id=number,
        owner=Owner(session.user),
        tokens=b"",
        sampling=_SAMPLING,
        priority=Priority(session.priority),
    )
    return SimulatedTask(
        spec=spec,
        arrival=queue_number,
        queue_number=queue_number,
        arrived_at=now,
        tokens=cast("list[int]", range(turn.prompt_tokens)),
        prompt_size=turn.prompt_tokens,
        text=cast(Any, None),
        clock_waiting=clock,
        computed_at=now,
        passed_over_since=now,
        state=TaskState.WAITING,
        turn=turn,
        answer_tokens=plan.answer_tokens,
    )
