"""Bounds of reasoning on the echo model, which repeats its prompt and has a token for each byte. A
forced end counts as part of what it repeats, so the text behind it misses as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from inferd.backends import Chunk, SamplingParams
from inferd.backends.answer_form import THINK, Block
from inferd.backends.echo.options import EchoOptions
from inferd.backends.params import StoppingParams
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from tests.scheduler.doubles import Bench

END = "</think>"
CHANNELS = (Block(begin="<a>", end="</a>", anywhere=True),)


def bounded(budget: int = -1, **fields: object) -> m.ReasoningSpec:
    return m.ReasoningSpec(blocks=(THINK,), budget=budget, **fields)  # type: ignore[arg-type]


def repeated(text: str, at: int, end: str = END) -> str:
    """Return the answer to *text* in which *end* is forced before the byte *at*."""
    return text[:at] + end + text[at + len(end) :]


def chunks_of(bench: Bench) -> list[int]:
    """Return the sizes of each step's only chunk from now on."""
    sizes: list[int] = []
    step = bench.model.step

    def recorded(chunks: Sequence[Chunk]) -> None:
        sizes.append(sum(len(chunk.tokens) for chunk in chunks))
        step(chunks)

    bench.model.step = recorded  # type: ignore[method-assign]
    return sizes


def answer(text: str, reasoning: m.ReasoningSpec, **fields: object) -> tuple[str, Bench]:
    bench = Bench()
    bench.run(bench.submit(1, text, reasoning=reasoning, **fields))
    return bench.text(1).decode(), bench


THOUGHT = "<think>0123456789abcdefgh</think>The answer is long enough."


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_ends_after_its_budget(budget: int) -> None:
    text, bench = answer(THOUGHT, bounded(budget))
    stats = bench.stats(1)
    assert text == repeated(THOUGHT, len("<think>") + budget)
    assert stats.reasoning_tokens == budget + len(END)
    assert (stats.forced_tokens, stats.output_tokens) == (len(END), len(THOUGHT) + 1)
    assert bench.engine.metrics.counts["forced"] == len(END)


@pytest.mark.parametrize("budget", [-1, 26, 1000])
def test_a_thought_that_ends_within_its_budget_is_not_changed(budget: int) -> None:
    text, bench = answer(THOUGHT, bounded(budget))
    assert (text, bench.stats(1).forced_tokens) == (THOUGHT, 0)
    assert bench.stats(1).reasoning_tokens == len("0123456789abcdefgh</think>")


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_that_the_template_has_begun_is_bounded(budget: int) -> None:
    text, _ = answer("thoughts and more thoughts", bounded(budget, opened="<think>\n"))
    assert text == repeated("thoughts and more thoughts", budget)


def test_an_answer_without_reasoning_is_not_changed() -> None:
    text, bench = answer("just an answer", bounded(0))
    assert (text, bench.stats(1).reasoning_tokens) == ("just an answer", 0)


def test_the_end_and_its_message_are_one_chunk_and_one_event() -> None:
    bench = Bench()
    sizes = chunks_of(bench)
    bench.run(bench.submit(1, THOUGHT, reasoning=bounded(3, message=" Enough.")))
    end = " Enough." + END
    assert bench.text(1).decode() == repeated(THOUGHT, len("<think>") + 3, end)
    events = [r for r in bench.reports[1] if isinstance(r, m.Tokens)]
    assert [(r.text.decode(), r.forced, r.ending_left) for r in events][9:11] == [
        ("2" + end, len(end), 0),
        (THOUGHT[len("<think>012" + end)], 0, 0),
    ]
    prompt, *answer_sizes = sizes[sizes.index(1) - 1 :]
    assert prompt > 1
    assert answer_sizes[:11] == [*[1] * 9, 1 + len(end), 1], "the last token and the end"


def test_the_end_waits_for_a_whole_character() -> None:
    text = "<think>a€uro and more of it</think>The answer."
    for budget in (1, 2, 3, 4):
        found, bench = answer(text, bounded(budget))
        whole = "<think>a" if budget == 1 else "<think>a€"
        assert found.startswith(whole + END)
        assert bench.stats(1).reasoning_tokens == len(whole.encode()) - 7 + len(END)


def test_the_end_does_not_wait_forever_for_a_whole_character() -> None:
    # Each byte begins a character that the next one does not complete.
    text = b"<think>" + b"\xe2" * 40 + b"</think>The answer"
    bench = Bench()
    bench.run(bench.submit(1, text, reasoning=bounded(2)))
    assert bench.stats(1).forced_tokens == len(END)
    assert bench.stats(1).reasoning_tokens <= 2 + 8 + len(END)


def test_each_thought_has_the_whole_budget() -> None:
    text = "<think>0123456789012</think>one <think>abcdefghijklmn</think>two and three"
    found, bench = answer(text, bounded(3))
    first = repeated(text, len("<think>012"))
    second = first.index("<think>", 7) + len("<think>abc")
    assert found == repeated(first, second)
    assert bench.stats(1).forced_tokens == 2 * len(END)


