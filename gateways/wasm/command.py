"""`inferd wasm`: WebAssembly guests on the command line."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ...backends.errors import ContextFull, EndOfSequence, InferdError, PromptTooLong, TooLarge
from ...cli.client import RETRIES, client_of
from ...cli.commands import optional_import
from ...cli.options import EXIT_BUSY, EXIT_INTERRUPTED, Label, PriorityOption, SocketPath
from ...cli.output import fail
from ..guests import ImageDirectory, guest_timeout
from ..guests.options import Allowed, Preloads, models_of
from .component import add_component_to_linker
from .dialects import Dialect
from .host_functions import add_to_linker

if TYPE_CHECKING:
    from .runner import Ending

ANSWERS = (EndOfSequence, ContextFull, PromptTooLong)
"""Errors that guests expect and handle. A `TooLarge` that names the needed buffer is one too."""

GuestFile = Annotated[
    Path,
    typer.Argument(
        metavar="GUEST.wasm",
        help="A core module with WASI preview 1, or a component with WASI 0.2.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS...", help="The guest's arguments; put -- before them."),
]
Directories = Annotated[
    list[str] | None,
    typer.Option(
        "--dir",
        metavar="GUEST_DIR[:HOST_DIR[:readonly]]",
        help="A directory that the guest may use; repeatable.",
    ),
]
Variables = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="An environment variable; repeatable."),
]
Seconds = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0.001, help="End the guest after this time."),
]
DialectName = Annotated[
    Dialect,
    typer.Option(
        metavar="|".join(get_args(Dialect)),
        help="The numbers of a core module's encodings and errors.",
    ),
]
UncheckedOutput = Annotated[
    bool,
    typer.Option(
        "--unchecked-output", help="For guests that pass 0 as the size of a larger buffer."
    ),
]
MemoryBytes = Annotated[
    int | None, typer.Option(metavar="BYTES", min=0, help="The guest's memory at most.")
]
Fuel = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="End the guest after about N instructions.")
]

wasm = typer.Typer(
    help="Run WebAssembly programs on the daemon's models (extra `wasm`).", no_args_is_help=True
)


@wasm.command()
def run(
    guest: GuestFile,
    arguments: Arguments = None,
    directories: Directories = None,
    environment: Variables = None,
    preloads: Preloads = None,
    allowed: Allowed = None,
    priority: PriorityOption = "normal",
    label: Label = "",
    timeout: Seconds = None,
    dialect: DialectName = "wasmedge",
    unchecked_output: UncheckedOutput = False,
    memory_bytes: MemoryBytes = None,
    fuel: Fuel = None,
    socket: SocketPath = None,
) -> None:
    """Run a WebAssembly program whose wasi-nn calls the daemon computes.

    The exit status is the guest's.
    """
    with optional_import("guests run in wasmtime", "wasm"):
        from .runner import Program, WasiNn, check_guest, run_program

    check_guest(guest)
    program = Program(
        path=guest,
        arguments=arguments or (),
        environment=[split_variable(text) for text in environment or ()],
        directories=[split_directory(text) for text in directories or ()],
        timeout_s=timeout,
        memory_bytes=memory_bytes,
        fuel=fuel,
    )
    with client_of(socket, retries=RETRIES, label=label) as client:
        settings: dict[str, Any] = {
            "connect": lambda: client_of(socket, retries=RETRIES, label=label),
            "preloads": models_of(preloads, allowed),
            "priority": priority,
            "timeout": timeout,
            "image_directories": [ImageDirectory(*d[:2]) for d in program.directories],
            "on_error": print_error,
        }
        own: dict[str, Any] = {"dialect": dialect, "unchecked_output": unchecked_output}
        wasi_nn = WasiNn(
            partial(add_to_linker, client=client, **settings, **own),
            partial(add_component_to_linker, client=client, **settings),
        )
        status = run_program(program, wasi_nn, lambda ending: end_process(ending, timeout))
    raise typer.Exit(status)


def split_variable(text: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--env {text!r} is not of the form NAME=VALUE")
    return name, value


def split_directory(text: str) -> tuple[str, str, bool]:
    """Return the guest's name of a directory, its path, and whether the guest may change it."""
    name, _, path = text.removesuffix(":readonly").partition(":")
    return name, path or name, not text.endswith(":readonly")


def print_error(call: str, error: InferdError) -> None:
    """Print the error of a guest's call, of which the guest gets only the number."""
    small_buffer = isinstance(error, TooLarge) and "needed" in error.data
    if not isinstance(error, ANSWERS) and not small_buffer:
        fail(f"{call}: {error.message}", error.hint)


def end_process(ending: Ending, timeout: float | None) -> None:
    """End this process, whose guest waits in a function of WASI for input or a clock."""
    if ending == "timeout" and timeout is not None:
        error = guest_timeout(timeout)
        fail(error.message, error.hint)
    os._exit(EXIT_BUSY if ending == "timeout" else EXIT_INTERRUPTED)
