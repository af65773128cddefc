"""The panels of the Grafana dashboard, by section: their queries and styles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

__all__ = ("LOGARITHMIC", "PANELS", "Panel")

CHOSEN = 'instance=~"$instance"'
MODEL = f'{CHOSEN}, model_name=~"$model"'
FAILED = f'{MODEL}, outcome="failed"'
DRAFTED = "model_name, drafter"
TOKENS = "suffix: tok/s"
LINES = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "auto", "pointSize": 4}
STACKED = {**LINES, "lineWidth": 0, "fillOpacity": 70, "stacking": {"mode": "normal", "group": "A"}}
BARS = {**LINES, "fillOpacity": 80, "drawStyle": "bars"}
DOTS = {**LINES, "pointSize": 6, "drawStyle": "points"}
SPANNED_MS_MAX = 300_000
"""A gap of this length does not break a line of metrics that exist only during turns."""
LOGARITHMIC = {
    **LINES,
    "fillOpacity": 0,
    "spanNulls": SPANNED_MS_MAX,
    "scaleDistribution": {"type": "log", "log": 10},
}


LIMITED = {
    "sessions": "sessions",
    "connections": "connections",
    "kept_tensor_bytes": "tensors that stay",
    "buffer_bytes": "buffers",
    "job_bytes": "files of jobs",
}
"""The gauges with a bound in a family of its own, with their names for people."""


class Panel(NamedTuple):
    """A graph or a number: its title, the unit, and queries with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["stat", "timeseries"] = "timeseries"
    empty: str = "No data"
    """The text that replaces empty results."""
    top: float | None = None
    """The end of the axis, or None if Grafana chooses it."""
    warns: float | None = None
    """Threshold from which a number is shown as a warning."""
    style: Mapping[str, Any] = LINES


def rate(family: str, by: str, where: str = MODEL) -> str:
    """Return the query of a counter's rate."""
    return f"sum by ({by}) (rate(inferd_{family}_total{{{where}}}[$__rate_interval]))"


def quantile(share: float, family: str, by: str = "", where: str = MODEL) -> str:
    """Return the query of a histogram's quantile."""
    labels = f"le, {by}" if by else "le"
    buckets = f"rate(inferd_{family}_bucket{{{where}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({labels}) ({buckets}))"


def quantiles(family: str, where: str = MODEL) -> tuple[tuple[str, str], ...]:
    """Return the queries of a histogram's median and tail."""
    return tuple(
        (quantile(share, family, where=where), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)
    )


def total(family: str, by: str, where: str = MODEL) -> str:
    """Return the query of a gauge's sum."""
    return f"sum by ({by}) (inferd_{family}{{{where}}})"


def each(family: str) -> str:
    """Return the query of a gauge by model."""
    return f"inferd_{family}{{{MODEL}}}"


def one(family: str) -> str:
    """Return the query of a gauge that a daemon has once."""
    return f"inferd_{family}{{{CHOSEN}}}"


def events(family: str, where: str = MODEL) -> str:
    """Return the query of a counter's increase, 0 before its first sample."""
    return f"sum(rate(inferd_{family}_total{{{where}}}[$__rate_interval])) or vector(0)"


def number(title: str, unit: str, query: str, warns: float | None = None) -> Panel:
    """Return a panel of one number."""
    return Panel(title, unit, ((query, title),), "stat", warns=warns)


def classes(title: str, state: str) -> Panel:
    """Return a graph of the turns in a state, stacked by priority."""
    queries = ((total(f"num_requests_{state}", "priority"), "{{priority}}"),)
    return Panel(title, "short", queries, empty="no model is loaded", style=STACKED)


def waits(title: str, family: str, share: float = 0.95) -> Panel:
    """Return a graph of a duration by priority."""
    queries = ((quantile(share, family, "priority"), "{{priority}}"),)
    return Panel(f"{title}, p{share * 100:g}", "s", queries, empty="no turns", style=LOGARITHMIC)