def test_a_begin_in_a_tool_call_is_the_calls_text() -> None:
    text = "<think>0123456</think><call>{<think>0123456789}</call>"
    found, bench = answer(text, bounded(4, calls=("<call>",)))
    assert (found, bench.stats(1).forced_tokens) == (repeated(text, len("<think>0123")), 8)


def test_a_block_that_another_one_ends_is_not_bounded_any_more() -> None:
    text = "<a>012<b>a text that is longer than the budget"
    found, bench = answer(text, m.ReasoningSpec(blocks=CHANNELS, contents=("<b>",), budget=6))
    assert (found, bench.stats(1).reasoning_tokens) == (text, len("012<b>"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n_predict": 12}, "length"),
        ({"stop": ("</th",)}, "stop"),
        ({"stopping": StoppingParams(stop_tokens=(ord("/"),))}, "token"),
        ({"ctx_size": 75}, "context_full"),
    ],
)
def test_a_turn_can_end_within_the_forced_end(fields: dict[str, object], reason: str) -> None:
    text, bench = answer(THOUGHT, bounded(3), **fields)
    assert bench.stats(1).stop_reason == reason
    assert ("<think>012" + END).startswith(text)
    slot = bench.engine.slots.slots[0]
    assert len(slot.tokens) <= 2 + len(THOUGHT) + bench.stats(1).output_tokens


def test_surprisals_and_probabilities_stay_those_of_their_tokens() -> None:
    stopping = StoppingParams(stop_surprisal=5.0, stop_surprisal_window=4)
    text, bench = answer(THOUGHT, bounded(3), stopping=stopping)
    assert text == repeated(THOUGHT, len("<think>012"))
    text, bench = answer(THOUGHT, bounded(3), sampling=SamplingParams(n_probs=1))
    assert text == repeated(THOUGHT, len("<think>012"))
    found = [p for r in bench.reports[1] if isinstance(r, m.Tokens) for p in r.logprobs]
    assert b"".join(p.piece for p in found).decode() == text
    assert [len(p.top) for p in found][10:18] == [0] * len(END)
    assert math.isclose(sum(p.value for p in found), 0.0)


def test_a_shifted_context_gets_the_end_token_by_token() -> None:
    text = "<think>" + "0123456789" * 3 + "</think>" + "answer " * 6
    bench = Bench(ctx_size=110)
    bench.run(bench.submit(1, text, reasoning=bounded(20), ctx_shift=True, n_keep=-1, n_discard=4))
    assert bench.stats(1).shifts > 0
    assert bench.text(1).decode().startswith("<think>0123456789")
    assert bench.text(1).decode()[27:].startswith(END), "20 tokens of the thought, then its end"
    assert bench.stats(1).forced_tokens == len(END)


def test_a_pull_reader_gets_the_end_token_by_token() -> None:
    bench = Bench()
    bench.run(bench.submit(1, THOUGHT, reasoning=bounded(2), pull=True))
    while bench.end(1) is None:
        bench.run(m.PullToken(1))
    events = [r for r in bench.reports[1] if isinstance(r, m.Tokens)]
    assert b"".join(r.text for r in events).decode() == repeated(THOUGHT, len("<think>01"))
    assert all(len(r.tokens) == 1 for r in events)
    assert [r.ending_left for r in events][8:17] == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_a_stream_without_credit_gets_the_end_later() -> None:
    bench = Bench()
    bench.run(bench.submit(1, THOUGHT, reasoning=bounded(0), credit=7))
    bench.run(m.Credit(1, 100))
    assert bench.text(1).decode() == repeated(THOUGHT, len("<think>"))


def test_a_task_parked_within_the_end_continues_with_it() -> None:
    bench = Bench(slots=1, settings=EngineSettings(quantum_tokens=1))
    bench.iterate(bench.submit(1, THOUGHT, reasoning=bounded(4), pull=True))
    while (
        b"".join(r.text for r in bench.reports[1] if isinstance(r, m.Tokens)) != b"<think>0123</t"
    ):
        bench.iterate(m.PullToken(1))
    bench.iterate(bench.submit(2, "other"), m.Park(7, 1))
    bench.run()
    assert bench.text(2) == b"other"
    while bench.end(1) is None:
        bench.run(m.PullToken(1))
    assert bench.stats(1).parks >= 1
    assert bench.text(1).decode() == repeated(THOUGHT, len("<think>0123"))


def test_a_task_can_be_cancelled_within_the_end() -> None:
    bench = Bench()
    bench.run(bench.submit(1, THOUGHT, reasoning=bounded(0), pull=True))
    for _ in range(8):
        bench.run(m.PullToken(1))
    assert bench.tokens(1)[-1:] == [ord("/")]
    bench.run(m.Cancel(1), m.PullToken(1))
    assert bench.error(1) == "Cancelled"
    bench.run(bench.submit(2, "next"))
    assert bench.text(2) == b"next"


