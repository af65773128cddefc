"""Frames of `top`, computed from samples by pure functions, without a screen or a clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ...daemon.printable import size_text
from ..nodes import name_on_node
from ..output import time_text
from .stats import DRAFTED, MetricSums, acceptance_text, inputs_per_run
from .status_commands import user_text

TASKS_LINE = (
    "tasks     {running} running, {waiting} waiting, {parked} parked, {refused} refused so far"
)
NODE = "NODE"
RISEN = "+"
"""Suffix of a priority above which the task has risen by waiting."""
JsonMap = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """The daemon's state at the time *at*, in seconds of a monotonic clock."""

    at: float
    software: str
    stats: JsonMap
    models: list[JsonMap]
    tasks: list[JsonMap]
    sessions: list[JsonMap]
    node: str | None = None
    """The node of a fleet whose state it is; None for all nodes, or for a single machine."""


@dataclass(frozen=True)
class Rates:
    """Tokens per second: of prompts and answers by model, and of each task by its number. In a
    fleet, `@NODE` follows the model or the number.
    """

    prompt: dict[str, float] = field(default_factory=dict)
    answer: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, float] = field(default_factory=dict)
    computations: dict[str, float] = field(default_factory=dict)
    """The inputs that graphs have computed per second, by model."""

    @classmethod
    def between(cls, before: Sample | None, now: Sample) -> Rates:
        """Return the rates between two samples; none if the daemon was restarted."""
        if before is None or before.stats["instance"] != now.stats["instance"]:
            return cls()
        if (seconds := now.at - before.at) <= 0:
            return cls()
        earlier, tasks = _tasks_by_key(before), _tasks_by_key(now)
        (prompt, answer), (prompt_now, answer_now) = _token_counts(before), _token_counts(now)
        return cls(
            prompt=_rates_of(prompt, prompt_now, seconds),
            answer=_rates_of(answer, answer_now, seconds),
            tasks={
                key: max(0.0, _growth(earlier[key], task)) / seconds
                for key, task in tasks.items()
                if key in earlier
            },
            computations=_rates_of(_computations(before), _computations(now), seconds),
        )


def _tasks_by_key(sample: Sample) -> dict[str, JsonMap]:
    return {_task_key(task): task for task in sample.tasks if task["task"] is not None}


def _task_key(task: JsonMap) -> str:
    return name_on_node(str(task["task"]), task.get("node"))


def _token_counts(sample: Sample) -> tuple[dict[str, float], dict[str, float]]:
    """Return the computed prompt tokens and the answer tokens, by model."""
    sums = MetricSums(sample.stats)
    cached, prompts = sums.by_model("prompt_tokens_cached"), sums.by_model("prompt_tokens")
    computed = {name: count - cached.get(name, 0) for name, count in prompts.items()}
    return computed, sums.by_model("generation_tokens")


def _computations(sample: Sample) -> dict[str, float]:
    return MetricSums(sample.stats).by_model("computations")


def _rates_of(
    before: Mapping[str, float], now: Mapping[str, float], seconds: float
) -> dict[str, float]:
    return {name: max(0.0, n - before.get(name, 0)) / seconds for name, n in now.items()}


def _growth(before: JsonMap, now: JsonMap) -> float:
    """Return the tokens that a task has gained: of its answer, or before that of its prompt."""
    if now["output_tokens"]:
        return float(now["output_tokens"] - before["output_tokens"])
    return float((now["computed_tokens"] or 0) - (before["computed_tokens"] or 0))


class Row(NamedTuple):
    """A line of a table; *key* is a model's name or the number of a context."""

    key: str
    cells: tuple[str, ...]
    node: str | None = None
    """The node of a fleet; models of several nodes may have the same name."""

    def is_of(self, other: Row) -> bool:
        """Return whether both are of the same model, task or session."""
        return (self.key, self.node) == (other.key, other.node)


class Panel(NamedTuple):
    """A table: its title and the heads of its columns."""

    title: str
    heads: tuple[str, ...]
    numbers: frozenset[str]
    importance: tuple[str, ...]
    """All heads, the most important first: a narrow screen leaves the last ones out."""
    names: frozenset[str] = frozenset(("MODEL", "SESSION"))
    """The columns whose cells may be cut."""

    def with_nodes(self) -> Panel:
        """Return the table of a fleet: its first column is the node, which may be cut."""
        first, *others = self.importance
        return self._replace(
            heads=(NODE, *self.heads),
            importance=(first, NODE, *others),
            names=self.names | {NODE},
        )


