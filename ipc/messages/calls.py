"""The table of all calls, with their messages.

A new call also needs an implementation in ``daemon/calls/``, its right in
``daemon/access/rights.py``, a method of the client in ``ipc/client/``, and a section in
docs/protocol.md. A call that waits for its model is also listed in
``daemon/calls/models/residency_requests.py``, and one that starts turns in
``daemon/traces/current_request.py``.
"""

from __future__ import annotations

import msgspec

from . import (
    contexts,
    fair_share,
    graphs,
    models,
    monitoring,
    session_operations,
    states,
    texts,
    turns,
)
from .base import Empty, Map
from .transfers import copies, model_transfers, moving


class Call(msgspec.Struct, frozen=True):
    """The messages of a call; `events` may be sent before its reply."""

    params: type[Map]
    result: type[Map]
    events: tuple[type[Map], ...] = ()


CALLS: dict[str, Call] = {
    "load": Call(graphs.LoadParams, graphs.GraphResult, (graphs.ProgressEvent,)),
    "load_by_name": Call(graphs.LoadByNameParams, graphs.GraphResult, (graphs.ProgressEvent,)),
    "load_by_name_with_config": Call(
        graphs.LoadByNameWithConfigParams, graphs.GraphResult, (graphs.ProgressEvent,)
    ),
    "init_execution_context": Call(contexts.OpenParams, contexts.ContextResult),
    "set_input": Call(contexts.SetInputParams, Empty),
    "compute": Call(contexts.ComputeParams, contexts.ComputeResult),
    "compute_single": Call(contexts.ComputeSingleParams, contexts.ComputeSingleResult),
    "get_output": Call(contexts.GetOutputParams, contexts.OutputResult),
    "get_output_single": Call(contexts.GetOutputParams, contexts.OutputResult),
    "fini_single": Call(contexts.ContextParams, Empty),
    "finalize_execution_context": Call(contexts.FinalizeParams, Empty),
    "unload": Call(graphs.UnloadParams, Empty),
    "prompt_init": Call(contexts.OpenParams, contexts.ContextResult),
    "prompt_compute": Call(turns.PromptComputeParams, turns.PromptComputeResult),
    "init_backend": Call(graphs.InitBackendParams, graphs.InitBackendResult),
    "deinit_backend": Call(Empty, Empty),
    "init_execution_context_with_session_id": Call(contexts.SessionParams, contexts.ContextResult),
    "close_execution_context": Call(contexts.FinalizeParams, Empty),
    "run_inference": Call(turns.RunInferenceParams, turns.TurnResult),
    "stream": Call(turns.StreamParams, turns.TurnResult, (turns.TokensEvent, turns.QueueEvent)),
    "chat": Call(turns.StreamParams, turns.TurnResult, (turns.QueueEvent,)),
    "answers": Call(turns.AnswersParams, turns.AnswersResult, (turns.AnswersEvent,)),
    "resume": Call(turns.ResumeParams, turns.TurnResult, (turns.TokensEvent, turns.QueueEvent)),
    "embed": Call(texts.EmbedParams, texts.EmbedResult),
    "cancel": Call(session_operations.CancelParams, session_operations.CancelResult),
    "park": Call(contexts.ContextParams, session_operations.ParkResult),
    "reset": Call(session_operations.SystemParams, Empty),
    "rewind": Call(session_operations.RewindParams, session_operations.RewindResult),
    "fork_session": Call(session_operations.ForkParams, session_operations.ForkResult),
    "history": Call(session_operations.HistoryParams, session_operations.HistoryResult),
    "delete_session": Call(
        session_operations.DeleteSessionParams, session_operations.DeleteSessionResult
    ),
    "update_session": Call(
        session_operations.UpdateSessionParams, session_operations.SessionResult
    ),
    "restore_session": Call(session_operations.SessionIdParams, session_operations.SessionResult),
    "list_deletions": Call(
        session_operations.ListDeletionsParams, session_operations.ListDeletionsResult
    ),
    "save_state": Call(states.SaveStateParams, states.SaveStateResult),
    "list_states": Call(Empty, states.ListStatesResult),
    "delete_state": Call(states.DeleteStateParams, states.DeleteStateResult),
    "export_session": Call(moving.ExportParams, moving.ExportResult),
    "import_session": Call(moving.ImportParams, moving.ImportResult),
    "end_transfer": Call(moving.EndTransferParams, Empty),
    "read_copy": Call(copies.ReadCopyParams, copies.ReadCopyResult),
    "store_copy": Call(copies.StoreCopyParams, Empty),
    "set_options": Call(session_operations.OptionsParams, Empty),
    "parameters": Call(contexts.ContextParams, session_operations.ParametersResult),
    "models": Call(models.ModelsParams, models.ModelsResult),
    "show": Call(models.NamesParams, models.ModelsResult),
    "unload_model": Call(models.NamesParams, Empty),
    "pin": Call(models.NameParams, Empty),
    "swap": Call(models.SwapParams, models.SwapResult),
    "unpin": Call(models.NameParams, Empty),
    "add_adapter": Call(models.AddAdapterParams, models.AddAdapterResult),
    "remove_adapter": Call(models.RemoveAdapterParams, Empty),
    "export_model": Call(model_transfers.ExportModelParams, model_transfers.ExportModelResult),
    "import_model": Call(model_transfers.ImportModelParams, model_transfers.ImportModelResult),
    "end_model_transfer": Call(model_transfers.EndModelTransferParams, Empty),
    "add_model": Call(
        model_transfers.AddModelParams, model_transfers.AddModelResult, (graphs.ProgressEvent,)
    ),
    "copy_model": Call(model_transfers.CopyModelParams, model_transfers.CopyModelResult),
    "sessions": Call(monitoring.SessionsParams, monitoring.SessionsResult),
    "queue": Call(monitoring.QueueParams, monitoring.QueueResult),
    "stats": Call(Empty, monitoring.StatsResult),
    "metrics": Call(Empty, monitoring.MetricsResult),
    "exchange_served": Call(fair_share.ExchangeServedParams, fair_share.ExchangeServedResult),
    "tokenize": Call(texts.TokenizeParams, texts.TokensResult),
    "detokenize": Call(texts.DetokenizeParams, texts.TextResult),
    "apply_template": Call(texts.TemplateParams, texts.TemplateResult),
    "log_level": Call(monitoring.LogLevelParams, monitoring.LogLevelResult),
    "drain": Call(monitoring.DrainParams, monitoring.DrainResult),
}
