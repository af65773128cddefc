"""The table of all calls: one row for each, with everything that the rest derives from it.

A new call is a row here, a function in ``daemon/calls/``, a method of the client in
``ipc/client/``, and a section in docs/protocol.md. A row that lacks a fact cannot be imported.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, StrEnum, auto

import msgspec

from . import (
    between_daemons,
    buffers,
    channels,
    contexts,
    graphs,
    jobs,
    models,
    monitoring,
    session_operations,
    texts,
    turns,
)
from .base import Empty, Map

HANDLES = frozenset(("graph", "context", "contexts"))
"""The fields with handles, in params, results and events alike."""
SESSION = "session"
"""A field of a result that describes a session, with its context."""
DESCRIPTORS = frozenset(("fd", "weights", "tensor", "inputs", "messages"))
"""The fields of params that are, or have, indices of descriptors."""


class Right(StrEnum):
    """A right that a rule may grant."""

    USE = "use"
    MANAGE = "manage"
    SEE_ALL = "see-all"
    DRAIN = "drain"
    DELEGATE = "delegate"


class ContextUse(Enum):
    """The use that a call makes of the context that it names."""

    WORK = auto()
    """It needs the context's place among the open sessions, and waits if another one has it."""
    READ = auto()
    """It reads the context or ends its turn, and therefore needs no place."""
    END = auto()
    """It ends the context, and needs no place."""


class ModelUse(Enum):
    """The wait of a call for its model to be in memory."""

    NONE = auto()
    LOADED = auto()
    """It waits for its model."""
    QUEUED = auto()
    """It waits for its model, and counts as a waiting turn meanwhile."""


class Starts(Enum):
    """The turns that a call starts."""

    TURN = auto()
    """One turn, of one prompt."""
    TOKEN = auto()
    """One turn, of which this call and later ones each return a token."""
    ANSWERS = auto()
    """Several turns, of one prompt."""
    REST = auto()
    """The rest of an interrupted turn."""
    EMBEDDINGS = auto()
    """A turn for each of several texts or documents, on no context."""


class Operation(StrEnum):
    """The operation of a traced request, by its name in OpenTelemetry's conventions for GenAI."""

    CHAT = "chat"
    COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"


class Route(Enum):
    """The node, or nodes, to which the entry of a fleet sends a call."""

    LOAD = auto()
    """A node for a new graph, by the model's name."""
    OPEN = auto()
    """A node for a new context, by its graph's model and its session."""
    GRAPH = auto()
    """A node that has the graph's model."""
    LEASES = auto()
    """All nodes on which the graph holds its model."""
    CONTEXT = auto()
    """The node of the context."""
    CANCEL = auto()
    """The node of the request or context."""
    SESSION = auto()
    """The node of the context, or all nodes for a session's id."""
    MODEL = auto()
    """All nodes that have the model, one after the other."""
    SWAP = auto()
    """As `MODEL`; after a failure the nodes before it swap back."""
    ALL = auto()
    """All nodes that can be reached, at once."""
    DRAIN = auto()
    """The entry, or one node, or all nodes."""
    COPY = auto()
    """Two nodes: the file of a model passes through the entry."""
    ENTRY = auto()
    """The entry itself."""
    JOB = auto()
    """The node that has the job or file, or all nodes for a list."""
    BUFFER = auto()
    """The entry itself, which copies the parts of buffers that a node computes."""
    NONE = auto()
    """No node, because the call is between daemons."""
    CONFIGURE = auto()
    """The nodes to which the client is connected, and later ones."""
    END_BACKEND = auto()
    """The nodes to which the client is connected."""


class Merge(Enum):
    """The result of a call that several nodes have answered."""

    FIRST = auto()
    """The result of the first node."""
    ANY = auto()
    """Whether it is true of any node."""
    LISTS = auto()
    """The lists of all nodes as one. Further integers are added, and of further times the shortest
    counts.
    """
    MODELS = auto()
    """The models of all nodes, each model once."""
    USAGE = auto()
    """The usage of all nodes: equal groups are added."""
    STATISTICS = auto()
    """The statistics of all nodes."""


MERGED = frozenset((Route.ALL, Route.DRAIN, Route.SESSION))
"""The routes whose calls several nodes answer."""


