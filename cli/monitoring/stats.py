"""`inferd stats`: tables of the daemon's metrics since its start, and sums of these metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...backends.errors import Outcome
from ...daemon.printable import size_text
from ...scheduler import PRIORITIES
from ..nodes import Node, name_on_node, stats_on
from ..one_shot import OneShotClient
from ..options import JsonOutput, SocketPath
from ..output import table, time_text, write, write_json
from .status_commands import METRIC_KEYS

Section = tuple[tuple[str, ...], list[tuple[object, ...]]]
TIERS = ("slot", "memory", "disk")


class MetricSums:
    """The metrics in a daemon's `stats`; a family that the daemon does not have is empty.

    docs/metrics.md lists the families.
    """

    def __init__(self, stats: Mapping[str, Any]):
        self._families: Mapping[str, list[dict[str, Any]]] = stats.get("metrics", {})

    def total(self, family: str, **labels: str) -> float:
        """Return the sum of a family's values that have *labels*."""
        return sum((float(sample["value"]) for sample in self._with(family, labels)), 0.0)

    def by(self, family: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums of a family's values that have *labels*, by the value of *label*."""
        sums: dict[str, float] = {}
        for sample in self._with(family, labels):
            sums[sample[label]] = sums.get(sample[label], 0) + sample["value"]
        return sums

    def by_model(self, family: str) -> dict[str, float]:
        """Return the sums of a family's values by model, those of a fleet by `MODEL@NODE`."""
        sums: dict[str, float] = {}
        for sample in self._with(family, {}):
            key = name_on_node(sample["model_name"], sample.get("node"))
            sums[key] = sums.get(key, 0) + sample["value"]
        return sums

    def _with(self, family: str, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        for sample in self._families.get(family, ()):
            if labels.items() <= sample.items():
                yield sample


DRAFTED, ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"


def acceptance_text(sums: MetricSums, **labels: str) -> str:
    """Return the share of the drafts with *labels* that were accepted."""
    drafted = sums.total(DRAFTED, **labels)
    return f"{sums.total(ACCEPTED, **labels) / drafted:.0%}" if drafted else "-"


def stats(node: Node = None, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Show the metrics since the daemon's start: tasks, tokens, KV states, refusals.

    `inferd status` shows its current state.
    """
    with OneShotClient(socket) as client:
        reply, hello = stats_on(client.stats(), node), client.server
    if as_json:
        write_json({key: reply[key] for key in ("instance", "uptime_s", *METRIC_KEYS)})
        return
    write(f"{hello.software}, up for {time_text(reply['uptime_s'])}; counts are since its start")
    for heads, rows in sections(MetricSums(reply)):
        if rows:
            write("")
            table(heads, rows)


def sections(sums: MetricSums) -> Iterator[Section]:
    """Yield the heads and rows of each table."""
    yield _models(sums)
    yield _graphs(sums)
    yield _held_tensors(sums)
    yield _tasks(sums)
    yield _hits(sums)
    yield _drafts(sums)
    yield _kv(sums)
    yield _sessions(sums)
    yield _ends(sums)
    yield ("REFUSAL REASON", "TIMES"), _by_count(sums.by("admission_rejections", "reason"))


def _models(sums: MetricSums) -> Section:
    heads = ("MODEL", "PROMPT TOKENS", "CACHED", "ANSWER TOKENS", "TASKS", "FAILED", "PARKED")
    failed = sums.by("request_outcomes", "model_name", outcome=Outcome.FAILED.value)
    tokens = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
    columns = [sums.by(family, "model_name") for family in (*tokens, "request_success")]
    columns += [failed, sums.by("num_preemptions", "model_name")]
    names = sorted({name for column in columns for name in column})
    return heads, [(n, *(_count(c.get(n, 0)) for c in columns)) for n in names]


def _graphs(sums: MetricSums) -> Section:
    """Return the inputs that graphs have computed, and how many at a time."""
    done, failed = (sums.by("computations", "model_name", outcome=o) for o in ("ok", "failed"))
    runs = sums.by("computation_runs", "model_name")
    seconds = sums.by("computation_seconds", "model_name")
    rows: list[tuple[object, ...]] = [
        (
            name,
            _count(done.get(name, 0)),
            _count(failed.get(name, 0)),
            f"{inputs_per_run(sums, model_name=name):.1f}",
            time_text(seconds.get(name, 0.0)),
            f"{1000 * seconds.get(name, 0.0) / count:.2f}",
        )
        for name, count in sorted(runs.items())
        if count
    ]
    return ("GRAPH", "INPUTS", "FAILED", "AT A TIME", "COMPUTED", "MS EACH TIME"), rows


def _held_tensors(sums: MetricSums) -> Section:
    """Return the tensors that stay in the daemon by their graphs, and the buffers of clients."""
    counts, sizes = (
        sums.by("kept_tensors", "model_name"),
        sums.by("kept_tensor_bytes", "model_name"),
    )
    found = [(f"kept of {name}", count, sizes.get(name, 0)) for name, count in counts.items()]
    found.append(("buffers", sums.total("buffers"), sums.total("buffer_bytes")))
    rows: list[tuple[object, ...]] = [
        (name, _count(count), size_text(int(size))) for name, count, size in found if count
    ]
    return ("TENSORS", "COUNT", "BYTES"), rows


def inputs_per_run(sums: MetricSums, **labels: str) -> float:
    """Return how many inputs graphs with *labels* have computed at a time."""
    runs = sums.total("computation_runs", **labels)
    return sums.total("computations", **labels) / runs if runs else 0.0


def _tasks(sums: MetricSums) -> Section:
    states = ("running", "waiting", "parked")
    columns = [sums.by(f"num_requests_{state}", "priority") for state in states]
    heads = ("CLASS", *(state.upper() for state in states))
    classes = reversed(PRIORITIES)
    return heads, [(c, *(_count(column.get(c, 0)) for column in columns)) for c in classes]


def _hits(sums: MetricSums) -> Section:
    """Return the prompt tokens found in KV states, by tier."""
    found = sums.by("prefix_cache_hits", "tier")
    queried = sums.total("prefix_cache_queries")
    counts = {tier: found.get(tier, 0) for tier in TIERS}
    counts["nowhere"] = max(0, queried - sum(counts.values()))
    share = [(t, _count(n), f"{n / queried:.0%}" if queried else "-") for t, n in counts.items()]
    return ("KV FOUND IN", "TOKENS", "SHARE"), [*share] if queried else []


def _drafts(sums: MetricSums) -> Section:
    """Return the drafts by drafter, of those that had any."""
    drafted, accepted = sums.by(DRAFTED, "drafter"), sums.by(ACCEPTED, "drafter")
    rows: list[tuple[object, ...]] = [
        (name, _count(count), _count(accepted.get(name, 0)), acceptance_text(sums, drafter=name))
        for name, count in drafted.items()
        if count
    ]
    return ("DRAFTER", "DRAFTS", "ACCEPTED", "SHARE"), rows


def _kv(sums: MetricSums) -> Section:
    bytes_, bounds = sums.by("kv_bytes", "tier"), sums.by("kv_bytes_max", "tier")
    notes = {"slots": "the loaded models'", "memory": "each model", "disk": "all models"}
    rows: list[tuple[object, ...]] = []
    for tier, note in notes.items():
        bound = size_text(int(bounds[tier])) if tier in bounds else "-"
        rows.append((tier, size_text(int(bytes_.get(tier, 0))), bound, note))
    return ("KV STATES", "BYTES", "MAX", "SCOPE"), rows


def _sessions(sums: MetricSums) -> Section:
    rows = _by_count(sums.by("sessions", "state"))
    for text, family in (
        ("requests that wait for a place", "sessions_waiting"),
        ("dormant", "sessions_dormant"),
        ("expired so far", "sessions_expired"),
        ("refused so far", "sessions_refused"),
        ("max", "sessions_max"),
    ):
        rows.append((text, _count(sums.total(family))))
    return ("SESSIONS", "COUNT"), rows


def _ends(sums: MetricSums) -> Section:
    ends = sums.by("request_success", "finished_reason")
    return ("FINISH REASON", "TIMES"), _by_count(ends | sums.by("request_errors", "error"))


def _by_count(counts: dict[str, float]) -> list[tuple[object, ...]]:
    """Return a row for each count above 0, the largest first."""
    found = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(name, _count(count)) for name, count in found if count]


def _count(value: float) -> str:
    return f"{value:.0f}"
