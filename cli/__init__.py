"""The command `inferd`: a client of the daemon, except for `start`, `serve`, `pull` and `rm`.

Each module holds a group of commands. A command itself imports its heavy dependencies: the client,
rich, the daemon.
"""

from __future__ import annotations

import os
import sys

from .app import app
from .options import EXIT_READER_CLOSED, EXIT_REFUSED, EXIT_USAGE
from .output import OutputFailed, checked_output, discard_messages, discard_output, fail

__all__ = ("app", "main")


def main() -> None:
    """Run the command line; exit with the command's status."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process: `>&-`
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115 - to the process's end
    # A model may write characters that the terminal's encoding lacks.
    sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.stdout = checked_output(sys.stdout)
    sys.__dict__["__stdout__"] = sys.stdout  # textual asks it for the size of the terminal
    try:
        try:
            app(prog_name="inferd")
        finally:
            sys.stdout.flush()
    except OutputFailed as exc:
        discard_output()
        if exc.reader_closed:  # as `| head` does
            sys.exit(EXIT_READER_CLOSED)
        fail(f"standard output cannot be written: {exc}", "free space there, or write it elsewhere")
        sys.exit(EXIT_REFUSED)
    except OSError:  # click could not write the error of a wrong usage to standard error
        if os.environ.get("INFERD_DEBUG"):
            raise
        discard_messages()
        sys.exit(EXIT_USAGE)
