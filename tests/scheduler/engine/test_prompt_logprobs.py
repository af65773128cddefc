"""Logprobs of prompts' tokens: which are reported, and in which steps they are computed."""

from __future__ import annotations

import msgspec
import pytest

from inferd.backends import Chunk
from inferd.backends.echo.model import DISTANCE, LOGITS_MAX
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority
from tests.scheduler.doubles import Bench

TEXT = "the sea is blue, and so is the sky above it: " * 4


def reported(bench: Bench, number: int) -> list[m.TokenLogprob]:
    """Return the reported logprobs of a task's prompt, which must follow each other."""
    found: list[m.TokenLogprob] = []
    for report in bench.reports.get(number, []):
        if isinstance(report, m.PromptLogprobs):
            assert report.offset == len(found), "no gap, and nothing twice"
            found += report.logprobs
    return found


def assert_complete(bench: Bench, number: int, spec: m.TaskSpec) -> None:
    """Assert that the logprobs of *spec*'s prompt are all there and right."""
    tokens, found = m.unpack_tokens(spec.tokens), reported(bench, number)
    assert [one.token for one in found] == tokens
    assert [one.piece for one in found] == [bench.model.piece(token) for token in tokens]
    assert not found[0].rank and not found[0].top
    for before, one in zip(tokens, found[1:], strict=False):
        assert one.value == -abs(one.token - before) / DISTANCE and one.rank
        assert len(one.top) == spec.prompt_logprobs
        assert not one.top or one.top[0] == m.TokenLogprob(
            before, bench.model.piece(before), 0.0, rank=1
        )


def bench_of(slots: int = 2, options: EchoOptions | None = None) -> Bench:
    return Bench(slots, ctx_size=512, options=options)


class Watched(Bench):
    """A bench that notes the chunks of each step."""

    def __init__(
        self,
        slots: int = 2,
        *,
        logits_max: int = 0,
        settings: EngineSettings | None = None,
        options: EchoOptions | None = None,
    ):
        super().__init__(slots, settings, ctx_size=512, options=options)
        self.steps: list[list[Chunk]] = []
        if logits_max:
            self.model.info = msgspec.structs.replace(self.model.info, logits_max=logits_max)
        step = self.model.step

        def note(chunks: list[Chunk]) -> None:
            self.steps.append(list(chunks))
            step(chunks)

        self.model.step = note  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("logits_max", [2, 5, LOGITS_MAX])
@pytest.mark.parametrize("n_predict", [0, 1, -1])
def test_every_token_of_a_prompt_has_its_logprob_whatever_the_chunks(
    logits_max: int, n_predict: int
) -> None:
    bench = Watched(logits_max=logits_max)
    spec = bench.spec(1, TEXT, prompt_logprobs=2, n_predict=n_predict)
    bench.run(m.Submit(spec))
    assert_complete(bench, 1, spec)
    expected = TEXT.encode()[: n_predict if n_predict >= 0 else None]
    assert bench.text(1) == (expected if n_predict else b"")
    assert bench.stats(1).prompt_tokens == len(m.unpack_tokens(spec.tokens))
    assert max(sum(chunk.logits for chunk in step) for step in bench.steps) <= logits_max


@pytest.mark.parametrize("top", [0, 1, 3])
def test_the_shortest_prompts(top: int) -> None:
    bench = bench_of()
    one = msgspec.structs.replace(
        bench.spec(1, prompt_logprobs=top, n_predict=0), tokens=m.pack_tokens([65])
    )
    two = msgspec.structs.replace(
        bench.spec(2, prompt_logprobs=top, n_predict=0), tokens=m.pack_tokens([65, 70])
    )
    bench.run(m.Submit(one), m.Submit(two))
    assert_complete(bench, 1, one)
    assert_complete(bench, 2, two)


def test_a_prompt_without_them_has_no_further_logits() -> None:
    bench = Watched()
    bench.run(bench.submit(1, TEXT, n_predict=3))
    assert not reported(bench, 1)
    assert all(chunk.logits <= 1 for step in bench.steps for chunk in step)


def test_cached_tokens_are_computed_again_and_serve_others_afterwards() -> None:
    bench = bench_of(slots=2)
    bench.run(bench.submit(1, TEXT))
    spec = bench.spec(2, TEXT, prompt_logprobs=1)
    bench.run(m.Submit(spec))
    assert_complete(bench, 2, spec)
    assert bench.stats(2).cached_tokens == 0
    bench.run(bench.submit(3, TEXT))
    assert bench.stats(3).cached_tokens > 100


def test_one_does_not_wait_for_a_prefix_that_another_computes() -> None:
    bench = bench_of(slots=2)
    spec = bench.spec(2, TEXT, prompt_logprobs=1)
    bench.run(bench.submit(1, TEXT), m.Submit(spec))
    assert_complete(bench, 2, spec)
    assert bench.text(1) == bench.text(2) == TEXT.encode()


