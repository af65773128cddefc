"""The conformance suite passes on a daemon, and fails on servers that break one rule each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.gateways.conformance import cases
from inferd.gateways.conformance.page import ERROR_NUMBERS, LIMITS, VECTORS
from inferd.gateways.conformance.suite import CASES, SuiteOptions, run_cases, selected
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.echo import echo_model
from tests.gateways.conformance.faults import (
    WRONG_SERVERS,
    Changed,
    ConnectionsOutlive,
    ErrorsBecomeResults,
    NoGoodbyes,
)
from tests.gateways.conformance.wrong_server import Fault, WrongServer

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
CONFIG = (
    echo_model("echo-too-big", weight_bytes=10**15)
    + echo_model("echo-kv-full", kv_cells=16)
    + echo_model("echo-failing", fail_at_step=1)
    + echo_model("echo-crashing", abort_on="crash")
    + echo_model("echo-media", media=True)
)
SKIPPED = {
    *(
        "errors.ReaderTimeout",
        "errors.SessionExpired",
        "errors.ConnectionLost",
        "errors.InvalidAnswer",
        "errors.Unknown",
    ),
    "frames.a_client_without_a_hello_is_disconnected",
    "frames.an_incomplete_frame_ends_the_connection",
}
"""Cases that take longer than a test, and errors that no server sends."""
BY_OUTCOME: dict[str, Fault] = {
    "error": ErrorsBecomeResults(),
    "goodbye": NoGoodbyes(),
    "reply": Changed(tasks=[{}]),
}
"""The fault that a vector of malformed frames notices, by the kind of its outcome."""
FAULTS = [
    *WRONG_SERVERS,
    *(
        (
            fault,
            " ".join(
                "malformed." + vector["name"].replace(" ", "_")
                for vector in VECTORS["malformed"]
                if kind in vector["outcome"]
            ),
        )
        for kind, fault in BY_OUTCOME.items()
    ),
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as running:
        yield running


def test_the_daemon_passes_every_case_also_behind_a_proxy(daemon: RunningDaemon) -> None:
    assert cases.__all__
    with WrongServer(daemon.socket, Fault()) as proxy:
        results = run_cases(SuiteOptions(proxy.path), selected((), CASES))
    assert {r.name: r.detail for r in results if r.outcome == "failed"} == {}
    skipped = {r.name for r in results if r.outcome == "skipped"}
    assert skipped == SKIPPED | {"errors.ShuttingDown"}


class EndsAreLate(Fault):
    """The server notices a closed connection late, which breaks no rule."""

    held_s = 0.1


def test_a_case_begins_once_the_server_has_ended_the_one_before(daemon: RunningDaemon) -> None:
    chosen = selected(("errors.Busy", "errors.SessionBusy"), CASES)
    assert [c.name for c in chosen] == ["errors.Busy", "errors.SessionBusy"]
    with WrongServer(daemon.socket, EndsAreLate()) as proxy:
        results = run_cases(SuiteOptions(proxy.path), chosen)
    assert {r.name: r.detail for r in results if r.outcome != "passed"} == {}


def test_a_server_that_keeps_many_connections_is_waited_for_once(daemon: RunningDaemon) -> None:
    with WrongServer(daemon.socket, ConnectionsOutlive()) as proxy:
        chosen = selected(("errors.QuotaExceeded",), CASES)
        [result] = run_cases(SuiteOptions(proxy.path, timeout_s=0.5), chosen)
    assert result.seconds < 32, "for each of its 64 connections, it would take longer"


@pytest.mark.parametrize(
    ("fault", "patterns"), FAULTS, ids=[f"{type(f).__name__}{i}" for i, (f, _) in enumerate(FAULTS)]
)
def test_a_case_fails_on_a_server_that_breaks_its_rule(
    daemon: RunningDaemon, fault: Fault, patterns: str
) -> None:
    chosen = selected(patterns.split(), CASES)
    with WrongServer(daemon.socket, fault) as wrong:
        results = run_cases(SuiteOptions(wrong.path, timeout_s=0.4), chosen)
    passed = {r.name for r in results if r.outcome == "passed"}
    assert passed == set()


def test_every_case_fails_on_a_wrong_server() -> None:
    patterns = [pattern for _, names in FAULTS for pattern in names.split()]
    for pattern in patterns:
        assert selected([pattern], CASES), pattern
    names = {c.name for c in CASES} - SKIPPED - {"errors.ShuttingDown"}
    assert names == {c.name for c in selected(patterns, CASES)} & names


def test_the_command_prints_a_table_or_json_and_reports_failures_by_its_status() -> None:
    with running_daemon(CONFIG) as running:
        done = inferd("conformance", "errors.N*", "handles.*", "--socket", running.socket)
        assert done.exit_code == 0, done.output
        assert "passed    errors.NotFound" in done.stdout
        with WrongServer(running.socket, ErrorsBecomeResults()) as wrong:
            done = inferd("conformance", "errors.NotFound", "--json", "--socket", wrong.path)
        assert done.exit_code == 1
        document = json.loads(done.stdout)
        assert (document["failed"], document["cases"][0]["outcome"]) == (1, "failed")
        drained = inferd(
            "conformance", "errors.S*", "--drain", "--json", "--socket", running.socket
        )
    outcomes = {c["name"]: c["outcome"] for c in json.loads(drained.stdout)["cases"]}
    assert list(outcomes.items())[-1] == ("errors.ShuttingDown", "passed")
    unknown = inferd("conformance", "no.such.case", "--socket", running.socket)
    assert unknown.exit_code == 1 and "no case has such a name" in unknown.stderr


def test_each_case_cites_a_section_of_the_page_and_its_numbers() -> None:
    headings = {line.lstrip("# ") for line in PAGE.splitlines() if line.startswith("#")}
    assert {c.section for c in CASES} <= headings
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| \d+ \| (?:yes|no) \|", PAGE, re.MULTILINE)
    assert {name: int(number) for name, number in rows} == ERROR_NUMBERS
    limits = dict(re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", PAGE, re.MULTILINE))
    assert {name: limits.get(name) for name in LIMITS} == {n: str(v) for n, v in LIMITS.items()}
