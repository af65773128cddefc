"""Answers with drafts are those without, whatever ends, parks, cuts or cancels them.

The drafters are the n-gram drafter and one that knows the answers and errs at a given rate. Steps
take no time on the clock, so drafts cost nothing, and as many as possible are computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import pytest

from inferd.backends import Chunk, SamplingParams
from inferd.backends.base import KvKind
from inferd.backends.echo.options import EOG, EchoOptions
from inferd.backends.errors import BackendError
from inferd.backends.params import StoppingParams
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.drafting.ngram import NgramDrafter
from inferd.scheduler.engine.speculation import FULL_PAUSE_STEPS
from inferd.scheduler.owner import Owner, Priority
from inferd.scheduler.policy.batch_plan import ALONE_S
from inferd.scheduler.task import Task
from tests.scheduler.doubles import Bench

TEXT = "the quick brown fox; the quick brown fox; the quick red fox. The end of it all"
FORCED = EchoOptions(forced="=-")
GRAMMAR = SamplingParams(grammar="root ::= .*")
RATES = (0.0, 0.8, 1.0)


class Knowing:
    """A drafter that is given the answers, and errs in one of some tokens."""

    def __init__(self, rate: float):
        self._rate, self._random = rate, random.Random(3)
        self.forgotten: list[int] = []

    def propose(self, task: Task, limit: int) -> Sequence[int]:
        answer = [*task.tokens[1 : task.prompt_size - 1], EOG]
        right = answer[task.generated :][:limit]
        return [t if self._random.random() < self._rate else (t + 1) % 100 for t in right]

    def forget(self, task_id: int) -> None:
        self.forgotten.append(task_id)

    def forget_session(self, user: int, session: str) -> None:
        pass


_benches: list[Bench] = []


@pytest.fixture(autouse=True)
def closed_benches() -> Iterator[None]:
    yield
    while _benches:
        _benches.pop().model.close()


def bench_of(rate: float | None = None, **fields: object) -> Bench:
    bench = Bench(**fields)  # type: ignore[arg-type]
    _benches.append(bench)
    if rate is not None:
        bench.engine.speculation.drafters["knowing"] = Knowing(rate)
    return bench


DRAFTERS = [("ngram", None), *(("knowing", rate) for rate in RATES)]


def chunks_of(bench: Bench) -> list[list[int]]:
    """Return the sizes of each step's chunks from now on."""
    sizes: list[list[int]] = []
    step = bench.model.step

    def recorded(chunks: Sequence[Chunk]) -> None:
        sizes.append([len(chunk.tokens) for chunk in chunks])
        step(chunks)

    bench.model.step = recorded  # type: ignore[method-assign]
    return sizes


def outcome(bench: Bench, number: int = 1) -> object:
    """Return everything that a client sees of an answer."""
    logprobs = [
        p for r in bench.reports[number] if isinstance(r, m.Tokens) for p in (r.logprobs or [])
    ]
    surprisals = [r.surprisal for r in bench.reports[number] if isinstance(r, m.Tokens)]
    if surprisals.count(None) == len(surprisals):
        surprisals = []
    stats = bench.stats(number)
    facts = stats.stop_reason, stats.stop_detail, stats.output_tokens, stats.forced_tokens
    prompts = stats.prompt_tokens, stats.shifts
    return bench.text(number), bench.tokens(number), logprobs, surprisals, facts, prompts


def assert_slot_has_the_history(bench: Bench, number: int = 1) -> None:
    """All tokens but the last one are in the slot, as they are without drafts."""
    slot = next(s for s in bench.engine.slots.slots if s.tokens)
    prompt = m.unpack_tokens(bench.sent[number].tokens)  # type: ignore[attr-defined]
    tokens = [*prompt, *bench.tokens(number)]
    assert slot.tokens.tolist() == tokens[: len(slot.tokens)]
    assert len(slot.tokens) >= len(tokens) - 1
    assert bench.model.length(slot.index) == len(slot.tokens)


