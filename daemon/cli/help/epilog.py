"""Texts of the help and the manual pages that apply to all commands."""

from __future__ import annotations

from ..options import (
    EXIT_BUSY,
    EXIT_INTERRUPTED,
    EXIT_NO_DAEMON,
    EXIT_READER_CLOSED,
    EXIT_REFUSED,
    EXIT_USAGE,
)

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
FILES = {
    "~/.config/inferd/config.toml": "the configuration of a user's own daemon",
    "/etc/inferd/config.toml": "the same for the machine's daemon, and for users without a file",
    "$XDG_RUNTIME_DIR/inferd/inferd.sock": "the socket of a user's own daemon",
    "/run/inferd/inferd.sock": "the socket of the machine's daemon",
}
EPILOG = (
    f"Exit status: {'; '.join(f'{status} {means}' for status, means in STATUSES.items())}.\n\n"
    f"Environment: {', '.join(f'{name} ({is_for})' for name, is_for in ENVIRONMENT.items())}."
)