@pytest.mark.parametrize("requested_at", [None, 9, 12])
def test_a_turn_that_continues_in_another_worker_ends_its_reasoning_alike(
    requested_at: int | None,
) -> None:
    """At each token of the answer, the reader has the number of tokens of the end that follow."""
    bench = Bench()
    reasoning = bounded(5 if requested_at is None else -1, message=" so")
    bench.run(bench.submit(1, THOUGHT, reasoning=reasoning, pull=True))
    while bench.end(1) is None:
        request = [m.EndReasoning(9, 1)] if len(bench.tokens(1)) == requested_at else []
        bench.run(*request, m.PullToken(1))
    whole = [r for r in bench.reports[1] if isinstance(r, m.Tokens)]
    text = b"".join(r.text for r in whole)
    assert text.decode() == repeated(THOUGHT, requested_at or 12, " so" + END)
    prompt = bench.model.tokenize(THOUGHT.encode(), special=False, bos=True)
    for done in range(1, len(whole)):
        point = m.ResumePoint(
            output_tokens=done, text_bytes=done, ending_left=whole[done - 1].ending_left
        )
        tokens = m.pack_tokens(prompt + bench.tokens(1)[:done])
        bench.run(
            m.Submit(
                m.TaskSpec(
                    id=100 + done,
                    owner=Owner(1),
                    tokens=tokens,
                    sampling=SamplingParams(),
                    reasoning=reasoning,
                    resume_point=point,
                )
            )
        )
        if requested_at is None or done >= requested_at + 1:
            assert bench.text(100 + done) == text[done:]
            assert bench.stats(100 + done).reasoning_tokens == bench.stats(1).reasoning_tokens


def test_the_grammar_begins_behind_the_reasoning_that_the_template_has_begun() -> None:
    # The echo model forces `=` once its grammar has begun.
    bench = Bench(options=EchoOptions(forced="="))
    grammar = SamplingParams(grammar="root ::= .*")
    reasoning = bounded(4, opened="<think>", rests_grammar=True)
    bench.run(bench.submit(1, "a===" + "12345678" + "b===c", reasoning=reasoning, sampling=grammar))
    events = [r.text.decode() for r in bench.reports[1] if isinstance(r, m.Tokens)]
    assert events == ["a", "=", "=", "=" + END, "b===", "c"]


class Requests:
    """Requests to end the reasoning of task 1 of *bench*."""

    def __init__(self, bench: Bench):
        self._bench = bench

    def end(self, task: int = 1) -> object:
        reports = self._bench.iterate(m.EndReasoning(77, task))
        [result] = [
            r for r in reports if isinstance(r, (m.CommandResult, m.Refused)) and r.id == 77
        ]
        return result.value if isinstance(result, m.CommandResult) else result.error["name"]


def test_a_request_ends_the_present_thought() -> None:
    bench = Bench()
    bench.iterate(bench.submit(1, THOUGHT, reasoning=bounded(message="!")))
    while len(bench.tokens(1)) < 9:
        bench.iterate()
    assert Requests(bench).end() == "ended"
    assert bytes(bench.tokens(1)).startswith(b"<think>01!</think>"), "in the same iteration"
    bench.run()
    assert bench.text(1).decode() == repeated(THOUGHT, 9, "!" + END)


def test_a_request_beside_reasoning_has_no_effect() -> None:
    bench = Bench()
    requests = Requests(bench)
    assert requests.end(5) == "not_reasoning"
    bench.iterate(bench.submit(1, "x" + THOUGHT, reasoning=bounded()))
    assert requests.end() == "not_reasoning", "before the begin"
    while not bytes(bench.tokens(1)).endswith(b"</think>"):
        bench.iterate()
    assert requests.end() == "not_reasoning", "behind the end"
    bench.run()
    assert bench.text(1).decode() == "x" + THOUGHT
    assert requests.end() == "not_reasoning", "behind the turn"


def test_a_waiting_task_whose_template_has_begun_reasoning_gets_its_end_first() -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(1, "first " * 5))
    bench.iterate(bench.submit(2, "0123456789", reasoning=bounded(opened="<think>")))
    assert Requests(bench).end(2) == "ended"
    bench.run()
    assert bench.text(2).decode() == repeated("0123456789", 0)


def test_a_message_with_the_mark_of_the_end_is_refused() -> None:
    _, bench = answer(THOUGHT, bounded(3, message="a </think> b"))
    assert bench.error(1) == "InvalidArgument"


def test_the_queue_estimates_a_bounded_thought_by_its_bound() -> None:
    bench = Bench(slots=1)
    bench.run(bench.submit(1, THOUGHT, reasoning=bounded()))
    bench.engine.tasks._estimator.learn_rates(0, 0.0, 100, 1.0)
    starts = []
    for number, budget in ((2, -1), (4, 0)):
        bench.iterate(bench.submit(number, THOUGHT, reasoning=bounded(budget), credit=1))
        bench.iterate(bench.submit(number + 1, "waits"))
        [_, waiting] = bench.engine.tasks.view_queue().entries()
        assert waiting.task_id == number + 1 and waiting.starts_in_s is not None
        starts.append(waiting.starts_in_s)
        bench.run(m.Cancel(number), m.Cancel(number + 1))
    assert starts[0] - starts[1] == pytest.approx(26 * 0.01, rel=0.5)
