"""The errors of turns of wasi-nn, in the metadata of their contexts.

A guest or host of wasi-nn gets only the number of an error, and reads the rest at index 1.
"""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from typing import Any

from ...backends.errors import Cancelled, EndOfSequence, InferdError, SessionBusy
from ...ipc.server.request import Request
from ..core import Daemon
from .models.residency_requests import Call

WASI_TURNS = {"compute", "compute_single", "prompt_compute", "run_inference"}
OWN_TURNS = {"chat", "stream"}
"""Calls that a gateway or library may make in place of `compute`; then they have no input."""
NO_FAILURES = (EndOfSequence, Cancelled, SessionBusy)
"""The regular end, the end by a client, and a call beside the turn that the metadata describes."""


def with_failure(name: str, call: Call) -> Call:
    """Return *call*; if it is for a turn of wasi-nn and fails, its context keeps the error."""
    if name not in WASI_TURNS | OWN_TURNS:
        return call

    @wraps(call)
    async def run_with_failure(daemon: Daemon, request: Request) -> Any:
        try:
            return await call(daemon, request)
        except NO_FAILURES:
            raise
        except InferdError as exc:
            if name in WASI_TURNS or not _has_input(request):
                with suppress(InferdError):  # the call may have named no context, or a closed one
                    daemon.session(request).outputs.note_failure(exc)
            raise

    return run_with_failure


def _has_input(request: Request) -> bool:
    p = request.params
    return not (p.prompt is None and p.prompt_tokens is None and p.messages is None)
