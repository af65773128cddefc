"""Drafts of a draft model: it follows the slots, catches up where that pays, and may fail.

The echo model's draft model errs as its options say. Steps take times that the tests set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from inferd.backends import Chunk
from inferd.backends.echo.draft import EchoDraftModel
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.drafting.model_drafter import FIRST_TOKENS, LAG_MAX
from inferd.scheduler.owner import Priority
from inferd.scheduler.record import ActivityKind
from tests.scheduler.doubles import Bench

TEXT = "the quick brown fox jumps over the lazy dog, which sleeps; " * 2
STEP_S = 0.01
LONG = TEXT * 12


class Timed:
    """A bench whose steps take `STEP_S` for each pass of a length, whatever the number of tokens,
    and whose draft model takes *draft_s* for a step and *token_s* for each token of it.
    """

    def __init__(
        self, errs: int = 0, draft_s: float = 1e-5, token_s: float = 0.0, **fields: object
    ):
        values = {"ctx_size": 4096, "options": EchoOptions(draft_errs=errs)} | fields
        self.bench = Bench(**values)  # type: ignore[arg-type]
        assert self.bench.model.draft is not None
        self.draft: EchoDraftModel = self.bench.model.draft
        self.drafting_s = self.stepping_s = 0.0
        self.shares: list[tuple[int, ...]] = []
        """The number of tokens in each slot, by step of the draft model."""
        step, compute = self.bench.model.step, self.draft.compute

        def timed_step(chunks: Sequence[Chunk]) -> None:
            seconds = STEP_S * len({len(chunk.tokens) for chunk in chunks})
            self.bench.now += seconds
            self.stepping_s += seconds
            step(chunks)

        def timed_compute(chunks: Sequence[Chunk]) -> list[int]:
            seconds = draft_s + token_s * sum(len(c.tokens) for c in chunks)
            self.bench.now += seconds
            self.drafting_s += seconds
            self.shares.append(tuple(len(chunk.tokens) for chunk in chunks))
            return compute(chunks)

        self.bench.model.step = timed_step  # type: ignore[method-assign]
        self.draft.compute = timed_compute  # type: ignore[method-assign]
        _timed.append(self)

    def run(self, number: int = 1, text: str = TEXT, **fields: object) -> m.TurnStats:
        fields = {"speculation": "draft", "n_predict": -1} | fields
        self.bench.run(self.bench.submit(number, text, **fields))
        assert self.bench.text(number).decode() == text
        return self.bench.stats(number)


_timed: list[Timed] = []


@pytest.fixture(autouse=True)
def closed_benches() -> Iterator[None]:
    yield
    while _timed:
        _timed.pop().bench.model.close()


@pytest.mark.parametrize(("errs", "accepted"), [(0, 0.99), (5, 0.2), (1, 0.0)])
def test_a_step_has_the_draft_models_drafts(errs: int, accepted: float) -> None:
    timed = Timed(errs)
    stats = timed.run(text=LONG)
    assert stats.drafted_tokens > 3
    share = stats.accepted_tokens / stats.drafted_tokens
    assert share >= accepted and (share < 0.9 or errs == 0)
    steps = timed.bench.engine.metrics.steps
    assert (steps < len(LONG) / 2) == (errs != 1)
    counts = timed.bench.engine.metrics.counts
    assert counts["drafted_draft"] == stats.drafted_tokens


@pytest.mark.parametrize("errs", [0, 2, 5])
def test_a_draft_model_whose_states_cannot_be_cut_goes_back(errs: int) -> None:
    """It computes no more than the accepted tokens again."""
    timed = Timed(options=EchoOptions(draft_errs=errs, draft_whole=True))
    stats = timed.run(text=LONG)
    again = timed.draft.computed - 2 * len(LONG)
    assert stats.accepted_tokens > (0 if errs == 2 else len(LONG) / 4)
    assert again <= stats.drafted_tokens + stats.accepted_tokens + 20
    assert max(map(max, timed.shares[-40:])) <= LAG_MAX


def test_streams_are_drafted_together() -> None:
    timed = Timed(slots=3)
    texts = {1: TEXT, 2: TEXT.upper(), 3: TEXT[::-1]}
    bench = timed.bench
    bench.run(*(bench.submit(n, text, speculation="draft") for n, text in texts.items()))
    assert {n: bench.text(n).decode() for n in texts} == texts
    assert all(bench.stats(n).accepted_tokens > len(TEXT) / 2 for n in texts)
    assert (1, 1, 1) in timed.shares


def test_a_draft_model_that_takes_as_long_as_the_model_is_hardly_used() -> None:
    """It may always be right: its time is part of what a draft is expected to gain."""
    timed = Timed(draft_s=STEP_S)
    stats = timed.run(text=LONG)
    assert stats.drafted_tokens <= 4  # before the time of a draft is known
    assert timed.drafting_s < 0.05 * timed.stepping_s


def test_a_draft_model_that_errs_takes_hardly_any_time() -> None:
    timed = Timed(errs=1, draft_s=STEP_S / 20, token_s=STEP_S / 200)
    timed.run(text=LONG, owner=1)
    first = timed.drafting_s / timed.stepping_s
    timed.drafting_s = timed.stepping_s = 0.0
    stats = timed.run(2, text=LONG, owner=2)
    assert first < 0.3 and timed.drafting_s < 0.05 * timed.stepping_s
    assert stats.accepted_tokens == 0


def test_a_long_prompt_of_a_short_answer_is_not_computed_again() -> None:
    """The draft model needs longer for the prompt than it can save."""
    timed = Timed(draft_s=STEP_S / 10, token_s=STEP_S / 20)
    timed.bench.run(timed.bench.submit(1, LONG, speculation="draft", n_predict=20))
    assert timed.draft.computed <= FIRST_TOKENS
    timed.bench.run(timed.bench.submit(2, LONG, speculation="draft", n_predict=1000))
    assert timed.bench.stats(2).accepted_tokens > 500


def test_a_long_prompt_is_computed_in_parts_between_the_steps() -> None:
    timed = Timed(token_s=STEP_S / 10, batch_size=512)
    target_s = timed.bench.engine.tasks.settings.step_s_target
    timed.run(text=LONG)
    parts = [sizes for sizes in timed.shares if max(sizes) > 17]
    assert sum(map(sum, parts)) > len(LONG) - 20 and len(parts) > 5
    assert max(map(sum, parts)) * STEP_S / 10 <= target_s


def test_other_streams_do_not_wait_for_a_draft_model() -> None:
    """Beside a stream without drafts, it catches up in 2 % of the time."""
    timed = Timed(token_s=STEP_S / 10, slots=2)
    bench = timed.bench
    bench.iterate(bench.submit(1, LONG, speculation="off"))
    for _ in range(30):
        bench.iterate()
    timed.drafting_s = timed.stepping_s = 0.0
    bench.iterate(bench.submit(2, LONG, speculation="draft"))
    for _ in range(400):
        bench.iterate()
    assert bench.end(1) is None and bench.end(2) is None
    assert timed.drafting_s < 0.03 * timed.stepping_s
    bench.run()
    assert bench.text(1) == bench.text(2) == LONG.encode()


def test_it_does_not_catch_up_while_tasks_wait() -> None:
    timed = Timed(slots=1)
    bench = timed.bench
    bench.run(*(bench.submit(n, TEXT, speculation="draft", owner=1) for n in (1, 2)))
    assert not bench.stats(1).drafted_tokens and bench.stats(2).drafted_tokens


def test_parked_and_moved_streams_are_drafted_again() -> None:
    timed = Timed(slots=2, settings=EngineSettings(quantum_tokens=64), ctx_size=512)
    bench = timed.bench
    texts = {n: f"{n}: {TEXT}"[:200] for n in range(1, 6)}
    bench.run(
        *(
            bench.submit(n, text, speculation="draft", priority=Priority.NORMAL, owner=n)
            for n, text in texts.items()
        )
    )
    assert {n: bench.text(n).decode() for n in texts} == texts
    assert sum(bench.stats(n).parks for n in texts) > 2
    last = bench.engine.speculation.by_model.drafter
    assert all(held.task_id in texts for held in last._held.values())


def test_the_next_turn_of_a_session_finds_its_tokens() -> None:
    """Another user's turn in the slot does not."""
    timed = Timed(slots=1)
    timed.run(1, LONG, session="s", owner=1)
    timed.draft.computed = 0
    timed.run(2, LONG, session="s", owner=1)
    assert timed.draft.computed < len(LONG) * 1.2
    timed.draft.computed = 0
    timed.run(3, LONG, session="s", owner=2)
    assert timed.draft.computed > len(LONG) * 1.9


