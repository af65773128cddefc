"""The bound on a task's wait, whatever others request."""

from __future__ import annotations

from random import Random

import hypothesis
from hypothesis import strategies as st

from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority
from inferd.scheduler.task import Task, TaskState
from tests.repetitions import repetitions
from tests.scheduler.doubles import Bench

SETTINGS = EngineSettings(
    ageing_tokens=100, quantum_tokens=20, shared_prefix_tokens_min=1 << 20, priority_strict=True
)
BATCH_SIZE = 32
TARGET = 1_000_000
TURNS_MAX = 5000


class Crowd:
    """Owners who always have more urgent tasks than there are slots, beside a waiting task."""

    def __init__(self, slots: int, priority: Priority, owner: int, owners: int, rng: Random):
        self.bench = Bench(slots=slots, settings=SETTINGS, batch_size=BATCH_SIZE)
        self.engine = self.bench.engine
        self.owners, self.rng = owners, rng
        self.submitted = 0
        self.engine.tasks.owners.count_work(Owner(owner), rng.choice([0, 0, 50, 300]))
        for _ in range(3):
            self.iterate()
        spec = self.bench.submit(TARGET, "the one who waits", owner=owner, priority=priority)
        self.iterate(spec)
        self.since = self.engine.clock.tokens

    def iterate(self, *commands: m.Submit) -> None:
        """Do one iteration with enough new tasks that no slot is ever free."""
        missing = len(self.engine.slots) + 3 - len(list(self.engine.tasks))
        self.bench.iterate(*(self.one_more() for _ in range(missing)), *commands)

    def one_more(self) -> m.Submit:
        self.submitted += 1
        priority = self.rng.choice(
            [Priority.URGENT, Priority.URGENT, self.rng.choice(list(Priority))]
        )
        text = "abcdefgh"[self.submitted % 8] * self.rng.randint(1, 80)
        owner = self.rng.randint(1, self.owners)
        return self.bench.submit(self.submitted, text, owner=owner, priority=priority)

    @property
    def target(self) -> Task:
        target = self.engine.tasks.find_task(TARGET)
        assert target is not None
        return target

    def ahead(self) -> set[int]:
        """Return the tasks of the highest class that precede the waiting one."""
        order = self.engine.tasks.order()
        key = order.key(self.target)
        others = [t for t in self.engine.tasks if t is not self.target]
        return {t.spec.id for t in others if order.key(t) < key}

    def lead(self) -> int:
        """Return by how much its owner was served more than each other owner."""
        owners = self.engine.tasks.owners
        mine, _ = owners.served(self.target.spec.owner)
        others = (owners.served(Owner(o))[0] for o in range(1, self.owners + 1))
        return sum(max(0, mine - served) for served in others)


@hypothesis.settings(max_examples=repetitions(60))
@hypothesis.given(
    slots=st.integers(1, 3),
    priority=st.sampled_from(Priority),
    owner=st.integers(1, 3),
    owners=st.integers(1, 3),
    rng=st.randoms(use_true_random=False),
)
def test_a_task_runs_after_its_ageing_and_a_quantum_for_each_urgent_one_ahead(
    slots: int, priority: Priority, owner: int, owners: int, rng: Random
) -> None:
    """The bound includes the tokens by which its own owner was served more. A step is not divided:
    the rest of the step in which the wait should end comes on top.
    """
    crowd = Crowd(slots, priority, owner, owners, rng)
    ahead: set[int] = set()
    lead: int | None = None
    for _ in range(TURNS_MAX):
        if crowd.target.state is TaskState.RUNNING:
            break
        order = crowd.engine.tasks.order()
        if order.effective(crowd.target) == Priority.URGENT:
            lead = crowd.lead() if lead is None else lead
            ahead |= crowd.ahead()
        crowd.iterate()
    waited = crowd.engine.clock.tokens - crowd.since
    ageing = SETTINGS.ageing_tokens * (Priority.URGENT - priority) + BATCH_SIZE
    holders = len(ahead) + slots
    bound = ageing + (SETTINGS.quantum_tokens + BATCH_SIZE) * holders + (lead or 0)
    assert waited <= bound, f"{waited} tokens, {len(ahead)} were ahead, lead {lead}"
    assert crowd.target.state is TaskState.RUNNING
