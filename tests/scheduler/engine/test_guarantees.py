"""One user's stream beside floods of others, on a machine whose steps take a known time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st

from inferd.backends import Chunk, EmbedSpec
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority
from inferd.scheduler.task import Task
from tests.repetitions import repetitions
from tests.scheduler.doubles import Bench

PASS_S, DECODED_S, PROMPT_S = 0.004, 0.0055, 0.0012
"""SmolLM2-135M on two cores: a pass, a token of a decoding task, a token of a prompt."""
SECONDS = 8.0
VICTIM, FLOOD = Owner(1), Owner(2)
NORMAL, HIGH, URGENT = Priority.NORMAL, Priority.HIGH, Priority.URGENT


class Program(NamedTuple):
    """A program that has *parallel* requests of a kind at a time."""

    kind: str
    parallel: int
    owner: Owner = FLOOD
    priority: Priority = NORMAL
    account: int = -1
    labels: int = 1
    away_s: float = 0.0
    """The time after which the reader of a token requests the next one."""


class Served(NamedTuple):
    """Tokens per second of a program's answers, and the longest pause between two of them."""

    pace: float
    gap_s: float
    computed: int
    """Tokens of its prompts, texts and answers that were computed."""
    parks: int


def seconds_of(chunks: Sequence[Chunk]) -> float:
    sizes = [len(chunk.tokens) for chunk in chunks]
    return PASS_S * len(set(sizes)) + sum(DECODED_S if n == 1 else PROMPT_S * n for n in sizes)


class Machine:
    """An engine whose clock advances by the time of each step."""

    def __init__(self, slots: int = 4, **settings: object):
        values = {"shared_prefix_tokens_min": 1 << 20, **settings}
        self.bench = Bench(
            slots=slots,
            settings=EngineSettings(**values),  # type: ignore[arg-type]
            ctx_size=4096,
            batch_size=512,
        )
        self.submitted = 0
        self.computed: Counter[int] = Counter()
        """Tokens computed for each task."""
        tasks, embedder = self.bench.engine.tasks, self.bench.model.embedder()
        self.time_steps(self.bench.model, lambda: tasks.slots.tasks)
        self.time_steps(embedder, lambda: tasks.embeddings.running)

    def time_steps(self, stepping: Any, tasks: Callable[[], Sequence[Task]]) -> None:
        """Let the steps of a model, or of its embedder, take their time on the clock."""
        step = stepping.step

        def timed_step(chunks: Sequence[Chunk]) -> None:
            numbers = {task.slot: task.spec.id for task in tasks()}
            self.computed.update({numbers[c.slot]: len(c.tokens) for c in chunks})
            step(chunks)
            self.bench.now += seconds_of(chunks)

        stepping.step = timed_step

    def time_copies(self, token_s: float) -> None:
        """Let each restored state take its time on the clock."""
        restore = self.bench.model.restore

        def timed_restore(slot: int, state: bytes) -> bool:
            self.bench.now += token_s * len(state)
            return restore(slot, state)

        self.bench.model.restore = timed_restore  # type: ignore[method-assign]

    def request(self, program: Program) -> m.Submit:
        self.submitted += 1
        number = self.submitted % 12 if program.kind == "again" else self.submitted
        text = f"{number:06}"[::-1] * 250
        requests: dict[str, tuple[int, dict[str, Any]]] = {
            "stream": (30, {"n_predict": 300}),
            "prompt": (1200, {"n_predict": 1}),
            "embed": (200, {"embed": EmbedSpec()}),
            "pull": (30, {"n_predict": 300, "pull": True}),
            "credit": (30, {"n_predict": 300, "credit": 1}),
            "again": (1500, {"n_predict": 1}),
            "answer": (300, {"n_predict": 600}),
        }
        size, fields = requests[program.kind]
        owner = program.owner
        if program.labels > 1:
            owner = Owner(owner.user, f"{self.submitted % program.labels}")
        return self.bench.submit(
            self.submitted,
            text[:size],
            owner=owner,
            priority=program.priority,
            account=program.account,
            **fields,
        )

    def run(self, *programs: Program, seconds: float = SECONDS) -> list[Served]:
        """Run the programs for a time on the clock; return what each was served."""
        bench, start = self.bench, self.bench.now
        of_task: dict[int, int] = {}
        parks = [0] * len(programs)
        tokens, computed, gaps = [0] * len(programs), [0] * len(programs), [0.0] * len(programs)
        self.computed.clear()
        last = [start] * len(programs)
        requested: list[tuple[float, m.PullToken | m.Credit]] = []

        def note(report: m.Report) -> None:
            program = of_task.get(getattr(report, "task_id", -1), -1)
            if program >= 0 and isinstance(report, m.Tokens):
                tokens[program] += 1
                gaps[program] = max(gaps[program], bench.now - last[program])
                last[program] = bench.now
                request: dict[str, m.PullToken | m.Credit] = {
                    "pull": m.PullToken(report.task_id),
                    "credit": m.Credit(report.task_id, 1),
                }
                if (command := request.get(programs[program].kind)) is not None:
                    requested.append((bench.now + programs[program].away_s, command))
            if program >= 0 and isinstance(report, m.StateChanged):
                parks[program] += report.state == "parked"

        bench.on_report = note
        while bench.now < start + seconds:
            alive = [of_task.get(t.spec.id, -1) for t in bench.engine.tasks]
            commands: list[m.Command] = [c for at, c in requested if at <= bench.now]
            requested = [(at, c) for at, c in requested if at > bench.now]
            for i, program in enumerate(programs):
                for _ in range(program.parallel - alive.count(i)):
                    commands.append(self.request(program))
                    of_task[self.submitted] = i
            before = bench.now
            bench.iterate(*commands)
            bench.now = max(bench.now, before + (5e-4 if requested else 1e-4))
        for task, count in self.computed.items():
            if task in of_task:
                computed[of_task[task]] += count
        paces = [count / seconds for count in tokens]
        return [Served(*values) for values in zip(paces, gaps, computed, parks, strict=True)]