def test_states_that_nobody_may_use_are_dropped() -> None:
    timed = Timed(slots=1)
    timed.run(1, session="s", owner=1)
    assert timed.draft.slots[0]
    timed.bench.run(timed.bench.submit(2, TEXT, speculation="off", owner=2))
    assert not timed.draft.slots[0] and not timed.bench.engine.speculation.by_model.drafter._held


def test_a_shifted_context_is_drafted_on() -> None:
    timed = Timed(ctx_size=256, slots=1)
    bench = timed.bench
    spec = bench.spec(1, TEXT + TEXT[:60], speculation="draft", ctx_shift=True)
    bench.run(m.Submit(spec))
    plain = Bench(ctx_size=256, slots=1)
    plain.run(m.Submit(msgspec.structs.replace(spec, speculation="off")))
    assert bench.stats(1).shifts and bench.text(1) == plain.text(1)
    assert bench.stats(1).drafted_tokens
    plain.model.close()


@pytest.mark.parametrize("ctx_size", [len(TEXT) + 40, len(TEXT) + 70])
def test_a_context_that_is_full_within_a_draft(ctx_size: int) -> None:
    timed = Timed(slots=1, ctx_size=ctx_size)
    bench = timed.bench
    bench.run(bench.submit(1, TEXT, speculation="draft"))
    assert bench.stats(1).stop_reason == "context_full" and bench.stats(1).drafted_tokens
    assert bench.text(1).decode() == TEXT[: len(bench.text(1))]
    assert bench.stats(1).prompt_tokens + bench.stats(1).output_tokens == ctx_size


