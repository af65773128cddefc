"""The Grafana dashboard, systemd/grafana/inferd.json: panels by section, made by `make docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ("FILE", "PANELS", "dashboard")

FILE = Path(__file__).parent.parent / "systemd" / "grafana" / "inferd.json"

WIDTH, HEIGHT = 8, 8
GRID = 24
CHOSEN = 'instance=~"$instance"'
MODEL = f'{CHOSEN}, model_name=~"$model"'


class Panel(NamedTuple):
    """A graph: its title, the unit of its axis, and queries with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(family: str, by: str, where: str = MODEL) -> str:
    """Return the query of a counter's rate."""
    return f"sum by ({by}) (rate(inferd_{family}_total{{{where}}}[$__rate_interval]))"


def quantile(share: float, family: str, by: str = "") -> str:
    """Return the query of a histogram's quantile."""
    labels = f"le, {by}" if by else "le"
    buckets = f"rate(inferd_{family}_bucket{{{MODEL}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({labels}) ({buckets}))"


def quantiles(family: str) -> tuple[tuple[str, str], ...]:
    """Return the queries of a histogram's median and tail."""
    return tuple((quantile(share, family), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


def total(family: str, by: str, where: str = MODEL) -> str:
    """Return the query of a gauge's sum."""
    return f"sum by ({by}) (inferd_{family}{{{where}}})"


def each(family: str) -> str:
    """Return the query of what there is of each model."""
    return f"inferd_{family}{{{MODEL}}}"


def one(family: str) -> str:
    """Return the query of a gauge that is there once for a daemon."""
    return f"inferd_{family}{{{CHOSEN}}}"


PANELS: dict[str, tuple[Panel, ...]] = {
    "Turns": (
        Panel(
            "Turns under way",
            "short",
            (
                (total("num_requests_running", "priority"), "{{priority}} running"),
                (total("num_requests_waiting", "priority"), "{{priority}} waiting"),
                (total("num_requests_parked", "priority"), "{{priority}} parked"),
            ),
        ),
        Panel(
            "Time to first token, p95",
            "s",
            ((quantile(0.95, "time_to_first_token_seconds", "priority"), "{{priority}}"),),
        ),
        Panel(
            "Time in the queue, p95",
            "s",
            ((quantile(0.95, "request_queue_time_seconds", "priority"), "{{priority}}"),),
        ),
        Panel(
            "Time per output token", "s", quantiles("request_time_per_output_token_seconds")
        ),
        Panel(
            "Ends",
            "reqps",
            (
                (rate("request_success", "finished_reason"), "{{finished_reason}}"),
                (rate("request_failures", "error"), "{{error}}"),
            ),
        ),
        Panel(
            "Refused for want of room",
            "reqps",
            ((rate("admission_rejections", "reason", CHOSEN), "{{reason}}"),),
        ),
    ),
    "Tokens and KV states": (
        Panel(
            "Tokens",
            "short",
            (
                (rate("generation_tokens", "model_name"), "{{model_name}} generated"),
                (rate("prompt_tokens", "model_name"), "{{model_name}} prompt"),
                (rate("prompt_tokens_cached", "model_name"), "{{model_name}} cached"),
            ),
        ),
        Panel(
            "Tokens found in KV states, by tier",
            "percentunit",
            (
                (
                    rate("prefix_cache_hits", "instance, tier")
                    + " / on (instance) group_left "
                    + rate("prefix_cache_queries", "instance"),
                    "{{tier}}",
                ),
            ),
        ),
        Panel("KV states", "bytes", ((total("kv_bytes", "tier", CHOSEN), "{{tier}}"),)),
        Panel("KV cells in use", "percentunit", ((each("kv_cache_usage_perc"), "{{model_name}}"),)),
        Panel(
            "Parks, restores, shifts, forks",
            "ops",
            (
                (rate("num_preemptions", "model_name"), "{{model_name}} parks"),
                (rate("kv_restores", "model_name"), "{{model_name}} restores"),
                (rate("context_shifts", "model_name"), "{{model_name}} shifts"),
                (rate("session_forks", "instance", CHOSEN), "forks"),
            ),
        ),
    ),
    "Steps": (
        Panel(
            "Step time, p95",
            "s",
            (
                (quantile(0.95, "step_seconds", "kind"), "{{kind}}"),
                (one("step_target_seconds"), "target"),
            ),
        ),
        Panel("Turns in a step", "short", quantiles("iteration_sequences")),
        Panel("Rows in a step", "short", quantiles("iteration_tokens")),
    ),
    "Models and workers": (
        Panel("Models by state", "short", ((total("models", "state", CHOSEN), "{{state}}"),)),
        Panel(
            "Memory of models",
            "bytes",
            ((total("model_memory_bytes", "model_name"), "{{model_name}}"),),
        ),
        Panel("Load time", "s", quantiles("model_load_seconds")),
        Panel(
            "Workers that left, died, or failed to load",
            "short",
            tuple(
                (f"increase({each(family)}[$__rate_interval])", f"{{{{model_name}}}} {what}")
                for family, what in (
                    ("model_unloads_total", "left"),
                    ("worker_restarts_total", "died"),
                    ("model_load_failures_total", "failed"),
                )
            ),
        ),
        Panel("Silent workers", "s", ((each("worker_silent_seconds"), "{{model_name}}"),)),
    ),
    "Sessions and the daemon": (
        Panel(
            "Sessions",
            "short",
            (
                (total("sessions", "state", CHOSEN), "{{state}}"),
                (one("sessions_dormant"), "dormant"),
                (one("sessions_max"), "bound"),
            ),
        ),
        Panel("Journal lag", "s", ((one("journal_lag_seconds"), "{{instance}}"),)),
        Panel("Parts that fail", "short", ((f"1 - inferd_part_works{{{CHOSEN}}}", "{{part}}"),)),
        Panel("Free memory", "bytes", ((one("memory_free_bytes"), "{{instance}}"),)),
        Panel(
            "The daemon's own processor time and memory",
            "short",
            (
                (f"rate(process_cpu_seconds_total{{{CHOSEN}}}[$__rate_interval])", "cores"),
                (f"process_resident_memory_bytes{{{CHOSEN}}} / 1e9", "GB"),
            ),
        ),
    ),
}  # fmt: skip


def dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in PANELS.items():
        panels.append(_placed({"type": "row", "title": title, "collapsed": False}, GRID, 1, 0, top))
        top += 1
        for number, panel in enumerate(row):
            left = WIDTH * number % GRID
            panels.append(_placed(_graph(panel), WIDTH, HEIGHT, left, top))
            top += HEIGHT * (left + WIDTH == GRID or number == len(row) - 1)
    for number, made in enumerate(panels, start=1):
        made["id"] = number
    document = {
        "title": "inferd",
        "uid": "inferd",
        "tags": ["inferd", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _placed(panel: dict[str, Any], width: int, height: int, left: int, top: int) -> dict[str, Any]:
    return panel | {"gridPos": {"w": width, "h": height, "x": left, "y": top}}


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend}
            for n, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    asked = {
        "instance": "label_values(inferd_build_info, instance)",
        "model": 'label_values(inferd_slots{instance=~"$instance"}, model_name)',
    }
    return [
        source,
        *(
            {
                "name": name,
                "type": "query",
                "query": query,
                "datasource": {"type": "prometheus", "uid": "${source}"},
                "includeAll": True,
                "allValue": ".*",
                "multi": True,
                "current": {"text": "All", "value": "$__all"},
                "refresh": 2,
            }
            for name, query in asked.items()
        ),
    ]


def main() -> None:
    """Write the file."""
    FILE.write_text(dashboard())
    print(FILE)


if __name__ == "__main__":
    main()
