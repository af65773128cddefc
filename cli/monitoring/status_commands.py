"""Commands that show models, sessions, tasks and the state of the daemon."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any

import typer

from ...daemon.printable import size_text
from ..client import socket_of
from ..nodes import NODE_COLUMN, Node, check_node, on_nodes
from ..one_shot import OneShotClient
from ..options import AllUsers, JsonOutput, Label, SocketPath
from ..output import Columns, table_of, time_text, write, write_json, write_list

ID_DIGITS = 12
TITLE_WIDTH = 40
Search = Annotated[
    str,
    typer.Option("--search", metavar="TEXT", help="Only sessions with TEXT in title or beginning."),
]
Deleted = Annotated[
    bool,
    typer.Option("--deleted", help="List sessions that the daemon has deleted by itself, and why."),
]
METRIC_KEYS = ("metrics", "models", "retry_after_ratio")
"""The part of the daemon's statistics that `inferd stats` shows; `inferd status` shows the rest."""


def processor_text(model: Mapping[str, Any]) -> str:
    """Return where a loaded model's layers run, or the device that computes a graph."""
    from ...backends.model_spec import CPU

    if (device := model.get("device") or CPU) != CPU:  # daemons of older versions have none
        return str(device).upper()
    layers = model["info"].get("n_gpu_layers", 0)
    return f"{layers} layers on GPU" if layers else "100% CPU"


def memory_text(model: Mapping[str, Any]) -> str | None:
    """Return the memory in use: measured on the host, and estimated on devices. Another name of a
    model has none of its own.
    """
    if of := model.get("of"):
        return f"in {of}"
    if not model.get("resident_bytes"):  # an older daemon, or no process yet
        return None
    host = size_text(model["resident_bytes"])
    devices = sum(((model["memory"] or {}).get("devices") or {}).values())
    return f"{host} + {size_text(devices)} GPU" if devices else host


def until_text(model: Mapping[str, Any]) -> str:
    """Return when the model will be unloaded, or what keeps it loaded."""
    if model["state"] == "loading":
        return f"loading {model['progress']:.0%}"
    if model["state"] != "ready":
        return str(model["state"])
    if model.get("pinned"):
        return "pinned"
    if model["leases"] or model["tasks"]:
        return "in use"
    expires_s = model.get("expires_s")
    if expires_s is None:
        return "memory is short"
    return f"in {time_text(expires_s)}" if expires_s >= 1 else "now"


def file_text(model: Mapping[str, Any]) -> str | None:
    """Return what the model's name stands for: its file, and the target of a swap; or the model of
    which it is another name.
    """
    if of := model.get("of"):
        return f"another name of {of}"
    file = PurePath(model["file"]).name or ("echo" if model["backend"] == "echo" else None)
    swapped_to = model.get("swapped_to")
    return f"{file or '-'}, swapped to {swapped_to}" if swapped_to else file


def expiry_text(session: Mapping[str, Any]) -> str | None:
    """Return when a dormant session is deleted because of its age."""
    if session.get("kept"):
        return "kept"
    expires_s = session.get("expires_s")
    return None if expires_s is None else time_text(expires_s)


def shortened(title: str) -> str:
    """Return a title that fits into a table."""
    return title if len(title) <= TITLE_WIDTH else f"{title[: TITLE_WIDTH - 1]}…"


def user_text(entry: Mapping[str, Any]) -> str:
    """Return the user of a session or task: a gateway's own users have names."""
    return str(entry.get("user") or entry["uid"])


MEDIA_NAMES = {"image": "images", "audio": "sounds"}


def media_text(model: Mapping[str, Any]) -> str | None:
    """Return what a model reads beside text, or None."""
    kinds = [kind for kind in model.get("reads") or () if kind != "text"]
    return ", ".join(MEDIA_NAMES.get(kind, kind) for kind in kinds) or None


_OPTIONAL = {
    **{"LABEL": "label", "NODE": "node", "SHARED BY": "shared_by"},
    **{"READS": "media", "TENSORS": "tensors"},
}


def columns_for(entries: Sequence[Mapping[str, Any]], columns: Columns) -> Columns:
    """Return the columns to show: without those of `_OPTIONAL` that no entry has."""
    unused = {
        name
        for name, key in _OPTIONAL.items()
        if all(entry.get(key) in (None, "") for entry in entries)
    }
    return {name: text for name, text in columns.items() if name not in unused}


def _tensors_text(info: Mapping[str, Any]) -> str:
    """Return the inputs and outputs of a graph, without their names; empty for other models."""
    from ...backends.tensors import shape_text

    inputs, outputs = (
        ", ".join(f"{one['type']} {shape_text(one['shape'])}" for one in info.get(key) or ())
        for key in ("inputs", "outputs")
    )
    return shortened(f"{inputs} → {outputs}") if outputs else ""


def _position(task: dict[str, Any] | None) -> int | None:
    """Return a task's position in the queue; None if it has a slot or its worker did not reply."""
    return (task and task["position"]) or None


def _priority(task: dict[str, Any]) -> str:
    now, own = task["effective_priority"], task["priority"]
    return own if now in (own, None) else f"{own}, now {now}"


def _starts_in(task: dict[str, Any]) -> str | None:
    if not _position(task):
        return None
    starts_in_s = task["starts_in_s"]
    return "unknown" if starts_in_s is None else time_text(starts_in_s)


