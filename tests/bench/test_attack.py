"""The measurement of attacks: modes, bounds and reports, and one attack on a real daemon."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.attack import measuring, report
from bench.attack.attack import LOWER, MODES, Attack, Bounds, Guarantee, Mode, Service
from bench.attack.attacks import ATTACKS
from bench.attack.attacks.floods import (
    answer_shortly,
    compute_prompt,
    embed_texts,
    stream_answer,
)
from bench.attack.measuring import Measurement, Setup, median_of
from bench.attack.report import GUARANTEES, Row
from bench.attack.requests import ERRORS, connect, error_name
from bench.attack.users import connecting_as
from bench.attack.victim import Victim, VictimFigures
from tests.daemon.other_users import ADA, BOB, as_user

VICTIM = VictimFigures(
    tokens_per_s=50.0, gap_worst_s=0.1, call_p99_ms=9.0, call_worst_ms=12.0, errors=()
)
MEASURED = Measurement(
    alone=replace(VICTIM, tokens_per_s=100.0),
    busy=replace(VICTIM, tokens_per_s=60.0),
    attacked=VICTIM,
    program_cores=0.5,
    before_mb=45.0,
    largest_mb=60.0,
    after_mb=50.0,
)
ATTACK = Attack("flood", "A flood", lambda _: None, ("share", "gap"), bounds_lower=LOWER)
ECHO = Setup(
    """
