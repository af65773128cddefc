"""The loggers and their levels: the setting `log-levels`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...backends.library_log import LEVELS
from .declaration import Form, Schema

LOGGERS = {
    "daemon": "the daemon itself: start and end, configuration, models, memory, parts",
    "ipc": "connections and calls",
    "sessions": "conversations, and the journal of those with an id",
    "scheduler": "tasks in the engines: queued, admitted, parked, finished, failed",
    "backends": "what runs a model: steps that failed",
    "llama": "llama.cpp's own lines, and what a worker process says as it dies",
}
"""Names of the loggers, and the events of each."""


def parse_log_levels(value: Any) -> dict[str, str]:
    """Return levels by logger, from a table or a text such as `scheduler=debug,llama=error`.

    :raises ValueError: the logger or the level is unknown.
    """
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        value = {logger.strip(): level.strip() for logger, _, level in pairs}
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a table of levels, or a text such as llama=debug")
    for logger, level in value.items():
        if logger not in LOGGERS:
            raise ValueError(f"{logger!r} is not a logger: there are {', '.join(LOGGERS)}")
        if not isinstance(level, str) or level not in LEVELS:
            raise ValueError(f"{logger}: {level!r} is not one of {', '.join(LEVELS)}")
    return dict(value)


def _schema() -> Schema:
    level: Schema = {"enum": list(LEVELS)}
    loggers: Schema = {
        "type": "object",
        "properties": {logger: level | {"description": about} for logger, about in LOGGERS.items()},
        "additionalProperties": False,
    }
    pair = f"\\s*({'|'.join(LOGGERS)})\\s*=\\s*({'|'.join(LEVELS)})\\s*"
    return {"anyOf": [loggers, {"type": "string", "pattern": f"^({pair}(,{pair})*)?$"}]}


LOG_LEVELS = Form(parse_log_levels, _schema())
