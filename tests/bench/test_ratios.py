"""The picture of ratios: it shows the committed results, the worse ones too."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from bench.ratios import COMPARISONS, FILE, draw, measured


def test_the_committed_picture_shows_the_committed_results() -> None:
    assert FILE.read_text() == draw(measured())


def test_each_comparison_has_a_bar_with_its_ratio() -> None:
    bars = measured()
    assert len(bars) == len(COMPARISONS)
    root = ET.fromstring(draw(bars))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for bar in bars:
        assert bar.comparison.label in texts
        assert f"{bar.ratio:.3g}×" in texts


def test_less_time_and_more_tokens_are_better() -> None:
    ratios = {bar.comparison.label: bar.ratio for bar in measured()}
    assert ratios["urgent request beside long ones: first token"] > 50
    assert ratios["the long prompt itself: first token"] < 1