class _Messages(msgspec.Struct, frozen=True):
    """The messages of a call; `events` may be sent before its reply."""

    params: type[Map]
    result: type[Map]
    events: tuple[type[Map], ...] = ()


class Call(_Messages, frozen=True, kw_only=True):
    """The row of a call. The fields from `model` on follow from the others unless they are given
    (`completed`).
    """

    right: Right | None
    """The right that it needs; None if it reads public state or the caller's own, or releases the
    caller's resources. With the param `all`, if it is set, a call needs `SEE_ALL`.
    `Access.may_control_turns_of` decides on calls on another user's turns.
    """
    context: ContextUse | None = None
    starts: Starts | None = None
    operation: Operation | None = None
    """Its operation in traces until the turn that it starts is known."""
    merge: Merge | None = None
    while_stopping: bool = False
    """Whether the entry of a fleet still serves it while it stops."""
    model: ModelUse | None = None
    """Its wait for its model: `QUEUED` if it starts turns, and else `NONE`, unless it is given."""
    route: Route | None = None
    handles_in_result: frozenset[str] = frozenset()
    handles_in_events: frozenset[str] = frozenset()
    has_descriptors: bool = False
    """Whether its params may refer to descriptors."""
    has_buffers: bool = False
    """Whether its params may refer to buffers, by which tensors of any size are passed."""

    @property
    def starts_on_context(self) -> bool:
        """Whether it is one or more whole turns of a context."""
        return self.starts in (Starts.TURN, Starts.ANSWERS, Starts.REST)

    @property
    def computes(self) -> bool:
        """Whether it computes something that counts as usage."""
        return self.starts is not None

    @property
    def begins_turns(self) -> bool:
        """Whether it may begin a turn, and does not only continue one."""
        return self.starts not in (None, Starts.REST)

    @property
    def sets_up(self) -> bool:
        """Whether it only changes its context, before the call that has the prompt."""
        return self.context is ContextUse.WORK and self.result is Empty


def derived_route(params: Collection[str], result: Collection[str]) -> Route | None:
    """Return the route of a call by the names of its fields, if it follows from them."""
    if "graph" in result:
        return Route.LOAD
    if "context" in params:
        return Route.CONTEXT
    if "graph" in params:
        return Route.OPEN if "context" in result else Route.GRAPH
    return None


def completed(name: str, call: Call) -> Call:
    """Return the row of a call with the fields that follow from its messages.

    :raises TypeError: a fact is missing, or two of them contradict each other.
    """
    params, result = set(call.params.__struct_fields__), set(call.result.__struct_fields__)
    events = {field for event in call.events for field in event.__struct_fields__}
    route = call.route or derived_route(params, result)
    model = call.model or (ModelUse.NONE if call.starts is None else ModelUse.QUEUED)
    has_model = "context" in params or "graph" in params
    required = {
        "a route": route is not None,
        "the use of its context": ("context" in params) == (call.context is not None),
        "an operation": (call.starts is None) == (call.operation is None),
        "a graph or context with its model": has_model or model is ModelUse.NONE,
        "a merged result": (route in MERGED) == (call.merge is not None),
    }
    if not all(required.values()):
        missing = ", ".join(fact for fact, holds in required.items() if not holds)
        raise TypeError(f"the row of the call {name} lacks, or should not have: {missing}")
    return msgspec.structs.replace(
        call,
        model=model,
        route=route,
        handles_in_result=frozenset(result & (HANDLES | {SESSION})),
        handles_in_events=frozenset(events & HANDLES),
        has_descriptors=not params.isdisjoint(DESCRIPTORS),
        has_buffers={"inputs", "outputs"} <= params,
    )