STREAM = Program("stream", 1, VICTIM)
EMBED, PROMPTS, STREAMS = Program("embed", 32), Program("prompt", 8), Program("stream", 98)


@cache
def served_alone(program: Program) -> Served:
    """Return what a program is served without others."""
    [served] = Machine().run(program)
    return served


def alone_pace() -> float:
    """Return the pace of the stream without others: most of the time, less that of prompts."""
    pace = served_alone(STREAM).pace
    assert 0.8 <= pace * (PASS_S + DECODED_S) <= 1
    return pace


@pytest.mark.parametrize(
    ("floods", "share"),
    [
        ([EMBED], 0.45),
        ([PROMPTS], 0.45),
        ([Program("prompt", 4)], 0.45),
        ([STREAMS], 0.35),
        ([EMBED, PROMPTS, STREAMS], 0.45),
    ],
    ids=["embeddings", "prompts", "four-prompts", "streams", "together"],
)
def test_a_stream_keeps_half_of_its_pace_beside_a_flood_of_another_user(
    floods: list[Program], share: float
) -> None:
    victim, *_ = Machine().run(STREAM, *floods)
    assert victim.pace >= share * alone_pace() and victim.gap_s <= 0.35


@pytest.mark.parametrize("flood", [EMBED, PROMPTS])
def test_the_flood_has_the_other_half(flood: Program) -> None:
    alone, [_, beside] = served_alone(flood), Machine().run(STREAM, flood)
    assert 0.4 * alone.computed <= beside.computed <= 0.6 * alone.computed


def test_a_stream_keeps_its_part_beside_five_users() -> None:
    floods = [STREAMS, EMBED, PROMPTS, STREAMS, PROMPTS]
    victim, *_ = Machine().run(
        STREAM, *(f._replace(owner=Owner(2 + i)) for i, f in enumerate(floods)), seconds=20
    )
    assert victim.pace >= 0.9 / 6 * alone_pace()


def test_a_newcomer_is_computed_alone_at_once() -> None:
    machine = Machine()
    machine.run(STREAMS, PROMPTS, EMBED, seconds=5.0)
    machine.computed.clear()
    machine.bench.on_report = lambda _: None
    machine.bench.iterate(machine.request(STREAM))
    assert list(machine.computed) == [machine.submitted]


def test_a_label_keeps_its_part_beside_a_flood_of_another_label_of_its_user() -> None:
    victim, _ = Machine().run(
        STREAM._replace(owner=Owner(1, "editor")), EMBED._replace(owner=Owner(1, "index"))
    )
    assert victim.pace >= 0.45 * alone_pace() and victim.gap_s <= 0.35


def test_users_of_a_gateway_are_one_user_beside_others_and_divide_its_part() -> None:
    people = [Program("prompt", 4, Owner((1 << 40) + number), account=9) for number in range(3)]
    victim, *served = Machine().run(STREAM, *people, seconds=20)
    assert victim.pace >= 0.45 * alone_pace()
    computed = [person.computed for person in served]
    assert min(computed) >= 0.6 * max(computed) > 0


def test_high_streams_of_another_user_leave_a_quarter() -> None:
    victim, flood = Machine().run(STREAM, STREAMS._replace(priority=HIGH))
    assert victim.pace >= 0.9 / 4 * alone_pace() and victim.gap_s <= 0.35
    assert flood.pace >= victim.pace


