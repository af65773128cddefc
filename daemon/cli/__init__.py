"""The command `inferd`: a client of the daemon, except for `serve`, `pull` and `rm`.

One module a group of commands. What is heavy (the client, rich, the daemon) is imported by the
command that uses it.
"""

from __future__ import annotations

import os
import sys

from .app import app

__all__ = ("app", "main")


def main() -> None:
    """Run the command line; ends the process with the command's exit status."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this: `>&-`
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115 - to the process's end
    for stream in (sys.stdout, sys.stderr):
        # A model may say what the terminal's encoding has no sign for.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="inferd")
