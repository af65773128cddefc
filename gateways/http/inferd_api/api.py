"""The endpoints of the daemon's own paths. Their errors have OpenAI's shape."""

from __future__ import annotations

from functools import partial

from ..callers import RequestKind
from ..exchange import Endpoint
from ..openai.forms import ERROR_SCHEMA, error_body
from .fields import (
    CANCEL,
    CREATE,
    DELETE,
    END_REASONING,
    EVENTS,
    FORK,
    LIST,
    LOAD,
    RESTORE,
    REWIND,
    SWAP,
    TURN_EVENTS,
    UNLOAD,
    UPDATE,
    USAGE,
)
from .models import answer_model, answer_models, load_model, swap_model, unload_model
from .monitoring import (
    answer_caller,
    answer_events,
    answer_queue,
    answer_statistics,
    answer_usage,
)
from .sessions import (
    answer_deletions,
    answer_media,
    answer_session,
    answer_sessions,
    cancel_session,
    clear_deletions,
    create_session,
    delete_session,
    end_session_reasoning,
    fork_session,
    restore_session,
    rewind_session,
    update_session,
)
from .turn_events import answer_turn_events

_read = partial(Endpoint, kind=RequestKind.READ)
_PATH = "/v1/inferd"
_SESSION = f"{_PATH}/sessions/{{session:path}}"


class InferdApi:
    """The daemon's own paths."""

    title = "inferd"
    prefixes = (f"{_PATH}/",)
    tables = (
        LIST,
        CREATE,
        UPDATE,
        DELETE,
        RESTORE,
        FORK,
        REWIND,
        CANCEL,
        END_REASONING,
        TURN_EVENTS,
        LOAD,
        UNLOAD,
        SWAP,
        EVENTS,
        USAGE,
    )
    endpoints = (
        _read(method="GET", path=f"{_PATH}/caller", answer=answer_caller),
        _read(method="GET", path=f"{_PATH}/sessions", answer=answer_sessions),
        Endpoint(method="POST", path=f"{_PATH}/sessions", answer=create_session),
        Endpoint(method="POST", path=f"{_SESSION}/fork", answer=fork_session),
        Endpoint(method="POST", path=f"{_SESSION}/rewind", answer=rewind_session),
        _read(method="POST", path=f"{_SESSION}/restore", answer=restore_session),
        _read(method="POST", path=f"{_SESSION}/cancel", answer=cancel_session),
        _read(method="POST", path=f"{_SESSION}/end-reasoning", answer=end_session_reasoning),
        Endpoint(method="GET", path=f"{_SESSION}/events", answer=answer_turn_events),
        _read(method="GET", path=f"{_SESSION}/media/{{sha256}}", answer=answer_media),
        _read(method="GET", path=_SESSION, answer=answer_session),
        _read(method="DELETE", path=_SESSION, answer=delete_session),
        _read(method="PATCH", path=_SESSION, answer=update_session),
        _read(method="GET", path=f"{_PATH}/deletions", answer=answer_deletions),
        _read(method="DELETE", path=f"{_PATH}/deletions", answer=clear_deletions),
        _read(method="GET", path=f"{_PATH}/models", answer=answer_models),
        _read(method="GET", path=f"{_PATH}/models/{{model:path}}", answer=answer_model),
        Endpoint(method="POST", path=f"{_PATH}/models/load", answer=load_model),
        Endpoint(method="POST", path=f"{_PATH}/models/unload", answer=unload_model),
        Endpoint(method="POST", path=f"{_PATH}/models/swap", answer=swap_model),
        _read(method="GET", path=f"{_PATH}/queue", answer=answer_queue),
        _read(method="GET", path=f"{_PATH}/statistics", answer=answer_statistics),
        _read(method="GET", path=f"{_PATH}/usage", answer=answer_usage),
        Endpoint(
            method="GET",
            path=f"{_PATH}/events",
            answer=answer_events,
            kind=RequestKind.EVENTS,
        ),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


INFERD = InferdApi()
