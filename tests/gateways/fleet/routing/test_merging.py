"""Results of several nodes become one."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.gateways.fleet.routing.calls import merge_results, session_homes


def mapped(node: str, handle: int) -> int:
    return 100 * (ord(node) - ord("a") + 1) + handle


def merge(call: str, **results: dict[str, Any]) -> dict[str, Any]:
    return merge_results(call, results, mapped)


def model(name: str, state: str = "cold", **values: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "leases": 0, "tasks": 0, **values}


def test_a_model_is_one_entry_with_the_best_state_and_the_sums() -> None:
    merged = merge(
        "models",
        a={"models": [model("m", leases=1, tasks=2), model("only-a")]},
        b={"models": [model("m", "ready", leases=3, tasks=4)]},
    )
    one, two = merged["models"]
    assert (one["name"], one["state"], one["leases"], one["tasks"]) == ("m", "ready", 4, 6)
    assert one["node"] == "b" and [entry["node"] for entry in one["nodes"]] == ["a", "b"]
    assert [entry["leases"] for entry in one["nodes"]] == [1, 3]
    assert two["name"] == "only-a" and len(two["nodes"]) == 1


def test_sessions_and_tasks_have_their_node_and_the_clients_handles() -> None:
    sessions = merge(
        "sessions",
        a={"sessions": [{"context": 1}, {"context": None}]},
        b={"sessions": [{"context": 1}]},
    )
    assert sessions["sessions"] == [
        {"context": 101, "node": "a"}, {"context": None, "node": "a"}, {"context": 201, "node": "b"}
    ]  # fmt: skip
    tasks = merge(
        "queue",
        a={"tasks": [{"context": 2, "model": "y"}, {"context": 1, "model": "x"}]},
        b={"tasks": [{"context": 3, "model": "x"}]},
    )
    assert [(t["model"], t["node"], t["context"]) for t in tasks["tasks"]] == [
        ("x", "a", 101), ("x", "b", 203), ("y", "a", 102)
    ]  # fmt: skip


def test_groups_of_usage_are_sums_and_limits_have_their_node() -> None:
    """A daemon omits `limits` if there are none."""
    keys = {"start": None, "uid": None, "user": None, "label": None, "key": None}
    limit = {"bound": "requests-day-max", "used": 3, "limit": 9, "ends_at": 86_400.0}
    merged = merge(
        "usage",
        a={"usage": [{**keys, "model": "m", "requests": 1}], "since": 7_200.0},
        b={
            "usage": [{**keys, "model": model, "requests": 2} for model in ("m", "n")],
            "since": 3_600.0,
            "limits": [limit],
        },
    )
    assert [(row["model"], row["requests"]) for row in merged["usage"]] == [("m", 3), ("n", 2)]
    assert merged["since"] == 3_600 and merged["limits"] == [{**limit, "node": "b"}]


def test_usage_of_a_users_keys_is_merged_by_name_whatever_number_a_node_gave_the_user() -> None:
    keys = {"start": 3_600.0, "label": "", "model": None}

    def row(uid: int, user: str, key: str, requests: int) -> dict[str, Any]:
        return {**keys, "uid": uid, "user": user, "key": key, "requests": requests}

    merged = merge(
        "usage",
        a={"usage": [row(7, "@ada", "phone", 1), row(1000, "", "", 5)], "since": 0.0},
        b={"usage": [row(9, "@ada", "phone", 2), row(7, "@bob", "phone", 4)], "since": 0.0},
    )
    assert [(row["uid"], row["user"], row["requests"]) for row in merged["usage"]] == [
        *((7, "@ada", 3), (1000, "", 5), (7, "@bob", 4))
    ]


def test_bounds_of_dormant_sessions_are_sums_and_notes_have_their_node_and_order() -> None:
    bounds = {"dormant_sessions": 1, "dormant_sessions_max": 10}
    found = merge(
        "sessions",
        a={"sessions": [], **bounds, "dormant_s_max": 7.0},
        b={"sessions": [], **bounds, "dormant_s_max": 5.0},
        older={"sessions": []},
    )
    del found["sessions"]
    assert found == {"dormant_sessions": 2, "dormant_sessions_max": 20, "dormant_s_max": 5.0}
    notes = merge("list_deletions", a={"deletions": [{"at": 1}]}, b={"deletions": [{"at": 2}]})
    assert notes["deletions"] == [{"at": 2, "node": "b"}, {"at": 1, "node": "a"}]


def statistics(**values: Any) -> dict[str, Any]:
    counts = (
        "connections sessions sessions_max sessions_yielded sessions_waiting sessions_dormant"
        " sessions_expired waiting running parked refused recovered cores"
    )
    return {
        "stats": {
            **dict.fromkeys(counts.split(), 1),
            **{"uptime_s": 1.0, "instance": 3, "pid": 42},
            "draining": False,
            "models": {"m": {"steps": 1}},
            "components": [{"component": "journal", "up": True}],
            "pending_restart": [],
            "metrics": {"slots": [{"model_name": "m", "value": 4}]},
            **values,
        }
    }


def test_statistics_are_sums_and_samples_have_their_node() -> None:
    merged = merge(
        "stats",
        a=statistics(uptime_s=5.0, draining=True, pending_restart=["cores"]),
        b=statistics(running=7, pending_restart=["cores", "socket"]),
    )["stats"]
    assert (merged["running"], merged["waiting"], merged["uptime_s"]) == (8, 2, 5.0)
    assert merged["draining"] is False, "a fleet drains once all of its nodes do"
    assert set(merged["models"]) == {"m@a", "m@b"}
    assert merged["metrics"]["slots"] == [
        {"model_name": "m", "value": 4, "node": "a"}, {"model_name": "m", "value": 4, "node": "b"}
    ]  # fmt: skip
    assert [c["node"] for c in merged["components"]] == ["a", "b"]
    assert merged["pending_restart"] == ["cores", "socket"]
    assert [(n["running"], n["uptime_s"]) for n in merged["nodes"].values()] == [(1, 5.0), (7, 1.0)]


@pytest.mark.parametrize("call", ["delete_session", "delete_state"])
def test_something_is_deleted_if_one_node_had_it(call: str) -> None:
    for found in (True, False):
        merged = merge(call, a={"deleted": False}, b={"deleted": found})
        assert merged == {"deleted": found}


def test_other_results_are_those_of_the_first_node() -> None:
    assert merge("log_level", a={"levels": {"ipc": "info"}}, b={"levels": {}}) == {
        "levels": {"ipc": "info"}
    }


def test_a_history_is_that_of_the_node_that_has_it() -> None:
    for context, shown in ((7, 107), (None, None)):
        merged = merge("history", a={"messages": [], "session": {"context": context}})
        assert merged == {"messages": [], "session": {"context": shown, "node": "a"}}


def test_homes_are_those_of_sessions_with_an_id() -> None:
    results: dict[str, dict[str, Any]] = {
        "a": {"sessions": [{"label": "", "session_id": "x"}, {"label": "", "session_id": None}]},
        "b": {"sessions": [{"label": "l", "session_id": "x"}]},
    }
    assert list(session_homes(results)) == [("", "x", "a"), ("l", "x", "b")]