def test_strict_priorities_serve_the_higher_class_of_another_user_first() -> None:
    machine = Machine(priority_strict=True)
    victim, _ = machine.run(STREAM, STREAMS._replace(priority=HIGH))
    assert victim.pace < 0.1 * alone_pace()


def test_an_urgent_answer_is_not_delayed_by_another_users_queue() -> None:
    machine = Machine()
    machine.run(STREAMS, PROMPTS, EMBED, seconds=3.0)
    machine.bench.on_report = lambda _: None
    began, urgent = machine.bench.now, Program("stream", 1, VICTIM, URGENT)
    machine.bench.iterate(machine.request(urgent))
    number = machine.submitted
    while not machine.bench.tokens(number):
        machine.bench.iterate()
    assert machine.bench.now - began <= 0.25


def test_streams_that_share_steps_well_stay_together() -> None:
    programs = [STREAM._replace(owner=Owner(1 + i)) for i in range(4)]
    together = Machine().run(*programs)
    [alone] = Machine().run(Program("stream", 4, VICTIM))
    assert sum(served.pace for served in together) >= 0.95 * alone.pace


@pytest.mark.parametrize("flood", [EMBED, PROMPTS, Program("stream", 20)])
@pytest.mark.parametrize("kind", ["pull", "credit"])
def test_a_reader_who_is_away_between_tokens_keeps_half_of_its_pace(
    kind: str, flood: Program
) -> None:
    reader = Program(kind, 1, VICTIM, away_s=0.02)
    victim, beside = Machine().run(reader, flood)
    assert victim.pace >= 0.45 * served_alone(reader).pace
    assert beside.computed >= 0.4 * served_alone(flood).computed


def test_the_time_of_copied_states_counts_for_the_user_whose_tasks_need_them() -> None:
    """Each request restores 1500 tokens, in the time of two steps, and computes one."""
    flood = Program("again", 8)
    machine = Machine()
    machine.run(flood, seconds=25)
    machine.time_copies(20e-6)
    victim, beside = machine.run(STREAM, flood)
    assert victim.pace >= 0.45 * alone_pace() and beside.computed > 0


def work_s(served: Served, seconds: float) -> float:
    """Return the time of the tokens that a program was served, without passes."""
    answers = served.pace * seconds
    return answers * DECODED_S + (served.computed - answers) * PROMPT_S


@pytest.mark.parametrize("labels", [1, 8])
def test_more_users_or_labels_than_slots_lose_no_throughput(labels: int) -> None:
    [alone] = Machine().run(Program("answer", 16), seconds=20)
    users = [Program("answer", 2, Owner(1 + i), labels=labels) for i in range(8)]
    if labels > 1:
        users = [Program("answer", 16, labels=labels)]
    served = Machine().run(*users, seconds=20)
    assert sum(work_s(it, 20) for it in served) >= 0.95 * work_s(alone, 20)
    assert sum(it.pace for it in served) >= 0.97 * alone.pace
    assert sum(it.parks for it in served) <= 3 * 20


def test_labels_do_not_displace_each_others_texts_before_every_step() -> None:
    [index] = Machine().run(Program("embed", 64, labels=4))
    assert index.parks <= 20


def test_slow_readers_of_a_user_do_not_take_the_only_slot_of_another() -> None:
    victim, _ = Machine().run(STREAM, Program("pull", 32, away_s=0.05))
    assert victim.parks <= 2 and victim.pace >= 0.45 * alone_pace()


def test_an_urgent_flood_parks_a_starved_user_seldom() -> None:
    machine = Machine()
    victim, flood = machine.run(STREAM, PROMPTS._replace(priority=URGENT), seconds=40)
    assert victim.pace >= 0.8 * 0.1 * alone_pace() and victim.parks + flood.parks <= 3 * 40


@hypothesis.settings(max_examples=repetitions(8), deadline=None)
@hypothesis.given(
    slots=st.integers(1, 4),
    kind=st.sampled_from(["stream", "prompt", "embed"]),
    floods=st.lists(
        st.tuples(
            st.sampled_from(["stream", "prompt", "embed"]),
            st.integers(1, 12),
            st.sampled_from([Priority.LOW, NORMAL, HIGH, URGENT]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_no_user_starves_whatever_others_request(
    slots: int, kind: str, floods: list[tuple[str, int, Priority]]
) -> None:
    """Even beside urgent tasks a user of the class `normal` has a tenth of each other's part."""
    programs = [
        Program(kind, count, Owner(2 + i), priority)
        for i, (kind, count, priority) in enumerate(floods)
    ]
    victim, *_ = Machine(slots=slots).run(Program(kind, 2, VICTIM), *programs, seconds=20)
    assert victim.pace > 0 or victim.computed > 0