@pytest.mark.parametrize(("drafter", "rate"), DRAFTERS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_predict": 0},
        {"n_predict": 1},
        {"n_predict": 9},
        {"stop": ("red",)},
        {"stop": ("k r",)},
        {"reverse_prompt": ("fox. T",)},
        {"stopping": StoppingParams(stop_tokens=(ord("."),))},
        {"stopping": StoppingParams(stop_patterns=("r[e]d",))},
        {"stopping": StoppingParams(stop_complete=("sentence",))},
        {"stopping": StoppingParams(stop_repetition=0.4, stop_repetition_window=16)},
        {"stopping": StoppingParams(stop_surprisal=4.0, stop_surprisal_window=2)},
        {"sampling": SamplingParams(ignore_eos=True), "n_predict": 90},
        {"sampling": SamplingParams(n_probs=2)},
        {"sampling": SamplingParams(n_probs=2, post_sampling_probs=True)},
        {"sampling": GRAMMAR},
        {"sampling": msgspec.structs.replace(GRAMMAR, jump_forward=False)},
        {"ctx_size": 100},
        {"ctx_size": 101},
        {"ctx_size": 130},
        {"ctx_size": 110, "ctx_shift": True, "n_keep": 4},
        {"batch_size": 7},
        {"prompt_logprobs": 1},
        {"draft_max": 1},
        {"draft_max": 3},
    ],
)
def test_the_answer_is_the_same(
    drafter: str, rate: float | None, fields: dict[str, object]
) -> None:
    outcomes = []
    for speculation in ("off", drafter):
        bench = bench_of(rate, options=EchoOptions(surprising="dT", forced="=-o"))
        values = {"speculation": speculation, **fields}
        command = bench.submit(1, TEXT, **values)
        bench.sent = {1: command.task}  # type: ignore[attr-defined]
        bench.run(command)
        outcomes.append(outcome(bench))
        if "ctx_shift" not in fields:
            assert_slot_has_the_history(bench)
        stats = bench.stats(1)
        assert stats.accepted_tokens <= stats.drafted_tokens
        if speculation == "off":
            assert not stats.drafted_tokens
        elif rate == 0.0:
            assert not stats.accepted_tokens
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.8, 0.5, 0.95), (1.0, 0.98, 1)])
def test_the_acceptance_is_counted(rate: float, least: float, most: float) -> None:
    bench = bench_of(rate)
    steps = chunks_of(bench)
    most_drafts = 16 if rate in (0.0, 1.0) else 1
    bench.run(bench.submit(1, TEXT, speculation="knowing", draft_max=most_drafts))
    stats = bench.stats(1)
    assert least <= stats.accepted_tokens / stats.drafted_tokens <= most
    steps = steps[2:]  # the prompt
    assert stats.drafted_tokens == sum(sizes[0] - 1 for sizes in steps)
    if rate == 1.0:
        assert [sizes[0] for sizes in steps] == [1, 3, 16, 16, 16, 16, 8, 3]
    if rate == 0.0:
        assert len(steps) == len(TEXT)
        assert stats.drafted_tokens < 0.5 * 16 * len(TEXT), "it pauses after failures"


def test_pauses_grow_while_drafts_fail_and_end_when_they_are_right() -> None:
    bench = bench_of(0.0, ctx_size=1024)
    steps = chunks_of(bench)
    knowing = bench.engine.speculation.drafters["knowing"]
    bench.iterate(bench.submit(1, TEXT * 2, speculation="knowing"))
    for _ in range(100):
        bench.iterate()
    tried = [n for n, sizes in enumerate(steps[2:]) if sizes[0] > 1]
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == sorted(gaps) and gaps[-1] > 4
    knowing._rate = 1.0  # type: ignore[attr-defined]
    bench.run()
    assert bench.text(1).decode() == TEXT * 2
    assert steps[-1][0] > 1 and steps[-2][0] > 1


def test_an_end_token_inside_a_draft_ends_the_answer() -> None:
    bench = bench_of(1.0)
    bench.run(bench.submit(1, "abcdefgh", speculation="knowing", draft_max=16))
    stats = bench.stats(1)
    assert (bench.text(1), stats.stop_reason, stats.output_tokens) == (b"abcdefgh", "eos", 9)
    slot = bench.engine.slots.slots[0]
    assert EOG not in slot.tokens, "it was a draft, and is not in the history"