CALLS: dict[str, Call] = {
    "load": Call(graphs.LoadParams, graphs.GraphResult, (graphs.ProgressEvent,), right=Right.USE),
    "load_by_name": Call(
        graphs.LoadByNameParams, graphs.GraphResult, (graphs.ProgressEvent,), right=Right.USE
    ),
    "load_by_name_with_config": Call(
        graphs.LoadByNameWithConfigParams,
        graphs.GraphResult,
        (graphs.ProgressEvent,),
        right=Right.USE,
    ),
    "init_execution_context": Call(contexts.OpenParams, contexts.ContextResult, right=Right.USE),
    "set_input": Call(
        contexts.SetInputParams,
        Empty,
        right=Right.USE,
        context=ContextUse.WORK,
        model=ModelUse.LOADED,
    ),
    "compute": Call(
        contexts.ComputeParams,
        contexts.ComputeResult,
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.TURN,
        operation=Operation.COMPLETION,
    ),
    "free_tensors": Call(contexts.FreeTensorsParams, Empty, right=None, route=Route.NONE),
    "register_buffer": Call(
        buffers.RegisterBufferParams, buffers.BufferResult, right=Right.USE, route=Route.BUFFER
    ),
    "write_buffer": Call(buffers.WriteBufferParams, Empty, right=Right.USE, route=Route.BUFFER),
    "read_buffer": Call(
        buffers.ReadBufferParams, buffers.ReadBufferResult, right=Right.USE, route=Route.BUFFER
    ),
    "free_buffers": Call(buffers.FreeBuffersParams, Empty, right=None, route=Route.BUFFER),
    "open_channel": Call(
        channels.OpenChannelParams,
        Empty,
        right=Right.USE,
        route=Route.NONE,
        model=ModelUse.LOADED,
    ),
    "compute_single": Call(
        contexts.ComputeSingleParams,
        contexts.ComputeSingleResult,
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.TOKEN,
        operation=Operation.COMPLETION,
    ),
    "get_output": Call(
        contexts.GetOutputParams,
        contexts.OutputResult,
        right=Right.USE,
        context=ContextUse.READ,
        while_stopping=True,
    ),
    "get_output_single": Call(
        contexts.GetOutputParams, contexts.OutputResult, right=Right.USE, context=ContextUse.READ
    ),
    "fini_single": Call(contexts.ContextParams, Empty, right=None, context=ContextUse.READ),
    "finalize_execution_context": Call(
        contexts.FinalizeParams, Empty, right=None, context=ContextUse.END, while_stopping=True
    ),
    "unload": Call(graphs.UnloadParams, Empty, right=None, route=Route.LEASES, while_stopping=True),
    "prompt_init": Call(contexts.OpenParams, contexts.ContextResult, right=Right.USE),
    "prompt_compute": Call(
        turns.PromptComputeParams,
        turns.PromptComputeResult,
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.TURN,
        operation=Operation.COMPLETION,
    ),
    "init_backend": Call(
        graphs.InitBackendParams, graphs.InitBackendResult, right=None, route=Route.CONFIGURE
    ),
    "deinit_backend": Call(Empty, Empty, right=None, route=Route.END_BACKEND),
    "init_execution_context_with_session_id": Call(
        contexts.SessionParams, contexts.ContextResult, right=Right.USE
    ),
    "close_execution_context": Call(
        contexts.FinalizeParams, Empty, right=None, context=ContextUse.END
    ),
    "run_inference": Call(
        turns.RunInferenceParams,
        turns.TurnResult,
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.TURN,
        operation=Operation.CHAT,
    ),
    "stream": Call(
        turns.StreamParams,
        turns.TurnResult,
        (turns.TokensEvent, turns.QueueEvent),
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.TURN,
        operation=Operation.CHAT,
    ),
    "chat": Call(
        turns.StreamParams,
        turns.TurnResult,
        (turns.QueueEvent,),
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.TURN,
        operation=Operation.CHAT,
    ),
    "answers": Call(
        turns.AnswersParams,
        turns.AnswersResult,
        (turns.AnswersEvent,),
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.ANSWERS,
        operation=Operation.CHAT,
    ),
    "resume": Call(
        turns.ResumeParams,
        turns.TurnResult,
        (turns.TokensEvent, turns.QueueEvent),
        right=Right.USE,
        context=ContextUse.WORK,
        starts=Starts.REST,
        operation=Operation.CHAT,
    ),
    "embed": Call(
        texts.EmbedParams,
        texts.EmbedResult,
        right=Right.USE,
        starts=Starts.EMBEDDINGS,
        operation=Operation.EMBEDDINGS,
    ),
    "rerank": Call(
        texts.RerankParams,
        texts.RerankResult,
        right=Right.USE,
        starts=Starts.EMBEDDINGS,
        operation=Operation.EMBEDDINGS,
    ),
    "cancel": Call(
        session_operations.CancelParams,
        session_operations.CancelResult,
        right=None,
        context=ContextUse.READ,
        route=Route.CANCEL,
        while_stopping=True,
    ),
    "park": Call(
        contexts.ContextParams, session_operations.ParkResult, right=None, context=ContextUse.READ
    ),
    "end_reasoning": Call(
        contexts.ContextParams,
        session_operations.EndReasoningResult,
        right=None,
        context=ContextUse.READ,
    ),
    "reset": Call(session_operations.SystemParams, Empty, right=Right.USE, context=ContextUse.WORK),
    "rewind": Call(
        session_operations.RewindParams,
        session_operations.RewindResult,
        right=Right.USE,
        context=ContextUse.WORK,
    ),
    "fork_session": Call(
        session_operations.ForkParams,
        session_operations.ForkResult,
        right=Right.USE,
        context=ContextUse.WORK,
    ),
    "history": Call(
        session_operations.HistoryParams,
        session_operations.HistoryResult,
        right=None,
        context=ContextUse.READ,
        route=Route.SESSION,
        merge=Merge.FIRST,
    ),
    "session_media": Call(
        session_operations.SessionMediaParams,
        session_operations.SessionMediaResult,
        right=None,
        context=ContextUse.READ,
        route=Route.SESSION,
        merge=Merge.FIRST,
    ),
    "delete_session": Call(
        session_operations.DeleteSessionParams,
        session_operations.DeleteSessionResult,
        right=None,
        context=ContextUse.END,
        route=Route.SESSION,
        merge=Merge.ANY,
    ),
    "update_session": Call(
        session_operations.UpdateSessionParams,
        session_operations.SessionResult,
        right=Right.USE,
        route=Route.SESSION,
        merge=Merge.FIRST,
    ),
    "restore_session": Call(
        session_operations.SessionIdParams,
        session_operations.SessionResult,
        right=Right.USE,
        route=Route.SESSION,
        merge=Merge.FIRST,
    ),
    "list_deletions": Call(
        session_operations.ListDeletionsParams,
        session_operations.ListDeletionsResult,
        right=None,
        route=Route.ALL,
        merge=Merge.LISTS,
    ),
    "save_state": Call(
        session_operations.SaveStateParams,
        session_operations.SaveStateResult,
        right=Right.USE,
        context=ContextUse.WORK,
        model=ModelUse.QUEUED,
    ),
    "list_states": Call(
        Empty, session_operations.ListStatesResult, right=None, route=Route.ALL, merge=Merge.LISTS
    ),
    "delete_state": Call(
        session_operations.DeleteStateParams,
        session_operations.DeleteStateResult,
        right=None,
        route=Route.ALL,
        merge=Merge.ANY,
    ),
    "export_session": Call(
        between_daemons.ExportParams,
        between_daemons.ExportResult,
        right=Right.MANAGE,
        route=Route.NONE,
    ),
    "import_session": Call(
        between_daemons.ImportParams,
        between_daemons.ImportResult,
        right=Right.MANAGE,
        route=Route.NONE,
    ),
    "end_transfer": Call(
        between_daemons.EndTransferParams, Empty, right=Right.MANAGE, route=Route.NONE
    ),
    "read_copy": Call(
        between_daemons.ReadCopyParams,
        between_daemons.ReadCopyResult,
        right=Right.MANAGE,
        route=Route.NONE,
    ),
    "store_copy": Call(
        between_daemons.StoreCopyParams, Empty, right=Right.MANAGE, route=Route.NONE
    ),
    "set_options": Call(
        session_operations.OptionsParams, Empty, right=Right.USE, context=ContextUse.WORK
    ),
    "parameters": Call(
        contexts.ContextParams,
        session_operations.ParametersResult,
        right=Right.USE,
        context=ContextUse.READ,
    ),
    "models": Call(
        models.ModelsParams, models.ModelsResult, right=None, route=Route.ALL, merge=Merge.MODELS
    ),
    "show": Call(
        models.NamesParams, models.ModelsResult, right=None, route=Route.ALL, merge=Merge.MODELS
    ),
    "unload_model": Call(models.NamesParams, Empty, right=Right.MANAGE, route=Route.MODEL),
    "pin": Call(models.NameParams, Empty, right=Right.MANAGE, route=Route.MODEL),
    "swap": Call(models.SwapParams, models.SwapResult, right=Right.MANAGE, route=Route.SWAP),
    "unpin": Call(models.NameParams, Empty, right=Right.MANAGE, route=Route.MODEL),
    "add_adapter": Call(
        models.AddAdapterParams, models.AddAdapterResult, right=Right.MANAGE, route=Route.MODEL
    ),
    "remove_adapter": Call(
        models.RemoveAdapterParams, Empty, right=Right.MANAGE, route=Route.MODEL
    ),
    "export_model": Call(
        between_daemons.ExportModelParams,
        between_daemons.ExportModelResult,
        right=Right.MANAGE,
        route=Route.NONE,
    ),
    "import_model": Call(
        between_daemons.ImportModelParams,
        between_daemons.ImportModelResult,
        right=Right.MANAGE,
        route=Route.NONE,
    ),
    "end_model_transfer": Call(
        between_daemons.EndModelTransferParams, Empty, right=Right.MANAGE, route=Route.NONE
    ),
    "add_model": Call(
        between_daemons.AddModelParams,
        between_daemons.AddModelResult,
        (graphs.ProgressEvent,),
        right=Right.MANAGE,
        route=Route.NONE,
    ),
    "copy_model": Call(
        between_daemons.CopyModelParams,
        between_daemons.CopyModelResult,
        right=Right.MANAGE,
        route=Route.COPY,
    ),
    "sessions": Call(
        monitoring.SessionsParams,
        monitoring.SessionsResult,
        right=None,
        route=Route.ALL,
        merge=Merge.LISTS,
    ),
    "queue": Call(
        monitoring.QueueParams,
        monitoring.QueueResult,
        right=None,
        route=Route.ALL,
        merge=Merge.LISTS,
        while_stopping=True,
    ),
    "usage": Call(
        monitoring.UsageParams,
        monitoring.UsageResult,
        right=None,
        route=Route.ALL,
        merge=Merge.USAGE,
        while_stopping=True,
    ),
    "stats": Call(
        Empty,
        monitoring.StatsResult,
        right=None,
        route=Route.ALL,
        merge=Merge.STATISTICS,
        while_stopping=True,
    ),
    "metrics": Call(
        Empty, monitoring.MetricsResult, right=None, route=Route.ENTRY, while_stopping=True
    ),
    "exchange_served": Call(
        between_daemons.ExchangeServedParams,
        between_daemons.ExchangeServedResult,
        right=Right.DELEGATE,
        route=Route.NONE,
    ),
    "tokenize": Call(
        texts.TokenizeParams, texts.TokensResult, right=Right.USE, model=ModelUse.LOADED
    ),
    "detokenize": Call(
        texts.DetokenizeParams, texts.TextResult, right=Right.USE, model=ModelUse.LOADED
    ),
    "apply_template": Call(
        texts.TemplateParams, texts.TemplateResult, right=Right.USE, model=ModelUse.LOADED
    ),
    "upload_file": Call(
        jobs.UploadFileParams, jobs.JobFileResult, right=Right.USE, route=Route.JOB
    ),
    "files": Call(jobs.FilesParams, jobs.FilesResult, right=None, route=Route.JOB),
    "read_file": Call(jobs.ReadFileParams, jobs.ReadFileResult, right=None, route=Route.JOB),
    "delete_file": Call(jobs.FileParams, jobs.DeletedResult, right=None, route=Route.JOB),
    "submit_job": Call(jobs.SubmitJobParams, jobs.JobResult, right=Right.USE, route=Route.JOB),
    "jobs": Call(jobs.JobsParams, jobs.JobsResult, right=None, route=Route.JOB),
    "cancel_job": Call(jobs.JobParams, jobs.JobResult, right=None, route=Route.JOB),
    "delete_job": Call(jobs.JobParams, jobs.DeletedResult, right=None, route=Route.JOB),
    "log_level": Call(
        monitoring.LogLevelParams,
        monitoring.LogLevelResult,
        right=Right.MANAGE,
        route=Route.ALL,
        merge=Merge.FIRST,
    ),
    "drain": Call(
        monitoring.DrainParams,
        monitoring.DrainResult,
        right=Right.DRAIN,
        route=Route.DRAIN,
        merge=Merge.FIRST,
        while_stopping=True,
    ),
}
CALLS = {name: completed(name, call) for name, call in CALLS.items()}
