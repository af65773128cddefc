"""Commands that show models, sessions, tasks and the state of the daemon."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...residency.sizes import size_text
from ..client import socket_of
from ..one_shot import OneShotClient
from ..options import JsonOutput, SocketPath
from ..output import table, time_text, write, write_json

ID_DIGITS = 12
SESSION_HEADS = (
    "SESSION", "ID", "MODEL", "STATE", "PLACE", "PRIORITY", "HISTORY", "ANSWER", "FOR",
)  # fmt: skip


def ps(socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """List the loaded models, your sessions and your tasks."""
    with OneShotClient(socket) as client:
        models = [m for m in client.models() if m["state"] not in ("cold", "failed")]
        sessions, tasks = client.sessions(), client.queue()
    if as_json:
        write_json({"models": models, "sessions": sessions, "tasks": tasks})
        return
    heads = ("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL", "SESSIONS", "TASKS")
    table(heads, [_model_row(m, sessions) for m in models])
    if sessions:
        running = {task["context"]: task for task in tasks}
        write("")
        table(SESSION_HEADS, [_session_row(s, running.get(s["context"])) for s in sessions])


def _model_row(model: dict[str, Any], sessions: list[dict[str, Any]]) -> tuple[object, ...]:
    info = model["info"] or {}
    return (
        model["name"],
        str(info.get("fingerprint", "-"))[:ID_DIGITS],
        size_text(info.get("size_bytes") or model["size_bytes"]),
        _processor(info),
        info.get("ctx_size", "-"),
        _until(model),
        sum(session["model"] == model["name"] for session in sessions),
        model["tasks"],
    )


def _processor(info: dict[str, Any]) -> str:
    layers = info.get("n_gpu_layers", 0)
    return f"{layers} layers on GPU" if layers else "100% CPU"


def _until(model: dict[str, Any]) -> str:
    if model["state"] != "ready":
        return f"{model['state']} {model['progress']:.0%}"
    if model.get("pinned"):
        return "pinned"
    if model["leases"] or model["tasks"]:
        return "in use"
    left_s = model.get("expires_s")
    return f"idle for {time_text(model['idle_s'])}" if left_s is None else time_text(left_s)


def _session_row(session: dict[str, Any], task: dict[str, Any] | None) -> tuple[object, ...]:
    return (
        session["context"],
        session["session_id"] or "-",
        session["model"],
        session["state"],
        _place(task),
        session["priority"],
        session["tokens"],
        task["output_tokens"] if task else "-",
        time_text(task["for_s"] if task else session["idle_s"]),
    )


def _place(task: dict[str, Any] | None) -> object:
    """Return a task's place in the queue; "-" in a slot, or if its worker is too busy to reply."""
    return (task and task["position"]) or "-"


def sessions(
    all_users: Annotated[
        bool, typer.Option("--all", help="Include all users; for root and the daemon's user.")
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """List your sessions, open and dormant ones."""
    with OneShotClient(socket) as client:
        found = client.sessions(dormant=True, all_users=all_users)
    if as_json:
        write_json({"sessions": found})
        return
    heads = ("ID", "SESSION", "USER", "MODEL", "STATE", "HISTORY", "TURNS", "IDLE", "ON DISK")
    table(heads, [_listed_row(session) for session in found])


def _listed_row(session: dict[str, Any]) -> tuple[object, ...]:
    return (
        session["session_id"] or "-",
        session["context"] or "-",
        session["uid"],
        session["model"],
        session["state"],
        session["tokens"],
        session["turns"],
        time_text(session["idle_s"]),
        {True: "yes", False: "cannot be written", None: "no"}[session["persisted"]],
    )


def queue(
    all_users: Annotated[
        bool, typer.Option("--all", help="Include all users; for root and the daemon's user.")
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """List running and waiting tasks, in the order of the queue."""
    with OneShotClient(socket) as client:
        tasks = client.queue(all_users=all_users)
    if as_json:
        write_json({"tasks": tasks})
        return
    heads = (
        "MODEL", "PLACE", "STATE", "SESSION", "ID", "USER", "PRIORITY", "PROMPT", "ANSWER", "FOR",
        "STARTS IN",
    )  # fmt: skip
    table(heads, [_task_row(task) for task in tasks])


def _task_row(task: dict[str, Any]) -> tuple[object, ...]:
    now, own = task["effective_priority"], task["priority"]
    starts_in_s = task["starts_in_s"] if _place(task) != "-" else None
    return (
        task["model"],
        _place(task),
        task["state"],
        task["context"],
        task["session_id"] or "-",
        task["uid"],
        own if now in (own, None) else f"{own}, now {now}",
        task["prompt_tokens"],
        task["output_tokens"],
        time_text(task["for_s"]),
        "-" if starts_in_s is None else time_text(starts_in_s),
    )


def status(socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Show the state of the daemon.

    `inferd stats` shows its metrics.
    """
    with OneShotClient(socket) as client:
        stats, hello = client.stats(), client.server
    stats["socket"], stats["software"] = str(socket_of(socket)), hello.software
    if as_json:
        write_json(stats)
        return
    write(
        f"{hello.software} at {stats['socket']}, pid {stats['pid']}"
        f", up for {time_text(stats['uptime_s'])}{', draining' if stats['draining'] else ''}"
    )
    write(
        f"sessions: {stats['sessions']} of {stats['sessions_max']}"
        f"; tasks: {stats['running']} running, {stats['waiting']} waiting"
        f", {stats['parked']} parked, {stats['refused']} refused so far"
    )
    for component in stats["components"]:
        if not component["up"]:
            name, effect = component["component"], component["effect"]
            write(f"{name} fails: {effect}: {component['cause']} ({component['remedy']})")
    write(f"metrics for Prometheus: {stats['metrics_address'] or 'not served'}")
    write(f"log: {_log_place(stats['log'])}")
    if waiting := ", ".join(stats["restart_for"]):
        write(f"changed in the file, applied after a restart: {waiting}")
    names = ", ".join(stats["models"]) or "none"
    write(f"models loaded: {names}; connections: {stats['connections']}; cores: {stats['cores']}")


def _log_place(log: dict[str, Any]) -> str:
    if log["file"] is not None:
        return str(log["file"])
    if log["journal"] is not None:
        return f"the journal of {log['journal']['unit'] or 'the system'}"
    return "standard error"
