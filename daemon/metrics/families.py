"""The table of families: their names, kinds, labels, buckets and meanings. All else is made of it.

Names are vLLM's behind `inferd_`, where it has the same; buckets are OpenTelemetry's, with tails
for machines without a GPU. No label holds a user, a session or a client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ...scheduler.recording.engine_counters import POWERS_OF_TWO, STEP_S
from ...sessions.admission.forecast_accuracy import RATIOS

PREFIX = "inferd_"
Kind = Literal["counter", "gauge", "histogram"]

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 120.0, 300.0),
)
"""gen_ai.server.time_to_first_token's, and a tail."""
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""gen_ai.server.time_per_output_token's."""
REQUEST_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36),
)
"""gen_ai.server.request.duration's, and a tail."""
LOAD_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Family(msgspec.Struct, frozen=True):
    """One row. A counter's name gets `_total` in the exposition, where it has it in vLLM, too."""

    name: str
    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = ()
    """The buckets' upper bounds; one more has the rest."""


MODEL = ("model_name",)
CLASS = ("model_name", "priority")


def counter(name: str, doc: str, *labels: str) -> Family:
    """Return a family of counters."""
    return Family(name, "counter", doc, labels)


def gauge(name: str, doc: str, *labels: str) -> Family:
    """Return a family of gauges."""
    return Family(name, "gauge", doc, labels)


def histogram(name: str, doc: str, bounds: Sequence[float], *labels: str) -> Family:
    """Return a family of histograms."""
    return Family(name, "histogram", doc, labels, bounds)


