"""Arrivals, credits, pulls, cancels and the clock in any order: what must hold all the same."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inferd.scheduler import Limits
from inferd.scheduler import messages as m
from tests.scheduler.doubles import Bench

TEXTS = st.text("abcdefgh", min_size=1, max_size=40)
PICK = st.integers(0, 1000)


class EngineMachine(RuleBasedStateMachine):
    """A task says what its prompt says: lost, doubled or foreign tokens show in its text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}
        self.pulls: set[int] = set()

    @initialize(slots=st.integers(1, 4), quantum=st.sampled_from([1, 8, 256]))
    def start(self, slots: int, quantum: int) -> None:
        limits = Limits(quantum_tokens=quantum, ageing_tokens=50, reader_timeout_s=1e9)
        self.bench = Bench(slots=slots, limits=limits, batch_size=32)

    @rule(
        text=TEXTS,
        priority=st.integers(0, 3),
        owner=st.integers(1, 3),
        pull=st.booleans(),
        credit=st.sampled_from([-1, 1, 3]),
    )
    def arrive(self, text: str, priority: int, owner: int, pull: bool, credit: int) -> None:
        number = len(self.texts) + 1
        self.texts[number] = text
        if pull:
            self.pulls.add(number)
        self.bench.turn(
            self.bench.submit(
                number,
                text,
                priority=priority,
                owner=owner,
                pull=pull,
                credit=-1 if pull else credit,
            )
        )

    def pick(self, number: int) -> int | None:
        alive = [n for n in self.texts if self.bench.end(n) is None]
        return alive[number % len(alive)] if alive else None

    @rule(number=PICK, events=st.integers(1, 5))
    def read(self, number: int, events: int) -> None:
        it = self.pick(number)
        if it is not None:
            self.bench.turn(m.Pull(it) if it in self.pulls else m.Credit(it, events))

    @rule(number=PICK)
    def cancel(self, number: int) -> None:
        it = self.pick(number)
        if it is not None:
            self.bench.turn(m.Cancel(it))
            assert self.bench.error(it) == "Cancelled"

    @rule(turns=st.integers(1, 10), seconds=st.sampled_from([0.0, 0.001, 0.25]))
    def go_on(self, turns: int, seconds: float) -> None:
        self.bench.now += seconds
        for _ in range(turns):
            self.bench.turn()

    @invariant()
    def nothing_is_lost_doubled_or_given_to_another(self) -> None:
        for number, text in self.texts.items():
            told = self.bench.text(number).decode()
            assert text.startswith(told), f"task {number} said {told!r} of {text!r}"
            if isinstance(self.bench.end(number), m.Finished):
                assert told == text

    def teardown(self) -> None:
        """Everything ends well once it is read."""
        if not self.texts:
            return
        for _ in range(3000):
            alive = [n for n in self.texts if self.bench.end(n) is None]
            if not alive:
                break
            self.bench.now += 0.25
            self.bench.turn(*(m.Pull(n) if n in self.pulls else m.Credit(n, 5) for n in alive))
        assert all(self.bench.end(n) is not None for n in self.texts), "a task starves"
        assert all(s.task is None for s in self.bench.engine.slots), "a slot leaked"


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestEngine = EngineMachine.TestCase