def test_drafts_and_forced_tokens_combine() -> None:
    text = "ab====cd--ef====gh--ij"
    bench = bench_of(1.0, options=FORCED)
    steps = chunks_of(bench)
    bench.run(bench.submit(1, text, sampling=GRAMMAR, speculation="knowing", draft_max=3))
    stats = bench.stats(1)
    assert (bench.text(1).decode(), stats.forced_tokens) == (text, 13)
    plain = bench_of(options=FORCED)
    plain_steps = chunks_of(plain)
    plain.run(plain.submit(1, text, sampling=GRAMMAR))
    assert outcome(plain)[1] == outcome(bench)[1]  # type: ignore[index]
    assert len(steps) < len(plain_steps)


def test_a_stream_gets_the_tokens_of_a_step_in_one_event_and_pays_one_credit() -> None:
    bench = bench_of(1.0)
    bench.run(bench.submit(1, TEXT, speculation="knowing", credit=4))
    events = [len(r.tokens) for r in bench.reports[1] if isinstance(r, m.Tokens)]
    assert events == [1, 1, 3, 16]
    steps = bench.engine.metrics.steps
    bench.run()
    assert bench.engine.metrics.steps == steps, "an unread task was computed on"
    bench.run(m.Credit(1, 100))
    assert bench.text(1).decode() == TEXT


def test_logprobs_of_drafted_tokens_come_in_one_event() -> None:
    bench = bench_of(1.0)
    sampling = SamplingParams(n_probs=1)
    bench.run(bench.submit(1, TEXT, sampling=sampling, speculation="knowing", credit=4))
    events = [r for r in bench.reports[1] if isinstance(r, m.Tokens)]
    assert [len(r.tokens) for r in events] == [1, 1, 3, 16]
    assert all([p.token for p in r.logprobs] == r.tokens for r in events)


def test_with_surprisals_each_token_is_an_event_and_drafts_keep_to_the_credit() -> None:
    bench = bench_of(1.0)
    stopping = StoppingParams(stop_surprisal=5.0)
    bench.run(bench.submit(1, TEXT, stopping=stopping, speculation="knowing", credit=5))
    events = [r for r in bench.reports[1] if isinstance(r, m.Tokens)]
    assert [len(r.tokens) for r in events] == [1] * 5
    assert all(r.surprisal is not None for r in events)
    for _ in range(40):
        bench.run(m.Credit(1, 3))
    assert bench.text(1).decode() == TEXT and bench.stats(1).accepted_tokens > 10


def test_a_pull_reader_gets_no_drafts() -> None:
    bench = bench_of(1.0)
    bench.run(bench.submit(1, TEXT, speculation="knowing", pull=True))
    for _ in range(len(TEXT)):
        bench.run(m.PullToken(1))
    assert bench.text(1).decode() == TEXT and not bench.stats(1).drafted_tokens


def test_a_sentence_that_is_compared_ends_the_run_of_drafts() -> None:
    text = "One two. Three four. Five six. " * 2
    outcomes = []
    for speculation in ("off", "knowing"):
        bench = bench_of(1.0)
        stopping = StoppingParams(stop_similarity="Nine")
        bench.run(bench.submit(1, text, stopping=stopping, speculation=speculation))
        for _ in range(20):
            ended = [r for r in bench.reports[1] if isinstance(r, m.SentenceEnded)]
            if bench.end(1) is None:
                detail = "0.9" if len(ended) == 4 else ""
                bench.run(m.SentenceCompared(1, ended[-1].end, detail))
        outcomes.append((bench.text(1), bench.tokens(1), bench.stats(1).stop_reason))
    assert outcomes[0] == outcomes[1] and outcomes[0][2] == "similarity"


