"""Counters of the daemon's events: bounded names, and the bounds of refusals."""

from __future__ import annotations

import pytest

from inferd.backends.errors import (
    Busy,
    EndOfSequence,
    InferdError,
    InvalidArgument,
    Outcome,
    OutOfMemory,
    PromptTooLong,
    QuotaExceeded,
    SessionBusy,
    ShuttingDown,
)
from inferd.daemon.config.settings import SETTINGS
from inferd.daemon.metrics.daemon_counters import (
    BOUNDS,
    MODEL_LABELS_MAX,
    OTHERS,
    QUEUE_BOUNDS,
    DaemonCounters,
    reason_of,
)
from inferd.daemon.metrics.families import FAMILIES, SECTIONS


def test_names_of_models_are_bounded() -> None:
    counters = DaemonCounters()
    names = [counters.bounded_name(f"m{n}") for n in range(MODEL_LABELS_MAX + 10)]
    assert names[:MODEL_LABELS_MAX] == [f"m{n}" for n in range(MODEL_LABELS_MAX)]
    assert set(names[MODEL_LABELS_MAX:]) == {OTHERS}
    assert counters.bounded_name("m0") == "m0"


def test_counters_of_outcomes_loads_and_workers_start_at_zero() -> None:
    """A rate misses a counter's first step without an earlier sample."""
    counters = DaemonCounters()
    name = (counters.bounded_name("m"),)
    outcomes = {("m", outcome.value): 0 for outcome in Outcome}
    assert dict(counters.counts["request_outcomes"]) == outcomes
    for family in ("model_load_failures", "model_unloads", "worker_restarts"):
        assert dict(counters.counts[family]) == {name: 0}
    assert sum(counters.histograms["model_load_seconds"][name].counts) == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Busy("full", data={"bound": "tasks-waiting-max"}), "tasks-waiting-max"),
        (Busy("full", data={"bound": "of another kind"}), "other"),
        (Busy("full", data={"sessions_max": 3}), "sessions-max"),
        (Busy("full", data={"connections_max": 3}), "connections-max"),
        (Busy("swapped", data={"retry_after_s": 0.0}), "other"),
        (QuotaExceeded("yours", data={"bound": "access.r.sessions-max"}), "quota"),
        (ShuttingDown("it ends"), "draining"),
        (OutOfMemory("too large"), "memory"),
        (SessionBusy("a turn is under way"), None),
        (InvalidArgument("no"), None),
        (PromptTooLong("no"), None),
    ],
)
def test_a_refusal_counts_under_its_bound_and_a_mistake_under_none(
    error: InferdError, reason: str | None
) -> None:
    assert reason_of(error) == reason
    counters = DaemonCounters()
    counters.call_refused("stream", error)
    assert counters.counts["call_errors"]["stream", error.name, error.outcome] == 1
    counted = {r: n for (r,), n in counters.counts["admission_rejections"].items() if n}
    assert counted == ({} if reason is None else {reason: 1})


def test_the_bounds_are_settings() -> None:
    assert {*QUEUE_BOUNDS, *BOUNDS.values()} <= set(SETTINGS)


def test_the_end_of_a_turn_with_tokens_on_demand_is_not_an_error() -> None:
    counters = DaemonCounters()
    counters.call_refused("compute_single", EndOfSequence("it has ended"))
    assert not counters.counts["call_errors"]


def test_the_table_has_each_name_once_and_bounds_that_rise() -> None:
    assert len(FAMILIES) == sum(map(len, SECTIONS.values()))
    for family in FAMILIES.values():
        assert (family.kind == "histogram") == bool(family.bounds), family.name
        assert list(family.bounds) == sorted(set(family.bounds)), family.name
        assert not set(family.labels) & {"user", "uid", "owner", "session", "session_id", "client"}
        assert family.doc.endswith(".")
