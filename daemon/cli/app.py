"""The application: its commands, and the one place where errors become sentences and statuses."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from ...backends.errors import InferdError
from .commands import LazyCommands
from .exit_codes import exit_code
from .help.epilog import EPILOG
from .help.shells import use_scripts
from .options import EXIT_INTERRUPTED, EXIT_READER_GONE, EXIT_REFUSED, JsonOutput, SocketPath
from .output import fail, write_json


class ErrorsAsSentences(LazyCommands):
    """Ends a failed command with one sentence, a hint and a documented exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except InferdError as exc:
            if ctx.meta.get("inferd.json"):
                write_json({"error": exc.to_wire()})
            fail(exc.message, exc.hint)
            raise typer.Exit(exit_code(exc)) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read has enough (`| head`). Python flushes stdout at its end: not into a pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_READER_GONE) from None
        except Exception as exc:  # the one broad place of this process
            if _is_typers(exc) or os.environ.get("INFERD_DEBUG"):
                raise
            fail(f"internal error: {type(exc).__name__}: {exc}", "INFERD_DEBUG=1 shows its place")
            raise typer.Exit(EXIT_REFUSED) from None


def _is_typers(error: Exception) -> bool:
    """Tell whether typer ends the process by this error: its exits, and errors of usage."""
    return isinstance(error, typer.Exit | typer.Abort) or hasattr(error, "exit_code")


app = typer.Typer(
    cls=ErrorsAsSentences,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


@app.callback(invoke_without_command=True)
def inferd(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show inferd's, the protocol's, llama.cpp's version.")
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Inferd runs GGUF language models for many local programs at once.

    Start the daemon with `inferd serve`, get a model with `inferd pull smollm2`, and ask it:
    `inferd run smollm2 "Say hello."`
    """
    if show_version:
        from .help import version

        version.show(socket, as_json)
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


use_scripts()
