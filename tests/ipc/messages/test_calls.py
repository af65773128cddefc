"""Every call has a complete row, from which the daemon and fleets derive what they do."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from inferd.ipc.messages import (
    CALLS,
    Call,
    ContextUse,
    Empty,
    Map,
    Merge,
    ModelUse,
    Operation,
    Right,
    Route,
    Starts,
)
from inferd.ipc.messages.calls import DESCRIPTORS, HANDLES, completed
from inferd.ipc.messages.contexts import ContextParams

EXPECTED = {
    Route.LOAD: "load load_by_name load_by_name_with_config",
    Route.OPEN: "init_execution_context prompt_init init_execution_context_with_session_id",
    Route.GRAPH: "embed rerank tokenize detokenize apply_template",
    Route.LEASES: "unload",
    Route.CONTEXT: "set_input compute compute_single get_output get_output_single fini_single"
    " finalize_execution_context close_execution_context prompt_compute run_inference stream chat"
    " answers resume park end_reasoning reset rewind fork_session save_state set_options"
    " parameters",
    Route.CANCEL: "cancel",
    Route.SESSION: "delete_session history session_media update_session restore_session",
    Route.MODEL: "unload_model pin unpin add_adapter remove_adapter",
    Route.SWAP: "swap",
    Route.ALL: "models show sessions queue usage stats list_states list_deletions delete_state"
    " log_level",
    Route.DRAIN: "drain",
    Route.ENTRY: "metrics",
    Route.CONFIGURE: "init_backend",
    Route.END_BACKEND: "deinit_backend",
    Route.NONE: "export_session import_session end_transfer read_copy store_copy exchange_served"
    " add_model export_model import_model end_model_transfer free_tensors"
    " open_channel",
    Route.JOB: "upload_file files read_file delete_file submit_job jobs cancel_job delete_job",
    Route.BUFFER: "register_buffer write_buffer read_buffer free_buffers",
    Route.COPY: "copy_model",
}


def test_every_call_has_the_route_of_its_kind() -> None:
    expected = {name: route for route, names in EXPECTED.items() for name in names.split()}
    assert {name: call.route for name, call in CALLS.items()} == expected
    assert set(expected) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_integers_that_are_not_handles_do_not_look_like_them(name: str) -> None:
    """A field is a handle by its name: a new one needs a name of `HANDLES`, or a rule here."""
    plain = {
        "index", "size_max", "n", "credit", "normalize", "turns", "tokens", "request", "fd",
        "ctx_size", "slots", "cached_tokens", "stored_tokens", "size", "size_bytes", "offset",
        "position", "waiting", "encoding", "target", "uid", "moved", "number", "projector_bytes",
            "prompt_tokens", "prompt_offset", "dormant_sessions", "dormant_sessions_max",
            "revision",
            "top_n", "indexes", "truncated", "sizes", "tensors", "free", "outputs",
            "buffer", "buffers",
    }  # fmt: skip
    call = CALLS[name]
    for kind in (call.params, call.result, *call.events):
        for field in msgspec.structs.fields(kind):
            if int in _types(field.type) or list[int] in _types(field.type):
                assert field.name in plain | HANDLES, field.name


def _types(kind: Any) -> set[Any]:
    arguments = typing.get_args(kind)
    return {kind} if kind == list[int] or not arguments else {kind, *arguments}


def test_handles_in_results_and_events_are_found() -> None:
    handles = {name: (c.handles_in_result, c.handles_in_events) for name, c in CALLS.items()}
    found = {name: both for name, both in handles.items() if any(both)}
    graph, context, contexts = frozenset({"graph"}), frozenset({"context"}), frozenset({"contexts"})
    none: frozenset[str] = frozenset()
    assert found == {
        **dict.fromkeys(EXPECTED[Route.LOAD].split(), (graph, none)),
        **dict.fromkeys(EXPECTED[Route.OPEN].split(), (context, none)),
        "answers": (none, contexts),
        "fork_session": (contexts, none),
        **dict.fromkeys(
            ("history", "update_session", "restore_session"), (frozenset({"session"}), none)
        ),
    }


def test_fields_with_descriptors_are_found() -> None:
    found = {name for name, call in CALLS.items() if call.has_descriptors}
    with_messages = {"stream", "chat", "answers", "apply_template"}
    assert (
        found
        == {
            "add_model",
            "load",
            "set_input",
            "compute",
            "run_inference",
            "register_buffer",
            "open_channel",
        }
        | with_messages
    )
    for call in CALLS.values():
        for field in msgspec.structs.fields(call.params):
            has_part = any(hasattr(kind, "fd") for kind in _parts(field.type))
            expected = has_part or field.name in ("fd", "messages")
            assert (field.name in DESCRIPTORS) == expected, field.name


def test_calls_with_tensors_in_buffers_are_found() -> None:
    assert {name for name, call in CALLS.items() if call.has_buffers} == {"compute"}


def _parts(kind: Any) -> set[Any]:
    return {kind}.union(*(_parts(part) for part in typing.get_args(kind)))


def names(value: object, field: str) -> set[str]:
    return {name for name, call in CALLS.items() if getattr(call, field) is value}


def test_calls_that_start_turns_wait_for_their_model() -> None:
    assert names(Starts.TURN, "starts") == {
        *("compute", "prompt_compute", "run_inference", "stream", "chat")
    }
    assert names(Starts.TOKEN, "starts") == {"compute_single"}
    others = {name for name, call in CALLS.items() if call.starts_on_context}
    assert others - names(Starts.TURN, "starts") == {"answers", "resume"}
    starting = {name for name, call in CALLS.items() if call.starts is not None}
    assert names(ModelUse.QUEUED, "model") == starting | {"save_state"}
    assert names(ModelUse.LOADED, "model") == {
        *("set_input", "tokenize", "detokenize", "apply_template", "open_channel")
    }
    assert names(Operation.COMPLETION, "operation") == {
        *("compute", "compute_single", "prompt_compute")
    }


def test_calls_that_read_or_end_a_context_need_no_place() -> None:
    assert names(ContextUse.END, "context") == {
        *("finalize_execution_context", "close_execution_context", "delete_session")
    }
    assert names(ContextUse.READ, "context") == {
        *(
            "fini_single",
            "parameters",
            "history",
            "session_media",
            "cancel",
            "park",
            "end_reasoning",
        ),
        *("get_output", "get_output_single"),
    }


def test_calls_that_set_up_a_context_are_found() -> None:
    assert {name for name, call in CALLS.items() if call.sets_up} == {
        *("set_input", "reset", "set_options")
    }


@pytest.mark.parametrize(
    ("row", "lacks"),
    [
        (Call(Map, Empty, right=None), "a route"),
        (Call(Map, Empty, right=None, route=Route.ALL), "a merged result"),
        (Call(Map, Empty, right=None, route=Route.NONE, merge=Merge.ANY), "a merged result"),
        (Call(ContextParams, Empty, right=Right.USE), "the use of its context"),
        (
            Call(ContextParams, Empty, right=None, context=ContextUse.WORK, starts=Starts.TURN),
            "an operation",
        ),
        (
            Call(Map, Empty, right=None, route=Route.NONE, model=ModelUse.LOADED),
            "a graph or context with its model",
        ),
    ],
)
def test_a_row_without_a_fact_is_refused(row: Call, lacks: str) -> None:
    with pytest.raises(TypeError, match=lacks):
        completed("new", row)


def test_a_row_without_a_right_cannot_be_written() -> None:
    with pytest.raises(TypeError, match="right"):
        Call(Map, Empty)  # type: ignore[call-arg]
