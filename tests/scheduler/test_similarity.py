"""A turn that ends with a compared sentence: the end of its text, and no text behind it before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.backends.echo.options import EchoOptions
from inferd.backends.params import StoppingParams
from inferd.scheduler import messages as m
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.stopping import (
    SENTENCE_CHARACTERS_MAX,
    Ending,
    Sentences,
    TextAssembler,
    TurnConditions,
)
from inferd.sessions.turn.turn import Comparer, Turn
from inferd.sessions.worker_client import Comparison, Similarity
from tests.scheduler.doubles import Bench
from tests.sessions.doubles import InProcessClient, dying

from .test_text_conditions import SIZES, cut

TEXTS = st.text('abc.!?。 "\n)üE\udcff', max_size=40).map(
    lambda text: text.encode("utf-8", "surrogateescape")
)
CONDITIONS = st.builds(
    StoppingParams,
    stop_patterns=st.lists(
        st.sampled_from(["E", r"\s*E", "b.*c", r"[.!?]\n", "ü+a"]), max_size=2
    ).map(tuple),
    stop_complete=st.sampled_from([(), ("fence",), ("sentence",)]),
    n_indent=st.integers(0, 1),
    stop_similarity=st.just("anything"),
)
SIMILAR = StoppingParams(stop_similarity="anything")
Said = tuple[bytes, str, str]


def assembler_of(stopping: StoppingParams, stop: Sequence[str] = ()) -> TextAssembler:
    watch = TurnConditions.from_params(stopping)
    assert watch is not None
    return TextAssembler(stop, (), watch.text, watch.sentences)


class Reader:
    """Reads from an assembler; *ends* is how many sentences pass before one is similar."""

    def __init__(self, assembler: TextAssembler, ends: int, compared: Sequence[str] = ()):
        self.assembler, self.ends = assembler, ends
        self.checked = list(compared)
        self.places: list[int] = []
        self.text, self.reason, self.detail = b"", "", ""

    def feed(self, piece: bytes) -> bool:
        """Add the piece of a token; return whether more may come."""
        released = self.assembler.add_piece(piece)
        self.text += released.text
        return self.compared(released.ending)

    def compared(self, ending: Ending | None) -> bool:
        while ending is None and (question := self.assembler.pending_sentence) is not None:
            assert len(self.text) <= question.end, "text behind a compared sentence was released"
            self.checked.append(question.text)
            self.places.append(question.end)
            if len(self.checked) > self.ends:
                self.assembler.stop_at_sentence()
                ending = Ending(Sentences.reason, "close")
            else:
                ending = self.assembler.continue_text().ending
        if ending is not None:
            self.reason, self.detail = ending.reason.name, ending.detail
            self.text += self.assembler.flush()
            assert self.assembler.pending_sentence is None
            assert self.assembler.add_piece(b"more. And more") == (b"", None)
            assert self.assembler.flush() == b""
        return ending is None

    def read(self, pieces: Sequence[bytes]) -> Said:
        if all(self.feed(piece) for piece in pieces):
            self.text += self.assembler.flush()
        return self.text, self.reason, self.detail


@example(SIMILAR, (), b"a. b. c", [1, 1, 1, 1, 1, 1], 1)
@example(SIMILAR, (), "a。ü".encode(), [1, 1, 1, 1, 1], 0)
@example(SIMILAR, (), b"a. b\xc3", [1, 1, 1, 1], 3)
@example(StoppingParams(stop_similarity="x", stop_patterns=(r"b.*c",)), (), b"b. c", [2], 0)
@given(
    CONDITIONS,
    st.lists(st.text("ab.E ü", min_size=1, max_size=3), max_size=2).map(tuple),
    TEXTS,
    SIZES,
    st.integers(0, 3),
)
def test_a_turn_ends_with_the_same_sentence_however_its_text_is_split(
    stopping: StoppingParams, stop: tuple[str, ...], text: bytes, sizes: list[int], ends: int
) -> None:
    whole, split, bytewise = (Reader(assembler_of(stopping, stop), ends) for _ in range(3))
    answer = whole.read([text])
    assert split.read(cut(text, sizes)) == answer
    assert bytewise.read([bytes((b,)) for b in text]) == answer
    assert split.checked == bytewise.checked == whole.checked
    assert text.startswith(answer[0])
    assert answer[0] == text or answer[1]


@given(CONDITIONS, TEXTS, SIZES, st.integers(0, 20), st.integers(0, 3))
def test_a_resumed_turn_ends_at_the_same_sentence(
    stopping: StoppingParams, text: bytes, sizes: list[int], taken: int, ends: int
) -> None:
    """After a worker's death, a sentence that may have been compared is compared again, with the
    same result.
    """
    pieces = cut(text, sizes)
    expected = Reader(assembler_of(stopping), ends).read(pieces)
    before = Reader(assembler_of(stopping), ends)
    sent = b""
    for piece in pieces[:taken]:
        sent += piece
        if not before.feed(piece):
            return
    after = Reader(assembler_of(stopping), ends)
    found = after.assembler.resume(sent, len(before.text))
    after.text = before.text
    question = after.assembler.pending_sentence
    known = sum(question is None or place < question.end for place in before.places)
    after.checked = before.checked[:known]
    assert after.compared(found.ending)
    assert after.read(pieces[taken:]) == expected


@given(st.text('ab.!?。 "\nü', max_size=60))
def test_a_sentence_is_the_text_between_two_ends(text: str) -> None:
    sentences, compared = Sentences(), []
    passed = sentences.add_piece(text.encode())
    while sentences.pending is not None:
        assert sentences.pending.end == len(passed)
        compared.append(sentences.pending.text)
        passed += sentences.pass_sentence()
    assert passed + sentences.rest() == text.encode()
    rest = text
    for sentence in compared:
        assert sentence == sentence.strip() and any(c.isalnum() for c in sentence)
        assert rest.lstrip().startswith(sentence)
        rest = rest.lstrip()[len(sentence) :]


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("Hi! It is 3.5 m, no more. (Really.) And", ["Hi!", "It is 3.5 m, no more.", "(Really.)"]),
        ("これです。「はい。」と", ["これです。", "「はい。」"]),
        ("No end.", []),
        (" . . .", []),
        ("\n\n a?\n", ["a?"]),
    ],
)
def test_sentence_boundaries(text: str, compared: list[str]) -> None:
    reader = Reader(assembler_of(SIMILAR), 99)
    reader.read([text.encode()])
    assert reader.checked == compared


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_only_the_first_characters_of_a_long_sentence_count(over: int) -> None:
    sentence = "ü" * (SENTENCE_CHARACTERS_MAX + over - 1) + "."
    reader = Reader(assembler_of(SIMILAR), 0)
    assert reader.read([(sentence + " More").encode()]) == (
        sentence.encode(),
        "similarity",
        "close",
    )
    assert reader.checked == [sentence[:SENTENCE_CHARACTERS_MAX]]


def test_another_end_within_the_sentence_is_met_before_it() -> None:
    reader = Reader(assembler_of(SIMILAR, ["b."]), 0)
    assert reader.read([b"a b. c"]) == (b"a ", "stop", "b.")
    assert reader.checked == []
    reader = Reader(assembler_of(SIMILAR, [". "]), 0)
    assert reader.read([b"a b. c"]) == (b"a b.", "similarity", "close")


# Turns.


def comparing(*similar: str) -> Comparer:
    """Return a comparison that finds only these sentences similar."""

    def comparer(comparison: Comparison, report: object) -> None:
        assert comparison.text == "anything" and callable(report)
        report(Similarity(1.0 if comparison.sentence in similar else 0.1))

    return comparer


def turn_of(port: InProcessClient, text: str, comparer: Comparer, **fields: object) -> Turn:
    fields.setdefault("stopping", SIMILAR)
    return Turn(port, port.bench.spec(1, text, **fields), lambda _: None, comparer=comparer)


def outcome(turn: Turn) -> tuple[bytes, str, str]:
    assert turn.stats is not None, turn.error
    return bytes(turn.text), turn.stats.stop_reason, turn.stats.stop_detail


@pytest.mark.parametrize("pull", [False, True])
def test_a_turn_ends_with_a_similar_sentence_and_reports_the_similarity(pull: bool) -> None:
    port = InProcessClient(Bench())
    turn = turn_of(port, "One. Two! Three. Four", comparing("Two!"), pull=pull)
    turn.submit()
    for _ in range(40):
        port.run()
        if pull:
            turn.request_token()
    assert outcome(turn) == (b"One. Two!", "similarity", "1.000")
    assert turn.stopped_by_text, "its tokens have one more blank"
    assert bytes(turn.tokens) == b"One. Two! "
    assert turn.comparisons.missed == {}


def test_the_threshold_is_inclusive() -> None:
    for threshold, reason in ((0.1, "similarity"), (0.11, "eos")):
        port = InProcessClient(Bench())
        stopping = StoppingParams(stop_similarity="anything", stop_similarity_threshold=threshold)
        turn = turn_of(port, "One. Two", comparing(), stopping=stopping)
        turn.submit()
        port.run()
        assert outcome(turn)[1] == reason


def test_a_turn_whose_sentences_cannot_be_compared_continues_and_reports_why() -> None:
    port = InProcessClient(Bench())
    answers = iter([Similarity(0.1), Similarity(None, "first"), Similarity(None, "it is away")])
    turn = turn_of(port, "One. Two. Three. F", lambda _, report: report(next(answers)))
    turn.submit()
    port.run()
    assert outcome(turn) == (b"One. Two. Three. F", "eos", "256")
    assert turn.comparisons.missed == {
        "stop-similarity": "2 of 3 sentences were not compared: it is away"
    }


def waiting(bench: Bench, text: str = "One. Two", **fields: object) -> m.SentenceEnded:
    """Run a task until it waits for a comparison; return its request."""
    fields.setdefault("stopping", SIMILAR)
    bench.run(bench.submit(1, text, **fields))
    if fields.get("pull"):
        bench.run(*[m.PullToken(1)] * len("ne. "))
    [compared] = [r for r in bench.reports[1] if isinstance(r, m.SentenceEnded)]
    return compared


@pytest.mark.parametrize("pull", [False, True])
def test_a_task_that_waits_for_a_comparison_computes_and_reports_nothing(pull: bool) -> None:
    bench = Bench()
    compared = waiting(bench, pull=pull)
    assert (compared.end, compared.text) == (4, "One.")
    steps = bench.engine.metrics.steps
    bench.run(m.PullToken(1), m.PullToken(1))
    assert bench.engine.metrics.steps == steps
    assert (bench.text(1), bytes(bench.tokens(1))) == (b"One.", b"One. ")
    bench.run(m.SentenceCompared(1, 4))
    assert bench.text(1) == (b"One. Tw" if pull else b"One. Two")


def test_an_unexpected_comparison_changes_nothing() -> None:
    bench = Bench()
    waiting(bench)
    bench.run(m.SentenceCompared(1, 3, "0.900"), m.SentenceCompared(2, 4, "0.900"))
    assert bench.end(1) is None
    bench.run(m.SentenceCompared(1, 4), m.SentenceCompared(1, 4, "0.900"))
    assert (bench.text(1), bench.stats(1).stop_reason) == (b"One. Two", "eos")


def test_a_task_that_waits_for_a_comparison_yields_its_slot() -> None:
    bench = Bench(slots=1, settings=EngineSettings(reader_lag_s=0.2))
    waiting(bench)
    bench.iterate(bench.submit(2, "second"))
    assert 2 not in bench.order
    bench.now += 0.2
    bench.run()
    assert bench.text(2) == b"second"
    bench.run(m.SentenceCompared(1, 4))
    assert bench.text(1) == b"One. Two"
    assert bench.stats(1).parks == 1


def test_a_turn_without_a_comparison_times_out() -> None:
    bench = Bench(settings=EngineSettings(reader_timeout_s=300))
    waiting(bench)
    bench.now += 300
    bench.iterate()
    assert bench.error(1) == "ReaderTimeout"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n_predict": 5}, "length"),
        (
            {"stopping": StoppingParams(stop_similarity="x", stop_complete=("sentence",))},
            "complete",
        ),
        ({"ctx_size": 10 + 5}, "context_full"),
        ({"stop": (" ",)}, "stop"),
    ],
)
def test_another_ending_by_the_same_token_counts_if_the_sentence_does_not(
    fields: dict[str, object], reason: str
) -> None:
    for detail, expected in (("", reason), ("0.900", "similarity")):
        bench = Bench()
        waiting(bench, "One. Two", **fields)
        assert bench.end(1) is None
        bench.run(m.SentenceCompared(1, 4, detail))
        assert bench.stats(1).stop_reason == expected
        kept = b"One. " if reason in ("length", "context_full") and not detail else b"One."
        assert bench.text(1) == kept


def test_a_bound_on_time_waits_for_the_comparison() -> None:
    bench = Bench()
    waiting(bench, stopping=StoppingParams(stop_similarity="x", timeout_base_ms=100))
    bench.now += 1
    bench.iterate()
    assert bench.end(1) is None
    bench.iterate(m.SentenceCompared(1, 4))
    bench.run()
    assert (bench.text(1), bench.stats(1).stop_reason) == (b"One. ", "time")


def test_a_turn_that_waits_for_a_comparison_can_be_cancelled() -> None:
    bench = Bench()
    waiting(bench)
    bench.run(m.Cancel(1))
    assert bench.error(1) == "Cancelled"
    bench.run(m.SentenceCompared(1, 4, "0.900"))


# Another worker.


@pytest.mark.process
@example("a. b. c. d", ["b."], [9, 3, 2], False, False)
@example("aa. " * 10, [], [30, 1], True, False)
@example("aa..!.  .b.b.. ..!aa b. b.b.b!aa ..b!b", [], [11, 10], True, False)
@given(
    st.text("ab.! ", min_size=1, max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=2).map(lambda s: s + "."), max_size=2),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_a_turn_whose_worker_dies_ends_with_the_same_sentence(
    text: str, similar: list[str], deaths: list[int], shift: bool, late: bool
) -> None:
    """*late*: a comparison arrives after the worker that requested it has exited."""
    fields: dict[str, object] = {"ctx_shift": shift, "n_keep": -1, "n_predict": 60}

    def worker() -> InProcessClient:
        return InProcessClient(Bench(ctx_size=48 if shift else 256, slots=1, options=EchoOptions()))

    def run(deaths: Sequence[int]) -> tuple[bytes, list[int], str, str]:
        port, comparer, owed = worker(), comparing(*similar), []

        def compare_late(comparison: Comparison, report: object) -> None:
            owed.append((comparison, report))

        turn = turn_of(port, text, compare_late if late and deaths else comparer, **fields)
        turn.submit()
        port = dying(turn, port, deaths, worker)
        while True:
            port.run()
            if not owed:
                break
            comparison, report = owed.pop(0)
            comparer(comparison, report)  # type: ignore[arg-type]
        return (outcome(turn)[0], turn.tokens, *outcome(turn)[1:])

    assert run(deaths) == run(())