LOADED_MODELS: Columns = {
    **NODE_COLUMN,
    "NAME": "name",
    "ID": lambda m: str(m["info"].get("fingerprint", "-"))[:ID_DIGITS],
    "SIZE": lambda m: size_text(m["size_bytes"]) if m["size_bytes"] else None,
    "MEMORY": memory_text,
    "PROCESSOR": processor_text,
    "READS": "media",
    "CONTEXT": lambda m: m["info"].get("ctx_size") or None,
    "TENSORS": "tensors",
    "UNTIL": until_text,
    "SESSIONS": "sessions",
    "TASKS": "tasks",
    "FILE": file_text,
}
OPEN_SESSIONS: Columns = {
    **NODE_COLUMN,
    "SESSION": "context",
    "ID": "session_id",
    "MODEL": "model",
    "STATE": "state",
    "POSITION": lambda s: _position(s["task"]),
    "PRIORITY": "priority",
    "HISTORY": "tokens",
    "ANSWER": lambda s: s["task"] and s["task"]["output_tokens"],
    "TIME": lambda s: time_text(s["task"]["age_s"] if s["task"] else s["idle_s"]),
}
"""TIME is the age of the task, or the time since the last turn."""
SESSIONS: Columns = {
    **NODE_COLUMN,
    "ID": "session_id",
    "SESSION": lambda s: s["context"] or None,
    "USER": user_text,
    "LABEL": lambda s: s.get("label") or None,
    "MODEL": "model",
    "STATE": "state",
    "HISTORY": "tokens",
    "TURNS": "turns",
    "IDLE": lambda s: time_text(s["idle_s"]),
    "ON DISK": lambda s: {True: "yes", False: "cannot be written", None: "no"}[s["persisted"]],
    "DELETED IN": lambda s: expiry_text(s),
    "TITLE": lambda s: shortened(s.get("title") or ""),
}
DELETION_REASONS: dict[str, str] = {
    "age": "not used for dormant-days-max",
    "sessions": "more than dormant-sessions-max",
    "memory": "the sessions took too much memory",
}
DELETIONS: Columns = {
    **NODE_COLUMN,
    "ID": "session_id",
    "MODEL": "model",
    "DELETED": lambda note: f"{time_text(max(0.0, time.time() - note['at']))} ago",
    "REASON": lambda note: DELETION_REASONS.get(note["reason"], note["reason"]),
    "TITLE": lambda note: shortened(note["title"]),
}
TASKS: Columns = {
    **NODE_COLUMN,
    "MODEL": "model",
    "POSITION": _position,
    "STATE": "state",
    "SESSION": "context",
    "ID": "session_id",
    "USER": user_text,
    "LABEL": lambda s: s.get("label") or None,
    "PRIORITY": _priority,
    "PROMPT": "prompt_tokens",
    "ANSWER": "output_tokens",
    "AGE": lambda t: time_text(t["age_s"]),
    "STARTS IN": _starts_in,
}


def ps(node: Node = None, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """List the loaded models, your sessions and your tasks."""
    with OneShotClient(socket) as client:
        check_node(client, node)
        models = on_nodes(client.models(), node)
        sessions, tasks = on_nodes(client.sessions(), node), on_nodes(client.queue(), node)
    models = [m for m in models if m["state"] not in ("cold", "failed")]
    if as_json:
        write_json({"models": models, "sessions": sessions, "tasks": tasks})
        return
    for model in models:
        model["info"] = model["info"] or {}
        model["media"], model["tensors"] = media_text(model), _tensors_text(model["info"])
        model["sessions"] = sum(_is_of_model(session, model) for session in sessions)
    table_of(columns_for(models, LOADED_MODELS), models)
    if sessions:
        running = {task["context"]: task for task in tasks}
        write("")
        entries = [s | {"task": running.get(s["context"])} for s in sessions]
        table_of(columns_for(entries, OPEN_SESSIONS), entries)


def _is_of_model(session: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    return session["model"] == model["name"] and session.get("node") == model.get("node")


def sessions(
    search: Search = "",
    deleted: Deleted = False,
    all_users: AllUsers = False,
    label: Label = "",
    node: Node = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """List your sessions, open and dormant; with --label, only those of that label."""
    with OneShotClient(socket, label=label) as client:
        check_node(client, node)
        if deleted:
            notes = on_nodes(client.list_deletions(), node)
        else:
            listed = client.sessions(dormant=True, all_users=all_users, search=search)
            found = on_nodes(listed, node)
    if deleted:
        write_list(as_json, "deletions", notes, columns_for(notes, DELETIONS))
    else:
        write_list(as_json, "sessions", found, columns_for(found, SESSIONS))


def queue(
    all_users: AllUsers = False,
    label: Label = "",
    node: Node = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """List running and waiting tasks in the order of the queue; with --label, only those of it."""
    with OneShotClient(socket, label=label) as client:
        check_node(client, node)
        found = on_nodes(client.queue(all_users=all_users), node)
    write_list(as_json, "tasks", found, columns_for(found, TASKS))


def status(socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Show the state of the daemon.

    `inferd stats` shows its metrics.
    """
    with OneShotClient(socket) as client:
        stats, hello = client.stats(), client.server
    stats["socket"], stats["software"] = str(socket_of(socket)), hello.software
    if as_json:
        state = {key: value for key, value in stats.items() if key not in METRIC_KEYS}
        write_json(state | {"models": sorted(stats["models"])})
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
            write("{component} fails: {effect}: {cause} ({remedy})".format(**component))
    write(f"metrics for Prometheus: {stats['metrics_address'] or 'not served'}")
    write(f"log: {_destination(stats['log'])}")
    if pending := ", ".join(stats["pending_restart"]):
        write(f"changed in the file, applied after a restart: {pending}")
    names = ", ".join(stats["models"]) or "none"
    write(f"models loaded: {names}; connections: {stats['connections']}; cores: {stats['cores']}")


def _destination(log: dict[str, Any]) -> str:
    if log["file"] is not None:
        return str(log["file"])
    if log["journal"] is not None:
        return f"the journal of {log['journal']['unit'] or 'the system'}"
    return "standard error"
