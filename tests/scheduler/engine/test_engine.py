"""The engine on the echo model, iteration by iteration."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inferd.backends import Chunk, Sampler, SamplingParams
from inferd.backends.echo.options import EchoOptions
from inferd.backends.errors import InvalidArgument
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority, Requester
from tests.scheduler.doubles import Bench


def test_the_echo_of_a_prompt_is_its_answer() -> None:
    bench = Bench()

    bench.run(bench.submit(1, "hello, grüße €"))

    assert bench.text(1).decode() == "hello, grüße €"
    assert bench.stats(1).stop_reason == "eos"


def test_tasks_share_one_batch() -> None:
    bench = Bench(slots=3)

    bench.run(*(bench.submit(i, f"text number {i}") for i in (1, 2, 3)))

    assert [bench.text(i).decode() for i in (1, 2, 3)] == [f"text number {i}" for i in (1, 2, 3)]
    assert bench.engine.metrics.steps < 20, "the three tasks did not share steps"


def test_more_tasks_than_slots_all_finish() -> None:
    bench = Bench(slots=2)

    bench.run(*(bench.submit(i, f"n{i}") for i in range(20)))

    assert all(bench.text(i).decode() == f"n{i}" for i in range(20))


def test_a_prompt_larger_than_a_batch_is_read_in_chunks() -> None:
    bench = Bench(batch_size=16)
    text = "x" * 100

    bench.run(bench.submit(1, text))

    assert bench.text(1).decode() == text


@pytest.mark.parametrize(("n_predict", "text"), [(0, ""), (1, "h"), (3, "hel")])
def test_n_predict_bounds_the_tokens(n_predict: int, text: str) -> None:
    bench = Bench()

    bench.run(bench.submit(1, "hello", n_predict=n_predict))

    assert bench.text(1).decode() == text
    assert bench.stats(1).stop_reason == "length"
    assert bench.stats(1).output_tokens == n_predict


def test_a_stop_text_is_cut_and_a_reverse_prompt_kept() -> None:
    bench = Bench()

    bench.run(
        bench.submit(1, "one STOP two", stop=("STOP",)),
        bench.submit(2, "one STOP two", reverse_prompt=("STOP",)),
    )

    assert bench.text(1) == b"one "
    assert bench.text(2) == b"one STOP"
    assert bench.stats(1).stop_reason == bench.stats(2).stop_reason == "stop"


def test_text_withheld_for_a_stop_text_comes_at_the_end() -> None:
    bench = Bench()

    bench.run(bench.submit(1, "so ##", stop=("###",)))

    assert bench.text(1) == b"so ##"


def test_a_full_context_ends_the_turn() -> None:
    bench = Bench(ctx_size=20)

    bench.run(bench.submit(1, "0123456789"))

    assert bench.stats(1).stop_reason == "context_full"
    assert bench.text(1) == b"01234567"


def test_a_task_may_have_a_smaller_context_than_the_worker() -> None:
    bench = Bench(ctx_size=100)

    bench.run(bench.submit(1, "0123456789", ctx_size=15))

    assert bench.text(1) == b"012"


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    bench = Bench(ctx_size=20)

    bench.run(bench.submit(1, "x" * 18))

    end = bench.end(1)
    assert isinstance(end, m.Failed)
    assert end.error["name"] == "PromptTooLong"
    assert end.error["data"] == {"prompt_tokens": 20, "ctx_size": 20}


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    bench = Bench()
    spec = m.TaskSpec(
        id=1, owner=Owner(1), tokens=m.pack_tokens([1, 9999]), sampling=bench.spec(1).sampling
    )

    bench.run(m.Submit(spec))

    assert bench.error(1) == "InvalidArgument"


def test_a_cancelled_task_never_reaches_the_model() -> None:
    bench = Bench()

    bench.run(bench.submit(1), m.Cancel(1))

    assert bench.error(1) == "Cancelled"
    assert bench.engine.metrics.steps == 0


def test_cancel_in_decode_frees_the_slot_before_the_next_step() -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(1, "a long text"), bench.submit(2, "next"))
    bench.iterate()

    bench.run(m.Cancel(1))

    assert bench.error(1) == "Cancelled"
    assert bench.text(2) == b"next"


def test_the_next_turn_computes_only_its_new_tokens() -> None:
    bench = Bench(slots=1)
    bench.run(bench.submit(1, "hello"))
    history = [*bench.model.tokenize(b"hello", special=False, bos=True), *b"hello"]
    prompt = [*history, *bench.model.tokenize(b"again", special=False, bos=True)]
    spec = m.TaskSpec(
        id=2, owner=Owner(1), tokens=m.pack_tokens(prompt), sampling=bench.spec(1).sampling
    )

    bench.run(m.Submit(spec))

    assert bench.stats(2).cached_tokens == len(history)
    assert bench.text(2) == b"again"


def test_kv_of_one_owner_never_serves_another() -> None:
    bench = Bench(slots=1)

    bench.run(bench.submit(1, "the same prompt", owner=1))
    bench.run(bench.submit(2, "the same prompt", owner=2))
    bench.run(bench.submit(3, "the same prompt", owner=2))

    assert bench.stats(2).cached_tokens == 0
    assert bench.stats(3).cached_tokens == len("the same prompt") + 1


def test_a_push_task_stands_still_without_credit_and_continues_with_it() -> None:
    bench = Bench()
    bench.run(bench.submit(1, "hello", credit=2))
    assert bench.text(1) == b"he"
    steps = bench.engine.metrics.steps

    assert bench.engine.wait_s_max() == pytest.approx(bench.engine.tasks.settings.reader_timeout_s)
    assert bench.engine.metrics.steps == steps, "an unread task was computed on"

    bench.run(m.Credit(1, 100))
    assert bench.text(1) == b"hello"


def test_a_pull_task_samples_a_token_on_request() -> None:
    bench = Bench()

    bench.run(bench.submit(1, "abc", pull=True))
    assert bench.text(1) == b"a"
    bench.run(m.PullToken(1))
    assert bench.text(1) == b"ab"
    bench.run(m.PullToken(1))
    bench.run(m.PullToken(1))

    assert bench.stats(1).stop_reason == "eos"


def test_a_requested_token_is_reported_before_the_next_step() -> None:
    bench = Bench()
    bench.run(bench.submit(1, "abc", pull=True))
    steps = bench.engine.metrics.steps
    (token,) = bench.engine.begin_iteration([m.PullToken(1)])
    assert isinstance(token, m.Tokens)
    assert token.text == b"b"
    assert bench.engine.metrics.steps == steps
    assert bench.engine.compute_step() == [], "the step samples no token without a request"
    assert bench.engine.metrics.steps == steps + 1


def test_a_token_of_a_pull_task_is_decoded_ahead_of_the_next_request() -> None:
    bench = Bench()
    bench.run(bench.submit(1, "abc", pull=True))
    steps = bench.engine.metrics.steps

    reports = bench.iterate(m.PullToken(1))

    assert reports[0] == m.Tokens(1, [ord("b")], b"b"), "the logits were not computed ahead"
    assert bench.engine.metrics.steps == steps + 1


def test_a_step_waits_briefly_for_the_readers_of_the_last_one() -> None:
    bench = Bench()
    bench.run(bench.submit(1, "abcdef", pull=True))
    bench.iterate(m.PullToken(1), bench.submit(2, "stream"))
    steps = bench.engine.metrics.steps

    bench.iterate()

    assert bench.engine.wait_s_max() == bench.engine.tasks.settings.pull_batch_wait_s
    assert bench.engine.metrics.steps == steps
    bench.now += bench.engine.tasks.settings.pull_batch_wait_s
    bench.iterate()
    assert bench.engine.metrics.steps == steps + 1


def test_a_step_waits_for_a_late_reader_after_a_long_step() -> None:
    bench = Bench()
    step = bench.model.step

    def long_step(chunks: Sequence[Chunk]) -> None:
        step(chunks)
        bench.now += 1.0

    bench.model.step = long_step  # type: ignore[method-assign]
    bench.iterate(bench.submit(1, "abcdef", pull=True), bench.submit(2, "stream"))
    bench.iterate()
    steps = bench.engine.metrics.steps

    assert bench.engine.wait_s_max() == bench.engine.tasks.settings.pull_batch_wait_s
    bench.iterate()
    assert bench.engine.metrics.steps == steps, "the step did not wait for the reader"
    bench.iterate(m.PullToken(1))
    assert bench.engine.metrics.steps == steps + 1


def test_a_step_waits_briefly_for_tasks_whose_prompts_were_just_tokenized() -> None:
    bench = Bench(slots=3)
    bench.iterate(bench.submit(1, "a stream that runs meanwhile"))
    steps, linger = bench.engine.metrics.steps, bench.engine.tasks.settings.task_batch_wait_s

    bench.iterate(
        m.Tokenize(7, b"one", True, True, turn=True), m.Tokenize(8, b"two", True, True, True)
    )
    assert bench.engine.metrics.steps == steps and bench.engine.wait_s_max() == linger
    bench.now += linger / 2
    bench.iterate(bench.submit(2, "one"))
    assert bench.engine.metrics.steps == steps, "the other task is still expected"
    bench.iterate(bench.submit(3, "two"))

    assert bench.engine.metrics.steps == steps + 1
    assert bench.order == [1, 2, 3] and bench.engine.wait_s_max() == 0


def test_a_step_waits_longer_for_an_urgent_task() -> None:
    bench = Bench()
    bench.iterate(bench.submit(1, "a stream that runs meanwhile"))
    steps, settings = bench.engine.metrics.steps, bench.engine.tasks.settings
    urgent = Requester(Owner(2), Priority.URGENT)

    bench.iterate(m.Tokenize(7, b"one", True, True, turn=True, requester=urgent))
    bench.now += 0.9 * settings.urgent_batch_wait_s
    bench.iterate()
    assert bench.engine.metrics.steps == steps
    bench.now += 0.2 * settings.urgent_batch_wait_s
    bench.iterate()
    assert bench.engine.metrics.steps == steps + 1


@pytest.mark.parametrize("again", [False, True])
def test_a_step_waits_only_once_for_tasks_that_never_arrive(again: bool) -> None:
    bench = Bench()
    bench.iterate(bench.submit(1, "a stream that runs meanwhile"))
    steps, linger = bench.engine.metrics.steps, bench.engine.tasks.settings.task_batch_wait_s

    bench.iterate(m.Tokenize(7, b"one", True, True, turn=True))
    bench.now += linger / 2
    bench.iterate(*[m.Tokenize(8, b"two", True, True, turn=True)] * again)
    assert bench.engine.metrics.steps == steps
    bench.now += linger / 2
    bench.iterate()
    assert bench.engine.metrics.steps == steps + 1, "another prompt does not prolong the wait"
    bench.iterate()
    assert bench.engine.metrics.steps == steps + 2


def test_a_step_does_not_wait_for_prompts_without_turns_or_refused_ones() -> None:
    bench = Bench()
    bench.iterate(bench.submit(1, "a stream that runs meanwhile"))
    steps = bench.engine.metrics.steps
    too_long = b"x" * (bench.model.info.ctx_size * bench.model.info.token_bytes_max + 1)

    for command in (
        m.Tokenize(7, b"one", True, True),
        m.Tokenize(7, too_long, True, True, turn=True),
        m.Detokenize(7, m.pack_tokens([104])),
    ):
        bench.iterate(command)
        steps += 1
        assert bench.engine.metrics.steps == steps


def test_a_task_with_an_absent_pull_reader_is_parked_and_resumes_complete() -> None:
    bench = Bench(slots=1)
    bench.run(bench.submit(1, "abcdef", pull=True))
    bench.run(bench.submit(2, "xyz"))
    assert bench.end(2) is None, "the slot was lost at once"

    bench.now += bench.engine.tasks.settings.reader_lag_s
    bench.run()
    assert bench.text(2) == b"xyz"
    for read_so_far in ("ab", "abc", "abcd", "abcde", "abcdef"):
        bench.run(m.PullToken(1))
        assert bench.text(1).decode() == read_so_far, "the request is answered without another one"

    bench.run(m.PullToken(1))
    assert bench.stats(1).parks == 1


def test_an_urgent_task_runs_at_once_and_the_parked_one_loses_nothing() -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(1, "a low one that takes its time", priority=Priority.LOW))
    for _ in range(5):
        bench.iterate()
    rows = bench.engine.statistics()["batch_tokens"]

    bench.iterate(bench.submit(2, "now", priority=Priority.URGENT))

    assert bench.text(2) == b"n", "the urgent task was not served in the very next step"
    bench.run()
    assert bench.text(1) == b"a low one that takes its time"
    assert bench.stats(1).parks == 1
    computed = bench.engine.statistics()["batch_tokens"] - rows
    low, urgent = 29 - 5, (3 + 2) + 3 - bench.stats(2).cached_tokens
    assert computed == low + urgent, "something was computed twice"


def test_a_parked_state_that_does_not_fit_is_not_parked() -> None:
    bench = Bench(slots=1, settings=EngineSettings(kv_ram_bytes=1))
    bench.iterate(bench.submit(1, "low", priority=Priority.LOW))

    bench.run(bench.submit(2, "urgent", priority=Priority.URGENT))

    assert bench.stats(1).parks == 0
    assert bench.text(2) == b"urgent"


def test_a_task_that_is_never_read_ends_with_a_reader_timeout() -> None:
    bench = Bench()
    bench.run(bench.submit(1, "abc", pull=True))

    bench.now += bench.engine.tasks.settings.reader_timeout_s
    bench.iterate()

    assert bench.error(1) == "ReaderTimeout"


@pytest.mark.parametrize(
    ("field", "where"), [("queue_timeout_s", "queue"), ("total_timeout_s", "total")]
)
def test_a_timeout_ends_a_waiting_task(field: str, where: str) -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(1, "x" * 50, n_predict=50))
    bench.iterate(bench.submit(2, "waits", **{field: 3.0}))

    bench.now += 3.0
    bench.iterate()

    end = bench.end(2)
    assert isinstance(end, m.Failed)
    assert end.error["name"] == "Timeout"
    assert end.error["data"] == {"timeout": where}


def test_a_failed_step_fails_its_tasks_and_no_others() -> None:
    bench = Bench(slots=1, options=EchoOptions(fail_at_step=2))

    bench.run(bench.submit(1, "first"), bench.submit(2, "second"))

    assert bench.error(1) == "RuntimeError"
    assert bench.text(2) == b"second"


def test_equals_of_one_owner_alternate_by_quanta() -> None:
    bench = Bench(slots=1, settings=EngineSettings(quantum_tokens=20))
    bench.iterate(bench.submit(1, "a long story " * 8), bench.submit(2, "another story " * 8))
    bench.run(bench.submit(3, "short"))

    parks = {n: bench.end(n).stats.parks for n in (1, 2, 3)}  # type: ignore[union-attr]
    assert parks[1] >= 3 and parks[2] >= 3 and parks[3] == 0
    ended = [n for n in bench.reports if bench.end(n)]
    assert bench.text(1) == b"a long story " * 8 and len(ended) == 3


def test_a_task_that_another_worker_had_begun_precedes_its_waiting_equals() -> None:
    bench = Bench(slots=1)
    begun = m.ResumePoint(age_s=3.0, started_s=1.0)
    waited = m.ResumePoint(age_s=9.0)

    bench.run(
        bench.submit(1, "new"),
        bench.submit(2, "waits", resume_point=waited),
        bench.submit(3, "begun", resume_point=begun),
        bench.submit(4, "urgent", priority=Priority.URGENT),
    )

    assert list(bench.reports) == [4, 3, 1, 2]
    assert all(bench.end(number) for number in bench.reports)


def test_a_task_that_another_worker_had_begun_keeps_the_tokens_that_were_cached_there() -> None:
    bench = Bench()
    begun = m.ResumePoint(age_s=3.0, started_s=1.0, cached_tokens=3)
    bench.run(bench.submit(1, "begun", resume_point=begun))
    assert bench.stats(1).cached_tokens == 3
    changes = [report for report in bench.reports[1] if isinstance(report, m.StateChanged)]
    assert [change.cached_tokens for change in changes] == [3]


def test_leased_slots_stay_adjacent() -> None:
    bench = Bench(slots=4)
    bench.iterate(*(bench.submit(i, "some text that is long enough") for i in range(4)))

    def occupied() -> list[int]:
        return [t.slot for t in bench.engine.slots.tasks]

    bench.iterate(m.Cancel(0))
    assert occupied() == [1, 2, 3], "no slot moves without a gap"
    bench.iterate(m.Cancel(2))
    assert occupied() in ([0, 1], [1, 2], [2, 3])
    bench.iterate(bench.submit(4, "a late one"))
    assert occupied() in ([0, 1, 2], [1, 2, 3])
    bench.run()
    assert bench.text(1) == bench.text(3) == b"some text that is long enough"
    assert bench.text(4) == b"a late one"


def test_an_idle_engine_waits_without_limit() -> None:
    bench = Bench()
    bench.run(bench.submit(1))

    assert bench.engine.wait_s_max() is None


def test_prompts_are_tokenized_rendered_and_detokenized() -> None:
    bench = Bench()

    reports = bench.iterate(
        m.Tokenize(1, b"ab", False, False),
        m.Detokenize(2, m.pack_tokens([104, 105])),
        m.ChatPrompt(3, [{"role": "user", "content": "hi"}], ""),
    )
    while len(reports) < 3:
        reports += bench.iterate()

    values = {r.id: r.value for r in reports if isinstance(r, m.CommandResult)}
    assert m.unpack_tokens(values[1]) == [97, 98]
    assert values[2] == b"hi"
    assert values[3][0] == "hi"


def test_a_prompt_with_more_bytes_than_a_context_holds_is_refused_before_tokenizing() -> None:
    bench = Bench(ctx_size=16)

    (report,) = bench.iterate(m.Tokenize(1, b"x" * 17, False, False))

    assert isinstance(report, m.Refused)
    assert report.error["name"] == "PromptTooLong"


def test_adjusted_parameters_hold_from_the_next_token() -> None:
    bench = Bench()
    bench.run(bench.submit(1, "abcdef", pull=True))
    sampling = bench.spec(1).sampling

    bench.run(m.Adjust(1, sampling, 3, (), ()), m.PullToken(1))
    bench.run(m.PullToken(1))

    assert bench.text(1) == b"abc"
    assert bench.stats(1).stop_reason == "length"


def test_a_task_without_cache_waits_for_no_leader_and_uses_no_state() -> None:
    text = "a prefix that is long enough to be worth waiting for, twice over and more: " * 2
    bench = Bench(slots=3, batch_size=16)
    bench.iterate(bench.submit(1, text + "one"))
    bench.iterate(bench.submit(2, text + "two"), bench.submit(3, text + "three", no_cache=True))
    states = {t.spec.id: t.follows for t in bench.engine.tasks.queue}
    assert states == {2: True}, "the other task runs"
    bench.run()
    assert bench.stats(2).cached_tokens > 100 and bench.stats(3).cached_tokens == 0


def test_a_bias_for_an_unknown_token_refuses_only_its_task() -> None:
    bench = Bench()
    bad = SamplingParams(logit_bias=((1 << 20, 1.0),))
    sampler = bench.model.sampler

    def strict(
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        grammar: object | None = None,
    ) -> Sampler:
        if params.logit_bias:
            raise InvalidArgument("logit-bias: no such token")
        return sampler(params, prompt)

    bench.model.sampler = strict  # type: ignore[method-assign]
    bench.run(bench.submit(1, "abc", sampling=bad), bench.submit(2, "abc"))
    assert bench.error(1) == "InvalidArgument" and bench.text(2) == b"abc"
    bench.iterate(bench.submit(3, "abcdef", pull=True))
    bench.run(m.Adjust(3, bad, -1, (), ()))
    assert bench.error(3) == "InvalidArgument"
    bench.run(bench.submit(4, "abc"))
    assert bench.text(4) == b"abc"
