"""Invariants of the engine under any order of events, on every kind of memory.

Events are arrivals, turns, texts to embed, embeddings of images, credits, pulls, cancels, timeouts,
lost files, and changes of the settings and the clock.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from inferd.backends import EmbedSpec, SamplingParams
from inferd.backends.base import KvKind
from inferd.backends.echo.model import echo_vectors
from inferd.backends.echo.options import EchoOptions
from inferd.backends.embedder import Pool
from inferd.backends.media import MediaItem
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.owner import Priority
from inferd.sessions.turn.turn import Turn
from tests.repetitions import repetitions
from tests.scheduler.doubles import Bench, iterate_engine
from tests.scheduler.media_bench import image, memory
from tests.sessions.doubles import InProcessClient

HEADS = (
    "",
    "a beginning that many prompts share, ",
    "a beginning that many prompts share; and more ",
)
TAILS = st.text("abcdefghé€", min_size=1, max_size=40)
PICK = st.integers(0, 1000)
FORCED = ", é"
"""Characters that the model forces on tasks with a grammar; adapters do not change them."""
CTX_SIZE = 300
IMAGES = (None, None, image("one", 3), image("two", 20), image("three", 60))
CAUSAL_MIN = 32
"""An image with fewer tokens is computed at once."""
KV_RAM = (1, 400, 2000, 1 << 20)
TURNS_MAX = 3000


def raised(text: str) -> str:
    """Return the text under the adapter `upper`, which works on bytes."""
    return text.encode().upper().decode()


class Line(InProcessClient):
    """A connection to a worker that the state machine iterates."""

    def __init__(self) -> None:
        self.commands = []
        self.readers = {}
        self.aside = {}


class EngineMachine(RuleBasedStateMachine):
    """Tasks echo their prompts, and the model checks each cell that a step attends to. Lost,
    doubled or wrong tokens and states show in the text, or at once.
    """

    memory: KvKind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="inferd-machine-"))
        self.specs: dict[int, m.TaskSpec] = {}
        self.texts: dict[int, str] = {}
        self.ends: dict[int, m.Finished | m.Failed] = {}
        self.embedded: set[int] = set()
        """Tasks whose vectors were checked."""
        self.requests = 0
        self.files: KvFiles | None = None
        self.turns: dict[int, Turn] = {}
        """State that survives a worker; see `die`."""
        self.line = Line()
        self.wanted: list[tuple[int, MediaItem]] = []
        """The embeddings that were requested, with their scope."""

    @initialize(
        slots=st.integers(1, 4),
        quantum=st.sampled_from([1, 8, 256]),
        kv_ram=st.sampled_from(KV_RAM),
        kv_cells=st.sampled_from([-1, -1, 400, 200]),
        disk=st.booleans(),
        strict=st.booleans(),
    )
    def start(
        self, slots: int, quantum: int, kv_ram: int, kv_cells: int, disk: bool, strict: bool
    ) -> None:
        settings = EngineSettings(
            priority_strict=strict,
            quantum_tokens=quantum,
            ageing_tokens=50,
            reader_timeout_s=1e9,
            kv_ram_bytes=kv_ram,
            shared_prefix_tokens_min=16,
            checkpoint_tokens=32,
            media_bytes_max=30 * 16,
        )
        self.disk, self.settings = disk, settings
        self.options = EchoOptions(
            memory=self.memory, kv_cells=kv_cells, forced=FORCED, media=True, draft_errs=5
        )
        self.slots = slots
        self.bench = self.start_worker()

    def start_worker(self) -> Bench:
        self.files = KvFiles(self.directory, "echo-1") if self.disk else None
        bench = Bench(
            slots=self.slots,
            settings=self.settings,
            batch_size=32,
            ctx_size=CTX_SIZE,
            options=self.options,
            files=self.files,
        )
        drafter = bench.engine.speculation.by_model.drafter
        drafter.cost.learn_step = lambda *_: None  # type: ignore[method-assign]  # it takes no time
        lease = bench.engine.assignment.assign_slots

        def checked() -> None:
            lease()
            self.check_order()

        bench.engine.assignment.assign_slots = checked  # type: ignore[method-assign]
        bench.on_report = self.send_to_reader
        return bench

    def send_to_reader(self, report: m.Report) -> None:
        if isinstance(report, (m.Finished, m.Failed)):
            self.ends.setdefault(report.task_id, report)
        if isinstance(report, m.MediaWanted):
            spec = self.specs[report.task_id]
            found = {item.digest: item for item in spec.media}
            self.wanted += [(spec.owner.user, found[digest]) for digest in report.digests]
            return
        turn = self.turns.get(getattr(report, "task_id", -1))
        if turn is not None:
            turn.report(report)

    def submit(self, spec: m.TaskSpec, text: str) -> None:
        self.specs[spec.id], self.texts[spec.id] = spec, text
        self.turns[spec.id] = Turn(self.line, spec, lambda _: None)
        self.turns[spec.id].submit()
        self.send()

    def send(self) -> None:
        """Iterate with the commands that the turns have sent."""
        commands, self.line.commands = self.line.commands, []
        self.bench.iterate(*commands)

    @rule(
        head=st.sampled_from(HEADS),
        tail=TAILS,
        priority=st.sampled_from(Priority),
        owner=st.integers(1, 2),
        session=st.sampled_from(["", "one", "two"]),
        pull=st.booleans(),
        credit=st.sampled_from([-1, 1, 3]),
        upper=st.booleans(),
        timeout=st.sampled_from([0.0, 0.0, 0.5]),
        grammar=st.booleans(),
        item=st.sampled_from(IMAGES),
        speculation=st.sampled_from(["off", "ngram", "draft"]),
    )
    def arrive(
        self,
        head: str,
        tail: str,
        priority: Priority,
        owner: int,
        session: str,
        pull: bool,
        credit: int,
        upper: bool,
        timeout: float,
        grammar: bool,
        item: MediaItem | None,
        speculation: str,
    ) -> None:
        spec = self.bench.spec(
            len(self.specs) + 1,
            head + tail,
            speculation=speculation,
            sampling=SamplingParams(grammar="root ::= .*" if grammar else ""),
            priority=priority,
            owner=owner,
            session=session,
            persist=bool(session),
            pull=pull,
            credit=-1 if pull else credit,
            adapters=("upper",) if upper else (),
            total_timeout_s=timeout,
            watch=True,
        )
        if item is not None:
            tokens, at = m.unpack_tokens(spec.tokens), 1 + len(head)
            packed = m.pack_tokens([*tokens[:at], *item.entries(), *tokens[at:]])
            spec = msgspec.structs.replace(spec, tokens=packed, media=(item,))
        self.submit(spec, raised(head + tail) if upper else head + tail)

    @rule(
        text=TAILS,
        times=st.sampled_from([1, 1, 5]),
        priority=st.sampled_from(Priority),
        owner=st.integers(1, 2),
        timeout=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def arrive_to_embed(
        self, text: str, times: int, priority: Priority, owner: int, timeout: float
    ) -> None:
        spec = self.bench.spec(
            len(self.specs) + 1,
            text * times,
            priority=priority,
            owner=owner,
            total_timeout_s=timeout,
            embed=EmbedSpec(),
        )
        if len(spec.tokens) // 4 <= CTX_SIZE:
            self.submit(spec, "")

    @rule(number=PICK, text=TAILS)
    def next_turn(self, number: int, text: str) -> None:
        """Continue a conversation: its tokens, then a new prompt."""
        ended = [n for n in self.specs if isinstance(self.ends.get(n), m.Finished)]
        if not ended:
            return
        last = ended[number % len(ended)]
        spec = self.specs[last]
        tokens = m.unpack_tokens(spec.tokens) + self.bench.tokens(last)
        tokens += self.bench.model.tokenize(text.encode(), special=False, bos=True)
        if len(tokens) + len(text) + 1 < CTX_SIZE:
            packed = m.pack_tokens(tokens)
            spec = msgspec.structs.replace(spec, id=len(self.specs) + 1, tokens=packed)
            answer = raised(text) if spec.adapters else text
            self.submit(spec, answer if spec.embed is None else "")

    def alive(self) -> list[int]:
        """Return the tasks without an end."""
        return [n for n in self.texts if n not in self.ends]

    def pick(self, number: int) -> int | None:
        alive = self.alive()
        return alive[number % len(alive)] if alive else None

    @rule(number=PICK, events=st.integers(1, 5))
    def read(self, number: int, events: int) -> None:
        it = self.pick(number)
        if it is not None:
            turn = self.turns[it]
            turn.request_token() if turn.spec.pull else turn.add_credit(events)
            self.send()

    @rule(number=PICK, again=st.booleans())
    def encode(self, number: int, again: bool) -> None:
        """Answer a request for embeddings, or a second time."""
        if self.wanted:
            number %= len(self.wanted)
            scope, item = self.wanted[number] if again else self.wanted.pop(number)
            self.bench.iterate(self.encoded(scope, item))

    def encoded(self, scope: int, item: MediaItem) -> m.MediaReady:
        return m.MediaReady(item.digest, item.size >= CAUSAL_MIN, scope, memory(item.size * 16))

    @rule()
    def die(self) -> None:
        """Lose the worker with all its memory; its tasks continue in another one."""
        if self.files is not None:
            self.files.close()
        self.wanted.clear()
        before, self.bench = self.bench, self.start_worker()
        self.bench.now, self.bench.reports = before.now, before.reports
        for number in self.alive():
            spec = self.turns[number].continue_on(self.line)
            assert spec is not None
            self.bench.iterate(m.Submit(spec))

    @rule(number=PICK)
    def cancel(self, number: int) -> None:
        it = self.pick(number)
        if it is not None:
            steps = self.bench.engine.metrics.steps
            reports = iterate_engine(self.bench.engine, [m.Cancel(it)])
            for report in reports:
                self.bench.note(report)
            assert self.bench.error(it) == "Cancelled"
            assert self.bench.engine.metrics.steps <= steps + 1

    @rule(number=PICK)
    def park(self, number: int) -> None:
        it = self.pick(number)
        if it is not None:
            self.requests += 1
            self.bench.iterate(m.Park(self.requests, it))

    @rule(turns=st.integers(1, 10), seconds=st.sampled_from([0.0, 0.001, 0.25]))
    def go_on(self, turns: int, seconds: float) -> None:
        self.bench.now += seconds
        for _ in range(turns):
            self.bench.iterate()

    @rule(number=PICK, owner=st.integers(1, 2), session=st.sampled_from(["one", "two"]))
    def ask_for_states(self, number: int, owner: int, session: str) -> None:
        if self.specs:
            spec = self.specs[1 + number % len(self.specs)]
            self.requests += 2
            question = (owner, session, spec.adapters, spec.tokens)
            reports = self.bench.iterate(
                m.Lookup(self.requests, *question), m.PersistState(self.requests + 1, *question)
            )
            kept = {r.id: r.value for r in reports if isinstance(r, m.CommandResult)}
            assert 0 <= kept[self.requests] <= len(spec.tokens) // 4

    @rule(owner=st.integers(1, 2), session=st.sampled_from(["one", "two"]))
    def delete(self, owner: int, session: str) -> None:
        self.requests += 1
        self.bench.iterate(m.DeleteSessionStates(self.requests, owner, session))

    @rule()
    def lose_the_files(self) -> None:
        shutil.rmtree(self.directory / "echo-1", ignore_errors=True)

    @rule(kv_ram=st.sampled_from(KV_RAM))
    def change_the_bytes(self, kv_ram: int) -> None:
        store = self.bench.engine.store
        store.bytes_max = kv_ram
        store.evict_states()

    @rule(on=st.booleans())
    def set_low_memory(self, on: bool) -> None:
        self.requests += 1
        self.bench.iterate(m.SetLowMemory(self.requests, on))
        if on and not self.disk:
            assert all(entry.pins for entry in self.bench.engine.store)

    @rule(seconds=st.sampled_from([0.001, 0.15]), quantum=st.sampled_from([4, 64]))
    def change_the_budget(self, seconds: float, quantum: int) -> None:
        settings = self.bench.engine.tasks.settings
        self.bench.engine.tasks.settings = replace(
            settings, step_s_target=seconds, quantum_tokens=quantum
        )

    @invariant()
    def nothing_is_lost_doubled_or_given_to_another(self) -> None:
        for number, text in self.texts.items():
            answer = self.bench.text(number).decode()
            assert text.startswith(answer), f"task {number} answered {answer!r} of {text!r}"
            end = self.ends.get(number)
            if isinstance(end, m.Finished):
                assert answer == text
                self.check_embedding(number)
                ends = 1 if end.stats.stop_reason == "eos" else 0
                assert end.stats.output_tokens == len(self.bench.tokens(number)) + ends
                self.check_forced(number, end.stats)

    @invariant()
    def embeddings_are_kept_for_tasks_only(self) -> None:
        if not self.texts:
            return
        tasks = self.bench.engine.tasks
        items = {(t.scope, item.digest) for t in tasks for item in t.media.values()}
        assert len(tasks.items) <= len(items)
        assert tasks.items.size_bytes <= 16 * max(30, *(item.size for item in IMAGES if item))

    @invariant()
    def the_draft_model_has_only_tokens_that_the_slots_may_use(self) -> None:
        if not self.texts:
            return
        slots, draft = self.bench.engine.slots.slots, self.bench.model.draft
        held = self.bench.engine.speculation.by_model.drafter._held
        assert draft is not None
        for index, slot in enumerate(slots):
            origin = slot.origin if slot.task is None else slot.task.origin
            assert draft.length(index) == (len(held[index].tokens) if index in held else 0)
            assert index not in held or held[index].origin.serves(origin)

    def check_forced(self, number: int, stats: m.TurnStats) -> None:
        """Count the forced tokens, those of earlier workers and the end included."""
        forced = 0
        if self.specs[number].sampling.has_grammar:
            forced = sum(byte in FORCED.encode() for byte in self.bench.text(number))
            forced += stats.stop_reason == "eos"
        assert stats.forced_tokens == forced

    def check_embedding(self, number: int) -> None:
        spec, turn = self.specs[number], self.turns[number]
        assert (turn.embedding is None) == (spec.embed is None)
        if turn.embedding is not None and number not in self.embedded:
            self.embedded.add(number)
            pool = Pool("mean")
            pool.add_vectors(echo_vectors(m.unpack_tokens(spec.tokens)))
            assert turn.embedding.vectors == pool.result(2)

    def check_order(self) -> None:
        """No slot stays free beside a task that could use it, and no task waits for one of a lower
        class that could be parked.
        """
        engine = self.bench.engine
        order = engine.tasks.order()
        able = [t for t in engine.assignment.eligible_tasks() if t.has_work or t.wants_token]
        waiting = [t for t in able if not t.follows]
        if not waiting or engine.store.bytes_max < KV_RAM[-1]:
            return  # without room for their states tasks are not parked
        assert not engine.slots.idle
        settled = [t for t in engine.slots.tasks if not t.shift_pending]
        assert not any(order.preempts(task, t) for task in waiting for t in settled)

    def teardown(self) -> None:
        """All tasks end without error once they are read."""
        try:
            if self.texts:
                self.finish()
        finally:
            if self.files is not None:
                self.files.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def finish(self) -> None:
        for _ in range(TURNS_MAX):
            alive = self.alive()
            if not alive:
                break
            self.bench.now += 0.25
            pulls = [m.PullToken(n) if self.specs[n].pull else m.Credit(n, 5) for n in alive]
            wanted, self.wanted = self.wanted, []
            self.bench.iterate(*(self.encoded(*one) for one in wanted), *pulls)
            if self.files is not None and any(t.fetching for t in self.bench.engine.tasks.queue):
                assert self.files.flush(10)
        assert not self.alive(), "a task starves"
        assert all(s.task is None for s in self.bench.engine.slots.slots), "a slot leaked"
        errors = {end.error["name"] for end in self.ends.values() if isinstance(end, m.Failed)}
        assert errors <= {"Cancelled", "Timeout", "KvFull"}, errors


def test_an_urgent_task_parks_none_that_would_preempt_one_which_starts_with_it() -> None:
    """The urgent task of user 2 took the slot of its normal one, and its low one that of a task of
    user 1, who had three slots. The machine has found this.
    """
    machine = EngineMachine()
    machine.start(slots=4, quantum=1, kv_ram=KV_RAM[-1], kv_cells=-1, disk=False, strict=False)
    arrivals = [
        (1, Priority.NORMAL, "aaa"),
        (1, Priority.LOW, "a"),
        (1, Priority.URGENT, HEADS[1] + "a"),
        (2, Priority.LOW, "a"),
        (1, Priority.LOW, "a"),
        (2, Priority.NORMAL, "a"),
        (2, Priority.URGENT, "a"),
    ]
    try:
        for number, (owner, priority, text) in enumerate(arrivals, 1):
            # Only one task has an adapter, so the others compute nothing beside its first steps.
            adapters, answer = (("upper",), raised(text)) if len(text) > 9 else ((), text)
            spec = machine.bench.spec(
                number, text, owner=owner, priority=priority, adapters=adapters, watch=True
            )
            machine.submit(spec, answer)
    finally:
        machine.teardown()


class WindowMachine(EngineMachine):
    memory = "window"


class RecurrentMachine(EngineMachine):
    memory = "recurrent"


class HybridMachine(EngineMachine):
    memory = "hybrid"


MACHINES = EngineMachine, WindowMachine, RecurrentMachine, HybridMachine


@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_events(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(max_examples=repetitions(30), stateful_step_count=30),
    )