def test_a_smaller_context_of_the_draft_model() -> None:
    timed = Timed(slots=1)
    timed.draft.ctx_size = len(TEXT) + 60
    stats = timed.run()
    assert stats.drafted_tokens and max(map(len, timed.draft.slots)) <= timed.draft.ctx_size


def test_tokens_that_the_draft_model_does_not_know() -> None:
    timed = Timed(slots=1)
    timed.draft.vocab_size = ord("z")
    assert timed.run(1, "abcdefgh" * 10).drafted_tokens == 0  # marks of the prompt are greater
    assert not timed.draft.computed


def test_nothing_is_drafted_behind_the_end() -> None:
    timed = Timed(slots=1)
    stats = timed.run()
    assert stats.stop_reason == "eos"
    assert stats.drafted_tokens - stats.accepted_tokens <= 1


def test_a_step_of_the_draft_model_names_its_tasks() -> None:
    """If the process dies in it, these tasks are suspects, as in a step of the model."""
    timed = Timed(slots=2)
    recorder = timed.bench.engine.metrics.recorder
    compute, seen = timed.draft.compute, set()

    def recorded(chunks: Sequence[Chunk]) -> list[int]:
        activity = recorder.read_activity()
        seen.add((activity.kind, activity.ids))
        return compute(chunks)

    timed.draft.compute = recorded  # type: ignore[method-assign]
    timed.run(7)
    assert seen == {(ActivityKind.STEP, (7,))}


@pytest.mark.parametrize("step", [1, 2, 9])
def test_a_draft_model_that_fails_ends_no_turn(step: int) -> None:
    """Turns go on without it, as with `auto`; the log has the reason."""
    timed = Timed(options=EchoOptions(draft_errs=0, draft_fail_at=step))
    bench = timed.bench
    events: list[m.LogEvent] = []
    bench.on_report = lambda r: events.append(r) if isinstance(r, m.LogEvent) else None
    bench.iterate(m.Logging(levels={"backends": "error"}))
    timed.run()
    assert [event.event for event in events] == ["draft_model.failed"]
    assert "draft_fail_at" in events[0].fields["cause"]
    assert "draft_fail_at" in bench.engine.statistics()["draft_model_error"]
    assert timed.run(2).drafted_tokens == 0


def test_a_stream_that_is_cancelled_between_two_steps() -> None:
    timed = Timed(slots=1)
    bench = timed.bench
    bench.iterate(bench.submit(1, LONG, speculation="draft"))
    while not bench.tokens(1) or len(bench.tokens(1)) < 40:
        bench.iterate()
    bench.iterate(m.Cancel(1))
    assert len(timed.draft.slots[0]) > len(LONG)
    timed.run(2, TEXT, owner=2)
    assert not any(stream for stream in bench.engine.speculation._streams)


def test_its_time_counts_to_the_users_share() -> None:
    totals = []
    for token_s in (0.0, STEP_S / 10):
        timed = Timed(token_s=token_s)
        timed.run(text=LONG)
        totals.append(timed.bench.engine.tasks.owners.exchange_users({}, [], 1)[1])
    assert totals[1] > totals[0] * 1.1


def test_without_a_draft_model_the_drafter_is_that_of_auto() -> None:
    bench = Bench()
    bench.run(bench.submit(1, TEXT, speculation="draft"))
    assert bench.text(1).decode() == TEXT and not bench.stats(1).drafted_tokens
    bench.model.close()


def test_a_turn_with_an_image_has_no_drafts_by_it() -> None:
    """The draft model reads none, and has no state for the text behind it."""
    timed = Timed(options=EchoOptions(draft_errs=0, media=True))
    bench = timed.bench
    bench.iterate(bench.submit(1, TEXT, speculation="draft"))
    task = bench.engine.slots.tasks[0]
    drafter = bench.engine.speculation.by_model.drafter
    assert drafter.drafts_max(task) > 100
    task.media = {5: object()}  # type: ignore[dict-item]
    assert drafter.drafts_max(task) == 0
    task.media = {}
    bench.run()
    assert bench.text(1).decode() == TEXT


def test_a_session_that_is_deleted_leaves_nothing() -> None:
    timed = Timed(slots=1)
    timed.run(1, session="s", owner=1)
    assert timed.draft.slots[0]
    timed.bench.engine.speculation.forget_session(1, "other")
    assert timed.draft.slots[0]
    timed.bench.engine.speculation.forget_session(1, "s")
    assert not timed.draft.slots[0]