PANELS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        number("Running turns", "short", f"sum({each('num_requests_running')}) or vector(0)"),
        number("Waiting turns", "short", f"sum({each('num_requests_waiting')}) or vector(0)"),
        number("First token, p95", "s", quantile(0.95, "time_to_first_token_seconds")),
        number("Generated", TOKENS, events("generation_tokens")),
        number("Requests rejected", "reqps", events("admission_rejections", CHOSEN), warns=0.001),
        number("Turns failed", "reqps", events("request_outcomes", FAILED), warns=0.001),
        number("Models loaded", "short", f'sum(inferd_models{{{CHOSEN}, state="ready"}})'),
        number("Failing components", "short", f"sum(1 - inferd_component_up{{{CHOSEN}}})", warns=1),
    ),
    "Turns": (
        classes("Running", "running"),
        classes("Waiting", "waiting"),
        classes("Parked", "parked"),
        Panel(
            "Waiting and parked, by reason",
            "short",
            ((total("num_requests_waiting_by_reason", "reason") + " > 0", "{{reason}}"),),
            empty="nothing waits",
            style=STACKED,
        ),
        *(waits("End to end", "e2e_request_latency_seconds", share) for share in (0.5, 0.95, 0.99)),
        waits("Time to first token", "time_to_first_token_seconds"),
        waits("Time in the queue", "request_queue_time_seconds"),
        Panel(
            "Time per output token",
            "s",
            quantiles("request_time_per_output_token_seconds"),
            empty="no turns",
        ),
        Panel(
            "Ends",
            "reqps",
            (
                (rate("request_success", "finished_reason"), "{{finished_reason}}"),
                (rate("request_errors", "error"), "{{error}}"),
            ),
            empty="no turns",
        ),
        Panel(
            "Requests for turns, by outcome",
            "reqps",
            ((rate("request_outcomes", "outcome"), "{{outcome}}"),),
            empty="no turns",
            style=STACKED,
        ),
        Panel(
            "Failed turns, share of the served ones",
            "percentunit",
            (
                (
                    rate("request_outcomes", "model_name", FAILED)
                    + " / "
                    + rate("request_outcomes", "model_name", f'{MODEL}, outcome=~"ok|failed"'),
                    "{{model_name}}",
                ),
            ),
            empty="no turns",
            top=1,
        ),
        Panel(
            "Failed calls, by error",
            "reqps",
            (
                (
                    rate("call_errors", "error", f'{CHOSEN}, outcome="failed"') + " > 0",
                    "{{error}}",
                ),
            ),
            empty="none",
            style=BARS,
        ),
        Panel(
            "Rejected requests, by reason",
            "reqps",
            ((rate("admission_rejections", "reason", CHOSEN) + " > 0", "{{reason}}"),),
            empty="nothing was rejected",
            style=BARS,
        ),
    ),
    "Tokens, KV states and steps": (
        Panel(
            "Tokens",
            TOKENS,
            (
                (rate("generation_tokens", "model_name"), "{{model_name}} generated"),
                (rate("prompt_tokens", "model_name"), "{{model_name}} prompt"),
                (rate("prompt_tokens_cached", "model_name"), "{{model_name}} cached"),
            ),
        ),
        Panel(
            "Prompt tokens found in KV states, by tier",
            "percentunit",
            (
                (
                    rate("prefix_cache_hits", "instance, tier")
                    + " / on (instance) group_left "
                    + rate("prefix_cache_queries", "instance"),
                    "{{tier}}",
                ),
            ),
            top=1,
            style=STACKED,
        ),
        Panel(
            "KV states", "bytes", ((total("kv_bytes", "tier", CHOSEN), "{{tier}}"),), style=STACKED
        ),
        Panel(
            "KV cells in use",
            "percentunit",
            ((each("kv_cache_usage_perc"), "{{model_name}}"),),
            empty="no model is loaded",
            top=1,
        ),
        Panel(
            "Parks, restores, shifts, forks",
            "ops",
            (
                (rate("num_preemptions", "instance"), "parks"),
                (rate("kv_restores", "instance"), "restores"),
                (rate("context_shifts", "instance"), "shifts"),
                (rate("session_forks", "instance", CHOSEN), "forks"),
            ),
        ),
        Panel(
            "Step time, p95",
            "s",
            (
                (quantile(0.95, "step_seconds", "kind"), "{{kind}}"),
                (one("step_target_seconds"), "target"),
            ),
        ),
        Panel(
            "Accepted drafts, share of the computed ones",
            "percentunit",
            (
                (
                    rate("spec_decode_num_accepted_tokens", DRAFTED)
                    + " / "
                    + rate("spec_decode_num_draft_tokens", DRAFTED),
                    "{{model_name}} {{drafter}}",
                ),
            ),
            empty="no drafts",
            top=1,
        ),
        Panel(
            "Speed-up by drafts, in steps that have some",
            "suffix: ×",
            (
                (
                    rate("spec_decode_plain_seconds", "model_name")
                    + " / "
                    + rate("spec_decode_seconds", "model_name"),
                    "{{model_name}}",
                ),
            ),
            empty="no drafts",
        ),
        Panel("Turns in a step", "short", quantiles("iteration_sequences")),
        Panel("Tokens in a step", "short", quantiles("iteration_tokens")),
    ),
    "Graphs": (
        Panel(
            "Inputs computed",
            "suffix: /s",
            ((rate("computations", "model_name, outcome"), "{{model_name}} {{outcome}}"),),
            empty="no graph computes",
        ),
        Panel(
            "Inputs running and waiting",
            "short",
            (
                (total("computations_running", "model_name"), "{{model_name}} running"),
                (total("computations_waiting", "model_name"), "{{model_name}} waiting"),
            ),
            empty="no model is loaded",
            style=STACKED,
        ),
        Panel(
            "Time of an input in the queue",
            "s",
            quantiles("computation_queue_time_seconds"),
            empty="no graph computes",
            style=LOGARITHMIC,
        ),
        Panel(
            "Time of a computation, mean",
            "s",
            (
                (
                    rate("computation_seconds", "model_name")
                    + " / "
                    + rate("computation_runs", "model_name"),
                    "{{model_name}}",
                ),
            ),
            empty="no graph computes",
        ),
        Panel(
            "Inputs computed together",
            "short",
            quantiles("computation_inputs"),
            empty="no graph computes",
        ),
        Panel(
            "Computations at once, mean",
            "short",
            ((rate("computation_seconds", "model_name"), "{{model_name}}"),),
            empty="no graph computes",
            style=STACKED,
        ),
        Panel(
            "Loaded graphs, by device",
            "short",
            ((total("graph_info", "device"), "{{device}}"),),
            empty="no graph is loaded",
            style=STACKED,
        ),
        Panel(
            "Tensors that stay, by graph",
            "short",
            ((total("kept_tensors", "model_name"), "{{model_name}}"),),
            empty="no graph is loaded",
            style=STACKED,
        ),
        Panel(
            "Memory of tensors that stay",
            "bytes",
            ((total("kept_tensor_bytes", "model_name"), "{{model_name}}"),),
            empty="no graph is loaded",
            style=STACKED,
        ),
        Panel("Buffers of clients", "short", ((one("buffers"), "{{instance}}"),)),
        Panel("Memory of buffers", "bytes", ((one("buffer_bytes"), "{{instance}}"),)),
    ),
    "Jobs": (
        Panel(
            "Jobs by state",
            "short",
            ((total("jobs", "state", CHOSEN), "{{state}}"),),
            style=STACKED,
        ),
        Panel(
            "Requests of jobs",
            "short",
            ((total("job_requests", "state", CHOSEN), "{{state}}"),),
            style=STACKED,
        ),
        Panel(
            "Ended requests of jobs, by outcome",
            "reqps",
            ((rate("job_requests_ended", "outcome", CHOSEN), "{{outcome}}"),),
            empty="none",
            style=STACKED,
        ),
        Panel("Files of jobs, on disk", "bytes", ((one("job_bytes"), "{{instance}}"),)),
    ),
    "Models and workers": (
        Panel(
            "Models by state",
            "short",
            ((total("models", "state", CHOSEN), "{{state}}"),),
            style=STACKED,
        ),
        Panel(
            "Memory of models",
            "bytes",
            ((total("model_memory_bytes", "model_name"), "{{model_name}}"),),
            empty="no model is loaded",
            style=STACKED,
        ),
        Panel("Load time", "s", quantiles("model_load_seconds"), empty="no loads", style=DOTS),
        Panel(
            "Worker exits, deaths and failed loads",
            "short",
            tuple(
                (f"increase({each(family)}[$__rate_interval]) > 0", f"{{{{model_name}}}} {what}")
                for family, what in (
                    ("model_unloads_total", "unloaded"),
                    ("worker_restarts_total", "died"),
                    ("model_load_failures_total", "failed"),
                )
            ),
            empty="none",
            style=BARS,
        ),
    ),
    "Sessions and the daemon": (
        Panel(
            "Sessions",
            "short",
            (
                (total("sessions", "state", CHOSEN), "{{state}}"),
                (one("sessions_yielded"), "yielded"),
                (one("sessions_dormant"), "dormant"),
            ),
            style=STACKED,
        ),
        Panel(
            "Expired, refused and yielded sessions",
            "short",
            tuple(
                (f"sum(increase({one(f'{family}_total')}[$__rate_interval]))", what)
                for family, what in (
                    ("sessions_expired", "expired"),
                    ("sessions_refused", "refused"),
                    ("session_yields", "yielded"),
                )
            ),
            style=BARS,
        ),
        Panel(
            "Waiting for a place among the open sessions",
            "short",
            ((one("sessions_waiting"), "{{instance}}"),),
        ),
        Panel(
            "Wait for a place among the open sessions",
            "s",
            quantiles("session_wait_seconds", CHOSEN),
            empty="nothing waited",
            style=DOTS,
        ),
        Panel(
            "Connections and labels",
            "short",
            (
                (one("connections"), "connections"),
                (one("connections_delegated"), "on behalf of another user"),
                (one("connection_labels"), "labels"),
            ),
        ),
        Panel(
            "Draining for",
            "s",
            ((one("draining_seconds"), "{{instance}}"),),
        ),
        Panel(
            "Turns left before a stop or an unload by a swap",
            "short",
            ((each("num_requests_finishing"), "{{model_name}}"),),
            empty="no model is loaded",
            style=STACKED,
        ),
        Panel(
            "Share of limits in use",
            "percentunit",
            tuple(
                (f"{total(what, 'instance', CHOSEN)} / on (instance) {one(f'{what}_max')}", shown)
                for what, shown in LIMITED.items()
            ),
            top=1,
        ),
        Panel(
            "Time of compute, by model",
            "percentunit",
            ((rate("usage_compute_seconds", "model_name"), "{{model_name}}"),),
            empty="no turns",
            style=STACKED,
        ),
        Panel("Journal lag", "s", ((one("journal_lag_seconds"), "{{instance}}"),)),
        Panel(
            "Unresponsive workers",
            "s",
            ((each("worker_unresponsive_seconds"), "{{model_name}}"),),
            empty="no model is loaded",
        ),
        Panel(
            "Failing components",
            "short",
            (
                (f"sum by (instance) (1 - inferd_component_up{{{CHOSEN}}})", "{{instance}}"),
                (f"1 - inferd_component_up{{{CHOSEN}}} > 0", "{{component}}"),
            ),
            top=5,
        ),
        Panel("Free memory", "bytes", ((one("memory_free_bytes"), "{{instance}}"),)),
        Panel(
            "The daemon's own processor time",
            "suffix: cores",
            ((f"rate(process_cpu_seconds_total{{{CHOSEN}}}[$__rate_interval])", "{{instance}}"),),
        ),
        Panel(
            "The daemon's own memory",
            "bytes",
            ((f"process_resident_memory_bytes{{{CHOSEN}}}", "{{instance}}"),),
        ),
    ),
}  # fmt: skip
