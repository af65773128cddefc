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
    0: "done",
    EXIT_REFUSED: "refused or failed",
    EXIT_USAGE: "wrong usage or configuration",
    EXIT_NO_DAEMON: "no daemon answers",
    EXIT_BUSY: "busy or timed out: try again later",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_READER_CLOSED: "nobody reads the output",
}
ENVIRONMENT = {
    "INFERD_SOCKET": "the daemon's socket",
    "INFERD_CONFIG": "the configuration file",
    "INFERD_MODELS_DIR": "where models lie; the other settings in the same way",
    "NO_COLOR": "no colours",
    "INFERD_DEBUG=1": "show where an internal error comes from",
}
FILES = {
    "~/.config/inferd/config.toml": "the configuration of a user's own daemon",
    "/etc/inferd/config.toml": "that of the machine's, and of users who have none",
    "$XDG_RUNTIME_DIR/inferd/inferd.sock": "the socket of a user's own daemon",
    "/run/inferd/inferd.sock": "that of the machine's",
}
EPILOG = (
    f"Exit status: {'; '.join(f'{status} {means}' for status, means in STATUSES.items())}.\n\n"
    f"Environment: {', '.join(f'{name} ({is_for})' for name, is_for in ENVIRONMENT.items())}."
)