def test_a_cancelled_task_leaves_the_confirmed_tokens_only() -> None:
    bench = bench_of(0.8)
    bench.iterate(bench.submit(1, TEXT, speculation="knowing"))
    for _ in range(3):
        bench.iterate()
    bench.iterate(m.Cancel(1))
    slot, done = bench.engine.slots.slots[0], bench.tokens(1)
    assert bench.error(1) == "Cancelled"
    assert slot.tokens.tolist()[1 + len(TEXT) + 1 :] == done[:-1]
    bench.run(bench.submit(2, TEXT, speculation="knowing"))
    assert bench.text(2).decode() == TEXT


@pytest.mark.parametrize(("drafter", "rate"), DRAFTERS)
def test_parked_and_preempted_tasks_continue(drafter: str, rate: float | None) -> None:
    settings = EngineSettings(quantum_tokens=8)
    bench = bench_of(rate, slots=1, settings=settings)
    texts = {n: f"{n}: {TEXT}" for n in range(1, 5)}
    bench.iterate(*(bench.submit(n, t, speculation=drafter) for n, t in texts.items()))
    for _ in range(4):
        bench.iterate()
    bench.run(bench.submit(5, "now", priority=Priority.URGENT, speculation=drafter))
    assert {n: bench.text(n).decode() for n in texts} == texts
    assert sum(bench.stats(n).parks for n in texts) > 3
    assert not bench.engine.speculation._streams


KEEPS = -1
"""Instead of a rollback: states are kept."""


def memory_of(kind: KvKind, rollback: int) -> EchoOptions:
    return EchoOptions(memory=kind, rollback=max(rollback, 0), keeps_states=rollback == KEEPS)


@pytest.mark.parametrize(
    ("kind", "rollback"),
    [
        *(("plain", 0), ("window", 0), ("recurrent", 0), ("hybrid", 0)),
        *(("recurrent", 5), ("hybrid", 3), ("recurrent", KEEPS), ("hybrid", KEEPS)),
    ],
)
@pytest.mark.parametrize(("drafter", "rate"), DRAFTERS)
def test_every_kind_of_memory(
    kind: KvKind, rollback: int, drafter: str, rate: float | None
) -> None:
    bench = bench_of(rate, options=memory_of(kind, rollback))
    steps = chunks_of(bench)
    for number in (1, 2, 3):
        bench.run(bench.submit(number, TEXT, speculation=drafter, session="s"))
        assert bench.text(number).decode() == TEXT
        drafts = bench.stats(number).drafted_tokens
        assert bool(drafts) == (kind in ("plain", "window") or rollback != 0)
    assert not bench.engine.slots.drafts_cut_states
    if rollback > 0:
        assert max(sizes[0] for sizes in steps if sizes[0] < 10) <= 1 + rollback


def test_streams_share_a_step_with_chunks_of_one_length() -> None:
    bench = bench_of(1.0, slots=4)
    steps = chunks_of(bench)
    texts = {1: TEXT, 2: TEXT.upper(), 3: "a short one, but not so short"}
    bench.run(*(bench.submit(n, t, speculation="knowing", draft_max=7) for n, t in texts.items()))
    assert {n: bench.text(n).decode() for n in texts} == texts
    decoding = [sizes for sizes in steps if len(sizes) == 3 and max(sizes) <= 8]
    assert all(len(set(sizes)) == 1 for sizes in decoding)
    assert any(sizes == [8, 8, 8] for sizes in decoding)


def test_a_stream_has_drafts_beside_the_prompts_of_others() -> None:
    """The prompts need no more steps, and all answers are the same."""
    prompts = {n: f"{n} {TEXT[:30]}" for n in range(3, 8)}
    found: list[list[tuple[int, int]]] = []
    for speculation in ("off", "knowing"):
        bench = bench_of(1.0, ctx_size=2048)
        steps = chunks_of(bench)
        bench.run(bench.submit(1, TEXT, speculation="knowing", draft_max=8))  # sizes are known now
        bench.iterate(bench.submit(2, TEXT * 8, speculation=speculation, draft_max=8))
        while not bench.tokens(2):
            bench.iterate()
        del steps[:]
        for number, text in prompts.items():
            bench.iterate(bench.submit(number, text, speculation="off", n_predict=1))
            bench.iterate()
        found.append([(sizes[0], sizes[1]) for sizes in steps if len(sizes) == 2])
        bench.run()
        assert bench.text(2).decode() == TEXT * 8
        assert all(bench.text(n) == text[:1].encode() for n, text in prompts.items())
    plain, drafted = found
    assert plain and {size for size, _ in plain} == {1}
    assert max(size for size, _ in drafted) == 8
    assert [read for _, read in drafted] == [read for _, read in plain]


