"""Turns end by their conditions: read whole or by token, parked, or resumed in another worker."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.backends.echo.options import EchoOptions
from inferd.backends.params import StoppingParams
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Priority
from inferd.scheduler.stopping import GRAM, MeanSurprisal, Repetition
from inferd.sessions.entries import Replay, TurnPiece
from inferd.sessions.turn.turn import Turn
from tests.scheduler.doubles import Bench
from tests.sessions.doubles import InProcessClient, dying

SURPRISED = EchoOptions(surprising="!")
LOOPS = {"stop_repetition": 0.5, "stop_repetition_window": 12}
LOST = {"stop_surprisal": 5.0, "stop_surprisal_window": 4}


def end_of(text: str, fields: dict[str, object], **stopping: object) -> tuple[bytes, str, str]:
    """Return the answer of a turn, and why it ended."""
    bench = Bench(options=SURPRISED)
    params = StoppingParams(**stopping)  # type: ignore[arg-type]
    bench.run(bench.submit(1, text, stopping=params, **fields))
    stats = bench.stats(1)
    return bench.text(1), stats.stop_reason, stats.stop_detail


@pytest.mark.parametrize(
    ("text", "stopping", "answer", "reason", "detail"),
    [
        ("abcd", {"stop_tokens": (ord("z"), ord("c"))}, "ab", "token", "99"),
        ("no 42!", {"stop_patterns": (r"\d+",)}, "no ", "pattern", r"\d+"),
        ("a\n b\nc", {"n_indent": 1}, "a\n b\n", "indent", "n-indent 1"),
        ('{"a": 1} and', {"stop_complete": ("json",)}, '{"a": 1}', "complete", "json"),
        ("abc" * 9, LOOPS, "abc" * 4, "repetition", "0.667"),
        ("aaaa!!!!!", LOST, "aaaa!!!", "surprisal", "7.500"),
        ("nothing", {"stop_patterns": ("x",), "stop_tokens": (1,)}, "nothing", "eos", "256"),
    ],
)  # fmt: skip
def test_a_turn_reports_the_condition_that_ended_it(
    text: str, stopping: dict[str, object], answer: str, reason: str, detail: str
) -> None:
    assert end_of(text, {}, **stopping) == (answer.encode(), reason, detail)
    pulled = end_of(text, {"pull": False, "credit": -1, "n_predict": len(answer)}, **stopping)
    assert pulled[0] == answer.encode()


def test_a_stop_token_is_not_reported() -> None:
    bench = Bench()
    bench.run(bench.submit(1, "abcd", stopping=StoppingParams(stop_tokens=(ord("c"),))))
    assert bench.tokens(1) == [ord("a"), ord("b")]
    assert bench.stats(1).output_tokens == 3, "it counts as sampled, as the end mark does"


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    bench = Bench()
    bench.run(bench.submit(1, stopping=StoppingParams(stop_tokens=(5, 9999))))
    assert bench.error(1) == "InvalidArgument"
    assert bench.engine.metrics.steps == 0


def test_the_end_mark_counts_before_a_stop_token() -> None:
    assert end_of("ab", {}, stop_tokens=(256,)) == (b"ab", "eos", "256")


# Parked, pulled and resumed turns


CONDITIONS = st.builds(
    StoppingParams,
    stop_tokens=st.sampled_from([(), (ord("x"),)]),
    stop_patterns=st.lists(st.sampled_from(["END", "b.*d", r"\s+c", "ü+"]), max_size=2).map(tuple),
    stop_complete=st.lists(
        st.sampled_from(["json", "fence", "sentence"]), unique=True, max_size=2
    ).map(tuple),
    n_indent=st.integers(0, 2),
    stop_repetition=st.sampled_from([0.0, 0.5, 0.9]),
    stop_repetition_window=st.sampled_from([8, 12]),
    stop_surprisal=st.sampled_from([0.0, 4.0]),
    stop_surprisal_window=st.sampled_from([3, 8]),
)
TEXTS = st.text('abEND.!? \n`{}"xü', min_size=1, max_size=40)
Outcome = tuple[bytes, list[int], str, str]


def outcome(text: str, stopping: StoppingParams, deaths: Sequence[int], *, shift: bool) -> Outcome:
    """Return the output that the reader of a turn received, whose worker dies repeatedly."""

    def worker() -> InProcessClient:
        return InProcessClient(Bench(options=SURPRISED, ctx_size=48 if shift else 256, slots=1))

    port = worker()
    spec = port.bench.spec(1, text, stopping=stopping, ctx_shift=shift, n_keep=-1, n_predict=60)
    turn = Turn(port, spec, lambda _: None)
    turn.submit()
    dying(turn, port, deaths, worker).run()
    assert turn.stats is not None, turn.error
    assert turn.stats.output_tokens - len(turn.tokens) in (0, 1)
    return bytes(turn.text), turn.tokens, turn.stats.stop_reason, turn.stats.stop_detail


@example("ab!a!b!!!!", StoppingParams(stop_surprisal=4.0, stop_surprisal_window=8), [4, 3], False)
@example("abab" * 9, StoppingParams(stop_repetition=0.9, stop_repetition_window=12), [30], True)
@example("[[aaaaaaaaaaaaa]aaaaaaaaaaaa", StoppingParams(stop_complete=("json",)), [21], True)
@example("?" * 13 + "D" + "?" * 15 + "üü", StoppingParams(), [3, 12], True)
@example("x bEENDd", StoppingParams(stop_patterns=("b.*d",)), [5, 2], False)
@given(TEXTS, CONDITIONS, st.lists(st.integers(0, 12), min_size=1, max_size=3), st.booleans())
def test_a_turn_whose_worker_dies_ends_where_it_would_have(
    text: str, stopping: StoppingParams, deaths: list[int], shift: bool
) -> None:
    assert outcome(text, stopping, deaths, shift=shift) == outcome(text, stopping, [], shift=shift)


@given(TEXTS, CONDITIONS, st.integers(1, 12))
def test_a_turn_that_is_parked_or_pulled_ends_where_it_would_have(
    text: str, stopping: StoppingParams, turns: int
) -> None:
    alone = outcome(text, stopping, [], shift=False)
    bench = Bench(options=SURPRISED, slots=1)
    bench.iterate(bench.submit(1, text, stopping=stopping, n_predict=60))
    for _ in range(turns):
        bench.iterate()
    bench.run(bench.submit(2, "urgent", priority=Priority.URGENT))
    stats = bench.stats(1)
    parked = (bench.text(1), bench.tokens(1), stats.stop_reason, stats.stop_detail)
    assert parked == alone

    bench = Bench(options=SURPRISED)
    bench.run(bench.submit(1, text, stopping=stopping, n_predict=60, pull=True))
    while bench.end(1) is None:
        bench.run(m.PullToken(1))
    stats = bench.stats(1)
    assert (bench.text(1), bench.tokens(1), stats.stop_reason, stats.stop_detail) == alone


@pytest.mark.parametrize(
    ("text", "stopping"),
    [
        ("so END of", StoppingParams(stop_patterns=("END",))),
        ("abc" * 9, StoppingParams(stop_repetition=0.5, stop_repetition_window=12)),
        ("a!!!!", StoppingParams(stop_surprisal=5.0, stop_surprisal_window=2)),
        ("One. Two.", StoppingParams(stop_complete=("sentence",))),
    ],
)
def test_a_turn_with_only_its_ending_unreported_ends_when_resumed(
    text: str, stopping: StoppingParams
) -> None:
    """As after a kill between the last token and the ending: the reader has all tokens."""
    answer, tokens, reason, detail = outcome(text, stopping, [], shift=False)
    port = InProcessClient(Bench(options=SURPRISED))
    spec = port.bench.spec(1, text, stopping=stopping)
    surprisals = [10.0 if token == ord("!") else 0.0 for token in tokens]
    piece = TurnPiece(
        tokens=m.pack_tokens(tokens),
        text=answer,
        surprisals=m.pack_floats(surprisals) if stopping.stop_surprisal else b"",
    )
    turn = Turn(port, spec, lambda _: None)
    turn.take_over(Replay(m.unpack_tokens(spec.tokens), [piece]))
    turn.submit()
    port.run()
    assert turn.stats is not None
    assert (bytes(turn.text), turn.tokens) == (answer, tokens)
    assert (turn.stats.stop_reason, turn.stats.stop_detail) == (reason, detail)


def test_conditions_of_a_running_turn_do_not_change() -> None:
    port = InProcessClient(Bench())
    spec = port.bench.spec(1, "one END two", stopping=StoppingParams(stop_patterns=("END",)))
    turn = Turn(port, spec, lambda _: None)
    turn.submit()
    for _ in range(3):
        port.turn()
    turn.adjust(msgspec.structs.replace(spec, stop=("two",), stopping=StoppingParams()))
    port = InProcessClient(Bench())
    again = turn.continue_on(port)
    assert again is not None
    port.submit(again, turn)
    port.run()
    assert turn.stats is not None
    assert (bytes(turn.text), turn.stats.stop_reason) == (b"one ", "pattern")


# Time


def test_a_prompt_that_takes_too_long_ends_its_turn() -> None:
    bench = Bench(batch_size=16)
    stopping = StoppingParams(t_max_prompt_ms=500)
    bench.iterate(bench.submit(1, "x" * 100, stopping=stopping))
    bench.now += 0.499
    bench.iterate()
    assert bench.end(1) is None
    bench.now += 0.001
    bench.iterate()
    assert (bench.stats(1).stop_reason, bench.stats(1).stop_detail) == (
        "time",
        "t-max-prompt-ms 500",
    )
    assert bench.text(1) == b""


def test_the_bound_on_a_prompt_counts_neither_the_queue_nor_the_answer() -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(1, "first", pull=True))
    bench.iterate(bench.submit(2, "second", stopping=StoppingParams(t_max_prompt_ms=500)))
    bench.now += 10
    bench.iterate(m.Cancel(1))
    bench.now += 10
    while not bench.tokens(2):
        bench.iterate()
    bench.now += 10
    bench.run()
    assert (bench.text(2), bench.stats(2).stop_reason) == (b"second", "eos")


def test_the_time_of_an_answer_ends_it_with_its_next_line() -> None:
    """As in llama-server: it continues until a line ends."""
    bench, stopping = Bench(), StoppingParams(t_max_predict_ms=500)
    for number, text in ((1, "a\nbc\nd"), (2, "one line")):
        bench.iterate(bench.submit(number, text, stopping=stopping))
    while len(bench.tokens(1)) < 3:
        bench.iterate()
    bench.now += 0.501
    bench.run()
    assert bench.text(1) == b"a\nbc\n"
    assert bench.stats(1).stop_detail == "t-max-predict-ms 500"
    assert (bench.text(2), bench.stats(2).stop_reason) == (b"one line", "eos")


@pytest.mark.parametrize(
    ("stopping", "limit_ms"),
    [
        ({"timeout_base_ms": 100, "timeout_token_ms": 10.0}, 100 + 10 * (12 + 3)),
        ({"timeout_base_ms": 100, "timeout_token_ms": 10.0, "timeout_max_ms": 200}, 200),
        ({"timeout_base_ms": 300}, 300),
    ],
)
def test_a_timeout_that_grows_with_the_tokens_ends_a_turn(
    stopping: dict[str, object], limit_ms: int
) -> None:
    bench = Bench()
    params = StoppingParams(**stopping)  # type: ignore[arg-type]
    bench.iterate(bench.submit(1, "0123456789", stopping=params, credit=3))
    while len(bench.tokens(1)) < 3:
        bench.iterate()
    bench.now += (limit_ms - 1) / 1000
    bench.iterate()
    assert bench.end(1) is None
    bench.now += 0.001
    bench.iterate()
    assert bench.text(1) == b"012"
    assert bench.stats(1).stop_detail == f"timeout {limit_ms} ms"


def test_a_timeout_is_reported_without_a_request() -> None:
    bench = Bench()
    stopping = StoppingParams(timeout_base_ms=300)
    bench.iterate(bench.submit(1, "0123456789", stopping=stopping, credit=1))
    while not bench.tokens(1):
        bench.iterate()
    wait_s_max = bench.engine.wait_s_max()
    assert wait_s_max is not None and 0 < wait_s_max <= 0.3


# Measures


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(GRAM, 12), st.floats(0.1, 1))
def test_repetition_is_the_share_of_repeated_ngrams(
    tokens: list[int], window: int, threshold: float
) -> None:
    repetition = Repetition(threshold, window)
    for end, token in enumerate(tokens, 1):
        last = tokens[max(0, end - window) : end]
        grams = [tuple(last[i : i + GRAM]) for i in range(len(last) - GRAM + 1)]
        share = 1 - len(set(grams)) / len(grams) if len(last) == window else -1.0
        found = repetition.add_token(token)
        assert found == (f"{share:.3f}" if share >= threshold else None)


def test_a_repetition_at_the_threshold_ends_the_turn() -> None:
    repetition = Repetition(0.5, 7)
    found = [repetition.add_token(token) for token in (1, 2, 1, 2, 1, 2, 1)]
    assert found == [None] * 6 + ["0.500"]


def test_surprisal_is_the_mean_of_a_full_window() -> None:
    surprisal = MeanSurprisal(1.0, 3)
    assert [surprisal.add_surprisal(n) for n in (9, 0, 0)] == [None, None, "3.000"]
    assert [surprisal.add_surprisal(n) for n in (1, 1, 1, 1.5)] == [None, None, None, "1.167"]
