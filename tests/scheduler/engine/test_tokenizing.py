"""Requests for texts: the new part of a chat, long texts, samplers, and too little memory."""

from __future__ import annotations

import select
import threading
from collections.abc import Sequence

import pytest

from inferd.backends import Chunk, CompiledGrammar, ModelSpec, Rendering, Sampler, SamplingParams
from inferd.backends.base import PLAIN_RENDERING, Message
from inferd.backends.echo.model import EchoModel
from inferd.backends.errors import BackendError, InvalidArgument, TooLarge
from inferd.backends.tensors import NamedTensor, Tensor
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.engine.task_table import EngineClock
from inferd.scheduler.engine.tokenizing import (
    LONG_BYTES,
    PIECES,
    RENDER_CHARGED_S,
    TokenizeQueue,
    appended_text,
)
from inferd.scheduler.owner import Owner, Requester
from inferd.scheduler.policy.slow_sampling import BURST_S, SHARE
from inferd.scheduler.record import Recorder
from tests.scheduler.doubles import Bench


@pytest.mark.parametrize(
    ("text", "history", "answer", "rest"),
    [
        ("<u>q<a>yes</a><u>", "<u>q<a>yes", "yes", "</a><u>"),
        ("<u>q<a>yes</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a> yes</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a>yes\n</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a></a><u>", "<u>q<a>\n", "\n", "</a><u>"),
        ("<u>q<a></a><u>", "<u>q<a>", "", "</a><u>"),
        ("<u>q<a>yes", "<u>q<a>yes", "yes", ""),
        ("<u>q<a>no</a><u>", "<u>q<a>yes", "yes", None),
        ("<u>Q<a>yes</a><u>", "<u>q<a>yes", "yes", None),
        ("<u>q<a>yes</a><u>", "", "", None),
        ("<u>q</a>few<a>more", "<u>q</a>few<a>", "few", "more"),
    ],
)
def test_the_part_that_a_text_adds_to_the_history(
    text: str, history: str, answer: str, rest: str | None
) -> None:
    assert appended_text(text, history, answer) == rest


class Starved(EchoModel):
    """A model that runs out of memory for texts that begin with `huge`."""

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        if text.startswith(b"huge"):
            raise MemoryError
        return super().tokenize(text, special=special, bos=bos)


def test_a_text_that_memory_cannot_hold_is_refused_and_ends_no_process() -> None:
    model = Starved(ModelSpec(name="echo", backend="echo", slots=1, ctx_size=64))
    queue = TokenizeQueue(model, Recorder(), EngineClock(lambda: 0.0), dict)
    queue.add_request(m.Tokenize(1, b"huge", special=False, bos=False))
    queue.add_request(m.ChatPrompt(2, [{"role": "user", "content": "huge, too"}], ""))
    queue.add_request(m.Tokenize(3, b"hi", special=False, bos=False))
    reports: dict[int, m.Report] = {}
    while len(reports) < 3:
        for report in queue.answer_requests():
            assert isinstance(report, m.CommandResult | m.Refused)
            reports[report.id] = report
    for report in (reports[1], reports[2]):
        assert isinstance(report, m.Refused)
        assert report.error["name"] == "MissingMemory" and "memory" in report.error["message"]
    assert reports[3] == m.CommandResult(3, m.pack_tokens(list(b"hi")))