def test_no_step_has_more_logits_than_the_model_allows() -> None:
    """The echo model refuses the step otherwise; llama.cpp would end the process."""
    bench = bench_of(1.0, slots=12, batch_size=32)
    texts = {n: f"{n} {TEXT}" for n in range(1, 13)}
    bench.run(*(bench.submit(n, t, speculation="knowing") for n, t in texts.items()))
    assert {n: bench.text(n).decode() for n in texts} == texts
    assert bench.model.info.logits_max == 32


def test_drafts_without_kv_cells_are_given_up_and_no_task_is_parked_for_them() -> None:
    bench = bench_of(1.0, options=EchoOptions(kv_cells=2 * len(TEXT) + 4))
    bench.run(bench.submit(1, TEXT, speculation="knowing"))
    assert bench.text(1).decode() == TEXT
    assert bench.stats(1).parks == 0 and bench.engine.metrics.counts["kv_full"] == 0
    assert bench.engine.speculation._pause_steps < FULL_PAUSE_STEPS


def test_a_step_with_drafts_that_fails_ends_its_tasks_like_any_step() -> None:
    bench = bench_of(1.0, options=EchoOptions(fail_at_step=4))
    bench.run(bench.submit(1, TEXT, speculation="knowing"))
    assert bench.error(1) == BackendError("").name
    bench.run(bench.submit(2, TEXT, speculation="knowing"))
    assert bench.text(2).decode() == TEXT


def test_drafts_are_given_up_if_they_cost_a_state() -> None:
    """A model whose slot cannot be cut back computes the tokens again, once."""
    bench = bench_of(0.5)
    trim, lost = bench.model.trim, list[int]()

    def clears(slot: int, keep: int) -> int:
        if keep and not lost:
            lost.append(keep)
            return trim(slot, 0)
        return trim(slot, keep)

    bench.model.trim = clears  # type: ignore[method-assign]
    bench.run(bench.submit(1, TEXT, speculation="knowing"))
    assert bench.text(1).decode() == TEXT and lost
    assert bench.stats(1).drafted_tokens <= 16


def test_owners_pay_for_computed_tokens() -> None:
    totals = []
    for rate in (0.0, 1.0):
        bench = bench_of(rate)
        steps = chunks_of(bench)
        bench.run(bench.submit(1, TEXT, speculation="knowing"))
        computed = sum(map(sum, steps))
        assert bench.engine.clock.tokens == computed
        assert bench.engine.metrics.counts["batch_tokens"] == computed
        assert bench.engine.metrics.counts["prompt"] == len(TEXT) + 2
        totals.append(bench.engine.tasks.owners.exchange_users({}, [], 1)[1])
        assert totals[-1] == computed
    assert totals[0] > totals[1]


def test_a_worker_that_dies_between_draft_and_report_loses_nothing() -> None:
    """The daemon has what was reported, and another worker continues from there."""
    bench = bench_of(0.8)
    spec = bench.spec(1, TEXT, speculation="knowing", sampling=SamplingParams(seed=4))
    bench.iterate(m.Submit(spec))
    for _ in range(3):
        bench.iterate()
    known = bench.tokens(1)
    last = [r for r in bench.reports[1] if isinstance(r, m.Tokens)][-1]
    assert 3 < len(known) < len(TEXT) and last.drafted
    point = m.ResumePoint(
        output_tokens=len(known),
        text_bytes=len(bench.text(1)),
        started_s=0.0,
        first_token_s=0.0,
        drafted_tokens=last.drafted,
        accepted_tokens=last.accepted,
    )
    tokens = m.pack_tokens([*m.unpack_tokens(spec.tokens), *known])
    other = bench_of(0.8)
    other.run(m.Submit(msgspec.structs.replace(spec, tokens=tokens, resume_point=point)))
    assert bench.text(1) + other.text(1) == TEXT.encode()
    assert other.stats(1).drafted_tokens > last.drafted