_OWNED_NAMES = frozenset(("MODEL", "SESSION", "USER"))  # a user's label may be long
MODELS = Panel(
    "models",
    ("MODEL", "STATE", "SIZE", "SLOTS", "PROMPT/S", "ANSWER/S", "DRAFTS", "SLOT KV", "RAM KV"),
    frozenset(("SIZE", "SLOTS", "PROMPT/S", "ANSWER/S", "DRAFTS", "SLOT KV", "RAM KV")),
    ("MODEL", "STATE", "ANSWER/S", "SLOTS", "SIZE", "PROMPT/S", "SLOT KV", "RAM KV", "DRAFTS"),
)
TASKS = Panel(
    "tasks",
    ("POSITION", "STATE", "CLASS", "MODEL", "PROMPT", "ANSWER", "TOK/S", "AGE", "USER", "SESSION"),
    frozenset(("POSITION", "PROMPT", "ANSWER", "TOK/S", "AGE", "USER")),
    ("STATE", "MODEL", "SESSION", "TOK/S", "AGE", "CLASS", "POSITION", "ANSWER", "PROMPT", "USER"),
    _OWNED_NAMES,
)
SESSIONS = Panel(
    "sessions",
    ("STATE", "CLASS", "MODEL", "HISTORY", "TURNS", "IDLE", "USER", "SESSION"),
    frozenset(("HISTORY", "TURNS", "IDLE", "USER")),
    ("SESSION", "STATE", "MODEL", "HISTORY", "IDLE", "CLASS", "TURNS", "USER"),
    _OWNED_NAMES,
)


@dataclass(frozen=True)
class TopFrame:
    """The content of the screen at one time."""

    header: tuple[str, ...]
    short_header: tuple[str, ...]
    """The header for a narrow screen."""
    models: list[Row]
    tasks: list[Row]
    sessions: list[Row]
    rates: Rates
    sample: Sample

    def tables(self) -> list[tuple[Panel, list[Row]]]:
        """Return the tables from top to bottom; those of a fleet have the column of nodes."""
        tables = [(MODELS, self.models), (TASKS, self.tasks), (SESSIONS, self.sessions)]
        if "nodes" not in self.sample.stats:
            return tables
        return [
            (panel.with_nodes(), [r._replace(cells=(r.node or "-", *r.cells)) for r in rows])
            for panel, rows in tables
        ]

    def document(self) -> JsonMap:
        """Return the frame for JSON."""
        sample = {f: getattr(self.sample, f) for f in ("stats", "models", "tasks", "sessions")}
        return sample | {"rates": asdict(self.rates)}


def frame_of(before: Sample | None, now: Sample) -> TopFrame:
    """Return the frame of the sample *now*, with the rates since *before*."""
    rates = Rates.between(before, now)
    sums = MetricSums(now.stats)
    loaded_first = sorted(now.models, key=lambda m: (m["state"] in ("cold", "failed"), m["name"]))
    return TopFrame(
        header=_header(now, sums, rates),
        short_header=_short_header(now, rates),
        models=[_model_row(model, sums, rates) for model in loaded_first],
        tasks=[_task_row(task, rates) for task in now.tasks],
        sessions=[_session_row(session) for session in now.sessions],
        rates=rates,
        sample=now,
    )


def _header(now: Sample, sums: MetricSums, rates: Rates) -> tuple[str, ...]:
    stats = now.stats
    if _is_lost(stats):
        return _lost_header(now)
    draining = ", draining" if stats["draining"] else ""
    kv, bounds = sums.by("kv_bytes", "tier"), sums.by("kv_bytes_max", "tier")
    disk = f"{_bytes(kv, 'disk')} of {_bytes(bounds, 'disk')}"
    return (
        f"{_title(now)}, pid {stats['pid']}, up for {time_text(stats['uptime_s'])}{draining}",
        f"tokens/s  {_sum_text(rates.prompt)} prompt, {_sum_text(rates.answer)} answer"
        + (f"; {acceptance_text(sums)} of drafts accepted" if sums.total(DRAFTED) else ""),
        TASKS_LINE.format(**stats),
        _sessions_line(stats),
        (
            f"KV        {_bytes(kv, 'slots')} in slots, {_bytes(kv, 'memory')} in memory"
            f", {disk} on disk"
        ),
        *_graphs_line(sums, rates),
    )


