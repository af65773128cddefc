"""The table of metric families: names, kinds, labels, buckets and help texts.

Names are vLLM's, prefixed with `inferd_`, where vLLM has the same metric. Buckets are those of
OpenTelemetry, extended for machines without a GPU. No label holds a user, a session or a client.
`collector` gives the families their values.
"""

from __future__ import annotations

from ...ipc.metric_families import counter, gauge, histogram
from ...scheduler.record import COMPUTE_S, POWERS_OF_TWO, STEP_S
from ...sessions.admission.forecast import RATIOS

PREFIX = "inferd_"

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 120.0, 300.0),
)
"""The buckets of OpenTelemetry's gen_ai.server.time_to_first_token, extended."""
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""The buckets of OpenTelemetry's gen_ai.server.time_per_output_token."""
REQUEST_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36),
)
"""The buckets of OpenTelemetry's gen_ai.server.request.duration, extended."""
LOAD_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


MODEL = ("model_name",)
CLASS = ("model_name", "priority")

_REQUESTS = (
    gauge("num_requests_running", "Turns that have a slot.", CLASS),
    gauge("num_requests_waiting", "Turns that wait for a slot or for their model.", CLASS),
    gauge(
        "num_requests_waiting_by_reason",
        "Turns that wait or are parked, by reason: for a `slot`, a `prefix` that a running turn"
        " computes, free KV `cells`, a KV state on `disk`, their `grammar`, the `encoding` of an"
        " image or a sound, their `reader`; parked by an `operator`; for the `load` of their model,"
        " for `memory` for it, or because another model comes first (`residency`).",
        (*MODEL, "reason"),
    ),
    gauge("num_requests_parked", "Turns that have yielded their slot to another turn.", CLASS),
    gauge(
        "num_requests_finishing",
        "Turns that end before a swap unloads their old model, or before the daemon stops.",
        MODEL,
    ),
    histogram(
        "request_queue_time_seconds", "Time from queueing to a turn's first slot.", CLASS, TTFT_S
    ),
    histogram(
        "time_to_first_token_seconds", "Time from queueing to a turn's first token.", CLASS, TTFT_S
    ),
    histogram(
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a streamed turn that succeeded.",
        MODEL,
        TOKEN_S,
    ),
    histogram(
        "e2e_request_latency_seconds",
        "Time from the request to a turn's success, with the wait for its model.",
        CLASS,
        REQUEST_S,
    ),
    counter(
        "request_outcomes",
        "Requests for turns that have ended, by outcome: `ok`, `cancelled` by the reader or an"
        " operator, after a `timeout` of the client, `refused`, or `failed` by the service.",
        (*MODEL, "outcome"),
    ),
    counter(
        "request_success", "Turns that succeeded, by stop reason.", (*MODEL, "finished_reason")
    ),
    counter("request_errors", "Requests that ended with an error, by error.", (*MODEL, "error")),
    counter("request_recoveries", "Times that a turn continued in another worker."),
    counter(
        "admission_rejections",
        "Requests that were rejected, by the setting that limits them, such as"
        " `tasks-waiting-max`, or by `quota` (of one user), `memory`, `draining`, `other`.",
        ("reason",),
    ),
    counter(
        "call_errors",
        "Calls that were answered with an error, with its outcome.",
        ("call", "error", "outcome"),
    ),
    histogram(
        "retry_after_ratio", "`retry_after_s` as sent, divided by the time it took.", (), RATIOS
    ),
)
_TOKENS = (
    counter("prompt_tokens", "Prompt tokens, computed or cached.", MODEL),
    counter("prompt_tokens_cached", "Prompt tokens that were not computed again.", MODEL),
    counter("generation_tokens", "Tokens of answers.", MODEL),
    counter("generation_tokens_forced", "Tokens of answers that a grammar forced.", MODEL),
    counter(
        "spec_decode_num_draft_tokens",
        "Tokens that a `drafter` proposed and a step computed.",
        (*MODEL, "drafter"),
    ),
    counter(
        "spec_decode_num_accepted_tokens",
        "Those of them that were the sampled tokens.",
        (*MODEL, "drafter"),
    ),
    counter("spec_decode_tokens", "Tokens that streams got from steps with drafts.", MODEL),
    counter("spec_decode_seconds", "Seconds of steps with drafts.", MODEL),
    counter(
        "spec_decode_plain_seconds",
        "Seconds that as many tokens would have taken without drafts, as predicted.",
        MODEL,
    ),
    counter("prefix_cache_queries", "Prompt tokens looked up in the KV states.", MODEL),
    counter(
        "prefix_cache_hits",
        "Prompt tokens found in a KV state, by its tier: a `slot`, `memory` or `disk`.",
        (*MODEL, "tier"),
    ),
    counter("num_preemptions", "Times that a running turn was parked.", MODEL),
    counter("context_shifts", "Times that a full context dropped old tokens.", MODEL),
    counter("kv_restores", "KV states that were copied into a slot.", MODEL),
    counter("kv_fetches", "Turns for which a KV state was read from disk.", MODEL),
    counter("kv_full_steps", "Steps for which no KV cells were free.", MODEL),
    gauge("kv_cache_usage_perc", "Share of the KV cells in use by running turns, 0 to 1.", MODEL),
    gauge(
        "kv_bytes",
        "Size of the KV states: in the `slots` of a model, saved in its `memory`, and of all models"
        " on `disk`, where `model_name` is empty.",
        (*MODEL, "tier"),
    ),
    gauge(
        "kv_bytes_max",
        "Limits of the KV states' size: per model in `memory`, in total on `disk`.",
        ("tier",),
    ),
    gauge("kv_disk_files", "Number of KV files."),
    gauge(
        "kv_checkpoints", "Number of checkpoints in memory: KV states within a conversation.", MODEL
    ),
    gauge(
        "kv_checkpoint_bytes", "Size of the checkpoints, which is part of that in `memory`.", MODEL
    ),
)
_STEPS = (
    histogram(
        "step_seconds",
        "Duration of a step with decoding turns (`decode`), with prompts added (`mixed`), or with"
        " prompts alone (`prefill`).",
        (*MODEL, "kind"),
        STEP_S,
    ),
    gauge("step_target_seconds", "Target duration of a decoding step."),
    counter("steps_over_target", "Decoding steps that took longer than the target.", MODEL),
    counter(
        "tuning_slices",
        "Slices of at most 50 ms in which settings were measured while no model had work.",
        MODEL,
    ),
    histogram("iteration_tokens", "Tokens in the batch of a step.", MODEL, POWERS_OF_TWO),
    histogram("iteration_sequences", "Turns in the batch of a step.", MODEL, POWERS_OF_TWO),
    gauge("slots", "Turns that a model can compute in parallel.", MODEL),
)
_MODELS = (
    gauge("models", "Models by state.", ("state",)),
    gauge(
        "model_memory_bytes",
        "Estimated memory of a loaded model, by use: `weights`, `context`, `compute`, `process`,"
        " `projector` (the process that encodes images and sounds), `draft` (the draft model or"
        " NextN layers), or the name of a device.",
        (*MODEL, "use"),
    ),
    histogram("model_load_seconds", "Duration of a load that succeeded.", MODEL, LOAD_S),
    counter("model_load_failures", "Loads that failed.", MODEL),
    histogram(
        "model_swap_seconds", "Duration of a swap, until new turns start on it.", ("mode",), LOAD_S
    ),
    counter("model_unloads", "Workers that exited on request.", MODEL),
    counter("worker_restarts", "Workers that died, or were killed because they hung.", MODEL),
    gauge(
        "worker_unresponsive_seconds",
        "Time since a worker with work last finished a step or a prompt; 0 if it is idle.",
        MODEL,
    ),
)
_TENSORS = (
    gauge(
        "graph_info",
        "Always 1 for a loaded graph; its engine and the `device` that computes it are labels.",
        (*MODEL, "backend", "device"),
    ),
    counter(
        "computations",
        "Inputs of a graph that were computed, by outcome: `ok` or `failed`.",
        (*MODEL, "outcome"),
    ),
    counter("computation_runs", "Computations of a graph, each of one or several inputs.", MODEL),
    counter("computation_seconds", "Time of these computations.", MODEL),
    histogram("computation_inputs", "Inputs that were computed together.", MODEL, POWERS_OF_TWO),
    histogram(
        "computation_queue_time_seconds",
        "Time from an input's arrival in the process until its computation began.",
        MODEL,
        COMPUTE_S,
    ),
    gauge("computations_running", "Inputs of a graph that are being computed.", MODEL),
    gauge("computations_waiting", "Inputs of a graph that wait for a lane.", MODEL),
    gauge("kept_tensors", "Outputs of a graph that stay in the daemon for clients.", MODEL),
    gauge("kept_tensor_bytes", "Memory of these tensors.", MODEL),
    gauge("kept_tensor_bytes_max", "Maximum memory of all of them."),
    gauge("buffers", "Buffers that clients share with the processes of graphs."),
    gauge("buffer_bytes", "Size of these buffers."),
    gauge("buffer_bytes_max", "Maximum size of all of them."),
)
_MEDIA = (
    gauge(
        "media_requests_waiting",
        "Requests to read or encode an image or a sound that wait for the encoder process, or for"
        " which it works.",
        MODEL,
    ),
    counter(
        "media_encodings",
        "Requests for the embeddings of an image or a sound that have ended, by result: `encoded`,"
        " `cached`, `refused` or `failed`.",
        (*MODEL, "result"),
    ),
    histogram("media_encode_seconds", "Time to encode an image or a sound.", MODEL, TTFT_S),
    gauge("media_cache_bytes", "Size of the embeddings that are kept for later turns.", MODEL),
    counter("encoder_restarts", "Encoder processes that died, or were killed.", MODEL),
)
_SESSIONS = (
    gauge("sessions", "Open sessions with a place, by state.", ("state",)),
    gauge("sessions_max", "Maximum number of open sessions."),
    gauge("sessions_dormant", "Dormant sessions."),
    gauge("sessions_dormant_bytes", "Memory of dormant and yielded sessions in the daemon."),
    gauge("session_media", "Images and sounds that sessions hold."),
    gauge("session_media_bytes", "Size of the images and sounds that sessions hold, on disk."),
    counter(
        "sessions_expired",
        "Sessions that were idle for too long: closed or, with an id, made dormant.",
    ),
    counter("sessions_refused", "Sessions refused because too many were open."),
    gauge("sessions_yielded", "Open sessions that have yielded their place to another."),
    counter("session_yields", "Places that sessions have yielded to requests."),
    gauge("sessions_waiting", "Requests that wait for the place of an open session."),
    histogram(
        "session_wait_seconds",
        "Wait of a request for the place of an open session, if it got one.",
        (),
        REQUEST_S,
    ),
    counter("session_forks", "Sessions created as branches of another."),
    counter(
        "usage_compute_seconds",
        "Time of compute that counts as usage: of steps, of tensors, and of images and sounds.",
        MODEL,
    ),
    counter("usage_refused", "Requests that count as refused in the usage of users.", MODEL),
    gauge("usage_unwritten_rows", "Rows of usage that wait to be written to the journal."),
    gauge("journal_lag_seconds", "Age of the oldest change not yet in the journal; 0 if none."),
)
_JOBS = (
    gauge(
        "jobs",
        "Jobs by state: `waiting` or `running`; `completed`, `cancelled`, `expired` or `failed`"
        " until they are deleted.",
        ("state",),
    ),
    gauge(
        "job_requests",
        "Requests of jobs that have not ended: `waiting` in their files, or `running`, which"
        " includes the wait for a slot.",
        ("state",),
    ),
    counter(
        "job_requests_ended",
        "Requests of jobs that have ended, by outcome: `completed`; `failed`, with an error as"
        " result; `given_up` without a result, because their job was cancelled, expired or failed.",
        ("outcome",),
    ),
    gauge("job_bytes", "Size of the files with requests and results of jobs, on disk."),
    gauge("job_bytes_max", "Maximum size of these files."),
)
_DAEMON = (
    gauge(
        "build_info",
        "Always 1; the versions are labels.",
        ("version", "llama_build", "llama_commit"),
    ),
    gauge("draining", "1 while the daemon accepts no new requests."),
    gauge(
        "draining_seconds",
        "Time since the daemon stopped accepting requests; 0 while it accepts them.",
    ),
    gauge("component_up", "1 if an optional component works, 0 if it fails.", ("component",)),
    gauge("connections", "Open connections."),
    gauge("connections_delegated", "Open connections that act on behalf of another user."),
    gauge("connections_max", "Maximum number of open connections."),
    gauge("request_bytes", "Memory of the requests in flight, which request-bytes-max bounds."),
    gauge("request_bytes_max", "Maximum memory of the requests in flight."),
    gauge("connection_labels", "Labels of the open connections, counted for each user."),
    gauge("cores", "CPU cores that the models share."),
    gauge(
        "memory_free_bytes",
        "The machine's free memory, less the headroom and, without `memory-bytes`, less the memory"
        " reserved for models; negative if memory is short.",
    ),
    gauge("memory_low", "1 while memory is low."),
    counter("memory_low_events", "Times that memory became low."),
)

SECTIONS = {
    "Turns": _REQUESTS,
    "Tokens and KV states": _TOKENS,
    "Steps": _STEPS,
    "Models and workers": _MODELS,
    "Graphs": _TENSORS,
    "Images and sounds": _MEDIA,
    "Sessions": _SESSIONS,
    "Jobs": _JOBS,
    "The daemon": _DAEMON,
}
FAMILIES = {family.name: family for section in SECTIONS.values() for family in section}