def test_one_users_text_is_never_drafted_for_another() -> None:
    """Sessions of the same name: the second user's acceptance is the same as if the first user had
    written something else.
    """
    secret = "the password is swordfish, and swordfish it is"
    bench, unlike = bench_of(slots=2), bench_of(slots=2)

    def run(number: int, text: str, owner: int, where: Bench = bench) -> m.TurnStats:
        where.run(where.submit(number, text, owner=owner, speculation="ngram", session="s"))
        return where.stats(number)

    assert run(1, f"{secret} {secret}", 1).accepted_tokens > 10
    run(1, f"{secret} {secret}".upper(), 1, unlike)
    other = run(2, "the password is ", 2)
    expected = run(2, "the password is ", 2, unlike)
    assert (other.drafted_tokens, other.accepted_tokens) == (
        expected.drafted_tokens,
        expected.accepted_tokens,
    )
    drafter = bench.engine.speculation.drafters["ngram"]
    assert isinstance(drafter, NgramDrafter) and len(drafter) == 2
    index = drafter._histories[1, "s"].index
    run(3, f"{secret} {secret}", 1)
    assert drafter._histories[1, "s"].index is index, "the index continues"
    bench.run(m.DeleteSessionStates(9, 1, "s"))
    assert [*drafter._histories] == [(2, "s")]


def test_ended_tasks_are_forgotten() -> None:
    bench = bench_of(1.0)
    for number in range(1, 20):
        bench.run(bench.submit(number, TEXT, speculation="knowing"))
    knowing = bench.engine.speculation.drafters["knowing"]
    assert knowing.forgotten == [*range(1, 20)]  # type: ignore[attr-defined]
    assert not bench.engine.speculation._streams


# States that are kept.


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
@pytest.mark.parametrize("fields", [{}, {"sampling": GRAMMAR}, {"n_predict": 33}, {"credit": 5}])
def test_answers_of_models_that_go_back_are_those_without_drafts(
    kind: KvKind, fields: dict[str, object]
) -> None:
    outcomes = []
    for speculation in ("off", "knowing"):
        options = msgspec.structs.replace(memory_of(kind, KEEPS), forced="=-")
        bench = bench_of(0.8, options=options)
        bench.iterate(bench.submit(1, TEXT, speculation=speculation, **fields))
        for _ in range(300):
            bench.iterate(*((m.Credit(1, 3),) if "credit" in fields else ()))
        outcomes.append(outcome(bench))
        assert bool(bench.stats(1).drafted_tokens) == (speculation != "off")
    assert outcomes[0] == outcomes[1]


def test_accepted_drafts_before_a_rejected_one_are_computed_again() -> None:
    bench = bench_of(0.8, slots=1, options=memory_of("recurrent", KEEPS))
    steps = chunks_of(bench)
    bench.run(bench.submit(1, TEXT, speculation="knowing", n_predict=-1))
    stats, computed = bench.stats(1), sum(sum(sizes) for sizes in steps)
    least = stats.prompt_tokens + stats.output_tokens + stats.drafted_tokens - stats.accepted_tokens
    assert stats.accepted_tokens > 20 and computed > least + 5
    assert len(steps) < stats.output_tokens


def test_streams_that_go_back_are_parked_and_preempted() -> None:
    settings = EngineSettings(quantum_tokens=8)
    bench = bench_of(0.8, slots=2, settings=settings, options=memory_of("hybrid", KEEPS))
    texts = {n: f"{n}: {TEXT}" for n in range(1, 6)}
    bench.iterate(*(bench.submit(n, t, speculation="knowing") for n, t in texts.items()))
    for _ in range(4):
        bench.iterate()
    bench.run(bench.submit(6, "now", priority=Priority.URGENT, speculation="knowing"))
    assert {n: bench.text(n).decode() for n in texts} == texts
    assert sum(bench.stats(n).parks for n in texts) > 3


