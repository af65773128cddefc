"""The application: its commands, and the conversion of errors to messages and exit statuses."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from ..backends.errors import Busy, ConnectionLost, InferdError, InvalidArgument, Timeout
from .commands import LazyCommands
from .completion import install_scripts
from .options import (
    EXIT_BUSY,
    EXIT_INTERRUPTED,
    EXIT_NO_DAEMON,
    EXIT_READER_CLOSED,
    EXIT_REFUSED,
    EXIT_USAGE,
    JsonOutput,
    SocketPath,
)
from .output import OutputFailed, fail, write_json

STATUSES = {
    0: "success",
    EXIT_REFUSED: "the request was refused or failed",
    EXIT_USAGE: "wrong usage or configuration",
    EXIT_NO_DAEMON: "no daemon answers",
    EXIT_BUSY: "the daemon is busy or a timeout expired: try again later",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_READER_CLOSED: "the reader of the output closed the pipe",
}
ENVIRONMENT = {
    "INFERD_SOCKET": "the daemon's socket",
    "INFERD_CONFIG": "the configuration file",
    "INFERD_MODELS_DIR": "the models directory; other settings likewise",
    "NO_COLOR": "no colors",
    "INFERD_DEBUG=1": "show the traceback of an internal error",
}


def exit_code(error: InferdError) -> int:
    """Return the exit status of a command that fails with *error*."""
    if isinstance(error, ConnectionLost):
        return EXIT_NO_DAEMON
    if isinstance(error, Busy | Timeout):
        return EXIT_BUSY
    if isinstance(error, InvalidArgument):
        from ..daemon.config.sources import ConfigError

        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_REFUSED
    return EXIT_REFUSED


class ErrorsAsSentences(LazyCommands):
    """A group whose failed commands end with one sentence, a hint and a documented exit status."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments of the group."""
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except InferdError as exc:
            fail(exc.message_for_people, exc.hint_for_people)
            if ctx.meta.get("inferd.json"):
                write_json({"error": exc.to_wire()})
            raise typer.Exit(exit_code(exc)) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except OutputFailed:
            raise
        except Exception as exc:  # the only broad handler of this process
            by_typer = isinstance(exc, typer.Exit | typer.Abort) or hasattr(exc, "exit_code")
            if by_typer or os.environ.get("INFERD_DEBUG"):
                raise
            fail(
                f"internal error: {type(exc).__name__}: {exc}", "INFERD_DEBUG=1 shows its traceback"
            )
            raise typer.Exit(EXIT_REFUSED) from None


app = typer.Typer(
    cls=ErrorsAsSentences,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        f"Exit status: {'; '.join(f'{status} {means}' for status, means in STATUSES.items())}.\n\n"
        f"Environment: {', '.join(f'{name} ({is_for})' for name, is_for in ENVIRONMENT.items())}."
    ),
)


@app.callback(invoke_without_command=True)
def inferd(
    ctx: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the versions of inferd, its protocol and llama.cpp."),
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Inferd runs GGUF language models for many local programs at once.

    Download a model with `inferd pull smollm2`, start the daemon with `inferd start`, and prompt
    the model: `inferd run smollm2 "Say hello."`
    """
    if show_version:
        from .version import show_versions

        show_versions(socket, as_json)
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


install_scripts()
