"""The bench's scenarios: the same for all sides, and complete enough for a page."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from bench import report, result_files, schemas
from bench.chain_texts import nearest
from bench.daemon import configuration, echo_configuration, options
from bench.runs import Run
from bench.scenarios import (
    SCENARIOS,
    chain,
    decode,
    first_schema,
    gateway_first,
    gateway_many,
    infill,
    long_prompt,
    media,
    media_sessions,
    sampling,
    schema,
    sessions,
    swap,
    urgent,
)
from bench.scenarios.base import Scenario, Work
from bench.streams import Stream
from inferd.daemon.config.sources import load_config
from tests.backends.llama.schemas import SCHEMAS


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda s: s.name)
def test_every_target_names_a_figure_and_a_case(scenario: Scenario) -> None:
    names = {figure.name for figure in scenario.figures}
    assert {target.figure for target in scenario.targets} <= names
    assert {target.case for target in scenario.targets} <= set(scenario.cases)


def test_prompts_are_the_same_in_a_round_and_new_in_each_run() -> None:
    one, other = (decode.requests(Work(16, 3, serial)) for serial in (7, 8))
    assert [a.text[5:] for a in one] == [a.text[5:] for a in other]
    assert not {a.text for a in one} & {a.text for a in other}
    assert len({a.text for a in one}) == 16


def test_requests_of_a_queue_differ_and_have_their_priority() -> None:
    low, high = urgent.low_requests(Work(0, 1, 1)), urgent.urgent_requests(Work(0, 1, 1), 8)
    assert len({request.text for request in (*low, *high)}) == 32
    assert {request.priority for request in low} == {"low"} and {a.priority for a in high} == {
        "urgent"
    }


def test_an_edit_adds_text_at_a_place_of_a_file_that_is_new_in_each_run() -> None:
    one, other = (infill.edits(Work(infill.IDLE, 1, serial)) for serial in (7, 8))
    assert len(one) == infill.EDITS == 20
    for before, after in itertools.pairwise(one):
        assert after.text.startswith(before.text) and after.text != before.text
        assert after.suffix and after.suffix.count("\n") <= infill.SUFFIX_LINES
    assert len({request.suffix for request in one}) == len(infill.PLACES)
    starts = [request.text.partition("_")[2][:5] for request in (one[0], other[0])]
    assert starts == ["7000_", "8000_"]
    assert one[0].text.replace("7000", "8000") == other[0].text
    assert all(infill.TOKENS_LEAST <= r.tokens <= infill.TOKENS_MOST for r in one)


def test_the_times_of_edits_are_counted_without_the_queue() -> None:
    edited = [a_turn(f"{infill.EDIT} {number}", number, number + 0.5 * number) for number in (1, 2)]
    low = [a_turn("low 1", 0.0, 9.0), a_turn("low 2", 0.0, 12.0)]
    figures = infill.measure([*low, *edited])
    assert figures["ttft_median_s"] == pytest.approx(0.75) and figures["ttft_worst_s"] == 1
    assert figures["low_s"] == 12 and figures["low_lost"] == 0
    assert infill.measure(edited)["low_s"] == 0
    known = dataclasses.replace(edited[0], input_tokens=900, cached_tokens=500)
    with pytest.raises(AssertionError, match="500 tokens of a new file"):
        infill.measure([known, edited[1]])


def test_conversations_of_a_round_differ() -> None:
    firsts = [sessions.conversation(Work(0, 1, 1), n, 24)[0] for n in range(100)]
    assert (
        len({request.text for request in firsts})
        == len({request.label for request in firsts})
        == 100
    )


def test_a_long_prompt_that_came_after_the_streams_measures_nothing() -> None:
    short = Stream(0.0, (1.0, 2.0), 2, 2, "short")
    long = Stream(1.5, (3.0, 3.1), 2, 2, long_prompt.LONG)
    with pytest.raises(AssertionError, match="short"):
        long_prompt.measure([short, long])
    late = Stream(0.0, (1.0, 2.9, 3.2), 3, 3, "late")
    assert long_prompt.measure([late, long])["gap_worst_s"] == pytest.approx(1.9)


def test_the_share_of_sampling_excludes_the_step_of_the_first_tokens() -> None:
    first = Stream(0.0, (9.0, 9.1, 9.2), 3, 3, "0", sampling_s=0.01)
    other = Stream(0.0, (9.0, 9.1, 9.2), 3, 3, "1", sampling_s=0.02)
    found = sampling.measure([first, other])
    assert found == pytest.approx({"share": 15.0, "sampling_ms": 15.0, "step_ms": 100.0})


def a_turn(label: str, requested_s: float, *arrivals_s: float) -> Stream:
    return Stream(requested_s, arrivals_s, len(arrivals_s), len(arrivals_s), label)


def test_the_silence_of_a_swap_is_counted_in_steps_of_the_previous_model() -> None:
    streams = [
        a_turn("load a", 0.0, 1.0),
        a_turn("load b", 1.0, 3.0),
        a_turn("a", 3.0, 3.1, 3.2, 3.3, 3.4),
        a_turn("swap a b", 4.0, 6.5),
        a_turn("a", 3.9, 3.95, 4.05, 4.55, 4.65),
        a_turn("b", 6.5, 6.7, 6.9, 7.1, 7.3),
        a_turn("swap b a", 8.0, 9.0),
        a_turn("b", 7.9, 8.0, 8.2, 8.8),
        a_turn("a", 9.0, 9.1, 9.2),
    ]
    figures = swap.measure(streams)
    assert figures["silence_steps"] == pytest.approx(5.0)
    assert figures["silence_median_steps"] == pytest.approx(4.0)
    assert figures["late_s"] == pytest.approx(max(2.5 - 2.0, 1.0 - 1.0))
    assert figures["load_s"] == pytest.approx(1.5) and figures["turns"] == 5
    with pytest.raises(AssertionError, match="outside the swaps"):
        swap.measure([*streams, a_turn("c", 9.0, 9.1)])


@pytest.mark.parametrize("side", swap.OTHERS)
def test_the_models_of_a_swap_are_a_configuration(tmp_path: Path, side: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(swap.configuration(side))
    models = load_config({"config": file}, {}).models
    assert all(models[name].file is not None for name in ("first", "second"))
    assert models["first"] != models["second"]


def test_the_figures_of_an_image_are_those_of_its_arrival() -> None:
    alone, again = a_turn(media.ALONE, 0.0, 4.0), a_turn(media.AGAIN, 5.0, 5.2)
    elsewhere, beside = a_turn(media.ELSEWHERE, 6.0, 6.5), a_turn(media.BESIDE, 12.0, 16.0)
    steady = (10.0, *(10.5 + 0.1 * n for n in range(16)))
    streams = [
        a_turn("a", 9.0, *steady, *(12.5 + 0.5 * n for n in range(9))),
        a_turn("b", 9.0, *steady, *(12.5 + 0.5 * n for n in range(9))),
    ]
    figures = media.measure([alone, again, elsewhere, beside, *streams])
    assert figures["alone_ttft_s"] == 4.0 == figures["beside_ttft_s"]
    assert figures["again_part"] == pytest.approx(0.05)
    assert figures["gap_worst_s"] == pytest.approx(0.5) and figures["gap_beyond_step_s"] == 0.0
    assert figures["pace"] == pytest.approx(0.2, abs=0.02)
    with pytest.raises(AssertionError, match="early"):
        media.measure([alone, again, elsewhere, beside, a_turn("early", 9.0, 10.0, 15.0)])


def test_images_are_new_in_each_run_and_shared_by_the_sessions_of_one() -> None:
    one, other = (media_sessions.requests_of(Work(0, 1, serial)) for serial in (7, 8))
    assert len({request.image for request in one}) == 1 and one[0].image != other[0].image
    assert len({request.text for request in one}) == 16
    alone = media.alone_requests(Work(1, 1, 7), one[0].image or b"")
    assert alone[0].text == alone[1].text != alone[2].text


def test_every_setting_of_the_curve_is_one_of_the_daemon(tmp_path: Path) -> None:
    for step_ms in long_prompt.STEP_MS_TARGETS:
        file = tmp_path / "config.toml"
        file.write_text(configuration(4, 512, {"step-ms-target": step_ms}))
        assert load_config({"config": file}, {}).step_ms_target == step_ms


def test_programs_of_a_chain_have_their_own_texts_which_are_new_in_each_run() -> None:
    one, other = (chain.texts_of(Work(0, 1, serial)) for serial in (7, 8))
    assert len({texts.label("answer") for texts in one}) == chain.PROGRAMS
    assert [texts.passages for texts in one] == [texts.passages for texts in other]
    prompts = [{texts.question(0, "x") for texts in programs} for programs in (one, other)]
    assert len(prompts[0]) == chain.PROGRAMS and not prompts[0] & prompts[1]


def test_the_nearest_vector_has_the_largest_cosine() -> None:
    assert nearest([1.0, 0.0], [[0.0, 1.0], [0.8, 0.6], [0.6, 0.8]]) == 1


def test_a_chain_counts_a_load_at_each_change_of_the_model_and_history_computed_again() -> None:
    search = Stream(0.0, (1.0,), 0, 0, "0 search")
    known = Stream(1.0, (2.0, 2.5), 2, 2, "0 answer", input_tokens=10)
    again = Stream(5.0, (6.0, 7.0), 2, 2, "0 answer", input_tokens=20, cached_tokens=4)
    first, last = (Stream(s, (s + 0.5,), 1, 1, "0 summarise") for s in (3.0, 8.0))
    other = Stream(2.5, (2.8,), 1, 1, "1 answer", input_tokens=10)
    figures = chain.measure([search, known, again, first, last, other])
    assert figures == pytest.approx(
        {"loads": 5, "makespan_s": 8.5, "first_s": 8.5, "computed_twice": 10 + 2 - 1 - 4}
    )


def test_the_models_of_a_chain_are_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(chain.configuration())
    assert set(load_config({"config": file}, {}).models) == set(chain.FILES)


def result() -> result_files.Result:
    streams = result_files.since_begin([Stream(8.0, (8.5, 9.25), 2, 2, "x"), Stream(7.5, (), 0, 1)])
    runs = [
        Run(side, 0, number, {"makespan_s": s, "ttft_median_s": s, "computed_twice": 0.0}
            | {"prompt_tokens": 5.0}, 0.01)
        for side, s in (("llama-server", 8.0), ("inferd", 2.0)) for number in (1, 2)
    ]  # fmt: skip
    facts = dict.fromkeys(report.MACHINE, "?")
    return result_files.Result(facts, runs, {"inferd": streams}, ["a note"])


def test_a_file_of_results_returns_the_result_that_was_written() -> None:
    assert result_files.parse(result_files.dump(result())) == result()


def test_times_in_a_file_begin_with_the_first_request() -> None:
    first, second = result().pictures["inferd"]
    assert (first.requested_s, second.requested_s, second.arrivals_s) == (0.0, 0.5, (1.0, 1.75))


def test_a_section_says_whether_each_target_was_met() -> None:
    text = report.section(SCENARIOS["sessions"], result())
    assert "| llama-server / inferd: all done, s | 4 | ≥ 1 | yes |" in text
    assert "| inferd: tokens computed twice, worst run | 0 | ≤ 0 | yes |" in text
    assert "| inferd | all done, s | 2.00 | 2.00 |" in text
    assert "a note" in text and "2 rounds" in text


def test_the_committed_results_are_those_of_the_page() -> None:
    page = report.TARGET.read_text()
    for scenario in SCENARIOS.values():
        if found := result_files.load(scenario.name):
            assert report.section(scenario, found) in page


def test_a_first_answer_with_a_schema_is_compared_with_the_one_before_it() -> None:
    streams = [
        Stream(10.0 * number + at, (10.0 * number + at + ttft,), 1, 2, kind)
        for number in range(3)
        for at, (kind, ttft) in enumerate(
            (("free", 0.1), ("new", 0.12 + number), ("seen", 0.101 + number / 1000))
        )
    ]
    figures = first_schema.measure(streams)
    assert figures["new_later_p99_ms"] == pytest.approx(2020)
    assert figures["new_later_p50_ms"] == pytest.approx(1020)
    assert figures["seen_later_p99_ms"] == pytest.approx(3)
    assert figures["free_p50_ms"] == pytest.approx(100)
    failed = Stream(0.0, (), 0, 2, "new", error="refused")
    with pytest.raises(AssertionError, match="refused"):
        first_schema.measure([*streams, failed])


def test_a_request_over_http_is_compared_with_the_same_one_over_the_socket() -> None:
    streams = [
        Stream(10.0 * number, (10.0 * number + ttft,), 1, 1, kind)
        for number in range(3)
        for kind, ttft in (("socket", 0.002 + number), ("http", 0.0025 + number))
    ]
    figures = gateway_first.measure(streams)
    assert figures["later_p50_ms"] == pytest.approx(0.5)
    assert figures["socket_p50_ms"] == pytest.approx(1002)
    with pytest.raises(AssertionError, match="lost"):
        gateway_first.measure([*streams, Stream(0.0, (), 0, 1, "http", error="lost")])


def test_the_gaps_of_many_streams_count_while_all_of_them_run() -> None:
    first = Stream(0.0, (1.0, 5.0, 5.1, 5.2), 4, 4, "0", rss_bytes=20_000.0)
    late = Stream(0.0, (5.0, 5.15, 5.25, 9.0), 4, 4, "1", rss_bytes=20_000.0)
    figures = gateway_many.measure([first, late])
    assert figures["gap_p99_ms"] == pytest.approx(150) and figures["rss_kb"] == 20
    assert figures["all_running_s"] == 5
    with pytest.raises(AssertionError, match="at the same time"):
        gateway_many.measure([first, a_turn("2", 0.0, 6.0, 6.1)])


def test_the_models_of_many_streams_are_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(echo_configuration(gateway_many.MODELS, 250, 100, gateway_many.BOUNDS))
    config = load_config({"config": file}, {})
    assert config.sessions_max >= gateway_many.STREAMS
    assert all(config.models[name].options["slots"] == 250 for name in gateway_many.MODELS)


def test_a_schema_is_new_in_each_run_and_seen_in_the_request_after() -> None:
    known = list(SCHEMAS.values())
    one, other = (first_schema.requests(Work(0, 1, serial), known) for serial in (7, 8))
    kinds = [request.label for request in one]
    assert kinds == ["free", "new", "seen"] * first_schema.SCHEMAS
    assert all(request.schema is None for request in one if request.label == "free")
    news = [[r.schema for r in requests if r.label == "new"] for requests in (one, other)]
    assert news[0] == [r.schema for r in one if r.label == "seen"]
    texts = {json.dumps(schema) for schemas in news for schema in schemas}
    assert len(texts) == 2 * first_schema.SCHEMAS
    assert len({request.text[:3] for request in one[:900]}) == 300, "no prompt begins as another"


def test_the_sides_with_a_schema_get_the_prompts_of_free_text() -> None:
    work = Work(4, 1, 5)
    assert len({request.text for request in schema.requests(work)}) == 4
    assert all(request.schema is None for request in schema.requests(work))
    assert options(8, schemas.STOCK)["json-schema"] == schemas.STOCK
    assert "ignore-eos" not in options(8, schemas.STOCK) and options(8)["ignore-eos"]
