"""The command `inferd`: a client of the daemon, except for `start`, `serve`, `pull` and `rm`.

Each module holds a group of commands. A command itself imports its heavy dependencies: the client,
rich, the daemon.
"""

from __future__ import annotations

import os
import sys

from .app import app

__all__ = ("app", "main")


def main() -> None:
    """Run the command line; exit with the command's status."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process: `>&-`
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115 - to the process's end
    for stream in (sys.stdout, sys.stderr):
        # A model may write characters that the terminal's encoding lacks.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="inferd")
