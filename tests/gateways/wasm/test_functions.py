"""Each function that guests import has WasmEdge's type and checks its arguments, and each error has
the numbers of the dialects.
"""

from __future__ import annotations

from contextlib import closing

import pytest
from wasmtime import Engine, Linker, Module, Store

from inferd import Client
from inferd.backends import errors
from inferd.gateways.wasm import add_to_linker
from inferd.gateways.wasm.dialects import component_code, error_number
from tests.gateways.wasm.driver import OUTSIDE, Driver

CONFIG = ""
FUNCTIONS = {
    "load": (OUTSIDE, 1, 6, 3, 1024),
    "load_by_name": (OUTSIDE, 4, 1024),
    "load_by_name_with_config": (OUTSIDE, 4, 1024, 2, 1024),
    "init_execution_context": (OUTSIDE, 1024),
    "set_input": (OUTSIDE, 0, 1024),
    "get_output": (OUTSIDE, 0, 1024, 16, 1024),
    "get_output_single": (OUTSIDE, 0, 1024, 16, 1024),
    "compute": (OUTSIDE,),
    "compute_single": (OUTSIDE,),
    "fini_single": (OUTSIDE,),
    "unload": (OUTSIDE,),
    "finalize_execution_context": (OUTSIDE,),
}
"""By name, arguments with a wrong pointer or handle."""
ERRORS: dict[str, tuple[errors.InferdError, int, int, str]] = {
    "invalid_argument": (errors.InvalidArgument(""), 1, 1, "invalid-argument"),
    "invalid_encoding": (errors.InvalidEncoding(""), 2, 2, "invalid-encoding"),
    "missing_memory": (errors.OutOfMemory(""), 3, 3, "runtime-error"),
    "busy": (errors.Busy(""), 4, 4, "runtime-error"),
    "runtime_error": (errors.BackendError(""), 5, 5, "runtime-error"),
    "unsupported_operation": (errors.UnsupportedOperation(""), 6, 6, "unsupported-operation"),
    "too_large": (errors.TooLarge(""), 7, 7, "too-large"),
    "not_found": (errors.NotFound(""), 8, 8, "not-found"),
    "timeout": (errors.Timeout(""), 5, 5, "timeout"),
    "security": (errors.PermissionDenied(""), 6, 6, "security"),
    "end_of_sequence": (errors.EndOfSequence(""), 100, 100, "runtime-error"),
    "context_full": (errors.ContextFull(""), 101, 7, "too-large"),
    "prompt_too_long": (errors.PromptTooLong(""), 102, 7, "too-large"),
    "model_not_found": (errors.ModelNotFound(""), 103, 8, "not-found"),
}
"""By theirs, ours with its number in WasmEdge and WAMR, in witx, and its code in WIT."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name: str, client: Client) -> None:
    arguments = FUNCTIONS[name]
    engine = Engine()
    linker = Linker(engine)
    kind = f"(param {' '.join(['i32'] * len(arguments))}) (result i32)"
    alone = f'(module (import "wasi_ephemeral_nn" "{name}" (func {kind})))'
    with closing(add_to_linker(linker, client)):
        linker.instantiate(Store(engine), Module(engine, alone))
    with Driver(client) as guest:
        assert guest.call(name, *arguments) == 1


@pytest.mark.parametrize("name", ERRORS)
def test_an_error(name: str) -> None:
    error, wasmedge, witx, code = ERRORS[name]
    assert error_number("wasmedge", error) == error_number("wamr", error) == wasmedge
    assert error_number("witx", error) == witx
    assert component_code(error) == code
