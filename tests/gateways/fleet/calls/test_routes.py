"""Every call has a route, and every handle in its messages is found."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from inferd.gateways.fleet.calls.routes import HANDLES, ROUTES, Route, route_of
from inferd.ipc.messages import CALLS

EXPECTED = {
    Route.LOAD: "load load_by_name load_by_name_with_config",
    Route.OPEN: "init_execution_context prompt_init init_execution_context_with_session_id",
    Route.GRAPH: "embed tokenize detokenize apply_template",
    Route.LEASES: "unload",
    Route.CONTEXT: "set_input compute compute_single get_output get_output_single fini_single"
    " finalize_execution_context close_execution_context prompt_compute run_inference stream chat"
    " answers resume park reset rewind fork_session save_state set_options parameters",
    Route.CANCEL: "cancel",
    Route.SESSION: "delete_session history update_session restore_session",
    Route.MODEL: "unload_model pin unpin swap add_adapter remove_adapter",
    Route.ALL: "models show sessions queue stats list_states list_deletions delete_state log_level"
    " drain",
    Route.ENTRY: "metrics",
    Route.CONNECTED: "init_backend deinit_backend",
    Route.NONE: "export_session import_session end_transfer read_copy store_copy exchange_served"
    " add_model export_model import_model end_model_transfer",
    Route.COPY: "copy_model",
}


def test_every_call_has_the_route_of_its_kind() -> None:
    expected = {name: route for route, names in EXPECTED.items() for name in names.split()}
    assert {name: found.route for name, found in ROUTES.items()} == expected
    assert set(expected) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_integers_that_are_not_handles_do_not_look_like_them(name: str) -> None:
    """A field is a handle by its name: a new one needs a name of `HANDLES`, or a rule here."""
    plain = {
        "index", "size_max", "n", "credit", "normalize", "turns", "tokens", "request", "fd",
        "ctx_size", "slots", "cached_tokens", "stored_tokens", "size", "size_bytes", "offset",
        "position", "waiting", "encoding", "target", "uid", "moved", "number",
            "prompt_tokens", "prompt_offset", "dormant_sessions", "dormant_sessions_max",
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
    found = {name: (r.in_result, r.in_events) for name, r in ROUTES.items() if r[1] or r[2]}
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


def test_calls_with_tensors_are_found() -> None:
    with_tensors = {name for name, found in ROUTES.items() if found.has_tensors}
    assert with_tensors == {"add_model", "load", "set_input", "compute", "run_inference"}


def test_a_call_of_a_newer_client_is_routed_by_its_fields() -> None:
    later = route_of("later", {"context", "more"})
    assert later is not None and later.route is Route.CONTEXT and later.in_result == HANDLES
    on_graph = route_of("later", {"graph"})
    assert on_graph is not None and on_graph.route is Route.GRAPH
    assert route_of("later", {"name"}) is None


def test_whole_turns_of_contexts_are_found() -> None:
    turns = {name for name, found in ROUTES.items() if found.has_turn}
    whole = "compute prompt_compute run_inference stream chat answers resume"
    assert turns == set(whole.split(" "))