# Streams that are alone.

STEP_S = {1: 0.06, 2: 0.065, 4: 0.075, 8: 0.11, 12: 0.155, 16: 0.16, 64: 0.64}


class Slow:
    """A bench on which a step takes as long as `STEP_S` says, by its tokens, and one of a prompt
    1 ms for each. Its first stream generates LONG, which a drafter knows.
    """

    LONG = TEXT * 60

    def __init__(self) -> None:
        self.bench = bench_of(1.0, slots=2, ctx_size=16384)
        self.target_s = self.bench.engine.tasks.settings.step_s_target
        self.seconds = list[float]()
        """Of each step that decodes."""
        step = self.bench.model.step

        def timed(chunks: Sequence[Chunk]) -> None:
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            if any(chunk.position == 0 or len(chunk.tokens) > 17 for chunk in chunks):
                self.bench.now += STEP_S[1] + 0.001 * tokens
            else:
                self.seconds.append(min(s for n, s in STEP_S.items() if n >= tokens))
                self.bench.now += self.seconds[-1]
            step(chunks)

        self.bench.model.step = timed  # type: ignore[method-assign]
        self.bench.iterate(self.bench.submit(1, self.LONG, speculation="knowing", n_predict=-1))
        while not self.bench.tokens(1):
            self.bench.iterate()
        self.run_for(10.0)

    def run_for(self, seconds: float) -> list[float]:
        """Iterate for *seconds*; return the time of each step that decodes."""
        self.seconds.clear()
        end = self.bench.now + seconds
        while self.bench.now < end:
            self.bench.iterate()
            assert self.bench.end(1) is None
        return self.seconds.copy()


def test_a_stream_that_is_alone_has_longer_steps() -> None:
    slow = Slow()
    before = len(slow.bench.tokens(1))
    seconds = slow.run_for(10.0)
    assert slow.target_s < max(seconds) <= 2 * slow.target_s
    assert (len(slow.bench.tokens(1)) - before) / sum(seconds) > 90, "75 in steps of 8 tokens"


def test_steps_are_short_again_once_there_is_another_task_and_for_some_time_after_it() -> None:
    slow = Slow()
    bench = slow.bench
    bench.iterate(bench.submit(2, "short", owner=2, n_predict=-1))
    while bench.end(2) is None:
        slow.run_for(0.01)
        assert max(slow.seconds) <= slow.target_s
    assert max(slow.run_for(0.8 * ALONE_S)) <= slow.target_s
    slow.run_for(0.3 * ALONE_S)
    assert max(slow.run_for(5.0)) > slow.target_s


@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.HIGH, Priority.URGENT])
def test_an_arrival_waits_for_one_step_of_a_stream_that_is_alone(priority: Priority) -> None:
    """It arrives when such a step has begun, and is noticed at its end."""
    slow = Slow()
    bench = slow.bench
    while True:
        arrived = bench.now
        slow.run_for(0.01)
        if bench.now - arrived > slow.target_s:
            break
    bench.iterate(bench.submit(2, "hello", owner=Owner(2), priority=priority, n_predict=4))
    while not bench.tokens(2):
        slow.run_for(0.01)
        assert max(slow.seconds) <= slow.target_s
    assert bench.now - arrived <= 2 * slow.target_s + 2 * slow.target_s


def test_a_low_stream_has_no_longer_steps() -> None:
    slow = Slow()
    bench = slow.bench
    bench.iterate(m.Cancel(1))
    bench.run()
    bench.now += ALONE_S
    slow.seconds.clear()
    text = TEXT * 10
    bench.run(bench.submit(3, text, speculation="knowing", n_predict=-1, priority=Priority.LOW))
    assert bench.text(3).decode() == text and bench.stats(3).accepted_tokens > len(text) / 2
    assert max(slow.seconds) <= slow.target_s
