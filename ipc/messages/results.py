"""The maps in results of calls: models, sessions, turns, parameters, named states, statistics.

`make docs` makes of them the tables of docs/protocol.md and the types of both clients. All keys are
sent, except those that are unset.

The daemon builds them. The client reads plain maps, which may come from another version: results
name these structs as `Annotated[Any, …]`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from ...backends.errors import ErrorFields
from ...backends.gguf import FileFacts
from ..names import Priority

PriorityName = Annotated[str, Priority]
"""The name of a priority class."""


class ModelInfo(msgspec.Struct, kw_only=True):
    """A model, as `models` describes it."""

    name: str
    """The name by which clients load it."""
    of: str
    """The name of the model of which `name` is another name, set in the configuration; empty:
    none. The facts below are those of the model, with whose process both compute.
    """
    state: str
    """`cold`, `loading`, `ready`, `unloading` or `failed`."""
    backend: str
    """`llama`, `onnx`, `litert`, `openvino` or `echo`."""
    device: str
    """Of a graph, the device that computes it: `cpu`, or the name in the configuration, such as
    `cuda` or `gpu.1`; empty for other models.
    """
    file: str
    """Its path; empty for `echo` and for models from descriptors."""
    swapped_to: str
    """The name or file that a `swap` has put behind the name; empty: none."""
    size_bytes: int
    """Size of its files."""
    modified_at: float | None
    """Unix time of the last change of its files; nil: it has none."""
    leases: int
    """Graphs that hold it."""
    tasks: int
    """Its waiting and running turns, or computations of a graph."""
    pid: int
    """Its worker process; 0: none."""
    slots: int
    """Slots of the loaded model, or those with which it is to be loaded."""
    progress: float
    """Progress of its load, 0 … 1."""
    load_s: float
    """Time that its last load took; 0: there was none."""
    idle_s: float
    """Time without a lease."""
    expires_s: float | None
    """Seconds until it is unloaded if it stays unused; nil: it is in use, or does not expire by
    time.
    """
    keep_alive_s: float
    """Time for which it stays loaded when unused; negative: until memory is short."""
    pinned: bool
    """Whether it stays loaded even when memory is short."""
    resident_bytes: int
    """Memory that its worker process, and the one that encodes images and sounds, occupy on the
    host now, mapped weights included (RSS); 0: no process.
    """
    memory: dict[str, Any] | None
    """Nil, or the estimated memory of its processes, in bytes: `weights`, `context`, `compute`,
    `process`, `projector` (the process that encodes images and sounds, with the embeddings that
    are kept), `draft` (the draft model, or the model's NextN layers without their weights, with
    KV states and buffers) and `total`; `options` is the part of `context` and `compute` that the
    engine's options of the model add, negative if they save.
    """
    adapters: list[dict[str, Any]]
    """Array of map: `name`, `file`, `scale` (for turns that select none), `size_bytes`; once the
    model is loaded, also `id`, a hash of the file, or `error`: turns that select the adapter
    fail with it.
    """
    error: ErrorFields | None
    """Nil, or the error of its last load."""
    info: dict[str, Any] | None
    """Nil, or properties of the loaded model: `ctx_size`, `vocab_size`, `parameters`,
    `special_tokens`, ….
    """
    setting: dict[str, Any] | None
    """Nil, or the setting with which the loaded model computes on the CPU: `flash_attn`,
    `threads` and `threads_batch` (0: as configured), `ubatch` (tokens of a micro-batch; 0: the
    default), `source` (`configured`, `measured` on this machine, `like` a model of similar
    shape, by a `rule` for the CPU's family, or `default`) and `reason`; `next_load` is the one
    that its next load will have.
    """
    need_bytes: int | None
    """The memory of the host, in bytes, that its next load needs with all slots and full
    contexts; nil: it is not known yet, or it has a process. Before llama.cpp has estimated it,
    it is known from the file's header, and only where no GPU may hold a part.
    """
    reads: list[str]
    """The kinds of message parts that it reads: `text`, and with a projector `image` or `audio`,
    or both. It is known from the projector's header before the model is loaded.
    """
    projector: dict[str, Any] | None
    """Nil, or the projector with which it reads images and sounds: `file` (empty: none was
    taken), `type` (llama.cpp's name), `kinds` (`image`, `audio`), `width` (numbers of an
    embedding), `image_size` (pixels of a side with which it was trained; 0: no images),
    `size_bytes`, `image_tokens_max` (tokens of a very large image) and `buffer_bytes` (memory in
    which it computes), both nil before its first load, `pid` (of its process; 0: none), `note`
    (files beside the model that were left out, and why) and `error` (nil, or why it does not
    work).
    """
    draft_model: dict[str, Any] | None
    """Nil, or the model that drafts for it ([draft models](scheduling.md#draft-models)): `name` (as
    `draft-model` names it), `file`, `size_bytes` and `error` (nil, or why there is none).
    """
    node: str | UnsetType = UNSET
    """In a [fleet](fleet.md), its node; otherwise absent."""
    nodes: list[dict[str, Any]] | UnsetType = UNSET
    """In a [fleet](fleet.md), the model as each node describes it; otherwise absent."""


class ShownModel(ModelInfo, kw_only=True):
    """A model, as `show` describes it."""

    options: dict[str, Any]
    """Its configured parameters."""
    file_info: FileFacts | None
    """Nil, or a map of facts that the header of its file states; nil for `echo` and for models
    from descriptors.
    """
    file_error: str | None
    """Nil, or the reason why the header cannot be read, such as no answer from a file server
    within 5 s.
    """
    estimate: dict[str, Any] | None
    """Nil if nothing is known, or the memory that its next load needs: `slots`, `ctx_size` (of
    each slot), and the keys of `memory` in bytes. Once the model has been loaded, llama.cpp has
    estimated them; before, `weights` is the files' size, `context` an upper bound (nil if it is
    not known), and the others are nil.
    """
    drafts: dict[str, Any] | None
    """Nil, or what drafts brought the model in the last 7 days: `drafted` and `accepted` (tokens),
    and of the steps with drafts `tokens`, `seconds` and `plain_seconds` (the time that these
    tokens would have taken without drafts). Nil also for models from descriptors.
    """
    names: list[str]
    """The other names of the model, which the configuration gives it with `of`."""
    ceilings: dict[str, Any]
    """The bounds of turns by this name: `n-predict-max`, `reasoning-max` (by class) and
    `priority-max`, as far as the configuration sets them.
    """
    inputs: list[dict[str, Any]] | None
    """Of a graph, array of map: the `name` of each input, its `type` and its `shape`, whose sizes
    are numbers, or texts if they are free; `shape` is nil if the file does not state it. Nil for
    other models, and if the file cannot be read before it is loaded.
    """
    outputs: list[dict[str, Any]] | None
    """As `inputs`."""


class SessionInfo(msgspec.Struct, kw_only=True):
    """A session, as `sessions` describes it."""

    context: int | None
    """The handle; nil for a dormant session."""
    uid: int
    """The user to whom it belongs."""
    user: str
    """The name of a [gateway](#gateways)'s own user, as far as the daemon knows it, or empty."""
    label: str
    """The label of the program to which it belongs, or empty."""
    session_id: str | None
    """Its id, or nil."""
    model: str
    """The model's name."""
    state: str
    """`empty`, `ready`, `waiting`, `running`, `parked`, `done`, `failed`, `unloaded` or
    `dormant`; with `all` and `dormant` also `arriving`, `departed` ([moving
    sessions](#moving-sessions)) or `copy` ([copies](#copies-of-sessions)).
    """
    priority: PriorityName
    """Priority of its turns."""
    tokens: int
    """Tokens of its history."""
    persisted: bool | None
    """Whether it is written to the journal; false if the daemon cannot write; nil without an id,
    or without `persist`.
    """
    turns: int
    """Turns begun so far; a [resumed](#resume) turn keeps its number."""
    title: str
    """Its title: the one that [`update_session`](#update_session) has set, or else the first
    words of its first message; empty for other users' sessions.
    """
    kept: bool
    """Whether it is [kept](#update_session)."""
    expires_s: float | None
    """Of a dormant session: seconds until it is deleted because of its age; nil if it is open or
    kept.
    """
    interrupted: bool
    """Whether its last turn was interrupted and can be [resumed](#resume); false during a turn."""
    idle_s: float
    """Time since its last use; 0 during a turn."""
    has_place: bool
    """Whether it counts in the maximum of sessions; false if it is dormant or has yielded its
    place.
    """
    on_behalf_of: str
    """The user for whom a [gateway](#gateways) has opened it last, or empty."""
    transfer: dict[str, Any] | None
    """Nil, or of a session that arrives or has departed: `id` and `peer` as the caller of the
    [transfer](#moving-sessions) gave them; of a copy the stream as `id`, and the `peer` that has
    the session.
    """
    node: str | UnsetType = UNSET
    """In a [fleet](fleet.md), its node; otherwise absent."""


class TaskInfo(msgspec.Struct, kw_only=True):
    """A waiting or running turn, as `queue` describes it."""

    task: int | None
    """Its number; nil while the turn waits for its model to be loaded."""
    uid: int
    """The user to whom it belongs."""
    user: str
    """The name of a [gateway](#gateways)'s own user, as far as the daemon knows it, or empty."""
    label: str
    """The label of the program to which it belongs, or empty."""
    context: int
    """The context's handle."""
    session_id: str | None
    """The session's id, or nil."""
    model: str
    """The model's name."""
    state: str
    """`waiting`, `running` or `parked`; `encoding` while the embeddings of an image or a sound of
    its prompt are computed.
    """
    priority: PriorityName
    """The turn's priority class."""
    effective_priority: PriorityName | None
    """The class to which waiting has raised it."""
    position: int | None
    """0 in a slot, 1 for the next turn to get one; turns of other users count."""
    starts_in_s: float | None
    """Seconds until it is expected to get a slot; nil if that cannot be estimated: it was parked
    by hand, or waits for its reader or for KV space.
    """
    prompt_tokens: int
    """Tokens of the prompt, including the history."""
    computed_tokens: int | None
    """Tokens of prompt and answer that the engine has computed."""
    output_tokens: int
    """Tokens sent so far."""
    age_s: float
    """Time since it was queued."""
    node: str | UnsetType = UNSET
    """In a [fleet](fleet.md), its node; otherwise absent."""


class ParameterInfo(msgspec.Struct, kw_only=True):
    """A parameter in force, as `parameters` describes it."""

    name: str
    """Its name."""
    value: Any
    """The value in force."""
    origin: str
    """`turn` (the last one), `session`, `graph`, `model` (the configuration), `backend` (by
    `init_backend`), `file` or `built-in`.
    """
    adjusted: str
    """The reason why the value differs from the requested one, else empty."""


class DeletionInfo(msgspec.Struct, kw_only=True):
    """A session that the daemon has deleted by itself."""

    session_id: str
    """The session's id."""
    title: str
    """Its title."""
    model: str
    """Its model."""
    at: float
    """Unix time of the deletion."""
    reason: str
    """`age`: it was not used for `dormant-days-max`; `sessions`: there were more than
    `dormant-sessions-max`; `memory`: the sessions of its user, or of all users, took too much
    memory.
    """
    node: str | UnsetType = UNSET
    """In a [fleet](fleet.md), its node; otherwise absent."""


class StateInfo(msgspec.Struct, kw_only=True):
    """A named state, as `list_states` describes it."""

    name: str
    """Its name, for `from_state`; that of a shared one is as the rule has it."""
    label: str
    """The label that owns it; a caller without a label gets those of all its user's labels."""
    model: str
    """The model that it belongs to."""
    fingerprint: str
    """The fingerprint of the model's file when it was saved."""
    tokens: int
    """Tokens of its history."""
    bytes: int
    """Memory that it takes in the daemon, which counts in `session-bytes-user-max`."""
    kv_disk_bytes: int
    """Size of its KV state on disk; 0: it is computed again when it is needed."""
    created_at: float
    """When it was saved, in seconds since 1970."""
    shared_by: int | None
    """The number of the user who owns a shared state; nil: it is the caller's own."""
    node: str | UnsetType = UNSET
    """In a [fleet](fleet.md), its node; otherwise absent."""


class JobFileInfo(msgspec.Struct, kw_only=True):
    """A file of jobs, as `files` describes it."""

    id: str
    """Its id."""
    name: str
    """Its name, for lists."""
    label: str
    """The label that owns it."""
    purpose: str
    """`input`: requests; `output`: results; `errors`: results of requests that failed."""
    bytes: int
    """Its present size."""
    lines: int
    """Its lines."""
    created_at: float
    """When it was made, in seconds since 1970."""
    expires_at: float | None
    """When it is deleted at the latest; nil: a job needs it, or there is no bound."""
    job: str
    """The job that writes it; empty for requests."""
    node: str | UnsetType = UNSET
    """In a [fleet](fleet.md), its node; otherwise absent."""


class JobInfo(msgspec.Struct, kw_only=True):
    """A job, as `jobs` describes it."""

    id: str
    """Its id."""
    uid: int
    """The number of the user that it belongs to."""
    user: str
    """The name of a gateway's own user, else empty."""
    label: str
    """The label that owns it; a caller without a label gets those of all its user's labels."""
    state: str
    """`waiting`, `running`, `completed`, `cancelled`, `expired` or `failed`."""
    endpoint: str
    """The path of all requests; empty: each line has its own."""
    priority: str
    """The class of requests that name none."""
    metadata: dict[str, str]
    """Texts of the caller; empty in the list of a job of another user."""
    requests: int
    """Its requests."""
    completed: int
    """Requests with a result in the output file."""
    failed: int
    """Requests with a result in the file of errors."""
    running: int
    """Requests under way."""
    created_at: float
    """When it was submitted, in seconds since 1970."""
    started_at: float | None
    """When its first request began; nil: none has."""
    ended_at: float | None
    """When it ended; nil: it has not."""
    expires_at: float | None
    """When its remaining requests are given up; nil: never."""
    input_file: str
    """The file with its requests."""
    output_file: str
    """The file with the results of requests that were answered."""
    error_file: str
    """The file with the results of requests that failed."""
    error: str
    """The reason for which it failed, else empty."""
    revision: int
    """A number that changes with each change of the job."""
    node: str | UnsetType = UNSET
    """In a [fleet](fleet.md), its node; otherwise absent."""


class UsageInfo(msgspec.Struct, kw_only=True):
    """The usage of one group, as `usage` describes it. Fields by which the call does not group are
    nil. A row `other` has what came past the [bound on rows](operations.md#usage).
    """

    start: float | None
    """When the hour or the day began, in seconds since 1970."""
    uid: int | None
    """The user; -1: users past the bound."""
    user: str | None
    """The name of a [gateway](#gateways)'s own user, as far as the daemon knows it, or empty."""
    label: str | None
    """The label of the program, or empty."""
    key: str | None
    """The name of the gateway's key, or empty."""
    model: str | None
    """The model's name; `descriptor`: one that was passed as a descriptor; empty: a refused request
    that names no open context or graph.
    """
    requests: int
    """Turns, embedded texts and computations of tensors that have ended, with or without an error.
    """
    refused: int
    """Requests refused because of a bound, a quota or the end of the daemon."""
    prompt_tokens: int
    """Tokens of prompts, with the cached ones; those of a turn count from its first token on."""
    cached_tokens: int
    """Tokens of prompts that were not computed again."""
    generated_tokens: int
    """Tokens of answers."""
    drafted_tokens: int
    """Tokens that a drafter proposed and a step computed."""
    compute_s: float
    """Time of the model's steps, each divided among its turns by tokens, and of computing tensors
    and encoding images and sounds.
    """


class Stats(msgspec.Struct, kw_only=True):
    """The daemon's statistics."""

    uptime_s: float
    """Time since the start."""
    pid: int
    """The daemon's process."""
    instance: int
    """Its start count."""
    draining: bool
    """Whether it refuses new work."""
    socket_activated: bool
    """Whether systemd listens: connections wait there while the daemon restarts."""
    connections: int
    """Open connections."""
    sessions: int
    """Open sessions with a place."""
    sessions_yielded: int
    """Open sessions that have yielded their place."""
    sessions_max: int
    """The maximum of open sessions."""
    sessions_waiting: int
    """Requests that wait for the place of an open session."""
    sessions_dormant: int
    """Dormant sessions."""
    sessions_expired: int
    """Sessions expired since the start."""
    journal: dict[str, Any]
    """State of the journal of sessions with an id, a map of `state` (`written`; `failing`: it
    cannot be written; `refused`: it is a newer version's), `cause` (of the last failure, or
    nil), `sessions` (their number) and `moved_to` (the path to which a damaged journal, or one
    of an older version, was moved at the start, or nil).
    """
    components: list[dict[str, Any]]
    """The optional components and their health: `config`, `state`, `journal`, `kv-store`,
    `models`, `models-dir`, `model-files`, `preload`, `memory`, `cores`, `notify`, `metrics`,
    `traces`, `log`, `uvloop`; for each a map of `component`, `up`, and, if it fails, `cause`,
    `effect`, `remedy` and `failing_s` (the seconds since then).
    """
    metrics_address: str | None
    """Where Prometheus can scrape the metrics: HOST:PORT or a path; nil: they are not served."""
    log: dict[str, Any]
    """A map of `file` (the setting `log-file`, or nil), `journal` (nil unless the log goes to
    systemd's journal; else a map of its `unit`, or nil, and whether it is a `user`'s), `levels`
    by logger, and `texts` (whether prompts and answers are logged).
    """
    pending_restart: list[str]
    """Settings whose new values in the configuration file take effect after a restart."""
    waiting: int
    """Waiting turns."""
    running: int
    """Running turns."""
    parked: int
    """Parked turns."""
    refused: int
    """Turns refused with `Busy` since the start."""
    recovered: int
    """Times since the start that a turn continued in another worker, because its own had died or
    was swapped.
    """
    retry_after_ratio: dict[str, Any]
    """A histogram of `retry_after_s` divided by the actual time until a retry would have been
    admitted: a map of the buckets' upper bounds (0.25, 0.5, 0.8, 1.25, 2.0, 4.0, inf) to
    counts.
    """
    cores: int
    """CPU cores that the models share."""
    memory: dict[str, Any]
    """A map of `low` (whether memory is low now), `free_bytes` (the machine's free memory, less
    the headroom and, without `memory_bytes`, less the memory reserved for models; negative:
    missing), `pressure_known` (whether the kernel has pressure stall information),
    `load_free_bytes` (memory that a load may take now), `load_evictable_bytes` (memory beside it
    of models without tasks, which a load may have unloaded), and since the start: `low_events`
    (times that memory became low), `kv_bytes_freed`, `models_unloaded` and
    `model_bytes_freed`.
    """
    models: dict[str, Any]
    """A map of the names of loaded models to their engines' counters."""
    metrics: dict[str, Any]
    """The metrics in [metrics.md](metrics.md), except the histograms and `process_…`: a map of
    the names, without `inferd_` and `_total`, to an array of maps of the labels and `value`; the
    models' values come from the daemon's memory, without a query to the engines.
    """
    nodes: dict[str, dict[str, Any]] | UnsetType = UNSET
    """In a [fleet](fleet.md), those of each node; otherwise absent."""
    unreachable: list[str] | UnsetType = UNSET
    """In a [fleet](fleet.md), the nodes that do not answer; otherwise absent."""
