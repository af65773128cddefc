"""Embeddings in the engine, on the echo model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from inferd.backends import EmbedSpec, LanguageModel
from inferd.backends.echo.model import EMBEDDING_SIZE, echo_vectors
from inferd.backends.echo.options import EchoOptions
from inferd.backends.embedder import EMBEDDING_BYTES_MAX, normalized
from inferd.backends.errors import OutOfMemory
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Priority
from tests.scheduler.doubles import Bench


def text(bench: Bench, number: int, words: str = "hello", **fields: object) -> m.Submit:
    return bench.submit(number, words, **{"embed": EmbedSpec(), **fields})


def embedding_of(bench: Bench, number: int) -> m.Embedded:
    [found] = [r for r in bench.reports[number] if isinstance(r, m.Embedded)]
    return found


def vector(bench: Bench, number: int) -> list[float]:
    found = array("f")
    found.frombytes(embedding_of(bench, number).vectors)
    return found.tolist()


def expected(bench: Bench, words: str) -> list[float]:
    rows = echo_vectors(bench.model.tokenize(words.encode(), special=False, bos=True))
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return normalized(mean, 2).tolist()


def steps(bench: Bench, iterations_max: int = 5000) -> Iterator[None]:
    """Iterate until there is nothing left to compute, and yield after each iteration."""
    for _ in range(iterations_max):
        wait_s_max = bench.engine.wait_s_max()
        if wait_s_max is None or wait_s_max > bench.engine.tasks.settings.pull_batch_wait_s:
            return
        bench.now += wait_s_max
        bench.iterate()
        yield
    raise AssertionError("still running")


def test_a_text_becomes_a_vector_and_no_text_is_generated() -> None:
    bench = Bench()

    bench.run(text(bench, 1, "hello"))

    assert vector(bench, 1) == expected(bench, "hello")
    assert (embedding_of(bench, 1).size, embedding_of(bench, 1).pooling) == (EMBEDDING_SIZE, "mean")
    stats = bench.stats(1)
    assert (stats.stop_reason, stats.stop_detail) == ("embedded", "mean")
    assert (stats.prompt_tokens, stats.output_tokens) == (7, 0)
    assert bench.text(1) == b"" and bench.tokens(1) == []


def test_each_request_has_its_own_pooling_and_norm() -> None:
    bench = Bench()
    specs = {1: EmbedSpec("last", -1), 2: EmbedSpec("cls", -1), 3: EmbedSpec("none", -1)}

    bench.run(*(text(bench, n, "hi", embed=spec) for n, spec in specs.items()))

    rows = echo_vectors(bench.model.tokenize(b"hi", special=False, bos=True))
    assert vector(bench, 1) == pytest.approx(rows[-1], rel=1e-6)
    assert vector(bench, 2) == pytest.approx(rows[0], rel=1e-6)
    assert vector(bench, 3) == pytest.approx([x for row in rows for x in row], rel=1e-6)


def test_texts_share_steps_and_more_than_fit_are_all_computed() -> None:
    bench = Bench(ctx_size=100)
    words = [f"text number {n} " + "x" * (n % 30) for n in range(40)]

    bench.run(*(text(bench, n, it) for n, it in enumerate(words)))

    for n, it in enumerate(words):
        assert vector(bench, n) == pytest.approx(expected(bench, it), rel=1e-5)
    assert bench.engine.metrics.steps < 40, "they did not share steps"


def test_a_generation_beside_texts_is_the_same_and_both_advance() -> None:
    bench = Bench(ctx_size=400)
    bench.iterate(bench.submit(1, "a story of words"), text(bench, 2, "y" * 350))
    said_meanwhile = 0
    for _ in steps(bench):
        if bench.end(2) is None:
            said_meanwhile = len(bench.tokens(1))

    assert bench.text(1).decode() == "a story of words"
    assert vector(bench, 2) == pytest.approx(expected(bench, "y" * 350), rel=1e-5)
    assert said_meanwhile > 0, "the stream stood still"
    assert bench.end(2) is not None


@pytest.mark.parametrize("low", ["text", "turn"])
@pytest.mark.parametrize("flood", ["text", "turn"])
def test_neither_texts_nor_turns_starve_beside_a_flood_of_urgent_ones(low: str, flood: str) -> None:
    """The flood has prompts with one token to answer, which alone make others wait, and texts that
    fill the embedding context.
    """
    bench = Bench(
        slots=1,
        ctx_size=64,
        settings=EngineSettings(ageing_tokens=300, quantum_tokens=32, priority_strict=True),
    )

    def task(kind: str, number: int, words: str, **fields: object) -> m.Submit:
        if kind == "text":
            return text(bench, number, words, **fields)
        return bench.submit(number, words, n_predict=1, **fields)

    for number in range(1, 4):
        bench.iterate(
            task(flood, number, f"{number:03}{'z' * 50}", priority=Priority.URGENT, owner=2)
        )
    bench.iterate(task(low, 0, "the last one", priority=Priority.LOW))
    waited = 0
    while bench.end(0) is None:
        waited += 1
        assert waited < 200, "it starved"
        number += 1
        bench.iterate(
            task(flood, number, f"{number:03}{'z' * 50}", priority=Priority.URGENT, owner=2)
        )
    if low == flood:
        assert waited > 10, "it ran before it had aged"


def test_an_urgent_text_displaces_a_long_one_that_fills_the_context() -> None:
    bench = Bench(ctx_size=256)
    long, short = "a" * 250, "now"
    bench.iterate(text(bench, 1, long, priority=Priority.LOW))
    bench.iterate(text(bench, 2, short, priority=Priority.URGENT))
    bench.run()

    assert bench.order[:2] == [1, 2]
    ends = {n: [type(r).__name__ for r in bench.reports[n]] for n in (1, 2)}
    assert ends[1].count("StateChanged") == 3, "it was dropped and resumed"
    assert vector(bench, 1) == pytest.approx(expected(bench, long), rel=1e-5)
    assert vector(bench, 2) == pytest.approx(expected(bench, short), rel=1e-5)
    assert bench.stats(1).parks == 1


def test_a_cancelled_text_frees_its_space_at_once() -> None:
    bench = Bench(ctx_size=256)
    bench.iterate(text(bench, 1, "a" * 250), text(bench, 2, "b" * 250))
    assert bench.end(1) is None

    bench.iterate(m.Cancel(1))
    assert bench.error(1) == "Cancelled"
    bench.run()
    assert vector(bench, 2) == pytest.approx(expected(bench, "b" * 250), rel=1e-5)


def test_a_waiting_text_times_out() -> None:
    bench = Bench(ctx_size=256)
    bench.iterate(text(bench, 1, "a" * 250), text(bench, 2, "b" * 250, queue_timeout_s=1.0))
    bench.now += 2.0
    bench.iterate()

    assert bench.error(2) == "Timeout"


def test_a_text_that_is_too_long_is_refused_with_both_numbers() -> None:
    bench = Bench(ctx_size=64)
    bench.run(text(bench, 1, "x" * 62), text(bench, 2, "x" * 63))

    assert bench.stats(1).prompt_tokens == 64
    end = bench.end(2)
    assert isinstance(end, m.Failed)
    assert end.error["name"] == "PromptTooLong"
    assert end.error["data"] == {"prompt_tokens": 65, "ctx_size": 64}


def test_vectors_larger_than_an_answer_are_refused_with_both_numbers() -> None:
    tokens = EMBEDDING_BYTES_MAX // (4 * EMBEDDING_SIZE)
    bench = Bench(ctx_size=tokens + 1, batch_size=512)
    none = EmbedSpec("none")
    bench.iterate(text(bench, 1, "x" * (tokens - 1), embed=none))

    end = bench.end(1)
    assert isinstance(end, m.Failed)
    assert end.error["name"] == "TooLarge"
    assert end.error["data"]["bytes"] == EMBEDDING_BYTES_MAX + 4 * EMBEDDING_SIZE


def test_an_embedding_that_the_model_cannot_make_is_refused() -> None:
    bench = Bench()
    bench.run(text(bench, 1, embed=EmbedSpec("rank")))

    assert bench.error(1) == "UnsupportedOperation"


def test_a_failed_step_fails_its_texts_and_no_others() -> None:
    bench = Bench(options=EchoOptions(fail_at_step=1))
    bench.run(text(bench, 1, "first"))
    bench.run(text(bench, 2, "second"))

    assert bench.error(1) == "RuntimeError"
    assert vector(bench, 2) == expected(bench, "second")


def test_without_memory_texts_fail_and_turns_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()

    def refuse(_: LanguageModel) -> None:
        raise OutOfMemory("no context")

    monkeypatch.setattr(type(bench.model), "embedder", refuse)
    bench.run(text(bench, 1, "first"), text(bench, 2, "second"), bench.submit(3, "third"))

    assert bench.error(1) == bench.error(2) == "MissingMemory"
    assert bench.text(3) == b"third"


def test_a_text_that_another_worker_had_begun_is_computed_from_its_start() -> None:
    bench = Bench()
    bench.run(text(bench, 1, "hello", resume_point=m.ResumePoint(age_s=3.0, started_s=1.0)))

    assert vector(bench, 1) == expected(bench, "hello")
    assert bench.stats(1).queue_ms == pytest.approx(1000.0)


def test_texts_are_listed_in_the_queue_with_their_places() -> None:
    bench = Bench(ctx_size=256)
    bench.iterate(*(text(bench, n, "a" * 250) for n in (1, 2, 3)))
    [answer] = [r for r in bench.iterate(m.Queue(9)) if isinstance(r, m.CommandResult)]

    assert [(e.task_id, e.state, e.position) for e in answer.value] == [
        (1, "running", 0),
        (2, "waiting", 1),
        (3, "waiting", 2),
    ]


def test_owners_share_fairly() -> None:
    bench = Bench(ctx_size=64)
    busy = [text(bench, n, "a" * 60, owner=1) for n in range(6)]
    bench.iterate(*busy)
    bench.iterate()
    bench.run(text(bench, 9, "b" * 60, owner=2))

    assert bench.order.index(9) <= 2


# Texts that share a prefix.

RANKS = EchoOptions(ranks=True)
QUERY = "q" * 100


def ranked(bench: Bench, number: int, words: str, **fields: object) -> m.Submit:
    """Return a text of which the first tokens are those of `QUERY`, and a mark."""
    return text(bench, number, QUERY + words, embed=EmbedSpec(shared=101), **fields)


def ranks_of(bench: Bench, texts: dict[int, str]) -> None:
    """Check the scores of *texts* against those that the model computes of each alone."""
    for number, words in texts.items():
        alone = Bench(options=RANKS, ctx_size=1000)
        alone.run(text(alone, 1, QUERY + words))
        assert vector(bench, number) == pytest.approx(vector(alone, 1), rel=1e-6)


def test_a_prefix_is_computed_once_for_all_texts_that_share_it() -> None:
    bench = Bench(options=RANKS, ctx_size=4000)
    texts = {n: f" text {n} " + "x" * n for n in range(40)}

    bench.run(*(ranked(bench, n, words) for n, words in texts.items()))

    ranks_of(bench, texts)
    rest = sum(len(words) + 1 for words in texts.values())  # each ends with a mark
    assert bench.engine.metrics.counts["embedded"] == 101 + rest
    cached = [bench.stats(n).cached_tokens for n in texts]
    assert sorted(cached) == [0] + [101] * 39
    bench.run(ranked(bench, 40, "later"))
    assert bench.stats(40).cached_tokens == 101


def test_a_prefix_serves_no_other_user() -> None:
    bench = Bench(options=RANKS, ctx_size=1000)
    bench.run(ranked(bench, 1, "one"))
    bench.run(ranked(bench, 2, "one", owner=2))
    assert bench.stats(2).cached_tokens == 0
    assert vector(bench, 1) == vector(bench, 2)


def test_if_the_leader_is_cancelled_another_text_computes_the_prefix() -> None:
    bench = Bench(options=RANKS, ctx_size=1000)
    texts = {n: f" text {n}" for n in range(1, 4)}
    bench.iterate(*(ranked(bench, n, words) for n, words in texts.items()))
    bench.iterate(m.Cancel(1))
    bench.run()

    ranks_of(bench, {2: texts[2], 3: texts[3]})
    assert sorted(bench.stats(n).cached_tokens for n in (2, 3)) == [0, 101]


def test_prefixes_give_way_to_texts_that_need_their_cells_and_to_newer_ones() -> None:
    bench = Bench(options=RANKS, ctx_size=320)
    bench.run(ranked(bench, 1, "one"), ranked(bench, 2, "two"))
    bench.run(text(bench, 3, "y" * 318))
    assert bench.stats(3).prompt_tokens == 320
    bench.run(ranked(bench, 4, "one"))
    assert bench.stats(4).cached_tokens == 0, "it was dropped for the text that fills the context"
    for number in range(5, 9):  # each has a prefix of its own
        spec = EmbedSpec(shared=50)
        bench.run(text(bench, number, f"{number}" * 60, embed=spec))
    bench.run(ranked(bench, 9, "one"))
    assert bench.stats(9).cached_tokens == 1, "the mark with which all texts begin"
    ranks_of(bench, {1: "one", 2: "two", 4: "one", 9: "one"})


def test_texts_whose_prefix_cannot_be_kept_are_computed_whole() -> None:
    bench = Bench(options=RANKS, ctx_size=240)  # two texts, and too few cells for their prefix
    texts = {n: f"text {n}" for n in range(1, 5)}
    bench.run(*(ranked(bench, n, words) for n, words in texts.items()))
    ranks_of(bench, texts)


def test_a_text_of_prefix_alone_computes_its_last_token() -> None:
    bench = Bench(options=RANKS, ctx_size=1000)
    spec = EmbedSpec(shared=500)
    bench.run(text(bench, 1, QUERY, embed=spec))
    bench.run(text(bench, 2, QUERY, embed=spec))
    assert bench.stats(2).cached_tokens == 101, "all but the last of 102"
    assert vector(bench, 1) == vector(bench, 2)


def test_a_failed_step_loses_no_prefix_and_no_text_waits_for_a_failed_one() -> None:
    bench = Bench(options=EchoOptions(ranks=True, fail_at_step=1), ctx_size=1000)
    texts = {n: f" text {n}" for n in range(1, 4)}
    bench.run(*(ranked(bench, n, words) for n, words in texts.items()))
    failed = [n for n in texts if any(isinstance(r, m.Failed) for r in bench.reports[n])]
    assert len(failed) == 1
    ranks_of(bench, {n: words for n, words in texts.items() if n not in failed})


def test_without_shared_tokens_texts_of_a_reranker_are_computed_whole() -> None:
    bench = Bench(options=RANKS, ctx_size=1000)
    bench.run(text(bench, 1, QUERY), text(bench, 2, QUERY))
    assert bench.stats(1).cached_tokens == bench.stats(2).cached_tokens == 0


def test_texts_that_begin_with_a_part_of_a_kept_prefix_compute_the_rest_once() -> None:
    bench = Bench(options=RANKS, ctx_size=2000)
    bench.run(ranked(bench, 1, "one"))
    before = bench.engine.metrics.counts["embedded"]
    other = QUERY[:50] + "z" * 50
    spec = EmbedSpec(shared=101)

    bench.run(*(text(bench, n, f"{other}{n}", embed=spec) for n in range(2, 8)))

    assert bench.engine.metrics.counts["embedded"] - before == 50 + 6 * 2
    assert sorted(bench.stats(n).cached_tokens for n in range(2, 8)) == [51] + [101] * 5
