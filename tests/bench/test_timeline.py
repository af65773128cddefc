"""Pictures of runs: the phases of each lane, and the SVG file."""

from __future__ import annotations

from xml.etree import ElementTree

from bench.streams import Stream
from bench.timeline import LANES_TALL_MAX, draw, file_of, spans, tick_step_s


def stream(
    requested_s: float, *arrivals_s: float, label: str = "a", waited_s: float = 0.0
) -> Stream:
    return Stream(
        requested_s, arrivals_s, len(arrivals_s), len(arrivals_s), label, waited_s=waited_s
    )


def test_a_request_waits_is_computed_decodes_and_stands_still() -> None:
    assert list(spans(stream(1, 4, 4.1, 6, 6.1, waited_s=2))) == [
        ("waiting", 1, 3),
        ("prefill", 3, 4),
        ("decoding", 4, 4.1),
        ("standing", 4.1, 6),
        ("decoding", 6, 6.1),
    ]


def test_a_wait_ends_with_the_first_token_at_the_latest() -> None:
    assert list(spans(stream(0, 2, waited_s=5)))[:2] == [("waiting", 0, 2), ("prefill", 2, 2)]


def test_a_picture_includes_a_request_without_an_answer() -> None:
    assert list(spans(stream(3))) == [("waiting", 3, 3)]


def test_the_axis_has_few_round_marks() -> None:
    assert [tick_step_s(s) for s in (0.9, 5.0, 40.0, 9000.0)] == [0.1, 0.5, 5, 9000.0]


def test_a_picture_is_an_svg_with_a_label_for_each_lane() -> None:
    streams = [stream(0, 1, 1.1, label="a & b"), stream(0.5, 2, label="c"), stream(3, 4, label="c")]
    root = ElementTree.fromstring(draw("A <title>", streams))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "A <title>" in texts and texts.count("a & b") == texts.count("c") == 1
    assert "prefill" in texts and "0 s" in texts and "4 s" in texts


def test_many_lanes_are_low_and_have_no_labels() -> None:
    many = [stream(0, 1, label=f"program {n}") for n in range(LANES_TALL_MAX + 1)]
    assert "program 1" in draw("few", many[:-1])
    assert "program 1" not in draw("many", many)


def test_files_have_names_without_spaces() -> None:
    assert file_of("return", "inferd, fresh state").name == "return-inferd-fresh-state.svg"