class Gated(EchoModel):
    """A model that computes tensors once `release` is set."""

    def __init__(self) -> None:
        super().__init__(ModelSpec(name="echo", backend="echo", slots=1, ctx_size=64))
        self.release, self.begun = threading.Event(), threading.Event()

    def compute(self, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
        self.begun.set()
        self.release.wait()
        return super().compute(inputs)


def test_tensors_are_computed_in_a_thread_and_dropped_ones_never() -> None:
    model = Gated()
    engine = Engine(model)
    one, two = [[("a", Tensor(bytes([n]), (1,)))] for n in range(2)]
    commands: list[m.Command] = [m.ComputeTensors(1, one), m.ComputeTensors(2, two), m.Queue(3)]
    reports = engine.begin_iteration(commands)
    assert [report.id for report in reports if isinstance(report, m.CommandResult)] == [3]
    model.begun.wait()
    engine.begin_iteration([m.DropInput(2), m.ComputeTensors(4, two, wait_s=1e-9)])
    model.release.set()
    while len(reports) < 3:
        reports += engine.begin_iteration([])
    assert isinstance(reports[1], m.CommandResult) and reports[1].value.outputs == one
    assert isinstance(reports[2], m.Refused) and reports[2].id == 4
    assert reports[2].error["name"] == "Timeout"
    assert reports[2].error["data"] == {"timeout": "queue"}


def test_the_record_shows_that_the_thread_tokenizes_a_text() -> None:
    model, recorder = (
        EchoModel(ModelSpec(name="echo", backend="echo", ctx_size=1 << 16)),
        Recorder(),
    )
    queue = TokenizeQueue(model, recorder, EngineClock(lambda: 0.0), dict)
    queue.add_request(m.Tokenize(1, b"x" * (LONG_BYTES + 1), special=False, bos=False))
    reports = [*queue.answer_requests(), *queue.answer_requests()]
    assert queue.lanes[0].busy == recorder.read_activity().beside_text
    while not reports:
        reports += queue.answer_requests()
    assert not recorder.read_activity().beside_text


def test_the_record_shows_a_thread_until_no_thread_uses_the_model() -> None:
    recorder = Recorder()
    recorder.record_text_thread(busy=True)
    recorder.record_text_thread(busy=True)
    recorder.record_text_thread(busy=False)
    assert recorder.read_activity().beside_text
    recorder.record_text_thread(busy=False)
    assert not recorder.read_activity().beside_text


class Noting(EchoModel):
    """A model that notes the threads in which it computes tensors."""

    def __init__(self) -> None:
        super().__init__(ModelSpec(name="echo", backend="echo", slots=1, ctx_size=64))
        self.used: list[threading.Thread] = []

    def compute(self, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
        self.used.append(threading.current_thread())
        return super().compute(inputs)


def test_a_careful_engine_computes_tensors_in_its_own_thread() -> None:
    model, recorder, now = Noting(), Recorder(), 0.0
    queue = TokenizeQueue(model, recorder, EngineClock(lambda: 0.0), dict, lambda: now, alone_s=9.0)
    tensors = [("a", Tensor(b"1"))]
    queue.add_request(m.ComputeTensors(1, tensors))
    assert list(queue.answer_requests()) == [m.CommandResult(1, m.ComputedTensors(tensors, 0.0))]
    now = 9.0
    queue.add_request(m.ComputeTensors(2, tensors))
    while not list(queue.answer_requests()):
        pass
    assert model.used[0] is threading.current_thread()
    assert model.used[1] is not threading.current_thread()
    queue.close()


def test_the_wait_for_a_computation_of_tensors_counts_from_its_arrival() -> None:
    now = 0.0
    queue = TokenizeQueue(Noting(), Recorder(), EngineClock(lambda: 0.0), dict, lambda: now)
    queue.add_request(m.ComputeTensors(1, [("a", Tensor(b"1"))], wait_s=1.0))
    now = 1.5  # other requests came first
    while not (reports := list(queue.answer_requests())):
        pass
    [refused] = reports
    assert isinstance(refused, m.Refused) and refused.error["name"] == "Timeout"
    queue.close()


def test_a_careful_engine_does_not_use_the_thread() -> None:
    model = EchoModel(ModelSpec(name="echo", backend="echo", ctx_size=1 << 16))
    now = 0.0
    queue = TokenizeQueue(
        model, Recorder(), EngineClock(lambda: 0.0), dict, lambda: now, alone_s=9.0
    )
    text = m.Tokenize(1, b"x" * (LONG_BYTES + 1), special=False, bos=False)
    queue.add_request(text)
    assert len(list(queue.answer_requests())) == 1 and not queue.lanes[0].busy
    now = 9.0
    queue.add_request(text)
    assert list(queue.answer_requests()) == [] and queue.lanes[0].busy


class SlowTemplate(EchoModel):
    """A model that renders chats once `release` is set. It tokenizes in a second of its `clock`."""

    def __init__(self) -> None:
        super().__init__(ModelSpec(name="echo", backend="echo", slots=1, ctx_size=64))
        self.release = threading.Event()
        self.clock = 0.0

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        assert self.release.wait(60)
        return super().render(messages, rendering)

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        self.clock += 1.0
        return super().tokenize(text, special=special, bos=bos)


def chat(number: int, owner: int = 1) -> m.ChatPrompt:
    return m.ChatPrompt(
        number, [{"role": "user", "content": "hi"}], "", requester=Requester(Owner(owner))
    )


def test_a_long_rendering_delays_no_other_request() -> None:
    model = SlowTemplate()
    queue = TokenizeQueue(model, Recorder(), EngineClock(lambda: 0.0), dict, lambda: 0.0)
    queue.add_request(chat(1))
    queue.add_request(m.Tokenize(2, b"fast", special=False, bos=False))

    assert answers(queue) == [2]
    assert not queue and answers(queue) == []

    model.release.set()
    wait_for_rendering(queue)
    assert answers(queue) == [1]


def test_long_renderings_of_two_users_alternate() -> None:
    model = SlowTemplate()
    queue = TokenizeQueue(model, Recorder(), EngineClock(lambda: 0.0), dict)
    for request in chat(1), chat(2), chat(3, owner=2):
        queue.add_request(request)
    assert answers(queue) == []

    model.release.set()
    answered: list[int] = []
    while len(answered) < 3:
        wait_for_rendering(queue)
        answered += answers(queue)
    assert answered == [1, 3, 2]


def test_the_work_after_a_long_rendering_counts_in_the_share_of_its_owner() -> None:
    model, clock = SlowTemplate(), EngineClock(lambda: 0.0)
    queue = TokenizeQueue(model, Recorder(), clock, lambda: {1: 1}, lambda: model.clock)
    queue.add_request(chat(1, owner=2))
    assert answers(queue) == [] and queue._share.may_work(2, clock.now)

    model.release.set()
    wait_for_rendering(queue)
    assert answers(queue) == [1] and not queue._share.may_work(2, clock.now)


class Bomb(SlowTemplate):
    """A model whose template ends at a limit, after *seconds* of its `clock`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        assert self.release.wait(60)
        self.clock += self.seconds
        raise TooLarge("the chat template needs more than 0.5 s of CPU time")


@pytest.mark.parametrize("seconds", [RENDER_CHARGED_S, 10.0])
def test_a_template_that_ends_at_a_limit_counts_in_the_share_of_its_owner(seconds: float) -> None:
    model, clock = Bomb(seconds), EngineClock(lambda: 0.0)
    queue = TokenizeQueue(model, Recorder(), clock, lambda: {1: 1}, lambda: model.clock)
    queue.add_request(chat(1, owner=2))
    assert answers(queue) == []

    model.release.set()
    wait_for_rendering(queue)
    assert all(isinstance(report, m.Refused) for report in queue.answer_requests())
    model.release.clear()
    queue.add_request(chat(2, owner=2))
    paid_at = (RENDER_CHARGED_S - BURST_S) / SHARE
    clock.now = 0.99 * paid_at
    assert answers(queue) == [] and not queue.lanes[1].busy
    clock.now = 1.01 * paid_at
    assert answers(queue) == [] and queue.lanes[1].busy
    model.release.set()


def wait_for_rendering(queue: TokenizeQueue) -> None:
    assert select.select([queue.lanes[1].thread], [], [], 10)[0]


def answers(queue: TokenizeQueue) -> list[int]:
    reports = list(queue.answer_requests())
    assert all(isinstance(report, m.CommandResult) for report in reports)
    return [report.id for report in reports if isinstance(report, m.CommandResult)]


class Guarded(EchoModel):
    """A model that tokenizes long texts only once `gate` is open, and counts samplers."""

    def __init__(self, slots: int = 2) -> None:
        super().__init__(
            ModelSpec(name="echo", backend="echo", slots=slots, ctx_size=1 << 16, batch_size=64)
        )
        self.gate = threading.Event()
        self.samplers = 0

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        if len(text) > LONG_BYTES:
            assert self.gate.wait(60)
            if text.startswith(b"bad"):
                raise InvalidArgument("not a text")
        return super().tokenize(text, special=special, bos=bos)

    def compile_grammar(self, params: SamplingParams, owner: int) -> CompiledGrammar | None:
        if params.grammar == SLOW.grammar:
            assert self.gate.wait(60)
        return super().compile_grammar(params, owner)

    def sampler(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        grammar: CompiledGrammar | None = None,
    ) -> Sampler:
        self.samplers += 1
        return super().sampler(params, prompt, answer, grammar)


def bench_of(model: Guarded) -> Bench:
    bench = Bench()
    bench.model, bench.engine = model, Engine(model, seconds=lambda: bench.now)
    return bench


def wait_for_thread(bench: Bench) -> None:
    """Wait until the thread has a result, as the worker's link does."""
    assert select.select([lane.thread for lane in bench.engine.tokenizing.lanes], [], [], 10)[0]


def test_steps_go_on_while_a_long_text_is_tokenized() -> None:
    model = Guarded()
    bench, text = bench_of(model), b"x" * 40_000
    bench.iterate(m.Tokenize(7, text, special=False, bos=False, requester=Requester(Owner(2))))
    bench.run(bench.submit(1, "hello"), m.Tokenize(8, b"short", special=False, bos=False))
    assert bench.text(1) == b"hello"
    assert bench.engine.wait_s_max() is None, "the thread wakes the engine"
    model.gate.set()
    wait_for_thread(bench)
    assert bench.iterate() == [m.CommandResult(7, m.pack_tokens(list(text)))]
    bench.engine.tokenizing.close()


def test_long_texts_of_two_users_alternate_and_errors_reach_their_senders() -> None:
    model = Guarded()
    model.gate.set()
    bench = bench_of(model)
    bench.iterate(
        *(
            m.Tokenize(i, b"a" * 20_000, False, False, requester=Requester(Owner(1)))
            for i in range(4)
        ),
        m.Tokenize(10, b"bad" * 10_000, False, False, requester=Requester(Owner(2))),
        m.ChatPrompt(
            11, [{"role": "user", "content": "b" * 20_000}], "", requester=Requester(Owner(2))
        ),
    )
    answered: list[int] = []
    while len(answered) < 6:
        wait_for_thread(bench)
        for report in bench.iterate():
            assert isinstance(report, m.CommandResult | m.Refused)
            assert isinstance(report, m.Refused) == (report.id == 10)
            answered.append(report.id)
    assert answered.index(10) <= 2 and answered.index(11) <= 4
    bench.engine.tokenizing.close()


class Slow(Guarded):
    """A model for which the text of a token takes time on the clock of its *bench*."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench, self._piece = bench, self.piece
        self.piece = self._slow_piece

    def _slow_piece(self, token: int) -> bytes:
        self._bench.now += 1e-7
        return self._piece(token)


def test_another_users_text_overtakes_the_rest_of_a_long_detokenization() -> None:
    bench = Bench()
    bench.model = Slow(bench)
    bench.engine = Engine(bench.model, seconds=lambda: bench.now)
    tokens = m.pack_tokens([65] * (3 * PIECES + 1))
    reports = bench.iterate(
        m.Detokenize(1, tokens, Requester(Owner(1))),
        m.Tokenize(2, b"hi", special=False, bos=False, requester=Requester(Owner(2))),
    )
    assert [r.id for r in reports if isinstance(r, m.CommandResult)] == [2, 1]
    assert reports[1] == m.CommandResult(1, b"A" * (3 * PIECES + 1))


TEXT_S, STEP_S = 0.006, 0.012
"""The times of a text of 15 kB and of a step that decodes one task, on a slow machine."""


class Clocked(EchoModel):
    """A model whose steps and texts take time on the clock of its bench."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(ModelSpec(name="echo", backend="echo", slots=2, ctx_size=1 << 16))
        self.bench = bench

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        self.bench.now += TEXT_S
        return super().tokenize(text, special=special, bos=bos)

    def step(self, chunks: Sequence[Chunk]) -> None:
        self.bench.now += STEP_S
        super().step(chunks)


def test_a_stream_keeps_nine_tenths_of_its_pace_beside_texts_of_another_user() -> None:
    bench = Bench()
    bench.model = Clocked(bench)
    bench.engine = Engine(bench.model, seconds=lambda: bench.now)
    bench.iterate(bench.submit(1, "x" * 5000, owner=1))
    while not bench.tokens(1):
        bench.iterate()
    texts = [
        m.Tokenize(i, b"y" * 15_000, False, False, requester=Requester(Owner(2)))
        for i in range(10, 14)
    ]
    began, before = bench.now, len(bench.tokens(1))
    answered = bench.iterate(*texts)
    while bench.now < began + 20:  # each text is sent again once it is answered
        again = [r.id for r in answered if isinstance(r, m.CommandResult)]
        answered = bench.iterate(*(texts[number - 10] for number in again))
    pace = (len(bench.tokens(1)) - before) / (bench.now - began)
    assert pace >= 0.89 / STEP_S


GRAMMAR = SamplingParams(grammar="root ::= [a-z]+")
SLOW = SamplingParams(grammar="root ::= .*")


def hold_back_texts(bench: Bench, owner: int) -> None:
    """Let an owner's texts use up their share, beside a task of owner 1 that computes."""
    bench.iterate(bench.submit(1, "hello" * 20))
    bench.engine.tokenizing._share.charge_user(owner, 1.0, bench.now)


def test_a_sampler_with_a_grammar_is_made_once_and_in_the_share_of_its_owner() -> None:
    model = Guarded(slots=4)
    bench = bench_of(model)
    hold_back_texts(bench, owner=2)
    bench.iterate(bench.submit(2, "other", owner=2, sampling=GRAMMAR))
    for _ in range(5):
        bench.iterate()
    assert model.samplers == 1 and 2 not in bench.order
    bench.now += 10
    bench.run()
    assert bench.text(2) == b"other" and model.samplers == 2


def iterate_without_waiting(bench: Bench, *commands: m.Command) -> None:
    """Iterate as often as a short answer takes, whatever the threads do."""
    reports = [*bench.engine.begin_iteration(commands)]
    for _ in range(20):
        reports += [*bench.engine.compute_step(), *bench.engine.begin_iteration(())]
    for report in reports:
        bench.note(report)


def test_steps_go_on_while_a_grammar_is_compiled() -> None:
    model = Guarded(slots=4)
    bench = bench_of(model)
    slow = bench.submit(2, "other", owner=2, sampling=SLOW)
    iterate_without_waiting(bench, bench.submit(1, "hello"), slow)
    assert bench.text(1) == b"hello" and bench.end(1) is not None and 2 not in bench.order
    model.gate.set()
    bench.run()
    assert bench.text(2) == b"other"
    bench.engine.tokenizing.close()


def test_a_task_may_end_and_change_while_its_grammar_is_compiled() -> None:
    model = Guarded(slots=4)
    bench = bench_of(model)
    tasks = [bench.submit(n, "abcdefgh", owner=2, sampling=SLOW) for n in (2, 3)]
    changes = m.Adjust(2, SLOW, 5, (), ()), m.Adjust(2, SamplingParams(), 3, (), ())
    iterate_without_waiting(bench, *tasks, *changes, m.Cancel(3))
    assert bench.error(3) == "Cancelled" and bench.end(2) is None
    model.gate.set()
    bench.run()
    assert bench.text(2) == b"abc", "the last change counts"
    assert not bench.engine.tokenizing.compiling.busy
    bench.engine.tokenizing.close()


def test_a_task_that_waits_for_its_sampler_can_be_cancelled_and_refused() -> None:
    model = Guarded(slots=4)
    bench = bench_of(model)
    hold_back_texts(bench, owner=2)
    bad = SamplingParams(grammar="bad")
    bench.iterate(
        bench.submit(2, owner=2, sampling=GRAMMAR), bench.submit(3, owner=2, sampling=bad)
    )
    bench.iterate(m.Cancel(2))
    assert bench.error(2) == "Cancelled" and bench.end(3) is None
    bench.now += 10
    bench.run()
    assert bench.error(3) == "InvalidArgument" and model.samplers == 1


def test_parameters_that_change_twice_are_applied_in_order() -> None:
    model = Guarded(slots=4)
    bench = bench_of(model)
    bench.iterate(bench.submit(2, "abcdefgh", owner=2, pull=True))
    hold_back_texts(bench, owner=2)
    bench.iterate(m.Adjust(2, GRAMMAR, 5, (), ()), m.Adjust(2, SamplingParams(), 3, (), ()))
    bench.now += 10
    for _ in range(8):
        bench.run(m.PullToken(2))
    assert bench.text(2) == b"abc"


def test_a_bad_parameter_for_a_waiting_task_refuses_only_this_task() -> None:
    model = Guarded(slots=1)
    bench = bench_of(model)
    bench.iterate(bench.submit(1, "first"), bench.submit(2, "second", owner=2))
    bench.run(m.Adjust(2, SamplingParams(grammar="bad"), -1, (), ()))
    assert bench.error(2) == "InvalidArgument" and bench.text(1) == b"first"


class Unsampled(EchoModel):
    """A model that fails to sample where the prompt contains `bad`."""

    def sample(self, slot: int, sampler: Sampler, index: int, position: int | None = None) -> int:
        if b"bad" in bytes(t for t in self.slots[slot].tokens if t < 256):
            raise BackendError("nothing to sample")
        return super().sample(slot, sampler, index, position)


def test_a_failed_sample_fails_only_its_task() -> None:
    bench = Bench()
    bench.model = Unsampled(ModelSpec(name="echo", backend="echo", slots=2, ctx_size=256))
    bench.engine = Engine(bench.model, seconds=lambda: bench.now)
    bench.run(bench.submit(1, "bad"), bench.submit(2, "good"))
    assert bench.error(1) == "RuntimeError" and bench.text(2) == b"good"
    bench.run(bench.submit(3, "more"))
    assert bench.text(3) == b"more"


def test_a_dropped_text_is_not_tokenized() -> None:
    class Counting(EchoModel):
        texts = 0

        def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
            self.texts += 1
            return super().tokenize(text, special=special, bos=bos)

    model = Counting(ModelSpec(name="echo", backend="echo", ctx_size=1 << 16))
    queue = TokenizeQueue(model, Recorder(), EngineClock(lambda: 0.0), dict)
    for number in (1, 2, 3):
        queue.add_request(m.Tokenize(number, b"hi", special=False, bos=False))
    queue.drop_request(2)
    queue.drop_request(99)
    answers = list(queue.answer_requests())
    assert answers == [m.CommandResult(n, m.pack_tokens(list(b"hi"))) for n in (1, 3)]
    assert model.texts == 2 and len(queue) == 0


def test_a_text_that_waits_for_the_thread_can_be_dropped() -> None:
    model = EchoModel(ModelSpec(name="echo", backend="echo", ctx_size=1 << 16))
    queue = TokenizeQueue(model, Recorder(), EngineClock(lambda: 0.0), dict)
    for number in (1, 2, 3):
        text = b"x" * (LONG_BYTES + 1)
        queue.add_request(m.Tokenize(number, text, special=False, bos=False))
    assert not list(queue.answer_requests())  # the first text waits for a thread that has not begun
    queue.drop_request(3)
    lane = queue.lanes[0]
    lane.thread.start()
    answered = list[int]()
    while len(answered) < 2:
        assert select.select([lane.thread], [], [], 10)[0]
        for report in queue.answer_requests():
            assert isinstance(report, m.CommandResult)
            answered.append(report.id)
    queue.close()
    assert answered == [1, 2] and not lane.busy


@pytest.mark.parametrize("size", [10, LONG_BYTES])
def test_parts_of_a_prompt_are_tokenized_together(size: int) -> None:
    bench = Bench(ctx_size=8 * LONG_BYTES)
    reports = bench.iterate(m.TokenizeParts(7, ["a" * size, "b", "c" * size]))
    while not reports:
        reports = bench.iterate()
    (report,) = reports
    assert isinstance(report, m.CommandResult)
    parts = list(map(m.unpack_tokens, report.value))
    assert [len(part) for part in parts[1:]] == [size, 1, size]
    assert parts[2] == [98]