@pytest.mark.parametrize("memory", ["plain", "window", "recurrent", "hybrid"])
def test_a_parked_prompt_continues_without_a_gap(memory: str) -> None:
    bench = bench_of(slots=1, options=msgspec.convert({"memory": memory}, EchoOptions))
    spec = bench.spec(1, TEXT, prompt_logprobs=1)
    bench.iterate(m.Submit(spec))
    bench.iterate()
    assert 0 < len(reported(bench, 1)) < len(m.unpack_tokens(spec.tokens))
    bench.run(bench.submit(2, "now", priority=Priority.URGENT))
    assert_complete(bench, 1, spec)
    assert bench.stats(1).parks == 1 and bench.text(1) == TEXT.encode()


def test_a_prompt_whose_state_was_dropped_reports_nothing_twice() -> None:
    """Its first tokens are computed again, without logits."""
    settings = EngineSettings(kv_ram_bytes=0)
    bench = Watched(slots=2, options=EchoOptions(kv_cells=200), settings=settings)
    spec = bench.spec(2, TEXT, prompt_logprobs=1, n_predict=5)
    bench.run(bench.submit(1, "x" * 60, priority=Priority.HIGH), m.Submit(spec))
    assert_complete(bench, 2, spec)
    assert bench.text(2) == TEXT.encode()[:5] and bench.text(1) == b"x" * 60
    chunks = [chunk for step in bench.steps for chunk in step if chunk.tokens[0] != ord("x")]
    assert len([chunk for chunk in chunks if not chunk.position]) == 3, "one began twice"
    assert any(len(chunk.tokens) > 1 and not chunk.logits for chunk in chunks)


def test_a_stream_takes_them_only_for_credit() -> None:
    bench = bench_of(slots=1)
    spec = bench.spec(1, TEXT, prompt_logprobs=1, credit=2, n_predict=0)
    bench.iterate(m.Submit(spec))
    for _ in range(10):
        bench.iterate()
    sent = [r for r in bench.reports[1] if isinstance(r, m.PromptLogprobs)]
    assert len(sent) == 2 and bench.end(1) is None
    bench.run(m.Credit(1, 100))
    assert_complete(bench, 1, spec)
    assert bench.stats(1).stop_reason == "length"


def test_a_cancelled_prompt_reports_no_more() -> None:
    bench = bench_of(slots=1)
    bench.iterate(bench.submit(1, TEXT, prompt_logprobs=1))
    bench.run(m.Cancel(1))
    before = len(reported(bench, 1))
    assert bench.error(1) == "Cancelled"
    spec = bench.spec(2, TEXT, prompt_logprobs=1, n_predict=0)
    bench.run(m.Submit(spec))
    assert_complete(bench, 2, spec)
    assert len(reported(bench, 1)) == before


def test_another_worker_continues_after_the_logprobs_that_were_reported() -> None:
    first, second = bench_of(slots=1), bench_of(slots=1)
    spec = first.spec(1, TEXT, prompt_logprobs=1, n_predict=3)
    first.iterate(m.Submit(spec))
    first.iterate()
    done = len(reported(first, 1))
    point = m.ResumePoint(prompt_logprobs=done, age_s=1.0, started_s=0.5)
    second.reports[1] = [r for r in first.reports[1] if isinstance(r, m.PromptLogprobs)]
    second.run(m.Submit(msgspec.structs.replace(spec, resume_point=point)))
    assert 0 < done < len(m.unpack_tokens(spec.tokens))
    assert_complete(second, 1, spec)
    assert second.text(1) == TEXT.encode()[:3]


def test_streams_get_a_token_in_every_step_beside_them() -> None:
    bench = Watched(slots=4)
    bench.iterate(*(bench.submit(n, "y" * 100) for n in (1, 2)))
    while len(bench.tokens(2)) < 2:
        bench.iterate()
    bench.steps.clear()
    specs = [bench.spec(n, TEXT, prompt_logprobs=1, n_predict=0) for n in (3, 4)]
    bench.iterate(*map(m.Submit, specs))
    while bench.end(4) is None or bench.end(3) is None:
        bench.iterate()
    for step in bench.steps:
        assert sum(len(chunk.tokens) == 1 for chunk in step) >= 2, "both streams are in it"
        assert sum(chunk.logits for chunk in step) <= LOGITS_MAX
    for number, spec in zip((3, 4), specs, strict=True):
        assert_complete(bench, number, spec)


def test_a_quantum_counts_the_time_of_logits() -> None:
    """Otherwise a prompt with logprobs would keep its slot for longer than others."""
    bench = Watched(slots=1)
    step = bench.model.step

    def slow(chunks: list[Chunk]) -> None:
        step(chunks)
        bench.now += sum(len(chunk.tokens) + 3 * chunk.logits for chunk in chunks) / 1000

    bench.model.step = slow  # type: ignore[method-assign, assignment]
    for number in range(1, 10):
        bench.run(bench.submit(number, TEXT, n_predict=0, no_cache=True))
    bench.run(*(bench.submit(n, TEXT, prompt_logprobs=1, n_predict=0) for n in range(10, 15)))
    before = bench.engine.tasks.owners.served(Owner(1))[0]
    bench.run(bench.submit(20, TEXT, prompt_logprobs=1, n_predict=0))
    prompt = bench.stats(20).prompt_tokens
    assert bench.engine.tasks.owners.served(Owner(1))[0] - before > 3 * prompt