def _title(now: Sample) -> str:
    return now.software if now.node is None else f"{now.software}, node {now.node}"


def _is_lost(stats: JsonMap) -> bool:
    return not stats.get("reachable", True)


def _lost_header(now: Sample) -> tuple[str, ...]:
    return (f"{_title(now)} is lost: {now.stats['cause']}",)


def _sessions_line(stats: JsonMap) -> str:
    line = "sessions  {sessions} of {sessions_max}, {sessions_dormant} dormant"
    if stats["sessions_waiting"]:
        line += ", {sessions_waiting} waiting for a place"
    return line.format(**stats)


def _graphs_line(sums: MetricSums, rates: Rates) -> Iterator[str]:
    """Yield the line on graphs, if any has computed."""
    if sums.total("computation_runs"):
        running, waiting = (sums.total(f"computations_{s}") for s in ("running", "waiting"))
        yield (
            f"graphs    {_sum_text(rates.computations)} inputs/s"
            f", {inputs_per_run(sums):.1f} at a time; {running:.0f} running, {waiting:.0f} waiting"
        )


def _short_header(now: Sample, rates: Rates) -> tuple[str, ...]:
    if _is_lost(now.stats):
        return _lost_header(now)
    draining = ", draining" if now.stats["draining"] else ""
    return (
        f"{_title(now)}, up for {time_text(now.stats['uptime_s'])}{draining}",
        "{running} running, {waiting} waiting, {parked} parked".format(**now.stats),
        f"{_sum_text(rates.prompt)} prompt, {_sum_text(rates.answer)} answer tokens/s",
    )


def _bytes(sizes: Mapping[str, float], tier: str) -> str:
    return size_text(int(sizes.get(tier, 0)))


def _sum_text(rates: Mapping[str, float]) -> str:
    return _rate_text(sum(rates.values()) if rates else None)


def _rate_text(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.1f}" if 0 < rate < 10 else f"{rate:.0f}"


def _model_row(model: JsonMap, sums: MetricSums, rates: Rates) -> Row:
    name, node, info = model["name"], model.get("node"), model["info"] or {}
    labels = {"model_name": name} | ({} if node is None else {"node": node})
    kv = sums.by("kv_bytes", "tier", **labels)
    used = sums.total("num_requests_running", **labels)
    state = model["state"]
    cells = (
        name,
        f"{state} {model['progress']:.0%}" if state == "loading" else state,
        size_text(model["size_bytes"]) if model["size_bytes"] else "-",
    )
    if not info:
        return Row(name, cells + ("-",) * (len(MODELS.heads) - len(cells)), node)
    key = name_on_node(name, node)
    rates_of_model = (_rate_text(rates.prompt.get(key)), _rate_text(rates.answer.get(key)))
    kv_cells = (_bytes(kv, "slots"), _bytes(kv, "memory"))
    used_slots, drafts = f"{used:.0f}/{info['slots']}", acceptance_text(sums, **labels)
    return Row(name, (*cells, used_slots, *rates_of_model, drafts, *kv_cells), node)


def owner_text(entry: JsonMap) -> str:
    """Return the user of a session or task, with the label of its client if it has one."""
    label = entry.get("label")
    return f"{user_text(entry)} {label}" if label else user_text(entry)


def _task_row(task: JsonMap, rates: Rates) -> Row:
    risen = task["effective_priority"] not in (None, task["priority"])
    cells = (
        str(task["position"] or "-"),
        task["state"],
        task["priority"] + (RISEN if risen else ""),
        task["model"],
        str(task["prompt_tokens"]),
        str(task["output_tokens"]),
        _rate_text(rates.tasks.get(_task_key(task))) if task["state"] == "running" else "-",
        time_text(task["age_s"]),
        owner_text(task),
        task["session_id"] or str(task["context"]),
    )
    return Row(str(task["context"]), cells, task.get("node"))


def _session_row(session: JsonMap) -> Row:
    cells = (
        session["state"],
        session["priority"],
        session["model"],
        str(session["tokens"]),
        str(session["turns"]),
        time_text(session["idle_s"]),
        owner_text(session),
        session["session_id"] or str(session["context"]),
    )
    return Row(str(session["context"]), cells, session.get("node"))
