"""The pure part of `top`: rates, rows, and one frame of plain tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inferd import Client
from inferd.cli.monitoring.top_view import TASKS, Rates, Row, Sample, frame_of
from inferd.testing import running_daemon
from tests.daemon.command_line import document, inferd, inferd_process

from .top_samples import FLEET, model, sample, session, task

SLOW = """
[models.slow]
backend = "echo"
slots = 2
[models.slow.echo]
step_ms = 5
"""


def cells(row: Row) -> dict[str, str]:
    return dict(zip(TASKS.heads, row.cells, strict=True))


def test_rates_count_tokens_since_the_previous_sample() -> None:
    before, now = sample(10.0, (100, 40, 7)), sample(12.0, (200, 100, 27))
    rates = Rates.between(before, now)
    assert rates.prompt == {"m": 20.0}, "cached tokens are not computed"
    assert rates.answer == {"m": 10.0}


def test_the_rate_of_a_task_counts_its_answer_or_before_that_its_prompt() -> None:
    before = sample(10.0, tasks=[task(1), task(2, output_tokens=4), task(3)])
    now = sample(
        10.5, tasks=[task(1, computed_tokens=40), task(2, output_tokens=9), task(4), task(None)]
    )
    assert Rates.between(before, now).tasks == {"1": 60.0, "2": 10.0}
    [new] = [row for row in frame_of(before, now).tasks if row.key == "104"]
    assert cells(new)["TOK/S"] == "-"


@pytest.mark.parametrize(
    "before",
    [
        None,
        sample(10.0),
        replace(sample(0.0), stats=sample().stats | {"instance": 2}),
    ],
)
def test_without_an_earlier_sample_of_the_same_daemon_there_are_no_rates(
    before: Sample | None,
) -> None:
    now = sample(10.0, (200, 100, 27))
    assert Rates.between(before, now) == Rates()
    assert "-" in frame_of(before, now).header[1]


def test_a_restarted_worker_makes_no_rate_negative() -> None:
    rates = Rates.between(sample(1.0, (500, 0, 500)), sample(2.0, (20, 0, 3)))
    assert rates.prompt == rates.answer == {"m": 0.0}


def test_the_header_shows_totals_of_the_daemon() -> None:
    frame = frame_of(sample(1.0, (0, 0, 0)), sample(3.0, (50, 10, 9)))
    assert frame.header == (
        "inferd/9, pid 42, up for 5 min",
        "tokens/s  20 prompt, 4.5 answer; 75% of drafts accepted",
        "tasks     2 running, 3 waiting, 1 parked, 5 refused so far",
        "sessions  4 of 100, 6 dormant",
        "KV        92 MB in slots, 4 MB in memory, 700 MB of 10 GB on disk",
    )
    draining = frame_of(None, sample(stats={"draining": True}))
    assert draining.header[0].endswith(", draining")


def test_the_header_shows_the_inputs_of_graphs_if_any_was_computed() -> None:
    def computed(inputs: int, runs: int) -> dict[str, Any]:
        samples = {
            **{"computations": inputs, "computation_runs": runs},
            **{"computations_running": 2, "computations_waiting": 5},
        }
        families = {n: [{"model_name": "m", "value": v}] for n, v in samples.items()}
        return {"metrics": sample().stats["metrics"] | families}

    frame = frame_of(sample(1.0, stats=computed(10, 10)), sample(3.0, stats=computed(70, 28)))
    assert frame.header[-1] == "graphs    30 inputs/s, 2.5 at a time; 2 running, 5 waiting"


def test_labels_are_shown_beside_their_users_and_requests_that_wait_for_a_place() -> None:
    labelled: dict[str, Any] = {"user": "ada", "label": "guest-1"}
    frame = frame_of(
        None,
        sample(
            tasks=[task(1, label="guest-1"), task(2, **labelled), task(3)],
            sessions=[session(**labelled)],
            stats={"sessions_waiting": 7},
        ),
    )
    assert [cells(row)["USER"] for row in frame.tasks] == ["1000 guest-1", "ada guest-1", "1000"]
    assert "ada guest-1" in frame.sessions[0].cells
    assert "sessions  4 of 100, 6 dormant, 7 waiting for a place" in frame.header


def test_loaded_models_are_listed_first_with_their_slots_rates_and_kv_states() -> None:
    models = [model("cold", "cold"), model("m"), model("z", "loading")]
    now = sample(2.0, (40, 0, 10), models=models)
    frame = frame_of(sample(1.0), now)
    assert [row.cells for row in frame.models] == [
        ("m", "ready", "98 MB", "2/4", "40", "10", "75%", "92 MB", "4 MB"),
        ("z", "loading 40%", "98 MB", "-", "-", "-", "-", "-", "-"),
        ("cold", "cold", "98 MB", "-", "-", "-", "-", "-", "-"),
    ]


def test_tasks_are_listed_in_the_order_of_the_queue_with_their_risen_priority() -> None:
    tasks = [
        task(1, session_id="notes"),
        task(2, state="waiting", position=1, priority="low", effective_priority="high"),
        task(None, state="waiting", position=None, effective_priority=None, context=9),
    ]
    first, second, third = frame_of(None, sample(tasks=tasks)).tasks
    assert first.key == "101" and cells(first)["SESSION"] == "notes"
    assert (cells(first)["POSITION"], cells(first)["CLASS"]) == ("-", "normal")
    assert (cells(second)["POSITION"], cells(second)["CLASS"]) == ("1", "low+")
    assert cells(second)["SESSION"] == "102"
    assert (third.key, cells(third)["POSITION"], cells(third)["CLASS"]) == ("9", "-", "normal")


def test_sessions_are_listed_with_their_history_and_idle_time() -> None:
    [row] = frame_of(None, sample(sessions=[session(7, session_id="diary")])).sessions
    assert row.key == "7"
    assert row.cells == ("done", "low", "m", "77", "2", "5 s", "1000", "diary")


def test_the_lists_of_a_fleet_have_nodes_and_each_has_its_own_rates() -> None:
    def fleet_sample(at: float, tokens: tuple[int, int]) -> Sample:
        counts = [
            {"model_name": "m", "node": node, "value": count}
            for node, count in zip("ab", tokens, strict=True)
        ]
        tasks = [task(1, node=node, output_tokens=n) for node, n in zip("ab", tokens, strict=True)]
        found = sample(at, models=[model(node="a"), model(node="b")], tasks=tasks, stats=FLEET)
        metrics = found.stats["metrics"] | {"generation_tokens": counts}
        return replace(found, stats=found.stats | {"metrics": metrics})

    frame = frame_of(fleet_sample(1.0, (10, 20)), fleet_sample(2.0, (15, 50)))
    (models, model_rows), (tasks, task_rows), (sessions, _) = frame.tables()
    assert models.heads[0] == tasks.heads[0] == sessions.heads[0] == "NODE"
    shown = [dict(zip(models.heads, row.cells, strict=True)) for row in model_rows]
    assert [(m["NODE"], m["MODEL"], m["ANSWER/S"]) for m in shown] == [
        ("a", "m", "5.0"), ("b", "m", "30"),
    ]  # fmt: skip
    shown = [dict(zip(tasks.heads, row.cells, strict=True)) for row in task_rows]
    assert [(t["NODE"], t["TOK/S"]) for t in shown] == [("a", "5.0"), ("b", "30")]
    assert frame.rates.answer == {"m@a": 5.0, "m@b": 30.0}


def test_a_node_s_header_has_its_name_or_why_it_is_lost() -> None:
    here = sample(stats={**FLEET, "reachable": True})
    assert frame_of(None, replace(here, node="a")).header[0].startswith("inferd/9, node a, pid 42")
    lost = sample(stats={**FLEET, "reachable": False, "cause": "its relay was silent"})
    frame = frame_of(None, replace(lost, node="a"))
    assert frame.header == frame.short_header == ("inferd/9, node a is lost: its relay was silent",)


def test_without_a_terminal_it_writes_one_frame_as_tables() -> None:
    with (
        running_daemon(SLOW) as daemon,
        inferd_process(
            "run", "slow", "x" * 2000, "--session", "s", socket=daemon.socket
        ) as process,
    ):
        assert process.stdout is not None and process.stdout.read(1) == b"x"
        result = inferd("top", "--interval", "0.5", socket=daemon.socket)
        assert result.exit_code == 0 and result.stderr == ""
        header, models, tasks, sessions = result.stdout.split("\n\n")
        assert "tasks     1 running, 0 waiting" in header
        assert models.splitlines()[1].split()[:2] == ["slow", "ready"]
        assert "1/2" in models
        heads, row = tasks.splitlines()
        assert heads.split() == list(TASKS.heads)
        shown = dict(zip(TASKS.heads, row.split(), strict=False))
        assert (shown["STATE"], shown["MODEL"], row.split()[-1]) == ("running", "slow", "s")
        assert sessions.splitlines()[1].split()[-1] == "s"

        arguments = ("top", "--once", "--all", "-n", "0.5", "--json")
        reply = document(inferd(*arguments, socket=daemon.socket))
        assert reply["tasks"][0]["session_id"] == "s"
        assert reply["rates"]["answer"]["slow"] > 0
        [(_, rate)] = reply["rates"]["tasks"].items()
        assert 0 < rate <= 200, "a step takes 5 ms"
        process.kill()
        process.communicate()


def test_a_line_break_in_a_session_s_name_starts_no_line() -> None:
    name = "mine\nMODEL  STATE\u2028forged"
    with (
        running_daemon() as daemon,
        Client(daemon.socket) as client,
        client.session("echo", session_id=name),
    ):
        for command in (("top", "--once", "-n", "0.1"), ("sessions",)):
            text = inferd(*command, socket=daemon.socket).stdout
            assert r"mine MODEL  STATE\u2028forged" in text


@pytest.mark.parametrize("interval", ["0", "-1", "1e9"])
def test_its_interval_is_bounded(interval: str) -> None:
    assert inferd("top", "--interval", interval).exit_code == 2
