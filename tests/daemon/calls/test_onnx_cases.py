"""ONNX's backend tests through a daemon: the list of cases, and a spread of them, bit by bit."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from inferd.testing import running_daemon
from tools import onnx_cases
from tools.onnx_cases import SERVED, cases, compare_with_daemon, read_list, refusal, spread

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tensors.md"
COMMAND = "run `python -m tools.onnx_cases`"


def served() -> list[str]:
    """Return the names of the listed cases that are served, and that this version of ONNX has."""
    _, verdicts = read_list()
    return [name for name, text in verdicts.items() if text == SERVED and name in cases()]


def test_the_list_is_that_of_the_installed_packages() -> None:
    versions, verdicts = read_list()
    if versions == onnx_cases.versions():
        assert list(verdicts) == list(cases()), COMMAND
    known = verdicts.keys() & cases().keys()
    assert len(known) > 0.9 * len(verdicts)
    for name in known:
        listed, reason = verdicts[name], refusal(cases()[name])
        assert listed == reason or (not reason and not listed.startswith(("type: ", "file: ")))


def test_the_page_has_the_numbers_of_the_list() -> None:
    _, verdicts = read_list()
    counts = Counter(text.partition(":")[0] for text in verdicts.values())
    [text] = re.findall(r"^## ONNX's backend tests\n\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    numbers = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", text)}
    assert numbers["cases"] == sum(counts.values())
    assert numbers["pass"] == counts[SERVED]
    assert numbers["refused"] == counts["type"]
    assert numbers["fail"] == counts["load"] + counts["engine"]
    assert counts.keys() <= {SERVED, "type", "load", "engine"}


@pytest.mark.timeout(300)
def test_a_spread_of_all_operators_and_types_has_the_bits_of_one_process(tmp_path: Path) -> None:
    chosen = [cases()[name] for name in spread(served())]
    assert len(chosen) > 100
    with running_daemon(models_dir=tmp_path) as daemon:
        assert compare_with_daemon(daemon.socket, chosen) == {}
