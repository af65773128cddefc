"""Samples for the tests of `top`."""

from __future__ import annotations

from typing import Any

from inferd.cli.monitoring.top_view import Sample

__all__ = ("FLEET", "model", "sample", "session", "task")

FLEET: dict[str, Any] = {"nodes": {"a": {}, "b": {}}}
"""Statistics of a fleet, beside those that a daemon has, too."""


def model(name: str = "m", state: str = "ready", **more: Any) -> dict[str, Any]:
    info = {"slots": 4, "size_bytes": 96_000_000} if state == "ready" else None
    reply = {"name": name, "state": state, "info": info, "size_bytes": 98_000_000, "progress": 0.4}
    return reply | more


def task(number: int | None = 1, **more: Any) -> dict[str, Any]:
    reply = {
        "task": number, "context": 100 + (number or 0), "uid": 1000, "session_id": None,
        "model": "m", "state": "running", "priority": "normal", "effective_priority": "normal",
        "position": 0, "prompt_tokens": 50, "computed_tokens": 10, "output_tokens": 0, "age_s": 3.0,
    }  # fmt: skip
    return reply | more


def session(context: int = 101, **more: Any) -> dict[str, Any]:
    reply = {
        "context": context, "session_id": None, "uid": 1000, "model": "m", "state": "done",
        "priority": "low", "tokens": 77, "turns": 2, "idle_s": 5.0,
    }  # fmt: skip
    return reply | more


def counted(prompt: float, cached: float, rendered: float) -> dict[str, Any]:
    """Return metrics of the model m."""
    return {
        name: [{"model_name": "m", "value": value}]
        for name, value in (
            ("prompt_tokens", prompt),
            ("prompt_tokens_cached", cached),
            ("generation_tokens", rendered),
        )
    }


def sample(at: float = 0.0, counts: tuple[float, float, float] = (0, 0, 0), **more: Any) -> Sample:
    figures = counted(*counts) | {
        "num_requests_running": [{"model_name": "m", "priority": "low", "value": 2}],
        "kv_bytes": [
            {"model_name": "m", "tier": "slots", "value": 92e6},
            {"model_name": "m", "tier": "memory", "value": 4e6},
            {"model_name": "", "tier": "disk", "value": 7e8},
        ],
        "kv_bytes_max": [{"tier": "disk", "value": 1e10}],
        "spec_decode_num_draft_tokens": [{"model_name": "m", "drafter": "ngram", "value": 40}],
        "spec_decode_num_accepted_tokens": [{"model_name": "m", "drafter": "ngram", "value": 30}],
    }
    stats = {
        "instance": 1, "pid": 42, "uptime_s": 300.0, "draining": False, "running": 2, "waiting": 3,
        "parked": 1, "refused": 5, "sessions": 4, "sessions_max": 100, "sessions_dormant": 6,
        "sessions_waiting": 0,
        "metrics": figures,
    } | more.pop("stats", {})  # fmt: skip
    reply: dict[str, Any] = {"models": [model()], "tasks": [task()], "sessions": [session()]}
    return Sample(at=at, software="inferd/9", stats=stats, **(reply | more))