[daemon]
socket-mode = "0666"
[models.one]
backend = "echo"
slots = 4
batch-size = 8192
ctx-size = 16384
[models.one.echo]
step_ms = 1
""",
    "one",
)
WORK = (embed_texts, compute_prompt, stream_answer, answer_shortly)


def row(mode: str = "equal", measured: Measurement = MEASURED, **victim: Any) -> Row:
    return Row(ATTACK, mode, replace(measured, attacked=replace(VICTIM, **victim)))


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=lambda a: a.name)
def test_every_attack_has_known_modes_and_shows_a_guarantee(attack: Attack) -> None:
    assert attack.modes
    assert {*attack.modes} <= {*MODES}
    assert attack.shows
    assert {*attack.shows} <= {*GUARANTEES}


def test_the_modes_are_of_equal_class_of_a_lower_class_and_over_the_gateway() -> None:
    assert MODES["equal"] == Mode(title="equal class")
    assert MODES["lower"].attacker == "high"
    assert MODES["lower"].victim == "normal"
    assert MODES["gateway"].has_gateway


def test_only_a_victim_of_a_lower_class_has_the_bounds_for_it() -> None:
    assert ATTACK.bounds_in("equal") == ATTACK.bounds_in("gateway") == Bounds()
    assert ATTACK.bounds_in("lower") == LOWER
    assert replace(ATTACK, bounds_lower=None).bounds_in("lower") == Bounds()


def test_a_share_is_held_to_the_pace_beside_processes_as_busy_as_the_attackers() -> None:
    assert row(tokens_per_s=48.0).missed() == []
    assert row(tokens_per_s=47.9).missed() == ["share"]
    assert row("lower", tokens_per_s=14.0).missed() == []
    assert row("lower", tokens_per_s=13.0).missed() == ["share"]


@pytest.mark.parametrize(
    ("guarantee", "within", "beyond"),
    [
        ("gap", {"gap_worst_s": 0.35}, {"gap_worst_s": 0.36}),
        ("calls", {"call_p99_ms": 49.9}, {"call_p99_ms": 50.0}),
        ("places", {"errors": ()}, {"errors": ("Busy",)}),
    ],
)
def test_a_figure_beyond_its_bound_misses_its_guarantee(
    guarantee: Guarantee, within: dict[str, Any], beyond: dict[str, Any]
) -> None:
    assert row(**within).missed() == []
    assert row(**beyond).missed() == [guarantee]


def test_memory_is_bounded_during_the_attack_and_after_it() -> None:
    assert row(measured=replace(MEASURED, largest_mb=145.0, after_mb=95.0)).missed() == []
    assert row(measured=replace(MEASURED, largest_mb=146.0)).missed() == ["memory"]
    assert row(measured=replace(MEASURED, after_mb=96.0)).missed() == ["memory"]


def test_rounds_give_the_median_of_each_figure_and_every_error() -> None:
    rounds = [
        replace(MEASURED, program_cores=cores, attacked=replace(VICTIM, errors=errors, **{name: 7}))
        for cores, errors, name in (
            (0.1, ("Busy",), "call_p99_ms"),
            (0.3, (), "call_p99_ms"),
            (0.9, ("Timeout", "Busy"), "gap_worst_s"),
        )
    ]
    found = median_of(rounds)
    assert found.program_cores == 0.3
    assert found.attacked.call_p99_ms == 7
    assert found.attacked.gap_worst_s == 0.1
    assert found.attacked.errors == ("Busy", "Timeout")
    assert found.alone == MEASURED.alone


def test_the_printed_row_has_both_ratios_and_the_missed_guarantees() -> None:
    console = Console(record=True, width=1000)
    report.print_row(row(gap_worst_s=0.5, call_p99_ms=12.0, errors=("Busy",)), console)
    text = console.export_text()
    assert "0.50, 0.83" in text
    assert "gap 0.10 → 0.50 s" in text
    assert "calls p99 9.0 → 12.0 ms" in text
    assert "shows share, gap" in text
    assert "NOT MET: gap, places Busy" in text


def test_the_table_of_guarantees_names_each_number_with_its_attacks_and_the_worst_figure() -> None:
    other = Attack("other", "Another one", lambda _: None, ("gap",), modes=("gateway",))
    rows = [row(), row("lower", tokens_per_s=20.0), row("gateway", gap_worst_s=0.3)]
    lines = list(report.guarantee_table([ATTACK, other], rows))
    assert len(lines) == 2 + 4
    share, share_lower, gap, gap_lower = lines[2:]
    assert "| share | a stream keeps at least 0.8 of" in share
    assert "| `flood` (equal, gateway) | 0.83 (`flood` equal) |" in share
    assert "at least 0.22" in share_lower
    assert "| 0.33 (`flood` lower) |" in share_lower
    assert "| `flood` (equal, gateway), `other` | 0.30 s (`flood` gateway) |" in gap
    assert "0.7 s | `flood` (lower) |" in gap_lower


def test_the_page_keeps_its_text_around_both_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(report, "PAGE", page)
    page.write_text(
        f"one\n{report.GUARANTEES_BEGIN}\nold\n{report.END}\ntwo\n"
        f"{report.TABLE_BEGIN}\nold\n{report.END}\nthree\n"
    )
    text = report.page([row()])
    assert "old" not in text
    assert text.index("one") < text.index("| share |") < text.index("two")
    assert text.index("two") < text.index("A flood (`flood`) | equal") < text.index("three")


def test_saved_measurements_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = next(iter(ATTACKS.values()))
    page = tmp_path / "page.md"
    page.write_text(f"{report.GUARANTEES_BEGIN}\n{report.END}{report.TABLE_BEGIN}\n{report.END}")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "attacks.json")
    monkeypatch.setattr(report, "PAGE", page)
    report.save({}, Row(attack, "gateway", MEASURED))
    report.save({}, Row(attack, "equal", MEASURED))
    assert [(r.attack, r.mode) for r in report.read_rows()] == [
        (attack, "equal"),
        (attack, "gateway"),
    ]
    assert report.read_rows()[0].measured.alone.tokens_per_s == 100.0
    assert attack.title in page.read_text()


@pytest.mark.asyncio
async def test_a_call_without_an_answer_and_a_silent_stream_count_for_their_whole_time(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent.sock"))
        listener.listen(8)
        service = Service(socket=str(tmp_path / "silent.sock"), model="one")
        figures = await Victim(service, 1.0).measure()
    assert figures.tokens_per_s == 0
    assert figures.gap_worst_s >= 1.0
    assert figures.call_p99_ms >= 500  # a call begins late on a busy machine


@pytest.mark.process
@pytest.mark.asyncio
async def test_the_work_of_floods_is_answered_over_the_socket_and_over_http() -> None:
    async with measuring.running(ECHO, MODES["gateway"], 1) as server:
        over_http = server.service(1)
        assert over_http.gateway
        for service in (over_http, replace(over_http, gateway="")):
            for work in WORK:
                async with connect(service) as requests:
                    await work(requests, random.Random(1))
        with pytest.raises(ERRORS) as refused:
            async with connect(replace(over_http, gateway_key="unknown")) as requests:
                await requests.list_models()
        assert error_name(refused.value) == "HTTP 401"


@pytest.mark.process
def test_an_attack_that_ends_by_an_error_fails_with_it(tmp_path: Path) -> None:
    target = json.dumps({"socket": str(tmp_path / "missing.sock"), "model": "one"})
    program = (sys.executable, "-m", "bench.attack.program")
    ended = subprocess.run(
        (*program, "many-calls", "60", str(tmp_path), target), capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "FileNotFoundError" in ended.stderr


def test_a_connection_keeps_roots_rights_for_itself_alone(tmp_path: Path) -> None:
    secret = tmp_path / "of-root"
    secret.touch(mode=0o600)
    with connecting_as(ADA):
        assert secret.read_bytes() == b""
    with as_user(BOB), pytest.raises(PermissionError):
        secret.read_bytes()


@pytest.mark.process
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "mode"), [("unfinished-frames", "equal"), ("five-attackers", "gateway")]
)
async def test_a_victim_is_measured_alone_and_beside_an_attack(name: str, mode: str) -> None:
    measured = await measuring.measure(ATTACKS[name], MODES[mode], 1.0, ECHO)
    assert measured.alone.tokens_per_s > 0
    for figures in (measured.alone, measured.busy, measured.attacked):
        assert 0 < figures.call_p99_ms <= figures.call_worst_ms
        assert figures.errors == ()
    assert measured.program_cores > 0
    assert min(measured.before_mb, measured.largest_mb, measured.after_mb) > 0