_REQUESTS = (
    gauge("num_requests_running", "Turns that have a slot.", *CLASS),
    gauge("num_requests_waiting", "Turns that wait, for a slot or for their model.", *CLASS),
    gauge(
        "num_requests_waiting_by_reason",
        "Turns that wait: for a `slot`, or for their `model` to be in memory.",
        *MODEL,
        "reason",
    ),
    gauge("num_requests_parked", "Turns that have given their slot to another for now.", *CLASS),
    histogram(
        "request_queue_time_seconds", "From asking for a turn to its first slot.", TTFT_S, *CLASS
    ),
    histogram(
        "time_to_first_token_seconds", "From asking for a turn to its first token.", TTFT_S, *CLASS
    ),
    histogram(
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a streamed turn that ended well.",
        TOKEN_S,
        *MODEL,
    ),
    histogram(
        "e2e_request_latency_seconds",
        "From asking for a turn to its end, of those that ended well.",
        REQUEST_S,
        *CLASS,
    ),
    counter("request_success", "Turns that ended well, by stop reason.", *MODEL, "finished_reason"),
    counter("request_failures", "Turns that ended otherwise, by error.", *MODEL, "error"),
    counter("request_recoveries", "Times that a turn went on in another worker."),
    counter(
        "admission_rejections",
        "What was refused for want of room, by the setting that bounds it, such as"
        " `tasks-waiting-max`, or `quota` (a user's own), `memory`, `draining`, `other`.",
        "reason",
    ),
    counter("call_errors", "Calls that were answered with an error.", "call", "error"),
    histogram(
        "retry_after_ratio",
        "How right `retry_after_s` was: what was told by what it was in the end.",
        RATIOS,
    ),
)
_TOKENS = (
    counter("prompt_tokens", "Tokens of prompts, computed or cached.", *MODEL),
    counter("prompt_tokens_cached", "Tokens of prompts that needed no computing.", *MODEL),
    counter("generation_tokens", "Tokens of answers.", *MODEL),
    counter("prefix_cache_queries", "Tokens that KV states were looked up for.", *MODEL),
    counter(
        "prefix_cache_hits",
        "Tokens that were found there, by where: a `slot`, `memory`, `disk`.",
        *MODEL,
        "tier",
    ),
    counter("num_preemptions", "Times that a running turn was parked.", *MODEL),
    counter("context_shifts", "Times that a full context dropped old tokens.", *MODEL),
    counter("kv_restores", "KV states that were put into a slot.", *MODEL),
    counter("kv_fetches", "Turns for which a KV state was read from disk.", *MODEL),
    counter("kv_full_steps", "Steps that found no KV cells.", *MODEL),
    gauge("kv_cache_usage_perc", "Share of the cells that running turns use, 0 to 1.", *MODEL),
    gauge(
        "kv_bytes",
        "KV states: in the `slots` of a model, in its `memory` beside them, and of all models on"
        " `disk`, where `model_name` is empty.",
        *MODEL,
        "tier",
    ),
    gauge("kv_bytes_max", "The bounds: of each model in `memory`, of all on `disk`.", "tier"),
    gauge("kv_disk_files", "KV files."),
)
_STEPS = (
    histogram(
        "step_seconds",
        "Time of a step: one in which turns `decode`, one with prompts beside (`mixed`), or of"
        " prompts alone (`prefill`).",
        STEP_S,
        *MODEL,
        "kind",
    ),
    gauge("step_target_seconds", "What a step that decodes should take at most."),
    counter("steps_over_target", "Steps that decoded and took longer.", *MODEL),
    histogram("iteration_tokens", "Rows of a step's batch.", POWERS_OF_TWO, *MODEL),
    histogram("iteration_sequences", "Turns in a step's batch.", POWERS_OF_TWO, *MODEL),
    gauge("slots", "Turns that a model can compute side by side.", *MODEL),
)
_MODELS = (
    gauge("models", "Models by their state.", "state"),
    gauge(
        "model_memory_bytes",
        "What a loaded model was reckoned to take, by the part: `weights`, `context`, `compute`,"
        " `process`, or the name of a device.",
        *MODEL,
        "part",
    ),
    histogram("model_load_seconds", "Time of a load that ended well.", LOAD_S, *MODEL),
    counter("model_load_failures", "Loads that failed.", *MODEL),
    histogram("model_swap_seconds", "Time of a swap, until new turns begin on it.", LOAD_S, "mode"),
    counter("model_unloads", "Workers that left as they were told to.", *MODEL),
    counter("worker_restarts", "Workers that died, or were killed as they hung.", *MODEL),
    gauge(
        "worker_silent_seconds",
        "How long a worker has been at what it does now, a step or a prompt; 0: it rests.",
        *MODEL,
    ),
)
_SESSIONS = (
    gauge("sessions", "Open sessions by their state.", "state"),
    gauge("sessions_max", "The bound."),
    gauge("sessions_dormant", "Sessions that sleep under their id."),
    gauge("sessions_dormant_bytes", "Their histories, packed."),
    counter("sessions_expired", "Sessions that were idle for too long."),
    counter("sessions_refused", "Sessions that found no room."),
    counter("session_forks", "Sessions that were made as branches of another."),
    gauge("journal_lag_seconds", "How long the oldest change waits to be written; 0: all is."),
)
_DAEMON = (
    gauge("build_info", "1; versions as labels.", "version", "llama_build", "llama_commit"),
    gauge("draining", "1 while nothing new is taken."),
    gauge("part_works", "0 where a part fails that answers do not need.", "part"),
    gauge("connections", "Open connections."),
    gauge("connections_max", "The bound."),
    gauge("cores", "Cores that the models share."),
    gauge("memory_free_bytes", "Beside the models and what is spared; negative: less."),
    gauge("memory_short", "1 while memory is short."),
    counter("memory_shortages", "Times that it fell short."),
)

SECTIONS = {
    "Turns": _REQUESTS,
    "Tokens and KV states": _TOKENS,
    "Steps": _STEPS,
    "Models and workers": _MODELS,
    "Sessions": _SESSIONS,
    "The daemon": _DAEMON,
}
FAMILIES = {family.name: family for rows in SECTIONS.values() for family in rows}
