"""Forced tokens on the echo model: they need no logits, and pass all conditions like sampled ones.

The model forces the characters `=`, `-` and the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from inferd.backends import Chunk, SamplingParams
from inferd.backends.echo.options import EchoOptions
from inferd.backends.params import StoppingParams
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.answers import FORCED_MAX
from inferd.scheduler.owner import Owner
from tests.scheduler.doubles import Bench

FORCED = EchoOptions(forced="=-")
GRAMMAR = SamplingParams(grammar="root ::= .*")
SAMPLED = SamplingParams(grammar="root ::= .*", jump_forward=False)


def bench_of(**fields: object) -> Bench:
    return Bench(options=FORCED, **fields)  # type: ignore[arg-type]


def chunks_of(bench: Bench) -> list[list[int]]:
    """Return the sizes of each step's chunks from now on."""
    sizes: list[list[int]] = []
    step = bench.model.step

    def recorded(chunks: Sequence[Chunk]) -> None:
        sizes.append([len(chunk.tokens) for chunk in chunks])
        step(chunks)

    bench.model.step = recorded  # type: ignore[method-assign]
    return sizes


def events(bench: Bench, number: int = 1) -> list[str]:
    return [r.text.decode() for r in bench.reports[number] if isinstance(r, m.Tokens)]


def test_forced_tokens_are_computed_with_the_sampled_one_before_them() -> None:
    bench = bench_of()
    chunks = chunks_of(bench)

    bench.run(bench.submit(1, "ab====cd--", sampling=GRAMMAR))

    assert events(bench) == ["a", "b====", "c", "d--"]
    assert chunks == [[12], [1], [5], [1]], "the forced end needs no step for what precedes it"
    assert bench.stats(1).stop_reason == "eos"
    assert (bench.stats(1).output_tokens, bench.stats(1).forced_tokens) == (11, 7)
    assert bench.engine.metrics.counts["forced"] == 7
    assert bench.engine.metrics.counts["generated"] == 11


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SAMPLED,
        SamplingParams(grammar="root ::= .*", n_probs=1),
    ],
)
def test_all_tokens_are_sampled_without_a_grammar_if_off_and_with_probabilities(
    sampling: SamplingParams,
) -> None:
    bench = bench_of()
    bench.run(bench.submit(1, "ab====", sampling=sampling))
    assert events(bench) == list("ab====")
    assert bench.stats(1).forced_tokens == 0


def test_tokens_are_sampled_if_their_surprisal_counts() -> None:
    bench = bench_of()
    stopping = StoppingParams(stop_surprisal=5.0)
    bench.run(bench.submit(1, "ab====", sampling=GRAMMAR, stopping=stopping))
    assert (bench.text(1), bench.stats(1).forced_tokens) == (b"ab====", 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_predict": 4},
        {"n_predict": 1},
        {"stop": ("==",)},
        {"stop": ("=-",)},
        {"reverse_prompt": ("==",)},
        {"stopping": StoppingParams(stop_tokens=(ord("-"),))},
        {"stopping": StoppingParams(stop_patterns=("=-+",))},
        {"stopping": StoppingParams(stop_repetition=0.5, stop_repetition_window=8)},
        {"ctx_size": 25},
        {"ctx_size": 27},
    ],
)
def test_an_answer_is_cut_at_the_same_token_as_if_all_were_sampled(
    fields: dict[str, object],
) -> None:
    text = "ab===--c=d--------"
    ends = []
    for sampling in (GRAMMAR, SAMPLED):
        bench = bench_of()
        bench.run(bench.submit(1, text, sampling=sampling, **fields))
        stats, slot = bench.stats(1), bench.engine.slots.slots[0]
        tokens = bench.model.tokenize(text.encode(), special=False, bos=True) + bench.tokens(1)
        assert slot.tokens.tolist() == tokens[: len(slot.tokens)], "tokens behind the end"
        assert stats.stop_reason != "eos"
        end = (stats.stop_reason, stats.stop_detail, stats.output_tokens)
        ends.append((bench.text(1), bench.tokens(1), end))
    assert ends[0] == ends[1]


def test_a_forced_token_is_pulled_without_a_step() -> None:
    bench = bench_of()
    chunks = chunks_of(bench)
    bench.run(bench.submit(1, "a===b", sampling=GRAMMAR, pull=True))
    assert (events(bench), chunks) == (["a"], [[7], [1]])
    steps = bench.engine.metrics.steps

    reports = bench.engine.begin_iteration([m.PullToken(1), m.PullToken(1)])

    assert [r.text for r in reports if isinstance(r, m.Tokens)] == [b"=", b"="]
    assert [r.forced for r in reports if isinstance(r, m.Tokens)] == [1, 1]
    assert bench.engine.metrics.steps == steps
    bench.run(m.PullToken(1))
    assert chunks[2:] == [[3]], "all that was pulled meanwhile is one chunk"
    bench.run(m.PullToken(1), m.PullToken(1))
    assert (bench.stats(1).stop_reason, bench.stats(1).forced_tokens) == ("eos", 4)


def test_a_stream_pays_one_event_for_a_chunk_and_stands_still_without_credit() -> None:
    bench = bench_of()
    bench.run(bench.submit(1, "ab==c=d", sampling=GRAMMAR, credit=2))
    assert events(bench) == ["a", "b=="]
    steps = bench.engine.metrics.steps
    bench.run()
    assert bench.engine.metrics.steps == steps, "an unread task was computed on"
    bench.run(m.Credit(1, 1))
    assert events(bench) == ["a", "b==", "c="]
    bench.run(m.Credit(1, 5))
    assert (bench.text(1), bench.stats(1).stop_reason) == (b"ab==c=d", "eos")


def test_a_long_forced_text_comes_in_bounded_parts() -> None:
    bench = bench_of(ctx_size=1024, batch_size=512)
    chunks = chunks_of(bench)

    bench.run(bench.submit(1, "a" + "=" * 300 + "b", sampling=GRAMMAR))

    assert bench.text(1).decode() == "a" + "=" * 300 + "b"
    assert max(map(len, events(bench))) <= 1 + FORCED_MAX
    assert max(max(sizes) for sizes in chunks[2:]) <= 1 + FORCED_MAX
    assert len(chunks) < 12
    assert bench.stats(1).forced_tokens == 301


def test_a_chunk_larger_than_a_batch_is_computed_in_several_steps() -> None:
    bench = bench_of(batch_size=16)
    chunks = chunks_of(bench)
    texts = ["a" + "=" * 40 + "b", "c" * 50]

    bench.run(*(bench.submit(n, text, sampling=GRAMMAR) for n, text in enumerate(texts, 1)))

    assert [bench.text(n).decode() for n in (1, 2)] == texts
    assert max(map(sum, chunks)) <= 16


def test_a_task_parked_with_a_chunk_to_compute_continues_with_it() -> None:
    settings = EngineSettings(quantum_tokens=1)
    bench = bench_of(slots=1, settings=settings)
    chunks = chunks_of(bench)
    bench.iterate(bench.submit(1, "a====b==c", sampling=GRAMMAR))
    while events(bench)[-1:] != ["a===="]:
        bench.iterate()
    before = len(chunks)
    bench.iterate(bench.submit(2, "other"), m.Park(7, 1))
    bench.run()

    assert bench.stats(1).parks >= 1
    assert bench.text(1).decode() == "a====b==c"
    assert [5] in chunks[before:]


def test_tasks_on_trial_compute_each_token_before_the_next() -> None:
    bench = bench_of()
    chunks = chunks_of(bench)
    bench.run(bench.submit(1, "a====b", sampling=GRAMMAR, trial_tokens=4))
    assert events(bench) == ["a", "=", "=", "==", "b"]
    assert [sum(sizes) for sizes in chunks] == [8, 1, 1, 1, 2]


def test_a_turn_that_continues_in_another_worker_forces_the_same_tokens() -> None:
    text = "ab====cd--"
    bench = bench_of()
    prompt = bench.model.tokenize(text.encode(), special=False, bos=True)
    for done in range(1, len(text)):
        answer = bench.model.tokenize(text[:done].encode(), special=False, bos=False)
        point = m.ResumePoint(output_tokens=done, text_bytes=done, forced_tokens=1)
        tokens = m.pack_tokens(prompt + answer)
        spec = m.TaskSpec(
            id=done, owner=Owner(1), tokens=tokens, sampling=GRAMMAR, resume_point=point
        )
        bench.run(m.Submit(spec))
        assert bench.text(done).decode() == text[done:]
        left = 1 + sum(text[done:].count(letter) for letter in "=-")
        assert bench.stats(done).forced_tokens == 1 + left


def test_forced_tokens_do_not_make_sampled_ones_slow() -> None:
    options = EchoOptions(forced="=", sample_ms=1.5)
    bench = Bench(options=options, slots=2)
    bench.engine.clock.cpu = time.thread_time
    slow = bench.engine._answers.slow
    bench.run(bench.submit(1, "abcdefgh" * 4))
    usual = slow.predicted_s
    bench.run(bench.submit(2, "a" + "=" * 40 + "b", sampling=GRAMMAR))
    assert slow.predicted_s > 0.8 * usual


def test_a_step_of_forced_tokens_counts_as_decoding() -> None:
    bench = bench_of()
    bench.run(bench.submit(1, "a====b", sampling=GRAMMAR))
    bench.engine.metrics.publish(at_once=True)
    found = {k: sum(h.counts) for k, h in bench.engine.metrics.page._steps.items()}
    assert found == {"decode": 1, "mixed": 0, "prefill": 1}
